"""How much is verified: the width is the best by definition, drafting stops where it loses and comes back."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from blockdraft.drafters.base import Proposal
from blockdraft.engine import adaptive as adaptive_room
from blockdraft.engine.adaptive import Adaptive
from blockdraft.engine.costs import VerifyCosts
from blockdraft.engine.habit import Habit
from blockdraft.engine.policy import Ask, Fixed, Row, best_width, expected_tokens
from blockdraft.engine.probe import few

K = 7
FLAT = VerifyCosts((1, 8), (1, 8), 64, ((1.0, 1.7), (2.0, 8.0)), ((0.0, 0.0), (0.0, 0.0)), (0.4, 0.8))


def slow_best(survivals: list[list[float]], seconds: list[float]) -> int:
    """Every width by hand: the chance of every number of accepted drafts, times the tokens it gives."""
    best, best_rate = 0, 0.0
    for width, cost in enumerate(seconds):
        tokens = 0.0
        for row in survivals:
            reach = [1.0, *row[:width], 0.0]
            tokens += sum((reach[k] - reach[k + 1]) * (k + 1) for k in range(len(reach) - 1))
        if tokens / cost > best_rate * (1 + 1e-12):
            best, best_rate = width, tokens / cost
    return best


def some_survivals(rng: random.Random) -> list[list[float]]:
    rows = []
    for _ in range(rng.randint(1, 5)):
        alive, row = 1.0, []
        for _ in range(rng.randint(0, K)):
            alive *= rng.random() ** 0.4
            row.append(alive)
        rows.append(row)
    return rows


def test_the_width_is_the_best_of_all() -> None:
    rng = random.Random(0)
    chosen = set()
    for _ in range(400):
        survivals = some_survivals(rng)
        seconds = [rng.uniform(0.5, 1.0)]
        for _ in range(max(map(len, survivals))):
            seconds.append(seconds[-1] + rng.random() ** 3 * 0.5)
        width = best_width(survivals, seconds)
        assert width == slow_best(survivals, seconds)
        chosen.add(width)
    assert chosen == set(range(K + 1)), "every width was the best once"


def test_free_drafts_are_all_verified_and_hopeless_ones_never() -> None:
    assert best_width([[0.9, 0.5, 0.1]], [1.0] * 4) == 3
    assert best_width([[0.0, 0.0, 0.0]], [1.0] * 4) == 0
    assert best_width([[0.5, 0.4], []], [1.0, 1.6, 1.9]) == 0, "two rows share a pass, one has no drafts"
    assert best_width([[0.5, 0.4]], [1.0, 1.3, 1.4]) == 2
    assert expected_tokens([[0.5, 0.25], [1.0]], 2) == pytest.approx(1 + 0.75 + 1 + 1.0)


def test_a_fixed_width_asks_nothing_of_confidence_or_time() -> None:
    proposal = Proposal(torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5), counts=[5, 3])
    for limit in (0, 2, 5):
        policy = Fixed(limit)
        assert policy.begin([Row(0, 9, False)] * 2) is (Ask.ALL if limit > 0 else Ask.NOBODY)
        assert policy.limit == limit
        limits = [min(limit, 4), limit]
        assert policy.widths(proposal, limits) == [min(limit, 4), min(limit, 3)]
        policy.learn([[1], [1]])


@dataclass
class World:
    """A machine and a drafter that are made up: time passes as `costs` says, drafts are right as `right` says.

    It plays rounds for a policy and keeps the time that plain decoding would have taken for the same tokens.
    """

    policy: Adaptive
    now: float = 0.0
    found: float = 0.0  # how often the free part has something
    free_right: float = 0.8
    catching_up: float = 0.0  # seconds for each of the last rounds that the drafter was not asked in
    asked: list[Ask] = field(default_factory=list)
    right: Callable[[int], float] = lambda k: 0.8
    told: Callable[[int], float] | None = None
    costs: VerifyCosts = FLAT
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    plain: float = 0.0
    widths: list[int | None] = field(default_factory=list)
    missed: int = 0

    def play(self, rounds: int, rows: int = 1) -> float:
        """Plain time over this time, for the tokens of so many rounds: above 1 is faster than plain decoding."""
        began, plain = self.now, self.plain
        for _ in range(rounds):
            self.round([Row(slot, 100, False) for slot in range(rows)])
        return (self.plain - plain) / (self.now - began)

    def round(self, rows: list[Row]) -> None:
        asked = self.policy.begin(rows)
        self.asked.append(asked)
        widths, fates = [0] * len(rows), [[False] * K for _ in rows]
        some = {Ask.ALL: list(range(len(rows))), Ask.SOME: few(rows)}.get(asked, [])
        if some:
            self.now += self.catching_up * min(self.missed, 64) * len(some) / len(rows)
        self.missed = 0 if some else self.missed + 1
        if asked is not Ask.NOBODY:
            found = [self.rng.random() < self.found for _ in rows]
            costly = [b in some and not text for b, text in enumerate(found)]
            self.now += self.costs.draft(sum(costly)) if any(costly) else 0.0
            fates = [
                [self.rng.random() < (self.free_right if text else self.right(k)) for k in range(K)] for text in found
            ]
            told = self.told if self.told is not None else self.right
            confidence = torch.tensor([[0.875 if text else told(k) for k in range(K)] for text in found])
            counts = [K if text or one else 0 for text, one in zip(found, costly, strict=True)]
            sources = [0 if one else 1 for one in costly]
            # A draft that is right is token 1 (all the target ever says), a wrong one 0.
            proposal = Proposal(torch.tensor(fates).long(), confidence, counts, sources)
            widths = self.policy.widths(proposal, [K] * len(rows))
        committed = []
        for width, fate in zip(widths, fates, strict=True):
            kept = 0
            while kept < width and fate[kept]:
                kept += 1
            committed.append([1] * (kept + 1))
        self.now += self.costs.verify(len(rows), max(widths) + 1, 100)
        self.plain += self.costs.verify(len(rows), 1, 100) * sum(map(len, committed)) / len(rows)
        self.widths.append(max(widths) if some else None)
        self.policy.learn(committed)


def world(costs: VerifyCosts = FLAT, believed: VerifyCosts = FLAT, partly_free: bool = False) -> World:
    made = World(Adaptive(K, lambda: believed, partly_free=partly_free), costs=costs)
    made.policy.clock = lambda: made.now
    return made


def mean_width(here: World) -> float:
    late = [width for width in here.widths[-100:] if width is not None]
    return sum(late) / len(late)


@pytest.mark.parametrize("rows", [1, 8])
def test_good_drafts_are_verified_and_pay(rows: int) -> None:
    here = world()
    here.right = lambda k: 0.97
    assert here.play(600, rows) > (2.0 if rows == 1 else 1.02)
    without = here.widths.count(None)
    assert 3 <= without <= 12, "now and then a plain round, to know what it costs"


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("told", [0.02, 0.9])
def test_bad_drafts_cost_next_to_nothing(rows: int, told: float) -> None:
    here = world()
    here.right, here.told = lambda k: 0.02, lambda k: told
    here.play(40, rows)
    assert here.play(2000, rows) > 0.985
    tried = [n for n, width in enumerate(here.widths) if width is not None]
    assert len(tried) < 70 and tried[-1] > 1500, "seldom, but never given up"


def test_from_the_first_round_on_little_is_lost() -> None:
    here = world()
    here.right, here.told = lambda k: 0.0, lambda k: 0.95
    assert here.play(256) > 0.97


def test_a_loss_of_every_round_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a policy that never stops drafting fails what the tests above ask."""
    monkeypatch.setattr(Habit, "next", lambda self, debt: True)
    here = world()
    here.right, here.told = lambda k: 0.02, lambda k: 0.9
    assert here.play(2000) < 0.75


