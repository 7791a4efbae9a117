"""Muon: momentum whose matrix updates are made orthogonal (Jordan et al., 2024), scaled as by Moonlight (2502.16982).

A matrix learns in every direction at once, instead of mostly in its few largest ones, which with the few
thousand steps of a small budget is worth more than anything else we tried.  torch has a Muon, which makes
its updates in bfloat16; without hardware for that it is several times slower than fp32, hence this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# The quintic of Jordan et al.: five rounds bring every singular value close to one.
ROUNDS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)


def orthogonal(update: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrix to update [m, n], roughly: singular values end in 0.7..1.2.

    The rounds run on the smaller Gram matrix, which all their products share: for long matrices a quarter less
    work than on the matrix itself.
    """
    a, b, c = COEFFICIENTS
    wide = update.shape[0] <= update.shape[1]
    x = update if wide else update.T
    x = x / x.norm().clamp(min=1e-7)
    gram = x @ x.T
    total = gram
    for number in range(ROUNDS):
        factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal().add_(a)
        total = factor if number == 0 else factor @ total
        if number < ROUNDS - 1:
            gram = gram @ factor @ factor
            gram = 0.5 * (gram + gram.T)  # rounding must not make it drift from symmetry
    x = total @ x
    return x if wide else x.T


class Muon(torch.optim.Optimizer):
    """For matrices only.  The scale makes an update as large, entry by entry, as a fifth of AdamW's at equal rate."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        assert closure is None, "the loop computes the loss"
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        assert p.grad is not None, "the caller has looked"
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        momentum = state["momentum"].lerp_(p.grad, 1.0 - group["momentum"])
        update = orthogonal(torch.lerp(p.grad, momentum, group["momentum"]))  # Nesterov: a look ahead
        p.mul_(1.0 - group["lr"] * group["weight_decay"])
        p.add_(update, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)
