"""Features on disk: made once, mapped into memory, half precision.

Letters: S tokens of a sample, T taps, D hidden width, M kept probabilities, N rows of a file.

A folder has a manifest, which says what target and taps it is of, and files of whole samples under the samples'
own keys: `taps` [N, T, D], `teacher_ids` and `teacher_p` [supervised tokens, M].  Each file is moved into place
when complete, so a killed build goes on where it stopped, and data that grows only adds files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from blockdraft.targets.base import Target
from blockdraft.text import write_whole
from blockdraft.train.data import Sample
from blockdraft.train.features import FeatureBatch, SampleFeatures, collate, compute
from blockdraft.train.progress import Meterbar

SHARD_TOKENS = 16384
# Two machines give the same target's taps up to rounding; another target or other weights are far beyond it.
PROBE_TOLERANCE = 0.02


class FeatureError(ValueError):
    """Shards that do not fit the run; one line that says what differs."""


class ShardFeatures:
    """Reads a folder made by `build_shards`, mapped into memory.  FeatureError: a sample is not in it.

    `columns` are the places of the wanted taps among the folder's; None: all of them.
    """

    def __init__(
        self, folder: Path, samples: Sequence[Sample], device: torch.device, columns: list[int] | None = None
    ) -> None:
        self.device, self._columns = device, columns
        self._index = _read_index(folder)
        missing = sum(sample.key not in self._index for sample in samples)
        if missing:
            raise FeatureError(f"{folder}: {missing} of {len(samples)} samples have no features here")
        self._files: dict[Path, Any] = {}

    def batch(self, samples: Sequence[Sample]) -> FeatureBatch:
        return collate(samples, [self._read(sample) for sample in samples], self.device)

    def _read(self, sample: Sample) -> SampleFeatures:
        path, row, teacher_row = self._index[sample.key]
        if path not in self._files:
            self._files[path] = safe_open(path, framework="pt")
        file = self._files[path]
        taps = file.get_slice("taps")[row : row + len(sample) - 1]
        taps = taps if self._columns is None else taps[:, self._columns]
        if "teacher_ids" not in file.keys():  # noqa: SIM118 (not a dict)
            return SampleFeatures(taps, None)
        rows = slice(teacher_row, teacher_row + int(sample.loss_mask.sum()))
        return SampleFeatures(taps, (file.get_slice("teacher_ids")[rows], file.get_slice("teacher_p")[rows]))


def build_shards(
    target: Target,
    tap_ids: Sequence[int],
    samples: Sequence[Sample],
    folder: Path,
    top_k: int,
    batch_tokens: int,
    console: Console,
    shard_tokens: int = SHARD_TOKENS,
) -> ShardFeatures:
    """Make the features that the folder does not have yet, and open it.

    A folder that was made with more taps than these is read in part, and what it lacks is made with all of its taps.
    Raises FeatureError if what is there is of another target, lacks a tap or has another teacher.
    """
    writer = ShardWriter(target, tap_ids, folder, top_k, shard_tokens)
    missing = sorted((sample for sample in samples if sample.key not in writer), key=lambda sample: -len(sample))
    total = sum(len(sample) for sample in missing)
    with Meterbar(console, "features", total, "tokens") as bar:
        for batch in token_batches(missing, batch_tokens):
            for sample, features in zip(batch, compute(target, batch, top_k), strict=True):
                writer.add(sample, features)
            bar.advance(sum(len(sample) for sample in batch))
        writer.flush()
    columns = None if writer.tap_ids == tuple(tap_ids) else [writer.tap_ids.index(tap) for tap in tap_ids]
    return ShardFeatures(folder, samples, target.info.device, columns)


class ShardWriter:
    """Adds samples to a folder of shards; each file is moved into place when it is full, or at `flush`.

    `tap_ids` are the folder's taps, all that were asked for among them.
    FeatureError: what is there is of another target, lacks a tap or has another teacher.
    """

    def __init__(
        self, target: Target, tap_ids: Sequence[int], folder: Path, top_k: int, shard_tokens: int = SHARD_TOKENS
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.tap_ids = _check_manifest(target, tap_ids, top_k, folder)
        for left_over in folder.glob("*.tmp"):
            left_over.unlink()
        self.folder, self.shard_tokens = folder, shard_tokens
        self._keys = set(_read_index(folder))
        self._number = max((int(path.stem) for path in folder.glob("*.safetensors")), default=-1) + 1
        self._held: list[tuple[Sample, SampleFeatures]] = []

    def __contains__(self, key: str) -> bool:
        """Whether a sample of this key is in the folder, or about to be."""
        return key in self._keys

    def add(self, sample: Sample, features: SampleFeatures) -> None:
        """Take in one sample that is not there yet."""
        self._keys.add(sample.key)
        self._held.append((sample, _halve(features)))
        if sum(len(held) for held, _ in self._held) >= self.shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Write what is held, if anything."""
        if self._held:
            _write_shard(self.folder / f"{self._number:06}.safetensors", self._held)
            self._number, self._held = self._number + 1, []


