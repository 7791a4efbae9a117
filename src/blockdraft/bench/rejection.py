"""Classical rejection sampling along known answers: how many independently sampled drafts it would have kept.

Leviathan et al. (arXiv 2211.17192, algorithm 1) sample a draft from the drafter's distribution q, keep it with
probability min(1, p(draft) / q(draft)), p being the target's, and where one is not kept they choose anew from the
normed max(p - q, 0).  The engine does nothing of the kind: its answers have to be plain decoding's own, and these are
new ones.  But they are distributed as plain decoding's are, so plain decoding's answers can stand for them.  A token y
comes out of a kept draft with probability min(p(y), q(y)) and out of a new choice with the rest of p(y).  So, given
that y came out, a draft was kept with probability min(1, q(y) / p(y)), and the drafts behind it were sampled after y.
Nothing is left to be sampled: the expected number of rounds is exact for each answer, and one pass of the target over
the answer and one proposal from each of its tokens have everything in them.

Letters: B rows, K drafts, V' rows of a draft head, N tokens of an answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockdraft.bench.replay import Told
from blockdraft.config import SamplingParams
from blockdraft.drafters.base import Drafter
from blockdraft.ops.sampling import ChoiceState, Coupling, truncate
from blockdraft.targets.base import Target


def expected_rounds(chances: Sequence[Sequence[float]], tokens: int) -> float:
    """Rounds that rejection sampling takes for the last `tokens` tokens of a known text, on average.

    chances[t][k] is the probability that draft k of a round which begins with t of them done is kept, if those before
    it were.  A round in which j drafts are kept gives j + 1 tokens; what is drafted behind the end does not count.
    """
    begins, rounds = [1.0] + [0.0] * tokens, 0.0
    for done in range(tokens):
        alive = begins[done]
        rounds += alive
        for k, keeps in enumerate(chances[done][: tokens - done - 1]):
            begins[done + k + 1] += alive * (1.0 - keeps)
            alive *= keeps
        begins[min(done + len(chances[done]) + 1, tokens)] += alive
    return rounds


@torch.no_grad()
def chances(target: Target, drafter: Drafter, told: Told, params: SamplingParams) -> list[list[float]]:
    """[N - 1][K]: for a round from each token of an answer but the last, how probably each draft was kept.

    Given that the answer came out, and that the drafts before it were kept.  The drafter must draw its drafts, by what
    `Coupling.choose` says: a lookup does not.
    """
    ids = torch.tensor([[*told.prompt, *told.answer[:-1]]], device=target.info.device)
    steps, first = len(told.answer) - 1, len(told.prompt)
    if steps < 1:
        return []
    target.set_taps(drafter.tap_ids)
    read = target.forward(ids, target.new_cache(1, ids.shape[1]), [0], keep_logits=steps)
    choice = ChoiceState(params, 0, told.prompt, target.info.vocab_size, target.info.device)
    log_p = [_log_probability(row, choice, told.answer[t + 1]) for t, row in enumerate(read.logits[0])]

    state = drafter.new_state(1, ids.shape[1] + drafter.block_size)
    shown, found = 0, []
    for t in range(steps):
        new = slice(shown, first + t)
        taps = None if read.taps is None else read.taps[:, new]
        drafter.observe(state, [0], ids[:, new], taps, [first + t - shown])
        shown = first + t
        forced = Forced([choice], [first + t + 1], told.answer[t + 1 :])
        drafter.propose(state, [0], ids[:, first + t], forced)
        assert forced.noted, "a drafter that does not draw its drafts has no chances"
        found.append([min(1.0, math.exp(q - log_p[t + k])) for k, q in enumerate(forced.noted)])
    return found


@dataclass(frozen=True)
class Forced(Coupling):
    """Makes a drafter draft what is known to follow in its one row, and notes how probable that was.

    noted[k] is the log-probability that it would have drawn the k-th known token, after those before it.
    """

    following: Sequence[int]
    noted: list[float] = field(default_factory=list)

    def choose(self, scores: Tensor, ahead: int, ids: Tensor | None = None) -> Tensor:
        """The column [1] of scores [1, V'] that is the known token `ahead` of the first; 0 where there is none."""
        column = None
        if ahead < len(self.following):
            token = self.following[ahead]
            column = token if ids is None else next(iter((ids == token).nonzero().flatten().tolist()), None)
            (choice,), (row,) = self.states, scores
            self.noted.append(-math.inf if column is None else _log_probability(row, choice, column))
        return torch.tensor([column or 0], device=scores.device)


def _log_probability(scores: Tensor, choice: ChoiceState, column: int) -> float:
    """Of one column of scores [V'], at the request's temperature and cut as it asks."""
    return float(truncate(scores.float(), choice.params).log_softmax(dim=-1)[column])
