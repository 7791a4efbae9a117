"""`blockdraft train`: a recipe to a trained drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockdraft.cli.options import ThreadsOption


def command(
    recipe: Annotated[Path, typer.Argument(help="YAML file, as in recipes/.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, as optim.lr=3e-4; repeatable."),
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run; none: runs/RECIPE.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on with the run in the folder, if there is one.")] = True,
    preview: Annotated[
        int, typer.Option(help="Show so many samples with what is learned of them, and stop.", min=0)
    ] = 0,
    threads: ThreadsOption = None,
) -> None:
    """Train a drafter; interrupted at any moment, the same command goes on where it stopped."""
    from blockdraft.config import TrainConfig, load_config

    config = load_config(TrainConfig, recipe, tuple(overrides or ()))
    for file in config.data.files:
        if not Path(file).is_file():
            raise ValueError(f"{recipe}: data.files: {file}: no such file")
    folder = run_dir if run_dir is not None else Path("runs") / recipe.stem

    from blockdraft.cli.wiring import held_out_acceptance, prepare

    prepare(threads)
    from rich.console import Console

    from blockdraft import __version__
    from blockdraft.targets.resolve import load_target, load_tokenizer
    from blockdraft.train.data import preview as show
    from blockdraft.train.data import read_samples
    from blockdraft.train.run import train_drafter

    if preview:
        tokenizer = load_tokenizer(config.target)
        few = config.data.model_copy(update={"limit": preview})
        samples, report = read_samples(few, tokenizer, [tokenizer.eos_token_id])
        show(samples, tokenizer, Console())
        typer.echo(report.line(len(samples)))
        return
    target = load_target(config.target, device=config.device)
    tokenizer = load_tokenizer(config.target)
    evaluate = held_out_acceptance(target, config.eval_max_tokens) if config.eval_prompts else None
    console = Console(stderr=True, highlight=False)
    result = train_drafter(config, target, tokenizer, folder, __version__, evaluate, resume, console)
    if not result.finished:
        raise typer.Exit(130)
    best = (
        f", best tau {result.best_tau:.3f} at step {result.best_step} ({folder / 'best'})" if result.best_step else ""
    )
    typer.echo(f"trained {result.step} steps{best}")
