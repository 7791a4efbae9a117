"""Anchors, block inputs, labels and weights (DFlash, section 4.2).

Letters: B sequences, S tokens, A anchors per sequence, Q block rows, K drafted tokens.

An anchor is a token of the answer whose successors are to be drafted.  Row 0 of its block is the anchor, the
other rows are masks, or the answer's next tokens where drafting goes token after token.  Row k is asked for the token
at anchor + k, or, where the anchor's row drafts too, at anchor + k + 1.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.config import DrafterConfig


@dataclass(frozen=True)
class Blocks:
    """A batch of blocks; rows that teach nothing have weight 0 and label 0."""

    ids: Tensor  # [B, A, Q] anchor, then mask tokens or the answer
    positions: Tensor  # [B, A, Q] absolute
    context_lengths: Tensor  # [B, A] tokens strictly before the anchor
    label_positions: Tensor  # [B, A, Q] where the label stands in the sequence, clamped into it
    labels: Tensor  # [B, A, Q]
    weights: Tensor  # [B, A, Q] decay where the row teaches, else 0


def sample_anchors(loss_mask: Tensor, count: int, seed: int, epoch: int, sample: int) -> Tensor:
    """Up to `count` anchors among the positions [S] that are answer and have answer behind them, sorted.

    Uniform without replacement, by a generator of (seed, epoch, sample) alone: a resumed run draws the same.
    """
    eligible = eligible_anchors(loss_mask)
    key = hashlib.sha256(f"{seed}/{epoch}/{sample}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little", signed=True))
    chosen = torch.randperm(len(eligible), generator=generator)[:count]
    return eligible[chosen].sort().values


def fixed_anchors(loss_mask: Tensor, count: int, stride: int) -> Tensor:
    """The first `count` of the same positions [S] that are multiples of `stride`: blocks side by side, every epoch."""
    eligible = eligible_anchors(loss_mask)
    return eligible[eligible % stride == 0][:count]


def eligible_anchors(loss_mask: Tensor) -> Tensor:
    """Positions [S] that are answer and have answer behind them, ascending."""
    return (loss_mask[:-1] & loss_mask[1:]).nonzero()[:, 0]


def make_blocks(ids: Tensor, loss_mask: Tensor, anchors: Tensor, config: DrafterConfig, gamma: float) -> Blocks:
    """Blocks of ids [B, S] at anchors [B, A] (-1: none); labels only where loss_mask [B, S] is set.

    The weight of the k-th drafted token, k from 1, is exp(-(k - 1) / gamma); gamma may be infinite.
    """
    size = config.block_size
    row = torch.arange(size, device=ids.device)
    real = anchors >= 0
    starts = anchors.clamp(min=0)
    positions = starts[..., None] + row
    drafted = row if config.anchor_drafts else row - 1  # which draft a row makes; -1: none
    target_positions = positions + 1 if config.anchor_drafts else positions
    inside = target_positions < ids.shape[1]
    label_positions = target_positions.clamp(max=ids.shape[1] - 1)
    flat = label_positions.flatten(1)
    answer = (loss_mask.gather(1, flat).view_as(positions) & inside) | (drafted < 0)
    unbroken = answer.long().cumprod(dim=-1).bool()  # a block ends with its answer, though another may follow
    teaches = unbroken & real[..., None] & (drafted >= 0)
    labels = ids.gather(1, flat).view_as(positions).where(teaches, torch.zeros_like(positions))
    if config.token_by_token:  # behind the end stands anything: no row that teaches sees it
        inputs = ids.gather(1, positions.clamp(max=ids.shape[1] - 1).flatten(1)).view_as(positions)
    else:
        assert config.mask_token_id is not None, "a drafter of masks has one"
        inputs = torch.full_like(positions, config.mask_token_id)
        inputs[..., 0] = ids.gather(1, starts)
    return Blocks(
        ids=inputs,
        positions=positions,
        context_lengths=starts.where(real, torch.zeros_like(starts)),
        label_positions=label_positions,
        labels=labels,
        weights=torch.exp(-drafted.float() / gamma) * teaches,
    )
