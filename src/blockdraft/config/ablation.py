"""Settings of an ablation: arms, budget, and what they are measured on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from blockdraft.config.strict import Strict, override_settings, read_settings
from blockdraft.config.training import TrainConfig


class BenchSet(Strict):
    """Prompts that an ablation is measured on."""

    dataset: str = Field(description="a data set by name, or a JSONL file")
    data_dir: str | None = Field(None, description="folder with the data set's JSONL; None: download it")
    limit: int | None = Field(None, ge=1, description="only the first so many prompts")
    timed: int | None = Field(None, ge=1, description="prompts of these that are also timed; None: all")


class AblationConfig(Strict):
    """Arms that differ in a few settings, trained on the same data within the same budget, measured alike.

    An arm changes settings of `base`, nested or as `section.key`; or, if its `drafter` is a text, it is a drafter
    that is ready: of that name, or with `arm:NAME` another arm's, and `block_size` is that of the blocks it drafts.
    The budget is `steps`, or `minutes` of training for each arm.
    """

    base: TrainConfig
    arms: dict[str, dict[str, Any]] = Field(min_length=1)
    steps: int | None = Field(None, ge=1)
    minutes: float | None = Field(None, gt=0.0)
    timing_steps: int = Field(20, ge=1, description="steps by which `minutes` become steps")
    bench: tuple[BenchSet, ...] = Field(min_length=1)
    temperatures: tuple[float, ...] = Field((0.0,), min_length=1)
    max_tokens: int = Field(256, ge=1)
    seed: int = Field(0, description="prompt i is sampled with seed + i")
    repeats: int = Field(1, ge=1, description="timed runs per prompt; the median counts")
    timed_tokens: int | None = Field(None, ge=1, description="max_tokens of timed answers; None: as of all")
    slots: int = Field(8, ge=1, description="requests at once where nothing is timed")

    @model_validator(mode="after")
    def _consistent(self) -> AblationConfig:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("the budget is one of steps and minutes")
        stems = [Path(one.dataset).stem for one in self.bench]
        if len(set(stems)) != len(stems) or len(set(self.temperatures)) != len(self.temperatures):
            raise ValueError("bench and temperatures: each data set and each temperature once")
        return self


def load_ablation(path: str | Path, overrides: tuple[str, ...] = ()) -> AblationConfig:
    """`load_config`, where `base` may also be the path of a recipe, seen from the ablation's own folder."""
    values = read_settings(path)
    if isinstance(values.get("base"), str):
        values["base"] = read_settings(Path(path).parent / values["base"])
    return AblationConfig.parse(override_settings(values, overrides), str(path))
