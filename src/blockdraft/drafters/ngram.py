"""Drafts without a model: what followed the last time that the text ended like this (Saxena 2023, prompt lookup).

Letters: B rows, S tokens just committed, K drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.config import NgramConfig
from blockdraft.drafters.base import Proposal
from blockdraft.ops.sampling import Coupling


class Text:
    """The committed tokens of a row, and where each of its shortest n-grams ended, in order.

    Every n-gram that is found is followed by something: by a committed token, or by the anchor, which is not among
    them.  So the end of the text, anchor included, never finds itself.
    """

    def __init__(self, config: NgramConfig) -> None:
        self.config = config
        self.ids: list[int] = []
        self.ends: dict[tuple[int, ...], list[int]] = {}

    def extend(self, ids: Sequence[int], start: int | None = None) -> None:
        """Commit tokens; each costs one entry.

        start: where the first of them stands, if some may be known; those are left out.
        """
        known = 0 if start is None else len(self.ids) - start
        assert known >= 0, "a text has no gaps"
        shortest = self.config.shortest
        for token in ids[known:]:
            self.ids.append(token)
            end = len(self.ids)
            if end >= shortest:
                self.ends.setdefault(tuple(self.ids[end - shortest :]), []).append(end)

    def following(self, anchor: int) -> tuple[list[int], int]:
        """What followed the latest earlier occurrence of the longest known ending, and the length of that ending.

        At most `max_drafts` tokens, or nothing.  Where that runs into the end of the text, it goes on with what it has
        drafted: a text that repeats itself.
        """
        ending = [*self.ids[-self.config.longest :], anchor][-self.config.longest :]
        start, length = 0, 0
        for end in reversed(self.ends.get(tuple(ending[-self.config.shortest :]), ())):
            agreed = self._agreed(end, ending)
            if agreed > length:
                start, length = end, agreed
            if length == len(ending):
                break
        if length == 0:
            return [], 0
        found = [*self.ids[start : start + self.config.max_drafts], anchor]
        period = len(self.ids) + 1 - start
        return [found[k % period] for k in range(self.config.max_drafts)], length

    def _agreed(self, end: int, ending: Sequence[int]) -> int:
        """How many of the tokens before `end` are those of an ending, whose shortest n-gram is known to stand there."""
        length = self.config.shortest
        while length < min(len(ending), end) and self.ids[end - length - 1] == ending[-length - 1]:
            length += 1
        return length


class NgramDrafter:
    """Prompt lookup as a drafter: free of any model, good where an answer repeats its prompt or itself."""

    name = "ngram"
    tap_ids: tuple[int, ...] = ()

    def __init__(self, config: NgramConfig) -> None:
        self.config = config
        self.max_drafts, self.block_size = config.max_drafts, config.max_drafts + 1

    def new_state(self, slots: int, capacity: int) -> list[Text]:  # noqa: ARG002  # texts grow as they need
        return [Text(self.config) for _ in range(slots)]

    def reset(self, state: list[Text], row: int) -> None:
        state[row] = Text(self.config)

    def observe(
        self,
        state: list[Text],
        rows: Sequence[int],
        tokens: Tensor,
        taps: Tensor | None,  # noqa: ARG002  # it asks for none
        counts: Sequence[int],
    ) -> None:
        for row, ids, count in zip(rows, tokens.tolist(), counts, strict=True):
            state[row].extend(ids[:count])

    def propose(
        self,
        state: list[Text],
        rows: Sequence[int],
        anchors: Tensor,
        coupling: Coupling | None = None,  # noqa: ARG002  # what was said is no matter of chance
    ) -> Proposal:
        """anchors [B] -> tokens [B, K]; K = 0 if no row has seen its ending before.

        The longer the ending that was found, the surer: every further token that agrees halves the doubt.
        """
        drafts = [state[row].following(anchor) for row, anchor in zip(rows, anchors.tolist(), strict=True)]
        counts = [len(ids) for ids, _ in drafts]
        padded = torch.tensor([ids + [0] * (max(counts) - len(ids)) for ids, _ in drafts], dtype=anchors.dtype)
        sure = torch.tensor([[1.0 - 0.5**length] * max(counts) for _, length in drafts])
        return Proposal(padded.to(anchors.device), sure, counts)
