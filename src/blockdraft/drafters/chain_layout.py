"""config.json of the drafters that go token after token.

EAGLE-3's is the plain one that SGLang loads (vLLM renames its layer): Llama's fields, with the taps twice.  SGLang
reads `eagle_config`, ids of layers whose *output* is taken; vLLM reads the key of the same name at the top, ids of
layers whose *input* is.  A head of all tokens has its size written out: without one SGLang puts the target's head in
its place.  MTP modules are published inside their target's checkpoint only, so a folder of one has an
architecture of ours, and its tensors have Qwen3-Next's names.  What engines take from the command line or from the
target, a folder of ours says too: `block_size`, `num_target_layers`.
"""

from __future__ import annotations

from typing import Any

import torch

from blockdraft.config import ConfigError, DrafterConfig

CHAINS = {"LlamaForCausalLMEagle3": "eagle3", "MTPDraftModel": "mtp"}
PREFIXES = {"mtp": "mtp."}  # of tensor names

# Fields that have the same meaning in all of them: theirs -> ours.
FIELDS = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "block_size": "block_size",
    "num_target_layers": "num_target_layers",
    "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "max_position_embeddings": "max_position_embeddings",
}


def chain_to_json(config: DrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of an EAGLE-3 or MTP drafter; choices that readers default differently are written out."""
    architecture = next(name for name, family in CHAINS.items() if family == config.family)
    taps = list(config.tap_ids)
    if config.family == "eagle3":
        own = {
            "model_type": "llama",
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": taps, "use_aux_hidden_state": True},
            "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in taps],
            "norm_before_residual": config.norm_before_residual,
            "draft_vocab_size": config.num_head_rows,
        }
    else:
        own = {
            "model_type": "qwen3",
            "mtp_config": {"target_layer_ids": taps},
            "draft_vocab_size": config.draft_vocab_size,
        }
    return {
        "architectures": [architecture],
        **own,
        **{theirs: getattr(config, ours) for theirs, ours in FIELDS.items()},
        "hidden_act": "silu",
        "rope_scaling": config.rope_scaling,
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }


def chain_from_json(values: dict[str, Any], where: str) -> DrafterConfig:
    """Read it back.  Raises ConfigError for a missing key, and for layers that we do not have."""
    family = next(CHAINS[name] for name in values["architectures"] if name in CHAINS)

    def need(section: dict[str, Any], key: str) -> Any:
        if section.get(key) is None:
            raise ConfigError(f"{where}: '{key}' is missing")
        return section[key]

    if values.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{where}: hidden_act '{values['hidden_act']}' is not supported (silu)")
    if values.get("mlp_bias"):
        raise ConfigError(f"{where}: mlp_bias is not supported")
    if family == "eagle3":
        section, key = need(values, "eagle_config"), "eagle_aux_hidden_state_layer_ids"
        if section.get("use_aux_hidden_state", True) is not True:
            raise ConfigError(f"{where}: without use_aux_hidden_state it is not an EAGLE-3 drafter")
        own = {"norm_before_residual": bool(values.get("norm_before_residual"))}
    else:
        section, key, own = need(values, "mtp_config"), "target_layer_ids", {}
    return DrafterConfig.parse(
        {
            "family": family,
            "anchor_drafts": True,
            **own,
            **{ours: need(values, theirs) for theirs, ours in FIELDS.items()},
            "tap_ids": tuple(need(section, key)),
            "rope_scaling": values.get("rope_scaling"),
            "attention_bias": bool(values.get("attention_bias")),
            "draft_vocab_size": values.get("draft_vocab_size"),
        },
        where,
    )
