"""A smaller model as the drafter: it drafts what a plain greedy loop would, and never reads a token twice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cases import neighbour, target
from oracles import check_stats
from tiny import VOCAB, tiny_model, tiny_target
from torch import Tensor

from blockdraft.cache import KVCache
from blockdraft.config import EngineConfig, SamplingParams
from blockdraft.drafters.independent import IndependentDrafter
from blockdraft.engine.engine import Engine

K = 4


@torch.no_grad()
def greedy(model: Any, text: list[int], steps: int) -> list[int]:
    """transformers' own model over the whole text, again for each token."""
    longer = list(text)
    for _ in range(steps):
        longer.append(int(model(input_ids=torch.tensor([longer]), use_cache=False).logits[0, -1].argmax()))
    return longer[len(text) :]


class Watched:
    """A model that notes the starts and the ids of every pass."""

    def __init__(self, model: Any) -> None:
        self.model, self.info, self.passes = model, model.info, []

    def new_cache(self, slots: int, capacity: int) -> KVCache:
        return self.model.new_cache(slots, capacity)

    def forward(self, ids: Tensor, cache: KVCache, rows: Sequence[int], keep_logits: int | None = None) -> Any:
        self.passes.append(([cache.lengths[row] for row in rows], ids.tolist()))
        return self.model.forward(ids, cache, rows, keep_logits)


@pytest.mark.parametrize("kind", ["llama", "qwen3-mixed"])
def test_drafts_are_those_of_a_greedy_loop_whatever_was_accepted(kind: str) -> None:
    plain, model = tiny_model(kind), tiny_target(kind)
    drafter, rng = IndependentDrafter(model, model.info, K), random.Random(kind)
    state = drafter.new_state(4, 200)
    texts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (5, 1, 12, 3)]
    for row in (2, 0, 3, 1):  # prompts come one at a time, as the engine reads them
        drafter.observe(state, [row], torch.tensor([texts[row]]), None, [len(texts[row])])
    outcomes = set()
    for turn in range(10):
        rows = rng.sample(range(4), 3)
        anchors = [rng.randrange(VOCAB) for _ in rows]
        drafts = [greedy(plain, [*texts[row], anchor], K) for row, anchor in zip(rows, anchors, strict=True)]
        for _ in range(1 + turn % 2):  # a second time, as after an interrupted round
            assert drafter.propose(state, rows, torch.tensor(anchors)).tokens.tolist() == drafts
        counts = [rng.randint(1, K + 1) for _ in rows]
        tokens = torch.tensor([[anchor, *ids] for anchor, ids in zip(anchors, drafts, strict=True)])
        if turn % 5 == 4:
            tokens[:, 1] = (tokens[:, 1] + 1) % VOCAB  # committed, but not as drafted
        drafter.observe(state, rows, tokens, None, counts)
        for row, ids, count in zip(rows, tokens.tolist(), counts, strict=True):
            texts[row] += ids[:count]
        outcomes |= set(counts)
        if turn == 6:
            drafter.reset(state, 1)
            texts[1] = [7, 8]
            drafter.observe(state, [1], torch.tensor([[7, 8]]), None, [2])
    assert outcomes == set(range(1, K + 2))
    control = drafter.propose(state, [0], torch.tensor([0])).tokens.tolist()
    assert control != [greedy(plain, [*texts[1], 0], K)]


def test_nothing_that_is_right_is_read_again() -> None:
    watched = Watched(tiny_target())
    drafter = IndependentDrafter(watched, watched.info, K)
    state = drafter.new_state(2, 100)
    drafter.observe(state, [0], torch.tensor([[5, 6, 7]]), None, [3])
    drafter.observe(state, [1], torch.tensor([[8, 9]]), None, [2])
    assert watched.passes == [([0], [[5, 6, 7]]), ([0], [[8, 9]])]

    def propose(anchors: list[int]) -> list[list[int]]:
        watched.passes.clear()
        return drafter.propose(state, [0, 1], torch.tensor(anchors)).tokens.tolist()

    first, second = propose([10, 11])
    assert watched.passes[0] == ([3, 2], [[10], [11]]) and len(watched.passes) == K
    # Row 0: all four were right, and nobody has read the last.  Row 1: one was.
    watched.passes.clear()
    drafter.observe(state, [0, 1], torch.tensor([[10, *first], [11, *second]]), None, [K + 1, 2])
    assert watched.passes == [] and state.cache.lengths == [3 + K, 2 + 2]
    propose([12, 13])
    assert watched.passes[0] == ([3 + K, 4], [[first[-1], 12], [13, 0]]) and len(watched.passes) == K
    assert watched.passes[1][0] == [3 + K + 2, 4 + 1], "padding does not stay"
    # A single token that nothing was drafted for waits for the next proposal.
    watched.passes.clear()
    drafter.observe(state, [1], torch.tensor([[14]]), None, [1])
    assert watched.passes == []
    propose([12, 13])
    assert watched.passes[0] == ([3 + K + 0, 4], [[first[-1], 12], [14, 13]])


def test_a_slot_that_is_nearly_full_gets_fewer_drafts() -> None:
    model, plain = tiny_target(max_position_embeddings=16), tiny_model(max_position_embeddings=16)
    drafter = IndependentDrafter(model, model.info, K)
    state = drafter.new_state(1, 16)
    text = [3] * 12
    drafter.observe(state, [0], torch.tensor([text]), None, [12])
    for length in (12, 13, 14, 15):
        expected = greedy(plain, [*text, 4], min(K, 16 - length))
        assert drafter.propose(state, [0], torch.tensor([4])).tokens.tolist() == [expected]
        drafter.observe(state, [0], torch.tensor([[4]]), None, [1])
        text.append(4)
    with pytest.raises(ValueError, match="17 tokens exceeds the 16"):
        drafter.new_state(1, 17)


@pytest.mark.parametrize("kind", ["hf-llama", "dense-qwen3-mixed"])
def test_the_target_as_its_own_drafter_is_always_right(kind: str) -> None:
    prompts = [[3, 4, 5], [9], [*range(10, 50)]]
    params = SamplingParams(max_tokens=17, ignore_eos=True)
    own: list[tuple[int, int]] = []
    near: list[tuple[int, int]] = []
    answers = []
    for model, accepted in ((None, []), (target(kind), own), (neighbour(kind), near)):
        drafter = IndependentDrafter(model, target(kind).info, K) if model is not None else None
        engine = Engine(target(kind), drafter, EngineConfig(slots=3, capacity=64))
        requests = [engine.add(prompt, params) for prompt in prompts]
        engine.run()
        answers.append([request.output_ids for request in requests])
        for request in requests:
            check_stats(request)
            accepted.append((request.stats.accepted, request.stats.drafted))
    assert answers[1] == answers[2] == answers[0]
    assert all(accepted == drafted > 10 for accepted, drafted in own)
    assert any(0 < accepted < drafted for accepted, drafted in near), "control: another model is not"


def test_another_vocabulary_is_refused_in_one_line() -> None:
    small, big = tiny_target(num_hidden_layers=1), tiny_target("qwen3", vocab_size=112, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"'tiny-llama' has a vocabulary of 96, 'tiny-qwen3' one of 112") as error:
        IndependentDrafter(small, big.info, K)
    assert "\n" not in str(error.value)
