"""What passes cost: interpolated, made to rise, measured by a clock, kept in a file that may be anything."""

from __future__ import annotations

import json
import random
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
import tiny
import torch
from fakes import FakeDrafter

from blockdraft.engine import profile
from blockdraft.engine.costs import Pace, VerifyCosts, interpolate, load_costs, monotone, save_costs

COSTS = VerifyCosts(
    (1, 4), (1, 3, 8), 64, ((1.0, 2.0, 4.5), (2.0, 5.0, 10.0)), ((0.0, 0.01), (0.1, 0.2)), (0.3, 0.9), 0.01
)


def test_costs_run_straight_between_what_was_measured() -> None:
    assert COSTS.verify(1, 1, 64) == 1.0 and COSTS.verify(4, 8, 64) == 10.0
    assert COSTS.verify(1, 2, 64) == pytest.approx(1.5) and COSTS.verify(2, 1, 64) == pytest.approx(4 / 3)
    assert COSTS.verify(1, 8, 164) == pytest.approx(4.5 + 1.0) and COSTS.verify(4, 1, 74) == pytest.approx(3.0)
    assert COSTS.verify(7, 3, 64) == pytest.approx(8.0), "beyond it they go on"
    assert COSTS.draft(4) == pytest.approx(0.9) and COSTS.draft(2) == pytest.approx(0.5)
    assert COSTS.verify(1, 1, 0) > 0


def test_monotone_is_the_nearest_rising_row() -> None:
    rng = random.Random(0)
    levels = [k / 2 for k in range(9)]
    rising = list(combinations_with_replacement(levels, 4))
    for _ in range(40):
        values = [rng.choice((0.0, 1.0, 2.0, 3.0, 4.0)) for _ in range(4)]
        made = monotone(values)
        assert made == sorted(made) and len(made) == 4
        error = sum((a - b) ** 2 for a, b in zip(made, values, strict=True))
        best = min(sum((a - b) ** 2 for a, b in zip(row, values, strict=True)) for row in rising)
        assert error <= best + 1e-9
        assert sum(made) == pytest.approx(sum(values))
    assert monotone([1.0, 2.0, 2.0]) == [1.0, 2.0, 2.0] and monotone([3.0]) == [3.0]


def test_interpolate_with_one_point_is_flat() -> None:
    assert interpolate(7, [2], [5.0]) == 5.0
    assert [interpolate(x, [1, 3], [1.0, 2.0]) for x in (0, 1, 2, 5)] == [0.5, 1.0, 1.5, 3.0]


@pytest.mark.parametrize(
    "change",
    [
        {"rows": (4, 1)},
        {"tokens": ()},
        {"seconds": ((1.0, 2.0), (2.0, 5.0))},
        {"seconds": ((0.0, 2.0, 4.5), (2.0, 5.0, 10.0))},
        {"seconds": ((1.0, 2.0, float("inf")), (2.0, 5.0, 10.0))},
        {"drafting": (0.3,)},
        {"drafting": (0.3, -1.0)},
        {"reading": -1.0},
        {"per_context": ((0.0, 0.0),)},
    ],
)
def test_what_cannot_be_costs_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no costs"):
        VerifyCosts(**{**COSTS.__dict__, **change})  # type: ignore[arg-type]


# --- the file --------------------------------------------------------------------------------------------------------


def test_costs_come_back_from_their_file(tmp_path: Path) -> None:
    path, about = tmp_path / "deep" / "costs.json", {"machine": ["a", 2], "rows": [1, 4]}
    assert load_costs(path, about) is None
    save_costs(path, COSTS, about)
    assert load_costs(path, about) == COSTS
    assert load_costs(path, {**about, "rows": [1, 8]}) is None, "about something else"
    assert [file.name for file in path.parent.iterdir()] == ["costs.json"], "nothing half-written stays"


@pytest.mark.parametrize("damage", ["cut", "empty", "bytes", "list", "number", "negative", "missing", "folder"])
def test_a_damaged_file_is_no_file(tmp_path: Path, damage: str) -> None:
    path, about = tmp_path / "costs.json", {"machine": 1}
    save_costs(path, COSTS, about)
    whole = json.loads(path.read_text())
    if damage == "cut":
        path.write_text(path.read_text()[:60])
    elif damage == "empty":
        path.write_text("")
    elif damage == "bytes":
        path.write_bytes(b"\xff\xfe\x00")
    elif damage == "list":
        path.write_text("[1, 2]")
    elif damage == "number":
        path.write_text(json.dumps({**whole, "costs": {**whole["costs"], "seconds": 3}}))
    elif damage == "negative":
        path.write_text(json.dumps({**whole, "costs": {**whole["costs"], "drafting": [-1.0, 2.0]}}))
    elif damage == "missing":
        path.write_text(json.dumps({"about": about, "costs": {}}))
    else:
        path.unlink()
        path.mkdir()
    assert load_costs(path, about) is None
    save_costs(path, COSTS, about)
    assert load_costs(path, about) == (None if damage == "folder" else COSTS)


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    save_costs(tmp_path / "file" / "costs.json", COSTS, {})


# --- measuring -------------------------------------------------------------------------------------------------------


class NoDrafts(FakeDrafter):
    """Drafts zeros."""

    def draft(self, committed: list[int]) -> list[int]:
        return [0] * self.max_drafts


