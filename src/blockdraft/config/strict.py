"""What all settings have in common: frozen, strict, and readable from JSON or YAML.

An unknown key, a wrong type or an impossible value is refused: by `parse` and `load_config` with a `ConfigError`
of one line, by a class called directly with pydantic's own ValueError.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

ConfigT = TypeVar("ConfigT", bound="Strict")


class ConfigError(ValueError):
    """A setting that cannot be used; the message is one line for the person who wrote it."""


class Strict(BaseModel):
    """Base of all settings: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def parse(cls: type[ConfigT], values: dict[str, Any], where: str = "config") -> ConfigT:
        """Build from a plain dict.  Raises `ConfigError` naming the first bad key."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            if first["type"] == "extra_forbidden":
                section: Any = cls
                for part in first["loc"][:-1]:
                    one = isinstance(part, int)  # an entry of a list
                    section = get_args(section)[0] if one else section.model_fields[part].annotation
                reason = f"unknown key '{key}' (known: {', '.join(sorted(section.model_fields))})"
            else:
                message = first["msg"].removeprefix("Value error, ")
                reason = f"{key}: {message}" if key else message
            raise ConfigError(f"{where}: {reason}") from None


def load_config(cls: type[ConfigT], path: str | Path, overrides: tuple[str, ...] = ()) -> ConfigT:
    """Read YAML or JSON, apply `section.key=value` overrides (values are YAML), check everything.

    Raises `ConfigError` for a missing or unreadable file, a malformed override, or a bad setting.
    """
    return cls.parse(override_settings(read_settings(path), overrides), str(path))


def read_settings(path: str | Path) -> dict[str, Any]:
    """What a YAML or JSON file holds.  Raises `ConfigError` if it is missing or holds no settings."""
    path = Path(path)
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected settings, found {type(values).__name__}")
    return values


def override_settings(values: dict[str, Any], overrides: tuple[str, ...]) -> dict[str, Any]:
    """The same settings with `section.key=value` written into them.  Raises `ConfigError` for a malformed one."""
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"override '{override}': write section.key=value")
        parts = key.split(".")
        node = values
        for part in parts[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"override '{override}': '{part}' is not a section")
        try:
            node[parts[-1]] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"override '{override}': not readable as YAML: {str(error).splitlines()[0]}") from None
    return values
