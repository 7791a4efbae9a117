"""Asking a drafter for a few rows only: what it is worth is seen in these, at a fraction of the cost.

Letters: B rows, K drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from blockdraft.drafters.base import COSTLY, Proposal
from blockdraft.engine.policy import Row

ROWS_FOR_ONE = 16  # rows that one row is asked for


def few(rows: Sequence[Row]) -> list[int]:
    """Which rows to ask: one, or more of many; those of which the drafter has the least to catch up with."""
    order = sorted(range(len(rows)), key=lambda b: rows[b].waiting)
    return sorted(order[: max(1, len(rows) // ROWS_FOR_ONE)])


def spread(proposal: Proposal, asked: Sequence[int], rows: int) -> Proposal:
    """The proposal for some of so many rows as one for all of them: the others have no drafts, which cost nothing."""
    tokens = proposal.tokens.new_zeros(rows, proposal.tokens.shape[1])
    tokens[list(asked)] = proposal.tokens
    counts, sources = [0] * rows, [COSTLY + 1] * rows
    for b, row in enumerate(asked):
        counts[row] = proposal.tokens.shape[1] if proposal.counts is None else proposal.counts[b]
        sources[row] = COSTLY if proposal.sources is None else proposal.sources[b]
    said, sure = proposal.confidence, None
    if said is not None:
        sure = said.new_full(tokens.shape, torch.nan)
        sure[list(asked)] = said
    return replace(proposal, tokens=tokens, confidence=sure, counts=counts, sources=sources)
