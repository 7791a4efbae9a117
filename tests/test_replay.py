"""Drafting known answers again: the same proposals, round by round, as when the target is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import LAYERS, Case, make_drafter, neighbour, references, target
from torch import Tensor

from blockdraft.bench.replay import ReplayTarget, Told, greedy
from blockdraft.config import EngineConfig
from blockdraft.drafters.base import Drafter
from blockdraft.engine.engine import Engine
from blockdraft.targets.base import Target

KIND = "hf-llama"


def told() -> list[Told]:
    return [Told(tuple(one.prompt), tuple(one.answer)) for one in references(KIND)]


def drafter_of(name: str) -> Drafter:
    return make_drafter(Case(KIND, name, 4, EngineConfig(), 0, []))


def noted(drafter: Drafter) -> list[Tensor]:
    """What the drafter proposes from now on, as it does."""
    proposals: list[Tensor] = []
    real = drafter.propose

    def propose(state: Any, rows: Any, anchors: Tensor, coupling: Any = None) -> Any:
        made = real(state, rows, anchors, coupling)
        proposals.append(made.tokens)
        return made

    drafter.propose = propose  # type: ignore[method-assign]
    return proposals


def run(chosen: Target, name: str, replayed: bool, slots: int = 1) -> tuple[list[Tensor], list[tuple[Any, ...]]]:
    """Proposals, and the answers with their counts, of all references."""
    drafter = drafter_of(name)
    proposals = noted(drafter)
    engine = Engine(chosen, drafter, EngineConfig(slots=slots, capacity=128, verify_width=None))
    requests = [engine.add(one.prompt, greedy(one.params) if replayed else one.params) for one in references(KIND)]
    engine.run()
    # Whether the drafter was asked in a row's last round depends on the rows beside it.
    return proposals, [(one.output_ids, one.finish_reason, {**vars(one.stats), "undrafted": 0}) for one in requests]


@pytest.mark.parametrize("name", ["dflash", "dflare", "input", "autoregressive", "lookup", "model", "ngram"])
def test_a_replay_is_the_run_itself(name: str) -> None:
    """At every temperature, with penalties, and whatever of the answer is accepted."""
    replay = ReplayTarget(target(KIND), range(LAYERS), told())
    real, again = run(target(KIND), name, False), run(replay, name, True)
    assert real[1] == again[1]
    assert len(real[0]) == len(again[0]) > 50
    assert all(torch.equal(a, b) for a, b in zip(real[0], again[0], strict=True)), "a draft is another one"
    assert run(replay, name, True, slots=3)[1] == again[1], "whoever is drafted beside"
    if name in {"model", "ngram", "lookup"}:
        assert sum(stats["accepted"] for *_, stats in again[1]) > 3, "or acceptance is not tried"


def test_the_taps_are_what_counts() -> None:
    """Control: taps of other weights lead to other drafts."""
    right, wrong = (ReplayTarget(one, range(LAYERS), told()) for one in (target(KIND), neighbour(KIND)))
    pairs = zip(run(right, "dflash", True)[0], run(wrong, "dflash", True)[0], strict=False)
    assert any(not torch.equal(a, b) for a, b in pairs)


def test_what_cannot_be_replayed_is_refused() -> None:
    known = told()
    with pytest.raises(ValueError, match="two prompts are the same"):
        ReplayTarget(target(KIND), (0,), [*known, known[0]])
    with pytest.raises(ValueError, match=r"tap 1 is not among those that are replayed: \[0\]"):
        ReplayTarget(target(KIND), (0,), known).set_taps((0, 1))
