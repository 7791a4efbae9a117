"""How each draft layer of DFlare mixes the target's taps, and where the mixes start (arXiv 2606.02091).

Letters: B rows, S context tokens, T taps, D hidden width, N draft layers.

Layer n listens to sum_t softmax(w[n])_t tap_t, so w [N, T] is all that is learned of a mix.
"""

from __future__ import annotations

import torch
from torch import Tensor

PEAK = 2.0  # with nine taps, half of a layer's attention


def mix_taps(taps: Tensor, weights: Tensor) -> Tensor:
    """Every layer's mix: taps [B, S, T, D] and weights [N, T] before the softmax -> [B, S, N, D]."""
    return weights.float().softmax(dim=-1).to(taps.dtype) @ taps


def peak_weights(num_layers: int, num_taps: int) -> Tensor:
    """The authors' start [N, T]: zero, but `PEAK` at the tap that lies as deep as the layer, floor(n T / N)."""
    weights = torch.zeros(num_layers, num_taps)
    for layer in range(num_layers):
        weights[layer, layer * num_taps // num_layers] = PEAK
    return weights


def bell_weights(num_layers: int, num_taps: int) -> Tensor:
    """A softer start [N, T]: -2 for each tap away from the layer's own place, first layer at the first tap, last at
    the last; a single layer is in the middle."""
    place = torch.linspace(0.0, num_taps - 1.0, num_layers) if num_layers > 1 else torch.tensor([(num_taps - 1) / 2])
    return -2.0 * (torch.arange(num_taps) - place.round()[:, None]).abs()
