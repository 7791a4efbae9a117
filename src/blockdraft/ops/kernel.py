"""The compiled kernel, where it is there: products of a few rows with a large weight on the CPU.

A row's result has the same bits whatever the number of rows and of threads.  The library is built when the package is
installed, from the sources in `native`, and only ever loaded from there.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_char_p, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from blockdraft.ops.native.build import LIBRARY, digest

PANEL = 24  # outputs of a panel, as in native/kernel.h
FASTEST = "avx2"  # the path that is quicker than oneDNN; the portable one need not be
VARIABLE = "BLOCKDRAFT_KERNEL"
REMEDY = "run python -m blockdraft.ops.native.build"
CHOICES = ("auto", "on", "off", "portable")
# In the OpenMP library that torch has loaded, whatever it calls it.
THREADING = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
STORAGES = (torch.float32, torch.float16)


class LinearPart(ctypes.Structure):
    """`Linear` of native/kernel.h."""

    _fields_ = [
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("is_half", c_int64),
    ]


class Library:
    """The loaded library.  ValueError: it cannot be loaded, or is not the one that belongs to this package."""

    def __init__(self, path: Path, portable: bool = False) -> None:
        try:
            self.functions = ctypes.CDLL(str(path))
            self.linear, self.layer = self.functions.kernel_linear, self.functions.kernel_layer
            self.scratch, threads = self.functions.kernel_scratch, self.functions.kernel_threads
            choose, sources = self.functions.kernel_choose, self.functions.kernel_sources
        except (OSError, AttributeError) as error:
            raise ValueError(f"the compiled kernel cannot be loaded: {error}") from error
        sources.restype, sources.argtypes = c_char_p, []
        self.is_current: bool = sources().decode() == digest()
        choose.restype, choose.argtypes = c_char_p, [c_int]
        self.linear.restype, self.linear.argtypes = None, [c_void_p, c_void_p, c_void_p, c_int64, c_int]
        self.layer.restype, self.layer.argtypes = None, [c_void_p, c_void_p, c_int]
        self.scratch.restype, self.scratch.argtypes = c_int64, [c_void_p, c_int64, c_int64, c_int]
        self.path: str = choose(portable).decode()
        threads.restype, threads.argtypes = None, [c_void_p] * len(THREADING)
        threads(*_threading())


def _threading() -> list[int | None]:
    """Addresses of the functions by which torch's own threads are used; none of them: one thread does everything."""
    process = ctypes.CDLL(None)
    try:
        return [ctypes.cast(getattr(process, name), c_void_p).value for name in THREADING]
    except AttributeError:
        return [None] * len(THREADING)


class KernelLinear(nn.Module):
    """A linear layer in panels for the kernel: CPU, fp32 sums, inference only.

    `storage` is how weights are kept: float32 as they are, or float16, rounded.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, storage: torch.dtype = torch.float32) -> None:
        super().__init__()
        lib = library()
        assert lib is not None, "the caller looks whether there is a kernel"
        assert storage in STORAGES, storage
        self.out_features, self.in_features = weight.shape
        self.panels = to_panels(weight.detach().to(storage))
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.part = LinearPart(
            self.panels.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            self.out_features,
            self.in_features,
            storage == torch.float16,
        )
        self._address = ctypes.addressof(self.part)
        self._product = lib.linear

    @property
    def weight(self) -> Tensor:
        """The dense weight [out, in] in fp32, unpacked anew at each call."""
        return self.panels.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features].float()

    def forward(self, x: Tensor) -> Tensor:
        assert not (x.requires_grad and torch.is_grad_enabled()), "gradients end here, and nothing would say so"
        assert (x.dtype, x.shape[-1]) == (torch.float32, self.in_features), (x.dtype, x.shape)
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], self.out_features)
        rows = y.numel() // self.out_features
        self._product(self._address, x.data_ptr(), y.data_ptr(), rows, torch.get_num_threads())
        return y


def to_panels(weight: Tensor) -> Tensor:
    """[out, in] -> [panels, in, PANEL], the last one filled up with zeros."""
    outputs, inputs = weight.shape
    filled = nn.functional.pad(weight, (0, 0, 0, -outputs % PANEL))
    return filled.view(-1, PANEL, inputs).transpose(1, 2).contiguous()


@cache
def library() -> Library | None:
    """The kernel; None: it is not built from these sources, not made for this processor, or BLOCKDRAFT_KERNEL says off.

    BLOCKDRAFT_KERNEL=on takes it on every processor, and "portable" takes what every processor has.
    ValueError: the variable says something else, or there is no kernel to take.
    """
    choice = os.environ.get(VARIABLE, "auto")
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE}={choice} is not one of {', '.join(CHOICES)}")
    if choice == "off" or (choice == "auto" and not LIBRARY.is_file()):
        return None
    if not LIBRARY.is_file():
        raise ValueError(f"{VARIABLE}={choice}, but there is no kernel: {REMEDY}")
    found = Library(LIBRARY, portable=choice == "portable")
    if choice == "auto":
        return found if found.is_current and found.path == FASTEST else None
    if not found.is_current:
        raise ValueError(f"{VARIABLE}={choice}, but the kernel was compiled from other sources: {REMEDY}")
    return found


def describe_kernel() -> str:
    """What computes linear layers on the CPU, in a few words, and why it is not the kernel."""
    found = library()
    if found is not None:
        return f"compiled, {found.path}"
    if os.environ.get(VARIABLE) == "off":
        return f"oneDNN ({VARIABLE}=off)"
    if not LIBRARY.is_file():
        return f"oneDNN (the kernel is not compiled: {REMEDY})"
    if not Library(LIBRARY).is_current:
        return f"oneDNN (the kernel was compiled from other sources: {REMEDY})"
    return f"oneDNN (the kernel is not made for this processor; {VARIABLE}=on takes it nevertheless)"
