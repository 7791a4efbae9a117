"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

TargetOption = Annotated[str, typer.Option("--target", help="Folder, GGUF file, Hub id or short name.")]
ImplOption = Annotated[
    str, typer.Option("--target-impl", help="The target's layers: dense (ours), hf (transformers'), or auto.")
]
DeviceOption = Annotated[str, typer.Option("--device", help="Where models run: cpu, cuda, cuda:1, ...")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16.")]
WeightsOption = Annotated[
    str | None,
    typer.Option("--weights", help="float16: keep the target's matrices in half precision, sums in float32 (CPU)."),
]
DrafterOption = Annotated[
    str,
    typer.Option("--drafter", help="auto, mtp, none, ngram[:K], model:NAME[:K], a folder; or ngram+auto and the like."),
]
VerifyWidthOption = Annotated[
    str,
    typer.Option(
        "--verify-width", help="Drafts verified per round: a number, all, or auto: what pays here, down to none."
    ),
]
ThreadsOption = Annotated[int | None, typer.Option("--threads", help="CPU threads.")]


def parse_verify_width(text: str) -> int | Literal["auto"] | None:
    """What `EngineConfig.verify_width` is to be; None: all.  ValueError: it is none of the three."""
    if text == "auto":
        return "auto"
    if text != "all" and not text.isdecimal():
        raise ValueError(f"--verify-width {text}: give a number of drafts, auto or all")
    return None if text == "all" else int(text)
