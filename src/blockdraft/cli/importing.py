"""`blockdraft import`: a drafter of another layout as one of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockdraft.cli.wiring import DEFAULT_TARGET


def command(
    drafter: Annotated[Path, typer.Argument(metavar="DRAFTER", help="A folder or GGUF file in another layout.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; it must not be there yet.")],
    target: Annotated[str, typer.Option(help="The target that it is for.")] = DEFAULT_TARGET,
    layout: Annotated[str | None, typer.Option("--from", help="Its layout; none: found out.")] = None,
    block_size: Annotated[
        int | None, typer.Option(help="EAGLE-3: drafts of a chain; none: what its files say, or else 7.")
    ] = None,
) -> None:
    """Read a drafter of another project, check it against its target, and write it as ours."""
    from blockdraft.cli.wiring import prepare

    prepare()
    from blockdraft import __version__
    from blockdraft.formats.card import read_card
    from blockdraft.formats.layouts import import_drafter

    found = import_drafter(drafter, out, read_card(target), {"version": __version__}, layout, block_size)
    typer.echo(f"wrote {out} (from {found.name})")
