"""From what stands for a drafter on a command line to what it means; nothing is loaded for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from blockdraft.config import DraftModelConfig, NgramConfig

# Beside another drafter only a match of some length is worth more than what that one drafts.
LOOKUP = NgramConfig(longest=10, shortest=3)
# The drafters that come with the package, by what is asked for; "auto" is the default.
ShippedName = Literal["auto", "mtp"]
SHIPPED: dict[ShippedName, str] = {"auto": "dflash", "mtp": "mtp"}
SPELLINGS = (
    "auto, mtp, none, ngram, ngram:K, model:NAME, model:NAME:K, a drafter's folder, "
    "or ngram+ and one of these (K: tokens drafted per round)"
)


@dataclass(frozen=True)
class LookupChoice:
    """The text's own long matches first, and where there is none, another drafter."""

    ngram: NgramConfig
    other: ShippedName | Path | DraftModelConfig


# A text is the name of a drafter that is shipped for the target, a path a drafter's folder, None plain decoding.
DrafterChoice = ShippedName | Path | NgramConfig | DraftModelConfig | LookupChoice | None


def parse_drafter(text: str) -> DrafterChoice:
    """auto, mtp, none, ngram[:K], model:NAME[:K], a folder, or ngram+ another; a folder called so is meant by ./ngram.

    NAME is whatever names a target.  Raises ValueError, in one line, for anything else.
    """
    if text == "none":
        return None
    if text in SHIPPED:
        return text
    if text.startswith("ngram+"):
        other = parse_drafter(text.removeprefix("ngram+"))
        if other is None or isinstance(other, (NgramConfig, LookupChoice)):
            others = "auto, mtp, a folder or model:NAME"
            raise ValueError(f"drafter '{text}': ngram+ needs another drafter behind it: {others}")
        return LookupChoice(LOOKUP, other)
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
