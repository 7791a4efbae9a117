"""Attention over cache slots whose rows have lengths of their own, each row's result the same whoever is beside it.

Letters: B rows, Q tokens per row in one call, n queries of one run, H/G query/key-value heads, R query heads of one
key/value head, E head width (F of a value, where it is another), S slots read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.cache import READ_MULTIPLE, KVCache

# What an architecture may ask of its attention that `attend` does not compute.
REFUSED_OPTIONS = ("position_bias", "sinks")


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
                causal_mask(torch.arange(first, last, device=self.device) + self.starts[b], slots, window, self.dtype)[
                    :, None, None
                ]
                for b, first, last, slots in self.runs
            ]
        return self.masks[window]

    def batch_mask(self, window: int | None, slots: int) -> Tensor:
        """Additive mask [B, 1, Q, S] for all rows at once; made once per window."""
        if window not in self.masks:
            self.masks[window] = [causal_mask(self.positions(), slots, window, self.dtype)[:, None]]
        return self.masks[window][0]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [B, G, Q, E] of a layer behind what the rows have."""
        self.cache.write(layer, self.rows, self.starts, keys, values)

    def attend(self, layer: int, query: Tensor, scaling: float, window: int | None) -> Tensor:
        """Attention of query [B, H, Q, E] over the rows' slots of a layer: [B, Q, H, E]."""
        return attend_step(self, query, self.cache.keys[layer], self.cache.values[layer], scaling, window)


def causal_mask(queries: Tensor, slots: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Additive mask [..., S] for queries at absolute positions [...]."""
    keys = torch.arange(slots, device=queries.device)
    hidden = keys > queries[..., None]
    if window is not None:
        hidden = hidden | (keys <= queries[..., None] - window)
    return torch.zeros(hidden.shape, dtype=dtype, device=queries.device).masked_fill_(hidden, float("-inf"))


def attend(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    blockdraft: Step | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of query [B, H, Q, E] over the rows of a `Step`; returns [B, Q, H, F].

    `softcap` bounds the scores smoothly (Gemma 2); `s_aux` [H] are sinks (GPT-OSS): a score for each head that takes
    part in the softmax and has no value.

    `key` and `value` [slots, G, room, E or F] are a layer's whole memory, of which the step knows its rows.  On the
    CPU every query is an item of its own and the query heads of one key/value head are its rows, so the bits
    of a query's result depend neither on the queries beside it nor on the other rows of the batch.
    ValueError: the layer asks for something that this does not compute.
    """
    if blockdraft is None:
        raise ValueError("the model does not pass keyword arguments on to its attention")
    for option in REFUSED_OPTIONS:
        if options.get(option) is not None:
            raise ValueError(f"attention with '{option}' is not supported")
    if attention_mask is not None:  # transformers makes none for us, so it is the model's own
        raise ValueError("attention with a mask that the model makes itself is not supported")
    if options.get("is_causal") is False:
        raise ValueError("attention that is not causal is not supported")
    return attend_step(blockdraft, query, key, value, scaling, sliding_window, softcap, s_aux), None


def attend_step(
    step: Step,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What `attend` computes: query [B, H, Q, E] over memory [slots, G, room, E or F] -> [B, Q, H, F]."""
    batch, heads, width, head_dim = query.shape
    scaling = head_dim**-0.5 if scaling is None else scaling
    shaped = softcap is not None or sinks is not None
    if query.device.type != "cpu":
        slots = max(run[3] for run in step.runs)
        mask = step.batch_mask(window, slots)
        return attend_batched(query, key, value, neighbours(step.rows), slots, mask, scaling, softcap, sinks)
    groups = key.shape[1]
    queries = query.transpose(1, 2).reshape(batch * width, groups, heads // groups, head_dim)
    grouped_sinks = None if sinks is None else sinks.view(groups, -1, 1)
    masks, sizes = step.run_masks(window), [last - first for _, first, last, _ in step.runs]
    outputs = []
    for (b, _, _, slots), part, mask in zip(step.runs, queries.split(sizes), masks, strict=True):
        keys, values = (memory[step.rows[b], :, :slots] for memory in (key, value))
        if shaped:  # one query at a time: products of a shape that follows from its position alone
            each = zip(part.contiguous(), mask, strict=True)
            outputs.append(
                torch.stack(
                    [_shaped(one, keys, values, hidden, scaling, softcap, grouped_sinks) for one, hidden in each]
                )
            )
            continue
        keys, values = (memory.expand(len(part), *memory.shape) for memory in (keys, values))
        outputs.append(F.scaled_dot_product_attention(part.contiguous(), keys, values, attn_mask=mask, scale=scaling))
    # The runs follow one another as the queries do, row by row.
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.reshape(batch, width, heads, value.shape[-1])


def _shaped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention step by step, for scores that are bounded or have a sink beside them.

    query [..., G, n, E], key [..., G, S, E], value [..., G, S, F], additive mask [..., 1, 1 or n, S], sinks [G, n, 1].
    """
    scores = (query @ key.transpose(-1, -2)).float() * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[-2]]
    return weights.to(value.dtype) @ value


def neighbours(rows: list[int]) -> slice | list[int]:
    """What picks these rows of a memory: a slice, which copies nothing, where they follow one another."""
    first, end = rows[0], rows[0] + len(rows)
    return slice(first, end) if rows == list(range(first, end)) else rows


def attend_batched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: slice | list[int] | Tensor,
    slots: int,
    mask: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """All rows in one call, for devices where launching costs more than reading masked slots.

    query [B, H, Q, E], memory [slots, G, room, E or F] of which `slots` are read, additive mask [B, 1, Q, S].
    Returns [B, Q, H, F].
    """
    batch, heads, width, head_dim = query.shape
    groups = key.shape[1]
    keys, values = key[rows, :, :slots], value[rows, :, :slots]
    if softcap is None and sinks is None:
        output = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=heads != groups
        )
        return output.transpose(1, 2).contiguous()
    folded = query.reshape(batch, groups, -1, head_dim)  # the query heads of a key/value head one after the other
    if sinks is not None:
        sinks = sinks.view(groups, -1, 1).repeat_interleave(width, dim=1)
    mask = mask.repeat(1, 1, heads // groups, 1)
    output = _shaped(folded, keys, values, mask, scaling, softcap, sinks)
    return output.view(batch, heads, width, -1).transpose(1, 2).contiguous()
