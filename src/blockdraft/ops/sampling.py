"""The target's choice: logits to token ids, with noise that depends on nothing but (seed, position, id).

A sampled token is argmax(log p + g) with g Gumbel noise, which is a draw from p.  The noise is a hash,
not a generator: it does not know the batch, the round or how many tokens were verified at once, so a
seeded answer is the same with and without drafting.  The order of the steps follows vLLM: logit bias,
penalties, temperature, min-p, top-k, top-p.
Letters: B rows, Q choices in a row, V vocabulary, N leading candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from blockdraft.config import SamplingParams

# Candidates that top-p looks at before it sorts a whole vocabulary.
TOP_P_CANDIDATES = 512
_MASK64 = (1 << 64) - 1


class ChoiceState:
    """What choosing for one request needs: its parameters, its seed and, for penalties, what it has said.

    The tensors over the vocabulary are made when they are first used: a request that waits takes no room.
    """

    def __init__(
        self, params: SamplingParams, seed: int, prompt_ids: Sequence[int], vocab_size: int, device: torch.device
    ) -> None:
        self.params, self.seed = params, seed
        self.prompt_ids, self.vocab_size, self.device = prompt_ids, vocab_size, device
        self.has_bias = bool(params.logit_bias)
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self.has_penalties = penalties != (1.0, 0.0, 0.0)

    @property
    def is_argmax(self) -> bool:
        """Whether the choice is a plain arg-max of the logits."""
        return self.params.temperature == 0.0 and not self.has_bias and not self.has_penalties

    @cached_property
    def bias(self) -> Tensor:
        """Logit bias: [V]."""
        bias = torch.zeros(self.vocab_size, device=self.device)
        bias[list(self.params.logit_bias)] = torch.tensor(list(self.params.logit_bias.values()), device=self.device)
        return bias

    @cached_property
    def in_prompt(self) -> Tensor:
        """Which tokens the prompt has: [V]."""
        seen = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
        seen[list(self.prompt_ids)] = True
        return seen

    @cached_property
    def counts(self) -> Tensor:
        """How often each token was emitted: [V]."""
        return torch.zeros(self.vocab_size, device=self.device)

    @torch.inference_mode()
    def commit(self, tokens: Sequence[int]) -> None:
        """Note tokens that the request has emitted."""
        if self.has_penalties:
            ids = torch.tensor(tokens, dtype=torch.long, device=self.device)
            self.counts.index_add_(0, ids, torch.ones(len(tokens), device=self.device))


@dataclass(frozen=True)
class Coupling:
    """The noise by which the target will choose, lent to a drafter, so that it draws what the target would.

    A draft is then the choice that the target would make if it thought as the drafter does.  At high temperatures
    such drafts are right more often than likely ones; what the target chooses does not depend on it.  positions[b] is
    where row b's first draft stands.
    """

    states: Sequence[ChoiceState]
    positions: Sequence[int]

    def part(self, rows: Sequence[int]) -> Coupling:
        """The same of some of the rows."""
        return Coupling([self.states[b] for b in rows], [self.positions[b] for b in rows])

    def choose(self, scores: Tensor, ahead: int, ids: Tensor | None = None) -> Tensor:
        """Columns [B] of scores [B, V'] for the draft that is `ahead` of the first; ids [V']: whose they are."""
        chosen = []
        for row, state, position in zip(scores, self.states, self.positions, strict=True):
            if state.params.temperature > 0.0:
                noise = gumbel(state.seed, position + ahead, state.vocab_size, scores.device)
                row = truncate(row.float(), state.params).add_(noise if ids is None else noise[ids])
            chosen.append(largest(row))
        return torch.stack(chosen)


def largest(scores: Tensor) -> Tensor:
    """Ids of the largest of scores [..., V], the lowest of equals: what `argmax` says, in a third of its time."""
    return scores.max(dim=-1).indices


def choose(
    logits: Tensor, states: Sequence[ChoiceState], positions: Sequence[int], drafts: Tensor | None = None
) -> Tensor:
    """The target's tokens [B, Q] for logits [B, Q, V].

    positions[b] is the absolute position of the token that row b's first choice fills; choice j fills
    the j-th after it and is made as if drafts[b, :j] (drafts [B, Q - 1]) had been emitted.
    """
    if all(state.is_argmax for state in states):
        return largest(logits)
    rows = []
    for b, (state, position) in enumerate(zip(states, positions, strict=True)):
        if state.is_argmax:
            rows.append(largest(logits[b]))
        else:
            rows.append(_choose_along(logits[b], state, position, drafts[b] if drafts is not None else None))
    return torch.stack(rows)


def _choose_along(logits: Tensor, state: ChoiceState, position: int, drafts: Tensor | None) -> Tensor:
    """Choices [Q] for one row's logits [Q, V].

    One vocabulary at a time: it fits the processor's cache, and no choice can depend on the others.
    """
    choices = []
    counts = state.counts.clone() if state.has_penalties else None
    for j, scores in enumerate(logits.float()):
        if counts is not None and drafts is not None and j > 0:
            counts[drafts[j - 1]] += 1
        scores = penalize(scores, state, counts)
        if state.params.temperature > 0.0:
            noise = gumbel(state.seed, position + j, len(scores), scores.device)
            scores = truncate(scores, state.params).add_(noise)
        choices.append(largest(scores))
    return torch.stack(choices)


def penalize(scores: Tensor, state: ChoiceState, counts: Tensor | None) -> Tensor:
    """Logit bias and penalties on scores [V]; counts [V]: occurrences in the output so far, if asked for."""
    params = state.params
    if state.has_bias:
        scores = scores + state.bias
    if counts is None:
        return scores
    if params.repetition_penalty != 1.0:
        penalized = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
        scores = torch.where(state.in_prompt | (counts > 0), penalized, scores)
    return scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def truncate(scores: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, min-p, top-k and top-p on scores [V]: log-probabilities up to a constant, -inf where left out."""
    # The largest score becomes 0 first, so that no temperature, however small, makes two infinities.
    scores = (scores - scores.max()).div_(params.temperature)
    if params.min_p > 0.0:
        scores.masked_fill_(scores < math.log(params.min_p), -math.inf)
    if 0 < params.top_k < len(scores):
        _keep_largest(scores, scores.topk(params.top_k + 1).values, params.top_k)
    if params.top_p < 1.0:
        _keep_top_p(scores, params.top_p)
    return scores


