"""State that is not one entry per token, yet can be taken back: a slot of a recurrent layer.

Such a state after a token says nothing about the one before it.  So a slot remembers the state at a few positions
and what the tokens since the earliest of them put in; any position in between is the state before it, and those
inputs read again.  Nothing happens when a row is taken back: that is a shorter length, noticed at the next pass.
Letters: n tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from blockdraft.cache import KVCache, LayerShape, Layout

State = tuple[Tensor, ...]
Inputs = tuple[Tensor, ...]  # [n, ...] each
# (state, inputs of n tokens) -> (outputs [n, ...], state after them)
Scan = Callable[[State, Inputs], tuple[Tensor, State]]
# A row can be taken back to where any pass began that read up to WIDEST tokens, and REWIND tokens further.
REWIND, WIDEST = 64, 256


class Trail:
    """One layer's state in one slot, at every position from `oldest` on."""

    def __init__(self, empty: State) -> None:
        self.empty = empty
        self.snapshots: list[tuple[int, State]] = [(0, empty)]  # ascending
        self.inputs: Inputs = ()  # of the tokens from `oldest` on

    @property
    def oldest(self) -> int:
        """The first position that the row can be taken back to, besides 0."""
        return self.snapshots[0][0]

    def read(self, start: int, inputs: Inputs, scan: Scan) -> Tensor:
        """Outputs of n tokens from position `start` on; what was read beyond it before is forgotten."""
        outputs = []
        for pieces in zip(*(part.split(WIDEST) for part in inputs), strict=True):
            state = self._at(start, scan)
            output, final = scan(state, pieces)
            self._keep(start, state, start + len(output), final, pieces)
            start += len(output)
            outputs.append(output)
        return torch.cat(outputs)

    def _at(self, position: int, scan: Scan) -> State:
        if position == 0:
            self.snapshots, self.inputs = [(0, self.empty)], ()
        while self.snapshots[-1][0] > position:
            self.snapshots.pop()
        at, state = self.snapshots[-1]
        self.inputs = tuple(part[: position - self.oldest] for part in self.inputs)
        if at < position:
            _, state = scan(state, tuple(part[at - self.oldest :] for part in self.inputs))
        return state

    def _keep(self, start: int, state: State, end: int, final: State, inputs: Inputs) -> None:
        before = self.oldest
        older = [snapshot for snapshot in self.snapshots if snapshot[0] < start]
        while len(older) > 1 and older[-1][0] - older[-2][0] < REWIND:
            older.pop()
        snapshots = [*older, (start, state), (end, final)]
        while snapshots[1][0] <= start - REWIND:
            snapshots.pop(0)
        known = tuple(map(torch.cat, zip(self.inputs, inputs, strict=True))) if self.inputs else inputs
        self.inputs = tuple(part[snapshots[0][0] - before :] for part in known)
        self.snapshots = snapshots


class RecurrentCache(KVCache):
    """Keys and values of the layers that attend, and a `Trail` for each slot of those that do not."""

    def __init__(self, layout: Layout, shapes: Mapping[int, LayerShape], empty: Mapping[int, State]) -> None:
        super().__init__(*layout, shapes=shapes)
        self.trails = {layer: [Trail(state) for _ in range(self.slots)] for layer, state in empty.items()}

    @property
    def is_positional(self) -> bool:
        return False

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Take each row back to `lengths[b]` committed tokens.  ValueError: further than its state is remembered."""
        for row, length in zip(rows, lengths, strict=True):
            oldest = max(trails[row].oldest for trails in self.trails.values())
            if 0 < length < min(oldest, self.lengths[row]):
                raise ValueError(
                    f"a row of {self.lengths[row]} tokens cannot be taken back to {length}: "
                    f"the state of a recurrent layer is remembered from {oldest} on; draft fewer tokens at once"
                )
        super().truncate(rows, lengths)
