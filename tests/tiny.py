"""Tiny random targets, made in milliseconds, whose next token is nowhere a near tie.

Widths are multiples of 16, so that no element falls into the unvectorised tail of a CPU kernel and a row's
bits do not depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from blockdraft.targets.hf import HFTarget

VOCAB, EOS = 96, 1
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
KINDS = ("llama", "qwen3", "mistral", "qwen3-mixed")


def tiny_llama(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """Llama, four layers, all attending to everything."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **overrides})).eval()


def tiny_qwen2(seed: int = 0, **overrides: Any) -> Qwen2ForCausalLM:
    """Qwen2: biases on queries, keys and values."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, **overrides})).eval()


def tiny_qwen3(seed: int = 0, **overrides: Any) -> Qwen3ForCausalLM:
    """Qwen3: norms on queries and keys."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, **overrides})).eval()


def tiny_mistral(seed: int = 0, **overrides: Any) -> MistralForCausalLM:
    """Mistral, every layer with a window of 8 tokens."""
    torch.manual_seed(seed)
    return MistralForCausalLM(MistralConfig(**{**SHAPE, "sliding_window": 8, **overrides})).eval()


def tiny_qwen3_mixed(seed: int = 0, **overrides: Any) -> Qwen3ForCausalLM:
    """Qwen3 with full and windowed layers in turn."""
    types = ["full_attention", "sliding_attention"] * 2
    mixed = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": types}
    return tiny_qwen3(seed, **{**mixed, **overrides})


def tiny_model(kind: str = "llama", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """One of `KINDS` (or "qwen2"), as transformers makes it."""
    builders = {
        "llama": tiny_llama,
        "qwen2": tiny_qwen2,
        "qwen3": tiny_qwen3,
        "mistral": tiny_mistral,
        "qwen3-mixed": tiny_qwen3_mixed,
    }
    made: PreTrainedModel = builders[kind](seed, **overrides)
    return made


def tiny_target(kind: str = "llama", seed: int = 0, pack: bool = True, **overrides: Any) -> HFTarget:
    """The same behind the target protocol."""
    return HFTarget(tiny_model(kind, seed, **overrides), f"tiny-{kind}", pack=pack)
