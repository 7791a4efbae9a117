"""The choice: its noise, its truncations against slow loops, its penalties along a drafted path, its distribution."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from blockdraft.config import SamplingParams
from blockdraft.ops import sampling
from blockdraft.ops.sampling import ChoiceState, choose, gumbel, truncate

CPU = torch.device("cpu")


def state(vocab: int, seed: int = 0, prompt: tuple[int, ...] = (), **params: object) -> ChoiceState:
    return ChoiceState(SamplingParams.parse(params), seed, prompt, vocab, CPU)


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """Pearson's statistic in standard deviations above its mean (degrees of freedom: tokens - 1)."""
    expected = probs.double() * counts.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    degrees = len(probs) - 1
    return (statistic - degrees) / math.sqrt(2 * degrees)


def draw(logits: Tensor, seeds: range, positions: range, **params: object) -> Tensor:
    """How often each token of logits [V] is chosen over all seeds and positions: [V]."""
    block = logits.expand(1, len(positions), -1)
    ids = [choose(block, [state(len(logits), seed, **params)], [positions[0]]) for seed in seeds]
    return torch.bincount(torch.cat(ids).flatten(), minlength=len(logits))


# --- noise -----------------------------------------------------------------------------------------------------------


def test_noise_is_gumbel_and_finite() -> None:
    noise = torch.stack([gumbel(1, position, 5000, CPU) for position in range(200)]).double()
    assert torch.isfinite(noise).all()
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.005)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.01)
    # The largest of 5000 is Gumbel again, moved by log 5000: the tail that decides is right too.
    largest = noise.amax(dim=1) - math.log(5000)
    assert largest.mean().item() == pytest.approx(0.57722, abs=0.3)


def test_noise_of_neighbouring_seeds_positions_and_ids_is_unrelated() -> None:
    noise = torch.stack([gumbel(seed, position, 4096, CPU) for seed in (0, 1, -1, 2**63) for position in (0, 1, 2)])
    correlation = torch.corrcoef(noise) - torch.eye(len(noise))
    assert correlation.abs().max() < 5 / math.sqrt(4096)
    along = torch.corrcoef(torch.stack([noise.flatten()[:-1], noise.flatten()[1:]]))[0, 1]
    assert along.abs() < 5 / math.sqrt(noise.numel())


def test_the_extremes_of_the_hash_stay_inside_the_unit_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    monkeypatch.setattr(sampling, "_mix_", lambda bits: bits.copy_(extremes))
    monkeypatch.setattr(sampling, "_key", lambda seed, position: 0)
    noise = gumbel(0, 0, 5, CPU)
    assert torch.isfinite(noise).all() and noise.argmax() in (0, 4)


def test_the_mix_is_a_permutation() -> None:
    for start in (0, -(2**31), 2**31 - 2**20):
        values = torch.arange(start, start + 2**20, dtype=torch.int64).to(torch.int32)
        assert len(sampling._mix_(values).unique()) == 2**20


def test_a_choice_does_not_depend_on_batch_or_block() -> None:
    logits = torch.randn(3, 6, 300, generator=torch.Generator().manual_seed(3))
    settings = [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.0}]
    states = [state(300, seed, **params) for seed, params in enumerate(settings)]
    positions = [11, 40, 7]
    together = choose(logits, states, positions)
    for b in range(3):
        for j in range(6):
            assert choose(logits[b : b + 1, j : j + 1], [states[b]], [positions[b] + j]) == together[b, j]
    again = choose(logits.flip(0), states[::-1], positions[::-1])
    assert torch.equal(again.flip(0), together)


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(1, 2, 50)
    before = logits.clone()
    everything = {"temperature": 0.5, "top_p": 0.5, "top_k": 9, "min_p": 0.01, "presence_penalty": 1.0}
    choose(logits, [state(50, logit_bias={3: 2.0}, repetition_penalty=1.2, **everything)], [0], torch.tensor([[4]]))
    assert torch.equal(logits, before)


# --- distribution ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_sampling_follows_the_softmax(temperature: float) -> None:
    logits = torch.randn(24, generator=torch.Generator().manual_seed(5)) * 1.5
    for seeds, positions in ((range(12), range(400)), (range(800), range(7, 13))):
        counts = draw(logits, seeds, positions, temperature=temperature)
        assert abs(chi_square(counts, (logits / temperature).softmax(0))) < 4
        # Control: the same counts against a distribution a little off must fail.
        assert chi_square(counts, (logits / (temperature * 1.2)).softmax(0)) > 4


