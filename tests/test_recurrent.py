"""State that is not one entry per token: right at every position that a row is taken back to, and small."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import tiny_family
from rows import fill, random_ids
from torch import Tensor

from blockdraft.drafters.independent import IndependentDrafter
from blockdraft.ops.recurrence import causal_conv, delta_scan, gates
from blockdraft.targets.deltanet import DeltaNet
from blockdraft.targets.hf import HFTarget
from blockdraft.targets.recurrent import REWIND, WIDEST, Inputs, RecurrentCache, State, Trail

SCAN = DeltaNet._scan


def scan(state: State, inputs: Inputs) -> tuple[Tensor, State]:
    """A state that depends on every input and on their order."""
    (value,), (numbers,) = state, inputs
    found = []
    for number in numbers:
        value = (value * 31 + number + 1) % 10007
        found.append(value)
    return torch.stack(found), (value,)


def slowly(text: list[int]) -> list[int]:
    value, found = 7, []
    for number in text:
        value = (value * 31 + number + 1) % 10007
        found.append(value)
    return found


def test_any_order_of_reading_and_taking_back_gives_what_reading_once_gives() -> None:
    rng = random.Random(0)
    replays = 0
    for _ in range(60):
        trail, furthest = Trail((torch.tensor(7),)), 0
        text: list[int] = []
        for _ in range(40):
            earliest = max(0, furthest - REWIND)
            kept = rng.choice((len(text), len(text), *(rng.randint(earliest, len(text)) for _ in "123"), 0))
            replays += 0 < kept < len(text)
            del text[kept:]
            new = [rng.randrange(100) for _ in range(rng.choice((1, 1, 2, 7, 16, 70, WIDEST)))]
            found = trail.read(kept, (torch.tensor(new),), scan)
            text, furthest = text + new, max(furthest, kept) if kept else 0
            assert found.tolist() == slowly(text)[-len(new) :]
            assert len(trail.snapshots) <= 6
            assert len(trail.inputs[0]) == len(text) - trail.oldest <= REWIND + 2 * WIDEST
    assert replays > 500


def test_a_long_text_is_remembered_at_its_end_only() -> None:
    trail, text = Trail((torch.tensor(7),)), list(range(1000))
    assert trail.read(0, (torch.tensor(text),), scan).tolist() == slowly(text)
    assert 0 < 1000 - trail.oldest <= REWIND + 2 * WIDEST
    back = trail.oldest + 1
    assert trail.read(back, (torch.tensor([5]),), scan).tolist() == slowly([*text[:back], 5])[-1:]


def test_what_is_forgotten_cannot_be_taken_back() -> None:
    target, text = HFTarget(tiny_family("qwen3.5"), "hybrid"), random_ids(1000)
    cache = target.new_cache(2, 1100)
    assert isinstance(cache, RecurrentCache) and cache.keys[0].numel() == 0 < cache.keys[1].numel()
    fill(target, cache, 1, text)
    with pytest.raises(ValueError, match=r"a row of 1000 tokens cannot be taken back to 20: .* remembered from \d+ on"):
        cache.truncate([0, 1], [0, 20])
    assert cache.lengths == [0, 1000]
    cache.truncate([1], [0])
    assert torch.equal(fill(target, cache, 1, text[:30]), fill(target, target.new_cache(1, 64), 0, text[:30]))


@pytest.mark.parametrize("before", [0, 30])
def test_an_interrupted_pass_can_be_done_again(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layers have read the tokens, the others have not; the row's length has not changed."""
    target, text = HFTarget(tiny_family("qwen3.5"), "hybrid"), random_ids(60)
    cache, clean = target.new_cache(1, 64), target.new_cache(1, 64)
    expected = fill(target, clean, 0, text, (before,) if before else ())
    if before:
        fill(target, cache, 0, text[:before])
    calls = []

    def interrupted(self: DeltaNet, *inputs: Any) -> Any:
        calls.append(self.layer)
        if self.layer == 2:
            raise KeyboardInterrupt
        return SCAN(self, *inputs)

    with monkeypatch.context() as patch:
        patch.setattr(DeltaNet, "_scan", interrupted)
        with pytest.raises(KeyboardInterrupt):
            target.forward(text[None, before:], cache, [0])
    assert calls == [0, 2] and cache.lengths == [before]
    cache.truncate([0], [before])
    assert torch.equal(fill(target, cache, 0, text[before:]), expected[before:])


def test_a_hybrid_drafts_too() -> None:
    """A draft model reads one token after another and is taken back over many passes."""
    model = HFTarget(tiny_family("qwen3.5"), "hybrid")
    drafter = IndependentDrafter(model, model.info, max_drafts=9)
    state, text, anchor = drafter.new_state(2, 128), random_ids(2, 20), torch.tensor([3, 4])
    expected = []
    for row in (0, 1):
        cache = model.new_cache(1, 128)
        last = fill(model, cache, 0, torch.cat([text[row], anchor[row : row + 1]]))[-1]
        drafts = [int(last.argmax())]
        while len(drafts) < 9:
            drafts.append(int(model.forward(torch.tensor([drafts[-1:]]), cache, [0]).logits.argmax()))
        expected.append(drafts)
        drafter.observe(state, [row], text[row : row + 1], None, [20])
    for _ in range(3):  # nothing is committed in between: the same drafts again
        assert drafter.propose(state, [0, 1], anchor).tokens.tolist() == expected


def test_the_convolution_is_torchs() -> None:
    x, weight = torch.randn(3 + 11, 32), torch.randn(32, 4)
    expected = F.conv1d(x.T[None], weight[:, None], groups=32)[0].T
    torch.testing.assert_close(causal_conv(x, weight), expected, rtol=1e-5, atol=1e-5)


def test_the_delta_rule_is_its_definition() -> None:
    heads, keys, values, count = 2, 3, 4, 6
    query, key, value = (torch.randn(count, heads, size, dtype=torch.float64) for size in (keys, keys, values))
    kept, rate = torch.rand(2, count, heads, dtype=torch.float64)
    start = torch.randn(heads, keys, values, dtype=torch.float64)
    found, state = delta_scan(start, query, key, value, kept, rate)
    for h in range(heads):
        slow = start[h].clone()
        for t in range(count):
            # S <- a S (I - b k k') + b v k', in the paper's letters, with S transposed
            forget = torch.eye(keys, dtype=torch.float64) - rate[t, h] * torch.outer(key[t, h], key[t, h])
            slow = kept[t, h] * forget @ slow + rate[t, h] * torch.outer(key[t, h], value[t, h])
            torch.testing.assert_close(found[t, h], slow.T @ query[t, h])
        torch.testing.assert_close(state[h], slow)


def test_gates_of_a_token_have_the_same_bits_in_any_company() -> None:
    decay, rate, speed, bias = torch.randn(50, 5), torch.randn(50, 5), torch.randn(5), torch.randn(5)
    kept, corrected = gates(decay, rate, speed, bias)
    torch.testing.assert_close(kept, (-speed.exp() * F.softplus(decay + bias)).exp())
    torch.testing.assert_close(corrected, rate.sigmoid())
    for t in range(50):
        alone = gates(decay[t : t + 1], rate[t : t + 1], speed, bias)
        assert torch.equal(alone[0][0], kept[t]) and torch.equal(alone[1][0], corrected[t])
