"""Which samples a step sees: a pure function of (seed, step), so a resumed run sees the same.

Letters: B samples, S tokens, A anchors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from blockdraft.config import DrafterConfig
from blockdraft.train.blocks import Blocks, fixed_anchors, make_blocks, sample_anchors
from blockdraft.train.data import Sample

# Batches are cut from windows of so many batches, sorted by length: little padding, and still a shuffle.
WINDOW_BATCHES = 32


@dataclass(frozen=True)
class Batch:
    """Samples of a step with their blocks; ids and positions [B, S - 1] are the context's."""

    samples: list[Sample]
    blocks: Blocks
    ids: Tensor
    positions: Tensor
    tokens: int


class Batches:
    """The order of samples for any number of epochs."""

    def __init__(self, samples: Sequence[Sample], batch_size: int, seed: int) -> None:
        self.samples, self.seed = samples, seed
        self.batch_size = min(batch_size, len(samples))
        self.per_epoch = len(samples) // self.batch_size
        self._order = lru_cache(maxsize=2)(self._make_order)

    def at(self, step: int) -> tuple[int, list[Sample]]:
        """The epoch and the samples of a step."""
        epoch, index = divmod(step, self.per_epoch)
        return epoch, [self.samples[number] for number in self._order(epoch)[index]]

    def _make_order(self, epoch: int) -> list[list[int]]:
        generator = keyed_generator("order", self.seed, epoch)
        size, window = self.batch_size, self.batch_size * WINDOW_BATCHES
        shuffled = torch.randperm(len(self.samples), generator=generator).tolist()[: self.per_epoch * size]
        batches: list[list[int]] = []
        for start in range(0, len(shuffled), window):
            part = sorted(shuffled[start : start + window], key=lambda number: len(self.samples[number]))
            batches += [part[at : at + size] for at in range(0, len(part), size)]
        return [batches[number] for number in torch.randperm(len(batches), generator=generator).tolist()]


def keyed_generator(*key: object) -> torch.Generator:
    """Random numbers that depend on the key alone."""
    digest = hashlib.sha256("/".join(str(part) for part in key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def make_batch(
    samples: list[Sample],
    count: int,
    seed: int,
    epoch: int,
    drafter: DrafterConfig,
    gamma: float,
    device: torch.device,
    fixed: bool = False,
) -> Batch:
    """Draw the anchors of each sample, or take the fixed ones, and lay out its blocks, padded on the right."""
    length = max(len(sample) for sample in samples)
    ids = torch.zeros(len(samples), length, dtype=torch.int64)
    mask = torch.zeros(len(samples), length, dtype=torch.bool)
    if fixed:
        drawn = [fixed_anchors(sample.loss_mask, count, drafter.block_size) for sample in samples]
    else:
        drawn = [sample_anchors(sample.loss_mask, count, seed, epoch, sample.number) for sample in samples]
    anchors = torch.full((len(samples), max(1, *(len(one) for one in drawn))), -1)
    for row, (sample, one) in enumerate(zip(samples, drawn, strict=True)):
        ids[row, : len(sample)] = sample.ids
        mask[row, : len(sample)] = sample.loss_mask
        anchors[row, : len(one)] = one
    ids = ids.to(device)
    blocks = make_blocks(ids, mask.to(device), anchors.to(device), drafter, gamma)
    positions = torch.arange(length - 1, device=device).expand(len(samples), -1)
    return Batch(samples, blocks, ids[:, :-1], positions, sum(len(sample) for sample in samples))
