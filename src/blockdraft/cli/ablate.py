"""`blockdraft ablate`: arms that differ in a few settings, trained alike, measured alike, in one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli.options import ThreadsOption

if TYPE_CHECKING:
    from blockdraft.bench.ablation import Recipe
    from blockdraft.cli.matrix import Folders
    from blockdraft.config import AblationConfig


def command(
    recipe: Annotated[Path, typer.Argument(help="YAML file with base, arms, budget and prompts.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, as base.optim.lr=3e-4; repeatable."),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="ARM", help="Run only this arm; repeatable.")] = None,
    show: Annotated[bool, typer.Option("--list", help="Say what is done, and stop.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Make table and plots from the files, and stop.")] = False,
    timing: Annotated[bool, typer.Option(help="Measure rates too, which needs a quiet machine.")] = True,
    plots: Annotated[bool, typer.Option(help="Draw plots; needs matplotlib.")] = True,
    runs_dir: Annotated[Path, typer.Option(help="Where runs and features are kept.")] = Path("runs/ablations"),
    output: Annotated[Path, typer.Option(help="Where results are kept.")] = Path("results/ablations"),
    threads: ThreadsOption = None,
) -> None:
    """Train and measure every arm; interrupted at any moment, the same command goes on where it stopped."""
    from blockdraft.bench.ablation import arm_recipes
    from blockdraft.bench.ablation_plots import need_matplotlib
    from blockdraft.cli.matrix import Folders
    from blockdraft.config import ConfigError, load_ablation

    config = load_ablation(recipe, tuple(overrides or ()))
    try:
        recipes = arm_recipes(config)
    except ConfigError as error:
        raise ConfigError(f"{recipe}: {error}") from None
    unknown = [name for name in only or () if name not in recipes]
    if unknown:
        raise ValueError(f"--only {unknown[0]}: no such arm (known: {', '.join(recipes)})")
    folders = Folders(runs_dir / recipe.stem, output / recipe.stem)
    if plots and not show:
        need_matplotlib()
    if show:
        for name in recipes:
            typer.echo(f"{name}: {state(config, recipes[name], name, folders)}")
        return
    if not report:
        run(recipe, config, recipes, folders, only, threads, timing, plots)
    typer.echo(f"table: {write_report(config, recipes, folders, plots)}")


def state(config: AblationConfig, recipe: Recipe, name: str, folders: Folders) -> str:
    """How far an arm is, by its files."""
    from blockdraft.bench.ablation import ACCEPTANCE, TIMED, Ready, current, load_result, part_keys
    from blockdraft.train.weights import checkpoints

    result, begun = load_result(folders.result(name)), folders.identity(name)
    if begun is not None and not current(config, recipe, {"identity": begun}):
        return f"changed; to run it anew, remove {folders.run(name)}"
    if result and not current(config, recipe, result):
        result = {}
    if begun is None and not result:
        return "missing"
    keys = part_keys(config)
    measured, timed = (
        sum(kind in result.get("measured", {}).get(key, {}) for key in keys) for kind in (ACCEPTANCE, TIMED)
    )
    if timed == len(keys):
        return "done"
    if measured or isinstance(recipe, Ready) or (folders.run(name) / "last").exists():
        return f"measured {measured} of {len(keys)}, timed {timed}"
    saved = checkpoints(folders.run(name) / "checkpoints")
    return f"training, saved at step {int(saved[-1].name.removeprefix('step-'))}" if saved else "begun"


def run(
    recipe: Path,
    config: AblationConfig,
    recipes: dict[str, Recipe],
    folders: Folders,
    only: list[str] | None,
    threads: int | None,
    timing: bool,
    plots: bool,
) -> None:
    """Check everything, then plain decoding, arm after arm, and the rates of all in one run.

    An arm that fails does not keep the others from it.
    """
    from blockdraft.bench.ablation import Ready
    from blockdraft.bench.prompts import load_prompts
    from blockdraft.cli.matrix import Matrix, StoppedError
    from blockdraft.cli.wiring import prepare
    from blockdraft.drafters.names import parse_drafter
    from blockdraft.train.loop import TrainingError
    from blockdraft.train.progress import say

    for file in config.base.data.files:
        if not Path(file).is_file():
            raise ValueError(f"{recipe}: base.data.files: {file}: no such file")
    for name, one in recipes.items():
        if isinstance(one, Ready) and one.other is None:
            try:
                parse_drafter(one.drafter)
            except ValueError as error:
                raise ValueError(f"{recipe}: arms.{name}: {error}") from None
    prompts = [load_prompts(b.dataset, Path(b.data_dir) if b.data_dir else None, b.limit) for b in config.bench]
    prepare(threads)
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    chosen = [name for name in recipes if not only or name in only]
    matrix = Matrix(config, recipes, prompts, folders, console)
    matrix.check(chosen)
    matrix.measuring.run_plain()
    failed: dict[str, Any] = {}
    for name in chosen:
        try:
            matrix.run(name)
        except TrainingError as error:
            failed[name] = error
            say(console, f"{name}: {error}")
            continue
        except StoppedError:
            raise typer.Exit(130) from None
        write_report(config, recipes, folders, plots)
    if timing:
        matrix.time([name for name in chosen if name not in failed])
    if failed:
        raise ValueError("arms that failed: " + "; ".join(f"{name}: {error}" for name, error in failed.items()))


def write_report(config: AblationConfig, recipes: dict[str, Recipe], folders: Folders, plots: bool) -> Path:
    """Table and plots from the files of results.  ValueError: there are none."""
    from blockdraft.bench.ablation import part_keys
    from blockdraft.bench.ablation_plots import draw
    from blockdraft.bench.ablation_table import load_results, render

    results, parts = load_results(folders.results, config, recipes), part_keys(config)
    if not results:
        raise ValueError(f"{folders.results}: no results yet")
    path = folders.results / "table.md"
    temporary = path.with_suffix(".part")
    temporary.write_text(render(results, list(config.arms), parts), encoding="utf-8")
    temporary.replace(path)
    if plots:
        draw(results, parts, folders.results)
    return path
