"""Features: the target's own states and probabilities; from disk as online; resumable; never of something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from tiny import tiny_model, tiny_target

from blockdraft.targets.hf import HFTarget
from blockdraft.train import shards
from blockdraft.train.data import Sample, make_sample
from blockdraft.train.features import OnlineFeatures, compute
from blockdraft.train.shards import FeatureError, ShardFeatures, build_shards, token_batches

TAPS = (0, 2)
QUIET = Console(quiet=True)


def make_samples(count: int = 7, seed: int = 0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number in range(count):
        length = 6 + int(torch.randint(20, (1,), generator=generator))
        ids = torch.randint(2, 96, (length,), generator=generator).tolist()
        mask = [False] * 3 + [True] * (length - 3)
        if number % 2:
            mask[-3] = False
        samples.append(make_sample(f"prompt {number}", ids, mask))
    return samples


def build(target: HFTarget, samples: list[Sample], folder: Path, top_k: int = 5, **options: Any) -> ShardFeatures:
    return build_shards(target, TAPS, samples, folder, top_k, 64, QUIET, **options)


def test_features_are_what_transformers_says() -> None:
    target, model = tiny_target(), tiny_model()
    target.set_taps(TAPS)
    samples = make_samples()
    for sample, feature in zip(samples, compute(target, samples, 5), strict=True):
        with torch.no_grad():
            expected = model(sample.ids[None], output_hidden_states=True)
        states = torch.stack([expected.hidden_states[tap + 1][0, :-1] for tap in TAPS], dim=1)
        torch.testing.assert_close(feature.taps, states, atol=1e-4, rtol=1e-4)
        probabilities = expected.logits[0].softmax(-1)
        assert feature.teacher is not None
        for row, position in enumerate(sample.loss_mask.nonzero()[:, 0].tolist()):
            top = probabilities[position - 1].topk(5)
            assert feature.teacher[0][row].tolist() == top.indices.tolist()
            torch.testing.assert_close(feature.teacher[1][row].float(), top.values, atol=1e-3, rtol=1e-3)


def test_shards_equal_online(tmp_path: Path) -> None:
    target, samples = tiny_target(), make_samples()
    online, stored = OnlineFeatures(target, TAPS, 5), build(target, samples, tmp_path, shard_tokens=40)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for picked in ([0, 1, 2], [6, 3], [4]):
        batch = [samples[number] for number in picked]
        a, b = online.batch(batch), stored.batch(batch)
        assert a.taps.shape == (len(batch), max(map(len, batch)) - 1, 2, 32) and a.taps.dtype == torch.float32
        torch.testing.assert_close(a.taps, b.taps, atol=2e-3, rtol=2e-3)
        assert a.teacher is not None and b.teacher is not None
        assert torch.equal(a.teacher.ids, b.teacher.ids)
        torch.testing.assert_close(a.teacher.probabilities, b.teacher.probabilities, atol=1e-3, rtol=1e-3)
        for row, sample in enumerate(batch):
            absent = torch.ones(a.teacher.ids.shape[1], dtype=torch.bool)
            absent[: len(sample)] = ~sample.loss_mask
            assert not a.teacher.probabilities[row, absent].any() and not a.taps[row, len(sample) - 1 :].any()


def test_without_a_teacher(tmp_path: Path) -> None:
    target, samples = tiny_target(), make_samples()
    assert OnlineFeatures(target, TAPS, 0).batch(samples).teacher is None
    assert build(target, samples, tmp_path, top_k=0).batch(samples).teacher is None


def test_large_values_are_kept_in_bf16(tmp_path: Path) -> None:
    target, samples = tiny_target(), make_samples(3)
    norm = target.model.get_decoder().layers[2].mlp.down_proj
    norm.register_forward_hook(lambda module, inputs, output: output + 1e5)
    stored = build(target, samples, tmp_path).batch(samples)
    with safe_open(next(tmp_path.glob("*.safetensors")), framework="pt") as file:
        assert file.get_slice("taps").get_dtype() == "BF16"
    assert stored.taps.isfinite().all() and stored.taps[0, 0, 1].max() > 9e4


def test_a_killed_build_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, samples = tiny_target(), make_samples(12)
    calls: list[int] = []

    def counted(target: HFTarget, batch: list[Sample], top_k: int) -> Any:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(len(batch))
        return compute(target, batch, top_k)

    monkeypatch.setattr(shards, "compute", counted)
    with pytest.raises(KeyboardInterrupt):
        build(target, samples, tmp_path, shard_tokens=40)
    (tmp_path / "000099.tmp").write_bytes(b"torn")
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    assert kept
    with pytest.raises(FeatureError, match=r"of 12 samples have no features"):
        ShardFeatures(tmp_path, samples, torch.device("cpu"))
    calls.clear()
    calls.append(0)
    monkeypatch.setattr(shards, "compute", compute)
    stored = build(target, samples, tmp_path, shard_tokens=40)
    assert all(path.stat().st_mtime_ns == made for path, made in kept.items()), "finished files are not made again"
    assert not list(tmp_path.glob("*.tmp"))
    whole = build(target, samples, tmp_path / "whole")
    assert torch.allclose(stored.batch(samples).taps, whole.batch(samples).taps, atol=1e-3)
    more = [*samples, *make_samples(3, seed=1)]
    before = set(tmp_path.glob("*.safetensors"))
    build(target, more, tmp_path).batch(more)
    assert len(set(tmp_path.glob("*.safetensors")) - before) == 1, "new samples, new file"


def test_shards_of_something_else_are_refused(tmp_path: Path) -> None:
    samples = make_samples(3)
    build(tiny_target(), samples, tmp_path)
    build(tiny_target(), samples, tmp_path)
    with pytest.raises(FeatureError, match=r"shards have teacher_top_k=5, this run 6"):
        build(tiny_target(), samples, tmp_path, top_k=6)
    with pytest.raises(FeatureError, match=r"shards have tap_ids=\[0, 2\], this run \[1, 2\]"):
        build_shards(tiny_target(), (1, 2), samples, tmp_path, 5, 64, QUIET)
    with pytest.raises(FeatureError, match="other weights"):
        build(tiny_target(seed=3), samples, tmp_path)
    with pytest.raises(FeatureError, match="num_layers=4, this run 6"):
        build(tiny_target(num_hidden_layers=6), samples, tmp_path)
    next(tmp_path.glob("*.safetensors")).write_bytes(b"nonsense")
    with pytest.raises(FeatureError, match="not a shard of features"):
        build(tiny_target(), samples, tmp_path)


def test_batches_of_similar_length_within_the_budget() -> None:
    samples = sorted(make_samples(30), key=lambda sample: -len(sample))
    batches = list(token_batches(samples, 64))
    assert [sample for batch in batches for sample in batch] == samples
    assert all(len(batch) * len(batch[0]) <= 64 for batch in batches) and max(map(len, batches)) > 3
    assert [len(batch) for batch in token_batches(samples[:2], 1)] == [1, 1]
