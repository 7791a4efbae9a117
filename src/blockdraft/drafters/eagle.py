"""EAGLE-3 (arXiv 2503.01840): one Llama layer that reads an embedding and features side by side.

Letters: B rows, S context slots, A chains per row, Q rows of a chain, T taps, D hidden width, G key/value heads, E head
width, V' rows of the draft head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from blockdraft.config import DrafterConfig
from blockdraft.drafters.chain import ChainModel
from blockdraft.drafters.layers import BlockSelfAttention, KeysValues, Tables
from blockdraft.ops.layers import RMSNorm, SwiGLU


class EagleLayer(nn.Module):
    """Attention reads both, each normed; the residual is the features alone.

    They enter it as they are, or (`norm_before_residual`) normed; published drafters have either, so a folder says
    which.  Heads are not normed, as in Llama.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.self_attn = BlockSelfAttention(config, 0, inputs=2 * width, qk_norm=False)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = SwiGLU(width, config.intermediate_size)

    def keys_values(self, x: Tensor, tables: Tables) -> KeysValues:
        """What rows x [..., 2 D] leave for others to see: [..., G, E]."""
        return self.self_attn.keys_values(self._read(x)[0], tables)

    def forward(
        self,
        x: Tensor,
        tables: Tables,
        context: KeysValues,
        lengths: Tensor,
        at: Tensor,
        causal: bool,
        earlier: KeysValues | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """x [B, A, Q, 2 D], embedding and features -> [B, A, Q, D]; the rest as `BlockSelfAttention`."""
        read, residual = self._read(x)
        mixed, made = self.self_attn(read, tables, context, lengths, at, causal, earlier)
        x = residual + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), made

    def _read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads [..., 2 D], and what the layer adds to [..., D]."""
        embedding, features = x.chunk(2, dim=-1)
        normed = self.hidden_norm(features)
        read = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        return read, normed if self.norm_before_residual else features


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
