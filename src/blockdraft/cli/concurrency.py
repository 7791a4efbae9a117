"""`blockdraft bench --slots 1,4,8,...`: plain and drafted decoding turn about, with ever more requests at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockdraft.bench.measure import Arm, Chat
    from blockdraft.bench.prompts import Prompt
    from blockdraft.bench.summary import Margin
    from blockdraft.config import SamplingParams


def parse_slots(text: str) -> list[int]:
    """One number of slots, or several that rise.  ValueError: they are none."""
    words = text.split(",")
    levels = [int(word) for word in words if word.strip().isdecimal()]
    if len(levels) != len(words) or levels[0] < 1 or sorted(set(levels)) != levels:
        raise ValueError(f"--slots {text}: give a number, or several that rise, by commas: 1,4,8")
    return levels


def run_levels(
    prompts: Sequence[Prompt],
    levels: Sequence[int],
    limit: int,
    make_arms: Callable[[int], Sequence[Arm]],
    chat: Chat,
    params: SamplingParams,
    repeats: int,
    setup: dict[str, Any],
    path: Path,
    margin: Margin,
) -> None:
    """Measure level by level, save after each so that an interruption loses nothing, and show the table."""
    from rich.console import Console

    from blockdraft.bench.concurrency import markdown, prompts_at
    from blockdraft.bench.measure import measure
    from blockdraft.bench.report import save
    from blockdraft.bench.summary import summarise

    console = Console(stderr=True, highlight=False)
    result: dict[str, Any] = {"complete": False, "setup": setup, "levels": []}
    for level in levels:
        asked, arms = prompts[: prompts_at(level, limit)], make_arms(level)
        rows = list(measure(asked, arms, chat, params, repeats, slots=len(asked)))
        result["levels"].append({"slots": level, "prompts": len(asked), **summarise(rows, arms, margin)})
        result["complete"] = level == levels[-1]
        save(result, path)
        rates = ", ".join(
            f"{arm['name']} {arm['tokens_per_second']['total']:.1f}" for arm in result["levels"][-1]["arms"]
        )
        console.print(f"{level} at once, {len(asked)} prompts: tokens/s: {rates}", style="dim")
    Console(highlight=False).print(f"{markdown([result])}\n{path}", soft_wrap=True)
