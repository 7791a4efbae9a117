"""Configurations as they are published, with the tensors that go with them: read by name, no weights needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import drafter, meaning, save
from safetensors.torch import load_file, save_file

from blockdraft.config import ConfigError, DrafterConfig
from blockdraft.drafters.block import BlockModel
from blockdraft.formats import angelspec
from blockdraft.formats.dflash import read_config, settings
from blockdraft.formats.layouts import read_parts, recognise

# Qwen3-8B-DFlash-b16: an older file, with the block size at the top and rotary apart.
QWEN3_8B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# Qwen3.6-27B: a newer one, with the block size inside, rotary in one, four windowed layers and a full one.
QWEN36_27B: dict[str, Any] = {
    **{key: value for key, value in QWEN3_8B.items() if key not in ("block_size", "rope_theta", "rope_scaling")},
    "dflash_config": {"block_size": 16, "mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "num_target_layers": 64,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "sliding_window": 2048,
    "use_sliding_window": True,
    "vocab_size": 248320,
}
# gpt-oss-20b: biases on all four projections, and YaRN that is not cut to whole dimensions.
GPT_OSS: dict[str, Any] = {
    **QWEN3_8B,
    "model_type": "gpt_oss",
    "attention_bias": True,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 200000, "target_layer_ids": [1, 6, 11, 16, 21]},
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 7680,
    "layer_types": ["full_attention"] * 8,
    "max_window_layers": 8,
    "num_attention_heads": 64,
    "num_hidden_layers": 8,
    "num_target_layers": 24,
    "rms_norm_eps": 1e-05,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "vocab_size": 201088,
}  # fmt: skip
DFLARE_4B: dict[str, Any] = {
    **QWEN3_8B,
    "architectures": ["DFlareQwen3Model"],
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 7,
    "layer_types": ["full_attention"] * 7,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 5, 9, 13, 17, 21, 25, 29, 33]},
    "num_anchors": 512,  # of the training; it leaks into the published file
    "loss_decay_gamma": 7.0,
}


def read(values: dict[str, Any]) -> DrafterConfig:
    return read_config(values, "config.json", None)


def shapes(config: DrafterConfig) -> dict[str, list[int]]:
    with torch.device("meta"):
        return {name: list(value.shape) for name, value in BlockModel(config).state_dict().items()}


def test_qwen3_8b() -> None:
    config = read(QWEN3_8B)
    assert (config.block_size, config.mask_token_id, config.tap_ids) == (16, 151669, (1, 9, 17, 25, 33))
    assert (config.rope_theta, config.rope_scaling, config.max_drafts) == (1e6, None, 15)
    assert not any(config.causal(layer) for layer in range(5))
    layer = {
        "input_layernorm": [4096], "post_attention_layernorm": [4096],
        "self_attn.q_proj": [4096, 4096], "self_attn.k_proj": [1024, 4096], "self_attn.v_proj": [1024, 4096],
        "self_attn.o_proj": [4096, 4096], "self_attn.q_norm": [128], "self_attn.k_norm": [128],
        "mlp.gate_proj": [12288, 4096], "mlp.up_proj": [12288, 4096], "mlp.down_proj": [4096, 12288],
    }  # fmt: skip
    expected = {f"layers.{n}.{name}.weight": shape for n in range(5) for name, shape in layer.items()}
    expected |= {"fc.weight": [4096, 5 * 4096], "hidden_norm.weight": [4096], "norm.weight": [4096]}
    assert shapes(config) == expected
    assert sum(torch.Size(shape).numel() for shape in expected.values()) == pytest.approx(1048.6e6, rel=1e-4)


def test_qwen36_27b_windows_are_causal_and_its_full_layer_is_not() -> None:
    config = read(QWEN36_27B)
    assert (config.block_size, config.rope_theta, config.rope_scaling) == (16, 1e7, None)
    assert [config.window(layer) for layer in range(5)] == [2048] * 4 + [None]
    assert [config.causal(layer) for layer in range(5)] == [True] * 4 + [False]
    total = sum(torch.Size(shape).numel() for shape in shapes(config).values())
    assert total == pytest.approx(1730.2e6, rel=1e-4)


def test_gpt_oss_has_biases_and_yarn() -> None:
    config = read(GPT_OSS)
    held = shapes(config)
    for name, width in (("q", 4096), ("k", 512), ("v", 512), ("o", 2880)):
        assert held[f"layers.7.self_attn.{name}_proj.bias"] == [width]
    assert config.rope_scaling is not None
    assert (config.rope_scaling["factor"], config.rope_scaling["truncate"]) == (32.0, False)
    assert sum(torch.Size(shape).numel() for shape in held.values()) == pytest.approx(784.8e6, rel=1e-4)


def test_dflare_4b() -> None:
    config = read(DFLARE_4B)
    held = shapes(config)
    assert held["layer_fusion_weights"] == [7, 9] and "fc.weight" not in held
    assert held["layers.6.self_attn.k_proj_target.weight"] == [1024, 2560]
    assert sum(torch.Size(shape).numel() for shape in held.values()) == pytest.approx(743.2e6, rel=1e-4)


@pytest.mark.parametrize("values", [QWEN3_8B, QWEN36_27B, GPT_OSS])
def test_what_we_write_of_them_says_the_same(values: dict[str, Any]) -> None:
    config = read(values)
    again = settings(config, "bfloat16")
    assert read(again) == config
    for key, value in values.items():
        if key not in ("auto_map", "model_type", "dflash_config", "rope_parameters", "rope_theta", "rope_scaling"):
            assert again[key] == value, key
    assert again["dflash_config"] == {"block_size": config.block_size, **values["dflash_config"]}


VARIANTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # layer types left out: transformers' rule for Qwen3
    (
        {"layer_types": None, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
        {"layer_types": ("full_attention",) * 3 + ("sliding_attention",) * 2, "sliding_window": 64},
    ),
    # MiMo's: all layers windowed, none causal
    (
        {"dflash_config": {**QWEN3_8B["dflash_config"], "use_swa": True, "swa_window_size": 128}},
        {"layer_types": ("sliding_attention",) * 5, "sliding_window": 128, "is_causal": False},
    ),
    ({"is_causal": True}, {"is_causal": True}),
    ({"dflash_config": {**QWEN3_8B["dflash_config"], "causal": True}}, {"is_causal": True}),
    # what the authors' newer code reads for Gemma targets
    (
        {
            "dflash_config": {
                **QWEN3_8B["dflash_config"],
                "input_embedding_scale": 53.0,
                "output_multiplier": 0.5,
                "final_logit_softcapping": 30.0,
            }
        },
        {"input_embedding_scale": 53.0, "output_multiplier": 0.5, "final_logit_softcapping": 30.0},
    ),
    ({"final_logit_softcapping": 0.0}, {}),
    # taps left out: the papers' rule, one for each draft layer
    ({"dflash_config": {"mask_token_id": 151669}}, {}),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1000000, "rope_type": "default"}}}, {}),
    ({"rms_norm_eps": None, "num_key_value_heads": None}, {"num_kv_heads": 32, "rms_norm_eps": 1e-6}),
]


@pytest.mark.parametrize(("changed", "expected"), VARIANTS)
def test_other_ways_to_say_things(changed: dict[str, Any], expected: dict[str, Any]) -> None:
    assert meaning(read({**QWEN3_8B, **changed})) == meaning(read(QWEN3_8B).model_copy(update=expected))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"selector_rank": 256}, "'selector_rank' is 256: that is DFlash 2"),
    (
        {"dflash_config": {**QWEN3_8B["dflash_config"], "conv_kernel_size": 2}},
        "'conv_kernel_size' is 2: that is",
    ),
    ({"projector_type": "domino"}, "'projector_type' is 'domino': that is Domino"),
    ({"dflash_config": {**QWEN3_8B["dflash_config"], "attention_sink_bias": True}}, "attention sinks"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25 is not supported"),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [11, 11, 10]}}, "'mrope_section' is not supported"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}}, "rotary setting 'mscale' is not supported"),
    ({"rope_parameters": {"rope_theta": 10000.0}}, "rope_theta is 1000000, but 10000.0 in rope_parameters"),
    (
        {"rope_parameters": {"a": {"rope_theta": 1e6}, "b": {"rope_theta": 1e4}}},
        "rope_parameters differ between kinds of layers",
    ),
    ({"dflash_config": {**QWEN3_8B["dflash_config"], "block_size": 8}}, "'block_size' is 16, but 8 in 'dflash_config'"),
    ({"dflash_config": {"target_layer_ids": [1]}}, "'mask_token_id' is missing"),
    ({"dflash_config": {"mask_token": "<|MASK|>"}}, "'mask_token' is '<|MASK|>': give its id"),
    ({"dflash_config": {"mask_token_id": 151936, "target_layer_ids": [1]}}, "outside the vocabulary of 151936"),
    ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 36]}}, r"must lie in 0..35"),
    ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [9, 1]}}, "must be increasing"),
    ({"block_size": None}, "'block_size' is missing"),
    ({"num_target_layers": None}, "'num_target_layers' is missing; name the target"),
    ({"hidden_size": None}, "'hidden_size' is missing"),
    (
        {"layer_types": ["sliding_attention"] * 5, "sliding_window": 8},
        "layer_types has sliding layers, but use_sliding_window is false",
    ),
    ({"layer_types": ["sliding_attention"] * 5, "use_sliding_window": True}, "sliding layers need 'sliding_window'"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace("|", r"\|")):
        read({**QWEN3_8B, **changed})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("candidate_selector.predecessor_codebook", "DFlash 2"),
        ("layers.1.attention_conv.base_kernel", "DFlash 2"),
        ("prefix_gru.weight_ih_l0", "Domino"),
        ("confidence_head.proj.weight", "DSpark"),
        ("layers.0.self_attn.attention_sink_bias", "attention sinks"),
        ("mask_embedding", "a mask embedding of its own"),
        ("layers.0.self_attn.q_proj.weight_scale", "quantised weights"),
    ],
)
def test_tensors_of_other_drafters_are_known_by_name(name: str, kind: str, tmp_path: Path) -> None:
    held = load_file(save(tmp_path, "plain") / "model.safetensors")
    save_file({**held, name: torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"'{name}' does not belong here, which is {kind}"):
        read_parts(tmp_path)


def test_weights_in_several_files_and_under_a_prefix(tmp_path: Path) -> None:
    held = load_file(save(tmp_path, "plain") / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    prefixed = [(f"model.{name}", value) for name, value in held.items()]
    save_file(dict(prefixed[:9]), tmp_path / "model-00001-of-00002.safetensors")
    save_file(dict(prefixed[9:]), tmp_path / "model-00002-of-00002.safetensors")
    expected = drafter("plain")[0].state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in read_parts(tmp_path)[1].tensors.items())
    save_file(dict(prefixed[8:]), tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(ConfigError, match="is also in another file"):
        read_parts(tmp_path)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    (save(tmp_path, "plain") / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pickled weights are not read"):
        read_parts(tmp_path)


def test_angelspec_says_what_its_own_code_reads(tmp_path: Path) -> None:
    """The settings of `dflare_draft_config.json` there, whose block size is the training's."""
    values = {
        "architectures": ["DFlashDraftModel"], "model_type": "dflash", "model_arch": "dflare",
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 7, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 151936, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
        "rope_theta": 1000000.0, "num_target_layers": 9, "target_hidden_size": 4096, "target_num_hidden_layers": 36,
        "target_layer_ids": [1, 5, 9, 13, 17, 21, 25, 29, 33], "mask_token_id": 151669, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file({"embed_tokens.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    assert recognise(tmp_path).name == "angelspec"
    with pytest.raises(ConfigError, match="'block_size' is missing"):
        angelspec.read(tmp_path, None)
    (tmp_path / "config.json").write_text(json.dumps({**values, "block_size": 16}))
    config = angelspec.read(tmp_path, None).config
    assert (config.fusion, config.context_projections, config.head_dim) == ("layerwise", "separate", 128)
    assert (config.num_target_layers, len(config.tap_ids)) == (36, 9)
    (tmp_path / "config.json").write_text(json.dumps({**values, "block_size": 16, "model_arch": "dfly"}))
    with pytest.raises(ConfigError, match="model_arch 'dfly'"):
        angelspec.read(tmp_path, None)