class Timed:
    """A target whose passes take a known time by a clock of its own; the first pass of a shape takes longer."""

    def __init__(self, noise: float = 0.0) -> None:
        self.target, self.now, self.rng = tiny.tiny_target(), 0.0, random.Random(0)
        self.seen: set[tuple[int, ...]] = set()
        self.passes, self.noise = 0, noise
        forward = self.target.forward

        def timed(ids, cache, rows, keep_logits=None):  # type: ignore[no-untyped-def]
            assert [cache.lengths[row] for row in rows] == [cache.lengths[rows[0]]] * len(rows)
            self.passes += 1
            self.now += self.true(len(rows), ids.shape[1], cache.lengths[rows[0]])
            first = (*ids.shape, cache.lengths[0]) not in self.seen
            self.now += 1.0 * first + self.noise * self.rng.random()
            self.seen.add((*ids.shape, cache.lengths[0]))
            return forward(ids, cache, rows, keep_logits)

        self.target.forward = timed  # type: ignore[method-assign]

    @staticmethod
    def true(rows: int, tokens: int, context: int) -> float:
        return 0.01 + 0.002 * rows * tokens + 1e-6 * context * rows

    def measure(self, **options):  # type: ignore[no-untyped-def]
        drafter = NoDrafts(7, tiny.VOCAB)
        return profile.measure_costs(self.target, drafter, (1, 3), clock=lambda: self.now, **options)


def test_what_is_measured_is_what_passes_take() -> None:
    costs = Timed().measure(budget=1e9)
    assert (costs.rows, costs.tokens, costs.context) == ((1, 3), (1, 2, 3, 4, 6, 8), 64)
    for rows in (1, 2, 3):
        for tokens in (1, 2, 5, 8):
            for context in (64, 200, 512):
                assert costs.verify(rows, tokens, context) == pytest.approx(Timed.true(rows, tokens, context), rel=1e-6)


def test_noise_is_made_to_rise() -> None:
    costs = Timed(noise=0.02).measure(budget=1e9)
    for row in costs.seconds:
        assert list(row) == sorted(row)
    assert all(few <= many for few, many in zip(*costs.seconds, strict=True)), "more rows do not cost less"


def test_a_slow_target_is_measured_as_little_as_possible() -> None:
    world = Timed()
    costs = world.measure(budget=0.0)
    assert world.passes == 2 * (1 + 2 + 2), "for each number of rows: a prompt, two proposals, one token, and the most"
    between = (costs.verify(3, 1, 64) * 4 + costs.verify(3, 8, 64) * 3) / 7
    assert costs.verify(3, 4, 64) == pytest.approx(between), "the rest is on the line between"


def nobody() -> Path:
    raise RuntimeError("no home")


def test_costs_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLOCKDRAFT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target, drafter, calls = tiny.tiny_target(), NoDrafts(3, tiny.VOCAB), []
    measure = profile.measure_costs

    def counted(*arguments):  # type: ignore[no-untyped-def]
        calls.append(arguments[2])
        return measure(*arguments, budget=0.0)

    monkeypatch.setattr(profile, "measure_costs", counted)
    first = profile.known_costs(target, drafter, 2)
    assert profile.known_costs(target, drafter, 2) == first and calls == [(1, 2)]
    torch.set_num_threads(2)
    try:
        profile.known_costs(target, drafter, 2)
    finally:
        torch.set_num_threads(1)
    assert calls == [(1, 2)] * 2, "other threads, other costs"
    profile.known_costs(target, NoDrafts(4, tiny.VOCAB), 1)
    assert calls[2:] == [(1,)]
    for path in (tmp_path / "blockdraft" / "costs").iterdir():
        path.write_text("{")
    assert profile.known_costs(target, drafter, 2).tokens == first.tokens and len(calls) == 4
    for name in ("BLOCKDRAFT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    profile.known_costs(target, drafter, 2)
    assert len(calls) == 5


# --- what rounds show ------------------------------------------------------------------------------------------------


def test_a_dearer_kind_is_found_whatever_the_machine_does() -> None:
    """Passes with drafts are really 1.6 times as dear, over plain ones, as measured; the machine's speed wanders."""
    rng, pace, speed = random.Random(0), Pace(), 1.0
    for n in range(400):
        speed *= rng.choice((0.97, 1.0, 1.03))
        sleeping = 20.0 if rng.random() < 0.03 else 1.0
        plain = n % 17 == 0
        pace.learn(2, 1 if plain else 4, speed * sleeping * (1.0 if plain else 1.6))
    assert pace.factor(2, 4) / pace.factor(2, 1) == pytest.approx(1.6, rel=0.12)
    assert pace.factor(1, 4) == pace.factor(1, 1) == 1.0, "other rows were not seen"


def test_a_width_that_is_dearer_than_the_others_is_found() -> None:
    rng, pace, speed = random.Random(0), Pace(), 3.0
    for _ in range(300):
        speed *= rng.choice((0.97, 1.0, 1.03))
        tokens = rng.choice((3, 4, 5))
        pace.learn(1, tokens, speed * (1.5 if tokens == 4 else 1.0))
        pace.learn(1, 0, speed * 0.5)
    for other in (3, 5):
        assert pace.factor(1, 4) / pace.factor(1, other) == pytest.approx(1.5, rel=0.15)
        assert pace.factor(1, 0) / pace.factor(1, other) == pytest.approx(0.5, rel=0.15)
