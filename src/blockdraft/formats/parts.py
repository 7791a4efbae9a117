"""A drafter as a value, free of any layout: what every layout is read into and written from.

Letters: V' rows of a reduced draft head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockdraft.config import ConfigError, DrafterConfig
from blockdraft.drafters.families import new_model
from blockdraft.drafters.network import DraftNetwork

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Parts:
    """Settings, weights under the names of our network of that family, and the target ids [V'] of a reduced draft head.

    What a layout's `read` returns may still be wrong in its tensors: `checks` says so, one by one.
    """

    config: DrafterConfig
    tensors: dict[str, Tensor]
    draft_ids: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the weights."""
        return next((value.dtype for value in self.tensors.values() if value.is_floating_point()), torch.float32)


def model_of(parts: Parts) -> DraftNetwork:
    """The drafter of checked parts, in the number format that they have."""
    model = new_model(parts.config)
    model.load_state_dict(parts.tensors)
    for parameter in model.parameters():  # not the rotary frequencies: they stay in fp32
        parameter.data = parameter.data.to(parts.dtype)
    return model.eval().requires_grad_(False)


def with_chain(parts: Parts, drafts: int) -> Parts:
    """The same drafter with chains of another length.  ConfigError: it has blocks, or there are none so long."""
    if parts.config.family == "block":
        raise ConfigError(
            f"block_size={drafts}: a block drafter has the blocks that it learned ({parts.config.block_size})"
        )
    config = DrafterConfig.parse(
        {**parts.config.model_dump(), "block_size": drafts}, "the drafter with that block size"
    )
    return replace(parts, config=config)


def cast(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The same weights in another number format.  ConfigError: a number does not fit into it."""
    changed = {name: value.to(dtype).contiguous() for name, value in tensors.items()}
    for name, value in changed.items():
        if not torch.isfinite(value).all():
            raise ConfigError(f"tensor '{name}' has numbers that {str(dtype).removeprefix('torch.')} cannot hold")
    return changed
