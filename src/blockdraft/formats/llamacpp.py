"""A GGUF file of architecture `dflash`, which llama.cpp loads as a draft model beside the target.

Layer ids are one above a tap's.  The tokenizer's keys are copied from the target's own GGUF: llama.cpp compares the
two, and reads the mask token there.  With a Markov head it is DSpark: the head has a row for every token of the target
(zeros for what the draft head cannot say), and llama.cpp wants a confidence head beside it, which is zeros, said not
to be there.  A reduced head brings its own rows of the target's head and `d2t` [V'], target ids.

Vectors are always F32.  Letters: V' rows of a reduced draft head, D hidden width.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from blockdraft.config import ConfigError, DrafterConfig
from blockdraft.drafters.checkpoint import config_from_json
from blockdraft.formats.borrowed import kept_rows, same_as_target, spread_rows, usable_ids
from blockdraft.formats.card import TargetCard
from blockdraft.formats.limits import family_limits, scale_limits, tap_limits
from blockdraft.formats.parts import Parts

if TYPE_CHECKING:
    from gguf import GGUFReader, GGUFWriter

NAME, ARCHITECTURE = "gguf", "dflash"
W1, W2 = "markov_head.w1.weight", "markov_head.w2.weight"
NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    W1: "markov_w1.weight",
    W2: "markov_w2.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
HEAD, MAP, CONFIDENCE = "output.weight", "d2t", "conf_proj.weight"
MASK_KEY = "tokenizer.ggml.mask_token_id"


def matches(path: Path) -> bool:
    """Whether a file is a GGUF file."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(4) == b"GGUF"


def limits(config: DrafterConfig) -> list[str]:
    """Why the file cannot carry a drafter."""
    reasons = family_limits(config) + tap_limits(config) + scale_limits(config)
    if config.anchor_drafts and config.markov_rank is None:
        reasons.append("anchor_drafts is true: llama.cpp drafts from the anchor's row only beside a Markov head")
    if config.attention_bias:
        reasons.append("attention_bias is true, but llama.cpp's projections have none")
    if len({config.causal(layer) for layer in range(config.num_layers)}) > 1:
        reasons.append("some layers are causal in the block and some are not; there is one switch for all of them")
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "yarn"):
        reasons.append(f"rotary scaling '{kind}' has no keys there (linear, yarn)")
    if scaling.get("attention_factor") is not None or scaling.get("truncate") is False:
        reasons.append("YaRN has no keys there for attention_factor, nor for truncate: false")
    return reasons


