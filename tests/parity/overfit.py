"""A plain DFlash drafter for the default target, which knows a few answers nearly by heart.

The shipped drafter drafts from the anchor's row, has a Markov head and a reduced one, which the authors' layout cannot
say.  A random one of which nothing is accepted would hide most bugs.  So one is trained, as `blockdraft train` does,
for about a minute, on our own greedy answers to the very questions that are compared.  Its speed means nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from blockdraft.config import TrainConfig
from blockdraft.targets.pretrained import PretrainedTarget
from blockdraft.train.chats import Tokenizer
from blockdraft.train.run import train_drafter

RECIPE = {
    "steps": 16,
    "anchors": 8,
    "drafter": {"num_layers": 2, "num_taps": 3, "block_size": 8, "fusion_init": "whitened"},
    "loss": {"gamma": 4.0},
    "optim": {"name": "muon", "lr": 1e-2, "warmup_ratio": 0.1},
    "eval_prompts": 0,
}


def overfit(
    folder: Path, target: PretrainedTarget, tokenizer: Tokenizer, questions: list[str], answers: list[list[int]]
) -> Path:
    """Train in `folder`; the drafter's own folder."""
    folder.mkdir(parents=True)
    rows = [{"prompt": question, "response_ids": answer} for question, answer in zip(questions, answers, strict=True)]
    lines = folder / "answers.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"files": [str(lines)], "held_out": 0.0, "min_answer_tokens": 1}
    config = TrainConfig.parse({**RECIPE, "target": target.info.name, "batch_size": len(rows), "data": data})
    result = train_drafter(config, target, tokenizer, folder / "run", "parity", None, False, Console(stderr=True))
    assert result.finished, "interrupted"
    return folder / "run" / "last"