def _keep_top_p(scores: Tensor, top_p: float) -> None:
    """Keep the fewest largest of scores [V] whose probabilities together reach `top_p`."""
    total = scores.logsumexp(dim=0)
    for size in (TOP_P_CANDIDATES, len(scores)):
        leading = scores.topk(size).values if size < len(scores) else scores.sort(descending=True).values
        reached = (leading - total).exp_().cumsum(dim=0)
        count = int((reached < top_p).sum()) + 1
        if count < len(leading):
            _keep_largest(scores, leading, count)
            return


def _keep_largest(scores: Tensor, leading: Tensor, count: int) -> None:
    """Make all but the `count` largest of scores [V] -inf; among equals those of lower id are kept.

    `leading` [N] holds the largest scores in falling order, N > count.
    """
    last = leading[count - 1]
    dropped = scores < last
    if leading[count] == last:
        ties = scores == last
        dropped |= ties & (ties.cumsum(dim=0) > count - (scores > last).sum())
    scores.masked_fill_(dropped, -math.inf)


@lru_cache(maxsize=64)  # a drafter that is lent it and the target ask for the same
def gumbel(seed: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """Gumbel noise [V] in fp32 for the token at one absolute position; not to be written to."""
    key = _key(seed, position)
    bits = _hashed_ids(vocab_size, device) ^ _signed(key >> 32)
    _mix_(_mix_(bits).bitwise_xor_(_signed(key & 0xFFFFFFFF)))
    # An exponential variable is -log(1 - u).  The likely winners have a small one, and 31 bits turned into
    # a float keep their full resolution near 0; near 1 they round up to 1, which is kept out.
    uniform = bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


@lru_cache(maxsize=8)
def _hashed_ids(vocab_size: int, device: torch.device) -> Tensor:
    """A hash of each token id; the same for every seed and position."""
    with torch.inference_mode(False):
        return _mix_(torch.arange(1, vocab_size + 1, dtype=torch.int32, device=device))


def _mix_(x: Tensor) -> Tensor:
    """In place, a 32-bit permutation in which every input bit moves every output bit; int32 overflow wraps."""
    shifted = torch.empty_like(x)
    for shift, factor in ((16, 0x7FEB352D), (15, _signed(0x846CA68B)), (16, 1)):
        # Right shifts of int32 copy the sign; the mask takes the copies out.
        torch.bitwise_right_shift(x, shift, out=shifted).bitwise_and_((1 << (32 - shift)) - 1)
        x.bitwise_xor_(shifted).mul_(factor)
    return x


def _key(seed: int, position: int) -> int:
    """64 well-mixed bits of (seed, position)."""
    x = _mix64((seed & _MASK64) ^ 0x9E3779B97F4A7C15)
    return _mix64((x + position * 0xD1B54A32D192ED03) & _MASK64)


def _mix64(x: int) -> int:
    for _ in range(2):
        x = ((x ^ (x >> 32)) * 0xD6E8FEB86659FD93) & _MASK64
    return x ^ (x >> 32)


def _signed(value: int) -> int:
    """The 32-bit pattern of `value` as torch writes it in int32."""
    return value - (1 << 32) if value >= 1 << 31 else value
