"""Block attention: the rows of a block over their context and over their own block.

Letters: B rows, A blocks per row, Q block rows, S context slots, H/G query/key-value heads, R = H/G, E head width.

One rule says who sees whom, in training (many blocks over one sequence) and in drafting (one block over the
cache) alike: a block row sees context slot s iff s < context_length of its block, and its own block, all of it
or causally; a window of W keeps both to the last W positions, its own included.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visible_context(context_lengths: Tensor, positions: Tensor, slots: int, window: int | None) -> Tensor:
    """Which context slots a block row sees: lengths [B, A], positions [B, A, Q] -> bool [B, A, Q or 1, S].

    Slot s holds absolute position s.
    """
    slot = torch.arange(slots, device=context_lengths.device)
    visible = slot < context_lengths[:, :, None, None]
    if window is not None:
        visible = visible & (slot > positions[..., None] - window)
    return visible


def visible_block(rows: int, window: int | None, causal: bool, device: torch.device) -> Tensor:
    """Which rows of its own block a row sees: bool [Q, Q], queries first."""
    row = torch.arange(rows, device=device)
    distance = row[:, None] - row[None, :]
    visible = torch.ones(rows, rows, dtype=torch.bool, device=device)
    if causal:
        visible = visible & (distance >= 0)
    if window is not None:
        visible = visible & (distance < window)
    return visible


def block_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    context: tuple[Tensor, Tensor],
    context_lengths: Tensor,
    positions: Tensor,
    window: int | None = None,
    causal: bool = False,
) -> Tensor:
    """One softmax over context and own block.

    query [B, A, Q, H, E]; keys, values [B, A, Q, G, E] of the block; context keys and values [B, G, S, E];
    context_lengths [B, A]; positions [B, A, Q]; all rotated already.  Returns [B, A, Q, H, E].
    There may be more keys and values than queries: those of earlier rows of the block stand in front.

    The context product is one matrix product for all blocks of a row, which is what makes many anchors cheap.
    """
    batch, blocks, rows, heads, width = query.shape
    context_keys, context_values = context
    groups, slots = context_keys.shape[1:3]
    shared, kept = heads // groups, keys.shape[2]
    # [B, G, A, Q, R, E]: blocks and rows beside the query heads that share a key head
    q = query.view(batch, blocks, rows, groups, shared, width).permute(0, 3, 1, 2, 4, 5) * width**-0.5
    k = keys.permute(0, 3, 1, 2, 4)
    v = values.permute(0, 3, 1, 2, 4)

    scores = q.reshape(batch, groups, blocks * rows * shared, width) @ context_keys.transpose(-1, -2)
    scores = scores.view(batch, groups, blocks, rows, shared, slots)
    hidden = ~visible_context(context_lengths, positions, slots, window)
    scores = scores.masked_fill(hidden[:, None, :, :, None, :], float("-inf"))

    own = q.reshape(batch, groups, blocks, rows * shared, width) @ k.transpose(-1, -2)
    own = own.view(batch, groups, blocks, rows, shared, kept)
    if causal or window is not None:
        visible = visible_block(kept, window, causal, query.device)[kept - rows :]
        own = own.masked_fill(~visible[:, None, :], float("-inf"))

    weights = torch.cat([scores, own], dim=-1).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    on_context, on_block = weights.split([slots, kept], dim=-1)
    mixed = on_context.reshape(batch, groups, blocks * rows * shared, slots) @ context_values
    mixed = mixed.view(batch, groups, blocks, rows * shared, width)
    mixed = mixed + on_block.reshape(batch, groups, blocks, rows * shared, kept) @ v
    mixed = mixed.view(batch, groups, blocks, rows, shared, width).permute(0, 2, 3, 1, 4, 5)
    return mixed.reshape(batch, blocks, rows, heads, width)
