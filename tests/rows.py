"""Rows of a target's cache, filled in pieces, alone and in company: what its tests share."""

from __future__ import annotations

import tiny
import torch
from torch import Tensor

from blockdraft.cache import KVCache
from blockdraft.targets.base import Target


def random_ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(2, tiny.VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def fill(target: Target, cache: KVCache, row: int, ids: Tensor, pieces: tuple[int, ...] = ()) -> Tensor:
    """Append ids [S] to one row in pieces (then the rest); logits [S, V]."""
    sizes = [*pieces, len(ids) - sum(pieces)]
    return torch.cat([target.forward(piece[None], cache, [row]).logits[0] for piece in ids.split(sizes)])


def check_bits_of_a_row(target: Target, lengths: tuple[int, ...]) -> None:
    """One token at a time, many at a time, or among neighbours of other lengths: the same bits."""
    target.set_taps([1])
    for length in lengths:
        text = random_ids(length + 8, seed=length)
        cache = target.new_cache(8, 1100)
        fill(target, cache, 0, text[:length])
        steps = [target.forward(text[None, at : at + 1], cache, [0]) for at in range(length, length + 8)]
        alone = torch.cat([step.logits for step in steps], dim=1)[0]
        alone_taps = torch.cat([step.taps for step in steps], dim=1)[0]

        cache.truncate([0], [0])
        assert torch.equal(fill(target, cache, 0, text)[-8:], alone)

        for row in (0, 1, 2, 3, 4, 6, 7):
            fill(target, cache, row, random_ids(7 + 90 * row, seed=row))
        fill(target, cache, 5, text[:length], (2, 1))
        batch = random_ids(8, 8, seed=4)
        batch[3] = text[-8:]
        out = target.forward(batch, cache, [0, 2, 1, 5, 4, 7, 3, 6])
        assert torch.equal(out.logits[3], alone)
        assert torch.equal(out.taps[3], alone_taps)


def check_taken_back(target: Target) -> None:
    """What was read and taken back is as if it had never been."""
    text, wrong, more = random_ids(60), random_ids(20, seed=2), random_ids(12, seed=3)
    clean, used = target.new_cache(1, 128), target.new_cache(1, 128)
    fill(target, clean, 0, text)
    fill(target, used, 0, text)
    fill(target, used, 0, wrong)
    used.truncate([0], [60])
    assert torch.equal(fill(target, used, 0, more), fill(target, clean, 0, more))


def bits_depend_on_width(target: Target) -> bool:
    """Whether a text read at once has other bits than token by token."""
    text, cache = random_ids(24), target.new_cache(1, 64)
    at_once = fill(target, cache, 0, text)
    cache.truncate([0], [0])
    return not torch.equal(fill(target, cache, 0, text, (1,) * 23), at_once)
