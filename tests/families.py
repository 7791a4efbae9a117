"""Tiny random models of the families that the papers' drafters are made for, from transformers' own classes.

Widths and head counts are multiples of 16 wherever an elementwise kernel meets them; see `tiny`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from tiny import SHAPE
from transformers import PreTrainedModel

from blockdraft.targets.dense import DenseTarget, obstacle
from blockdraft.targets.hf import HFTarget

LAYERS, WINDOW = 2, 8
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
MROPE = {**PARTIAL, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MOE = {**EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
SHARED = {**EXPERTS, "norm_topk_prob": True, "shared_expert_intermediate_size": 32}
SINKS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": YARN,
}
DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "initializer_range": 0.1,  # wider, and transformers differs from itself by more than 1e-4
}
GEMMA = {
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
}
# Layers of two shapes; the last two read what the two before them have written; an embedding for each layer.
GEMMA4 = {
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 96,
    "final_logit_softcapping": 8.0,
    "tie_word_embeddings": True,
}
# Keys and values of different widths.
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}


@dataclass(frozen=True)
class Family:
    """What transformers calls its configuration and its model, and what is set differently from `tiny.SHAPE`."""

    config: str
    model: str
    overrides: dict[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "llama-3.1": Family("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM"),
    "mistral": Family("MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}),
    "qwen3-moe": Family("Qwen3MoeConfig", "Qwen3MoeForCausalLM", MOE),
    "gpt-oss": Family("GptOssConfig", "GptOssForCausalLM", SINKS),
    "gemma": Family("GemmaConfig", "GemmaForCausalLM", {"tie_word_embeddings": True}),
    "gemma2": Family("Gemma2Config", "Gemma2ForCausalLM", {**GEMMA, **CAPS}),
    "gemma3": Family("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA),
    "qwen3.5": Family("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**DELTA, "rope_parameters": MROPE}),
    "qwen3.5-moe": Family(
        "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**DELTA, **SHARED, "rope_parameters": MROPE}
    ),
    "qwen3-next": Family(
        "Qwen3NextConfig", "Qwen3NextForCausalLM", {**DELTA, **MOE, **SHARED, "rope_parameters": PARTIAL}
    ),
}

# Served too, but with numbers compared only; of some, the bits of a row do depend on what is beside it.
OTHERS: dict[str, Family] = {
    "gemma4": Family("Gemma4TextConfig", "Gemma4ForCausalLM", GEMMA4),
    "deepseek-v3": Family("DeepseekV3Config", "DeepseekV3ForCausalLM", LATENT),
    "mixtral": Family("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo3": Family("Olmo3Config", "Olmo3ForCausalLM", {"sliding_window": WINDOW, "layer_types": GEMMA["layer_types"]}),
    "cohere2": Family(
        "Cohere2Config", "Cohere2ForCausalLM", {"sliding_window": WINDOW, "layer_types": GEMMA["layer_types"]}
    ),
}


def tiny_family(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model of one of `FAMILIES` or `OTHERS`, with vectors (norms, biases, sinks, gates) that are not all alike."""
    family = {**FAMILIES, **OTHERS}[name]
    torch.manual_seed(seed)
    config = getattr(transformers, family.config)(
        **{**SHAPE, "num_hidden_layers": LAYERS, **family.overrides, **overrides}
    )
    model: PreTrainedModel = getattr(transformers, family.model)(config).eval()
    generator = torch.Generator().manual_seed(5)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def served(model: PreTrainedModel, name: str) -> HFTarget | DenseTarget:
    """What loading a folder of this model gives."""
    return (DenseTarget if obstacle(model) is None else HFTarget)(model, name)
