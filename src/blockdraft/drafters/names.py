"""From what stands for a drafter on a command line to what it means; nothing is loaded for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from blockdraft.config import DraftModelConfig, NgramConfig

# "auto" is the drafter that is shipped for the target, a path a drafter's folder, None plain decoding.
DrafterChoice = Literal["auto"] | Path | NgramConfig | DraftModelConfig | None

SPELLINGS = "auto, none, ngram, ngram:K, model:NAME, model:NAME:K or a drafter's folder (K: tokens drafted per round)"


def parse_drafter(text: str) -> DrafterChoice:
    """auto, none, ngram[:K], model:NAME[:K] or a folder; a folder called like one of them is meant by ./ngram.

    NAME is whatever names a target.  Raises ValueError, in one line, for anything else.
    """
    if text == "none":
        return None
    if text == "auto":
        return "auto"
    kind, colon, rest = text.partition(":")
    if kind == "ngram":
        return NgramConfig.parse({"max_drafts": rest} if colon else {}, f"drafter '{text}'")
    if kind == "model" and colon:
        return _draft_model(rest, f"drafter '{text}'")
    if not text or not Path(text).is_dir():
        raise ValueError(f"drafter '{text}': no such folder, nor another drafter: give {SPELLINGS}")
    return Path(text)


def _draft_model(rest: str, where: str) -> DraftModelConfig:
    name, colon, number = rest.rpartition(":")
    values: dict[str, Any] = {"model": rest}
    if colon and (number.isdigit() or not number):
        values = {"model": name, "max_drafts": number}
    return DraftModelConfig.parse(values, where)