def save(parts: Parts, card: TargetCard | None, path: Path) -> None:
    """Write the file.  ConfigError: the target's own GGUF is not known, which has the tokenizer."""
    gguf = _gguf()
    if card is None or card.gguf is None:
        name = "the target" if card is None else f"'{card.spec}'"
        raise ConfigError(
            f"layout '{NAME}' needs the tokenizer of {name} from its GGUF file: give that file as --target "
            "(llama.cpp's convert_hf_to_gguf.py makes one)"
        )
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    _write_settings(writer, parts.config, parts.dtype)
    _copy_tokenizer(writer, gguf.GGUFReader(card.gguf), parts.config, card)
    for name, value in _foreign(parts, card).items():
        _add(writer, name, value, parts.dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise ConfigError(f"layout '{NAME}' needs another package: pip install gguf") from None
    return gguf


def _write_settings(writer: GGUFWriter, config: DrafterConfig, dtype: torch.dtype) -> None:
    gguf = _gguf()
    kinds = {
        torch.float32: gguf.LlamaFileType.ALL_F32,
        torch.float16: gguf.LlamaFileType.MOSTLY_F16,
        torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16,
    }
    writer.add_file_type(kinds[dtype])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_uint32(f"{ARCHITECTURE}.block_size", config.block_size)
    writer.add_array(f"{ARCHITECTURE}.target_layers", [tap + 1 for tap in config.tap_ids])
    writer.add_bool(f"{ARCHITECTURE}.sample_from_anchor", config.anchor_drafts)
    writer.add_causal_attention(config.causal(0))
    if config.markov_rank is not None:
        writer.add_bool(f"{ARCHITECTURE}.has_confidence_head", False)
    if config.layer_types and config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    scaling = config.rope_scaling or {}
    if scaling:
        kind = gguf.RopeScalingType.YARN if scaling["rope_type"] == "yarn" else gguf.RopeScalingType.LINEAR
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(float(scaling["factor"]))
    if scaling.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(int(scaling["original_max_position_embeddings"]))
        if "beta_fast" in scaling:
            writer.add_rope_scaling_yarn_beta_fast(float(scaling["beta_fast"]))
        if "beta_slow" in scaling:
            writer.add_rope_scaling_yarn_beta_slow(float(scaling["beta_slow"]))


def _copy_tokenizer(writer: GGUFWriter, target: GGUFReader, config: DrafterConfig, card: TargetCard) -> None:
    """Every key of the target's tokenizer; the mask token is the drafter's."""
    fields = {name: field for name, field in target.fields.items() if name.startswith("tokenizer.")}
    tokens = fields.get("tokenizer.ggml.tokens")
    if tokens is None:
        raise ConfigError(f"{card.gguf}: has no tokenizer (tokenizer.ggml.tokens)")
    assert config.mask_token_id is not None, "block drafters have one, and no other is written"
    if config.mask_token_id >= len(tokens.data):
        raise ConfigError(f"{card.gguf}: has {len(tokens.data)} tokens, and no mask token {config.mask_token_id}")
    for name, field in fields.items():
        if name != MASK_KEY:
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    writer.add_mask_token_id(config.mask_token_id)


def _names(config: DrafterConfig) -> dict[str, str]:
    """Our name of every tensor that both have -> the file's."""
    names = dict(NAMES)
    for layer in range(config.num_layers):
        names |= {f"layers.{layer}.{a}.weight": f"blk.{layer}.{b}.weight" for a, b in LAYER_NAMES.items()}
    return names


def _foreign(parts: Parts, card: TargetCard) -> dict[str, Tensor]:
    """All tensors of the file, by its names."""
    config, names = parts.config, _names(parts.config)
    tensors = {names[name]: value for name, value in parts.tensors.items()}
    if config.markov_rank is not None:
        tensors[NAMES[W1]] = spread_rows(tensors[NAMES[W1]], parts.draft_ids, config.vocab_size)
        tensors[CONFIDENCE] = torch.zeros(1, config.hidden_size + config.markov_rank)
    if parts.draft_ids is not None:
        tensors[HEAD] = card.head_rows(parts.draft_ids)
        tensors[MAP] = parts.draft_ids
    return tensors


def _add(writer: GGUFWriter, name: str, value: Tensor, dtype: torch.dtype) -> None:
    """One tensor: whole numbers as they are, vectors in F32, matrices in the file's format."""
    gguf = _gguf()
    if not value.is_floating_point():
        writer.add_tensor(name, value.numpy(), raw_dtype=gguf.GGMLQuantizationType.I64)
    elif value.dim() == 1 or value.shape[0] == 1:
        writer.add_tensor(name, value.float().numpy())
    elif dtype == torch.bfloat16:
        bits = value.to(dtype).contiguous().view(torch.int16).numpy().view(np.uint16)
        writer.add_tensor(name, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, value.to(dtype).contiguous().numpy())


def read(path: Path, card: TargetCard | None) -> Parts:
    """What a file holds.  ConfigError: it is another's, its settings cannot be used, or no target is named."""
    try:
        reader = _gguf().GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"{path}: not readable as GGUF: {error}") from None
    fields = {name: field for name, field in reader.fields.items() if name == MASK_KEY or "tokenizer" not in name}
    values = {name: field.contents() for name, field in fields.items()}
    found = values.get("general.architecture")
    if found != ARCHITECTURE:
        raise ConfigError(f"{path}: architecture '{found}' is not a drafter ({ARCHITECTURE})")
    if card is None:
        raise ConfigError(f"{path}: the file does not say how many layers the target has: name the target")
    tensors = {tensor.name: _tensor(tensor, path) for tensor in reader.tensors}
    ids, head = tensors.pop(MAP, None), tensors.pop(HEAD, None)
    if ids is not None:
        usable_ids(ids, card.vocab_size, path)
    if head is not None and ids is not None:
        same_as_target(head, card.head_rows(ids), HEAD, path)
    config = _read_config(values, tensors, ids, str(path), card)
    confidence = tensors.pop(CONFIDENCE, None)
    if confidence is not None and confidence.any():
        raise ConfigError(f"{path}: has a confidence head ('{CONFIDENCE}'), which is not supported")
    if NAMES[W1] in tensors:
        tensors[NAMES[W1]] = kept_rows(tensors[NAMES[W1]], ids, NAMES[W1], path)
    back = {theirs: ours for ours, theirs in _names(config).items()}
    return Parts(config, _one_format({back.get(name, name): value for name, value in tensors.items()}), ids)


