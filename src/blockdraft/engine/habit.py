"""Whether drafting pays for some number of rows, and when that is looked at again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from blockdraft.engine.means import Mean
from blockdraft.engine.outlook import Forecast

FIRST_WAIT = 8  # rounds until the other way is tried, doubled each time
LONGEST_WAIT = {False: 64, True: 256}  # by whether drafting pays
MEMORY = 20.0  # rounds that say whether drafting pays
SHORTEST = 4.0  # of them, where there are many rows: a round of all tells as much as many of one
ENOUGH_ROWS = 48.0  # rows of rounds that are enough to say it
ENOUGH = 3.0  # rounds of a row, before which drafting is not given up
FORESIGHT = 4.0  # rounds that a forecast counts as
PROBE = 2.0  # of them that count when drafting is tried again
TOLERANCE = 0.01  # of a plain round: a loss too small to stop drafting for
HURDLE = 0.05  # of a plain round: a gain too small to begin for: the drafter has to catch up, and rows part company


@dataclass
class Habit:
    """Whether drafting pays, from tokens per row and costs (in plain rounds) of drafted rounds.

    There is one for the whole drafter, and one for verifying what its free part finds by itself.
    After `left` more rounds the other way is tried once: drafting, where it did not pay, to see whether it does now;
    a plain round, where it does, to know what that costs.  If that changes nothing, the next try waits twice as long.
    """

    rows: int
    tokens: Mean
    cost: Mean
    pays: bool = True
    wait: int = FIRST_WAIT
    left: int = FIRST_WAIT

    @classmethod
    def of(cls, rows: int) -> Habit:
        """One that knows nothing, for so many rows."""
        memory = min(max(SHORTEST, ENOUGH_ROWS / rows), MEMORY)
        return cls(rows, Mean(memory), Mean(memory))

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

    def learn(self, tokens: float, cost: float) -> None:
        """A drafted round gave so many tokens per row and cost so many plain rounds, times what `Pace` has found."""
        self.tokens.add(tokens)
        self.cost.add(cost)

    def judge(self, dearer: float, expected: Forecast | None = None) -> None:
        """Say anew whether drafting pays: by what was learned and, if there is one, what is expected besides."""
        if self.pays and self.tokens.weight * self.rows < ENOUGH:
            return
        known = Forecast(self.tokens.total, self.cost.total * dearer)
        if expected is not None:
            tokens, cost = FORESIGHT * expected.tokens, FORESIGHT * expected.cost
            known = Forecast(known.tokens + tokens, known.cost + cost)
        pays = known.pays(-TOLERANCE if self.pays else HURDLE)
        if pays != self.pays:
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

    def copy(self, rows: int) -> Habit:
        """A start for another number of rows."""
        made = Habit.of(rows)
        copied = replace(self, rows=rows, tokens=replace(made.tokens), cost=replace(made.cost))
        for new, old in ((copied.tokens, self.tokens), (copied.cost, self.cost)):
            new.total, new.weight = old.total, old.weight
        copied.doubt(PROBE)
        return copied