def test_drafts_that_become_good_are_found() -> None:
    here = world()
    here.right = lambda k: 0.05
    here.play(500)
    assert here.widths[-1] is None
    here.right = lambda k: 0.95
    here.play(200)
    assert here.play(200) > 1.8 and here.widths.count(None) < 550 + 200
    here.right = lambda k: 0.05
    here.play(60)
    assert here.play(500) > 0.985


def test_another_request_is_tried_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive_room, "INTEREST", 1.0)  # the wait alone is looked at
    here = world()
    here.right = lambda k: 0.02
    here.play(400)
    here.policy.admit(0)
    before = len(here.widths)
    here.play(10)
    assert any(width is not None for width in here.widths[before:])


def test_calibration_undoes_an_overconfident_drafter() -> None:
    """A drafter that is always sure and less often right: at first all is verified, then what an honest one gets."""
    here = world()
    here.right, here.told = lambda k: 0.6, lambda k: 0.99
    here.play(300)
    assert here.widths[0] == K
    assert max(width for width in here.widths[200:] if width is not None) <= 5  # 3 and 4 are the best, nearly equal


def test_costs_that_were_measured_wrong_are_put_right() -> None:
    """Wide passes are three times as dear as believed, so drafting loses; and the other way round."""
    dear = VerifyCosts((1, 8), (1, 8), 64, ((1.0, 6.0), (2.0, 24.0)), FLAT.per_context, FLAT.drafting)
    here = world(costs=dear)
    here.right = lambda k: 0.7
    here.play(100)
    assert here.play(1000) > 0.985
    here = world(costs=FLAT, believed=dear)
    here.right = lambda k: 0.95
    here.play(200)
    assert here.play(500) > 1.8


