"""The line that starts another engine with a drafter, for checkpoints that the engine is known to run as they are."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blockdraft.config import ConfigError, DrafterConfig
from blockdraft.formats.card import TargetCard
from blockdraft.formats.layouts import Layout, read_parts


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
    _loads("sglang", layout, ("dflash",), path)
    # It ignores tensors that it does not know, so that what it cannot do would go by unnoticed.
    reasons = layout.limits(config) + _unscaled(config)
    if config.is_causal and not all(config.window(layer) for layer in range(config.num_layers)):
        reasons.append("its full layers see the whole block, whatever is_causal says")
    _runs("sglang", reasons)
    words = ["python", "-m", "sglang.launch_server", "--model-path", card.name]
    words += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", _absolute(path)]
    words += ["--speculative-num-draft-tokens", str(config.block_size)]
    short = card.max_context is not None and config.max_position_embeddings < card.max_context
    before = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 " if short else ""
    notes = ["windows that are not causal need a version that reads is_causal"] if config.is_causal is False else []
    return Launch(before + shlex.join(words), tuple(notes))


def _vllm(layout: Layout, config: DrafterConfig, path: Path, card: TargetCard) -> Launch:
    _loads("vllm", layout, ("dflash", "speculators"), path)
    method, mixed = "dflash", "sliding_attention" in config.layer_types and len(set(config.layer_types)) > 1
    reasons = layout.limits(config) + _unscaled(config)
    if layout.name == "speculators":
        method = "dflash" if config.markov_rank is None else "dspark"
        if method == "dflash" and config.anchor_drafts:
            reasons.append("it drafts from the anchor's row only beside a Markov head")
        if method == "dflash" and mixed:
            reasons.append("it reads one causality for all layers of this layout: export --to dflash")
    _runs("vllm", reasons)
    speculative = {"method": method, "model": _absolute(path), "num_speculative_tokens": config.max_drafts}
    words = ["vllm", "serve", card.name, "--speculative-config", json.dumps(speculative)]
    notes = []
    if not all(config.causal(layer) for layer in range(config.num_layers)):
        notes.append("the attention backend must do bidirectional blocks over a paged cache: on NVIDIA, flash_attn")
    return Launch(("VLLM_USE_V2_MODEL_RUNNER=1 " if mixed else "") + shlex.join(words), tuple(notes))


def _llamacpp(layout: Layout, config: DrafterConfig, path: Path, card: TargetCard) -> Launch:
    _loads("llama.cpp", layout, ("gguf",), path)
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


def _loads(engine: str, layout: Layout, loaded: tuple[str, ...], path: Path) -> None:
    if layout.name in loaded:
        return
    if layout.name == "dflare":
        raise ConfigError(f"{path}: no released engine loads DFlare; generate with blockdraft")
    ways = " or ".join(f"blockdraft export {path} OUT --to {name}" for name in loaded)
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
