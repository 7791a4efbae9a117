"""How many drafts a round verifies: the rule, and the policies that an engine can have.

Letters: B rows, K drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from blockdraft.drafters.base import Proposal


@dataclass(frozen=True)
class Row:
    """What a policy may know of a running request.

    Its slot, the tokens read, whether its choices are random, how many tokens the drafter has yet to be shown, and how
    many it may still emit.
    """

    slot: int
    context: int
    sampled: bool
    waiting: int = 0
    remaining: int = 1 << 20


class Ask(Enum):
    """Whom a round asks for drafts: nobody, the part of the drafter that is free, or all of it, for a few rows or all.

    Which few rows these are says `probe.few`.
    """

    NOBODY = "nobody"
    FREE = "free"
    SOME = "some"
    ALL = "all"


class Policy(Protocol):
    """Decides what a round does.  It is asked in the order of its methods, and never changes an answer.

    `limit` is the most drafts it would ever verify.
    """

    limit: int

    def begin(self, rows: Sequence[Row]) -> Ask:
        """A round begins; whom to ask for drafts.  `Ask.FREE` only of a drafter that has such a part."""
        ...

    def widths(self, proposal: Proposal, limits: Sequence[int]) -> list[int]:
        """Drafts to verify of each row: at most limits[b], and at most as many as were proposed."""
        ...

    def learn(self, committed: Sequence[Sequence[int]], timed: bool = True) -> None:
        """The round is over: the tokens that it gave each row.

        timed: it ended just now; else it may have ended long ago, unseen.
        """
        ...

    def admit(self, slot: int) -> None:
        """Another request begins in a slot."""
        ...


class Fixed:
    """Verifies all that is proposed, up to a limit; 0 is plain decoding."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def begin(self, rows: Sequence[Row]) -> Ask:  # noqa: ARG002  # always the same
        return Ask.ALL if self.limit > 0 else Ask.NOBODY

    def widths(self, proposal: Proposal, limits: Sequence[int]) -> list[int]:
        return available(proposal, limits)

    def learn(self, committed: Sequence[Sequence[int]], timed: bool = True) -> None:
        pass

    def admit(self, slot: int) -> None:
        pass


def verify_widths(limit: int, remaining: Sequence[int], room: Sequence[int]) -> list[int]:
    """Drafts that may be verified for each row.

    `limit` is what is proposed or allowed at all.  A row never verifies more than it may emit besides the
    target's own token, and since all rows go through one pass, none more than the fullest slot has room for.
    """
    limit = min(limit, min(room) - 1)
    return [min(limit, left - 1) for left in remaining]


def available(proposal: Proposal, limits: Sequence[int]) -> list[int]:
    """Drafts of each row that exist and may be verified."""
    counts = proposal.counts if proposal.counts is not None else [proposal.tokens.shape[1]] * len(limits)
    return [min(limit, count) for limit, count in zip(limits, counts, strict=True)]


def expected_tokens(survivals: Sequence[Sequence[float]], width: int) -> float:
    """Tokens that a pass over `width` drafts of each row should give: its own one, and each draft that survives.

    survivals[b][k] is the probability that drafts 0..k of row b are all right; a row may have fewer drafts.
    """
    return sum(1.0 + sum(survival[:width]) for survival in survivals)


def best_width(survivals: Sequence[Sequence[float]], seconds: Sequence[float]) -> int:
    """The width K that gives the most tokens per second, of equals the least; seconds[K] is what a round of it takes.

    All rows go through one pass, so it is one for all: a row that has fewer drafts verifies what it has.  (D-Cut,
    SGLang's and vLLM's adaptive verification maximise the same, over their own tables.)
    """
    rates = [expected_tokens(survivals, width) / cost for width, cost in enumerate(seconds)]
    return rates.index(max(rates))
