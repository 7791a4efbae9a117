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
from dataclasses import dataclass

from blockdraft.drafters.base import COSTLY, Proposal
from blockdraft.engine.calibration import Calibration, Ledger
from blockdraft.engine.costs import Pace, VerifyCosts
from blockdraft.engine.habit import HURDLE, Habit
from blockdraft.engine.outlook import Forecast, Outlook, forecast, hopeful
from blockdraft.engine.policy import Ask, Row, available, best_width, expected_tokens
from blockdraft.engine.probe import few

INTEREST = 1 / 150  # of a plain round: what each of them earns for trying to draft again
CREDIT = 1.0  # plain rounds that may be lost at first, to learn what drafting is worth
EARNED = 8.0  # plain rounds that drafting has gained and that may be lost again: texts change
DEEPEST = 2.0  # plain rounds of loss that are remembered
SURE = 3  # tries with few rows, as soon after one another as the account allows, that agree before all are asked
SPELL = 32.0  # rounds that drafting is expected to go on for: what catching up takes is spread over them
NEAR = 2.0  # times as many rows, at most: what was measured for them says something


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
        """What it tells of: the drafter, for all rows or for some, what its free part found, or plain decoding."""
        if self.costly > 0:
            return self.asked
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
        self.pace, self.calibration, self.ledger, self.outlook = Pace(), Calibration(), Ledger(), Outlook()
        self.habits: dict[tuple[Ask, int], Habit] = {}
        self.debt = -CREDIT  # plain rounds that trying to draft has cost, and plain rounds have not earned back
        self._round: Round | None = None
        self._news = False  # drafts were judged, and what to expect has not been looked at since
        self._promising = 0  # tries with few rows by which all should be asked, without one to the contrary

    def prepare(self) -> None:
        """Learn the costs now, if they are not known."""
        if self.costs is None:
            self.costs = self.measure()

    def begin(self, rows: Sequence[Row]) -> Ask:
        self.prepare()
        self._round = Round(rows, Ask.NOBODY, began=self.clock())
        self._round.asked = self._whom(rows)
        return self._round.asked

    def _whom(self, rows: Sequence[Row]) -> Ask:
        whole, tried = self._habit(Ask.ALL, len(rows)), len(few(rows))
        if not whole.pays and self._news and self.debt <= 0:
            self._news = False
            expected = self._forecast()
            self._promising = self._promising + 1 if expected.pays(HURDLE) else 0
            if 0 < self._promising < SURE and tried < len(rows):
                whole.left = 0  # a few rows may have had luck: they are asked once more
            else:
                self._promising = 0
                whole.judge(self.pace.dearer(len(rows)), expected)
        paid = whole.pays
        if whole.next(self.debt):
            if paid:
                return Ask.ALL
            if self._forecast(hopeful(self.limit)).pays(HURDLE):  # else nothing that is seen could change anything
                if self._promising == 0:
                    self.outlook.doubt()
                return Ask.ALL if tried == len(rows) else Ask.SOME
        return Ask.FREE if self.partly_free and not whole.pays else Ask.NOBODY

    def widths(self, proposal: Proposal, limits: Sequence[int]) -> list[int]:
        current = self._current()
        current.drafting = self.clock() - current.began
        current.began += current.drafting  # the pass begins; deciding is part of it
        tops = available(proposal, limits)
        sources = proposal.sources if proposal.sources is not None else [COSTLY] * len(tops)
        current.costly = sources.count(COSTLY)
        if max(tops) == 0:
            return tops
        survivals = []
        for row, source, sure, ids, top in zip(
            current.rows, sources, _said(proposal, len(tops)), proposal.tokens.tolist(), tops, strict=True
        ):
            kind = source, row.sampled
            survivals.append(self.calibration.survival(kind, sure[:top]))
            if top > 0:  # else there may be earlier ones whose fate is still open
                self.ledger.note(row.slot, kind, ids[:top], sure[:top])
        passes = [self._seconds(width + 1) for width in range(max(tops) + 1)]
        drafting = self._drafting(current.costly)
        current.width = best_width(survivals, [drafting + seconds for seconds in passes])
        free = self._habit(Ask.FREE, len(tops))
        if current.costly == 0:
            found = Forecast(expected_tokens(survivals, current.width) / len(tops), passes[current.width] / passes[0])
            if current.width > 0 and not (found.pays(HURDLE) and free.next(self.debt)):
                current.width = 0
        elif free.pays:
            alone = [[] if source == COSTLY else row for source, row in zip(sources, survivals, strict=True)]
            width = best_width(alone, passes)
            current.instead = expected_tokens(alone, width) / len(tops) * passes[0] / passes[width]
        return [min(current.width, top) for top in tops]

    def learn(self, committed: Sequence[Sequence[int]], timed: bool = True) -> None:
        current = self._current()
        assert self.costs is not None, "known since the round began"
        rows, tokens = len(current.rows), current.width + 1
        if timed:
            taken = self.clock() - current.began
            self.pace.learn(rows, tokens, taken / self.costs.verify(rows, tokens, current.context))
        for row, ids in zip(current.rows, committed, strict=True):
            for kind, position, confidence, right in self.ledger.judge(row.slot, ids):
                self.calibration.learn(kind, position, confidence, right)
                source, sampled = kind
                if source == COSTLY:
                    self.outlook.learn(sampled, position, right)
                    self._news = True
        if current.part is Ask.NOBODY:
            self.debt = max(self.debt - INTEREST, min(self.debt, 0.0))
        else:
            self._judge(current, sum(len(ids) for ids in committed) / rows)
        self._round = None

    def _judge(self, current: Round, gained: float) -> None:
        """Learn from a round that verified drafts or had the costly part asked; it gave `gained` tokens per row."""
        assert self.costs is not None, "known since the round began"
        rows, plain = len(current.rows), self._seconds(1)
        verifying, dearer = self._seconds(current.width + 1) / plain, self.pace.dearer(rows)
        if current.part is not Ask.SOME:
            measured = self.costs.draft(current.costly)
            if current.costly and measured > 0 and all(row.waiting <= self.limit + 1 for row in current.rows):
                self.pace.learn(rows, 0, current.drafting / measured)  # else the drafter had to catch up first
            cost = (self._drafting(current.costly) / plain + verifying) * current.instead
            habit = self._habit(current.part, rows)
            habit.learn(gained, cost / dearer)
            habit.judge(dearer, self._forecast() if current.part is Ask.ALL else None)
        # What trying costs is what it did cost, catching up included.
        lost = verifying + current.drafting / (plain * self.pace.speed) - gained
        self.debt = min(max(self.debt + lost, -EARNED), DEEPEST)

    def admit(self, slot: int) -> None:
        self.ledger.forget(slot)
        for (_, rows), habit in self.habits.items():
            habit.refresh(rows)

    def _current(self) -> Round:
        assert self._round is not None, "a round has begun"
        return self._round

    def _habit(self, part: Ask, rows: int) -> Habit:
        if (part, rows) not in self.habits:
            near = [other for one, other in self.habits if one is part and 1 / NEAR <= other / rows <= NEAR]
            nearest = min(near, key=lambda other: abs(other - rows), default=None)
            made = Habit.of(rows) if nearest is None else self.habits[part, nearest].copy(rows)
            if part is Ask.ALL and nearest is None:
                made.pays = self._forecast().pays(HURDLE) and self.debt <= 0
            self.habits[part, rows] = made
        return self.habits[part, rows]

    def _forecast(self, survival: Sequence[float] | None = None) -> Forecast:
        """What asking the whole drafter should bring these rows: by what became of its drafts of late."""
        assert self.costs is not None, "known since the round began"
        rows = self._current().rows
        if survival is None:
            survival = self.outlook.survival([row.sampled for row in rows], self.limit)
        rounds = min(SPELL, max(sum(row.remaining for row in rows) / len(rows), 1.0))
        catching_up = self.costs.reading * sum(row.waiting for row in rows) / rounds
        drafting = self._drafting(len(rows)) + catching_up
        return forecast(survival, [self._seconds(k + 1) for k in range(self.limit + 1)], drafting)

    def _seconds(self, tokens: int) -> float:
        """What a pass over `tokens` of each row takes at present."""
        current = self._current()
        assert self.costs is not None, "known since the round began"
        rows = len(current.rows)
        return self.costs.verify(rows, tokens, current.context) * self.pace.factor(rows, tokens)

    def _drafting(self, costly: int) -> float:
        """What drafting for so many of the rows takes at present."""
        assert self.costs is not None, "known since the round began"
        return self.costs.draft(costly) * self.pace.factor(len(self._current().rows), 0) if costly else 0.0


def _said(proposal: Proposal, rows: int) -> list[list[float | None]]:
    """How sure the drafter is of each of its drafts, row by row (None: it does not say)."""
    if proposal.confidence is None:
        return [[None] * proposal.tokens.shape[1] for _ in range(rows)]
    told = proposal.confidence.tolist()
    return [[None if math.isnan(value) else value for value in row] for row in told]
