"""The policy that watches its costs: as many drafts as pay, and none at all where drafting does not.

A drafter may have a part that is free to ask (see `PartlyFree`).  Where the whole does not pay, that part is still
asked, and what it finds is verified where that pays.
Only widths depend on time; the tokens are the target's own choices whatever is verified.
Letters: B rows, K drafts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from blockdraft.drafters.base import COSTLY, Proposal
from blockdraft.engine.calibration import Calibration, Ledger
from blockdraft.engine.costs import Pace, VerifyCosts
from blockdraft.engine.means import Mean
from blockdraft.engine.policy import Ask, Row, available, best_width, expected_tokens

FIRST_WAIT = 8  # rounds until the other way is tried, doubled each time
LONGEST_WAIT = {False: 64, True: 256}  # by whether drafting pays
MEMORY = 20.0  # drafted rounds that say whether drafting pays
ENOUGH = 3.0  # of them, to say it
PROBE = 2.0  # of them that count when drafting is tried again
TOLERANCE = 0.01  # of a plain round: a loss too small to stop drafting for
INTEREST = 1 / 150  # of a plain round: what each of them earns for trying to draft again
CREDIT = 2.0  # plain rounds that may be lost at first, to learn what drafting is worth, or once it has gained them
DEEPEST = 2.0  # plain rounds of loss that are remembered


@dataclass
class Habit:
    """Whether drafting pays for some number of rows, from tokens per row and costs (in plain rounds) of such rounds.

    There is one for the whole drafter, and one for verifying what its free part finds by itself.
    After `left` more rounds the other way is tried once: drafting, where it did not pay, to see whether it does now;
    a plain round, where it does, to know what that costs.  If that changes nothing, the next try waits twice as long.
    """

    tokens: Mean = field(default_factory=lambda: Mean(MEMORY))
    cost: Mean = field(default_factory=lambda: Mean(MEMORY))
    pays: bool = True
    wait: int = FIRST_WAIT
    left: int = FIRST_WAIT

    def next(self, debt: float) -> bool:
        """Whether the coming round drafts.  With a debt it is not tried where it did not pay."""
        if self.left > 0:
            self.left -= 1
            return self.pays
        if not self.pays and debt > 0:
            return False
        self.wait = self.left = min(2 * self.wait, LONGEST_WAIT[self.pays])
        if not self.pays:
            self.doubt(PROBE)
        return not self.pays

    def learn(self, tokens: float, cost: float, dearer: float) -> None:
        """A drafted round gave so many tokens per row and cost so many plain rounds, times what `Pace` has found."""
        self.tokens.add(tokens)
        self.cost.add(cost)
        pays = self.tokens.total >= (1.0 - TOLERANCE) * self.cost.total * dearer
        if pays != self.pays and self.tokens.weight >= ENOUGH:
            self.pays, self.wait, self.left = pays, FIRST_WAIT, FIRST_WAIT

    def doubt(self, weight: float) -> None:
        """Let what is known count as no more than so many rounds."""
        self.tokens.forget(weight)
        self.cost.forget(weight)

    def refresh(self, rows: int) -> None:
        """One row of so many has another text: part of what is known is out of date."""
        self.doubt(max(PROBE, self.tokens.weight * (1.0 - 1.0 / rows)))
        if not self.pays:
            self.wait, self.left = FIRST_WAIT, min(self.left, FIRST_WAIT)

    def copy(self) -> Habit:
        """A start for another number of rows."""
        copied = replace(self, tokens=replace(self.tokens), cost=replace(self.cost))
        copied.doubt(PROBE)
        return copied


@dataclass
class Round:
    """A round under way: when its pass began, and what asking for drafts was like.

    `drafting` are the seconds that it took, `costly` the rows for which not only the free part was asked, `instead`
    the tokens of a row that the free part alone should have given in the time of a plain round.
    """

    rows: Sequence[Row]
    asked: Ask
    began: float
    width: int = 0
    drafting: float = 0.0
    costly: int = 0
    instead: float = 1.0

    @property
    def context(self) -> int:
        """Tokens before the pass, by the mean of the rows."""
        return sum(row.context for row in self.rows) // len(self.rows)

    @property
    def part(self) -> Ask:
        """What it tells of: the whole drafter, what its free part found, or plain decoding."""
        if self.costly > 0:
            return Ask.ALL
        return Ask.FREE if self.width > 0 else Ask.NOBODY


class Adaptive:
    """Verifies what gives the most tokens per second, and stops drafting for as long as that gives more.

    `measure` is asked for the costs once, before the first round; `clock` gives seconds; `partly_free`: the drafter
    has a part that may be asked alone.
    """

    def __init__(
        self,
        limit: int,
        measure: Callable[[], VerifyCosts],
        clock: Callable[[], float] = time.perf_counter,
        partly_free: bool = False,
    ) -> None:
        self.limit = limit
        self.measure, self.clock, self.partly_free = measure, clock, partly_free
        self.costs: VerifyCosts | None = None
        self.pace, self.calibration, self.ledger = Pace(), Calibration(), Ledger()
        self.habits: dict[tuple[Ask, int], Habit] = {}
        self.debt = -CREDIT  # plain rounds that trying to draft has cost, and plain rounds have not earned back
        self._round: Round | None = None
        self._shown_before = True  # the drafter has less than a round to catch up with

    def prepare(self) -> None:
        """Learn the costs now, if they are not known."""
        if self.costs is None:
            self.costs = self.measure()

    def begin(self, rows: Sequence[Row]) -> Ask:
        self.prepare()
        whole, asked = self._habit(Ask.ALL, len(rows)), Ask.NOBODY
        if whole.next(self.debt):
            asked = Ask.ALL
        elif self.partly_free and not whole.pays:
            asked = Ask.FREE
        self._round = Round(rows, asked, began=self.clock())
        return asked

    def widths(self, proposal: Proposal, limits: Sequence[int]) -> list[int]:
        current = self._current()
        current.drafting = self.clock() - current.began
        current.began += current.drafting  # the pass begins; deciding is part of it
        tops = available(proposal, limits)
        sources = proposal.sources if proposal.sources is not None else [COSTLY] * len(tops)
        survivals = []
        for row, source, sure, ids, top in zip(
            current.rows, sources, _said(proposal, len(tops)), proposal.tokens.tolist(), tops, strict=True
        ):
            kind = source, row.sampled
            survivals.append(self.calibration.survival(kind, sure[:top]))
            if top > 0:  # else there may be earlier ones whose fate is still open
                self.ledger.note(row.slot, kind, ids[:top], sure[:top])
        current.costly = sources.count(COSTLY)
        passes = [self._seconds(width + 1) for width in range(max(tops) + 1)]
        drafting = self._seconds(0)
        current.width = best_width(survivals, [drafting + seconds for seconds in passes])
        free = self._habit(Ask.FREE, len(tops))
        if current.costly == 0:
            if current.width > 0 and not free.next(self.debt):
                current.width = 0
        elif free.pays:
            alone = [[] if source == COSTLY else row for source, row in zip(sources, survivals, strict=True)]
            width = best_width(alone, passes)
            current.instead = expected_tokens(alone, width) / len(tops) * passes[0] / passes[width]
        return [min(current.width, top) for top in tops]

    def learn(self, committed: Sequence[Sequence[int]], timed: bool = True) -> None:
        current, self._round = self._current(), None
        assert self.costs is not None, "known since the round began"
        rows, tokens = len(current.rows), current.width + 1
        if timed:
            taken = self.clock() - current.began
            self.pace.learn(rows, tokens, taken / self.costs.verify(rows, tokens, current.context))
        for row, ids in zip(current.rows, committed, strict=True):
            for judged in self.ledger.judge(row.slot, ids):
                self.calibration.learn(*judged)
        if current.part is Ask.NOBODY:
            self.debt = max(self.debt - INTEREST, min(self.debt, 0.0))
        else:
            self._judge(current, sum(len(ids) for ids in committed) / rows)
        self._shown_before = current.asked is Ask.ALL

    def _judge(self, current: Round, gained: float) -> None:
        """Learn from a round that verified drafts or had the costly part asked; it gave `gained` tokens per row."""
        assert self.costs is not None, "known since the round began"
        rows, plain = len(current.rows), self._seconds(1, current)
        measured = self.costs.draft(current.costly) if current.costly else 0.0
        if self._shown_before and measured > 0:  # else the drafter had to catch up first
            self.pace.learn(rows, 0, current.drafting / measured)
        verifying, dearer = self._seconds(current.width + 1, current) / plain, self.pace.dearer(rows)
        cost = (self._seconds(0, current) / plain + verifying) * current.instead
        self._habit(current.part, rows).learn(gained, cost / dearer, dearer)
        # What trying costs is what it did cost, catching up included.
        lost = verifying + current.drafting / (plain * self.pace.speed) - gained
        self.debt = min(max(self.debt + lost, -CREDIT), DEEPEST)

    def admit(self, slot: int) -> None:
        self.ledger.forget(slot)
        for (_, rows), habit in self.habits.items():
            habit.refresh(rows)

    def _current(self) -> Round:
        assert self._round is not None, "a round has begun"
        return self._round

    def _habit(self, part: Ask, rows: int) -> Habit:
        if (part, rows) not in self.habits:
            others = [number for one, number in self.habits if one is part]
            nearest = min(others, key=lambda other: abs(other - rows), default=None)
            self.habits[part, rows] = Habit() if nearest is None else self.habits[part, nearest].copy()
        return self.habits[part, rows]

    def _seconds(self, tokens: int, current: Round | None = None) -> float:
        """What a pass over `tokens` of each row takes at present; 0 tokens: what drafting does."""
        current = current if current is not None else self._current()
        assert self.costs is not None, "known since the round began"
        rows = len(current.rows)
        if tokens > 0:
            measured = self.costs.verify(rows, tokens, current.context)
        else:
            measured = self.costs.draft(current.costly) if current.costly else 0.0
        return measured * self.pace.factor(rows, tokens)


def _said(proposal: Proposal, rows: int) -> list[list[float | None]]:
    """How sure the drafter is of each of its drafts, row by row (None: it does not say)."""
    if proposal.confidence is None:
        return [[None] * proposal.tokens.shape[1] for _ in range(rows)]
    told = proposal.confidence.tolist()
    return [[None if math.isnan(value) else value for value in row] for row in told]
