"""Coupled drafts: a drafter that is lent the target's noise draws what the target would."""

from __future__ import annotations

import random

import pytest
import torch
from cases import LAYERS, Case, make_drafter, neighbour, references, target

from blockdraft.bench.replay import ReplayTarget, Told
from blockdraft.config import EngineConfig, SamplingParams
from blockdraft.drafters.independent import IndependentDrafter
from blockdraft.engine.engine import Engine
from blockdraft.engine.request import RequestStats
from blockdraft.ops.sampling import ChoiceState, Coupling, choose

CPU = torch.device("cpu")
KIND, VOCAB = "hf-llama", 40
SAMPLING = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(temperature=2.0, top_k=5),
    SamplingParams(temperature=1.0, min_p=0.1),
]


def states(vocabulary: int = VOCAB) -> list[ChoiceState]:
    return [ChoiceState(params, seed, [1], vocabulary, CPU) for seed, params in enumerate(SAMPLING)]


def test_of_the_same_mind_it_draws_the_same() -> None:
    """The target's own logits, with its noise, give the target's own choices, position by position."""
    generator = torch.Generator().manual_seed(0)
    logits, rows = torch.randn(len(SAMPLING), 6, VOCAB, generator=generator) * 2, states()
    positions = [3, 50, 7, 1000, 12]
    coupling = Coupling(rows, positions)
    drafted = torch.stack([coupling.choose(logits[:, k], k) for k in range(6)], dim=1)
    assert torch.equal(drafted, choose(logits, rows, positions))
    assert not torch.equal(drafted[1:], logits[1:].argmax(dim=-1)), "chance has a part in it"
    late = Coupling(rows, [position + 1 for position in positions])
    assert not torch.equal(drafted, torch.stack([late.choose(logits[:, k], k) for k in range(6)], dim=1))
    some = coupling.part([3, 1])
    assert torch.equal(some.choose(logits[[3, 1], 2], 2), drafted[[3, 1], 2])


def test_a_reduced_head_has_the_noise_of_its_own_tokens() -> None:
    ids = torch.tensor([2, 3, 11, 17, 30, 39])
    logits = torch.full((len(SAMPLING), VOCAB), -torch.inf)
    logits[:, ids] = torch.randn(len(SAMPLING), len(ids), generator=torch.Generator().manual_seed(1))
    coupling = Coupling(states(), [9] * len(SAMPLING))
    assert torch.equal(ids[coupling.choose(logits[:, ids], 0, ids)], coupling.choose(logits, 0))


def drafted(coupled: bool, temperature: float) -> RequestStats:
    """A drafter that thinks almost as the target does, asked the same with and without its noise."""
    drafter = IndependentDrafter(neighbour(KIND), target(KIND).info, 4)
    engine = Engine(target(KIND), drafter, EngineConfig(slots=4, capacity=128, verify_width=None, coupled=coupled))
    for seed, one in enumerate(references(KIND)):
        params = SamplingParams(max_tokens=24, temperature=temperature, seed=seed, ignore_eos=True)
        engine.add(one.prompt, params)
    engine.run()
    return engine.stats


def test_coupled_drafts_are_right_more_often_where_chance_rules() -> None:
    alone, lent = drafted(False, 1.0), drafted(True, 1.0)
    assert lent.emitted == alone.emitted and lent.tau > alone.tau + 0.3, (alone.tau, lent.tau)
    assert vars(drafted(True, 0.0)) == vars(drafted(False, 0.0)), "nothing to lend"


@pytest.mark.parametrize("name", ["dflash", "autoregressive", "lookup", "model", "eagle3"])
def test_a_replay_is_coupled_as_the_run_was(name: str) -> None:
    """Rows of a batch have the noise of their own positions, whatever drafts."""
    known = [Told(tuple(one.prompt), tuple(one.answer)) for one in references(KIND)]
    found = []
    for chosen in (target(KIND), ReplayTarget(target(KIND), range(LAYERS), known)):
        drafter = make_drafter(Case(KIND, name, 4, EngineConfig(), 0, []))
        engine = Engine(chosen, drafter, EngineConfig(slots=3, capacity=128, verify_width=None, coupled=True))
        requests = [engine.add(one.prompt, one.params) for one in references(KIND)]
        engine.run()
        found.append([(one.output_ids, one.stats.rounds, one.stats.accepted_by_position) for one in requests])
    assert found[0] == found[1]


def test_neighbours_do_not_matter() -> None:
    """A row's drafts depend on its own seed and position: alone or in a batch, in whatever order."""
    order = list(range(len(references(KIND))))
    random.Random(0).shuffle(order)
    counts: list[dict[int, list[int]]] = []
    for slots in (1, 4):
        drafter = IndependentDrafter(neighbour(KIND), target(KIND).info, 3)
        engine = Engine(target(KIND), drafter, EngineConfig(slots=slots, capacity=128, verify_width=None, coupled=True))
        requests = {
            index: engine.add(references(KIND)[index].prompt, references(KIND)[index].params) for index in order
        }
        engine.run()
        counts.append({index: one.stats.accepted_by_position for index, one in requests.items()})
    assert counts[0] == counts[1]
