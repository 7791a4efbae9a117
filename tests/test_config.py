"""Settings: what cannot be used is refused in one line that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blockdraft.config import ConfigError, DrafterConfig, SamplingParams, TrainConfig, load_config

RECIPE = "target: x\ndata:\n  files: [a.jsonl]\n"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty: .*finite"),
        ({"logit_bias": {3: float("nan")}}, r"logit_bias\.3: .*finite"),
        ({"stop": ""}, "stop strings must not be empty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": 0.0}, "top_p"),
        ({"topp": 0.5}, "unknown key 'topp' \\(known: .*top_p"),
        ({1: 2}, "1: "),
    ],
)
def test_sampling_parameters_that_make_no_sense(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        SamplingParams.parse(values)
    assert "\n" not in str(error.value)


def test_one_stop_string_needs_no_list() -> None:
    assert SamplingParams.parse({"stop": "END"}).stop == ("END",)


def test_a_window_reaches_back() -> None:
    shape = dict.fromkeys(("hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size"), 1)
    rest = {
        "head_dim": 2,
        "vocab_size": 9,
        "block_size": 2,
        "mask_token_id": 0,
        "tap_ids": (0,),
        "num_target_layers": 1,
    }
    with pytest.raises(ConfigError, match="sliding_window"):
        DrafterConfig.parse({**shape, **rest, "layer_types": ("sliding_attention",), "sliding_window": -4})


def test_overrides(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    config = load_config(TrainConfig, path, ("optim.lr=3e-4", "steps=7"))
    assert (config.optim.lr, config.steps) == (3e-4, 7)
    for override, message in [
        ("optim.lrr=1", r"unknown key 'optim\.lrr' \(known: .*weight_decay"),
        ("steps", "write section.key=value"),
        ("steps.x=1", "steps"),
        ("data.files=[a", "override 'data.files=\\[a': not readable as YAML"),
    ]:
        with pytest.raises(ConfigError, match=message) as error:
            load_config(TrainConfig, path, (override,))
        assert "\n" not in str(error.value)


def test_files_that_are_no_settings(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    for text, message in [
        ("- a", "expected settings, found list"),
        ("a: [", "not readable as YAML"),
        (RECIPE + "3: 4", "3: "),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_config(TrainConfig, path)
    with pytest.raises(ConfigError, match="no such file"):
        load_config(TrainConfig, tmp_path / "none.yaml")
