"""Keys and values of committed tokens, in slots with lengths of their own.

Slot s of a row is absolute position s, so rows never share a length and nothing is ever padded to
another row.  Rolling back is a change of one integer: what lies behind a row's length is dead.
Letters: B rows, Q new tokens, G key/value heads, E head width (F of a value, where it is another), S slots read back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# Keys are read back in whole multiples of this many slots.  A product whose shape does not change with
# every token gives the same bits whether a token is decoded alone or verified among drafts.
READ_MULTIPLE = 64
LayerShape = tuple[int, int, int]  # G, E, F
# Layers, slots, capacity, G, E, and where and in what precision: what every cache is made from.
Layout = tuple[int, int, int, int, int, torch.dtype, torch.device]


class KVCache:
    """`keys[layer]` [slots, G, room, E], `values[layer]` [slots, G, room, F]; `lengths[slot]`: committed tokens.

    `room` is `capacity` rounded up to `READ_MULTIPLE`.  `shapes` says (G, E, F) of each layer that keeps anything;
    None: all of them, alike.  The memory starts as zeros, because masked slots still enter a product and must be
    finite.
    """

    def __init__(
        self,
        num_layers: int,
        slots: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        shapes: Mapping[int, LayerShape] | None = None,
    ) -> None:
        self.slots, self.capacity = slots, capacity
        if shapes is None:
            shapes = dict.fromkeys(range(num_layers), (num_kv_heads, head_dim, head_dim))
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for layer in range(num_layers):
            heads, *widths = shapes.get(layer, (0, 0, 0))
            for memory, width in zip((self.keys, self.values), widths, strict=True):
                memory.append(torch.zeros(slots, heads, _round_up(capacity), width, dtype=dtype, device=device))
        self.lengths = [0] * slots

    @property
    def is_positional(self) -> bool:
        """Whether a row's state is what its slots hold, so that any length may be made up for it."""
        return True

    def write(self, layer: int, rows: Sequence[int], starts: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Store keys and values [B, G, Q, E] at positions starts[b] .. starts[b] + Q - 1; lengths do not change."""
        width = keys.shape[2]
        for b, (row, start) in enumerate(zip(rows, starts, strict=True)):
            assert start + width <= self.keys[layer].shape[2], "the caller checks the room first"
            self.keys[layer][row, :, start : start + width] = keys[b]
            self.values[layer][row, :, start : start + width] = values[b]

    def gather(self, layer: int, rows: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, S, E] of rows' first S slots, S = `length` rounded up to `READ_MULTIPLE`.

        A view where the rows are neighbours.
        """
        end = _round_up(length)
        first = rows[0]
        if list(rows) == list(range(first, first + len(rows))):
            index: slice | list[int] = slice(first, first + len(rows))
        else:
            index = list(rows)
        return self.keys[layer][index, :, :end], self.values[layer][index, :, :end]

    def extend(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Commit counts[b] more tokens of each row."""
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Take each row back to `lengths[b]` committed tokens."""
        for row, length in zip(rows, lengths, strict=True):
            assert 0 <= length <= self.lengths[row], "truncate only shortens"
            self.lengths[row] = length

    def require(self, rows: Sequence[int], width: int) -> None:
        """Raise ValueError unless `width` more tokens fit into each of the rows."""
        for row in rows:
            if self.lengths[row] + width > self.capacity:
                needed = self.lengths[row] + width
                raise ValueError(f"context of {needed} tokens does not fit the {self.capacity} of a slot")


def _round_up(length: int) -> int:
    return -(-length // READ_MULTIPLE) * READ_MULTIPLE
