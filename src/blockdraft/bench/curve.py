"""The curve of a training run, drawn from its log.

`python -m blockdraft.bench.curve RUN/log.jsonl curve.png` needs the `bench` extra.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def read_log(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The training rows and the evaluation rows of a run's log.  Raises ValueError for a line that is not one."""
    training: list[dict[str, Any]] = []
    evaluations: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            (evaluations if "eval" in row else training).append({"step": row["step"], **row})
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f"{path}:{number}: not a line of a training log") from None
    if not training:
        raise ValueError(f"{path}: no training step in it")
    return training, evaluations


def draw(log: Path, output: Path) -> None:
    """Acceptance length and loss over steps, as an image.  ImportError names the extra that is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("drawing needs matplotlib: pip install 'blockdraft[bench]'") from None
    training, evaluations = read_log(log)
    steps = [row["step"] for row in training]
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(steps, [row["tau_chain"] for row in training], label="at the anchors of a step", linewidth=0.8)
    if evaluations:
        measured = [row["eval"]["tau"] for row in evaluations]
        left.plot([row["step"] for row in evaluations], measured, "o-", label="generating, held-out prompts")
    left.set(xlabel="step", ylabel="tau, tokens per verify pass", title="acceptance length")
    left.legend()
    right.plot(steps, [row["loss"] for row in training], linewidth=0.8)
    right.set(xlabel="step", ylabel="nats", title="loss", yscale="log")
    figure.savefig(output, dpi=150)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
