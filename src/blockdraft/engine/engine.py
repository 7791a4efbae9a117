"""The engine: requests in any number and at any time, slots for those that run, and one loop for all of them."""

from __future__ import annotations

import heapq
import secrets
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from blockdraft.config import EngineConfig, SamplingParams
from blockdraft.drafters.base import Drafter, PartlyFree
from blockdraft.engine.adaptive import Adaptive
from blockdraft.engine.policy import Fixed, Policy
from blockdraft.engine.profile import known_costs
from blockdraft.engine.request import Request, RequestStats
from blockdraft.engine.step import Flight, Pair, land, launch, prefill
from blockdraft.ops.sampling import ChoiceState
from blockdraft.targets.base import Target
from blockdraft.text import TextOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Engine:
    """Generates with a target and, unless `drafter` is None, a drafter.

    A request's answer does not depend on the requests beside it, nor on when it was added.  `stats` sums
    up the finished requests.  `policy`: another one than `config.verify_width` asks for.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        config: EngineConfig,
        tokenizer: PreTrainedTokenizerBase | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.capacity = min(config.capacity, target.info.max_context)
        state = drafter.new_state(config.slots, self.capacity) if drafter is not None else None
        cache = target.new_cache(config.slots, self.capacity)
        self.pair = Pair(target, cache, drafter, state, coupled=config.coupled)
        self.policy = self._policy(config) if policy is None or drafter is None else policy
        self.prefill_tokens = config.prefill_tokens
        self.overlap = target.info.device.type == "cuda" if config.overlap is None else config.overlap
        self.waiting: deque[Request] = deque()
        self.reading: list[Request] = []
        self.running: list[Request] = []
        self.free_slots = list(range(config.slots))
        self.stats = RequestStats()
        self._added = 0
        self._ahead: Flight | None = None  # a round that was started before its turn

    def add(self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None = None) -> Request:
        """Queue a request.

        Raises ValueError if the prompt is empty, holds unknown ids or leaves no room for an answer, if a
        biased token is unknown, or if stop strings are asked of an engine without a tokenizer.
        """
        info = self.target.info
        if not prompt_ids:
            raise ValueError("the prompt is empty: give at least one token")
        if not all(0 <= token < info.vocab_size for token in (*prompt_ids, *params.logit_bias)):
            raise ValueError(f"token ids of prompt and logit_bias must lie in 0..{info.vocab_size - 1}")
        if len(prompt_ids) >= self.capacity:
            raise ValueError(f"a prompt of {len(prompt_ids)} tokens does not fit a context of {self.capacity}")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer: pass one to the engine, or use stop_token_ids")
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        request = Request(
            request_id=request_id if request_id is not None else f"request-{self._added}",
            prompt_ids=list(prompt_ids),
            params=params,
            seed=seed,
            max_tokens=min(params.max_tokens, self.capacity - len(prompt_ids)),
            stop_ids=frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else info.eos_token_ids),
            choice=ChoiceState(params, seed, prompt_ids, info.vocab_size, info.device),
            output=TextOutput(self.tokenizer, params.stop) if self.tokenizer is not None else None,
        )
        self._added += 1
        self.waiting.append(request)
        return request

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting, read or running."""
        return bool(self.waiting or self.reading or self.running)

    def step(self) -> list[Request]:
        """Admit what fits, read prompts, then one round for all that run; returns the requests with new tokens.

        While others are answered, `prefill_tokens` of prompts are read at most (None: all): a long one does not keep
        them waiting.
        """
        # Set each time, so that engines may share a target.
        self.target.set_taps(self.drafter.tap_ids if self.drafter is not None else ())
        admitted = self._admit()
        advanced = self._round() if self.running else []
        return advanced + [request for request in admitted if request not in advanced]

    def _round(self) -> list[Request]:
        """A round for all that run; returns those that it gave tokens.

        On an asynchronous device the next one is started before these tokens become text, so that the device need not
        wait for the host.  A request that this text or its client ends was then verified in vain; one whose prompt has
        just been read joins a round later.
        """
        flight, self._ahead = self._ahead, None
        if flight is None or not flight.going():
            flight = launch(self.pair, self.running, self.policy)
        landed = land(self.pair, flight, self.policy)
        taken = [(request, verdict, request.take(verdict.tokens)) for request, verdict in landed]
        try:
            going = [request for request in self.running if not request.done]
            if self.overlap and going:
                self._ahead = launch(self.pair, going, self.policy)
        finally:  # an interrupt loses no token
            for request, verdict, count in taken:
                kept = request.tell(count, verdict.num_accepted)
                request.stats.count(verdict.width, verdict.num_accepted, kept, request.done, verdict.asked)
                if request.done:
                    self._release(request)
        return [request for request, _ in landed]

    def run(self) -> list[Request]:
        """Step until nothing is left; returns the requests in the order in which they finished."""
        finished = []
        while self.has_work:
            finished += [request for request in self.step() if request.done]
        return finished

    def abort(self, request: Request) -> None:
        """Stop a request that is no longer wanted and free its slot; nothing happens if it is done."""
        if request.done:
            return
        request.aborted = True
        if request.slot is not None:
            self._release(request)
        else:
            self.waiting.remove(request)

    def prepare(self) -> None:
        """Measure now what the policy has to know, instead of in the first round; nothing where it is known."""
        if isinstance(self.policy, Adaptive):
            self.policy.prepare()

    def _policy(self, config: EngineConfig) -> Policy:
        drafter, width = self.drafter, config.verify_width
        if drafter is None:
            return Fixed(0)
        if width == "auto":
            measure = partial(known_costs, self.target, drafter, config.slots)
            return Adaptive(drafter.max_drafts, measure, partly_free=isinstance(drafter, PartlyFree))
        return Fixed(drafter.max_drafts if width is None else min(width, drafter.max_drafts))

    def _admit(self) -> list[Request]:
        while self.waiting and self.free_slots:
            request = self.waiting.popleft()
            request.slot = heapq.heappop(self.free_slots)
            self.reading.append(request)
        room = sum(len(request.prompt_ids) for request in self.reading)
        if self.running and self.prefill_tokens is not None:
            room = min(room, self.prefill_tokens)
        admitted = []
        while self.reading and room > 0:
            request, before = self.reading[0], self.reading[0].num_prefilled
            try:
                first = prefill(self.pair, request, room)
            except BaseException:  # interrupted: it is read again, as if nothing had been
                request.num_prefilled = 0
                raise
            room -= request.num_prefilled - before
            if first is not None:
                self._start(request, first)
                admitted.append(request)
        self.running.sort(key=lambda request: request.slot if request.slot is not None else -1)
        return admitted

    def _start(self, request: Request, first: int) -> None:
        """Its prompt is read, and this is the first token of its answer."""
        assert request.slot is not None, "it has been read into one"
        self.reading.remove(request)
        self.running.append(request)
        self.policy.admit(request.slot)
        request.tell(request.take([first]), num_drafted=0)
        if request.done:
            self._release(request)

    def _release(self, request: Request) -> None:
        assert request.slot is not None
        (self.running if request in self.running else self.reading).remove(request)
        heapq.heappush(self.free_slots, request.slot)
        self.pair.backlog.forget(request.slot)  # taps take memory
        request.slot = None
        if not request.aborted:
            self.stats.add(request.stats)
