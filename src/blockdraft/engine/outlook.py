"""What drafting should bring, before anybody is asked for drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blockdraft.engine.calibration import Calibration
from blockdraft.engine.policy import best_width, expected_tokens

PRIOR = {False: 0.8, True: 0.5}  # how often a draft is right, of a drafter that nobody knows: greedy, sampled
HOPE = 0.97  # how often at the very best
MEMORY = 40.0  # drafts that are remembered
LONG_AGO = 4.0  # of them that count when drafting is tried again


@dataclass(frozen=True)
class Forecast:
    """Tokens per row of a round and its cost, in plain rounds; for plain decoding both are 1."""

    tokens: float
    cost: float

    def pays(self, margin: float) -> bool:
        """Whether it gives more than plain decoding, by such a share at least."""
        return self.tokens >= (1.0 + margin) * self.cost


def forecast(survival: Sequence[float], passes: Sequence[float], drafting: float) -> Forecast:
    """Of the best width: survival[k] that drafts 0..k are right, passes[K] the seconds of verifying K of them."""
    width = best_width([survival], [drafting + seconds for seconds in passes])
    return Forecast(expected_tokens([survival], width), (drafting + passes[width]) / passes[0])


class Outlook:
    """How often drafts of late were right by how far ahead they were, whatever their drafter was sure of.

    It counts drafts and not rounds, so with many rows a round or two tell as much as ten with one; and what one number
    of rows has shown is known to all.
    """

    def __init__(self) -> None:
        # A drafter that always says the same has one cell for each position, and its word as the prior.
        self._counts = Calibration(MEMORY)

    def learn(self, sampled: bool, position: int, right: bool) -> None:
        """A draft at `position` (1 is the first), all before it being right, was right or not."""
        self._counts.learn(sampled, position, PRIOR[sampled], right)

    def doubt(self) -> None:
        """Much may have changed since the last drafts: a few new ones are to be heard."""
        self._counts.doubt(LONG_AGO)

    def survival(self, sampled: Sequence[bool], limit: int) -> list[float]:
        """For each of `limit` drafts of such rows, the probability that it and all before it are right."""
        share = sum(sampled) / len(sampled)
        random, greedy = (self._counts.survival(kind, [PRIOR[kind]] * limit) for kind in (True, False))
        return [share * one + (1.0 - share) * other for one, other in zip(random, greedy, strict=True)]


def hopeful(limit: int) -> list[float]:
    """The survival of drafts that could hardly be better."""
    return [HOPE**k for k in range(1, limit + 1)]