def test_broken_noise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: noise that ignores part of the key, or is not Gumbel, fails the same check."""
    logits = torch.randn(24, generator=torch.Generator().manual_seed(5)) * 1.5
    true_noise = sampling.gumbel
    for broken in (
        lambda seed, position, vocab, device: true_noise(seed, position // 40, vocab, device),
        lambda seed, position, vocab, device: true_noise(seed, position, vocab, device) * 0.8,
    ):
        monkeypatch.setattr(sampling, "gumbel", broken)
        assert chi_square(draw(logits, range(12), range(400), temperature=1.0), logits.softmax(0)) > 4


def test_truncated_sampling_follows_the_renormalised_rest() -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(6)) * 2
    kept = torch.tensor(slow_truncate(logits.tolist(), 0.8, min_p=0.0, top_k=0, top_p=0.85))
    counts = draw(logits, range(12), range(400), temperature=0.8, top_p=0.85)
    probs = (logits / 0.8).masked_fill(~kept, -math.inf).softmax(0)
    assert counts[~kept].sum() == 0 and 3 < kept.sum() < 40
    assert abs(chi_square(counts[kept], probs[kept])) < 4


# --- truncation ------------------------------------------------------------------------------------------------------


def slow_truncate(logits: list[float], temperature: float, min_p: float, top_k: int, top_p: float) -> list[bool]:
    """Which tokens stay, by the definitions: min-p, then top-k, then top-p over what is left."""

    def probabilities(kept: list[int]) -> dict[int, float]:
        weights = {i: math.exp((logits[i] - max(logits)) / temperature) for i in kept}
        return {i: weight / sum(weights.values()) for i, weight in weights.items()}

    kept = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    probs = probabilities(kept)
    kept = [i for i in kept if probs[i] >= min_p * max(probs.values())]
    if top_k:
        kept = kept[:top_k]
    probs, total, nucleus = probabilities(kept), 0.0, []
    for i in kept:
        nucleus.append(i)
        total += probs[i]
        if total >= top_p:
            break
    return [i in nucleus for i in range(len(logits))]


@pytest.mark.parametrize("spread", [0.02, 1.0, 4.0])
@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"),
    [(0.0, 0, 0.9), (0.0, 5, 1.0), (0.1, 0, 1.0), (0.03, 20, 0.7), (0.0, 1, 1.0), (0.0, 0, 1e-6), (0.0, 10**6, 0.97)],
)
def test_truncation_equals_the_slow_loop(min_p: float, top_k: int, top_p: float, spread: float) -> None:
    generator = torch.Generator().manual_seed(7)
    params = SamplingParams(temperature=0.8, min_p=min_p, top_k=top_k, top_p=top_p)
    for vocab in (30, 700):
        for _ in range(5):
            logits = torch.randn(vocab, generator=generator) * spread
            kept = truncate(logits, params) > -math.inf
            assert kept.tolist() == slow_truncate(logits.tolist(), 0.8, min_p, top_k, top_p)


def test_the_lower_id_is_kept_among_equals() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 1.0, 0.0])
    for params, kept in [
        (SamplingParams(temperature=1.0, top_k=1), [1]),
        (SamplingParams(temperature=1.0, top_k=2), [1, 3]),
        (SamplingParams(temperature=1.0, top_k=4), [0, 1, 2, 3]),
        (SamplingParams(temperature=1.0, top_p=0.65), [0, 1, 3]),
    ]:
        assert (truncate(logits, params) > -math.inf).nonzero().flatten().tolist() == kept
    flat = truncate(torch.zeros(5000), SamplingParams(temperature=1.0, top_p=0.5))
    assert (flat > -math.inf).sum().item() == pytest.approx(2500, abs=1) and flat[:2400].isfinite().all()


def test_a_tiny_temperature_is_arg_max() -> None:
    logits = torch.randn(1, 50, 64, generator=torch.Generator().manual_seed(8)) * 10
    for temperature in (1e-40, 1e-30, 1e-6):
        assert torch.equal(choose(logits, [state(64, temperature=temperature)], [0]), logits.argmax(-1))


# --- penalties and bias ----------------------------------------------------------------------------------------------


def slow_penalize(logits: list[float], prompt: list[int], output: list[int], params: SamplingParams) -> list[float]:
    result = []
    for token, score in enumerate(logits):
        score += params.logit_bias.get(token, 0.0)
        count = output.count(token)
        if token in prompt or count:
            score = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
        result.append(score - params.frequency_penalty * count - params.presence_penalty * (count > 0))
    return result


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_penalties_follow_the_drafted_path(temperature: float) -> None:
    generator = torch.Generator().manual_seed(9)
    kinds = [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0},
        {"frequency_penalty": -0.7, "logit_bias": {2: 1.5, 7: -100.0}},
        {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.4, "logit_bias": {1: 0.3}},
    ]
    differs = 0
    for case in range(40):
        params = SamplingParams.parse({"temperature": temperature, **kinds[case % 4]})
        prompt, output, drafts = (torch.randint(12, (n,), generator=generator).tolist() for n in (3, 4, 5))
        logits = torch.randn(6, 12, generator=generator)
        one = ChoiceState(params, case, prompt, 12, CPU)
        one.commit(output[:1])
        one.commit(output[1:])
        chosen = choose(logits[None], [one], [20], torch.tensor([drafts]))[0].tolist()
        for j in range(6):
            path = output + drafts[:j]
            scores = torch.tensor(slow_penalize(logits[j].tolist(), prompt, path, params))
            if temperature:
                scores = scores / temperature + gumbel(case, 20 + j, 12, CPU)
            assert chosen[j] == int(scores.argmax())
            # and it is what plain decoding along that path chooses, bit for bit
            fresh = ChoiceState(params, case, prompt, 12, CPU)
            fresh.commit(path)
            assert chosen[j] == choose(logits[None, j : j + 1], [fresh], [20 + j]).item()
            blind = torch.tensor(slow_penalize(logits[j].tolist(), prompt, output, params))
            blind = blind / temperature + gumbel(case, 20 + j, 12, CPU) if temperature else blind
            differs += chosen[j] != int(blind.argmax())
    assert differs > 5, "some choices must hang on the drafts before them, or this test shows nothing"


def test_arg_max_is_left_to_one_call() -> None:
    assert state(10, top_p=0.5, top_k=3).is_argmax
    assert not state(10, temperature=0.1).is_argmax
    assert not state(10, presence_penalty=0.1).is_argmax
    assert not state(10, logit_bias={1: 1.0}).is_argmax
