"""Settings: what cannot be used is refused in one line that names it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from blockdraft.config import ConfigError, DrafterConfig, EngineConfig, SamplingParams, TrainConfig, load_config

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


@pytest.mark.parametrize("width", [-1, "all", "7", 2.5, True])
def test_a_verify_width_is_a_number_or_auto(width: Any) -> None:
    with pytest.raises(ConfigError, match=r"^engine: verify_width: give a number of drafts, 0 or more, or auto$"):
        EngineConfig.parse({"verify_width": width}, "engine")
    for good in (0, 7, "auto", None):
        assert EngineConfig.parse({"verify_width": good}).verify_width == good


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


def test_a_preset_is_what_its_paper_sets_and_each_setting_can_be_another() -> None:
    recipe = {"target": "x", "data": {"files": ["a"]}}

    def parse(drafter: dict[str, Any], **rest: Any) -> TrainConfig:
        return TrainConfig.parse({**recipe, "drafter": drafter, **rest})

    dflare = parse({"preset": "dflare"})
    shape, loss = dflare.drafter, dflare.loss
    assert (shape.num_layers, shape.num_taps, shape.block_size, shape.fusion_init) == (7, 9, 16, "peak")
    assert (shape.fusion, shape.context_projections, shape.injection) == ("layerwise", "separate", "kv")
    assert (loss.gamma, loss.schedule, loss.gamma_step, loss.gamma_max) == (4.5, "stairs", 1.0, 9.5)
    assert TrainConfig.parse(dflare.model_dump()) == dflare
    changed = parse({"preset": "dflare", "num_layers": 3, "fusion": "shared"}, loss={"gamma": 5.0})
    assert (changed.drafter.num_layers, changed.drafter.fusion, changed.drafter.fusion_init) == (3, "shared", "random")
    assert (changed.loss.gamma, changed.loss.schedule) == (5.0, "stairs")
    assert parse({"preset": "dflare"}, loss={"schedule": "constant"}).loss.gamma == 7.0
    assert parse({"preset": "dflare"}, loss={"weights": "uniform"}).loss.schedule == "constant"
    assert parse({}).loss.schedule == "constant" and parse({}).drafter.fusion == "shared"
    eagle, mtp = parse({"preset": "eagle3"}), parse({"preset": "mtp", "block_size": 6}, loss={"gamma": 2.0})
    shape = eagle.drafter
    assert (shape.family, shape.num_layers, shape.num_taps, shape.block_size) == ("eagle3", 1, 3, 7)
    assert shape.anchor_drafts and math.exp(-1 / eagle.loss.gamma) == pytest.approx(0.8, abs=1e-3)
    assert (mtp.drafter.family, mtp.drafter.num_taps, mtp.drafter.block_size, mtp.loss.gamma) == ("mtp", 1, 6, 2.0)
    assert TrainConfig.parse(eagle.model_dump()) == eagle
    with pytest.raises(ConfigError, match=r"drafter\.preset: Input should be"):
        parse({"preset": ["eagle3"]})


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("drafter", {"fusion": "layerwise", "fusion_init": "whitened"}, r"not for fusion 'layerwise' \(peak, bell\)"),
        ("drafter", {"fusion_init": "bell"}, r"'bell' is not for fusion 'shared'"),
        ("drafter", {"injection": "none", "fusion_init": "whitened"}, "needs the target's features"),
        ("drafter", {"context_init": "copied"}, "needs context_projections 'separate'"),
        ("drafter", {"injection": "none", "preset": "dflare"}, "fusion 'layerwise' needs injection 'kv'"),
        ("drafter", {"order": "autoregressive"}, "drafter: order 'autoregressive' .* set anchor_drafts"),
        ("drafter", {"preset": "eagle3", "fusion": "layerwise"}, "fusion 'layerwise' is for family 'block'"),
        ("drafter", {"preset": "eagle3", "init": "target"}, "its layer reads twice the width of a target's"),
        ("drafter", {"preset": "eagle3", "num_layers": 2}, "is one layer: num_layers is 2"),
        ("drafter", {"preset": "eagle3", "mask_token_id": 3}, "'eagle3' has no masks"),
        ("drafter", {"preset": "eagle3", "anchor_drafts": False}, "set anchor_drafts"),
        ("drafter", {"preset": "mtp", "num_taps": 2}, "the target's last: 2 taps are asked for"),
        ("drafter", {"preset": "mtp", "fusion_init": "whitened"}, "which fuses no taps"),
        ("drafter", {"preset": "mtp", "layer_types": ["full_attention"]}, "layer_types is for family 'block'"),
        ("drafter", {"preset": "mtp", "sliding_window": 8}, "sliding_window is for family 'block'"),
        ("loss", {"gamma_max": 9.0}, "loss: gamma_max is where a schedule ends"),
        ("loss", {"schedule": "stairs"}, "needs a gamma_max"),
        ("loss", {"schedule": "linear", "gamma_max": 3.0}, "not below gamma=7.0"),
        ("loss", {"schedule": "linear", "gamma_max": 9.0, "weights": "uniform"}, "have no gamma"),
    ],
)
def test_recipes_that_make_no_sense(section: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        TrainConfig.parse({"target": "x", "data": {"files": ["a"]}, section: values})
    assert "\n" not in str(error.value)


def test_recipes_can_be_read() -> None:
    folder = Path(__file__).parent.parent / "recipes"
    paths = [path for path in sorted(folder.glob("*.yaml")) if not path.stem.startswith("ablation")]
    assert len(paths) >= 6
    for path in paths:
        assert load_config(TrainConfig, path).drafter.preset in path.stem
