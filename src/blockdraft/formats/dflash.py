"""The published DFlash layout (z-lab), which SGLang and vLLM load: config.json beside model.safetensors, no prefix.

Read are all its variants: block size at the top or in `dflash_config`, rotary old or new, layer types said, implied or
left out, attention biases, scales on embeddings and logits.  The target's embedding and head are not in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from blockdraft.config import ConfigError, DrafterConfig
from blockdraft.drafters.checkpoint import SCALES, config_from_json, default_taps
from blockdraft.formats.body import body_json, merged_sections, plain_body, refuse_foreign
from blockdraft.formats.borrowed import ids_from, same_as_target, usable_ids
from blockdraft.formats.card import TargetCard
from blockdraft.formats.files import peek_settings, read_settings, read_tensors
from blockdraft.formats.limits import family_limits, head_limits, tap_limits
from blockdraft.formats.parts import Parts

NAME = "dflash"
ARCHITECTURE = "DFlashDraftModel"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
ELSEWHERE = "export --to speculators (vLLM) or gguf (llama.cpp), which can say it"


def matches(path: Path) -> bool:
    """Whether a folder is in this layout."""
    values = peek_settings(path) if path.is_dir() else {}
    return ARCHITECTURE in (values.get("architectures") or ()) and values.get("model_type") != "dflash"


def limits(config: DrafterConfig) -> list[str]:
    """Why the layout cannot carry a drafter."""
    return family_limits(config) + tap_limits(config) + head_limits(config, ELSEWHERE)


def settings(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """config.json: everything an engine would otherwise guess is said."""
    dflash: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.tap_ids),
    }
    for key in SCALES:
        if getattr(config, key) != DrafterConfig.model_fields[key].default:
            dflash[key] = getattr(config, key)
    causal = {} if config.is_causal is None else {"is_causal": config.is_causal}
    if config.is_causal is not None:
        dflash["causal"] = config.is_causal
    return {
        "architectures": [ARCHITECTURE],
        **body_json(config),
        "block_size": config.block_size,
        "dflash_config": dflash,
        "num_target_layers": config.num_target_layers,
        **causal,
        "dtype": dtype,
    }


def write(parts: Parts, card: TargetCard | None) -> tuple[dict[str, Any], dict[str, Tensor]]:  # noqa: ARG001
    """Settings and weights of the two files."""
    return settings(parts.config, str(parts.dtype).removeprefix("torch.")), parts.tensors


def read(path: Path, card: TargetCard | None) -> Parts:
    """What a folder holds.  ConfigError: its settings cannot be used."""
    where = str(path / "config.json")
    config, tensors = read_config(read_settings(path), where, card), read_tensors(path)
    if all(name.startswith("model.") for name in tensors):  # a prefix that some trainers leave
        tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
    offsets = tensors.pop("d2t", None)  # our own folders have it in this layout
    ids = None if offsets is None else ids_from(offsets)
    if card is not None:  # vLLM takes copies of the target's tables beside the rest; without it, they do not belong
        if EMBEDDING in tensors:
            same_as_target(tensors.pop(EMBEDDING), card.embedding(), EMBEDDING, path)
        if HEAD in tensors:
            kept = None if ids is None else usable_ids(ids, card.vocab_size, path)
            same_as_target(tensors.pop(HEAD), card.head_rows(kept), HEAD, path)
    return Parts(config, tensors, ids)


def read_config(values: dict[str, Any], where: str, card: TargetCard | None) -> DrafterConfig:
    """The drafter that a config.json describes; what it leaves out follows from the target."""
    merged = merged_sections(values, "dflash_config", where)
    refuse_foreign(merged, where)
    layers = merged.get("num_target_layers") or (card.num_layers if card else None)
    if layers is None:
        raise ConfigError(f"{where}: 'num_target_layers' is missing; name the target, which has it")
    if merged.get("mask_token_id") is None:
        said = f" ('mask_token' is {merged['mask_token']!r}: give its id)" if merged.get("mask_token") else ""
        raise ConfigError(f"{where}: 'mask_token_id' is missing{said}")
    body = plain_body(merged, where)
    taps = merged.get("target_layer_ids") or default_taps(layers, body["num_hidden_layers"])
    kept = ("block_size", "mask_token_id", "sample_from_anchor", "draft_vocab_size", "markov_rank")
    plain = {
        "architectures": values.get("architectures"),
        "blockdraft_config": values.get("blockdraft_config"),
        **body,
        **{key: merged.get(key) for key in kept},
        **{key: merged[key] for key in SCALES if merged.get(key) is not None},
        "num_target_layers": layers,
        "target_layer_ids": taps,
    }
    if (merged.get("final_logit_softcapping") or 0.0) <= 0.0:  # the authors' way to say that there is none
        plain.pop("final_logit_softcapping", None)
    return config_from_json(plain, where)
