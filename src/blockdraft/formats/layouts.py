"""The layouts by name, and the ways through them: recognise, read, check, write."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from blockdraft.config import ConfigError, DrafterConfig
from blockdraft.drafters.checkpoint import replaced_whole, save_drafter
from blockdraft.formats import (
    angelspec,
    assistant,
    dflare,
    dflash,
    eagle3,
    eagle3_speculators,
    llamacpp,
    own,
    speculators,
)
from blockdraft.formats.card import TargetCard
from blockdraft.formats.checks import Check, check_parts, require
from blockdraft.formats.files import peek_settings
from blockdraft.formats.limits import other_family, refuse, tap_limits
from blockdraft.formats.parts import DTYPES, Parts, cast, model_of, with_chain

OWN = own.NAME


@dataclass(frozen=True)
class Layout:
    """One layout: whether a path is in it, what is in a path, why a drafter does not fit, and how it is written.

    `save` fills an empty folder, or (`one_file`) writes a file; None: nobody but us reads it.  `family` is the only one
    that the layout is for (our own, which is not written, has what is left over of any).
    """

    name: str
    matches: Callable[[Path], bool]
    read: Callable[[Path, TargetCard | None], Parts]
    limits: Callable[[DrafterConfig], list[str]]
    save: Callable[[Parts, TargetCard | None, Path], None] | None
    needs_target: bool = False
    one_file: bool = False
    family: str = "block"

    def refusals(self, config: DrafterConfig) -> list[str]:
        """Why it cannot carry a drafter: another family's, or what `limits` says."""
        return other_family(config, self.family) or self.limits(config)


def _filling(
    write: Callable[[Parts, TargetCard | None], tuple[dict[str, Any], dict[str, Tensor]]],
) -> Callable[[Parts, TargetCard | None, Path], None]:
    """`save` of a layout that is config.json beside model.safetensors."""

    def save(parts: Parts, card: TargetCard | None, folder: Path) -> None:
        values, tensors = write(parts, card)
        # A copy for each: a file holds no memory twice, and views (of the target's table, say) share it.
        tensors = {name: value.clone() for name, value in tensors.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    return save


def _folder(module: ModuleType, needs_target: bool = False, family: str = "block") -> Layout:
    """The layout that a module of this room holds, if it is a folder."""
    save = _filling(module.write)
    return Layout(module.NAME, module.matches, module.read, module.limits, save, needs_target, family=family)


# Looked at in this order.
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("gguf", llamacpp.matches, llamacpp.read, llamacpp.limits, llamacpp.save, True, one_file=True),
        _folder(eagle3, family="eagle3"),
        # before the layout that holds all of speculators'
        _folder(eagle3_speculators, needs_target=True, family="eagle3"),
        _folder(speculators, needs_target=True),
        _folder(angelspec, needs_target=True),
        _folder(assistant),
        _folder(dflare),
        _folder(dflash),
        Layout(OWN, own.matches, own.read, own.limits, None),
    )
}
WRITABLE = tuple(sorted(name for name, layout in LAYOUTS.items() if layout.save))


def layout_named(name: str) -> Layout:
    """ConfigError: there is none of that name."""
    if name not in LAYOUTS:
        raise ConfigError(f"layout '{name}' is not known ({', '.join(sorted(LAYOUTS))})")
    return LAYOUTS[name]


def recognise(path: Path) -> Layout:
    """The layout of a folder or file.  ConfigError: there is nothing, or in none that is known."""
    if not path.exists():
        raise ConfigError(f"{path}: no such folder or file")
    for layout in LAYOUTS.values():
        if layout.matches(path):
            return layout
    found = f"architectures {peek_settings(path).get('architectures')}" if path.is_dir() else "a file that is no GGUF"
    raise ConfigError(f"{path}: {found}: in no layout of a drafter that is known ({', '.join(sorted(LAYOUTS))})")


