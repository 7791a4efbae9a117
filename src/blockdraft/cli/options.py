"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

TargetOption = Annotated[str, typer.Option("--target", help="Folder, GGUF file, Hub id or short name.")]
ImplOption = Annotated[
    str, typer.Option("--target-impl", help="The target's layers: dense (ours), hf (transformers'), or auto.")
]
DeviceOption = Annotated[str, typer.Option("--device", help="Where models run: cpu, cuda, cuda:1, ...")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16.")]
DrafterOption = Annotated[
    str,
    typer.Option("--drafter", help="auto, none, ngram[:K], model:NAME[:K], a folder; or ngram+auto and the like."),
]
ThreadsOption = Annotated[int | None, typer.Option("--threads", help="CPU threads.")]
