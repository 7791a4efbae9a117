"""The layers of a drafter in the compiled kernel: between the products of a few rows lies most of a draft's time.

The rows of a block stand behind the committed context, in the slots that their positions name, while they are drafted;
the lengths of the cache do not count them, and what is committed is written over them.
Letters: B rows, Q block rows, D hidden width, H/G query/key-value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from blockdraft.cache import KVCache
from blockdraft.config import DrafterConfig
from blockdraft.drafters.layers import BlockLayer, Tables
from blockdraft.ops.kernel import KernelLinear
from blockdraft.ops.kernel_layer import KernelLayer, KernelPass, layer_fits


def compile_layers(
    layers: Sequence[nn.Module], config: DrafterConfig, blind: int = 0, alone: bool = False
) -> list[KernelLayer] | None:
    """The layers as the kernel has them; None: it is not there, or not made for one of them.

    Projections that share an input are joined, which takes memory of their own.  Nobody sees the first `blind` slots;
    `alone`: a pass is one row, to which its block is what stands behind the context.
    """
    if not all(isinstance(layer, BlockLayer) for layer in layers):
        return None
    made = [_compile(cast("BlockLayer", layer), config, blind, alone) for layer in layers]
    return None if any(layer is None for layer in made) else cast("list[KernelLayer]", made)


def run_layers(
    layers: Sequence[KernelLayer], x: Tensor, state: KVCache, rows: Sequence[int], starts: Sequence[int], tables: Tables
) -> Tensor:
    """Rows x [B, Q, D] from positions starts[b] on, before the final norm; tables are [B, Q, 1, E].

    They see what slots `rows` of the state hold before them.
    """
    step = KernelPass(rows, starts, x.shape[1], tables)
    for layer, keys, values in zip(layers, state.keys, state.values, strict=True):
        x = layer(x, step, keys, values)
    return x


def _compile(layer: BlockLayer, config: DrafterConfig, blind: int, alone: bool) -> KernelLayer | None:
    attention, mlp = layer.self_attn, layer.mlp
    norms = layer.input_layernorm.weight.detach(), layer.post_attention_layernorm.weight.detach()
    single = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    single += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    head_norms = None
    if not isinstance(attention.q_norm, nn.Identity):
        of_queries, of_keys = (cast("Tensor", norm.weight) for norm in (attention.q_norm, attention.k_norm))
        expanded = of_queries.expand(config.num_heads, -1), of_keys.expand(config.num_kv_heads, -1)
        head_norms = torch.cat(expanded).detach()
    if not layer_fits(single, norms if head_norms is None else (*norms, head_norms), config.head_dim):
        return None
    query, key, value, out, gate, up, down = cast("list[KernelLinear]", single)
    return KernelLayer(
        [_joined(query, key, value), out, _joined(gate, up), down],
        norms,
        head_norms,
        (config.num_heads, config.num_kv_heads, config.head_dim),
        config.rms_norm_eps,
        attention.window,
        blind,
        alone or attention.causal,
    )


def _joined(*linears: KernelLinear) -> KernelLinear:
    biases = [linear.bias for linear in linears if linear.bias is not None]
    weight = torch.cat([linear.weight for linear in linears])
    return KernelLinear(weight, torch.cat(biases) if biases else None, linears[0].panels.dtype)
