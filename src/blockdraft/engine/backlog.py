"""What has been committed and the drafter has not been shown yet.

A drafter that is not asked need not know what was said.  What rounds commit waits here, by slot, and is shown in one
go when the drafter is next asked: one pass over many tokens costs less than many over one.
Letters: B rows, S tokens, T taps, D hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

LIMIT = 64  # tokens of a row that may wait; their taps take memory


@dataclass(frozen=True)
class Shown:
    """Tokens ids [B, S] of some rows and their taps [B, S, T, D] (None: no taps), counts[b] of each row's valid."""

    rows: list[int]
    ids: Tensor
    taps: Tensor | None
    counts: list[int]


@dataclass
class Backlog:
    """Entries (position, ids [S], taps [S, T, D]) of each slot, in order and without a gap."""

    entries: dict[int, list[tuple[int, Tensor, Tensor | None]]] = field(default_factory=dict)

    def add(
        self, rows: Sequence[int], starts: Sequence[int], ids: Tensor, taps: Tensor | None, counts: Sequence[int]
    ) -> None:
        """Keep the first counts[b] of ids [B, S], which stand from starts[b] on, and their taps [B, S, T, D].

        What was kept from there on is replaced: it is left from a round that was interrupted and done again.
        """
        for b, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
            kept = [entry for entry in self.entries.get(row, []) if entry[0] < start]
            self.entries[row] = [*kept, (start, ids[b, :count], None if taps is None else taps[b, :count])]

    def forget(self, row: int) -> None:
        """Drop what waits in a slot."""
        self.entries.pop(row, None)

    def full(self, rows: Sequence[int]) -> list[int]:
        """Those of some rows that must not wait longer."""
        return [row for row in rows if sum(len(ids) for _, ids, _ in self.entries.get(row, [])) >= LIMIT]

    def peek(self, rows: Sequence[int]) -> Shown | None:
        """All that waits in some slots, one row of tokens each; None: nothing does."""
        waiting = {row: self.entries[row] for row in rows if self.entries.get(row)}
        if not waiting:
            return None
        ids = [torch.cat([ids for _, ids, _ in entries]) for entries in waiting.values()]
        taps = [[taps for *_, taps in entries if taps is not None] for entries in waiting.values()]
        padded = pad_sequence([torch.cat(row) for row in taps], batch_first=True) if all(taps) else None
        return Shown(list(waiting), pad_sequence(ids, batch_first=True), padded, [len(row) for row in ids])
