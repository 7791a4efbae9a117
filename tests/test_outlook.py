"""What drafting should bring: the forecast is the best width's, and a few dozen drafts overrule what was assumed."""

from __future__ import annotations

import random

import pytest

from blockdraft.engine.outlook import PRIOR, Forecast, Outlook, forecast, hopeful


def test_a_forecast_is_that_of_the_best_width() -> None:
    passes = [1.0, 1.1, 1.5]
    assert forecast([0.5, 0.4], passes, 0.2) == Forecast(pytest.approx(1.5), pytest.approx(1.3))
    assert forecast([0.9, 0.9], passes, 0.2) == Forecast(pytest.approx(2.8), pytest.approx(1.7))
    hopeless = forecast([0.05, 0.0], passes, 0.2)
    assert hopeless == Forecast(1.0, 1.2) and not hopeless.pays(0.0)
    assert Forecast(1.2, 1.0).pays(0.2) and not Forecast(1.2, 1.0).pays(0.21)
    assert Forecast(0.99, 1.0).pays(-0.01) and not Forecast(0.99, 1.0).pays(0.0)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("right", [0.2, 0.97])
def test_what_drafts_show_overrules_what_was_assumed(sampled: bool, right: float) -> None:
    rng, outlook = random.Random(0), Outlook()
    assert outlook.survival([sampled], 3) == pytest.approx([PRIOR[sampled] ** k for k in (1, 2, 3)])
    for _ in range(40):
        for position in range(1, 8):
            hit = rng.random() < right
            outlook.learn(sampled, position, hit)
            if not hit:
                break
    assert outlook.survival([sampled], 1)[0] == pytest.approx(right, abs=0.15)
    assert outlook.survival([not sampled], 1) == [PRIOR[not sampled]], "of others it knows nothing"
    known, assumed = outlook.survival([sampled], 1)[0], PRIOR[not sampled]
    assert outlook.survival([sampled, sampled, not sampled, sampled], 1) == [
        pytest.approx(0.75 * known + 0.25 * assumed)
    ]


def test_after_a_doubt_a_few_drafts_tell() -> None:
    changed = []
    for doubt in (True, False):
        outlook = Outlook()
        for _ in range(40):
            outlook.learn(False, 1, right=False)
        if doubt:
            outlook.doubt()
        for position in range(1, 8):
            outlook.learn(False, position, right=True)
        changed.append(outlook.survival([False], 1)[0])
    assert changed[0] > 0.4 and changed[1] < 0.25


def test_hope_has_an_end() -> None:
    assert hopeful(3) == pytest.approx([0.97, 0.97**2, 0.97**3])
