"""A tiny run (model folder, answers, recipe), shared by the training tests and the processes that they kill."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from models import save_tiny_target
from rich.console import Console

from blockdraft.config import TrainConfig
from blockdraft.targets.hf import HFTarget
from blockdraft.targets.resolve import load_target, load_tokenizer
from blockdraft.train.loop import Evaluate, TrainResult
from blockdraft.train.run import train_drafter

QUIET = Console(quiet=True)


def write_answers(path: Path, count: int = 12) -> Path:
    """Pairs with answers of different lengths, some of them exact ids."""
    rows: list[dict[str, Any]] = []
    for number in range(count):
        text = "".join(f"{number} and {step}; " for step in range(2 + number % 5))
        rows.append({"id": str(number), "prompt": f"count {number}", "response": text})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe(folder: Path, **changes: Any) -> TrainConfig:
    """A recipe for `folder/target` and `folder/answers.jsonl`; made if they are not there."""
    if not (folder / "target").exists():
        save_tiny_target(folder / "target")
        write_answers(folder / "answers.jsonl")
    values: dict[str, Any] = {
        "target": str(folder / "target"),
        "steps": 9,
        "batch_size": 2,
        "anchors": 5,
        "data": {"files": [str(folder / "answers.jsonl")], "held_out": 0.2, "min_answer_tokens": 4},
        "features": {"teacher_top_k": 4, "batch_tokens": 128},
        "drafter": {"num_layers": 2, "num_taps": 1, "block_size": 4, "draft_vocab_size": 40, "markov_rank": 4},
        "loss": {"soft_weight": 0.3},
        "optim": {"lr": 3e-3, "ema": 0.9},
        "checkpoint_steps": 4,
        "eval_steps": 3,
        "log_steps": 3,
    }
    for key, value in changes.items():
        values[key] = {**values[key], **value} if isinstance(value, dict) else value
    return TrainConfig.parse(values)


def run(
    config: TrainConfig,
    folder: Path,
    evaluate: Evaluate | None = None,
    resume: bool = True,
    target: HFTarget | None = None,
) -> TrainResult:
    """Train as the command line does."""
    target = load_target(config.target) if target is None else target
    return train_drafter(config, target, load_tokenizer(config.target), folder, "test", evaluate, resume, QUIET)


if __name__ == "__main__":  # folder, run, steps: what the tests kill
    import torch

    torch.set_num_threads(1)
    base, name, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    run(recipe(base, steps=steps), base / name)
