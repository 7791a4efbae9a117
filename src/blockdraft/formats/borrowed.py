"""What layouts keep of the target, or spread over its whole vocabulary, and the draft ids that say where it belongs.

Letters: V vocabulary, V' rows of a reduced draft head, R rank of a Markov head.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from blockdraft.config import ConfigError


def same_as_target(held: Tensor, target: Tensor, name: str, path: Path) -> None:
    """ConfigError unless a copy of the target's weights, kept in a drafter, still is one (in its number format)."""
    if held.shape != target.shape:
        raise ConfigError(f"{path}: '{name}' is {list(held.shape)}, the target's is {list(target.shape)}")
    if not held.equal(target.to(held.dtype)):
        raise ConfigError(
            f"{path}: '{name}' is not the target's own; a drafter that trained it cannot borrow it from the target"
        )


def offsets_of(ids: Tensor) -> Tensor:
    """Draft ids [V'] as most layouts store them: target id minus draft id."""
    return ids - torch.arange(len(ids))


def ids_from(offsets: Tensor) -> Tensor:
    """The draft ids again."""
    return offsets + torch.arange(len(offsets))


def usable_ids(ids: Tensor, vocab_size: int, path: Path) -> Tensor:
    """The same ids.  ConfigError: they are not distinct tokens of the target."""
    if ids.dim() != 1 or ids.min() < 0 or ids.max() >= vocab_size or len(ids.unique()) != len(ids):
        raise ConfigError(f"{path}: 'd2t' does not map to distinct tokens of a vocabulary of {vocab_size}")
    return ids


def same_tokens(mask: Tensor | None, ids: Tensor | None, path: Path) -> None:
    """ConfigError unless `t2d` [V], where there is one, marks just the draft ids."""
    if mask is not None and ids is not None and mask.nonzero().flatten().tolist() != sorted(ids.tolist()):
        raise ConfigError(f"{path}: 't2d' and 'd2t' do not map the same tokens")


def spread_rows(rows: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """A row for every token of the target [V, R]; zeros for those that the draft head [V', R] cannot say."""
    if ids is None:
        return rows
    return rows.new_zeros(vocab_size, rows.shape[1]).index_copy(0, ids, rows)


def kept_rows(every: Tensor, ids: Tensor | None, name: str, path: Path) -> Tensor:
    """The rows of the draft head's tokens.  ConfigError: another token's row says something too."""
    if ids is None:
        return every
    if len(every) <= int(ids.max()):
        raise ConfigError(f"{path}: '{name}' has {len(every)} rows, too few for the tokens of the draft head")
    others = torch.ones(len(every), dtype=torch.bool).index_fill(0, ids, False)
    if every[others].any():
        raise ConfigError(
            f"{path}: '{name}' has rows for tokens outside the draft vocabulary; our Markov head has none for them"
        )
    return every[ids]
