"""Attention over cache slots whose rows have lengths of their own, each row's result the same whoever is beside it.

Letters: B rows, Q tokens per row in one call, n queries of one run, H/G query/key-value heads, E head width,
S slots read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.cache import READ_MULTIPLE, KVCache

# What an architecture may ask of its attention that `attend` does not compute.
REFUSED_OPTIONS = ("softcap", "s_aux", "position_bias", "sinks")


class Step:
    """One forward pass: which rows it extends, from where, and the masks that its layers share."""

    def __init__(
        self, cache: KVCache, rows: Sequence[int], width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.cache, self.rows, self.width = cache, list(rows), width
        self.starts = [cache.lengths[row] for row in rows]
        self.dtype, self.device = dtype, device
        self.masks: dict[int | None, list[Tensor]] = {}
        # (index into rows, first query, one past the last, slots they read).  How many masked slots lie behind a
        # query can change the last bits of its result, so what it reads follows from its position alone.
        self.runs: list[tuple[int, int, int, int]] = []
        for b, start in enumerate(self.starts):
            first = 0
            while first < width:
                slots = (start + first) // READ_MULTIPLE * READ_MULTIPLE + READ_MULTIPLE
                last = min(width, slots - start)
                self.runs.append((b, first, last, slots))
                first = last

    def positions(self) -> Tensor:
        """Absolute positions [B, Q]."""
        starts = torch.tensor(self.starts, device=self.device)
        return starts[:, None] + torch.arange(self.width, device=self.device)

    def run_masks(self, window: int | None) -> list[Tensor]:
        """Additive masks [n, 1, 1, S], one for each run; made once per window."""
        if window not in self.masks:
            self.masks[window] = [
                self._mask(torch.arange(first, last, device=self.device) + self.starts[b], slots, window)[:, None, None]
                for b, first, last, slots in self.runs
            ]
        return self.masks[window]

    def batch_mask(self, window: int | None, slots: int) -> Tensor:
        """Additive mask [B, 1, Q, S] for all rows at once; made once per window."""
        if window not in self.masks:
            self.masks[window] = [self._mask(self.positions(), slots, window)[:, None]]
        return self.masks[window][0]

    def _mask(self, queries: Tensor, slots: int, window: int | None) -> Tensor:
        keys = torch.arange(slots, device=self.device)
        hidden = keys > queries[..., None]
        if window is not None:
            hidden |= keys <= queries[..., None] - window
        return torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, float("-inf"))


def attend(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    blockdraft: Step | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of query [B, H, Q, E] over the rows of a `Step`; returns [B, Q, H, E].

    `key` and `value` [slots, G, room, E] are a layer's whole memory, of which the step knows its rows.  On the
    CPU every query is an item of its own and the query heads of one key/value head are its rows, so the bits
    of a query's result depend neither on the queries beside it nor on the other rows of the batch.
    ValueError: the layer asks for something that this does not compute.
    """
    if blockdraft is None:
        raise ValueError("the model does not pass keyword arguments on to its attention")
    for option in REFUSED_OPTIONS:
        if options.get(option) is not None:
            raise ValueError(f"attention with '{option}' is not supported")
    if options.get("is_causal") is False:
        raise ValueError("attention that is not causal is not supported")
    return attend_step(blockdraft, query, key, value, scaling, sliding_window), None


def attend_step(
    step: Step, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """What `attend` computes: query [B, H, Q, E] over memory [slots, G, room, E] -> [B, Q, H, E]."""
    batch, heads, width, head_dim = query.shape
    if query.device.type != "cpu":
        return _attend_batched(step, query, key, value, scaling, window)
    groups = key.shape[1]
    queries = query.transpose(1, 2).reshape(batch * width, groups, heads // groups, head_dim)
    masks, sizes = step.run_masks(window), [last - first for _, first, last, _ in step.runs]
    outputs = []
    for (b, _, _, slots), part, mask in zip(step.runs, queries.split(sizes), masks, strict=True):
        shape = (part.shape[0], groups, slots, head_dim)
        row = step.rows[b]
        outputs.append(
            F.scaled_dot_product_attention(
                part.contiguous(),
                key[row, :, :slots].expand(shape),
                value[row, :, :slots].expand(shape),
                attn_mask=mask,
                scale=scaling,
            )
        )
    # The runs follow one another as the queries do, row by row.
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.reshape(batch, width, heads, head_dim)


def _attend_batched(
    step: Step, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """All rows in one call, for devices where launching costs more than reading masked slots."""
    slots = max(run[3] for run in step.runs)
    first = step.rows[0]
    neighbours = step.rows == list(range(first, first + len(step.rows)))
    index: slice | list[int] = slice(first, first + len(step.rows)) if neighbours else step.rows
    mask = step.batch_mask(window, slots)
    grouped = query.shape[1] != key.shape[1]
    output = F.scaled_dot_product_attention(
        query, key[index, :, :slots], value[index, :, :slots], attn_mask=mask, scale=scaling, enable_gqa=grouped
    )
    return output.transpose(1, 2).contiguous()
