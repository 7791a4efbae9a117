"""How often drafts are right, learned from what became of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from blockdraft.engine.means import Mean

Kind = tuple[int, bool]  # who drafted (see `Proposal.sources`), and whether the target's choices are random


class Calibration:
    """The probability that a draft is right: by its kind, by how far ahead it is and by how sure the drafter was.

    A drafter's confidence need not be true, so it is only a feature: drafts are counted in cells of (kind, position,
    confidence).  A cell that has seen little leans on the same confidence at all positions, and that on the
    confidence itself.  Positions 1, 2, 3-4, 5-8, ... share a cell, and confidences whose log-odds round to the same
    integer.  Drafts whose confidence is not known (None) have cells of their own.
    """

    strength = 4.0  # drafts that a prior counts as
    unknown = 0.5

    def __init__(self, memory: float = 200.0) -> None:
        self._cells: defaultdict[Hashable, Mean] = defaultdict(lambda: Mean(memory))  # drafts that a cell remembers

    def learn(self, kind: Hashable, position: int, confidence: float | None, right: bool) -> None:
        """A draft at `position` (1 is the first), all before it being right, was right or not."""
        level = _level(confidence)
        self._cells[kind, level].add(right)
        self._cells[kind, level, _distance(position)].add(right)

    def doubt(self, weight: float) -> None:
        """Let what is known count as no more than so many drafts of each cell."""
        for cell in self._cells.values():
            cell.forget(weight)

    def probability(self, kind: Hashable, position: int, confidence: float | None) -> float:
        """That such a draft is right, if those before it are."""
        level = _level(confidence)
        said = self.unknown if confidence is None else confidence
        anywhere = self._cells[kind, level].value(said, self.strength)
        return self._cells[kind, level, _distance(position)].value(anywhere, self.strength)

    def survival(self, kind: Hashable, confidences: Sequence[float | None]) -> list[float]:
        """For each of a row's drafts, the probability that it and all before it are right."""
        survived, alive = [], 1.0
        for position, confidence in enumerate(confidences, start=1):
            alive *= self.probability(kind, position, confidence)
            survived.append(alive)
        return survived


def _distance(position: int) -> int:
    return (position - 1).bit_length()


def _level(confidence: float | None) -> int | None:
    if confidence is None:
        return None
    inside = min(max(confidence, 1e-4), 1.0 - 1e-4)
    return min(max(round(math.log(inside / (1.0 - inside))), -5), 6)


@dataclass
class Ledger:
    """Drafts whose fate is not known yet, by slot: (kind, tokens, confidences, position of the first of them).

    A choice of the target does not depend on drafts, so the tokens that a row commits, however it comes to them, tell
    of every draft whether it was right, verified or not.
    """

    open: dict[int, tuple[Kind, list[int], list[float | None], int]] = field(default_factory=dict)

    def note(self, slot: int, kind: Kind, tokens: list[int], confidences: list[float | None]) -> None:
        """A row's newest drafts, which stand after its anchor."""
        self.open[slot] = kind, tokens, confidences, 1

    def judge(self, slot: int, committed: Sequence[int]) -> Iterator[tuple[Kind, int, float | None, bool]]:
        """(kind, position, confidence, right) of each draft that the tokens just committed decide.

        Behind a wrong one nothing is decided, now or later.
        """
        if slot not in self.open:
            return
        kind, tokens, confidences, first = self.open.pop(slot)
        for k, (draft, confidence, token) in enumerate(zip(tokens, confidences, committed, strict=False)):
            yield kind, first + k, confidence, draft == token
            if draft != token:
                return
        done = len(committed)
        if len(tokens) > done:
            self.open[slot] = kind, tokens[done:], confidences[done:], first + done

    def forget(self, slot: int) -> None:
        """A slot goes to another request."""
        self.open.pop(slot, None)
