"""The target's taps (and, if asked for, its most probable next tokens) for training samples: online, or from disk.

Letters: B samples, S tokens, T taps, D hidden width, M kept probabilities, N rows of a shard.

A sample of S tokens needs taps for its first S - 1 positions: the last token is only ever a label.  Row p of
the teacher is the target's distribution of the token at p, made from its logits at p - 1, kept where the
token is supervised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blockdraft.targets.base import Target
from blockdraft.train.data import Sample
from blockdraft.train.loss import Teacher


@dataclass(frozen=True)
class SampleFeatures:
    """One sample: taps [S - 1, T, D]; teacher ids and probabilities [supervised tokens, M], or None."""

    taps: Tensor
    teacher: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class FeatureBatch:
    """Right-padded with zeros: taps [B, S - 1, T, D], teacher rows [B, S, M] or None."""

    taps: Tensor
    teacher: Teacher | None


class Features(Protocol):
    """Where the training loop gets its features from."""

    def batch(self, samples: Sequence[Sample]) -> FeatureBatch:
        """Features of these samples, as long as the longest."""
        ...


class OnlineFeatures:
    """Runs the target whenever a batch is asked for: no disk, but the target's whole cost at every step."""

    def __init__(self, target: Target, tap_ids: Sequence[int], top_k: int) -> None:
        self.target, self.top_k = target, top_k
        self.tap_ids = tuple(tap_ids)

    def batch(self, samples: Sequence[Sample]) -> FeatureBatch:
        self.target.set_taps(self.tap_ids)
        return collate(samples, compute(self.target, samples, self.top_k), self.target.info.device)


@torch.no_grad()
def compute(target: Target, samples: Sequence[Sample], top_k: int) -> list[SampleFeatures]:
    """One pass of the target over samples of similar length; its taps must be set.

    Samples are padded on the right with their own first token, which no earlier token can see.
    """
    width = max(len(sample) for sample in samples) - 1
    ids = torch.stack([_pad(sample.ids[:-1], width, int(sample.ids[0])) for sample in samples])
    first = min(sample.prompt_length for sample in samples) - 1 if top_k else width - 1
    cache = target.new_cache(len(samples), width)
    rows = list(range(len(samples)))
    output = target.forward(ids.to(target.info.device), cache, rows, keep_logits=width - max(first, 0))
    assert output.taps is not None, "the caller sets the taps"
    features = []
    for row, sample in enumerate(samples):
        teacher = None
        if top_k:
            at = sample.loss_mask.nonzero()[:, 0].clamp(min=1) - 1 - max(first, 0)
            teacher = most_probable(output.logits[row, at.to(output.logits.device)], top_k)
        features.append(SampleFeatures(output.taps[row, : len(sample) - 1], teacher))
    return features


def most_probable(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids (int32) and probabilities (half precision) of the `count` likeliest tokens: logits [N, V] -> [N, M]."""
    top = logits.float().topk(count, dim=-1)
    return top.indices.to(torch.int32), (top.values - logits.float().logsumexp(-1, True)).exp().half()


def collate(samples: Sequence[Sample], features: Sequence[SampleFeatures], device: torch.device) -> FeatureBatch:
    """Features of one batch, padded; fp32 taps."""
    length = max(len(sample) for sample in samples)
    first = features[0]
    taps = torch.zeros(len(samples), length - 1, *first.taps.shape[1:], device=device)
    for row, feature in enumerate(features):
        taps[row, : len(feature.taps)].copy_(feature.taps)
    if first.teacher is None:
        return FeatureBatch(taps, None)
    kept = first.teacher[0].shape[1]
    ids = torch.zeros(len(samples), length, kept, dtype=torch.int32, device=device)
    probabilities = torch.zeros(len(samples), length, kept, device=device)
    for row, (sample, feature) in enumerate(zip(samples, features, strict=True)):
        assert feature.teacher is not None, "all samples of a run have teacher rows, or none"
        at = sample.loss_mask.nonzero()[:, 0].to(device)
        ids[row, at] = feature.teacher[0].to(device)
        probabilities[row, at] = feature.teacher[1].to(device, torch.float32)
    return FeatureBatch(taps, Teacher(ids, probabilities))


def _pad(ids: Tensor, width: int, token: int) -> Tensor:
    return torch.nn.functional.pad(ids, (0, width - len(ids)), value=token)
