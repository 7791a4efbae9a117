"""Our own layout of drafters that no other project has: `drafters.checkpoint`, and MTP modules beside their target."""

from __future__ import annotations

from pathlib import Path

from blockdraft.config import ConfigError, DrafterConfig
from blockdraft.drafters.chain_layout import CHAINS, PREFIXES, chain_from_json
from blockdraft.drafters.checkpoint import OWN_ARCHITECTURE
from blockdraft.formats import dflash
from blockdraft.formats.borrowed import ids_from
from blockdraft.formats.card import TargetCard
from blockdraft.formats.files import peek_settings, read_settings, read_tensors
from blockdraft.formats.parts import Parts

NAME = "blockdraft"
MTP = next(name for name, family in CHAINS.items() if family == "mtp")


def matches(path: Path) -> bool:
    """Whether a folder is in this layout."""
    return path.is_dir() and not {OWN_ARCHITECTURE, MTP}.isdisjoint(peek_settings(path).get("architectures") or ())


def limits(config: DrafterConfig) -> list[str]:  # noqa: ARG001
    """Why the layout is not for others."""
    return ["it is our own for drafters that no other project has"]


def read(path: Path, card: TargetCard | None) -> Parts:
    """What a folder holds.  ConfigError: its settings cannot be used, or its tensors are no module's."""
    values = read_settings(path)
    if MTP not in values["architectures"]:
        return dflash.read(path, card)
    config, tensors, prefix = chain_from_json(values, str(path / "config.json")), read_tensors(path), PREFIXES["mtp"]
    offsets = tensors.pop("d2t", None)
    for name in tensors:
        if not name.startswith(prefix):
            raise ConfigError(f"{path}: tensor '{name}' does not belong here: an MTP module's begin with '{prefix}'")
    held = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return Parts(config, held, None if offsets is None else ids_from(offsets))
