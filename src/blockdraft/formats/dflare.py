"""DFlare in its authors' layout (AngelSlim), which is also ours: DFlash's without `fc`, but with a fusion per layer.

Each layer's mix of taps is fused first and normed afterwards, by the one `hidden_norm`; `layer_fusion_weights` [N, T]
are logits of that mix.  No released engine loads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from blockdraft.config import DrafterConfig
from blockdraft.drafters.checkpoint import DFLARE
from blockdraft.formats import dflash
from blockdraft.formats.card import TargetCard
from blockdraft.formats.files import peek_settings
from blockdraft.formats.limits import family_limits, head_limits, tap_limits
from blockdraft.formats.parts import Parts

NAME = "dflare"
# The name in the code, and the one in published checkpoints.
ARCHITECTURES = ("QwenDFlareDraftModel", "DFlareQwen3Model")

read = dflash.read


def matches(path: Path) -> bool:
    """Whether a folder is in this layout."""
    values = peek_settings(path) if path.is_dir() else {}
    return not set(ARCHITECTURES).isdisjoint(values.get("architectures") or ())


def limits(config: DrafterConfig) -> list[str]:
    """Why the layout cannot carry a drafter."""
    return family_limits(config, DFLARE) + tap_limits(config) + head_limits(config, "")


def write(parts: Parts, card: TargetCard | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and weights of the two files."""
    values, tensors = dflash.write(parts, card)
    return {**values, "architectures": [ARCHITECTURES[0]]}, tensors
