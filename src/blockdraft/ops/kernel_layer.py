"""A whole layer of the Llama family, a target's or a drafter's, in one call of the compiled kernel.

With a few rows and a small model, calling torch for every step of a layer costs as much as reading its weights.
Letters: B rows, Q tokens per row in one call, D hidden width, H/G query/key-value heads, E head width, I inner width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import ClassVar

import torch
from torch import Tensor

from blockdraft.ops.kernel import KernelLinear, LinearPart, library

VECTOR = 8  # widths are multiples of what the kernel takes at once


class LayerPart(ctypes.Structure):
    """`Layer` of native/kernel.h."""

    _fields_ = [
        *((name, LinearPart) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "head_norms")),
        *(
            (name, c_int64)
            for name in ("hidden", "heads", "groups", "head_width", "inner", "window", "blind", "causal")
        ),
        ("eps", c_float),
    ]


class PassPart(ctypes.Structure):
    """`Pass` of native/kernel.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "y", "cosines", "sines", "keys", "values", "slots", "starts")),
        *((name, c_int64) for name in ("batch", "width", "room", "longest")),
        ("scratch", c_void_p),
    ]


class KernelPass:
    """What the layers of one forward share: which slots are extended, from where, and room for what lies between.

    `tables` are cosines and sines [B, Q, 1, E] of the positions.
    """

    def __init__(self, slots: Sequence[int], starts: Sequence[int], width: int, tables: tuple[Tensor, Tensor]) -> None:
        batch = len(slots)
        self.tables = tuple(table.contiguous() for table in tables)
        self.slots, self.starts = (c_int64 * batch)(*slots), (c_int64 * batch)(*starts)
        self.threads = torch.get_num_threads()
        self.part = PassPart(
            cosines=self.tables[0].data_ptr(),
            sines=self.tables[1].data_ptr(),
            slots=ctypes.addressof(self.slots),
            starts=ctypes.addressof(self.starts),
            batch=batch,
            width=width,
            longest=max(starts) + width,
        )
        self.scratch = torch.empty(0)

    def reserve(self, floats: int) -> None:
        """Make the scratch at least so long."""
        if len(self.scratch) < floats:
            self.scratch = torch.empty(floats)
            self.part.scratch = self.scratch.data_ptr()


class KernelLayer:
    """The layer's four products, two norms and attention over `window` tokens (None: all), as the kernel has them.

    `head_norms` [H + G, E] are those of queries and keys.  Nobody sees the first `blind` positions; unless it is
    `causal`, all tokens of a pass see one another.
    """

    # Told of every call, the layer and how many rows: a module's hooks hear nothing of what the kernel does within.
    listener: ClassVar[Callable[[KernelLayer, int], None] | None] = None

    def __init__(
        self,
        linears: Sequence[KernelLinear],
        norms: tuple[Tensor, Tensor],
        head_norms: Tensor | None,
        shape: tuple[int, int, int],
        eps: float,
        window: int | None,
        blind: int = 0,
        causal: bool = True,
    ) -> None:
        lib = library()
        assert lib is not None, "its linear layers are the kernel's"
        qkv, out, gate_up, down = linears
        heads, groups, head_dim = shape
        self.linears = tuple(linears)
        self._kept = (*norms, head_norms)  # with the linear layers, the memory that is pointed to
        self.part = LayerPart(
            *(linear.part for linear in linears),
            *(norm.data_ptr() for norm in norms),
            None if head_norms is None else head_norms.data_ptr(),
            *(out.out_features, heads, groups, head_dim, down.in_features, window or 0, blind, causal),
            eps,
        )
        assert qkv.out_features == (heads + 2 * groups) * head_dim, "queries, keys, values"
        assert gate_up.out_features == 2 * down.in_features, "gate, up"
        self._address = ctypes.addressof(self.part)
        self._run, self._scratch = lib.layer, lib.scratch

    def __call__(self, x: Tensor, step: KernelPass, keys: Tensor, values: Tensor) -> Tensor:
        """The residual stream x [B, Q, D] after the layer; writes its keys and values [slots, G, room, E]."""
        assert all(memory.is_contiguous() for memory in (keys, values)), "a cache's own memory"
        x, y, part = x.contiguous(), torch.empty_like(x), step.part
        part.x, part.y, part.keys, part.values = x.data_ptr(), y.data_ptr(), keys.data_ptr(), values.data_ptr()
        part.room = keys.shape[2]
        if KernelLayer.listener is not None:
            KernelLayer.listener(self, part.batch * part.width)
        step.reserve(self._scratch(self._address, part.batch * part.width, part.longest, step.threads))
        self._run(self._address, ctypes.addressof(part), step.threads)
        return y


def layer_fits(linears: Sequence[object], norms: Sequence[Tensor], head_dim: int) -> bool:
    """Whether a layer of these parts can be a `KernelLayer`."""
    if not all(isinstance(linear, KernelLinear) for linear in linears):
        return False
    widths = (head_dim, *(linear.in_features for linear in linears if isinstance(linear, KernelLinear)))
    plain = all(norm.dtype == torch.float32 and norm.is_contiguous() for norm in norms)
    return plain and not any(width % VECTOR for width in widths)
