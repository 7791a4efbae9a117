"""A small language model of its own as the drafter (Leviathan et al., arXiv 2211.17192): greedy, token by token.

It shares the target's vocabulary and nothing else.
Letters: B rows, S tokens just committed, K drafts, Q tokens of a row in one pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blockdraft.cache import KVCache
from blockdraft.drafters.base import Proposal, TargetFacts
from blockdraft.drafters.head import draw, probability
from blockdraft.ops.sampling import Coupling


class Scores(Protocol):
    """What comes out of a pass, as far as drafting needs it."""

    @property
    def logits(self) -> Tensor: ...


class DraftModel(Protocol):
    """A causal language model with a cache of slots; every target is one."""

    @property
    def info(self) -> TargetFacts: ...

    def new_cache(self, slots: int, capacity: int) -> KVCache:
        """An empty cache for this model."""
        ...

    def forward(self, ids: Tensor, cache: KVCache, rows: Sequence[int], keep_logits: int | None = None) -> Scores:
        """Append ids [B, Q] to the slots `rows`; logits [B, Q', V] of the last `keep_logits` tokens, or of all."""
        ...


@dataclass
class Memory:
    """The model's cache, and what its slots hold.

    The first committed[row] slots are committed tokens.  Behind them may stand ahead[row], which the last proposal
    wrote: right until `observe` says what became of it.  unread[row] is what is committed but not in the cache: at
    most one token, which is read together with the next anchor.
    """

    cache: KVCache
    committed: list[int]
    ahead: list[list[int]]
    unread: list[list[int]]


class IndependentDrafter:
    """Any causal language model as a drafter.  ValueError: its vocabulary is not the target's."""

    tap_ids: tuple[int, ...] = ()

    def __init__(self, model: DraftModel, target: TargetFacts, max_drafts: int) -> None:
        info = model.info
        if info.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft model '{info.name}' has a vocabulary of {info.vocab_size}, '{target.name}' one of "
                f"{target.vocab_size}: it must be of the same family, with the same tokenizer"
            )
        self.model, self.name = model, f"model:{info.name}"
        self.max_drafts, self.block_size = max_drafts, max_drafts + 1

    def new_state(self, slots: int, capacity: int) -> Memory:
        """An empty cache of its own.  ValueError: `capacity` is more than the model can look back on."""
        return Memory(
            cache=self.model.new_cache(slots, capacity),
            committed=[0] * slots,
            ahead=[[] for _ in range(slots)],
            unread=[[] for _ in range(slots)],
        )

    def reset(self, state: Memory, row: int) -> None:
        state.committed[row], state.ahead[row], state.unread[row] = 0, [], []
        state.cache.truncate([row], [0])

    @torch.no_grad()
    def observe(
        self,
        state: Memory,
        rows: Sequence[int],
        tokens: Tensor,
        taps: Tensor | None,  # noqa: ARG002  # it asks for none
        counts: Sequence[int],
    ) -> None:
        """Keep what was drafted right, forget the rest, and read what is new: more than one token at once."""
        found = []
        for row, ids, count in zip(rows, tokens.tolist(), counts, strict=True):
            committed = [*state.unread[row], *ids[:count]]
            right = _agreeing(committed, state.ahead[row])
            kept, unread = state.committed[row] + right, committed[right:]
            state.cache.truncate([row], [kept])
            if len(unread) > 1:
                self.model.forward(torch.tensor([unread], device=tokens.device), state.cache, [row], keep_logits=1)
                kept, unread = kept + len(unread), []
            found.append((row, kept, unread))
        for row, kept, unread in found:  # all rows or none: an interrupted round is done again
            state.committed[row], state.ahead[row], state.unread[row] = kept, [], unread

    @torch.no_grad()
    def propose(
        self, state: Memory, rows: Sequence[int], anchors: Tensor, coupling: Coupling | None = None
    ) -> Proposal:
        """anchors [B] -> tokens [B, K]; K is less than `max_drafts` where a slot is nearly full."""
        starts = [state.committed[row] for row in rows]
        state.cache.truncate(rows, starts)  # what an interrupted round left
        for row in rows:
            state.ahead[row] = []
        unread = [state.unread[row] for row in rows]
        width = max(len(ids) for ids in unread) + 1
        # The first pass writes `width` slots of every row, padding included; each later one writes one.
        steps = min(self.max_drafts, state.cache.capacity - max(starts) - width + 1)
        if steps < 1:
            return Proposal(anchors.new_empty(len(rows), 0))
        feed = torch.tensor([ids + [0] * (width - len(ids)) for ids in unread], dtype=anchors.dtype)
        feed = feed.to(anchors.device)
        last = torch.tensor([len(ids) for ids in unread], device=anchors.device)
        each = torch.arange(len(rows), device=anchors.device)
        feed[each, last] = anchors
        logits = self.model.forward(feed, state.cache, rows).logits[each, last]
        state.cache.truncate(rows, [start + len(ids) + 1 for start, ids in zip(starts, unread, strict=True)])
        drafts = [draw(logits, 0, coupling, None)]
        sure = [probability(logits, drafts[0])]
        while len(drafts) < steps:
            logits = self.model.forward(drafts[-1][:, None], state.cache, rows).logits[:, -1]
            drafts.append(draw(logits, len(drafts), coupling, None))
            sure.append(probability(logits, drafts[-1]))
        tokens = torch.stack(drafts, dim=1)
        read = torch.cat([anchors[:, None], tokens[:, :-1]], dim=1).tolist()  # nobody has read the last draft
        for row, ids, behind in zip(rows, unread, read, strict=True):
            state.ahead[row] = [*ids, *behind]
        return Proposal(tokens, torch.stack(sure, dim=1))


def _agreeing(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens at the front that are the same."""
    same = 0
    while same < min(len(left), len(right)) and left[same] == right[same]:
        same += 1
    return same
