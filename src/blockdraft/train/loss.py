"""The loss over a block: cross-entropy to the answer's tokens, to the target's distribution, or a share of each.

Letters: R rows that teach, V' head rows, M target ids with probability, K drafted tokens, N rank of a Markov head.

Logits exist for a chunk of rows at a time: the gradient with respect to the hidden states is made in the same
pass, so nothing of size [rows, V'] is kept, and nothing is computed twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockdraft.config import DrafterConfig, LossConfig
from blockdraft.drafters.markov import MarkovHead
from blockdraft.train.blocks import Blocks


def position_decay(config: LossConfig, step: int, steps: int, epoch: int) -> float:
    """The gamma of a step (of 0 .. steps - 1) in its epoch (from 0); infinite where all positions weigh the same.

    Stairs rise by gamma_step with every epoch (DFlare's code), linear rises evenly from the first step to the last;
    both end at gamma_max.
    """
    if config.weights == "uniform":
        return math.inf
    if config.schedule == "constant" or config.gamma_max is None:
        return config.gamma
    if config.schedule == "stairs":
        return min(config.gamma + config.gamma_step * epoch, config.gamma_max)
    return config.gamma + (config.gamma_max - config.gamma) * step / max(steps - 1, 1)


@dataclass(frozen=True)
class Teacher:
    """The target's most probable tokens at each position of a sequence: ids and probabilities [B, S, M].

    Row p is the distribution of the token at p, so it comes from the target's logits at p - 1.
    """

    ids: Tensor
    probabilities: Tensor


@dataclass(frozen=True)
class BlockLoss:
    """The loss with its gradient, and what the drafts were like, by drafted token k = 1..K.

    `accepted` sums over blocks the drafts before the first miss, so 1 + accepted / blocks is the acceptance
    length an arg-max chain would have had at these anchors.
    """

    loss: Tensor
    correct: Tensor  # [K] drafts equal to the answer's token
    count: Tensor  # [K] drafts that had a label
    accepted: float
    blocks: int


class _SparseCrossEntropy(torch.autograd.Function):
    """sum_r sum_m -p[r, m] log softmax(h[r] W^T + e[r] U^T)[ids[r, m]].

    hidden h [R, D], weight W [V', D] (frozen, or learned), ids and p [R, M]; e [R, N] and U [V', N] are a Markov
    head's (N may be 0).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, p: Tensor, chunk: int, e: Tensor, u: Tensor
    ) -> tuple[Tensor, Tensor]:
        total = hidden.new_zeros((), dtype=torch.float32)
        gradient, e_gradient = torch.empty_like(hidden), torch.empty_like(e)
        u_gradient = torch.zeros_like(u, dtype=torch.float32)  # a sum over chunks
        w_gradient = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        best = torch.empty(len(hidden), dtype=torch.long, device=hidden.device)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = torch.addmm(hidden[part] @ weight.T, e[part], u.T).float()
            best[part] = logits.argmax(dim=-1)
            log_sum = logits.logsumexp(dim=-1, keepdim=True)
            mass = p[part].sum(dim=-1, keepdim=True)
            total += (mass * log_sum).sum() - (p[part] * logits.gather(1, ids[part])).sum()
            # d loss / d logits = mass * softmax - p, built in the logits' own memory
            logits.sub_(log_sum).exp_().mul_(mass).scatter_add_(1, ids[part], -p[part])
            u_gradient.addmm_(logits.T, e[part].float())
            if w_gradient is not None:
                w_gradient.addmm_(logits.T, hidden[part].float())
            logits = logits.to(hidden.dtype)
            gradient[part], e_gradient[part] = logits @ weight, logits @ u
        learned = None if w_gradient is None else w_gradient.to(weight.dtype)
        ctx.save_for_backward(gradient, e_gradient, u_gradient.to(u.dtype), learned)
        ctx.mark_non_differentiable(best)
        return total, best

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        made = ctx.saved_tensors
        of_hidden, of_e, of_u, of_weight = (None if gradient is None else gradient * gradients[0] for gradient in made)
        return of_hidden, of_weight, None, None, None, of_e, of_u


def block_loss(
    hidden: Tensor,
    blocks: Blocks,
    head: Tensor,
    draft_index: Tensor | None,
    teacher: Teacher | None,
    drafter: DrafterConfig,
    config: LossConfig,
    markov: MarkovHead | None = None,
) -> BlockLoss:
    """sum(weight * CE) / sum(weight) over the rows that teach: hidden [B, A, Q, D], head [V', D].

    draft_index [V] gives the head row of a target id, -1 where a reduced head cannot say it; such a label
    counts as a miss and is not learned.  A head that requires a gradient is learned too.  A Markov head is told the
    answer's own previous token, which is the one drafted wherever a draft can still be accepted.  ValueError: soft
    labels are asked for and there is no teacher.
    """
    if config.soft_weight > 0 and teacher is None:
        raise ValueError("loss.soft_weight > 0 needs soft labels: set features.teacher_top_k")
    active = blocks.weights > 0
    weights = blocks.weights[active]
    rows = blocks.labels[active][:, None]
    labels = rows if draft_index is None else draft_index[rows]
    hard = torch.full_like(labels, 1.0 - config.soft_weight, dtype=torch.float32)
    ids, p = labels, hard * (labels >= 0)
    if config.soft_weight > 0 and teacher is not None:
        soft_ids, soft = _teacher_rows(teacher, blocks, active, draft_index)
        ids, p = torch.cat([ids, soft_ids], dim=1), torch.cat([p, config.soft_weight * soft], dim=1)
    p = p * weights[:, None]
    taught = hidden[active]
    if markov is None:
        e, u = taught.new_zeros(len(taught), 0), head.new_zeros(len(head), 0)
    else:
        previous = _previous_tokens(blocks, drafter)[active]
        e, u = markov.embed(previous if draft_index is None else draft_index[previous]), markov.w2.weight
    total, best = _SparseCrossEntropy.apply(taught, head, ids.clamp(min=0), p, config.chunk_rows, e, u)
    right = torch.zeros_like(active)
    right[active] = best == labels[:, 0]
    skip = drafter.block_size - drafter.max_drafts
    right, active = right[..., skip:], active[..., skip:]
    return BlockLoss(
        loss=total / weights.sum().clamp(min=1e-6),
        correct=right.flatten(0, 1).sum(dim=0),
        count=active.flatten(0, 1).sum(dim=0),
        accepted=float(right.int().cumprod(dim=-1).sum()),
        blocks=int(active[..., 0].sum()),
    )


def _previous_tokens(blocks: Blocks, drafter: DrafterConfig) -> Tensor:
    """The answer's token in front of each row's label: [B, A, Q]; the first draft's is the anchor."""
    first = drafter.block_size - drafter.max_drafts
    previous = blocks.labels.roll(1, dims=-1)
    previous[..., first] = blocks.ids[..., 0]
    return previous


def _teacher_rows(
    teacher: Teacher, blocks: Blocks, active: Tensor, draft_index: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The teacher's ids and probabilities [R, M] at the labels' positions, scaled to one over what the head can say."""
    sequence = torch.arange(active.shape[0], device=active.device)[:, None, None].expand_as(active)[active]
    position = blocks.label_positions[active]
    ids, p = teacher.ids[sequence, position].long(), teacher.probabilities[sequence, position].float()
    if draft_index is not None:
        ids = draft_index[ids]
        p = p * (ids >= 0)
    return ids, p / p.sum(dim=-1, keepdim=True).clamp(min=1e-6)
