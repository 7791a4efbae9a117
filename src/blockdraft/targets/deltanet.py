"""Gated delta nets of Qwen3-Next and Qwen3.5, with a state per slot that can be taken back.

The projections, the norm and all weights are the model's own; what is ours is the part between them, which
transformers computes in chunks for many tokens and step by step for one: other bits, and only the last state.
Letters: B rows, Q tokens per row in one call, n tokens, D hidden width, C channels of the convolution, H value heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.ops.recurrence import causal_conv, delta_scan, gates, unit
from blockdraft.targets.attention import Step
from blockdraft.targets.recurrent import Inputs, RecurrentCache, State

PARTS = ("conv1d", "A_log", "dt_bias", "norm", "out_proj", "head_k_dim", "head_v_dim", "num_k_heads", "num_v_heads")
APART = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")  # Qwen3.5
TOGETHER = ("in_proj_qkvz", "in_proj_ba", "fix_query_key_value_ordering")  # Qwen3-Next


class DeltaNet(nn.Module):
    """Stands in for a gated delta net of transformers, whose modules it goes on using."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own
        self.layer: int = own.layer_idx
        self.key_width, self.value_width = own.num_k_heads * own.head_k_dim, own.num_v_heads * own.head_v_dim

    def empty(self) -> State:
        """The state before the first token: the convolution's last inputs [W - 1, C], and the matrices [H, E, F]."""
        own, weight = self.own, self.own.conv1d.weight
        tail = torch.zeros(weight.shape[-1] - 1, weight.shape[0], dtype=weight.dtype, device=weight.device)
        return tail, torch.zeros(own.num_v_heads, own.head_k_dim, own.head_v_dim, device=weight.device)

    def forward(
        self, hidden_states: Tensor, cache: Any = None, blockdraft: Step | None = None, **_options: Any
    ) -> Tensor:
        """[B, Q, D] -> [B, Q, D]; every row goes on from its own slot.  `cache` is transformers' view of ours."""
        if blockdraft is None:
            raise ValueError("the model does not pass keyword arguments on to its linear attention")
        assert isinstance(blockdraft.cache, RecurrentCache), "made by the target"
        mixed, z, decay, rate = self._project(hidden_states)
        trails = blockdraft.cache.trails[self.layer]
        found = [
            trails[row].read(start, (mixed[b], decay[b], rate[b]), self._scan)
            for b, (row, start) in enumerate(zip(blockdraft.rows, blockdraft.starts, strict=True))
        ]
        cache.written.add(self.layer)
        width = self.own.head_v_dim
        normed: Tensor = self.own.norm(torch.cat(found).view(-1, width), z.reshape(-1, width))
        result: Tensor = self.own.out_proj(normed.view(*hidden_states.shape[:2], -1))
        return result

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, Q, C], what gates the output [B, Q, H * F], and decay and rate [B, Q, H]."""
        own = self.own
        if hasattr(own, APART[0]):
            return own.in_proj_qkv(hidden), own.in_proj_z(hidden), own.in_proj_a(hidden), own.in_proj_b(hidden)
        parts = own.fix_query_key_value_ordering(own.in_proj_qkvz(hidden), own.in_proj_ba(hidden))
        query, key, value, z, rate, decay = (part.flatten(2) for part in parts)
        return torch.cat([query, key, value], dim=-1), z, decay, rate

    def _scan(self, state: State, inputs: Inputs) -> tuple[Tensor, State]:
        """Read the inputs of n tokens of one row; what comes out is [n, H * F]."""
        own = self.own
        (tail, memory), (mixed, decay, rate) = state, inputs
        window = torch.cat([tail, mixed])
        convolved = F.silu(causal_conv(window.float(), own.conv1d.weight[:, 0].float())).to(mixed.dtype).float()
        query, key, value = convolved.split([self.key_width, self.key_width, self.value_width], dim=-1)
        query, key = (unit(part.view(len(mixed), -1, own.head_k_dim)) for part in (query, key))
        repeats = own.num_v_heads // own.num_k_heads
        query, key = (part.repeat_interleave(repeats, dim=1).contiguous() for part in (query, key))
        value = value.reshape(len(mixed), -1, own.head_v_dim)
        kept, beta = gates(decay, rate, own.A_log, own.dt_bias)
        found, memory = delta_scan(memory, query * own.head_k_dim**-0.5, key, value, kept, beta)
        return found.to(mixed.dtype).flatten(1), (window[len(mixed) :].clone(), memory)


def find_delta_nets(layers: nn.ModuleList) -> dict[int, str]:
    """The decoder layers that have a gated delta net, and what it is called in each."""
    return {
        index: name
        for index, layer in enumerate(layers)
        for name, child in layer.named_children()
        if _is_delta_net(child)
    }


def swap_delta_net(layer: nn.Module, name: str) -> DeltaNet:
    """Put a `DeltaNet` in the place of a decoder layer's own."""
    net = DeltaNet(layer.get_submodule(name))
    setattr(layer, name, net)
    return net


def _is_delta_net(module: Any) -> bool:
    if not all(hasattr(module, name) for name in PARTS):
        return False
    known = any(all(hasattr(module, name) for name in names) for names in (APART, TOGETHER))
    return known and module.conv1d.bias is None and module.activation in ("silu", "swish")