def read_parts(path: Path, card: TargetCard | None = None, name: str | None = None) -> tuple[Layout, Parts]:
    """A drafter in any layout, all checks passed.  ConfigError: the first thing that is wrong."""
    layout = recognise(path) if name is None else layout_named(name)
    return layout, require(_read(layout, path, card), str(path), card)


def check(path: Path, card: TargetCard | None) -> tuple[Layout | None, list[Check]]:
    """Every check that can be made of a path, in order; those after one that stops all others are left out."""
    try:
        layout = recognise(path)
    except ConfigError as error:
        return None, [Check("layout", False, _without(error, path))]
    checks = [Check("layout", True, layout.name)]
    try:
        parts = _read(layout, path, card)
    except ConfigError as error:
        return layout, [*checks, Check("settings", False, _without(error, path))]
    config = parts.config
    shape = f"{config.num_layers} layers, {len(config.tap_ids)} taps, blocks of {config.block_size}"
    return layout, [*checks, Check("settings", True, shape), *check_parts(parts, card)]


def export(path: Path, out: Path, name: str, card: TargetCard | None, dtype: str | None = None) -> Layout:
    """Write a drafter, in whatever layout it is, in another one; `out` appears whole or not at all.

    ConfigError: it is not sound, the layout cannot carry it, or `out` is there already.
    """
    layout = layout_named(name)
    if layout.save is None:
        raise ConfigError(f"layout '{name}' is not written for others ({', '.join(WRITABLE)})")
    if layout.needs_target and card is None:
        raise ConfigError(f"layout '{name}' holds parts of the target: name it with --target")
    _, parts = read_parts(path, card)
    refuse(name, layout.refusals(parts.config))
    parts = Parts(parts.config, cast(parts.tensors, _dtype(dtype, parts)), parts.draft_ids)
    _vacant(out)
    if layout.one_file:
        _save_file(layout, parts, card, out)
    else:
        with replaced_whole(out) as folder:
            layout.save(parts, card, folder)
    return layout


def import_drafter(
    path: Path,
    out: Path,
    card: TargetCard,
    provenance: dict[str, Any],
    name: str | None = None,
    block_size: int | None = None,
) -> Layout:
    """Read a drafter of any layout and write it as ours, in its own number format.

    `block_size` is for chains, which can be of any length; None: what the file says.  ConfigError as for `export`.
    """
    layout, parts = read_parts(path, card, name)
    if block_size is not None:
        parts = with_chain(parts, block_size)
    if layout.name != OWN and (reasons := tap_limits(parts.config)):
        raise ConfigError(f"{path}: {reasons[0]}")
    _vacant(out)
    made = {"imported_from": layout.name, "target": card.name, **provenance}
    save_drafter(out, model_of(parts), parts.draft_ids, made, parts.dtype)
    return layout


def _read(layout: Layout, path: Path, card: TargetCard | None) -> Parts:
    try:
        return layout.read(path, card)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:  # a list where a number should be
        raise ConfigError(f"{path}: not what the layout '{layout.name}' holds: {error}") from error


def _save_file(layout: Layout, parts: Parts, card: TargetCard | None, out: Path) -> None:
    assert layout.save is not None, "the caller looks"
    out.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{out.name}-", dir=out.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        layout.save(parts, card, temporary)
        temporary.chmod(0o644)
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)


def _dtype(wanted: str | None, parts: Parts) -> torch.dtype:
    if wanted is None:
        return parts.dtype
    if wanted not in DTYPES:
        raise ConfigError(f"dtype '{wanted}' is not one of {', '.join(DTYPES)}")
    return DTYPES[wanted]


def _vacant(out: Path) -> None:
    if out.exists():
        raise ConfigError(f"{out}: is there already; give another place, or remove it")


def _without(error: ConfigError, path: Path) -> str:
    """The reason alone: what names the path is said beside it."""
    return str(error).removeprefix(f"{path}: ").removeprefix(f"{path / 'config.json'}: ")
