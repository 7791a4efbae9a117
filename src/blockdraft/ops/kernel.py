"""The compiled kernel, where it is there: products of a few rows with a large weight on the CPU.

A row's result has the same bits whatever the number of rows and of threads.  The library is built when the package is
installed, from the sources in `native`, and only ever loaded from there.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_char_p, c_int, c_int64, c_void_p
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from blockdraft.ops.native.build import LIBRARY, digest

PATHS = ("avx512", "avx2", "portable")  # the last fuses no sums, and so has other bits than the others
QUICK = PATHS[:2]  # quicker than oneDNN; the portable one need not be
VARIABLE = "BLOCKDRAFT_KERNEL"
REMEDY = "run python -m blockdraft.ops.native.build"
CHOICES = ("auto", "on", "off", *PATHS)
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
    """The loaded library and a path of it, or the fastest that the processor has; `panel`: outputs of a panel.

    ValueError: it cannot be loaded, or the processor does not have that path.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        try:
            functions = ctypes.CDLL(str(path))
            linear, layer, scratch = functions.kernel_linear, functions.kernel_layer, functions.kernel_scratch
            threads, sources, find = functions.kernel_threads, functions.kernel_sources, functions.kernel_path
            naming, panel = functions.kernel_path_name, functions.kernel_path_panel
        except (OSError, AttributeError) as error:
            raise ValueError(f"the compiled kernel cannot be loaded: {error}") from error
        sources.restype, sources.argtypes = c_char_p, []
        self.is_current: bool = sources().decode() == digest()
        find.restype, find.argtypes = c_void_p, [c_char_p]
        found = find(None if name is None else name.encode())
        if found is None:
            raise ValueError(f"{VARIABLE}={name}, but this processor does not have it")
        naming.restype, naming.argtypes = c_char_p, [c_void_p]
        panel.restype, panel.argtypes = c_int64, [c_void_p]
        self.path: str = naming(found).decode()
        self.panel: int = panel(found)
        linear.restype, linear.argtypes = None, [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int]
        layer.restype, layer.argtypes = None, [c_void_p, c_void_p, c_void_p, c_int]
        scratch.restype, scratch.argtypes = c_int64, [c_void_p, c_int64, c_int64, c_int]
        self.linear, self.layer, self.scratch = partial(linear, found), partial(layer, found), scratch
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
        self.panels = to_panels(weight.detach().to(storage), lib.panel)
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


def to_panels(weight: Tensor, width: int) -> Tensor:
    """[out, in] -> [panels, in, width], the last one filled up with zeros."""
    outputs, inputs = weight.shape
    filled = nn.functional.pad(weight, (0, 0, 0, -outputs % width))
    return filled.view(-1, width, inputs).transpose(1, 2).contiguous()


@cache
def library() -> Library | None:
    """The kernel; None: it is not built from these sources, not made for this processor, or BLOCKDRAFT_KERNEL says off.

    BLOCKDRAFT_KERNEL=on takes it on every processor, and one of `PATHS` that path.
    ValueError: the variable says something else, there is no kernel to take, or the processor does not have the path.
    """
    choice = os.environ.get(VARIABLE, "auto")
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE}={choice} is not one of {', '.join(CHOICES)}")
    if choice == "off" or (choice == "auto" and not LIBRARY.is_file()):
        return None
    if not LIBRARY.is_file():
        raise ValueError(f"{VARIABLE}={choice}, but there is no kernel: {REMEDY}")
    found = Library(LIBRARY, choice if choice in PATHS else None)
    if choice == "auto":
        return found if found.is_current and found.path in QUICK else None
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
