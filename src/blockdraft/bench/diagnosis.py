"""Why a drafter's acceptance may be low: its files against the target, and what its rows say of how it learned.

Plain values in, findings out.  Each finding is one line: what was looked at, whether it is as it should be, and what
follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor

from blockdraft.bench.faults import Accepted, Fault, gains
from blockdraft.config import DrafterConfig
from blockdraft.targets.base import TargetInfo
from blockdraft.train.data import Sample

# ok: as it should be; note: may cost acceptance; fault: does; unknown: the checkpoint does not say.
Level = Literal["ok", "note", "fault", "unknown"]
LEAST_COVERAGE = 0.97  # of the answers' tokens that a reduced head can say
TAP_TOLERANCE = 0.15
# A drafter that learned what it was taught keeps about this much of its training accuracy on unseen answers.
LEAST_KEPT = 0.5
HEALTHY_TAU = 2.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    check: str
    level: Level
    text: str


def wiring(config: DrafterConfig, info: TargetInfo, samples: Sequence[Sample], target_rope: float) -> list[Finding]:
    """The configuration against the target; widths and layer counts are checked when a drafter is loaded."""
    found = [Finding("target", "ok", f"{info.num_layers} layers of width {info.hidden_size}, {info.vocab_size} tokens")]
    mask = config.mask_token_id
    if mask is None:
        found.append(Finding("mask token", "ok", "none: it drafts token after token"))
    elif mask in info.eos_token_ids:
        found.append(Finding("mask token", "fault", f"{mask} ends answers in this target: it cannot stand for a gap"))
    elif any(bool((sample.ids == mask).any()) for sample in samples):
        found.append(Finding("mask token", "fault", f"{mask} occurs in prompts or answers: it cannot stand for a gap"))
    else:
        found.append(Finding("mask token", "ok", f"{mask}, which no prompt or answer has"))
    if config.tap_ids and config.tap_ids[-1] == info.num_layers - 1:
        text = f"{list(config.tap_ids)}: the last is taken before the final norm, other engines may take it after"
        found.append(Finding("taps", "note", text))
    else:
        found.append(Finding("taps", "ok", f"after layers {list(config.tap_ids)} of 0..{info.num_layers - 1}"))
    if config.rope_theta != target_rope:
        text = f"base {config.rope_theta:g}, the target's is {target_rope:g}: right only if it was trained so"
        found.append(Finding("rotary", "note", text))
    else:
        found.append(Finding("rotary", "ok", f"base {config.rope_theta:g}, the target's"))
    return found


def vocabulary(samples: Sequence[Sample], draft_ids: Tensor | None) -> Finding:
    """Whether a reduced draft head can say what the target says."""
    if draft_ids is None:
        return Finding("draft vocabulary", "ok", "all tokens of the target")
    kept = set(draft_ids.tolist())
    answered = [token for sample in samples for token in sample.ids[sample.loss_mask].tolist()]
    share = sum(token in kept for token in answered) / max(len(answered), 1)
    level: Level = "ok" if share >= LEAST_COVERAGE else "note"
    return Finding("draft vocabulary", level, f"{len(kept)} tokens, {share:.1%} of what these answers say")


def template(trained: str | None, here: str | None) -> Finding:
    """The chat template and tokenizer of training against those that prompts go through now."""
    if trained is None:
        return Finding("chat template", "unknown", "the checkpoint does not say how prompts were written in training")
    if trained != here:
        text = (
            "a fixed conversation becomes other tokens than in training: another template, thinking mode or tokenizer"
        )
        return Finding("chat template", "fault", text)
    return Finding("chat template", "ok", "a fixed conversation becomes the same tokens as in training")


def tap_sizes(trained: Sequence[float] | None, here: Sequence[float]) -> Finding:
    """The size of each tap now against what it was in training."""
    if not trained:
        return Finding("size of the taps", "unknown", "the checkpoint does not say what they were in training")
    if len(trained) != len(here):
        return Finding(
            "size of the taps", "fault", f"trained on {len(trained)} taps, the configuration has {len(here)}"
        )
    ratios = [b / a for a, b in zip(trained, here, strict=True)]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1.0))
    if abs(worst - 1.0) > TAP_TOLERANCE:
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        text = f"{shown} times what they were in training: other layers, other weights or another precision"
        return Finding("size of the taps", "fault", text)
    return Finding("size of the taps", "ok", f"within {abs(worst - 1.0):.0%} of what they were in training")


def cached_rows(differs: str | None) -> Finding:
    """Whether drafting over the cache computes what training's rows do."""
    if differs is not None:
        return Finding("drafting against training", "fault", f"the same rows differ in {differs}")
    return Finding("drafting against training", "ok", "context and drafts over the cache are those of training's rows")


def deliberate(configured: Accepted, tried: Sequence[tuple[Fault, Accepted]]) -> list[Finding]:
    """One finding for each fault that helps, or one that none does."""
    found = [
        Finding(fault.name, "fault", f"accepts more so (tau {made.tau:.2f}, not {configured.tau:.2f}): {fault.told}")
        for fault, made in tried
        if gains(configured, made)
    ]
    worst = ", ".join(f"{fault.name} {made.tau:.2f}" for fault, made in tried)
    return found or [Finding("deliberate faults", "ok", f"none helps over {configured.tau:.2f}: {worst}")]


def learned(here: Accepted, trained: Sequence[float] | None) -> Finding:
    """How often each draft is right at these anchors, against how often it was at the end of training."""
    shown = " ".join(f"{share:.2f}" for share in here.accuracy)
    if not trained:
        return Finding("accuracy by position", "unknown", f"{shown}; the checkpoint does not say what training reached")
    then = " ".join(f"{share:.2f}" for share in trained)
    kept = here.accuracy[0] / max(trained[0], 1e-6)
    if kept < LEAST_KEPT:
        text = f"{shown}, in training {then}: learned, and lost on the way here, or learned by heart"
        return Finding("accuracy by position", "fault", text)
    return Finding("accuracy by position", "ok", f"{shown}, in training {then}")


def acceptance(tau: float, shares: Sequence[float]) -> Finding:
    """The real acceptance, and whether it falls off as healthy drafters' does: by a steady part with each draft."""
    curve = " ".join(f"{share:.2f}" for share in shares)
    text = f"tau {tau:.2f} (tokens per verify pass, the target's own included); accepted by position {curve}"
    steps = [b / a for a, b in pairwise(shares) if a >= 0.1]
    if shares and shares[0] >= 0.3 and steps and steps[0] < 0.3:
        return Finding(
            "acceptance", "note", f"{text}: it collapses behind the first draft, so rows of a block are wrong"
        )
    return Finding("acceptance", "ok" if tau >= HEALTHY_TAU else "note", text)


def verdict(found: Sequence[Finding], told: Mapping[str, Any]) -> str:
    """What to do, in one line."""
    faults = [finding for finding in found if finding.level == "fault"]
    if faults:
        return f"broken: {'; '.join(finding.check for finding in faults)}"
    low = any(finding.check == "acceptance" and finding.level == "note" for finding in found)
    if not low:
        return "healthy: wired as it was trained, and what it drafts is accepted"
    blocks = told.get("blocks_per_step", 0) * told.get("step", 0)
    seen = f" (it has seen {blocks} blocks)" if blocks else ""
    return f"undertrained for these prompts, not broken: train it longer, on more answers of this target{seen}"
