"""Mixtures of experts whose result for one token does not depend on the tokens beside it, bit for bit.

Which experts a token goes to follows from the token alone, but how many tokens an expert gets does not, and the bits
of a plain product depend on that.  On the CPU, in fp32, experts get packed products, whose bits do not.
Letters: R tokens, k experts per token, D hidden width, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from blockdraft.ops.layers import PackedLinear, in_whole_vectors, packable

# How transformers describes a module of experts: their weights in three dimensions, the expert's first.
DESCRIPTION = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")
SIGMOIDS = (torch.sigmoid, Tensor.sigmoid)


class PackedExperts(nn.Module):
    """Stands in for a module of experts of transformers, whose weights it takes: fp32, CPU, inference only."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own  # still knows its activation
        self.up = _pack(own, "gate_up_proj" if own.has_gate else "up_proj")
        self.down = _pack(own, "down_proj")
        self.activate: Callable[[Tensor], Tensor] = own._apply_gate if own.has_gate else own.act_fn

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden [R, D], the experts chosen for each token [R, k] and their weights [R, k] -> [R, D]."""
        results = hidden.new_empty(*chosen.shape, hidden.shape[-1])
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            result = self.down[expert](self.activate(self.up[expert](hidden[token])))
            if self.own.has_post_expert_norm:
                result = self.own.post_expert_norm(result)
            results[token, place] = (result * weights[token, place, None]).to(hidden.dtype)
        # Added up in the order of the token's own choices, whoever else has chosen what.
        total = results[:, 0]
        for place in range(1, chosen.shape[1]):
            total = total + results[:, place]
        return total


class RowExact(TorchFunctionMode):
    """What the rest of an expert block (router, gate of a shared expert) calls, with the same bits for any number of
    tokens: products with bare weights are packed ones, and sigmoids are taken of whole vectors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.packed: dict[int, tuple[Tensor, PackedLinear]] = {}  # by id; the weight is kept, so that ids stay taken

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is F.linear and not options and packable(args[1]):
            return self._linear(*args)
        if func in SIGMOIDS and not options:
            return in_whole_vectors(func, *args)
        return func(*args, **options)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        known = self.packed.get(id(weight))
        if known is None:
            known = self.packed[id(weight)] = (weight, PackedLinear(weight, bias))
        return known[1](x)


def pack_experts(model: nn.Module) -> None:
    """Swap every module of fp32 CPU experts below `model` for a packed one, in place, and make its block row exact."""
    if not torch.backends.mkldnn.is_available():
        return
    for block in list(model.modules()):
        swapped = False
        for name, child in list(block.named_children()):
            if _is_experts(child) and packable(child.get_parameter("down_proj")):
                setattr(block, name, PackedExperts(child))
                swapped = True
        if swapped:
            block.forward = partial(_with_mode, block.forward, RowExact())


def _with_mode(forward: Callable[..., Any], mode: RowExact, *args: Any, **options: Any) -> Any:
    with mode:
        return forward(*args, **options)


def _is_experts(module: Any) -> bool:
    down = getattr(module, "down_proj", None)
    return all(hasattr(module, name) for name in DESCRIPTION) and isinstance(down, Tensor) and down.dim() == 3


def _pack(own: Any, name: str) -> nn.ModuleList:
    """One packed layer for each expert; takes the weights from the module that had them."""
    weights, biases = getattr(own, name), getattr(own, f"{name}_bias") if own.has_bias else None
    layers: list[nn.Module] = []
    span = None
    for expert, weight in enumerate(weights):
        dense = weight.T if own.is_transposed else weight
        layer = PackedLinear(dense, None if biases is None else biases[expert].clone(), span)
        span = layer.span
        layers.append(layer)
    setattr(own, name, None)
    return nn.ModuleList(layers)
