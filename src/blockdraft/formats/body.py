"""The settings of a Qwen3- or Llama-style body, which layouts share: rotary, attention types, shape.

Read, they are made plain (one spelling for each thing, nothing left unsaid) for `drafters.checkpoint`; what cannot be
said there is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockdraft.config import ConfigError, DrafterConfig

SHAPE = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
# Rotary settings that mean something here; the first line holds for every type.
ROPE_KEYS = {
    "rope_type",
    "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor",
    "beta_fast", "beta_slow", "attention_factor", "truncate",
}  # fmt: skip
# Settings of other drafters, or of parts that this one lacks; the value that means "not there" is always allowed.
FOREIGN = {
    "selector_rank": "DFlash 2",
    "selector_top_k": "DFlash 2",
    "conv_kernel_size": "DFlash 2",
    "conv_group_size": "DFlash 2",
    "projector_type": "Domino",
    "attention_sink_bias": "attention sinks",
    "add_swa_attention_sink_bias": "attention sinks",
    "attention_value_scale": "scaled values",
    "logit_scale": "scaled logits",
    "quantization_config": "quantised weights",
    "mlp_bias": "biases in the MLP",
}


def refuse_foreign(values: Mapping[str, Any], where: str) -> None:
    """ConfigError, by name, for settings of something that this drafter is not."""
    for key, kind in FOREIGN.items():
        if values.get(key) not in (None, False) and (key, values[key]) != ("logit_scale", 1.0):
            raise ConfigError(f"{where}: '{key}' is {values[key]!r}: that is {kind}, which is not supported")
    if values.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{where}: hidden_act '{values['hidden_act']}' is not supported (silu)")
    for key in ("rope_is_neox_style", "is_neox_style"):
        if values.get(key) is False:
            raise ConfigError(f"{where}: {key} is false: rotary pairs of neighbours are not supported")


def merged_sections(values: Mapping[str, Any], section: str, where: str) -> dict[str, Any]:
    """A section's settings and those beside it, as one.  ConfigError: both say the same thing differently."""
    inner = values.get(section) or {}
    if not isinstance(inner, dict):
        raise ConfigError(f"{where}: '{section}' holds {type(inner).__name__}, not settings")
    merged = {key: value for key, value in values.items() if key != section}
    for key, value in inner.items():
        beside = merged.get(key)
        if None not in (beside, value) and beside != value:
            raise ConfigError(f"{where}: '{key}' is {beside!r}, but {value!r} in '{section}'")
        merged[key] = beside if value is None else value
    return merged


def plain_body(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Shape, rotary and attention of a Qwen3-style configuration, as `config_from_json` takes them."""
    plain = {key: values[key] for key in SHAPE if values.get(key) is not None}
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
        if key not in plain:
            raise ConfigError(f"{where}: '{key}' is missing")
    # What transformers takes for these where a file does not say them.
    plain.setdefault("num_key_value_heads", plain["num_attention_heads"])
    plain.setdefault("head_dim", plain["hidden_size"] // plain["num_attention_heads"])
    plain.setdefault("rms_norm_eps", 1e-6)
    plain.setdefault("max_position_embeddings", 32768)
    theta, scaling = _rope(values, where)
    return {
        **plain,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "attention_bias": bool(values.get("attention_bias")),
        **_attention(values, plain["num_hidden_layers"], where),
    }


def body_json(config: DrafterConfig) -> dict[str, Any]:
    """The same settings written out in full, rotary in both of its spellings."""
    layer_types = list(config.layer_types or ("full_attention",) * config.num_layers)
    sliding = "sliding_attention" in layer_types
    return {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "rope_parameters": rope_parameters(config),
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "layer_types": layer_types,
        "sliding_window": config.sliding_window if sliding else None,
        "use_sliding_window": sliding,
        "max_window_layers": config.num_layers,
        "tie_word_embeddings": False,
    }


def llama_json(config: DrafterConfig) -> dict[str, Any]:
    """The same of one of Llama's layers, which has neither windows nor norms of its heads."""
    values = body_json(config)
    for key in ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"):
        del values[key]
    return {**values, "model_type": "llama", "mlp_bias": False}


def rope_parameters(config: DrafterConfig) -> dict[str, Any]:
    """Rotary as newer files have it: base, type and scaling in one."""
    scaling = dict(config.rope_scaling or {})
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    return {"rope_theta": config.rope_theta, "rope_type": kind, **scaling}


def _rope(values: Mapping[str, Any], where: str) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from `rope_parameters` or from `rope_theta` and `rope_scaling`."""
    newer, older = dict(values.get("rope_parameters") or {}), dict(values.get("rope_scaling") or {})
    if newer and all(isinstance(one, dict) for one in newer.values()):  # one for each kind of layer
        first = dict(next(iter(newer.values())))
        if any(one != first for one in newer.values()):
            raise ConfigError(f"{where}: rope_parameters differ between kinds of layers; one rotary is supported")
        newer = first
    theta = newer.pop("rope_theta", None)
    if None not in (theta, values.get("rope_theta")) and theta != values["rope_theta"]:
        raise ConfigError(f"{where}: rope_theta is {values['rope_theta']}, but {theta} in rope_parameters")
    theta = values.get("rope_theta") if theta is None else theta
    if theta is None:
        raise ConfigError(f"{where}: 'rope_theta' is missing")
    newer, older = _scaling(newer, where), _scaling(older, where)
    if newer and older and newer != older:
        raise ConfigError(f"{where}: rope_scaling and rope_parameters say different things")
    if values.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ConfigError(f"{where}: partial_rotary_factor {values['partial_rotary_factor']} is not supported")
    return float(theta), newer or older or None


def _scaling(scaling: dict[str, Any], where: str) -> dict[str, Any]:
    """Scaling with its type under one name and nothing unsaid; nothing at all where it does nothing."""
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if scaling.pop("partial_rotary_factor", None) not in (None, 1, 1.0):
        raise ConfigError(f"{where}: rotary of a part of each head (partial_rotary_factor) is not supported")
    if kind == "default":
        scaling.pop("factor", None)
    scaling = {key: value for key, value in scaling.items() if value is not None}
    for key in scaling:
        if key not in ROPE_KEYS:
            raise ConfigError(f"{where}: rotary setting '{key}' is not supported")
    return {} if kind == "default" else {"rope_type": kind, **scaling}


def _attention(values: Mapping[str, Any], layers: int, where: str) -> dict[str, Any]:
    """Layer types, window and causality in the block, with every published way to say them made one.

    `use_swa` with `swa_window_size` is MiMo's: every layer windowed, none causal.  Without `layer_types`,
    `use_sliding_window` means the layers from `max_window_layers` on, as in transformers.
    """
    types = list(values.get("layer_types") or ())
    window = values.get("sliding_window")
    causal = values.get("causal") if values.get("is_causal") is None else values["is_causal"]
    if values.get("use_swa") and "sliding_attention" not in types:
        types, window = ["sliding_attention"] * layers, values.get("swa_window_size", window)
        causal = False if causal is None else causal
    elif not types and values.get("use_sliding_window") and window is not None:
        first = values.get("max_window_layers", 28)
        types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    elif "sliding_attention" in types and values.get("use_sliding_window") is False:
        raise ConfigError(f"{where}: layer_types has sliding layers, but use_sliding_window is false: say which holds")
    sliding = "sliding_attention" in types
    if sliding and window is None:
        raise ConfigError(f"{where}: sliding layers need 'sliding_window'")
    return {
        "layer_types": types if sliding else [],
        "sliding_window": window if sliding else None,
        "use_sliding_window": sliding,
        "is_causal": causal,
    }
