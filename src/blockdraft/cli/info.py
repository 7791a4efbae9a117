"""`blockdraft info`: what is installed, what it runs on, and whether the default target is here."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import typer

from blockdraft import __version__
from blockdraft.cli.wiring import DEFAULT_TARGET

PACKAGES = ("torch", "transformers", "safetensors", "huggingface_hub", "gguf", "numpy", "pydantic")


def command() -> None:
    """Show versions, devices, the default target and the shipped drafter."""
    facts = _facts()
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        typer.echo(f"{name:<{width}}  {value}")


def _facts() -> dict[str, str]:
    import torch

    from blockdraft.ops.kernel import describe_kernel

    facts = {"blockdraft": __version__, "python": sys.version.split()[0], "platform": platform.platform()}
    for name in PACKAGES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "not installed"
    facts["kernel"] = describe_kernel()
    facts["cpu"] = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads used"
    for index in range(torch.cuda.device_count()):
        facts[f"cuda:{index}"] = torch.cuda.get_device_name(index)
    facts["default target"] = _default_target()
    facts["shipped drafters"] = _shipped_drafters()
    return facts


def _default_target() -> str:
    """The folder that the default target is loaded from; made (converted or downloaded) if it is not there yet."""
    from blockdraft.targets.resolve import resolve_folder

    try:
        return f"{DEFAULT_TARGET}: {resolve_folder(DEFAULT_TARGET)}"
    except ValueError as error:
        return str(error)


def _shipped_drafters() -> str:
    from blockdraft.drafters.names import SHIPPED
    from blockdraft.engine.drafting import shipped_folder

    folders = {name: shipped_folder(DEFAULT_TARGET, name) for name in SHIPPED}
    found = [f"{name}: {folder}" for name, folder in folders.items() if (folder / "config.json").is_file()]
    return ", ".join(found) or "none"
