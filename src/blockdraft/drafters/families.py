"""The families of trained drafters: their networks by configuration, and the drafters that run them.

Letters: A chains per row, T taps, D hidden width, V' rows of the draft head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from blockdraft.config import DrafterConfig
from blockdraft.drafters.base import Lender
from blockdraft.drafters.block import BlockDrafter, BlockModel
from blockdraft.drafters.chain import ChainDrafter, ChainModel
from blockdraft.drafters.eagle import EagleLayer
from blockdraft.drafters.layers import BlockLayer
from blockdraft.drafters.network import DraftNetwork
from blockdraft.ops.layers import RMSNorm


class EagleModel(ChainModel):
    """EAGLE-3 (arXiv 2503.01840): one layer, features from three depths, a draft head of its own.

    Tensor names are the published ones.  Output is fed back as it leaves the layer, before the final norm.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(len(config.tap_ids) * width, width, bias=False)
        self.midlayer = EagleLayer(config)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.num_head_rows, bias=False)

    def fuse(self, taps: Tensor) -> Tensor:
        return self.fc(taps.flatten(-2))

    def enter(self, embedding: Tensor, features: Tensor) -> Tensor:
        return torch.cat([embedding, features], dim=-1)

    def stack(self) -> Sequence[EagleLayer]:
        return [self.midlayer]


class MTPModel(ChainModel):
    """Multi-token prediction as of DeepSeek-V3 (arXiv 2412.19437) and Qwen3-Next, as one module that feeds itself.

    Features are the target's residual stream after its last layer, before its final norm.  So what a module feeds
    on is the same thing of its own: its output before the final norm.  The head is the target's.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = RMSNorm(width, eps)
        self.pre_fc_norm_hidden = RMSNorm(width, eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList(BlockLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(width, eps)

    def fuse(self, taps: Tensor) -> Tensor:
        return taps[..., 0, :]

    def enter(self, embedding: Tensor, features: Tensor) -> Tensor:
        both = self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(features)
        return self.fc(torch.cat(both, dim=-1))

    def stack(self) -> Sequence[BlockLayer]:
        return list(cast("Iterable[BlockLayer]", self.layers))


def new_model(config: DrafterConfig) -> DraftNetwork:
    """The network of a configuration; weights are not initialised."""
    return {"block": BlockModel, "eagle3": EagleModel, "mtp": MTPModel}[config.family](config)


def as_drafter(
    model: DraftNetwork, target: Lender, draft_ids: Tensor | None, name: str, block_size: int | None = None
) -> BlockDrafter | ChainDrafter:
    """A network as the engine's drafter.  ValueError: it is not for this target."""
    kind = ChainDrafter if isinstance(model, ChainModel) else BlockDrafter
    return kind(model, target, draft_ids, name, block_size)  # type: ignore[arg-type]
