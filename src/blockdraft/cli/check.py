"""`blockdraft check`: is a drafter what it says it is, and one for this target?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockdraft.cli.wiring import DEFAULT_TARGET


def command(
    drafter: Annotated[Path, typer.Argument(metavar="DRAFTER", help="A drafter's folder or GGUF file, of any layout.")],
    target: Annotated[str, typer.Option(help="The target that it is for.")] = DEFAULT_TARGET,
) -> None:
    """Check a drafter against a target: a table of checks, a line for each that fails, and exit code 1 if any does."""
    from blockdraft.cli.wiring import prepare

    prepare()
    from rich.console import Console
    from rich.table import Table

    from blockdraft.formats.card import read_card
    from blockdraft.formats.layouts import check

    _, checks = check(drafter, read_card(target))
    table = Table("check", "", "found", title=f"{drafter} for {target}", title_justify="left")
    for one in checks:
        table.add_row(one.name, "ok" if one.passed else "FAIL", one.found)
    Console(highlight=False).print(table, markup=False)
    failed = [one for one in checks if not one.passed]
    for one in failed:
        typer.echo(f"{drafter}: {one.name}: {one.found}", err=True)
    raise typer.Exit(1 if failed else 0)
