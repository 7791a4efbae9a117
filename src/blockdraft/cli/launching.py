"""`blockdraft command`: the line that starts another engine with a drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockdraft.cli.wiring import DEFAULT_TARGET


def command(
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help="sglang, vllm or llama.cpp.")],
    drafter: Annotated[Path, typer.Option(help="The drafter, in a layout that the engine loads.")],
    target: Annotated[str, typer.Option(help="The target that it is for.")] = DEFAULT_TARGET,
) -> None:
    """Print the launch line for a checked drafter; what the engine would run differently is refused, and why."""
    from blockdraft.cli.wiring import prepare

    prepare()
    from blockdraft.formats.card import read_card
    from blockdraft.formats.launch import launch

    found = launch(engine, drafter, read_card(target))
    for note in found.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(found.line)
