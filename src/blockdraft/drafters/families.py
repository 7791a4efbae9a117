"""The families of trained drafters: a configuration's network, and a network as the engine's drafter."""

from __future__ import annotations

from torch import Tensor

from blockdraft.config import DrafterConfig
from blockdraft.drafters.base import Lender
from blockdraft.drafters.block import BlockDrafter, BlockModel
from blockdraft.drafters.chain import ChainDrafter, ChainModel
from blockdraft.drafters.eagle import EagleModel
from blockdraft.drafters.mtp import MTPModel
from blockdraft.drafters.network import DraftNetwork

NETWORKS: dict[str, type[DraftNetwork]] = {"block": BlockModel, "eagle3": EagleModel, "mtp": MTPModel}


def new_model(config: DrafterConfig) -> DraftNetwork:
    """The network of a configuration; weights are not initialised."""
    return NETWORKS[config.family](config)


def as_drafter(
    model: DraftNetwork, target: Lender, draft_ids: Tensor | None, name: str, block_size: int | None = None
) -> BlockDrafter | ChainDrafter:
    """A network that drafts for `target`.  ConfigError, ValueError: it is not for this target, or this block size."""
    if isinstance(model, ChainModel):
        return ChainDrafter(model, target, draft_ids, name, block_size)
    assert isinstance(model, BlockModel), "there are two kinds"
    return BlockDrafter(model, target, draft_ids, name, block_size)
