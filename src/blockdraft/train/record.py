"""Features made while the target writes its answers: a second pass over the same tokens is saved.

Letters: B rows, Q tokens per row in one call, T taps, D hidden width, M kept probabilities, S tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.cache import KVCache
from blockdraft.config import TrainConfig
from blockdraft.targets.base import Front, Target, TargetOutput
from blockdraft.train.chats import Tokenizer
from blockdraft.train.data import Sample, read_sample
from blockdraft.train.features import SampleFeatures, most_probable
from blockdraft.train.setup import recipe_taps
from blockdraft.train.shards import ShardWriter


class Recorder(Front):
    """A target that notes, slot by slot, the taps and most probable tokens of all that it reads.

    To whoever generates with it, it is the target itself; `take` then hands out what was seen of a sample.  What
    a slot holds lasts until another prompt is read into it, and rejected drafts are overwritten by what follows.
    """

    def __init__(self, target: Target, tap_ids: Sequence[int], top_k: int, slots: int, capacity: int) -> None:
        info = target.info
        super().__init__(target)
        self.tap_ids, self.top_k = tuple(tap_ids), top_k
        self._asked: tuple[int, ...] = ()
        self._ids = torch.full((slots, capacity), -1, dtype=torch.long)
        self._taps = torch.zeros(slots, capacity, len(self.tap_ids), info.hidden_size, dtype=info.dtype)
        self._teacher_ids = torch.zeros(slots, capacity + 1, top_k, dtype=torch.int32)
        self._teacher_p = torch.zeros(slots, capacity + 1, top_k, dtype=torch.float16)
        self._told = torch.zeros(slots, capacity + 1, dtype=torch.bool)  # whose distribution is known

    def set_taps(self, tap_ids: Sequence[int]) -> None:
        """Taps for the caller; the recorder's own come on top."""
        self._asked = tuple(tap_ids)
        self.target.set_taps((*self._asked, *self.tap_ids))

    def new_cache(self, slots: int, capacity: int) -> KVCache:
        return self.target.new_cache(slots, capacity)

    def forward(self, ids: Tensor, cache: KVCache, rows: Sequence[int], keep_logits: int | None = None) -> TargetOutput:
        """The target's own pass; see `Target.forward`."""
        output = self.target.forward(ids, cache, rows, keep_logits)
        assert output.taps is not None, "the engine sets the taps before each pass"
        asked, own = output.taps.split([len(self._asked), len(self.tap_ids)], dim=2)
        width, told = ids.shape[1], output.logits.shape[1]
        teacher = most_probable(output.logits, self.top_k) if self.top_k else None
        for b, row in enumerate(rows):
            end = cache.lengths[row]
            start = end - width
            if start == 0:
                self._ids[row], self._told[row] = -1, False
            self._ids[row, start:end] = ids[b]
            self._taps[row, start:end] = own[b]
            if teacher is not None:
                following = slice(end - told + 1, end + 1)
                self._teacher_ids[row, following], self._teacher_p[row, following] = teacher[0][b], teacher[1][b]
                self._told[row, following] = True
        return TargetOutput(output.logits, asked if self._asked else None)

    def take(self, sample: Sample) -> SampleFeatures | None:
        """Features of a sample whose tokens were read or written last in some slot; None if not all was seen."""
        read = len(sample) - 1
        learned = sample.loss_mask.nonzero()[:, 0]
        if read > self._ids.shape[1]:
            return None
        for row in (self._ids[:, :read] == sample.ids[:-1]).all(dim=1).nonzero()[:, 0].tolist():
            taps = self._taps[row, :read].clone()
            if not self.top_k:
                return SampleFeatures(taps, None)
            if bool(self._told[row, learned].all()):
                return SampleFeatures(taps, (self._teacher_ids[row, learned], self._teacher_p[row, learned]))
        return None


class Recording:
    """Keeps the features of answers as they are finished, in the shards that training by a recipe will look for.

    `target` is what has to generate the answers.  An answer of which something was not seen is left to the
    training run, which makes what its folder lacks.
    """

    def __init__(
        self, config: TrainConfig, target: Target, tokenizer: Tokenizer, folder: Path, slots: int, capacity: int
    ) -> None:
        taps, top_k = recipe_taps(config.drafter, target.info.num_layers), config.features.teacher_top_k
        self.data, self.tokenizer = config.data, tokenizer
        self.writer = ShardWriter(target, taps, folder, top_k)
        self.target = Recorder(target, self.writer.tap_ids, top_k, slots, capacity)

    def keep(self, row: dict[str, Any]) -> None:
        """Keep the features of an answer just finished, given as the line that is written of it."""
        sample, _ = read_sample(row, self.data, self.tokenizer, self.target.info.eos_token_ids, "answer")
        if sample is None or sample.key in self.writer:
            return
        features = self.target.take(sample)
        if features is not None:
            self.writer.add(sample, features)

    def close(self) -> None:
        """Write what no file holds yet."""
        self.writer.flush()