def token_batches(samples: Sequence[Sample], batch_tokens: int) -> Iterator[list[Sample]]:
    """Neighbours in groups of at most `batch_tokens` padded tokens, or of one sample; longest first."""
    start = 0
    while start < len(samples):
        count = max(batch_tokens // len(samples[start]), 1)
        yield list(samples[start : start + count])
        start += count


def _halve(features: SampleFeatures) -> SampleFeatures:
    """Taps in half precision: fp16 has three bits more than bf16, but some residual streams leave its range."""
    fits = bool(features.taps.abs().max() <= torch.finfo(torch.float16).max)
    return SampleFeatures(features.taps.to("cpu", torch.float16 if fits else torch.bfloat16), features.teacher)


def _write_shard(path: Path, held: list[tuple[Sample, SampleFeatures]]) -> None:
    """One file of whole samples; bf16 for all if one of them needs it."""
    wide = any(feature.taps.dtype == torch.bfloat16 for _, feature in held)
    dtype = torch.bfloat16 if wide else torch.float16
    tensors = {"taps": torch.cat([feature.taps.to(dtype) for _, feature in held])}
    teachers = [feature.teacher for _, feature in held if feature.teacher is not None]
    if teachers:
        tensors["teacher_ids"] = torch.cat([ids.cpu() for ids, _ in teachers])
        tensors["teacher_p"] = torch.cat([p.cpu() for _, p in teachers])
    places, row, teacher_row = {}, 0, 0
    for sample, feature in held:
        places[sample.key] = [row, teacher_row]
        row += len(feature.taps)
        teacher_row += int(sample.loss_mask.sum())
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary, metadata={"samples": json.dumps(places)})
    os.replace(temporary, path)


def _read_index(folder: Path) -> dict[str, tuple[Path, int, int]]:
    """key -> (file, first row of taps, first row of the teacher)."""
    index = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                places = json.loads(file.metadata()["samples"])
        except (SafetensorError, KeyError, TypeError):
            raise FeatureError(f"{path}: not a shard of features; delete it to have it made again") from None
        for key, (row, teacher_row) in places.items():
            index[key] = (path, row, teacher_row)
    return index


def _check_manifest(target: Target, tap_ids: Sequence[int], top_k: int, folder: Path) -> tuple[int, ...]:
    """Write what the shards are of, or compare it with what is there; sets and returns the folder's taps."""
    path = folder / "manifest.json"
    stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    there = tuple(stored.get("tap_ids", ()))
    taps = there if set(tap_ids) <= set(there) else tuple(tap_ids)
    target.set_taps(taps)
    info = target.info
    found = {
        "num_layers": info.num_layers,
        "hidden_size": info.hidden_size,
        "vocab_size": info.vocab_size,
        "tap_ids": list(taps),
        "teacher_top_k": top_k,
        "probe": _probe(target),
    }
    if not stored:
        write_whole(path, json.dumps({"target": info.name, **found}, indent=2) + "\n")
        return taps
    for key, value in found.items():
        if key != "probe" and stored.get(key) != value:
            raise FeatureError(f"{folder}: shards have {key}={stored.get(key)}, this run {value}; use another folder")
    if not torch.allclose(torch.tensor(stored["probe"]), torch.tensor(found["probe"]), rtol=PROBE_TOLERANCE):
        raise FeatureError(f"{folder}: shards are of '{stored['target']}' with other weights than this run's target")
    return taps


@torch.no_grad()
def _probe(target: Target) -> list[float]:
    """Norms of the taps after a few fixed tokens: what tells one set of weights from another."""
    ids = torch.arange(1, 9)[None] * (target.info.vocab_size // 9)
    output = target.forward(ids.to(target.info.device), target.new_cache(1, 8), [0], keep_logits=1)
    assert output.taps is not None, "the caller sets the taps"
    return [round(float(norm), 4) for norm in output.taps[0, -1].float().norm(dim=-1)]
