"""Prompt lookup: what it drafts is what a search through the whole text finds; nothing found, nothing drafted."""

from __future__ import annotations

import random

import pytest
import torch
from fakes import HashTarget
from oracles import by_hand, check_stats

from blockdraft.config import ConfigError, EngineConfig, NgramConfig, SamplingParams
from blockdraft.drafters.ngram import NgramDrafter
from blockdraft.engine.engine import Engine


def search(text: list[int], config: NgramConfig) -> list[int]:
    """By definition: the longest ending first, from the back; then token after token from the text and the drafts."""
    for length in range(config.longest, config.shortest - 1, -1):
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[len(text) - length :]:
                longer = list(text)
                for k in range(config.max_drafts):
                    longer.append(longer[start + length + k])
                return longer[len(text) :]
    return []


@pytest.mark.parametrize("config", [(3, 1, 10), (1, 1, 1), (2, 2, 4), (4, 2, 3), (5, 5, 7)])
def test_drafts_are_what_a_search_finds(config: tuple[int, int, int]) -> None:
    longest, shortest, max_drafts = config
    settings = NgramConfig(longest=longest, shortest=shortest, max_drafts=max_drafts)
    drafter, rng = NgramDrafter(settings), random.Random(longest)
    state, texts = drafter.new_state(4, 64), [[] for _ in range(4)]
    found = nothing = 0
    for _ in range(120):
        rows = rng.sample(range(4), 3)  # ragged, in any order, one row left out
        if rng.random() < 0.05:
            drafter.reset(state, rows[0])
            texts[rows[0]] = []
        anchors = [rng.randrange(3 + 5 * row) for row in rows]
        expected = [search([*texts[row], anchor], settings) for row, anchor in zip(rows, anchors, strict=True)]
        for _ in range(2):  # asking changes nothing
            proposal = drafter.propose(state, rows, torch.tensor(anchors))
            assert proposal.counts == [len(ids) for ids in expected]
            assert proposal.tokens.shape == (3, max(proposal.counts)) and proposal.tokens.dtype == torch.long
            for ids, tokens, count in zip(expected, proposal.tokens.tolist(), proposal.counts, strict=True):
                assert tokens[:count] == ids
        found, nothing = found + sum(map(bool, expected)), nothing + expected.count([])
        counts = [rng.randint(1, 4) for _ in rows]
        tokens = torch.tensor([[anchor, *(rng.randrange(3 + 5 * row) for _ in range(3))]
                               for row, anchor in zip(rows, anchors, strict=True)])  # fmt: skip
        drafter.observe(state, rows, tokens, None, counts)
        for row, ids, count in zip(rows, tokens.tolist(), counts, strict=True):
            texts[row] += ids[:count]
    assert found > 20 and nothing > 5


def test_the_longest_ending_wins_and_then_the_latest() -> None:
    drafter = NgramDrafter(NgramConfig(max_drafts=3))
    state = drafter.new_state(1, 64)
    drafter.observe(state, [0], torch.tensor([[7, 8, 1, 2, 9, 8, 3, 4, 7]]), None, [9])
    # "7 8" was followed by 1; that 8 alone was followed by 3 is later, but shorter.
    assert drafter.propose(state, [0], torch.tensor([8])).tokens.tolist() == [[1, 2, 9]]
    assert drafter.propose(state, [0], torch.tensor([9])).tokens.tolist() == [[8, 3, 4]]
    drafter.observe(state, [0], torch.tensor([[8, 5, 7]]), None, [3])
    assert drafter.propose(state, [0], torch.tensor([8])).tokens.tolist() == [[5, 7, 8]]


def test_a_text_that_repeats_itself_is_drafted_on() -> None:
    drafter = NgramDrafter(NgramConfig(max_drafts=5))
    state = drafter.new_state(1, 64)
    drafter.observe(state, [0], torch.tensor([[1, 2, 1]]), None, [3])
    assert drafter.propose(state, [0], torch.tensor([2])).tokens.tolist() == [[1, 2, 1, 2, 1]]


def test_nothing_seen_before_is_nothing_drafted() -> None:
    drafter = NgramDrafter(NgramConfig())
    state = drafter.new_state(2, 64)
    drafter.observe(state, [0], torch.tensor([[1, 2, 3]]), None, [3])
    proposal = drafter.propose(state, [0, 1], torch.tensor([4, 4]))
    assert proposal.tokens.shape == (2, 0) and proposal.counts == [0, 0]


class LoopTarget(HashTarget):
    """Says the prompt again and again, from its first token on: the lookup knows it all."""

    period = 9

    def logits(self, context: list[int]) -> torch.Tensor:
        again = context[-min(self.period, len(context))]
        return torch.nn.functional.one_hot(torch.tensor(again), self.info.vocab_size).float() * 9


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_that_repeats_its_prompt_takes_few_passes(temperature: float) -> None:
    prompts = [[*range(9)], [*range(20, 29)], [*range(40, 49)]]
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature, seed=1)
    answers = [by_hand(LoopTarget(), prompt, params) for prompt in prompts]
    target = LoopTarget()
    engine = Engine(target, NgramDrafter(NgramConfig(max_drafts=7)), EngineConfig(slots=2))
    requests = [engine.add(prompt, params) for prompt in prompts]
    engine.run()
    assert [request.output_ids for request in requests] == answers
    for request in requests:
        check_stats(request)
        if temperature == 0.0:
            assert request.stats.accepted == request.stats.drafted and request.stats.rounds == 5
    assert sum(request.stats.accepted for request in requests) > 20


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_drafts": 0}, "max_drafts"),
        ({"shortest": 0}, "shortest"),
        ({"shortest": 3, "longest": 2}, "shortest=3 is more than longest=2"),
    ],
)
def test_settings_that_cannot_be_are_refused(values: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NgramConfig.parse(values)
