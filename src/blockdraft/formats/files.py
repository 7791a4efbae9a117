"""Reading the two files of a Hugging Face folder: settings and weights, each error one line that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from blockdraft.config import ConfigError


def read_settings(folder: Path) -> dict[str, Any]:
    """What config.json holds.  ConfigError: there is none, or it is not readable."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder}: no config.json here; a drafter is a folder with config.json and safetensors")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds {type(values).__name__}, not settings")
    return values


def peek_settings(folder: Path) -> dict[str, Any]:
    """The same to look what a folder is; nothing where there is nothing to read."""
    try:
        return read_settings(folder)
    except (ConfigError, OSError):
        return {}


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors, in one file or several.  ConfigError: none, torn, or a name twice."""
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        hint = "; pickled weights are not read, convert them to safetensors" if pickled else ""
        raise ConfigError(f"{folder}: no *.safetensors here{hint}")
    tensors: dict[str, Tensor] = {}
    for path in found:
        try:
            part = load_file(path, device="cpu")
        except SafetensorError as error:
            raise ConfigError(f"{path}: not readable: {error}") from None
        if twice := tensors.keys() & part.keys():
            raise ConfigError(f"{path}: tensor '{min(twice)}' is also in another file of the folder")
        tensors.update(part)
    return tensors


def renamed(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """Tensors under other names; what has no new name keeps its own."""
    return {names.get(name, name): value for name, value in tensors.items()}
