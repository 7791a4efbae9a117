"""The plots of an ablation, drawn from its files of results; they need the `bench` extra."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockdraft.bench.ablation_table import Results, own_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def need_matplotlib() -> None:
    """Raise ValueError with the install command if plots cannot be drawn."""
    try:
        import matplotlib.figure  # noqa: F401  (whether it is there)
    except ImportError:
        raise ValueError("plots need matplotlib: pip install 'blockdraft[bench]', or give --no-plots") from None


def draw(results: Results, parts: Sequence[str], folder: Path) -> list[Path]:
    """tau by arm, acceptance by position, tau against the cost of a draft, and DFlare's mixes, as far as measured."""
    from matplotlib.figure import Figure

    numbers = {part: {name: own_numbers(result, part) for name, result in results.items()} for part in parts}
    measured = {part: {name: own for name, own in by.items() if own} for part, by in numbers.items()}
    measured = {part: by for part, by in measured.items() if by}
    if not measured:
        return []
    figures = {
        "tau.png": _tau(Figure(figsize=(7, 1 + 0.4 * len(results)), layout="constrained"), list(results), measured),
        "acceptance.png": _acceptance(Figure(figsize=(5 * len(measured), 4), layout="constrained"), measured),
        "cost.png": _cost(Figure(figsize=(7, 4.5), layout="constrained"), results, measured),
    }
    mixed = {name: result["fusion"] for name, result in results.items() if "fusion" in result}
    if mixed:
        figures["fusion.png"] = _fusion(Figure(figsize=(4 * len(mixed), 3.5), layout="constrained"), mixed)
    return [save_figure(figure, folder / name) for name, figure in figures.items()]


def _tau(figure: Figure, arms: list[str], measured: dict[str, dict[str, Any]]) -> Figure:
    axes = figure.subplots()
    height = 0.8 / len(measured)
    for index, (part, by) in enumerate(measured.items()):
        places = [arms.index(name) + (index + 0.5) * height - 0.4 for name in by]
        gains = [(own["tau"] or 1.0) - 1.0 for own in by.values()]
        axes.barh(places, gains, height=height, left=1.0, label=part)  # 1 is plain decoding
    axes.set(yticks=range(len(arms)), yticklabels=arms, xlabel="tau, tokens per verify pass")
    axes.invert_yaxis()
    figure.legend(loc="outside upper right", ncols=2, fontsize="small")
    return figure


def _acceptance(figure: Figure, measured: dict[str, dict[str, Any]]) -> Figure:
    many = figure.subplots(1, len(measured), sharey=True, squeeze=False)[0]
    for axes, (part, by) in zip(many, measured.items(), strict=True):
        for index, (name, own) in enumerate(by.items()):
            shares = own["acceptance_by_position"]
            style = ("o-", "s--", "^:")[index // 10 % 3]  # there are ten colours
            axes.plot([str(k + 1) for k in range(len(shares))], shares, style, markersize=3, label=name)
        axes.set(xlabel="draft", title=part)
    many[0].set(ylabel="share of rounds accepted so far")
    handles, labels = many[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize="small")
    return figure


def _cost(figure: Figure, arms: Results, measured: dict[str, dict[str, Any]]) -> Figure:
    axes = figure.subplots()
    for part, by in measured.items():
        known = {name: arms[name]["cost"]["propose_ms"] for name in by if "cost" in arms[name] and by[name]["tau"]}
        axes.plot(list(known.values()), [by[name]["tau"] for name in known], "o", label=part)
        for name, cost in known.items():
            axes.annotate(name, (cost, by[name]["tau"]), xytext=(4, 2), textcoords="offset points", fontsize="small")
    axes.set(xlabel="one proposal, ms", ylabel="tau, tokens per verify pass")
    figure.legend(loc="outside upper right", ncols=2, fontsize="small")
    return figure


def _fusion(figure: Figure, mixed: dict[str, dict[str, Any]]) -> Figure:
    """Which target layers each draft layer listens to: a row of shares for each."""
    many, images = figure.subplots(1, len(mixed), squeeze=False)[0], []
    for axes, (name, fusion) in zip(many, mixed.items(), strict=True):
        images.append(axes.imshow(fusion["mixes"], vmin=0.0, vmax=1.0, cmap="viridis", aspect="auto"))
        axes.set(title=name, xlabel="target layer", ylabel="draft layer", yticks=range(len(fusion["mixes"])))
        axes.set_xticks(range(len(fusion["taps"])), fusion["taps"])
    figure.colorbar(images[0], ax=list(many), label="share of the mix")
    return figure


def save_figure(figure: Figure, path: Path) -> Path:
    """Write the image, whole or not at all."""
    temporary = path.with_name(f".{path.name}.part")
    figure.savefig(temporary, dpi=150, format="png")
    os.replace(temporary, path)
    return path