def test_a_machine_that_slows_down_changes_nothing() -> None:
    """All passes slower alike: the widths stay what they were."""
    here = world()
    here.right = lambda k: 0.8
    here.play(300)
    before = mean_width(here)
    half = VerifyCosts((1, 8), (1, 8), 64, ((2.0, 3.4), (4.0, 16.0)), FLAT.per_context, (0.8, 1.6))
    here.costs = half
    here.play(300)
    assert mean_width(here) == pytest.approx(before, abs=0.7)
    assert here.widths[-300:].count(None) < 10


def test_rows_without_room_or_drafts_verify_none() -> None:
    policy = Adaptive(K, lambda: FLAT, clock=iter(range(100)).__next__)
    assert policy.begin([Row(0, 5, False), Row(1, 5, True), Row(2, 5, False)]) is Ask.ALL
    proposal = Proposal(torch.ones(3, 4, dtype=torch.long), torch.full((3, 4), 0.999), counts=[4, 0, 4])
    widths = policy.widths(proposal, [2, 7, 0])
    assert widths[1:] == [0, 0] and widths[0] <= 2
    policy.learn([[1], [1], [1]])
    policy = Adaptive(K, lambda: FLAT, clock=iter(range(100)).__next__)
    assert policy.begin([Row(0, 5, False)]) is Ask.ALL
    silent = Proposal(torch.ones(1, 0, dtype=torch.long), counts=[0])
    assert policy.widths(silent, [7]) == [0]
    policy.learn([[1]])


# --- a part that is free ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 8])
def test_a_free_part_goes_on_while_the_rest_rests(rows: int) -> None:
    """Texts that repeat themselves: what is found is verified, though the drafter behind it is not asked."""
    gains = []
    for partly_free in (True, False):
        here = world(partly_free=partly_free)
        here.right, here.told, here.free_right = lambda k: 0.05, lambda k: 0.5, 0.98
        here.found = (0.2 if rows == 1 else 0.9) if partly_free else 0.0
        here.play(100, rows)
        gains.append(here.play(1000, rows))
        late = here.asked[-500:]
        assert late.count(Ask.ALL) < 40 and (late.count(Ask.FREE) > 400) == partly_free
    assert gains[0] > 1.2 > 1.0 > gains[1] > 0.985, "and without it, plain decoding is all that is left"


@pytest.mark.parametrize("rows", [1, 8])
def test_a_free_part_that_is_wrong_costs_next_to_nothing(rows: int) -> None:
    """It says that it is sure; what is free to ask is not free to verify."""
    here = world(partly_free=True)
    here.right, here.told, here.found, here.free_right = lambda k: 0.05, lambda k: 0.5, 0.5, 0.05
    assert here.play(256, rows) > 0.96
    assert here.play(1000, rows) > 0.985


def test_a_free_part_is_watched_where_costs_are_wrong() -> None:
    """Wide passes are dearer than believed: what should pay by the table does not, and is left alone."""
    dear = VerifyCosts((1, 8), (1, 8), 64, ((1.0, 6.0), (2.0, 24.0)), FLAT.per_context, FLAT.drafting)
    here = world(costs=dear, partly_free=True)
    here.right, here.told, here.found, here.free_right = lambda k: 0.05, lambda k: 0.5, 0.6, 0.6
    here.play(200)
    assert here.play(1000) > 0.98


