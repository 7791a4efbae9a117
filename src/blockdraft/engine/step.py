"""The two passes of generation: the prompt's, and the round of draft, verify, accept and commit.

Letters: B rows, S prompt tokens, K drafts, T taps, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockdraft.cache import KVCache
from blockdraft.drafters.base import Drafter
from blockdraft.engine.policy import verify_widths
from blockdraft.engine.request import Request
from blockdraft.ops.acceptance import accept
from blockdraft.ops.sampling import choose
from blockdraft.targets.base import Target


@dataclass
class Pair:
    """A target with its cache and, unless decoding is plain, a drafter with its state."""

    target: Target
    cache: KVCache
    drafter: Drafter | None
    state: Any

    def observe(self, rows: Sequence[int], ids: Tensor, taps: Tensor | None, counts: Sequence[int]) -> None:
        """Show the drafter the first counts[b] of ids [B, S], now committed, and their taps [B, S, T, D]."""
        if self.drafter is not None:
            self.drafter.observe(self.state, rows, ids, taps, counts)


@dataclass(frozen=True)
class Verdict:
    """What a round gave one row: the accepted drafts and the target's next token, and how many were verified."""

    tokens: list[int]
    width: int

    @property
    def num_accepted(self) -> int:
        """Drafts among the tokens."""
        return len(self.tokens) - 1


@torch.inference_mode()
def prefill(pair: Pair, request: Request) -> int:
    """Read a request's prompt into its slot, alone; returns the target's first token, the first anchor."""
    slot = request.slot
    assert slot is not None, "a request is admitted before its prompt is read"
    pair.cache.truncate([slot], [0])
    ids = torch.tensor([request.prompt_ids], device=pair.target.info.device)
    out = pair.target.forward(ids, pair.cache, [slot], keep_logits=1)
    if pair.drafter is not None:
        pair.drafter.reset(pair.state, slot)
    pair.observe([slot], ids, out.taps, [ids.shape[1]])
    return int(choose(out.logits, [request.choice], [ids.shape[1]]))


@torch.inference_mode()
def speculate(pair: Pair, requests: Sequence[Request], limit: int) -> list[Verdict]:
    """One round for all running requests, which verifies up to `limit` drafts of each; 0 is plain decoding."""
    device = pair.target.info.device
    rows = [request.slot for request in requests if request.slot is not None]
    starts = [request.num_read for request in requests]
    pair.cache.truncate(rows, starts)  # a round that was interrupted may have left more
    anchors = torch.tensor([request.anchor for request in requests], device=device)

    room = [pair.cache.capacity - start for start in starts]
    widths = verify_widths(limit, [request.remaining for request in requests], room)
    drafts, widths = propose(pair, rows, anchors, widths)

    block = torch.cat([anchors[:, None], drafts], dim=1)
    out = pair.target.forward(block, pair.cache, rows)
    choices = choose(out.logits, [request.choice for request in requests], [start + 1 for start in starts], drafts)
    num_accepted, next_tokens = accept(drafts, choices, torch.tensor(widths, device=device))

    # The one wait for the device: everything the host needs in one transfer.
    verdicts = torch.cat([num_accepted[:, None], next_tokens[:, None], drafts], dim=1).tolist()
    kept = [count + 1 for count, *_ in verdicts]  # the anchor and the accepted drafts; the next token is unread
    pair.cache.truncate(rows, [start + count for start, count in zip(starts, kept, strict=True)])
    pair.observe(rows, block, out.taps, kept)
    return [
        Verdict([*tokens[:count], following], width)
        for (count, following, *tokens), width in zip(verdicts, widths, strict=True)
    ]


def propose(pair: Pair, rows: Sequence[int], anchors: Tensor, limits: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Drafts [B, K] after anchors [B], and how many of each row's to verify: at most limits[b], the most of them K."""
    if pair.drafter is None or max(limits) == 0:
        return anchors.new_empty(len(anchors), 0), [0] * len(anchors)
    proposal = pair.drafter.propose(pair.state, rows, anchors)
    counts = proposal.counts if proposal.counts is not None else [proposal.tokens.shape[1]] * len(anchors)
    widths = [min(limit, count) for limit, count in zip(limits, counts, strict=True)]
    return proposal.tokens[:, : max(widths)], widths
