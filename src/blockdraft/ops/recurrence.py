"""The two memories of a gated delta net: a short convolution, and a matrix per head that is decayed and corrected.

Yang et al., "Gated Delta Networks" (arXiv 2412.06464), section 3.1.  Everything that a token does has a shape of its
own, whatever number of tokens is read at once, so that its bits do not depend on that number.
Letters: n tokens, C channels, W taps of the convolution, H heads, E width of a key, F width of a value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.ops.layers import in_whole_vectors


def causal_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Each channel's own convolution over the last W tokens: x [W - 1 + n, C], weight [C, W] -> [n, C]."""
    taps = weight.shape[1]
    count = x.shape[0] - taps + 1
    total = x[:count] * weight[:, 0]
    for tap in range(1, taps):
        total = total + x[tap : tap + count] * weight[:, tap]
    return total


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Vectors [..., E] scaled to length one."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + eps)


def delta_scan(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, kept: Tensor, rate: Tensor
) -> tuple[Tensor, Tensor]:
    """Read n tokens: each decays the state, writes its value under its key, and looks up its query.

    state [H, E, F], query and key [n, H, E], value [n, H, F], `kept` [n, H] the share of the state that stays and
    `rate` [n, H] how far the value is corrected, both in 0..1 -> what was looked up [n, H, F], and the last state.
    """
    found = []
    tokens = (query[:, :, None], key[:, :, None], key[..., None], value[:, :, None], kept[..., None, None])
    for q, k, k_column, v, stays, beta in zip(*tokens, rate[..., None, None], strict=True):
        state = state * stays
        state = torch.baddbmm(state, k_column, (v - k @ state) * beta)
        found.append((q @ state)[:, 0])
    return torch.stack(found), state


def gates(decay: Tensor, rate: Tensor, log_speed: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Share of the state that each token keeps, and how far it corrects it: [n, H] each, from projections [n, H]."""
    kept = -log_speed.float().exp() * in_whole_vectors(F.softplus, decay.float() + bias)
    return in_whole_vectors(torch.exp, kept), in_whole_vectors(torch.sigmoid, rate.float())
