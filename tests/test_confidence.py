"""How sure drafters are of what they draft: the probability of the draft, by whatever chose it."""

from __future__ import annotations

import pytest
import torch
from fakes import UnrelatedDrafter
from test_block_drafter import FAMILY, drafter_config, member_config, random_model
from tiny import VOCAB, tiny_target

from blockdraft.config import NgramConfig
from blockdraft.drafters.base import COSTLY
from blockdraft.drafters.block import BlockDrafter
from blockdraft.drafters.head import probability
from blockdraft.drafters.independent import IndependentDrafter
from blockdraft.drafters.lookup import TEXT, LookupDrafter
from blockdraft.drafters.ngram import NgramDrafter


def test_the_probability_of_what_was_chosen() -> None:
    logits = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(0)) * 4
    chosen = torch.tensor([[0, 5, 10], [1, 1, 2]])
    by_hand = logits.softmax(dim=-1).gather(-1, chosen[..., None]).squeeze(-1)
    torch.testing.assert_close(probability(logits, chosen), by_hand)
    assert probability(logits.bfloat16(), chosen).dtype == torch.float32


@pytest.mark.parametrize("member", [*FAMILY, "markov"])
@torch.no_grad()
def test_a_block_drafter_is_as_sure_as_its_head(member: str) -> None:
    config = drafter_config(markov_rank=4) if member == "markov" else member_config(member)
    model, target = random_model(config), tiny_target("llama")
    drafter = BlockDrafter(model, target)
    seen: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda module, arguments, output: seen.append(output))
    generator = torch.Generator().manual_seed(2)
    ids, taps = torch.randint(0, 90, (2, 9), generator=generator), torch.randn(2, 9, 2, 32, generator=generator)
    state = drafter.new_state(2, 64)
    drafter.observe(state, [0, 1], ids, taps, [9, 4])
    seen.clear()
    proposal = drafter.propose(state, [0, 1], torch.tensor([7, 8]))
    hidden = torch.cat([output.view(2, -1, 32) for output in seen], dim=1)
    logits = target.head(hidden[:, -drafter.max_drafts :])
    if model.markov_head is not None:
        before = torch.cat([torch.tensor([[7], [8]]), proposal.tokens[:, :-1]], dim=1)
        logits = logits + model.markov_head(before)
    likeliest = logits.softmax(dim=-1).max(dim=-1)
    assert proposal.confidence is not None and proposal.sources is None
    assert torch.equal(proposal.tokens, likeliest.indices)
    torch.testing.assert_close(proposal.confidence, likeliest.values, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(likeliest.values[0], likeliest.values[1], atol=1e-3), "control: rows are not alike"


@torch.no_grad()
def test_a_draft_model_is_as_sure_as_it_is() -> None:
    model = tiny_target("llama")
    drafter = IndependentDrafter(model, model.info, 3)
    state = drafter.new_state(2, 64)
    texts = [[3, 4, 5, 6], [9, 8]]
    for row, text in enumerate(texts):
        drafter.observe(state, [row], torch.tensor([text]), None, [len(text)])
    proposal = drafter.propose(state, [0, 1], torch.tensor([7, 7]))
    assert proposal.confidence is not None and proposal.confidence.shape == (2, 3)
    for b, text in enumerate(texts):
        for k in range(3):
            read = torch.tensor([[*text, 7, *proposal.tokens[b, :k].tolist()]])
            logits = model.forward(read, model.new_cache(1, 64), [0]).logits[0, -1]
            assert float(proposal.confidence[b, k]) == pytest.approx(float(logits.softmax(-1).max()), abs=1e-5)


def test_a_lookup_is_surer_the_more_it_has_found() -> None:
    drafter = NgramDrafter(NgramConfig(longest=4, shortest=1, max_drafts=2))
    state = drafter.new_state(3, 64)
    texts = [[1, 2, 3, 4, 5, 1, 2, 3], [1, 4, 5, 3], [1, 2]]
    for row, text in enumerate(texts):
        drafter.observe(state, [row], torch.tensor([text]), None, [len(text)])
    proposal = drafter.propose(state, [0, 1, 2], torch.tensor([4, 4, 9]))
    assert proposal.counts == [2, 2, 0] and proposal.confidence is not None
    assert proposal.confidence[:2].tolist() == [[1 - 0.5**4] * 2, [0.5] * 2]


def test_what_a_lookup_and_another_drafter_say_is_kept_apart() -> None:
    drafter = LookupDrafter(UnrelatedDrafter(3, VOCAB), NgramConfig(longest=3, shortest=2))
    state = drafter.new_state(2, 64)
    taps = torch.zeros(1, 5, 2, 3)
    drafter.observe(state, [0], torch.tensor([[1, 2, 3, 1, 2]]), taps, [5])
    drafter.observe(state, [1], torch.tensor([[1, 2, 4, 5, 6]]), taps, [5])
    both = drafter.propose(state, [0, 1], torch.tensor([3, 3]))
    assert both.sources == [TEXT, COSTLY] and both.confidence is not None
    assert both.confidence[0].tolist() == [1 - 0.5**3] * 3
    assert both.confidence[1].isnan().all(), "it does not say"
    assert drafter.propose(state, [0], torch.tensor([3])).sources == [TEXT]
    assert drafter.propose(state, [1], torch.tensor([3])).sources in (None, [COSTLY])
