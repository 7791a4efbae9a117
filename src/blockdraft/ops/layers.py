"""The small parts of a transformer layer, and linear layers packed for a few rows on the CPU.

Letters: D hidden width, E head width, I intermediate width.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.ops.kernel import KernelLinear, library

VECTOR = 64  # a multiple of the elements that an elementwise kernel takes at once


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of x [..., D] by weight [D], computed in fp32."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)): [..., D] -> [..., D]."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate, bias=False)
        self.up_proj = nn.Linear(width, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> tuple[Tensor, float]:
    """Inverse frequencies [E/2] and the factor on rotated vectors, for plain, linear, Llama-3 and YaRN rotary.

    `scaling` has Hugging Face's keys.  ValueError: a type that is not known here, or a key that it lacks.
    """
    inverse = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    kind = scaling.get("rope_type", scaling.get("type", "default")) if scaling else "default"
    if scaling is None or kind == "default":
        return inverse, 1.0
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(f"rope_scaling type '{kind}' is not supported (default, linear, llama3, yarn)")
    needed = ["factor"]
    if kind != "linear":
        needed.append("original_max_position_embeddings")
    if kind == "llama3":
        needed += ["low_freq_factor", "high_freq_factor"]
    for key in needed:
        if key not in scaling:
            raise ValueError(f"rope_scaling of type '{kind}' lacks '{key}'")
    factor = float(scaling["factor"])
    if kind == "linear":
        return inverse / factor, 1.0
    original = float(scaling["original_max_position_embeddings"])
    if kind == "llama3":
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        turns = original * inverse / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return inverse * (kept + (1.0 - kept) / factor), 1.0

    def dimension(rotations: float) -> float:  # YaRN: where a pair turns this often over the original context
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    start, end = dimension(float(scaling.get("beta_fast", 32))), dimension(float(scaling.get("beta_slow", 1)))
    if scaling.get("truncate", True):  # to whole dimensions; gpt-oss does not
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - start) / max(end - start, 1e-3)
    scaled = ramp.clamp(0.0, 1.0)
    magnitude = scaling.get("attention_factor") or 0.1 * math.log(factor) + 1.0
    return inverse * (1.0 - scaled) + inverse / factor * scaled, float(magnitude)


def rotary_tables(positions: Tensor, inverse: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [..., 1, E] for positions [...]; the 1 stands for the heads."""
    angles = positions.to(torch.float32)[..., None, None] * inverse
    angles = torch.cat([angles, angles], dim=-1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding, halves convention: x [..., heads, E]."""
    cos, sin = tables
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class PackedLinear(nn.Module):
    """A linear layer in oneDNN's blocked layout: fp32, CPU, inference only.

    Reading the weights is nearly all the cost of a few rows, so eight rows cost little more than one.  The
    result of a row has the same bits whatever the number of rows, within `span`: fewer rows are padded and more
    are split, so that verifying drafts gives what plain decoding gives, bit for bit.
    """

    # The rows that the layout is made for: measured best for 1 to 32 rows.
    LAYOUT_ROWS = 8
    PROBED_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 65, 129)

    def __init__(self, weight: Tensor, bias: Tensor | None = None, span: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        dense = weight.detach().contiguous()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(dense, self.LAYOUT_ROWS)
        self.bias = None if bias is None else bias.detach()
        self.span = self._invariant_span() if span is None else span

    @property
    def weight(self) -> Tensor:
        """The dense weight [out, in], unpacked anew at each call."""
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        least, most = self.span
        if least <= flat.shape[0] <= most:
            return self.product(flat.contiguous()).view(*x.shape[:-1], self.out_features)
        parts = []
        for part in flat.split(most):
            rows = part.shape[0]
            padded = F.pad(part, (0, 0, 0, least - rows)) if rows < least else part
            parts.append(self.product(padded.contiguous())[:rows])
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        return y.view(*x.shape[:-1], self.out_features)

    def product(self, x: Tensor) -> Tensor:
        """Rows [R, in] -> [R, out] in one call of the library, whatever its bits depend on."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y

    def _invariant_span(self) -> tuple[int, int]:
        """The fewest and the most rows around `LAYOUT_ROWS` between which a row's bits never change."""
        probe = torch.randn(max(self.PROBED_ROWS), self.in_features, generator=torch.Generator().manual_seed(0))
        reference = self.product(probe[: self.LAYOUT_ROWS])

        def same(rows: int) -> bool:
            count = min(rows, self.LAYOUT_ROWS)
            return torch.equal(self.product(probe[:rows])[:count], reference[:count])

        fewer = [rows for rows in reversed(self.PROBED_ROWS) if rows < self.LAYOUT_ROWS]
        more = [rows for rows in self.PROBED_ROWS if rows > self.LAYOUT_ROWS]
        fewer = list(itertools.takewhile(same, fewer))
        fitting = list(itertools.takewhile(same, more))
        least = fewer[-1] if fewer else self.LAYOUT_ROWS
        most = sys.maxsize if len(fitting) == len(more) else (fitting[-1] if fitting else self.LAYOUT_ROWS)
        return least, most


def pack_linears(module: nn.Module, storage: torch.dtype = torch.float32) -> None:
    """Swap every fp32 CPU `nn.Linear` below `module` for a packed one, in place; gradients end here.

    Packed for our own kernel where it is built, else for oneDNN; only the kernel has a `storage` other than float32.
    """
    ours = library() is not None
    if not ours and not torch.backends.mkldnn.is_available():
        return
    probed: dict[tuple[int, int], tuple[int, int]] = {}
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or not packable(child.weight):  # a subclass may compute something else
                continue
            packed: KernelLinear | PackedLinear
            if ours:
                packed = KernelLinear(child.weight, child.bias, storage)
            else:
                assert storage == torch.float32, "the caller looks whether there is a kernel"
                shape = (child.out_features, child.in_features)
                packed = PackedLinear(child.weight, child.bias, probed.get(shape))
                probed[shape] = packed.span
            setattr(parent, name, packed)


def draft_storage() -> torch.dtype:
    """How the weights of a drafter are kept when packed: reading them is what a draft costs.

    Rounding them changes a draft now and then, and no answer: every token is the target's choice.
    """
    return torch.float16 if library() is not None else torch.float32


def in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function of x, whose bits do not depend on how many elements x has.

    What is left over beside whole vectors, the CPU's kernels compute in another way, which rounds otherwise.
    """
    flat = x.reshape(-1)
    return function(F.pad(flat, (0, -len(flat) % VECTOR)))[: len(flat)].view(x.shape)


def packable(weight: Tensor) -> bool:
    """Whether a weight can be packed: fp32, on the CPU."""
    return weight.dtype == torch.float32 and weight.device.type == "cpu"
