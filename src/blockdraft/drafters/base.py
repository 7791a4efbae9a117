"""The drafter: proposes tokens that the target then checks.

One protocol for every kind of drafter, so that the engine has one loop.
Letters: B rows, S tokens just committed, T taps, D hidden width, K drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from blockdraft.ops.sampling import Coupling


class TargetFacts(Protocol):
    """What a drafter must know of its target to fit it; a target's `info` has it."""

    @property
    def name(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


class Lender(Protocol):
    """What a drafter borrows from its target: input embeddings and output projection, both frozen."""

    @property
    def info(self) -> TargetFacts: ...

    def embed(self, ids: Tensor) -> Tensor:
        """Raw input embeddings: [...] -> [..., D]."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """The output projection alone: [..., D] -> [..., V]."""
        ...

    def head_rows(self, ids: Tensor | None = None) -> Tensor:
        """Rows of the output projection's weight: [V', D]."""
        ...


COSTLY = 0  # among the sources of drafts: what takes time to ask


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens [B, K] for the positions after the anchors.

    confidence [B, K] is how probable the drafter itself finds each, given those before it; NaN or None: it does not
    say.  It chooses how much is verified and need not be true.  Confidences of one source are comparable: sources[b]
    says which of a drafter's several ones row b's drafts are from, `COSTLY` or any other number for one that is free;
    None: all are from the costly one.
    Of row b, the first counts[b] are drafts and the rest are padding that is never verified; None: all K are.
    K may be less than `max_drafts`, and 0 where there is nothing to draft.
    """

    tokens: Tensor
    confidence: Tensor | None = None
    counts: Sequence[int] | None = None
    sources: Sequence[int] | None = None


class Drafter(Protocol):
    """What the engine asks of a drafter.  State is a value that the engine holds and passes back."""

    name: str
    tap_ids: tuple[int, ...]
    block_size: int
    max_drafts: int

    def new_state(self, slots: int, capacity: int) -> Any:
        """Empty state for so many requests of so many tokens."""
        ...

    def reset(self, state: Any, row: int) -> None:
        """Forget a row: its slot goes to another request."""
        ...

    def observe(
        self, state: Any, rows: Sequence[int], tokens: Tensor, taps: Tensor | None, counts: Sequence[int]
    ) -> None:
        """Take in committed tokens: the first counts[b] of tokens [B, S] with their taps [B, S, T, D].

        They follow the row's earlier ones without a gap.  The anchor is not among them: its taps do not
        exist until the target has seen it.  taps is None if `tap_ids` is empty.
        """
        ...

    def propose(self, state: Any, rows: Sequence[int], anchors: Tensor, coupling: Coupling | None = None) -> Proposal:
        """Draft the tokens that follow anchors [B].

        The anchor of a row stands at position (tokens observed so far); nothing is committed by this call.
        """
        ...


@runtime_checkable
class PartlyFree(Protocol):
    """What a drafter has besides if a part of it costs next to nothing to ask, and needs no taps.

    The engine shows that part at once what is committed, and may ask it alone for as long as the whole does not pay.
    """

    def observe_free(
        self, state: Any, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Show the free part alone the committed tokens[b], which stand from starts[b] on.

        What it knows already is left out: an interrupted round is done again, and `observe` shows it the same tokens.
        """
        ...

    def propose_free(self, state: Any, rows: Sequence[int], anchors: Tensor) -> Proposal:
        """What the free part alone drafts after anchors [B]."""
        ...
