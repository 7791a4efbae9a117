"""The DFlash assistant of transformers, for `generate(speculation_type="dflash")`: DFlash under two other names.

It has no vocabulary, and no word on the target's layers: both come from the target.  Its window is counted without
the row itself, and its blocks see all of themselves on every layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from blockdraft.config import ConfigError, DrafterConfig
from blockdraft.drafters.checkpoint import config_from_json
from blockdraft.formats.body import plain_body, refuse_foreign, rope_parameters
from blockdraft.formats.card import TargetCard
from blockdraft.formats.files import peek_settings, read_settings, read_tensors, renamed
from blockdraft.formats.limits import family_limits, head_limits, scale_limits, tap_limits
from blockdraft.formats.parts import Parts

NAME = "transformers"
ARCHITECTURE, MODEL_TYPE = "MuseGlimmerAssistantModel", "muse_glimmer_assistant"
NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
WIDEST = 2048  # its window where no layer slides, which then says nothing


def matches(path: Path) -> bool:
    """Whether a folder is in this layout."""
    values = peek_settings(path) if path.is_dir() else {}
    return values.get("model_type") == MODEL_TYPE


def limits(config: DrafterConfig) -> list[str]:
    """Why the layout cannot carry a drafter."""
    reasons = family_limits(config) + tap_limits(config) + head_limits(config, "") + scale_limits(config)
    if config.attention_bias:
        reasons.append("attention_bias is true, but its projections have none")
    if any(config.causal(layer) for layer in range(config.num_layers)):
        reasons.append("a layer is causal in the block; there all layers are bidirectional, sliding ones too")
    if config.sliding_window is not None and config.sliding_window < config.block_size:
        reasons.append("the window is shorter than a block, where its rows would see less of each other")
    return reasons


def write(parts: Parts, card: TargetCard | None) -> tuple[dict[str, Any], dict[str, Tensor]]:  # noqa: ARG001
    """Settings and weights of the two files."""
    config = parts.config
    values = {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "rope_parameters": rope_parameters(config),
        "max_position_embeddings": config.max_position_embeddings,
        "layer_types": list(config.layer_types or ("full_attention",) * config.num_layers),
        "sliding_window": WIDEST if config.sliding_window is None else config.sliding_window - 1,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.tap_ids),
        # Of the assistant's own, never used: the target has its own.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "dtype": str(parts.dtype).removeprefix("torch."),
    }
    return values, renamed(parts.tensors, NAMES)


def read(path: Path, card: TargetCard | None) -> Parts:
    """What a folder holds.  ConfigError: its settings cannot be used, or no target is named."""
    where = str(path / "config.json")
    values = read_settings(path)
    refuse_foreign(values, where)
    if card is None:
        raise ConfigError(f"{where}: the layout has neither vocabulary nor the target's layers: name the target")
    for key in ("block_size", "mask_token_id", "target_layer_ids", "layer_types"):
        if values.get(key) is None:
            raise ConfigError(f"{where}: '{key}' is missing")
    body = plain_body({**values, "vocab_size": card.vocab_size}, where)
    if body["layer_types"]:
        body |= {"sliding_window": body["sliding_window"] + 1, "is_causal": False}
    plain = {
        "architectures": ["DFlashDraftModel"],
        **body,
        **{key: values[key] for key in ("block_size", "mask_token_id", "target_layer_ids")},
        "num_target_layers": card.num_layers,
    }
    back = {theirs: ours for ours, theirs in NAMES.items()}
    return Parts(config_from_json(plain, where), renamed(read_tensors(path), back), None)
