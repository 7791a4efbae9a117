"""`blockdraft export`: a drafter in the layout of another engine or project."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    drafter: Annotated[Path, typer.Argument(metavar="DRAFTER", help="A drafter's folder or GGUF file, of any layout.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="What to write; it must not be there yet.")],
    to: Annotated[
        str,
        typer.Option(
            "--to", help="dflash, speculators, dflare, angelspec, transformers, gguf, eagle3 or eagle3-speculators."
        ),
    ],
    target: Annotated[
        str | None, typer.Option(help="The target; needed where the layout holds something of it. Checked if given.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; none: as the drafter is stored.")
    ] = None,
) -> None:
    """Write a drafter for another engine; what its layout cannot carry is refused, with the reason."""
    from blockdraft.cli.wiring import prepare

    prepare()
    from blockdraft.formats.card import read_card
    from blockdraft.formats.layouts import export

    layout = export(drafter, out, to, None if target is None else read_card(target), dtype)
    typer.echo(f"wrote {out} ({layout.name})")
