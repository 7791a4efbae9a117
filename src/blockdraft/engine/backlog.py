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

Entry = tuple[int, list[int], Tensor | None]  # position of the first token, tokens [S], taps [S, T, D]


@dataclass(frozen=True)
class Shown:
    """Tokens ids [B, S], on the host, and taps [B, S, T, D] (None: no taps) of some rows, counts[b] of each valid."""

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
    _token: int = 0  # bytes of the taps of one

    def add(self, rows: Sequence[int], starts: Sequence[int], said: Sequence[list[int]], taps: Tensor | None) -> None:
        """Keep tokens said[b], which stand from starts[b] on, and the first so many of their taps [B, S, T, D].

        What was kept from there on is replaced: it is left from a round that was interrupted and done again.
        """
        each: Sequence[Tensor | None] = [None] * len(rows)
        if taps is not None:
            each, self._token = taps.unbind(0), taps[0, 0].nbytes
        for row, start, tokens, kept in zip(rows, starts, said, each, strict=True):
            queue = self.entries.setdefault(row, deque())
            while queue and queue[-1][0] >= start:
                self._count(row, -len(queue.pop()[1]))
            if kept is not None and len(kept) > len(tokens):
                kept = kept[: len(tokens)].clone()  # a part would keep the memory of the whole
            queue.append((start, tokens, kept))
            self._count(row, len(tokens))

    def drop(self, row: int, count: int) -> None:
        """The first so many tokens of a slot wait no longer."""
        if count == 0:
            return
        self._count(row, -count)
        queue = self.entries[row]
        while count > 0:
            start, tokens, taps = queue.popleft()
            if len(tokens) > count:
                queue.appendleft((start + count, tokens[count:], None if taps is None else taps[count:]))
            count -= len(tokens)

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
        ids = [torch.tensor([token for _, tokens, _ in row for token in tokens][:PIECE]) for row in waiting.values()]
        taps = [[taps for *_, taps in row if taps is not None] for row in waiting.values()]
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

    def _count(self, row: int, tokens: int) -> None:
        self.waiting[row] = self.waiting.get(row, 0) + tokens
        self.size += tokens * self._token
