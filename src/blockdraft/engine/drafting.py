"""From what a person calls a drafter to one that is ready to draft for a target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from blockdraft.config import DraftModelConfig, NgramConfig
from blockdraft.drafters.base import Drafter
from blockdraft.drafters.checkpoint import load_drafter
from blockdraft.drafters.independent import IndependentDrafter
from blockdraft.drafters.lookup import LookupDrafter
from blockdraft.drafters.names import SHIPPED, LookupChoice, ShippedName, parse_drafter
from blockdraft.drafters.ngram import NgramDrafter
from blockdraft.targets.base import Target
from blockdraft.targets.resolve import load_target, resolve_folder

# What `LLM` takes: a name (see `drafters.names`), a folder, settings, a drafter that is ready, None: plain decoding.
Wanted = str | Path | NgramConfig | DraftModelConfig | LookupChoice | Drafter | None
Found = Path | NgramConfig | DraftModelConfig | LookupChoice | Drafter | None


def find_drafter(wanted: Wanted, target: str) -> Found:
    """What is meant, for a target of that name; nothing is loaded.  ValueError: it is not there, in one line."""
    choice = parse_drafter(wanted) if isinstance(wanted, str) else wanted
    if isinstance(choice, str):
        folder = shipped_folder(target, choice)
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"no drafter is shipped for target '{target}': pass drafter=None for plain decoding, or a folder"
            )
        return folder
    if isinstance(choice, LookupChoice):
        other = find_drafter(choice.other, target)
        assert isinstance(other, (Path, DraftModelConfig)), "the only ones that can stand behind a lookup"
        return LookupChoice(choice.ngram, other)
    if isinstance(choice, DraftModelConfig):
        with _named(choice):
            resolve_folder(choice.model)
    return choice


def make_drafter(found: Found, target: Target, block_size: int | None = None) -> Drafter | None:
    """The drafter, ready to draft for `target`; `block_size` is for one that drafts blocks: None, as it was trained.

    ValueError, in one line: it cannot be loaded, or does not fit.
    """
    if isinstance(found, LookupChoice):
        assert not isinstance(found.other, str), "found already"
        other = make_drafter(found.other, target, block_size)
        assert other is not None, "plain decoding is refused as another drafter"
        return LookupDrafter(other, found.ngram)
    if isinstance(found, Path):
        return load_drafter(found, target, block_size)
    if block_size is not None:
        raise ValueError(
            "block_size is for a drafter that drafts blocks; ngram:K and model:NAME:K say how far they draft"
        )
    if isinstance(found, NgramConfig):
        return NgramDrafter(found)
    if isinstance(found, DraftModelConfig):
        info = target.info
        with _named(found):
            model = load_target(found.model, dtype=str(info.dtype).removeprefix("torch."), device=str(info.device))
            return IndependentDrafter(model, info, found.max_drafts)
    return found


@contextmanager
def _named(config: DraftModelConfig) -> Iterator[None]:
    """Errors of the model say that it was wanted as a drafter: they speak of targets."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"drafter 'model:{config.model}': {error}") from error


def shipped_folder(target: str, name: ShippedName = "auto") -> Path:
    """Where the package keeps its drafter of that name for a target, whether it has one or not."""
    return Path(str(files("blockdraft"))) / "assets" / f"{target}-{SHIPPED[name]}"
