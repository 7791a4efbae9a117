"""Multi-token prediction: one module of the target's own kind of layers, which goes on from the target's last one.

Letters: T taps, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from blockdraft.config import DrafterConfig
from blockdraft.drafters.chain import ChainModel
from blockdraft.drafters.layers import BlockLayer
from blockdraft.ops.layers import RMSNorm


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
