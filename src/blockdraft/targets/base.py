"""The target: the model whose answers are kept, token for token.

Letters: B rows, Q tokens per row in one call, V vocabulary, T taps, D hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blockdraft.cache import KVCache


@dataclass(frozen=True)
class TargetInfo:
    """What the rest of the code may know about a target."""

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_context: int
    dtype: torch.dtype
    device: torch.device
    storage: torch.dtype | None = None  # of the matrices, where it is another than dtype


@dataclass(frozen=True)
class TargetOutput:
    """One forward pass: logits [B, Q', V] of the last Q' tokens asked for, taps [B, Q, T, D] (None: no taps set)."""

    logits: Tensor
    taps: Tensor | None


class Target(Protocol):
    """Everything drafting, verifying and training need from a target."""

    info: TargetInfo

    def set_taps(self, tap_ids: Sequence[int]) -> None:
        """Keep the residual stream after these 0-based layers in each later forward.  ValueError: id out of range."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """Raw input embeddings: [...] -> [..., D]."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """The output projection alone, without the final norm: [..., D] -> [..., V]."""
        ...

    def head_rows(self, ids: Tensor | None = None) -> Tensor:
        """Rows of the output projection's weight: [V', D]; all of them if `ids` [V'] is None."""
        ...

    def new_cache(self, slots: int, capacity: int) -> KVCache:
        """An empty cache for this target."""
        ...

    def forward(self, ids: Tensor, cache: KVCache, rows: Sequence[int], keep_logits: int | None = None) -> TargetOutput:
        """Append ids [B, Q] to the cache slots `rows` and return what the model says about them.

        Row b continues at position `cache.lengths[rows[b]]`, which grows by Q; rejected tokens are taken
        back afterwards with `cache.truncate`.  A row's result does not depend on the rows beside it.
        `keep_logits` limits the logits to the last so many tokens.  ValueError: the slot is too small.
        """
        ...


class Front:
    """What stands in front of a target and has its own passes: what drafters borrow is still the target's."""

    def __init__(self, target: Target) -> None:
        self.target, self.info = target, target.info

    def embed(self, ids: Tensor) -> Tensor:
        return self.target.embed(ids)

    def head(self, hidden: Tensor) -> Tensor:
        return self.target.head(hidden)

    def head_rows(self, ids: Tensor | None = None) -> Tensor:
        return self.target.head_rows(ids)
