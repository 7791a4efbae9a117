"""What has been committed and the drafter has not been shown yet.

A drafter that is not asked need not know what was said.  Prompts and what rounds commit wait here, by slot, and are
shown when the drafter is next asked: one pass over many tokens costs less than many over one, and what nobody asks
for costs nothing.
Letters: B rows, S tokens, T taps, D hidden width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

LIMIT = 2**28  # bytes of taps that may wait, of all rows together
PIECE = 128  # tokens of a row that are shown at once

Entry = tuple[int, Tensor, Tensor | None]  # position of the first token, ids [S], taps [S, T, D]


@dataclass(frozen=True)
class Shown:
    """Tokens ids [B, S] of some rows and their taps [B, S, T, D] (None: no taps), counts[b] of each row's valid."""

    rows: list[int]
    ids: Tensor
    taps: Tensor | None
    counts: list[int]


@dataclass
class Backlog:
    """Entries of each slot, in order and without a gap; how many tokens they are, and the bytes of all taps."""

    entries: dict[int, deque[Entry]] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    size: int = 0

    def add(
        self, rows: Sequence[int], starts: Sequence[int], ids: Tensor, taps: Tensor | None, counts: Sequence[int]
    ) -> None:
        """Keep the first counts[b] of ids [B, S], which stand from starts[b] on, and their taps [B, S, T, D].

        What was kept from there on is replaced: it is left from a round that was interrupted and done again.
        """
        for b, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
            queue = self.entries.setdefault(row, deque())
            while queue and queue[-1][0] >= start:
                self._count(row, queue.pop(), -1)
            kept = None if taps is None else taps[b, :count]
            if kept is not None and count < ids.shape[1]:
                kept = kept.clone()  # a part would keep the memory of the whole
            queue.append((start, ids[b, :count], kept))
            self._count(row, queue[-1], 1)

    def drop(self, row: int, count: int) -> None:
        """The first so many tokens of a slot wait no longer."""
        queue = self.entries.get(row, deque())
        while count > 0:
            start, ids, taps = entry = queue.popleft()
            self._count(row, entry, -1)
            if len(ids) > count:
                rest = start + count, ids[count:], None if taps is None else taps[count:]
                queue.appendleft(rest)
                self._count(row, rest, 1)
            count -= len(ids)

    def forget(self, row: int) -> None:
        """Drop what waits in a slot."""
        self.drop(row, self.waiting.get(row, 0))

    @property
    def full(self) -> bool:
        """Whether it must not wait longer."""
        return self.size > LIMIT

    def peek(self, rows: Iterable[int]) -> Shown | None:
        """What waits in some slots, one row of up to `PIECE` tokens each; None: nothing does."""
        waiting = {row: self._first(row) for row in rows if self.waiting.get(row)}
        if not waiting:
            return None
        ids = [torch.cat([ids for _, ids, _ in entries])[:PIECE] for entries in waiting.values()]
        taps = [[taps for *_, taps in entries if taps is not None] for entries in waiting.values()]
        padded = pad_sequence([torch.cat(row)[:PIECE] for row in taps], batch_first=True) if all(taps) else None
        return Shown(list(waiting), pad_sequence(ids, batch_first=True), padded, [len(row) for row in ids])

    def _first(self, row: int) -> list[Entry]:
        """Entries that have the first tokens of a slot, as many as are shown at once."""
        found, tokens = [], 0
        for entry in self.entries[row]:
            if tokens >= PIECE:
                break
            found.append(entry)
            tokens += len(entry[1])
        return found

    def _count(self, row: int, entry: Entry, sign: int) -> None:
        _, ids, taps = entry
        self.waiting[row] = self.waiting.get(row, 0) + sign * len(ids)
        if taps is not None:
            self.size += sign * taps.nbytes
