"""The line that starts another engine with a drafter, for checkpoints that the engine is known to run as they are."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blockdraft.config import ConfigError, DrafterConfig
from blockdraft.formats.card import TargetCard
from blockdraft.formats.eagle3 import IDS, usual_taps
from blockdraft.formats.files import peek_settings
from blockdraft.formats.layouts import LAYOUTS, Layout, read_parts
from blockdraft.formats.limits import MTP_ALONE


@dataclass(frozen=True)
class Launch:
    """A shell line, and what a person should know beside it."""

    line: str
    notes: tuple[str, ...] = ()


def launch(engine: str, path: Path, card: TargetCard) -> Launch:
    """The line for one of `ENGINES`.

    ConfigError: the checkpoint is not sound, or the engine does not load it or would run it differently.
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine '{engine}' is not known ({', '.join(sorted(ENGINES))})")
    layout, parts = read_parts(path, card)
    return ENGINES[engine](layout, parts.config, path, card)


def _sglang(layout: Layout, config: DrafterConfig, path: Path, card: TargetCard) -> Launch:
    _loads("sglang", layout, config, ("dflash", "eagle3"), path)
    # It ignores tensors that it does not know, so that what it cannot do would go by unnoticed.
    reasons, eagle = layout.limits(config) + _unscaled(config), layout.family == "eagle3"
    if eagle:
        reasons += _not_sglangs_eagle(config, path)
    elif config.is_causal and not all(config.window(layer) for layer in range(config.num_layers)):
        reasons.append("its full layers see the whole block, whatever is_causal says")
    _runs("sglang", reasons)
    words = ["python", "-m", "sglang.launch_server", "--model-path", card.name]
    words += ["--speculative-algorithm", "EAGLE3" if eagle else "DFLASH"]
    words += ["--speculative-draft-model-path", _absolute(path)]
    if eagle:  # a chain, not a tree; the anchor is counted among the tokens that are verified
        words += ["--speculative-num-steps", str(config.max_drafts), "--speculative-eagle-topk", "1"]
    verified = config.max_drafts + 1 if eagle else config.block_size
    words += ["--speculative-num-draft-tokens", str(verified)]
    short = card.max_context is not None and config.max_position_embeddings < card.max_context
    before = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 " if short else ""
    notes = ["windows that are not causal need a version that reads is_causal"] if config.is_causal is False else []
    return Launch(before + shlex.join(words), tuple(notes))


def _not_sglangs_eagle(config: DrafterConfig, path: Path) -> list[str]:
    reasons = []
    if config.norm_before_residual:
        reasons.append("it adds to the features as they are, and norm_before_residual is true")
    if config.attention_bias:
        reasons.append("attention_bias is true, but its queries, keys and values have none")
    values = peek_settings(path)
    if not (values.get("eagle_config") or {}).get(IDS) and not usual_taps(config):
        reasons.append("it reads no layer ids beside 'eagle_config': export --to eagle3 says them there")
    if values.get("draft_vocab_size") is None:
        reasons.append("draft_vocab_size is not said, for which it takes the target's head: export --to eagle3 says it")
    return reasons


def _vllm(layout: Layout, config: DrafterConfig, path: Path, card: TargetCard) -> Launch:
    _loads("vllm", layout, config, ("dflash", "speculators", "eagle3", "eagle3-speculators"), path)
    method, mixed = "dflash", "sliding_attention" in config.layer_types and len(set(config.layer_types)) > 1
    reasons = layout.limits(config) + _unscaled(config)
    if layout.name == "speculators":
        method = "dflash" if config.markov_rank is None else "dspark"
        if method == "dflash" and config.anchor_drafts:
            reasons.append("it drafts from the anchor's row only beside a Markov head")
        if method == "dflash" and mixed:
            reasons.append("it reads one causality for all layers of this layout: export --to dflash")
    if layout.family == "eagle3":
        method = "eagle3"
        # It does not look into eagle_config; where the top says nothing it taps the usual layers.
        if not peek_settings(path).get(IDS) and not usual_taps(config):
            reasons.append(f"it reads no layer ids of 'eagle_config': export --to eagle3 says '{IDS}' for it")
    _runs("vllm", reasons)
    speculative = {"method": method, "model": _absolute(path), "num_speculative_tokens": config.max_drafts}
    words = ["vllm", "serve", card.name, "--speculative-config", json.dumps(speculative)]
    notes = []
    if layout.family == "block" and not all(config.causal(layer) for layer in range(config.num_layers)):
        notes.append("the attention backend must do bidirectional blocks over a paged cache: on NVIDIA, flash_attn")
    if method == "dspark":
        notes.append("DSpark runs in model runner V2 alone: vLLM built for the CPU has none, and refuses it")
    return Launch(("VLLM_USE_V2_MODEL_RUNNER=1 " if mixed else "") + shlex.join(words), tuple(notes))


def _llamacpp(layout: Layout, config: DrafterConfig, path: Path, card: TargetCard) -> Launch:
    _loads("llama.cpp", layout, config, ("gguf",), path)
    _runs("llama.cpp", layout.limits(config))
    if card.gguf is None:
        raise ConfigError(f"llama.cpp loads GGUF files: give the target's own as --target, not '{card.spec}'")
    kind = "draft-dflash" if config.markov_rank is None else "draft-dspark"
    words = ["llama-server", "-m", str(card.gguf), "-md", _absolute(path), "--spec-type", kind]
    words += ["--spec-draft-n-max", str(config.max_drafts)]
    if config.markov_rank is not None:
        words += ["--spec-draft-p-min", "0"]  # it would ask the confidence head that there is none of
    return Launch(shlex.join([*words, "-np", "1", "-fa", "on"]))


ENGINES: dict[str, Callable[[Layout, DrafterConfig, Path, TargetCard], Launch]] = {
    "sglang": _sglang,
    "vllm": _vllm,
    "llama.cpp": _llamacpp,
}


def _loads(engine: str, layout: Layout, config: DrafterConfig, loaded: tuple[str, ...], path: Path) -> None:
    if layout.name in loaded:
        return
    if config.family == "mtp":
        raise ConfigError(f"{path}: {MTP_ALONE}")
    if layout.name == "dflare":
        raise ConfigError(f"{path}: no released engine loads DFlare; generate with blockdraft")
    names = [name for name in loaded if LAYOUTS[name].family == config.family]
    ways = " or ".join(f"blockdraft export {path} OUT --to {name}" for name in names)
    ways = ways or f"no layout for it here has drafters of family '{config.family}'"
    raise ConfigError(f"{path}: {engine} does not load layout '{layout.name}': {ways}")


def _unscaled(config: DrafterConfig) -> list[str]:
    """What goes by unread where only DFlash 2 is known to need it.  The other scales leave the best token the best."""
    if config.input_embedding_scale == 1.0:
        return []
    return [f"it does not scale a DFlash drafter's embeddings (input_embedding_scale {config.input_embedding_scale})"]


def _runs(engine: str, reasons: list[str]) -> None:
    if reasons:
        raise ConfigError(f"{engine} would not run this drafter as it is: {'; '.join(dict.fromkeys(reasons))}")


def _absolute(path: Path) -> str:
    return str(path.resolve())
