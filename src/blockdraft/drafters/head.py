"""The draft head: all rows of the target's head, or only those of the tokens that a drafter can say.

Letters: V vocabulary, V' rows of the draft head, D hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockdraft.ops.layers import draft_storage, pack_linears
from blockdraft.ops.sampling import Coupling, largest


def probability(logits: Tensor, chosen: Tensor) -> Tensor:
    """What a draft head gives the tokens that were chosen: logits [..., V'], chosen [...] -> [...] in fp32."""
    scores = logits.float()
    return (scores.gather(-1, chosen[..., None])[..., 0] - scores.logsumexp(dim=-1)).exp()


def draw(logits: Tensor, ahead: int, coupling: Coupling | None, ids: Tensor | None) -> Tensor:
    """Head rows [B] that are drafted from logits [B, V'] `ahead` of the first draft: likeliest, or by a coupling.

    ids [V'] are the tokens of a reduced head's rows.
    """
    return largest(logits) if coupling is None else coupling.choose(logits, ahead, ids)


def draft_index(draft_ids: Tensor | None, vocab_size: int, device: torch.device) -> Tensor:
    """Target id -> row of the draft head, -1 where a reduced head has none: [V]."""
    if draft_ids is None:
        return torch.arange(vocab_size, device=device)
    index = torch.full((vocab_size,), -1, dtype=torch.long, device=device)
    index[draft_ids] = torch.arange(len(draft_ids), device=device)
    return index


def reduced_head(weight: Tensor) -> nn.Module:
    """The head's kept rows [V', D] as a linear layer of their own, packed where that pays."""
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(weight.detach(), requires_grad=False)
    alone = nn.Sequential(head)
    pack_linears(alone, draft_storage())
    return alone[0]
