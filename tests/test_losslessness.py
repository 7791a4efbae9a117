"""The promise: whatever drafts, whoever runs beside, whenever admitted, the answer is the target's own.

Each reference is one request decoded alone and plainly.  A case takes some of them, shortens them with
limits and stops (worked out by hand on the reference), and runs them together with some drafter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import (
    CHAINS,
    DRAFTERS,
    KINDS,
    LENGTH,
    SETTINGS,
    Case,
    Whim,
    make_case,
    references,
    run_case,
    target,
    untouched,
    watchful,
)
from fakes import FakeDrafter, OracleDrafter

from blockdraft.cache import KVCache
from blockdraft.config import EngineConfig, SamplingParams
from blockdraft.engine import step as step_room
from blockdraft.engine.backlog import Backlog
from blockdraft.engine.engine import Engine
from blockdraft.engine.request import RequestStats
from blockdraft.ops.sampling import ChoiceState, choose

CASES = 220


def run_cases(cases: list[Case], policy: Any = None) -> None:
    for case in cases:
        run_case(case, policy)


@pytest.mark.parametrize("part", range(4))
def test_every_answer_is_the_targets_own(part: int) -> None:
    accepted = dict.fromkeys(DRAFTERS, 0)
    for seed in range(part * CASES // 4, (part + 1) * CASES // 4):
        case = make_case(seed)
        for request in run_case(case):
            accepted[case.drafter] += request.stats.accepted
            if case.drafter == "right" and request.finish_reason == "length" and case.config.verify_width is None:
                assert request.stats.accepted == request.stats.drafted
    enough = accepted["right"] > 25 and min(accepted["mixed"], accepted["model"]) > 3
    assert enough and accepted["ngram"] + accepted["lookup"] > 2, "drafts must be accepted, or nothing was tried"
    assert accepted["wrong"] == 0, "a wrong draft was accepted"


@pytest.mark.parametrize("drafter", CHAINS)
def test_answers_drafted_by_chains_are_the_targets_own(drafter: str) -> None:
    drafted = {0.0: 0, 0.7: 0, 1.0: 0}
    for seed in range(48):
        case = replace(make_case(seed), drafter=drafter)
        for (reference, *_), request in zip(case.requests, run_case(case), strict=True):
            drafted[reference.params.temperature] += request.stats.drafted
    assert min(drafted.values()) > 100, "every temperature was drafted for"


@pytest.mark.parametrize("policy", [Whim, watchful])
@pytest.mark.parametrize("part", range(2))
def test_whatever_decides_how_much_is_verified(policy: Any, part: int) -> None:
    """Drafting that stops and starts, and any width from round to round: at every temperature, among neighbours."""
    total, alone = RequestStats(), RequestStats()
    for seed in range(1000 + part * 30, 1030 + part * 30):
        case = make_case(seed)
        for request in run_case(case, policy):
            total.add(request.stats)
        for request in run_case(replace(case, drafter="lookup"), policy):
            alone.add(request.stats)
    assert total.accepted > 30 and sum(rounds > 0 for rounds in total.rounds_by_width) > 8
    assert total.undrafted > 100 and total.rounds - total.undrafted > 150, "both ways were tried"
    assert alone.partly_drafted > 50 and alone.accepted > 5, "and the free part alone"


def test_the_cases_reach_what_they_are_meant_to() -> None:
    cases = [make_case(seed) for seed in range(CASES)]
    requests = [request for case in cases for request in case.requests]
    assert len(cases) >= 200 and {case.config.slots for case in cases} == {1, 2, 3, 4}
    assert {case.max_drafts + 1 for case in cases} == set(range(2, 17))
    assert sum(len(case.requests) > case.config.slots for case in cases) > 50
    assert sum(reason == "stop" and 3 < len(ids) < params.max_tokens for _, params, ids, reason, _ in requests) > 50
    assert {reference.params.temperature for reference, *_ in requests} == {0.0, 0.7, 1.0}


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_those_of_hugging_face(kind: str) -> None:
    model = untouched(kind)
    compared = 0
    for reference in references(kind):
        if reference.params.temperature == 0.0 and reference.params.repetition_penalty == 1.0:
            ids = torch.tensor([reference.prompt])
            model.generation_config.eos_token_id = None
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=LENGTH, pad_token_id=0
            )
            assert output[0, ids.shape[1] :].tolist() == reference.answer
            compared += 1
    assert compared == 3


@pytest.mark.parametrize("kind", KINDS)
def test_settings_matter(kind: str) -> None:
    """Control: the same prompt with another seed or setting answers differently, so equality says something."""
    prompt = references(kind)[0].prompt
    engine = Engine(target(kind), None, EngineConfig(slots=4))
    requests = [
        engine.add(prompt, SamplingParams.parse({"max_tokens": LENGTH, "ignore_eos": True, **values}))
        for values in ({}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "seed": 2}, SETTINGS[1])
    ]
    engine.run()
    assert len({tuple(request.output_ids) for request in requests}) == 4


# --- deliberate faults: the check above must notice each of them -----------------------------------------------------


def accept_anything(drafts: torch.Tensor, choices: torch.Tensor, widths: torch.Tensor) -> tuple[Any, Any]:
    return widths, choices.gather(1, widths[:, None]).squeeze(1)


def accept_past_a_mismatch(drafts: torch.Tensor, choices: torch.Tensor, widths: torch.Tensor) -> tuple[Any, Any]:
    within = torch.arange(drafts.shape[1]) < widths[:, None]
    count = ((drafts == choices[:, :-1]) & within).sum(1)
    return count, choices.gather(1, count[:, None]).squeeze(1)


def keep_everything(self: KVCache, rows: Any, lengths: Any) -> None:
    for row, length in zip(rows, lengths, strict=True):
        self.lengths[row] = self.lengths[row] if length else 0


def forget_the_drafts(logits: Any, states: Any, positions: Any, drafts: Any = None) -> torch.Tensor:
    return choose(logits, states, positions, None)


def start_every_round_at_zero(logits: Any, states: Any, positions: Any, drafts: Any = None) -> torch.Tensor:
    return choose(logits, states, [0] * len(positions), drafts)


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (step_room, "accept", accept_anything),
        (step_room, "accept", accept_past_a_mismatch),
        (step_room, "choose", forget_the_drafts),
        (step_room, "choose", start_every_round_at_zero),
        (KVCache, "truncate", keep_everything),
        (ChoiceState, "commit", lambda self, tokens: None),
    ],
)
def test_a_faulty_engine_is_caught(place: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [make_case(seed) for seed in range(60)]
    monkeypatch.setattr(place, name, fault)
    # AssertionError from the check; ValueError where a slot overflows.
    with pytest.raises((AssertionError, ValueError)):
        run_cases(cases)


DROP = Backlog.drop


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("drop", lambda self, row, count: DROP(self, row, count - (count > 1))),  # the last is shown again
        ("add", lambda self, *arguments: None),
    ],
)
def test_a_drafter_that_is_told_too_much_or_too_little_is_caught(
    name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backlog, name, fault)
    with pytest.raises((AssertionError, ValueError)):
        run_cases([make_case(seed) for seed in range(1000, 1030)], Whim)


def test_the_fake_drafters_are_what_they_claim() -> None:
    right, wrong = OracleDrafter(3, 9, [[1, 2, 3, 4, 5]]), OracleDrafter(3, 9, [[1, 2, 3, 4, 5]], [True])
    assert right.draft([1, 2]) == [3, 4, 5] and wrong.draft([1, 2]) == [4, 5, 6]
    with pytest.raises(AssertionError, match="did not choose"):
        right.draft([1, 3])
    assert isinstance(right, FakeDrafter)