def _tensor(tensor: Any, path: Path) -> Tensor:
    """A tensor of the file, rows first."""
    gguf = _gguf()
    kinds = gguf.GGMLQuantizationType
    shape = [int(size) for size in reversed(tensor.shape)]
    if tensor.tensor_type == kinds.BF16:
        raw = torch.from_numpy(np.array(tensor.data).view(np.int16).reshape(shape))
        return raw.view(torch.bfloat16)
    if tensor.tensor_type not in (kinds.F32, kinds.F16, kinds.I64):
        kind = tensor.tensor_type.name
        raise ConfigError(f"{path}: tensor '{tensor.name}' is {kind}; only F32, F16 and BF16 are read")
    return torch.from_numpy(np.array(tensor.data).reshape(shape))


def _one_format(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Vectors in the format of the matrices, where that loses nothing; else all in fp32."""
    matrices = [value.dtype for value in tensors.values() if value.dim() > 1]
    dtype = matrices[0] if len(set(matrices)) == 1 else torch.float32
    exact = all(torch.equal(value.to(dtype).float(), value.float()) for value in tensors.values())
    return {name: value.to(dtype if exact else torch.float32) for name, value in tensors.items()}


def _read_config(
    values: dict[str, Any], tensors: dict[str, Tensor], ids: Tensor | None, where: str, card: TargetCard
) -> DrafterConfig:
    def need(key: str) -> Any:
        if values.get(key) is None:
            raise ConfigError(f"{where}: key '{key}' is missing")
        return values[key]

    def own(key: str) -> Any:
        return need(f"{ARCHITECTURE}.{key}")

    layers = int(own("block_count"))
    pattern = values.get(f"{ARCHITECTURE}.attention.sliding_window_pattern") or [False] * layers
    types = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    causal = bool(values.get(f"{ARCHITECTURE}.attention.causal", False))
    sliding = "sliding_attention" in types
    first = tensors.get(NAMES[W1])
    usual = all((kind == "sliding_attention") == causal for kind in types)
    plain = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": own("embedding_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": own("attention.head_count"),
        "num_key_value_heads": own("attention.head_count_kv"),
        "head_dim": own("attention.key_length"),
        "intermediate_size": own("feed_forward_length"),
        "vocab_size": values.get(f"{ARCHITECTURE}.vocab_size", card.vocab_size),
        "rms_norm_eps": _shortest(own("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": own("context_length"),
        "rope_theta": _shortest(own("rope.freq_base")),
        "rope_scaling": _read_scaling(values),
        "layer_types": types if sliding else [],
        "sliding_window": own("attention.sliding_window") if sliding else None,
        "is_causal": None if usual else causal,
        "block_size": own("block_size"),
        "mask_token_id": need(MASK_KEY),
        "num_target_layers": card.num_layers,
        "target_layer_ids": [int(index) - 1 for index in own("target_layers")],
        "sample_from_anchor": bool(values.get(f"{ARCHITECTURE}.sample_from_anchor", False)),
        "draft_vocab_size": None if ids is None else len(ids),
        "markov_rank": None if first is None else first.shape[1],
    }
    return config_from_json(plain, where)


def _read_scaling(values: dict[str, Any]) -> dict[str, Any] | None:
    prefix = f"{ARCHITECTURE}.rope.scaling."
    kind = values.get(f"{prefix}type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": _shortest(values.get(f"{prefix}factor", 1.0))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = values.get(f"{prefix}original_context_length")
        for key in ("beta_fast", "beta_slow"):
            if f"{prefix}yarn_{key}" in values:
                scaling[key] = _shortest(values[f"{prefix}yarn_{key}"])
    return scaling


def _shortest(value: float) -> float:
    """The shortest decimal that is this fp32 number: what was written, not what became of it."""
    return float(str(np.float32(value)))
