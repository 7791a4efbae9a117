"""Generate faster with a block-diffusion drafter, and exactly what the target would have written.

The public names are loaded when they are first used, so that `import blockdraft` stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockdraft.config import DrafterConfig, EngineConfig, SamplingParams, TrainConfig
    from blockdraft.engine.api import LLM, Output
    from blockdraft.engine.engine import Engine

__version__ = "0.1.0"

__all__ = ["LLM", "DrafterConfig", "Engine", "EngineConfig", "Output", "SamplingParams", "TrainConfig", "__version__"]

_HOMES = {
    "LLM": "blockdraft.engine.api",
    "Output": "blockdraft.engine.api",
    "Engine": "blockdraft.engine.engine",
    "DrafterConfig": "blockdraft.config",
    "EngineConfig": "blockdraft.config",
    "SamplingParams": "blockdraft.config",
    "TrainConfig": "blockdraft.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'blockdraft' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
