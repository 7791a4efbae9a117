"""Acceptance without the target: answers that are known are drafted once more.

What a drafter proposes depends on the committed tokens and their taps, and both are the target's whatever was
drafted.  So where the target's answers are known, one pass over each gives the taps that any number of drafters will
see, and a round costs a proposal and nothing else.  The engine's own loop runs, with a target that says what it said.

Letters: B rows, Q tokens per row in one call, S tokens of a conversation, T taps, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.cache import KVCache
from blockdraft.config import SamplingParams
from blockdraft.targets.base import Front, Target, TargetOutput

# Ahead of all other logits by more than any noise, at the highest temperature there is.
CERTAIN = 1e4


@dataclass(frozen=True)
class Told:
    """A prompt, and what the target answered."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class ReplayTarget(Front):
    """A target that gives known answers, and the taps that `target` has along them, kept in memory.

    To whoever generates greedily with it, it is a target.  It recognises a conversation by its prompt.
    Raises ValueError for two conversations of one prompt.
    """

    def __init__(self, target: Target, tap_ids: Sequence[int], told: Sequence[Told]) -> None:
        super().__init__(target)
        self.tap_ids = tuple(tap_ids)
        self._columns: list[int] = []
        self._ids = {one.prompt: [*one.prompt, *one.answer] for one in told}
        if len(self._ids) != len(told):
            raise ValueError("two prompts are the same: their answers cannot be told apart")
        self._taps: dict[tuple[int, ...], Tensor] = {}
        self._in_slot: dict[int, tuple[int, ...]] = {}

    def set_taps(self, tap_ids: Sequence[int]) -> None:
        """Taps of the passes to come.  ValueError: one of them was not announced."""
        missing = set(tap_ids) - set(self.tap_ids)
        if missing:
            raise ValueError(f"tap {min(missing)} is not among those that are replayed: {list(self.tap_ids)}")
        self._columns = [self.tap_ids.index(tap) for tap in tap_ids]

    def new_cache(self, slots: int, capacity: int) -> KVCache:
        """Lengths are all that is needed of it."""
        return KVCache(0, slots, capacity, 1, 1, self.info.dtype, self.info.device)

    def forward(self, ids: Tensor, cache: KVCache, rows: Sequence[int], keep_logits: int | None = None) -> TargetOutput:
        """Logits that know one token each; ids [B, Q] only say where a row is.  See `Target.forward`."""
        width = ids.shape[1]
        cache.require(rows, width)
        kept = width if keep_logits is None else min(keep_logits, width)
        following, taps = [], []
        for row, fed in zip(rows, ids.tolist(), strict=True):
            start = cache.lengths[row]
            if start == 0:
                self._in_slot[row] = tuple(fed)
            prompt = self._in_slot[row]
            told = self._ids[prompt]
            following.append([told[min(start + i + 1, len(told) - 1)] for i in range(width - kept, width)])
            if self._columns:
                # Behind the answer's end only rejected drafts stand, and nobody looks at their taps.
                at = torch.arange(start, start + width).clamp(max=len(told) - 2)
                taps.append(self._taps_of(prompt)[at][:, self._columns])
        cache.extend(rows, [width] * len(rows))
        chosen = torch.tensor(following, device=self.info.device)[..., None]
        logits = torch.zeros(*chosen.shape[:2], self.info.vocab_size, device=self.info.device)
        return TargetOutput(logits.scatter_(2, chosen, CERTAIN), torch.stack(taps) if taps else None)

    @torch.no_grad()
    def _taps_of(self, prompt: tuple[int, ...]) -> Tensor:
        """[S - 1, T, D]: nobody reads the last token."""
        if prompt not in self._taps:
            ids = torch.tensor([self._ids[prompt][:-1]], device=self.info.device)
            self.target.set_taps(self.tap_ids)
            read = self.target.forward(ids, self.target.new_cache(1, ids.shape[1]), [0], keep_logits=1)
            assert read.taps is not None, "set just now"
            self._taps[prompt] = read.taps[0].clone()
        return self._taps[prompt]


def greedy(params: SamplingParams) -> SamplingParams:
    """The same limits and stops with nothing left to chance: what was sampled once is known now."""
    return SamplingParams(
        max_tokens=params.max_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )
