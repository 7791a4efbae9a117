"""Every setting of the project.  Defaults live here and nowhere else; no other module has a fallback of its own."""

from __future__ import annotations

from blockdraft.config.ablation import AblationConfig, BenchSet, load_ablation
from blockdraft.config.drafter import DraftAxes, DrafterConfig, DraftModelConfig, NgramConfig
from blockdraft.config.generation import EngineConfig, SamplingParams
from blockdraft.config.strict import ConfigError, ConfigT, Strict, load_config, override_settings, read_settings
from blockdraft.config.training import DataConfig, DraftShape, FeatureConfig, LossConfig, OptimConfig, TrainConfig

__all__ = [
    "AblationConfig",
    "BenchSet",
    "ConfigError",
    "ConfigT",
    "DataConfig",
    "DraftAxes",
    "DraftModelConfig",
    "DraftShape",
    "DrafterConfig",
    "EngineConfig",
    "FeatureConfig",
    "LossConfig",
    "NgramConfig",
    "OptimConfig",
    "SamplingParams",
    "Strict",
    "TrainConfig",
    "load_ablation",
    "load_config",
    "override_settings",
    "read_settings",
]
