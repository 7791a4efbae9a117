"""The layers of drafters.

Letters: B rows, S context slots, A blocks per row, Q block rows, D hidden width, H/G query/key-value heads, E head
width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockdraft.config import DrafterConfig
from blockdraft.ops.attention import block_attention
from blockdraft.ops.layers import RMSNorm, SwiGLU, rotate

KeysValues = tuple[Tensor, Tensor]
Tables = tuple[Tensor, Tensor]


class BlockSelfAttention(nn.Module):
    """Queries from the block; keys and values from the context and the block.

    Both go through the same projections (DFlash), or the context through its own (DFlare); the norm of the keys is
    one and the same.  `inputs` is the width of what it reads, if not D; `qk_norm`: whether heads are normed.
    """

    def __init__(self, config: DrafterConfig, layer: int, inputs: int | None = None, qk_norm: bool = True) -> None:
        super().__init__()
        bias, width = config.attention_bias, config.hidden_size if inputs is None else inputs
        self.head_dim = config.head_dim
        self.window, self.causal = config.window(layer), config.causal(layer)
        self.q_proj = nn.Linear(width, config.num_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=bias)
        self.separate = config.context_projections == "separate"
        if self.separate:
            self.k_proj_target = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=bias)
            self.v_proj_target = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else nn.Identity()

    def keys_values(self, x: Tensor, tables: Tables) -> KeysValues:
        """Of block rows x [..., D]: normed and rotated keys, and values [..., G, E]."""
        return self._split(self.k_proj(x), self.v_proj(x), tables)

    def context_keys_values(self, x: Tensor, tables: Tables) -> KeysValues:
        """The same of the context's vectors."""
        if self.separate:
            return self._split(self.k_proj_target(x), self.v_proj_target(x), tables)
        return self.keys_values(x, tables)

    def _split(self, keys: Tensor, values: Tensor, tables: Tables) -> KeysValues:
        keys = self.k_norm(keys.unflatten(-1, (-1, self.head_dim)))
        return rotate(keys, tables), values.unflatten(-1, (-1, self.head_dim))

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
        """x [B, A, Q, D] over context keys and values [B, G, S, E] -> [B, A, Q, D], and their own [B, A, Q, G, E].

        `earlier` are those of rows of the same blocks that were computed before; they come back in front of the new.
        """
        query = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), tables)
        keys, values = self.keys_values(x, tables)
        if earlier is not None:
            keys, values = torch.cat([earlier[0], keys], dim=2), torch.cat([earlier[1], values], dim=2)
        mixed = block_attention(query, keys, values, context, lengths, at, self.window, causal)
        return self.o_proj(mixed.flatten(-2)), (keys, values)


class BlockLayer(nn.Module):
    """A pre-norm layer; its input norm is for the block alone, the context has a norm of its own."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockSelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def keys_values(self, x: Tensor, tables: Tables) -> KeysValues:
        """What rows x [..., D] leave for others to see, whatever they see themselves: [..., G, E]."""
        return self.self_attn.keys_values(self.input_layernorm(x), tables)

    def forward(
        self,
        x: Tensor,
        tables: Tables,
        context: KeysValues,
        lengths: Tensor,
        at: Tensor,
        causal: bool | None = None,
        earlier: KeysValues | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """As the attention's; `causal` None: as the layer is configured."""
        causal = self.self_attn.causal if causal is None else causal
        mixed, made = self.self_attn(self.input_layernorm(x), tables, context, lengths, at, causal, earlier)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), made
