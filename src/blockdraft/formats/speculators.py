"""The layout of the speculators library, which vLLM loads: DFlash, and DSpark where there is a Markov head.

Layer ids are those of hidden states, one above a tap's.  The target's embedding and head rows are in the file (newer
files leave out what is exactly the target's).  A reduced head adds `d2t` [V'], target id minus draft id, and its
inverse as a mask, `t2d` [V].  DSpark's first Markov matrix has a row for every token of the target: those that the
draft head cannot say have a row of zeros here, which is what our drafter makes of them.

Letters: V vocabulary, V' rows of the draft head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.config import ConfigError, DrafterConfig
from blockdraft.drafters.checkpoint import config_from_json
from blockdraft.formats.body import body_json, plain_body, refuse_foreign
from blockdraft.formats.borrowed import (
    ids_from,
    kept_rows,
    offsets_of,
    same_as_target,
    same_tokens,
    spread_rows,
    usable_ids,
)
from blockdraft.formats.card import TargetCard
from blockdraft.formats.files import peek_settings, read_settings, read_tensors
from blockdraft.formats.limits import family_limits, scale_limits, tap_limits
from blockdraft.formats.parts import Parts

NAME = "speculators"
VERSION = "0.9.0"  # of the library whose files these are
W1, W2 = "markov_head.w1.weight", "markov_head.w2.weight"
THEIR_W1, THEIR_W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# What a body's settings are where the file, which holds differences only, does not say them.
DEFAULTS = {
    "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
}  # fmt: skip


def matches(path: Path) -> bool:
    """Whether a folder is in this layout."""
    return path.is_dir() and "speculators_model_type" in peek_settings(path)


def limits(config: DrafterConfig) -> list[str]:
    """Why the layout cannot carry a drafter."""
    reasons = family_limits(config) + tap_limits(config) + scale_limits(config)
    if any(config.causal(layer) and config.window(layer) is None for layer in range(config.num_layers)):
        reasons.append("full layers are always bidirectional in the block there; is_causal is true")
    return reasons


def write(parts: Parts, card: TargetCard | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and weights of the two files; embedding and head are the target's."""
    if card is None:
        raise ConfigError(f"layout '{NAME}' holds the target's embedding and head: name the target")
    tensors = dict(parts.tensors)
    if parts.config.markov_rank is not None:
        tensors[THEIR_W1] = spread_rows(tensors.pop(W1), parts.draft_ids, parts.config.vocab_size)
        tensors[THEIR_W2] = tensors.pop(W2)
    tensors[EMBEDDING] = card.embedding().to(parts.dtype)
    tensors[HEAD] = card.head_rows(parts.draft_ids).to(parts.dtype)
    if parts.draft_ids is not None:
        tensors["d2t"] = offsets_of(parts.draft_ids)
        tensors["t2d"] = torch.zeros(parts.config.vocab_size, dtype=torch.bool).index_fill(0, parts.draft_ids, True)
    return _settings(parts.config, card, str(parts.dtype).removeprefix("torch.")), tensors


def _settings(config: DrafterConfig, card: TargetCard, dtype: str) -> dict[str, Any]:
    kind = "dflash" if config.markov_rank is None else "dspark"
    # Of full layers alone this says nothing, and some versions of vLLM take false for "all layers are causal".
    causal = any(config.causal(layer) for layer in range(config.num_layers))
    values = {
        "architectures": ["DFlashSpeculator" if kind == "dflash" else "DSparkSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.max_drafts}],
            "verifier": {"name_or_path": card.name, "architectures": list(card.architectures)},
        },
        "transformer_layer_config": body_json(config),
        "draft_vocab_size": config.num_head_rows,
        "block_size": config.block_size,
        "target_hidden_size": config.hidden_size,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.tap_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": not causal,
        "sample_from_anchor": config.anchor_drafts,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
    if kind == "dspark":
        values |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": False,
            "confidence_head_with_markov": False,
        }
    return values


def read(path: Path, card: TargetCard | None) -> Parts:
    """What a folder holds.  ConfigError: its settings cannot be used, or its embedding or head is not the target's."""
    where = str(path / "config.json")
    values = read_settings(path)
    config = _read_config(values, where, card)
    tensors = {name: value for name, value in read_tensors(path).items() if not name.startswith("verifier_")}
    embedding, head = tensors.pop(EMBEDDING, None), tensors.pop(HEAD, None)
    offsets, mask = tensors.pop("d2t", None), tensors.pop("t2d", None)
    reduced = config.draft_vocab_size is not None
    ids = usable_ids(ids_from(offsets), config.vocab_size, path) if offsets is not None and reduced else None
    same_tokens(mask, ids, path)
    if card is not None:
        if embedding is not None:
            same_as_target(embedding, card.embedding(), EMBEDDING, path)
        if head is not None and (ids is not None or not reduced):
            same_as_target(head, card.head_rows(ids), HEAD, path)
    if THEIR_W1 in tensors and THEIR_W2 in tensors:
        tensors[W1] = kept_rows(tensors.pop(THEIR_W1), ids, THEIR_W1, path)
        tensors[W2] = tensors.pop(THEIR_W2)
    return Parts(config, tensors, ids)


def _read_config(values: dict[str, Any], where: str, card: TargetCard | None) -> DrafterConfig:
    kind = values.get("speculators_model_type")
    if kind not in ("dflash", "dspark"):
        raise ConfigError(f"{where}: speculators_model_type '{kind}' is not supported (dflash, dspark)")
    refuse_foreign(values, where)
    if values.get("enable_confidence_head", kind == "dspark"):
        raise ConfigError(f"{where}: 'enable_confidence_head' is true: confidence heads are not supported")
    rank = values.get("markov_rank", 256) if kind == "dspark" else None
    if rank and values.get("markov_head_type", "vanilla") != "vanilla":
        raise ConfigError(f"{where}: markov_head_type '{values['markov_head_type']}' is not supported (vanilla)")
    body = values.get("transformer_layer_config")
    if not isinstance(body, dict) or body.get("model_type", "qwen3") != "qwen3":
        raise ConfigError(f"{where}: 'transformer_layer_config' is missing or not that of a Qwen3 body")
    for key in ("aux_hidden_state_layer_ids", "block_size", "mask_token_id"):
        if values.get(key) is None:
            raise ConfigError(f"{where}: '{key}' is missing")
    if card is None:
        raise ConfigError(f"{where}: the layout does not say how many layers the target has: name the target")
    body = {**DEFAULTS, **body}
    if body.get("rope_theta") is None and not body.get("rope_parameters"):
        body["rope_theta"] = 10000.0
    refuse_foreign(body, where)
    causal = False if values.get("sliding_window_non_causal") else None
    plain = {
        "architectures": ["DFlashDraftModel"],
        **plain_body({**body, "is_causal": causal}, where),
        "block_size": values["block_size"],
        "mask_token_id": values["mask_token_id"],
        "num_target_layers": card.num_layers,
        "target_layer_ids": [index - 1 for index in values["aux_hidden_state_layer_ids"]],
        "sample_from_anchor": values.get("sample_from_anchor", kind == "dspark"),
        "draft_vocab_size": values.get("draft_vocab_size"),
        "markov_rank": rank or None,
    }
    if plain["draft_vocab_size"] == plain["vocab_size"]:
        plain["draft_vocab_size"] = None
    if not plain["layer_types"]:
        plain["is_causal"] = None  # of full layers it says nothing
    return config_from_json(plain, where)
