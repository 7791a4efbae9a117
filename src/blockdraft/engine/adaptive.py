"""The policy that watches its costs: as many drafts as pay, and none at all where drafting does not.

Only widths depend on time; the tokens are the target's own choices whatever is verified.
Letters: B rows, K drafts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

from blockdraft.drafters.base import Proposal
from blockdraft.engine.calibration import Calibration, Ledger
from blockdraft.engine.costs import Pace, VerifyCosts
from blockdraft.engine.means import Mean
from blockdraft.engine.policy import Row, available, best_width

FIRST_WAIT = 8  # rounds until the other way is tried, doubled each time
LONGEST_WAIT = {False: 64, True: 256}  # by whether drafting pays
MEMORY = 20.0  # drafted rounds that say whether drafting pays
ENOUGH = 3.0  # of them, to say it
PROBE = 2.0  # of them that count when drafting is tried again
TOLERANCE = 0.01  # of a plain round: a loss too small to stop drafting for
INTEREST = 0.01  # of a plain round: what each of them earns for trying to draft again
CREDIT = 2.0  # plain rounds that may be lost at first, to learn what drafting is worth
DEEPEST = 1.0  # plain rounds of loss that are remembered


@dataclass
class Habit:
    """Whether drafting pays for some number of rows, from tokens per row and costs (in plain rounds) of such rounds.

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
    """A round under way: when its pass began, and what it cost to draft for it (None: the drafter was not asked)."""

    rows: Sequence[Row]
    began: float
    width: int = 0
    drafting: float | None = None

    @property
    def context(self) -> int:
        """Tokens before the pass, by the mean of the rows."""
        return sum(row.context for row in self.rows) // len(self.rows)


class Adaptive:
    """Verifies what gives the most tokens per second, and stops drafting for as long as that gives more.

    `measure` is asked for the costs once, before the first round; `clock` gives seconds.
    """

    def __init__(
        self, limit: int, measure: Callable[[], VerifyCosts], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.limit = limit
        self.measure, self.clock = measure, clock
        self.costs: VerifyCosts | None = None
        self.pace, self.calibration, self.ledger = Pace(), Calibration(), Ledger()
        self.habits: dict[int, Habit] = {}
        self.debt = -CREDIT  # plain rounds that trying to draft has cost, and plain rounds have not earned back
        self._round: Round | None = None
        self._drafted_before = True

    def prepare(self) -> None:
        """Learn the costs now, if they are not known."""
        if self.costs is None:
            self.costs = self.measure()

    def begin(self, rows: Sequence[Row]) -> bool:
        self.prepare()
        drafts = self._habit(len(rows)).next(self.debt)
        self._round = Round(rows, began=self.clock())
        return drafts

    def widths(self, proposal: Proposal, limits: Sequence[int]) -> list[int]:
        current = self._current()
        current.drafting = self.clock() - current.began
        tops = available(proposal, limits)
        kinds, confidences = _said(proposal, current.rows)
        tokens = proposal.tokens.tolist()
        survivals = []
        for row, kind, sure, ids, top in zip(current.rows, kinds, confidences, tokens, tops, strict=True):
            survivals.append(self.calibration.survival(kind, sure[:top]))
            self.ledger.note(row.slot, kind, ids[:top], sure[:top])
        drafting = self._seconds(0)
        seconds = [drafting + self._seconds(width + 1) for width in range(max(tops) + 1)]
        current.width = best_width(survivals, seconds)
        current.began += current.drafting  # the pass begins; deciding is part of it
        return [min(current.width, top) for top in tops]

    def learn(self, committed: Sequence[Sequence[int]]) -> None:
        current, self._round = self._current(), None
        assert self.costs is not None, "known since the round began"
        rows, context = len(current.rows), current.context
        taken, tokens = self.clock() - current.began, current.width + 1
        self.pace.learn(rows, tokens, taken / self.costs.verify(rows, tokens, context))
        for row, ids in zip(current.rows, committed, strict=True):
            for judged in self.ledger.judge(row.slot, ids):
                self.calibration.learn(*judged)
        if current.drafting is None:
            self.debt = max(self.debt - INTEREST, min(self.debt, 0.0))
        else:
            drafting = self.costs.draft(rows)
            if self._drafted_before and drafting > 0:  # else the drafter had to catch up first
                self.pace.learn(rows, 0, current.drafting / drafting)
            gained = sum(len(ids) for ids in committed) / rows
            cost = (self._seconds(0, current) + self._seconds(tokens, current)) / self._seconds(1, current)
            self._habit(rows).learn(gained, cost / self.pace.dearer(rows), self.pace.dearer(rows))
            self.debt = min(max(self.debt + cost - gained, min(self.debt, 0.0)), DEEPEST)
        self._drafted_before = current.drafting is not None

    def admit(self, slot: int) -> None:
        self.ledger.forget(slot)
        for rows, habit in self.habits.items():
            habit.refresh(rows)

    def _current(self) -> Round:
        assert self._round is not None, "a round has begun"
        return self._round

    def _habit(self, rows: int) -> Habit:
        if rows not in self.habits:
            known = min(self.habits, key=lambda other: abs(other - rows), default=None)
            self.habits[rows] = Habit() if known is None else self.habits[known].copy()
        return self.habits[rows]

    def _seconds(self, tokens: int, current: Round | None = None) -> float:
        """What a pass over `tokens` of each row takes at present; 0 tokens: what drafting does."""
        current = current if current is not None else self._current()
        assert self.costs is not None, "known since the round began"
        rows = len(current.rows)
        measured = self.costs.verify(rows, tokens, current.context) if tokens else self.costs.draft(rows)
        return measured * self.pace.factor(rows, tokens)


def _said(proposal: Proposal, rows: Sequence[Row]) -> tuple[list[Hashable], list[list[float | None]]]:
    """Of each row the kind of its drafts, and how sure the drafter is of each (None: it does not say)."""
    sources = proposal.sources if proposal.sources is not None else [0] * len(rows)
    kinds: list[Hashable] = [(source, row.sampled) for source, row in zip(sources, rows, strict=True)]
    if proposal.confidence is None:
        return kinds, [[None] * proposal.tokens.shape[1] for _ in rows]
    told = proposal.confidence.tolist()
    return kinds, [[None if math.isnan(value) else value for value in row] for row in told]
