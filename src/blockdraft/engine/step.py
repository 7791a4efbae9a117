"""The two passes of generation: the prompt's, and the round of draft, verify, accept and commit.

Letters: B rows, S prompt tokens, K drafts, T taps, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from blockdraft.cache import KVCache
from blockdraft.drafters.base import Drafter, PartlyFree, Proposal
from blockdraft.engine.backlog import Backlog
from blockdraft.engine.policy import Ask, Policy, Row, verify_widths
from blockdraft.engine.probe import few, spread
from blockdraft.engine.request import Request
from blockdraft.ops.acceptance import accept
from blockdraft.ops.sampling import Coupling, choose
from blockdraft.targets.base import Target


@dataclass
class Pair:
    """A target with its cache and, unless decoding is plain, a drafter with its state and what it has yet to see.

    `coupled`: the drafter is lent the noise of the target's choices.
    """

    target: Target
    cache: KVCache
    drafter: Drafter | None
    state: Any
    backlog: Backlog = field(default_factory=Backlog)
    coupled: bool = False

    def begin(self, slot: int) -> None:
        """Another request has the slot now."""
        self.cache.truncate([slot], [0])
        if self.drafter is not None:
            self.backlog.forget(slot)
            self.drafter.reset(self.state, slot)

    def commit(
        self, rows: Sequence[int], starts: Sequence[int], said: Sequence[list[int]], taps: Tensor | None
    ) -> None:
        """Tokens said[b], which stand from starts[b] on, are committed; their taps are the first of [B, S, T, D]."""
        if self.drafter is not None:
            if isinstance(self.drafter, PartlyFree):
                self.drafter.observe_free(self.state, rows, starts, said)
            self.backlog.add(rows, starts, said, taps)
            if self.backlog.full:
                self.catch_up(list(self.backlog.entries))

    def catch_up(self, rows: Sequence[int]) -> None:
        """Show the drafter what was committed since it was last asked."""
        while self.drafter is not None and (shown := self.backlog.peek(rows)) is not None:
            ids = shown.ids.to(self.target.info.device)
            self.drafter.observe(self.state, shown.rows, ids, shown.taps, shown.counts)
            for row, count in zip(shown.rows, shown.counts, strict=True):
                self.backlog.drop(row, count)


@dataclass(frozen=True)
class Verdict:
    """What a round gave one row: the accepted drafts and the target's next token.

    `width` drafts were verified; `asked` says who was asked for any.
    """

    tokens: list[int]
    width: int
    asked: Ask

    @property
    def num_accepted(self) -> int:
        """Drafts among the tokens."""
        return len(self.tokens) - 1


@torch.inference_mode()
def prefill(pair: Pair, request: Request, most: int) -> int | None:
    """Read up to `most` more tokens of a request's prompt into its slot, alone.

    Returns the target's first token, the first anchor, once all of the prompt is read, and None before.  After an
    interrupt, `num_prefilled` has to be set to 0.
    """
    slot, start = request.slot, request.num_prefilled
    assert slot is not None, "a request is admitted before its prompt is read"
    if start == 0:
        pair.begin(slot)
    ids = torch.tensor([request.prompt_ids[start : start + most]], device=pair.target.info.device)
    out = pair.target.forward(ids, pair.cache, [slot], keep_logits=1)
    pair.commit([slot], [start], ids.tolist(), out.taps)  # the drafter reads it when it is first asked
    request.num_prefilled += ids.shape[1]
    if request.num_prefilled < len(request.prompt_ids):
        return None
    return int(choose(out.logits, [request.choice], [len(request.prompt_ids)]))


@dataclass(frozen=True)
class Flight:
    """A round of which the passes have been started; on an asynchronous device they need not be over.

    Row b is `requests[b]`, which had slots[b] and starts[b] tokens read.  widths[b] of its drafts are verified.  `said`
    [B, 2 + K] are accepted drafts, next token and drafts on their way to the host, where they are once `landed` has
    happened (None: they are there).
    """

    requests: list[Request]
    slots: list[int]
    starts: list[int]
    asked: list[Ask]
    widths: list[int]
    taps: Tensor | None
    said: Tensor
    landed: torch.cuda.Event | None

    def going(self) -> list[int]:
        """The rows whose requests still run: one may have ended, and its slot been given away, since the start."""
        pairs = zip(self.requests, self.slots, strict=True)
        return [b for b, (request, slot) in enumerate(pairs) if request.slot == slot and not request.done]


@torch.inference_mode()
def launch(pair: Pair, requests: Sequence[Request], policy: Policy) -> Flight:
    """Start a round for running requests, which verifies as many drafts of each as the policy says."""
    device = pair.target.info.device
    slots = [request.slot for request in requests if request.slot is not None]
    starts = [request.num_read for request in requests]
    pair.cache.truncate(slots, starts)  # a round that was interrupted may have left more
    anchors = torch.tensor([request.anchor for request in requests], device=device)

    room, remaining = [pair.cache.capacity - start for start in starts], [request.remaining for request in requests]
    limits = verify_widths(policy.limit, remaining, room)
    sampled = [request.params.temperature > 0 for request in requests]
    waiting = [pair.backlog.waiting.get(slot, 0) for slot in slots]
    facts = [Row(*one) for one in zip(slots, starts, sampled, waiting, remaining, strict=True)]
    asked = policy.begin(facts)
    drafts, widths = anchors.new_empty(len(slots), 0), [0] * len(slots)
    some: list[int] | None = None
    if max(limits) == 0:
        asked = Ask.NOBODY
    if asked is not Ask.NOBODY:
        coupling = None
        if pair.coupled and any(sampled):
            coupling = Coupling([request.choice for request in requests], [start + 1 for start in starts])
        some = few(facts) if asked is Ask.SOME else None
        proposal = propose(pair, asked, slots, anchors, coupling, some)
        widths = policy.widths(proposal, limits)
        drafts = proposal.tokens[:, : max(widths)]

    block = torch.cat([anchors[:, None], drafts], dim=1)
    out = pair.target.forward(block, pair.cache, slots)
    choices = choose(out.logits, [request.choice for request in requests], [start + 1 for start in starts], drafts)
    num_accepted, next_tokens = accept(drafts, choices, torch.tensor(widths, device=device))
    # Everything the host needs in one transfer.
    said, landed = _to_host(torch.cat([num_accepted[:, None], next_tokens[:, None], drafts], dim=1))
    each = [asked if some is None or b in some else Ask.NOBODY for b in range(len(slots))]
    return Flight(list(requests), slots, starts, each, widths, out.taps, said, landed)


@torch.inference_mode()
def land(pair: Pair, flight: Flight, policy: Policy) -> list[tuple[Request, Verdict]]:
    """Wait for a round, and commit what it gave each request that still runs."""
    waited = flight.landed is None or not flight.landed.query()
    if flight.landed is not None:
        flight.landed.synchronize()
    verdicts = [
        Verdict([*drafts[:count], following], width, asked)
        for (count, following, *drafts), width, asked in zip(
            flight.said.tolist(), flight.widths, flight.asked, strict=True
        )
    ]
    going = flight.going()
    slots, starts = [flight.slots[b] for b in going], [flight.starts[b] for b in going]
    # The anchor and the accepted drafts; the next token is unread.
    read = [[flight.requests[b].anchor, *verdicts[b].tokens[:-1]] for b in going]
    pair.cache.truncate(slots, [start + len(tokens) for start, tokens in zip(starts, read, strict=True)])
    policy.learn([verdict.tokens for verdict in verdicts], waited)
    taps = flight.taps
    if taps is not None and len(going) < len(flight.slots):
        taps = taps[going]
    pair.commit(slots, starts, read, taps)
    return [(flight.requests[b], verdicts[b]) for b in going]


def _to_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A tensor on its way to the host, and what happens when it is there; None: it is."""
    if values.device.type != "cuda":
        return values, None
    arrived = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    landed = torch.cuda.Event()
    landed.record()
    return arrived, landed


def propose(
    pair: Pair,
    asked: Ask,
    rows: Sequence[int],
    anchors: Tensor,
    coupling: Coupling | None = None,
    some: Sequence[int] | None = None,
) -> Proposal:
    """Drafts after anchors [B], by the whole drafter or by its free part; `some`: the whole, for these of the rows."""
    drafter = pair.drafter
    assert drafter is not None, "without a drafter, no policy asks it"
    if asked is Ask.FREE:
        assert isinstance(drafter, PartlyFree), "a policy asks for what there is"
        return drafter.propose_free(pair.state, rows, anchors)
    if some is not None:
        part = None if coupling is None else coupling.part(some)
        proposal = propose(pair, Ask.ALL, [rows[b] for b in some], anchors[list(some)], part)
        return spread(proposal, some, len(rows))
    pair.catch_up(rows)
    return drafter.propose(pair.state, rows, anchors, coupling)
