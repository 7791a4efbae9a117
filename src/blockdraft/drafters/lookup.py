"""Two drafters in one: what the text itself has said before, and where it has nothing to go by, another drafter.

A drafter that is trained knows what is likely, a lookup knows what was said.  Where an answer repeats its question
or itself, a long match is right more often, further ahead, and for nothing; elsewhere it is silent.
Letters: B rows, S tokens just committed, T taps, D hidden width, K drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from blockdraft.config import NgramConfig
from blockdraft.drafters.base import COSTLY, Drafter, Proposal
from blockdraft.drafters.ngram import NgramDrafter, Text
from blockdraft.ops.sampling import Coupling

TEXT = COSTLY + 1  # where a row's drafts are from: their confidences say different things


@dataclass
class Both:
    """The states of the two, and how much of each row the other one has been shown: the texts may be ahead of it."""

    texts: list[Text]
    other: Any
    shown: list[int]


class LookupDrafter:
    """`other`, but for rows whose text has ended before as it ends now: they draft what followed then.

    It drafts as far as `other` does, so a round costs no more to verify; where all rows are served by the text,
    `other` is not asked at all.  The lookup is the free part (see `PartlyFree`).
    """

    def __init__(self, other: Drafter, config: NgramConfig) -> None:
        self.lookup = NgramDrafter(config.model_copy(update={"max_drafts": other.max_drafts}))
        self.other = other
        self.name, self.tap_ids = f"ngram+{other.name}", other.tap_ids
        self.max_drafts, self.block_size = other.max_drafts, other.block_size

    def new_state(self, slots: int, capacity: int) -> Both:
        return Both(self.lookup.new_state(slots, capacity), self.other.new_state(slots, capacity), [0] * slots)

    def reset(self, state: Both, row: int) -> None:
        self.lookup.reset(state.texts, row)
        self.other.reset(state.other, row)
        state.shown[row] = 0

    def observe(
        self, state: Both, rows: Sequence[int], tokens: Tensor, taps: Tensor | None, counts: Sequence[int]
    ) -> None:
        self.other.observe(state.other, rows, tokens, taps, counts)  # first: it takes long, and may be interrupted
        said = [ids[:count] for ids, count in zip(tokens.tolist(), counts, strict=True)]
        self.observe_free(state, rows, [state.shown[row] for row in rows], said)
        for row, count in zip(rows, counts, strict=True):
            state.shown[row] += count

    def observe_free(
        self, state: Both, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> None:
        for row, start, ids in zip(rows, starts, tokens, strict=True):
            state.texts[row].extend(ids, start)

    def propose_free(self, state: Both, rows: Sequence[int], anchors: Tensor) -> Proposal:
        found = self.lookup.propose(state.texts, rows, anchors)
        return replace(found, sources=[TEXT] * len(rows))

    def propose(self, state: Both, rows: Sequence[int], anchors: Tensor, coupling: Coupling | None = None) -> Proposal:
        """anchors [B] -> tokens [B, K]: a row's text where it has a match, else what `other` drafts for it."""
        found = self.propose_free(state, rows, anchors)
        assert found.counts is not None, "a lookup says where it found nothing"
        silent = [b for b, count in enumerate(found.counts) if count == 0]
        if not silent:
            return found
        part = None if coupling is None else coupling.part(silent)
        drafted = self.other.propose(state.other, [rows[b] for b in silent], anchors[silent], part)
        if len(silent) == len(rows):
            return drafted
        width = max(found.tokens.shape[1], drafted.tokens.shape[1])
        tokens = torch.zeros(len(rows), width, dtype=anchors.dtype, device=anchors.device)
        sure = torch.full((len(rows), width), torch.nan)
        for which, said in ((slice(None), found), (silent, drafted)):
            tokens[which, : said.tokens.shape[1]] = said.tokens
            sure[which, : said.tokens.shape[1]] = torch.nan if said.confidence is None else said.confidence.cpu()
        counts = list(found.counts)
        others = drafted.counts if drafted.counts is not None else [drafted.tokens.shape[1]] * len(silent)
        for b, count in zip(silent, others, strict=True):
            counts[b] = count
        sources = [TEXT if count else COSTLY for count in found.counts]
        return Proposal(tokens, sure, counts, sources)
