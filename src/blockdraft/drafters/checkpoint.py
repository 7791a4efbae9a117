"""The canonical folder of a drafter: config.json, model.safetensors and provenance.json.

The layout is the published one, which SGLang and vLLM load for DFlash; for DFlare it is that of its authors' code.
Tensor names carry no prefix, and the target's embedding and head are not among them.  A reduced draft head adds
`d2t` [V']: target id minus draft id; a Markov head adds its two matrices, which engines that know DFlash alone do not
read.  What is neither DFlash nor DFlare has an architecture of its own, so that nobody takes it for one of them, and
says in `blockdraft_config` what it is.  EAGLE-3 and MTP have layouts of their own: see `chain_layout`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft.config import ConfigError, DraftAxes, DrafterConfig
from blockdraft.drafters.base import Lender
from blockdraft.drafters.block import BlockDrafter
from blockdraft.drafters.chain import ChainDrafter
from blockdraft.drafters.chain_layout import CHAINS, PREFIXES, chain_from_json, chain_to_json
from blockdraft.drafters.families import as_drafter, new_model
from blockdraft.drafters.network import DraftNetwork
from blockdraft.ops.layers import draft_storage, pack_linears

# Which axes an architecture stands for; the second of DFlare's names is in its authors' checkpoints.
DFLARE = {"fusion": "layerwise", "context_projections": "separate"}
ARCHITECTURES: dict[str, dict[str, str]] = {
    "DFlashDraftModel": {},
    "QwenDFlareDraftModel": DFLARE,
    "DFlareQwen3Model": DFLARE,
}
OWN_ARCHITECTURE = "BlockDraftModel"
AXES = ("fusion", "fusion_norm", "context_projections", "injection", "order")
# What some published drafters do to embeddings and logits; written where it is not nothing.
SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")


def default_taps(num_target_layers: int, count: int) -> tuple[int, ...]:
    """The papers' rule: evenly spread from layer 1 to the third from last; one tap takes the middle layer."""
    if count == 1:
        return (num_target_layers // 2,)
    last = num_target_layers - 3
    taps = tuple(round(1 + i * (last - 1) / (count - 1)) for i in range(count))
    if len(set(taps)) != count or last < 1:
        raise ConfigError(f"a target of {num_target_layers} layers has no room for {count} distinct taps")
    return taps


def eagle_taps(num_target_layers: int) -> tuple[int, ...]:
    """EAGLE-3's three: a low, a middle and a high layer, as SpecForge takes them."""
    taps = (1, num_target_layers // 2 - 1, num_target_layers - 4)
    if list(taps) != sorted(set(taps)):
        raise ConfigError(f"a target of {num_target_layers} layers has no room for EAGLE-3's taps: set drafter.tap_ids")
    return taps


def config_to_json(config: DrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The published config.json of a drafter; every layer type and causality is written out."""
    if config.family != "block":
        return chain_to_json(config, dtype)
    axes = {axis: getattr(config, axis) for axis in AXES}
    named = (name for name, stands_for in ARCHITECTURES.items() if _axes(stands_for) == axes)
    architecture = next(named, OWN_ARCHITECTURE)
    layer_types = list(config.layer_types or ("full_attention",) * config.num_layers)
    dflash: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.tap_ids),
        "sample_from_anchor": config.anchor_drafts,
    }
    if config.is_causal is not None:
        dflash["causal"] = config.is_causal
    for key in SCALES:
        if getattr(config, key) != DrafterConfig.model_fields[key].default:
            dflash[key] = getattr(config, key)
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": dflash,
        **({"blockdraft_config": axes} if architecture == OWN_ARCHITECTURE else {}),
        "num_target_layers": config.num_target_layers,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": config.attention_bias,
        "layer_types": layer_types,
        "sliding_window": config.sliding_window,
        "use_sliding_window": "sliding_attention" in layer_types,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "markov_rank": config.markov_rank,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }


def config_from_json(values: dict[str, Any], where: str) -> DrafterConfig:
    """Read a published config.json; block size may stand at the top or in `dflash_config`.

    Raises ConfigError for a missing key, and for activations that the layers do not have.
    """
    architectures = values.get("architectures")
    if isinstance(architectures, list) and any(name in CHAINS for name in architectures):
        return chain_from_json(values, where)
    dflash = values.get("dflash_config") or {}
    merged = {**dflash, **values}

    def need(key: str) -> Any:
        if merged.get(key) is None:
            raise ConfigError(f"{where}: '{key}' is missing; is this a block drafter?")
        return merged[key]

    axes = _read_axes(values, where)
    if merged.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{where}: hidden_act '{merged['hidden_act']}' is not supported (silu)")
    layer_types = tuple(merged.get("layer_types") or ())
    # Newer files keep all of rotary in `rope_parameters`, older ones its base and its scaling apart.
    rope = merged.get("rope_parameters") or {}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return DrafterConfig.parse(
        {
            "hidden_size": need("hidden_size"),
            "num_layers": need("num_hidden_layers"),
            "num_heads": need("num_attention_heads"),
            "num_kv_heads": need("num_key_value_heads"),
            "head_dim": need("head_dim"),
            "intermediate_size": need("intermediate_size"),
            "vocab_size": need("vocab_size"),
            "block_size": need("block_size"),
            "mask_token_id": need("mask_token_id"),
            "tap_ids": tuple(need("target_layer_ids")),
            "num_target_layers": need("num_target_layers"),
            **axes,
            "rms_norm_eps": need("rms_norm_eps"),
            "rope_theta": merged["rope_theta"] if merged.get("rope_theta") is not None else rope.get("rope_theta"),
            "rope_scaling": merged.get("rope_scaling") or scaling or None,
            "max_position_embeddings": need("max_position_embeddings"),
            "attention_bias": bool(merged.get("attention_bias")),
            "layer_types": layer_types,
            "sliding_window": merged.get("sliding_window") if "sliding_attention" in layer_types else None,
            "is_causal": merged.get("is_causal", merged.get("causal")),
            "anchor_drafts": bool(merged.get("sample_from_anchor")),
            "draft_vocab_size": merged.get("draft_vocab_size"),
            "markov_rank": merged.get("markov_rank"),
            **{key: merged[key] for key in SCALES if merged.get(key) is not None},
        },
        where,
    )


def _axes(changed: dict[str, str]) -> dict[str, str]:
    """DFlash's axes, some of them changed."""
    return {axis: changed.get(axis, DraftAxes.model_fields[axis].default) for axis in AXES}


def _read_axes(values: dict[str, Any], where: str) -> dict[str, str]:
    """The axes that the architecture stands for, or that stand beside our own."""
    found = values.get("architectures") or []
    for name in found if isinstance(found, list) else [found]:
        if name in ARCHITECTURES:
            return _axes(ARCHITECTURES[name])
        if name == OWN_ARCHITECTURE:
            stated = values.get("blockdraft_config")
            if not isinstance(stated, dict) or set(stated) != set(AXES):
                raise ConfigError(f"{where}: 'blockdraft_config' of a {name} must say {', '.join(AXES)}, and no more")
            return stated
    known = ", ".join([*ARCHITECTURES, *CHAINS, OWN_ARCHITECTURE])
    raise ConfigError(f"{where}: architectures {values.get('architectures')} is not a drafter ({known})")


def save_drafter(
    folder: str | Path,
    model: DraftNetwork,
    draft_ids: Tensor | None,
    provenance: dict[str, Any],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a drafter folder: under a temporary name, then moved, so that `folder` is never half written."""
    prefix, weights = PREFIXES.get(model.config.family, ""), model.state_dict()
    tensors = {prefix + name: value.detach().to("cpu", dtype).contiguous() for name, value in weights.items()}
    if draft_ids is not None:
        tensors["d2t"] = draft_ids.cpu() - torch.arange(len(draft_ids))
        if model.lm_head is not None:
            tensors["t2d"] = said(draft_ids.cpu(), model.config.vocab_size)
    with replaced_whole(Path(folder)) as temporary:
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(config_to_json(model.config, dtype), indent=2) + "\n")
        (temporary / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")


@contextmanager
def replaced_whole(folder: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes `folder` when the block ends; nothing of it is left if that raises.

    An older one is moved aside first, and removed when the new one is in its place.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield temporary
        temporary.chmod(0o755)  # the defaults of temporary folders and of safetensors are for one user alone
        for file in temporary.iterdir():
            file.chmod(0o644)
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
            os.replace(folder, old / "folder")
            os.replace(temporary, folder)
            shutil.rmtree(old)
        else:
            os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_model(
    folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[DraftNetwork, Tensor | None]:
    """A drafter's weights and the target ids of its reduced head, if it has one.

    Raises ConfigError for anything missing, unknown or misshapen, by name.
    """
    folder = Path(folder)
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder}: no {name} here; a drafter is a folder with config.json and model.safetensors")
    try:
        values = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors", device="cpu")
    except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as error:
        raise ConfigError(f"{folder}: not readable: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{folder}: config.json holds {type(values).__name__}, not settings")
    config = whole_head(config_from_json(values, str(folder / "config.json")), "d2t" in tensors)
    draft_ids = _draft_ids(tensors.pop("d2t", None), config, folder)
    model, prefix = new_model(config), PREFIXES.get(config.family, "")
    expected = {prefix + name: tuple(value.shape) for name, value in model.state_dict().items()}
    if draft_ids is not None and model.lm_head is not None:
        expected["t2d"] = (config.vocab_size,)
    _check_tensors(tensors, expected, folder)
    if "t2d" in expected and not torch.equal(tensors.pop("t2d"), said(cast("Tensor", draft_ids), config.vocab_size)):
        raise ConfigError(f"{folder}: 't2d' and 'd2t' do not name the same tokens")
    model.load_state_dict({name.removeprefix(prefix): value for name, value in tensors.items()})
    for parameter in model.parameters():  # not the rotary frequencies: they stay in fp32
        parameter.data = parameter.data.to(dtype)
    model = model.to(device).eval().requires_grad_(False)
    return model, None if draft_ids is None else draft_ids.to(device)


def load_drafter(folder: str | Path, target: Lender, block_size: int | None = None) -> BlockDrafter | ChainDrafter:
    """A drafter ready to draft for `target`, its linear layers packed where that pays, in half precision if they can.

    `block_size`: draft smaller blocks than it was trained with; None: as large ones.
    """
    model, draft_ids = load_model(folder, target.info.dtype, target.info.device)
    pack_linears(model, draft_storage())
    return as_drafter(model, target, draft_ids, Path(folder).name, block_size)


def whole_head(config: DrafterConfig, mapped: bool) -> DrafterConfig:
    """The same settings, where a size that is said of a head with all tokens, and no map, reduces nothing."""
    if mapped or config.draft_vocab_size != config.vocab_size:
        return config
    return config.model_copy(update={"draft_vocab_size": None})


def said(draft_ids: Tensor, vocab_size: int) -> Tensor:
    """Which target ids a reduced head can say, `t2d` of EAGLE-3: bool [V]."""
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[draft_ids] = True
    return mask


def _draft_ids(offsets: Tensor | None, config: DrafterConfig, folder: Path) -> Tensor | None:
    if (offsets is None) != (config.draft_vocab_size is None):
        found = "has" if offsets is not None else "lacks"
        wanted = config.draft_vocab_size
        raise ConfigError(f"{folder}: draft_vocab_size is {wanted}, but model.safetensors {found} 'd2t'")
    if offsets is None:
        return None
    if offsets.shape != (config.draft_vocab_size,):
        raise ConfigError(f"{folder}: 'd2t' is {list(offsets.shape)}, expected [{config.draft_vocab_size}]")
    ids = offsets + torch.arange(len(offsets))
    if ids.min() < 0 or ids.max() >= config.vocab_size or len(ids.unique()) != len(ids):
        raise ConfigError(f"{folder}: 'd2t' does not map to distinct ids of a vocabulary of {config.vocab_size}")
    return ids


def _check_tensors(tensors: dict[str, Tensor], expected: dict[str, tuple[int, ...]], folder: Path) -> None:
    missing, unknown = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    for problem, names in (("lacks", missing), ("has unknown", unknown)):
        if names:
            raise ConfigError(f"{folder}: model.safetensors {problem} tensor '{min(names)}' ({len(names)} in all)")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise ConfigError(f"{folder}: tensor '{name}' is {list(tensors[name].shape)}, expected {list(shape)}")
