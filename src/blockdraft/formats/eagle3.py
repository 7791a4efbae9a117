"""EAGLE-3 in its published layout, which SGLang and vLLM load, and which is also ours: `drafters.chain_layout`.

A published file says less than ours.  Which layers are tapped may be left to the engines (2, half of the target's and
the third from last, counted as the layers that *read* what is tapped); how many layers the target has, and how long a
chain is drafted, always is: the former is the target's to say, the latter is `CHAIN` here and changes no weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.config import ConfigError, DrafterConfig
from blockdraft.drafters.chain_layout import chain_from_json, chain_to_json
from blockdraft.drafters.checkpoint import eagle_taps, said, whole_head
from blockdraft.formats.body import plain_body, refuse_foreign, rope_parameters
from blockdraft.formats.borrowed import ids_from, offsets_of, same_as_target, same_tokens
from blockdraft.formats.card import TargetCard
from blockdraft.formats.files import peek_settings, read_settings, read_tensors
from blockdraft.formats.limits import scale_limits, tap_limits
from blockdraft.formats.parts import Parts

NAME = "eagle3"
ARCHITECTURE = "LlamaForCausalLMEagle3"
IDS = "eagle_aux_hidden_state_layer_ids"
CHAIN = 7  # steps that EAGLE-3 is trained with (arXiv 2503.01840); drafts of a chain where a file does not say
EMBEDDING = "embed_tokens.weight"
# What Llama's settings are where a file does not say them.
DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
# Settings of drafters that are like EAGLE-3; the values that mean "not there" are always allowed.
VARIANTS = {
    "fc_norm": "EAGLE-3.1 (norms before fc)",
    "norm_before_fc": "EAGLE-3.1 (a norm before fc)",
    "norm_output": "EAGLE-3.1 (normed output fed back)",
    "return_hidden_post_norm": "EAGLE-3.1 (normed output fed back)",
    "pard_token": "P-EAGLE",
    "mask_token_id": "P-EAGLE",
    "mask_hidden": "P-EAGLE",
    "parallel_draft_step": "P-EAGLE",
    "bias": "a bias in fc",
    "qkv_bias": "biases of queries, keys and values alone",
}


def matches(path: Path) -> bool:
    """Whether a folder is in this layout."""
    values = peek_settings(path) if path.is_dir() else {}
    return ARCHITECTURE in (values.get("architectures") or ())


def limits(config: DrafterConfig) -> list[str]:
    """Why an EAGLE-3 layout, this one or that of speculators, cannot carry a drafter."""
    reasons = tap_limits(config) + scale_limits(config)
    if len(config.tap_ids) != 3:
        reasons.append(f"it has {len(config.tap_ids)} taps, and engines give an EAGLE-3 drafter three")
    return reasons


def write(parts: Parts, card: TargetCard | None) -> tuple[dict[str, Any], dict[str, Tensor]]:  # noqa: ARG001
    """Settings and weights of the two files."""
    values = {**chain_to_json(parts.config, parts.dtype), "rope_parameters": rope_parameters(parts.config)}
    return values, {**parts.tensors, **written_map(parts)}


def written_map(parts: Parts) -> dict[str, Tensor]:
    """The maps of a reduced head: `d2t` [V'], target id minus draft id, and `t2d` [V], which tokens it can say."""
    if parts.draft_ids is None:
        return {}
    return {"d2t": offsets_of(parts.draft_ids), "t2d": said(parts.draft_ids, parts.config.vocab_size)}


def read(path: Path, card: TargetCard | None) -> Parts:
    """What a folder holds.  ConfigError: its settings cannot be used, or its embedding is not the target's."""
    config = read_config(read_settings(path), str(path / "config.json"), card)
    return read_weights(config, read_tensors(path), path, card)


def read_config(values: dict[str, Any], where: str, card: TargetCard | None) -> DrafterConfig:
    """The drafter that a config.json describes; what it leaves out is the engines' rule, the target's, or `CHAIN`."""
    section = values.get("eagle_config") or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{where}: 'eagle_config' holds {type(section).__name__}, not settings")
    if not section.get("use_aux_hidden_state", True):
        raise ConfigError(f"{where}: 'use_aux_hidden_state' is false: that is EAGLE-1, which is not supported")
    refuse_variants({**section, **values}, where)
    outputs, inputs = section.get(IDS), values.get(IDS)
    if outputs and inputs and [index + 1 for index in outputs] != list(inputs):
        raise ConfigError(f"{where}: '{IDS}' is {inputs}, which is not one above the {outputs} of 'eagle_config'")
    taps = outputs or [index - 1 for index in inputs or ()]
    return chain_config(values, taps, values.get("block_size"), values.get("norm_before_residual", False), where, card)


def refuse_variants(values: dict[str, Any], where: str) -> None:
    """ConfigError, by name, for settings of something that is like EAGLE-3 but is not."""
    for key, kind in VARIANTS.items():
        if values.get(key) is not None and values[key] is not False:  # 0 is a token
            raise ConfigError(f"{where}: '{key}' is {values[key]!r}: that is {kind}, which is not supported")
    width, theirs = values.get("hidden_size"), values.get("target_hidden_size")
    if None not in (width, theirs) and width != theirs:
        raise ConfigError(
            f"{where}: hidden_size is {width}, target_hidden_size {theirs}: only equal ones are supported"
        )


def chain_config(
    values: dict[str, Any],
    taps: list[int],
    drafts: int | None,
    normed: bool,
    where: str,
    card: TargetCard | None,
) -> DrafterConfig:
    """A drafter of one of Llama's layers, from its settings; no `taps` and no `drafts` mean the usual ones."""
    refuse_foreign(values, where)
    said_values = {key: value for key, value in values.items() if value is not None}
    if "rope_theta" not in said_values and not values.get("rope_parameters"):
        said_values["rope_theta"] = 10000.0
    body = plain_body({**DEFAULTS, **said_values}, where)
    if body["layer_types"]:
        raise ConfigError(f"{where}: sliding layers are not supported in an EAGLE-3 drafter")
    if body.pop("is_causal") is False:
        raise ConfigError(f"{where}: is_causal is false, but a chain sees only what is before it")
    layers = values.get("num_target_layers") or (card.num_layers if card else None)
    if layers is None:
        raise ConfigError(f"{where}: the layout does not say how many layers the target has: name the target")
    if not taps:
        try:
            taps = list(eagle_taps(layers))
        except ConfigError:
            raise ConfigError(
                f"{where}: '{IDS}' is missing, and {layers} layers are too few for the usual ones"
            ) from None
    plain = {
        "architectures": [ARCHITECTURE],
        **body,
        "num_target_layers": layers,
        "block_size": CHAIN if drafts is None else drafts,
        "eagle_config": {IDS: taps},
        "norm_before_residual": normed,
        "draft_vocab_size": values.get("draft_vocab_size"),
    }
    return chain_from_json(plain, where)


def usual_taps(config: DrafterConfig) -> bool:
    """Whether a drafter's taps are those that engines take where a file says none."""
    try:
        return config.tap_ids == eagle_taps(config.num_target_layers)
    except ConfigError:  # too few layers for them
        return False


def read_weights(config: DrafterConfig, tensors: dict[str, Tensor], path: Path, card: TargetCard | None) -> Parts:
    """Weights and draft ids of a file whose embedding, if it has one, must be the target's own."""
    offsets, mask, embedding = (tensors.pop(name, None) for name in ("d2t", "t2d", EMBEDDING))
    ids = None if offsets is None else ids_from(offsets.to(torch.long))
    same_tokens(mask, ids, path)
    if embedding is not None:
        if card is None:
            raise ConfigError(f"{path}: '{EMBEDDING}' has to be the target's own: name the target")
        same_as_target(embedding, card.embedding(), EMBEDDING, path)
    return Parts(whole_head(config, ids is not None), tensors, ids)
