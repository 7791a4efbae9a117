"""What a layout cannot carry: the reasons, all of them, before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from blockdraft.config import ConfigError, DraftAxes, DrafterConfig
from blockdraft.drafters.checkpoint import AXES, SCALES

FAMILIES = {"block": "a block drafter", "eagle3": "an EAGLE-3 drafter", "mtp": "an MTP module"}
HOMES = {"block": "dflash, among others", "eagle3": "eagle3 (SGLang, vLLM) or eagle3-speculators (vLLM)"}
MTP_ALONE = (
    "it is an MTP module, which engines load from inside the target's own checkpoint only: generate with blockdraft"
)


def other_family(config: DrafterConfig, family: str) -> list[str]:
    """Why a drafter has no place in the layouts of `family`, if it is of another one."""
    if config.family == family:
        return []
    if config.family == "mtp":
        return [MTP_ALONE]
    return [f"it is {FAMILIES[config.family]}, not {FAMILIES[family]}: export --to {HOMES[config.family]}"]


def family_limits(config: DrafterConfig, changed: Mapping[str, str] = {}) -> list[str]:
    """Axes on which the drafter is neither DFlash nor what `changed` makes of it."""
    reasons = []
    for axis in AXES:
        wanted = changed.get(axis, DraftAxes.model_fields[axis].default)
        if getattr(config, axis) != wanted:
            reasons.append(f"{axis} is '{getattr(config, axis)}', only '{wanted}' can be said")
    return reasons


def head_limits(config: DrafterConfig, advice: str) -> list[str]:
    """Drafting that only layouts of a newer kind can say: the anchor's row, a Markov head, a reduced head.

    `advice`, if any, is what to do about them.
    """
    reasons = []
    if config.anchor_drafts:
        reasons.append("anchor_drafts is true, but there row k is the token at anchor + k")
    if config.markov_rank is not None:
        reasons.append(f"there is no place for a Markov head (markov_rank {config.markov_rank})")
    if config.draft_vocab_size is not None:
        size = f"{config.draft_vocab_size} of {config.vocab_size} tokens"
        reasons.append(f"there is no place for a reduced draft head ({size})")
    return [*reasons, advice] if reasons and advice else reasons


def tap_limits(config: DrafterConfig) -> list[str]:
    """The last layer's residual stream, which is ours before the final norm; others take it after it, or not at all."""
    if config.num_target_layers - 1 not in config.tap_ids:
        return []
    return [f"tap {config.num_target_layers - 1} is the target's last layer, which others take after the final norm"]


def scale_limits(config: DrafterConfig) -> list[str]:
    """Scales on embeddings and logits, where a layout knows none."""
    return [
        f"{key} is {getattr(config, key)}, which has no place there"
        for key in SCALES
        if getattr(config, key) != DrafterConfig.model_fields[key].default
    ]


def refuse(layout: str, reasons: Iterable[str]) -> None:
    """ConfigError with all reasons in one line, if there is any."""
    told = list(dict.fromkeys(reasons))
    if told:
        raise ConfigError(f"layout '{layout}' cannot carry this drafter: {'; '.join(told)}")
