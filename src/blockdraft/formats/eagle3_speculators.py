"""EAGLE-3 in the layout of the speculators library, which vLLM loads.

The layer is `layers.0` there, layer ids are those of hidden states, one above a tap's, and the target's embedding is in
the file.  A file always says `norm_before_residual`, because those who read one without it do not agree on what it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from blockdraft.config import ConfigError, DrafterConfig
from blockdraft.formats import eagle3
from blockdraft.formats.body import llama_json
from blockdraft.formats.card import TargetCard
from blockdraft.formats.eagle3 import EMBEDDING, IDS, chain_config, read_weights, refuse_variants, written_map
from blockdraft.formats.files import peek_settings, read_settings, read_tensors
from blockdraft.formats.parts import Parts
from blockdraft.formats.speculators import VERSION

NAME = "eagle3-speculators"
OURS, THEIRS = "midlayer.", "layers.0."
# What a body's settings are where the file, which holds differences only, does not say them: Llama's.
DEFAULTS = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 32000,
}  # fmt: skip

limits = eagle3.limits


def matches(path: Path) -> bool:
    """Whether a folder is in this layout; P-EAGLE's are taken for it, to be refused by name."""
    return path.is_dir() and peek_settings(path).get("speculators_model_type") in ("eagle3", "peagle")


def write(parts: Parts, card: TargetCard | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and weights of the two files; the embedding is the target's."""
    if card is None:
        raise ConfigError(f"layout '{NAME}' holds the target's embedding: name the target")
    tensors = _renamed(parts.tensors, OURS, THEIRS)
    tensors[EMBEDDING] = card.embedding().to(parts.dtype)
    return _settings(parts.config, card, str(parts.dtype).removeprefix("torch.")), {**tensors, **written_map(parts)}


def _settings(config: DrafterConfig, card: TargetCard, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.max_drafts}],
            "verifier": {"name_or_path": card.name, "architectures": list(card.architectures)},
        },
        "transformer_layer_config": llama_json(config),
        "draft_vocab_size": config.num_head_rows,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        IDS: [tap + 1 for tap in config.tap_ids],
        "embed_requires_grad": False,
        "target_hidden_size": config.hidden_size,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def read(path: Path, card: TargetCard | None) -> Parts:
    """What a folder holds.  ConfigError: its settings cannot be used, or its embedding is not the target's."""
    config = _read_config(read_settings(path), str(path / "config.json"), card)
    tensors = {name: value for name, value in read_tensors(path).items() if not name.startswith("verifier_")}
    return read_weights(config, _renamed(tensors, THEIRS, OURS), path, card)


def _read_config(values: dict[str, Any], where: str, card: TargetCard | None) -> DrafterConfig:
    if values["speculators_model_type"] != "eagle3":
        raise ConfigError(f"{where}: speculators_model_type 'peagle' is P-EAGLE, which is not supported")
    body = values.get("transformer_layer_config")
    if not isinstance(body, dict) or body.get("model_type", "llama") != "llama":
        found = body.get("model_type") if isinstance(body, dict) else "missing"
        raise ConfigError(f"{where}: 'transformer_layer_config' is not that of a Llama layer, but {found}")
    body = {**DEFAULTS, **body}
    refuse_variants({**body, **values, "hidden_size": body["hidden_size"]}, where)
    if values.get("norm_before_residual") is None:
        raise ConfigError(
            f"{where}: 'norm_before_residual' is missing: vLLM takes true for it, others false; say which"
        )
    if card is None:
        raise ConfigError(f"{where}: the layout does not say how many layers the target has: name the target")
    proposals = (values.get("speculators_config") or {}).get("proposal_methods") or [{}]
    taps = [index - 1 for index in values.get(IDS) or ()]
    return chain_config(
        {**body, "draft_vocab_size": values.get("draft_vocab_size")},
        taps,
        proposals[0].get("speculative_tokens"),
        values["norm_before_residual"],
        where,
        card,
    )


def _renamed(tensors: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {(new + name.removeprefix(old) if name.startswith(old) else name): value for name, value in tensors.items()}
