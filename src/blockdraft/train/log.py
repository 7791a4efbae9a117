"""What a run writes down: a JSON line every few steps, and TensorBoard if asked for.

A log that is resumed is first cut back to the checkpoint's step, so no step is told twice.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blockdraft.config import ConfigError
from blockdraft.text import write_whole
from blockdraft.train.loss import BlockLoss


@dataclass
class Meter:
    """Sums since the last line of the log."""

    steps: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    correct: list[int] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    accepted: float = 0.0
    blocks: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, loss: BlockLoss, grad_norm: float, tokens: int, seconds: float) -> None:
        """Count one step."""
        correct, count = loss.correct.tolist(), loss.count.tolist()
        self.steps += 1
        self.loss += float(loss.loss.detach())
        self.grad_norm += grad_norm
        self.correct = [a + b for a, b in zip(self.correct or [0] * len(correct), correct, strict=True)]
        self.count = [a + b for a, b in zip(self.count or [0] * len(count), count, strict=True)]
        self.accepted += loss.accepted
        self.blocks += loss.blocks
        self.tokens += tokens
        self.seconds += seconds

    def row(self) -> dict[str, Any]:
        """Means and rates; `tau_chain` is what an arg-max chain would have had at the training anchors."""
        pairs = zip(self.correct, self.count, strict=True)
        return {
            "loss": round(self.loss / self.steps, 5),
            "grad_norm": round(self.grad_norm / self.steps, 4),
            "tau_chain": round(1 + self.accepted / max(self.blocks, 1), 4),
            "accuracy": [round(correct / max(count, 1), 4) for correct, count in pairs],
            "blocks_per_second": round(self.blocks / max(self.seconds, 1e-9), 1),
            "tokens_per_second": round(self.tokens / max(self.seconds, 1e-9), 1),
        }

    def state(self) -> dict[str, Any]:
        """For the checkpoint: `Meter(**state)` goes on."""
        return asdict(self)


class Log:
    """`folder/log.jsonl`, cut back to `step`, and TensorBoard events beside it.

    ConfigError: TensorBoard is asked for and not installed.
    """

    def __init__(self, folder: Path, step: int, tensorboard: bool) -> None:
        self.path = folder / "log.jsonl"
        self._board: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ConfigError("tensorboard=true needs the extra: pip install 'blockdraft[train-logging]'") from None
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        _cut(self.path, step)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """One line, on disk when this returns; row has a 'step'."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._board is not None:
            for key, value in row.items():
                if isinstance(value, int | float) and key != "step":
                    self._board.add_scalar(key, value, row["step"])

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _cut(path: Path, step: int) -> None:
    """Drop the lines after `step`, and a last line that was not finished."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row["step"] <= step:
            kept.append(line + "\n")
    write_whole(path, "".join(kept))
