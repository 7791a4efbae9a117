"""Confidences become probabilities: what is learned is what happened, and every draft is judged once."""

from __future__ import annotations

import math
import random

import pytest

from blockdraft.engine.calibration import Calibration, Ledger
from blockdraft.engine.means import Mean


def test_a_mean_forgets() -> None:
    mean = Mean(memory=10)
    for _ in range(5):
        mean.add(2.0)
    assert (mean.weight, mean.value(0.0, 5.0)) == (5.0, 1.0)
    for _ in range(200):
        mean.add(7.0)
    assert mean.weight == 10.0 and mean.value(0.0, 0.0) == pytest.approx(7.0, abs=1e-6)
    mean.forget(2.0)
    mean.add(1.0)
    assert mean.value(0.0, 0.0) == pytest.approx((7.0 * 2 + 1.0) / 3)


def truth(confidence: float | None, position: int) -> float:
    """An overconfident drafter, the more so the further ahead."""
    return 0.35 if confidence is None else confidence ** (1.0 + position / 2)


@pytest.mark.parametrize("confidences", [(0.2, 0.5, 0.73, 0.88, 0.95), (None,)])
def test_it_converges_to_what_happens(confidences: tuple[float | None, ...]) -> None:
    rng, calibration = random.Random(0), Calibration()
    before = Calibration()
    for _ in range(12000):
        confidence, position = rng.choice(confidences), rng.randint(1, 2)
        calibration.learn("a", position, confidence, rng.random() < truth(confidence, position))
    worst = control = 0.0
    for confidence in confidences:
        for position in (1, 2):
            right = truth(confidence, position)
            worst = max(worst, abs(calibration.probability("a", position, confidence) - right))
            control = max(control, abs(before.probability("a", position, confidence) - right))
    assert worst < 0.1 < control, "without learning, the error would be seen"
    sure = [confidences[-1]] * 2
    both = calibration.probability("a", 1, sure[0]) * calibration.probability("a", 2, sure[1])
    assert calibration.survival("a", sure) == pytest.approx([calibration.probability("a", 1, sure[0]), both])


def test_kinds_and_the_unsaid_are_kept_apart() -> None:
    calibration = Calibration()
    for _ in range(100):
        calibration.learn("greedy", 1, 0.7, True)
        calibration.learn("sampled", 1, 0.7, False)
        calibration.learn("greedy", 1, None, False)
    assert calibration.probability("greedy", 1, 0.7) > 0.95
    assert calibration.probability("sampled", 1, 0.7) < 0.05
    assert calibration.probability("greedy", 1, None) < 0.05
    assert calibration.probability("new", 1, 0.7) == pytest.approx(0.7)


def test_it_follows_a_drafter_that_changes() -> None:
    calibration = Calibration()
    for right in [True] * 1000 + [False] * 600:
        calibration.learn(0, 3, 0.9, right)
    assert calibration.probability(0, 4, 0.9) < 0.1


def test_extreme_confidences_are_confidences() -> None:
    calibration = Calibration()
    for value in (0.0, 1.0, 1e-30, 1.0 + 1e-7):
        calibration.learn(0, 1, value, True)
        assert 0.0 < calibration.probability(0, 1, value) <= 1.0 + 1e-7 and math.isfinite(value)


def test_every_draft_is_judged_once_by_what_is_committed() -> None:
    """Against a judge that has the whole text: drafts in a row are decided up to the first wrong one."""
    rng = random.Random(3)
    for _ in range(300):
        drafts = [rng.randrange(3) for _ in range(rng.randint(0, 6))]
        sure = [rng.random() for _ in drafts]
        text = [rng.randrange(3) if rng.random() < 0.3 or k >= len(drafts) else drafts[k] for k in range(9)]
        expected = []
        for k, draft in enumerate(drafts):
            expected.append(("kind", k + 1, sure[k], draft == text[k]))
            if draft != text[k]:
                break
        ledger, found, at = Ledger(), [], 0
        ledger.note(4, "kind", drafts, list(sure))
        while at < len(text):
            count = rng.randint(1, 3)
            found += ledger.judge(4, text[at : at + count])
            assert not list(ledger.judge(5, text)), "another slot"
            at += count
        assert found == expected and not ledger.open


def test_what_is_not_decided_goes_with_its_request() -> None:
    ledger = Ledger()
    ledger.note(0, "kind", [1, 2, 3], [0.5] * 3)
    assert len(list(ledger.judge(0, [1]))) == 1
    ledger.forget(0)
    assert not list(ledger.judge(0, [2, 3]))
