"""Exported to transformers, a drafter computes there what it computes here: hidden states, and a whole answer."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from layouts import drafter, save, tiny_target
from tiny import tiny_llama
from transformers import MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from blockdraft.config import EngineConfig, SamplingParams
from blockdraft.drafters.block import BlockDrafter
from blockdraft.engine.engine import Engine
from blockdraft.formats.card import TargetCard
from blockdraft.formats.layouts import export
from blockdraft.targets.resolve import load_target


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> TargetCard:
    return tiny_target(tmp_path_factory.mktemp("target"))


def exported(folder: Path, kind: str, card: TargetCard) -> MuseGlimmerAssistantModel:
    export(save(folder / "ours", kind), folder / "theirs", "transformers", card)
    model, report = MuseGlimmerAssistantModel.from_pretrained(
        folder / "theirs", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    return model.eval()


@pytest.mark.parametrize("kind", ["plain", "windowed", "linear", "yarn", "yarn-whole", "llama3"])
@torch.no_grad()
def test_hidden_states_of_a_block_are_those_of_transformers(kind: str, card: TargetCard, tmp_path: Path) -> None:
    """Round after round: some tokens committed, a block filled, its keys and values dropped."""
    theirs, (ours, _) = exported(tmp_path, kind, card), drafter(kind)
    generator, target = torch.Generator().manual_seed(5), load_target(card.spec)
    taps = torch.randn(1, 30, 3, 32, generator=generator)
    cache, done = DFlashCache(config=theirs.config), 0
    cache.activate_past_recording()
    for number in (9, 1, 4, 5, 2):  # past the window, and past YaRN's original context by far less
        if done:
            cache.crop(-5)
        cache.set_previous_accepted_tokens(number)
        start = done + number
        block = target.embed(torch.tensor([[start, 4, 4, 4, 4]]))
        expected = theirs(
            noise_embeds=block,
            context_hidden_states=taps[:, done:start].flatten(-2),
            attention_mask=torch.ones(1, start + 5, dtype=torch.long),
            position_ids=torch.arange(done, start + 5)[None],
            cache=cache,
        ).last_hidden_state
        context = ours.context(taps[:, :start], torch.arange(start)[None])
        positions = torch.arange(start, start + 5)[None, None]
        found = ours(block[:, None], positions, context, torch.tensor([[start]]))[:, 0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        done = start


@pytest.mark.parametrize("kind", ["plain", "yarn"])
def test_greedy_text_and_rounds_are_those_of_transformers(
    kind: str, card: TargetCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, (ours, _) = exported(tmp_path, kind, card), drafter(kind)
    # A target that accepts some drafts of a random drafter: its head has only a few rows that matter.
    model = tiny_llama(vocab_size=272)
    model.lm_head.weight.data[6:] *= 1e-3
    model.save_pretrained(tmp_path / "target")
    target = load_target(str(tmp_path / "target"))
    prompt, starts = [7, 11, 5, 3, 9], []
    before = DFlashTokenCandidateGenerator.get_candidates

    def watched(self, input_ids, *args, **kwargs):
        starts.append(input_ids.shape[1])
        return before(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", watched)
    ids = torch.tensor([prompt])
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        assistant_model=theirs,
        speculation_type="dflash",
    )[0, 5:].tolist()
    config = EngineConfig.parse({"slots": 1, "capacity": 64}, "engine")
    engine = Engine(target, BlockDrafter(ours, target), config, None)
    request = engine.add(prompt, SamplingParams(max_tokens=40, ignore_eos=True))
    engine.run()
    assert list(request.output_ids) == answer
    rounds = [after - start for start, after in pairwise(starts[1:])]
    assert sum(rounds) > 0 and max(rounds) > 1, "a drafter of which nothing is accepted hides most bugs"
    counts = request.stats.accepted_by_position
    accepted = [sum(length > k + 1 for length in rounds) for k in range(len(counts))]
    # The last round is cut by the length limit, which the two count differently.
    assert all(abs(one - other) <= 1 for one, other in zip(counts, accepted, strict=True))