def test_the_rest_is_measured_against_the_free_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that is better than nothing and worse than lookup alone is left to rest."""

    def free_rounds() -> int:
        here = world(partly_free=True)
        here.right, here.told, here.found, here.free_right = lambda k: 0.3, lambda k: 0.3, 0.7, 0.95
        here.play(800, 2)
        return here.asked[-400:].count(Ask.FREE)

    assert free_rounds() > 250
    monkeypatch.setattr(adaptive_room, "expected_tokens", lambda survivals, width: 0.0)
    assert free_rounds() < 50, "control: next to nothing, it looks good"


def test_catching_up_is_counted() -> None:
    """A try after a long rest costs more than drafting does, and by that much it is made up for."""
    here = world()
    here.right, here.told, here.catching_up = lambda k: 0.02, lambda k: 0.5, 0.05
    here.play(100)
    assert here.play(3000) > 0.98


# --- from the first round on -----------------------------------------------------------------------------------------

# Milliseconds of smollm2-135m and the block drafter that comes with it, on two cores: passes over TOKENS of each row.
TOKENS = (1, 2, 3, 4, 6, 8)
MEASURED = {
    1: (24.0, 25.0, 26.0, 27.0, 29.0, 31.0),
    4: (30.0, 36.0, 42.0, 50.0, 66.0, 82.0),
    8: (30.0, 40.0, 50.0, 65.0, 90.0, 118.0),
    16: (44.4, 76.0, 110.5, 144.6, 212.7, 280.7),
    32: (88.0, 160.2, 232.4, 304.6, 449.0, 593.4),
}
DRAFTING = {1: 7.0, 4: 12.0, 8: 19.0, 16: 51.0, 32: 103.0}
BEGINNING = 3  # rounds in which an answer takes up its question, and nearly every draft is right


def measured(rows: int) -> VerifyCosts:
    axis = tuple(sorted({1, rows}))
    seconds = tuple(tuple(ms / 1e3 for ms in MEASURED[number]) for number in axis)
    return VerifyCosts(axis, TOKENS, 64, seconds, ((0.0, 0.0),) * len(axis), tuple(DRAFTING[n] / 1e3 for n in axis))


def answer(rows: int, later: float, seed: int, rounds: int = 127) -> tuple[float, World]:
    """Plain time over that of a policy that knows nothing, for the first answers of so many rows."""
    here = world(measured(rows), measured(rows), partly_free=True)
    here.rng, here.found, here.free_right, here.catching_up = random.Random(seed), 0.03, 0.6, 5e-5 * rows
    here.right = lambda k: 0.93 if len(here.widths) < BEGINNING else later * 0.97**k
    here.told = lambda k: min(0.98, max(0.02, here.rng.gauss(here.right(k), 0.25)))
    return here.play(rounds, rows), here


@pytest.mark.parametrize("rows", [8, 16, 32])
@pytest.mark.parametrize("later", [0.0, 0.35, 0.6])
def test_many_rows_lose_nothing_to_learning(rows: int, later: float) -> None:
    """What drafting brings at the beginning is no reason to go on with it, and less of one to begin."""
    gains = [answer(rows, later, seed)[0] for seed in range(3)]
    assert min(gains) > 0.98


def test_what_cannot_pay_is_not_even_tried() -> None:
    _, here = answer(32, 0.6, seed=0)
    assert set(here.asked) == {Ask.FREE}


def test_a_policy_that_hopes_loses_on_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: begin with drafting, whatever is to be expected, and the tests above fail."""
    monkeypatch.setattr(adaptive_room.Forecast, "pays", lambda self, margin: True)
    assert answer(16, 0.35, seed=0)[0] < 0.98


def test_drafting_does_not_begin_for_less_than_catching_up_takes() -> None:
    """Much to read, or little left to say, and the same drafts that would pay are not asked for."""
    costs = replace(measured(4), reading=2e-4)
    for waiting, remaining, asked in ((400, 500, Ask.ALL), (4000, 500, Ask.NOBODY), (400, 3, Ask.NOBODY)):
        here = world(costs, costs)
        assert here.policy.begin([Row(slot, 100, False, waiting, remaining) for slot in range(4)]) is asked


def test_all_rows_are_asked_after_tries_that_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row may have had luck, so the tries of few that go before are several, every other round one."""
    monkeypatch.setattr(adaptive_room, "INTEREST", 1.0)  # the account allows all of them
    here = world(measured(8), measured(8))
    here.right = lambda k: 0.3
    here.play(100, 8)
    here.right = lambda k: 0.995
    here.play(400, 8)
    begun = here.asked.index(Ask.ALL, 100)
    assert here.asked[begun - 2 * adaptive_room.SURE : begun].count(Ask.SOME) == adaptive_room.SURE


def test_few_rows_find_what_drafting_gives() -> None:
    """A good drafter for one row is asked from the first round on, and so it is at 4, where there is less to gain."""
    gain, here = answer(1, 0.75, seed=0, rounds=60)
    assert gain > 1.8 and here.asked.count(Ask.ALL) > 55
    gain, here = answer(4, 0.75, seed=0)
    assert gain > 1.25 and here.asked.count(Ask.ALL) > 110


def test_a_try_asks_few_of_many_rows() -> None:
    here = world(measured(8), measured(8))
    here.right = lambda k: 0.3
    here.play(600, 8)
    late = here.asked[100:]
    assert late.count(Ask.ALL) == 0 and 3 <= late.count(Ask.SOME) < 30
    here.right = lambda k: 0.995
    here.play(600, 8)
    assert here.asked[-100:].count(Ask.ALL) > 90, "what few rows show is true of all"
