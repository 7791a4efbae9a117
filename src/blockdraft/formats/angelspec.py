"""DFlash and DFlare as AngelSpec writes them: the same mathematics under other names, with the target's embedding.

`model_arch` tells the two apart; `num_target_layers` counts the taps, not the target's layers; there is no block size
(it is a setting of the training there), so it is written beside the rest and asked for where it is missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from blockdraft.config import ConfigError, DrafterConfig
from blockdraft.drafters.checkpoint import DFLARE, config_from_json
from blockdraft.formats.body import plain_body, refuse_foreign
from blockdraft.formats.borrowed import same_as_target
from blockdraft.formats.card import TargetCard
from blockdraft.formats.files import peek_settings, read_settings, read_tensors, renamed
from blockdraft.formats.limits import family_limits, head_limits, scale_limits, tap_limits
from blockdraft.formats.parts import Parts

NAME = "angelspec"
ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflare": "QwenDFlareDraftModel"}
NAMES = {
    "fc.weight": "context_proj.weight",
    "hidden_norm.weight": "context_norm.weight",
    "norm.weight": "final_norm.weight",
}
EMBEDDING = "embed_tokens.weight"


def matches(path: Path) -> bool:
    """Whether a folder is in this layout."""
    values = peek_settings(path) if path.is_dir() else {}
    return values.get("model_type") == "dflash"


def limits(config: DrafterConfig) -> list[str]:
    """Why the layout cannot carry a drafter."""
    reasons = family_limits(config, DFLARE if config.fusion == "layerwise" else {}) + tap_limits(config)
    reasons += head_limits(config, "") + scale_limits(config)
    if config.rope_scaling:
        reasons.append(f"rotary scaling ({config.rope_scaling.get('rope_type')}) has no place there")
    if config.attention_bias:
        reasons.append("attention_bias is true, but its projections have none")
    if "sliding_attention" in config.layer_types:
        reasons.append("sliding layers have no place there")
    if config.is_causal:
        reasons.append("is_causal is true, but its blocks see all of themselves")
    return reasons


def write(parts: Parts, card: TargetCard | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and weights of the two files; the embedding is the target's."""
    if card is None:
        raise ConfigError(f"layout '{NAME}' holds the target's embedding: name the target")
    config = parts.config
    values = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "dflash",
        "model_arch": "dflare" if config.fusion == "layerwise" else "dflash",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "block_size": config.block_size,
        "num_target_layers": len(config.tap_ids),
        "target_hidden_size": config.hidden_size,
        "target_num_hidden_layers": config.num_target_layers,
        "target_layer_ids": list(config.tap_ids),
        "mask_token_id": config.mask_token_id,
        "tie_word_embeddings": False,
        "dtype": str(parts.dtype).removeprefix("torch."),
    }
    return values, {**renamed(parts.tensors, NAMES), EMBEDDING: card.embedding().to(parts.dtype)}


def read(path: Path, card: TargetCard | None) -> Parts:
    """What a folder holds.  ConfigError: its settings cannot be used, or its embedding is not the target's."""
    where = str(path / "config.json")
    values = read_settings(path)
    refuse_foreign(values, where)
    kind = values.get("model_arch", "dflash")
    if kind not in ARCHITECTURES or values.get("fusion_type", "concat_fc") != "concat_fc":
        raise ConfigError(f"{where}: model_arch '{kind}', fusion_type '{values.get('fusion_type')}' is not supported")
    if values.get("target_hidden_size", values.get("hidden_size")) != values.get("hidden_size"):
        raise ConfigError(f"{where}: target_hidden_size is not hidden_size; the taps of such a target do not fit")
    for key in ("block_size", "target_layer_ids", "mask_token_id", "target_num_hidden_layers"):
        if values.get(key) is None:
            raise ConfigError(f"{where}: '{key}' is missing; add what the drafter was trained with")
    plain = {
        "architectures": [ARCHITECTURES[kind]],
        **plain_body(values, where),
        **{key: values[key] for key in ("block_size", "target_layer_ids", "mask_token_id")},
        "num_target_layers": values["target_num_hidden_layers"],
    }
    tensors = read_tensors(path)
    embedding = tensors.pop(EMBEDDING, None)
    if card is not None and embedding is not None:
        same_as_target(embedding, card.embedding(), EMBEDDING, path)
    back = {theirs: ours for ours, theirs in NAMES.items()}
    return Parts(config_from_json(plain, where), renamed(tensors, back), None)
