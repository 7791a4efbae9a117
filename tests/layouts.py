"""Drafters of every kind for a tiny target, and the folder of that target, for tests of foreign layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from models import save_tiny_target

from blockdraft.config import DrafterConfig
from blockdraft.drafters.block import BlockModel
from blockdraft.drafters.checkpoint import save_drafter
from blockdraft.formats.card import TargetCard, read_card

VOCAB, MASK = 272, 4
IDS = torch.cat([torch.tensor([0, 1, 3, 5]), torch.arange(10, 241, 7)])  # 37 tokens that a reduced head can say
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SLIDING = ("sliding_attention", "sliding_attention")
DFLARE = {"fusion": "layerwise", "context_projections": "separate"}
# Every kind of drafter that a layout may or may not carry.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windowed": {"layer_types": SLIDING, "sliding_window": 6, "is_causal": False},
    "sliding": {"layer_types": SLIDING, "sliding_window": 6},
    "mixed": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6},
    "causal": {"is_causal": True},
    "bias": {"attention_bias": True},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "yarn": {"rope_scaling": YARN},
    "yarn-whole": {"rope_scaling": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}},
    "llama3": {"rope_scaling": {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    "scaled": {"input_embedding_scale": 5.5, "output_multiplier": 0.5, "final_logit_softcapping": 30.0},
    "anchor": {"anchor_drafts": True},
    "reduced": {"draft_vocab_size": len(IDS)},
    "markov": {"markov_rank": 3},
    "dspark": {"markov_rank": 3, "anchor_drafts": True, "draft_vocab_size": len(IDS)},
    "dflare": DFLARE,
    "dflare-yarn": {**DFLARE, "rope_scaling": YARN},
    "dflare-norms": {**DFLARE, "fusion_norm": "layerwise"},
    "token-by-token": {"order": "autoregressive", "anchor_drafts": True},
    "input": {"injection": "input"},
}


def drafter_config(kind: str = "plain", **changes: Any) -> DrafterConfig:
    values = dict(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=48,
        vocab_size=VOCAB,
        block_size=5,
        mask_token_id=MASK,
        tap_ids=(0, 1, 2),
        num_target_layers=4,
        rms_norm_eps=1e-6,
        rope_theta=12345.0,
        max_position_embeddings=512,
    )
    return DrafterConfig(**{**values, **KINDS[kind], **changes})


def drafter(kind: str = "plain", seed: int = 0, **changes: Any) -> tuple[BlockModel, torch.Tensor | None]:
    """A drafter in which every number is another one, norms and biases too, and which looks at single tokens."""
    model = BlockModel(drafter_config(kind, **changes))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(0.0, 0.3, generator=generator)
        if "norm" in name:
            parameter.data += 3.0 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
    return model.eval(), IDS if model.config.draft_vocab_size else None


def save(folder: Path, kind: str = "plain", dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """The same in our own folder."""
    model, ids = drafter(kind, **changes)
    save_drafter(folder, model, ids, {}, dtype)
    return folder


def tiny_target(folder: Path) -> TargetCard:
    """The tiny target's folder, with a GGUF file in it that has its tokenizer (and nothing else)."""
    save_tiny_target(folder)
    write_tokenizer(folder / "tiny.gguf")
    return read_card(str(folder))


def write_tokenizer(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"token {index}" for index in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["a b", "b c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_mask_token_id(99)  # the target's own, if it has one, is not the drafter's
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}")
    writer.add_block_count(4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def meaning(config: DrafterConfig) -> dict[str, Any]:
    """Settings by what they do: layer types written out, causality said layer by layer."""
    values = config.model_dump()
    values["layer_types"] = config.layer_types or ("full_attention",) * config.num_layers
    values["is_causal"] = [config.causal(layer) for layer in range(config.num_layers)]
    return values
