"""What passes cost: seconds as measured beforehand, and what rounds show about them."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from blockdraft.engine.means import Mean
from blockdraft.text import write_whole


@dataclass(frozen=True)
class VerifyCosts:
    """Seconds of the target's passes over a few tokens of each row, and of drafting.

    seconds[i][j] is a pass over tokens[j] of each of rows[i] rows, each with `context` tokens before them;
    per_context[i] is what a further token of context costs the passes of the fewest and of the most tokens.
    drafting[i] is one proposal and the observing that goes with it; `reading` is a token that the drafter catches up
    with, of many.  Between what was measured, and beyond it, costs run straight.
    ValueError: numbers that cannot be costs.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    context: int
    seconds: tuple[tuple[float, ...], ...]
    per_context: tuple[tuple[float, float], ...]
    drafting: tuple[float, ...]
    reading: float = 0.0

    def __post_init__(self) -> None:
        axes = all(list(axis) == sorted(set(axis)) and axis and axis[0] >= 1 for axis in (self.rows, self.tokens))
        shape = [len(self.tokens)] * len(self.rows) == [len(row) for row in self.seconds]
        shape &= [2] * len(self.rows) == [len(row) for row in self.per_context] and len(self.drafting) == len(self.rows)
        values = [self.reading, *self.drafting, *(value for row in (*self.seconds, *self.per_context) for value in row)]
        positive = all(value > 0 for row in self.seconds for value in row)
        if not (axes and shape and positive and all(math.isfinite(value) and value >= 0 for value in values)):
            raise ValueError("these are no costs: sorted axes, and finite seconds for all of them")

    def verify(self, rows: int, tokens: int, context: int) -> float:
        """Seconds of a pass over `tokens` of each of so many rows behind `context` tokens; never nothing."""
        each = []
        for seconds, (few, many) in zip(self.seconds, self.per_context, strict=True):
            ends = (self.tokens[0], self.tokens[-1])
            slope = few if ends[0] == ends[1] else interpolate(tokens, ends, (few, many))
            each.append(interpolate(tokens, self.tokens, seconds) + slope * (context - self.context))
        return max(interpolate(rows, self.rows, each), min(self.seconds[0]) / 2)

    def draft(self, rows: int) -> float:
        """Seconds of drafting for so many rows."""
        return max(interpolate(rows, self.rows, self.drafting), 0.0)


def interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """The value at x of straight lines through (xs, ys), which go on beyond the ends; xs rise."""
    if len(xs) == 1:
        return ys[0]
    i = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)
    return ys[i] + (ys[i + 1] - ys[i]) * (x - xs[i]) / (xs[i + 1] - xs[i])


def monotone(values: Sequence[float]) -> list[float]:
    """The rising values that are nearest to these, in squares: neighbours that fall are averaged."""
    blocks: list[tuple[float, int]] = []  # (sum, count)
    for value in values:
        block = (value, 1)
        while blocks and blocks[-1][0] * block[1] > block[0] * blocks[-1][1]:
            total, count = blocks.pop()
            block = (total + block[0], count + block[1])
        blocks.append(block)
    return [total / count for total, count in blocks for _ in range(count)]


def save_costs(path: Path, costs: VerifyCosts, about: Mapping[str, Any]) -> None:
    """Write costs with what they are about.  A folder that cannot be written to is none of the user's worry."""
    try:
        write_whole(path, json.dumps({"about": about, "costs": asdict(costs)}, indent=1) + "\n")
    except OSError:
        return


def load_costs(path: Path, about: Mapping[str, Any]) -> VerifyCosts | None:
    """The costs that `save_costs` wrote about the same; None: there are none, or nobody can read them."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        costs = found["costs"]
        loaded = VerifyCosts(
            rows=tuple(costs["rows"]),
            tokens=tuple(costs["tokens"]),
            context=costs["context"],
            seconds=tuple(tuple(row) for row in costs["seconds"]),
            per_context=tuple((few, many) for few, many in costs["per_context"]),
            drafting=tuple(costs["drafting"]),
            reading=costs["reading"],
        )
        return loaded if found["about"] == json.loads(json.dumps(about)) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


class Pace:
    """Corrects measured costs, relative to each other, by the times that passes really take.

    How fast a machine is changes from minute to minute and matters to all passes alike, so what is learned is only
    how they compare.  Plain passes and those with drafts are compared where one follows the other; widths with the
    passes around them.  A width that was seldom verified leans on all others.
    """

    pairs = 8  # neighbours that count
    memory = 16.0  # passes of one width that count
    recent = 6.0  # passes that tell how fast the machine is
    strength = 4.0  # passes that a prior counts as
    outlier = 2.0  # times what is expected, at most: a process that was put to sleep says nothing about a pass

    def __init__(self) -> None:
        self._pairs: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=self.pairs))
        self._widths: defaultdict[tuple[int, int], Mean] = defaultdict(lambda: Mean(self.memory))
        self._speed = Mean(self.recent)
        self._last: tuple[int, bool, float] | None = None  # rows, whether plain, ratio of the last pass

    def learn(self, rows: int, tokens: int, ratio: float) -> None:
        """A pass over `tokens` of each of `rows` took `ratio` times what was measured; tokens 0: drafting did."""
        known = self.factor(rows, tokens)
        ratio = min(ratio, self.outlier * known * self.speed)
        if tokens > 0:
            self._speed.add(ratio / known)
            self._compare(rows, tokens == 1, ratio if tokens == 1 else ratio / known)
        if tokens != 1:
            self._widths[rows, tokens].add(ratio / self.speed)

    def _compare(self, rows: int, plain: bool, ratio: float) -> None:
        """What a pass says about the other kind, if one of that came just before."""
        if self._last is not None and self._last[:2] == (rows, not plain):
            self._pairs[rows].append(self._last[2] / ratio if plain else ratio / self._last[2])
        self._last = rows, plain, ratio

    @property
    def speed(self) -> float:
        """How much slower the machine is at present than when it was measured."""
        return self._speed.value(1.0, 0.01)

    def dearer(self, rows: int) -> float:
        """How much dearer passes with drafts are, over plain ones, than was measured."""
        return median(self._pairs[rows]) if self._pairs[rows] else 1.0

    def factor(self, rows: int, tokens: int) -> float:
        """By what to multiply the measured time of such a pass, to compare it with that of another."""
        if tokens == 1:
            return 1.0 / self.dearer(rows)
        return self._widths[rows, tokens].value(1.0, self.strength if tokens else 0.5)
