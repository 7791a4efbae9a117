"""Whether a drafter is what its settings say, and whether it is one for a target: the checks, each with its answer.

Letters: T taps, D hidden width, V' rows of a reduced draft head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.config import ConfigError, DrafterConfig
from blockdraft.drafters.families import new_model
from blockdraft.formats.card import TargetCard
from blockdraft.formats.parts import DTYPES, Parts

# What a tensor that does not belong here says about the drafter that it comes from.
FOREIGN = {
    "candidate_selector.": "DFlash 2 (its candidate selector)",
    "_conv.": "DFlash 2 (its convolutions)",
    "prefix_gru.": "Domino",
    "embed_proj.": "Domino",
    "confidence_head.": "DSpark (its confidence head)",
    "attention_sink_bias": "attention sinks",
    "mask_hidden": "P-EAGLE",
    "fc_norm": "EAGLE-3.1 (fc_norm)",
    "input_norm.": "EAGLE-3.1 (norm_before_fc)",
    "mask_embedding": "a mask embedding of its own",
    "midlayer.": "EAGLE-3 with the settings of a block drafter",
    "hidden_correction.": "DFly",
    "_scale": "quantised weights",
}


@dataclass(frozen=True)
class Check:
    """One check: what was looked at, whether it holds, and what was found."""

    name: str
    passed: bool
    found: str


def check_parts(parts: Parts, card: TargetCard | None = None) -> Iterator[Check]:
    """All checks of a drafter, in order; those against a target only if there is one."""
    config, tensors = parts.config, parts.tensors
    with torch.device("meta"):
        expected = {name: tuple(value.shape) for name, value in new_model(config).state_dict().items()}
    # An EAGLE-3 drafter's own layer is nothing foreign, whatever else is wrong with its names.
    foreign = {part: kind for part, kind in FOREIGN.items() if not any(part in name for name in expected)}
    yield _names(tensors, expected, foreign)
    yield _shapes(tensors, expected)
    yield _numbers(tensors)
    if "fc.weight" in expected and config.family != "mtp":  # whose `fc` takes an embedding and one tap
        yield _fusion(tensors, config)
    yield _draft_ids(parts.draft_ids, config)
    if card is not None:
        yield from _against(config, card)


def require(parts: Parts, where: str, card: TargetCard | None = None) -> Parts:
    """The same parts.  ConfigError: the first check that does not hold."""
    for check in check_parts(parts, card):
        if not check.passed:
            raise ConfigError(f"{where}: {check.name}: {check.found}")
    return parts


def _names(tensors: dict[str, Tensor], expected: dict[str, tuple[int, ...]], foreign: dict[str, str]) -> Check:
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    told = [f"'{missing[0]}' is missing ({len(missing)} in all)"] if missing else []
    if unknown:
        known = ((name, kind) for part, kind in foreign.items() for name in unknown if part in name)
        first, kind = next(known, (unknown[0], None))
        why = f", which is {kind} and not supported" if kind else ""
        told.append(f"'{first}' does not belong here{why} ({len(unknown)} in all)")
    return Check("tensor names", not told, "; ".join(told) or f"{len(expected)} tensors, all expected")


def _shapes(tensors: dict[str, Tensor], expected: dict[str, tuple[int, ...]]) -> Check:
    wrong = [
        f"'{name}' is {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    total = sum(value.numel() for value in tensors.values())
    return Check("tensor shapes", not wrong, _some(wrong) or f"{total:,} numbers".replace(",", " "))


def _numbers(tensors: dict[str, Tensor]) -> Check:
    formats = sorted({str(value.dtype).removeprefix("torch.") for value in tensors.values()})
    wrong = []
    if len(formats) != 1 or formats[0] not in DTYPES:
        wrong.append(f"numbers are {', '.join(formats)}; all should be one of {', '.join(DTYPES)}")
    else:
        wrong += [f"'{name}' has a NaN or infinity" for name, x in sorted(tensors.items()) if not x.isfinite().all()]
    return Check("number format", not wrong, _some(wrong) or f"{formats[0]}, all finite")


def _fusion(tensors: dict[str, Tensor], config: DrafterConfig) -> Check:
    taps, width, fc = len(config.tap_ids), config.hidden_size, tensors.get("fc.weight")
    if fc is None or fc.dim() != 2:
        return Check("fc columns", False, "'fc.weight' is missing or no matrix")
    held, rest = divmod(fc.shape[1], width)
    if rest or held != taps:
        is_for = f"{held} taps" if not rest else f"no whole number of taps of width {width}"
        return Check("fc columns", False, f"{fc.shape[1]} columns are for {is_for}, the settings have {taps}")
    return Check("fc columns", True, f"{taps} taps x {width}")


def _draft_ids(ids: Tensor | None, config: DrafterConfig) -> Check:
    name, wanted = "draft vocabulary", config.draft_vocab_size
    if (ids is None) != (wanted is None):
        found = "has no" if ids is None else "has a"
        return Check(name, False, f"draft_vocab_size is {wanted}, but the drafter {found} map of draft ids (d2t)")
    if ids is None:
        return Check(name, True, f"all {config.vocab_size} tokens")
    if ids.shape != (wanted,):
        return Check(name, False, f"the map of draft ids is {list(ids.shape)}, expected [{wanted}]")
    if ids.min() < 0 or ids.max() >= config.vocab_size or len(ids.unique()) != len(ids):
        return Check(name, False, f"draft ids are not distinct ids of a vocabulary of {config.vocab_size}")
    return Check(name, True, f"{wanted} of {config.vocab_size} tokens")


def _against(config: DrafterConfig, card: TargetCard) -> Iterator[Check]:
    """The checks that need the target."""
    for name, ours, theirs in (
        ("target layers", config.num_target_layers, card.num_layers),
        ("target width", config.hidden_size, card.hidden_size),
        ("target vocabulary", config.vocab_size, card.vocab_size),
    ):
        yield Check(
            name, ours == theirs, f"{theirs}" if ours == theirs else f"made for {ours}, the target has {theirs}"
        )
    taps = f"{list(config.tap_ids)} of {card.num_layers} layers"
    yield Check("tap ids", all(tap < card.num_layers for tap in config.tap_ids), taps)
    if config.mask_token_id is not None:
        mask = f"{config.mask_token_id} of {card.vocab_size} tokens"
        yield Check("mask token", config.mask_token_id < card.vocab_size, mask)


def _some(problems: list[str]) -> str:
    return "" if not problems else problems[0] + (f" ({len(problems)} in all)" if len(problems) > 1 else "")
