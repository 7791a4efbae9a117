"""Three ways to draft above temperature 0, compared on the same answers: what is counted, and the table of it.

`python -m blockdraft.bench.choices docs/performance.md results/draft-choices.json` renders the table between the
document's markers.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blockdraft.bench.report import insert

ARGMAX, COUPLED, INDEPENDENT = "argmax", "coupled", "independent"
WAYS = (ARGMAX, COUPLED, INDEPENDENT)
RESAMPLES = 10_000

# What one answer took: its id, the tokens behind its first one, and the rounds of each way.
Counts = Mapping[str, Any]


def describe(temperature: float, counts: Sequence[Counts]) -> dict[str, Any]:
    """tau of each way and coupled drafts over the others, with what 95% of resamples of the prompts say."""

    def tau(way: str) -> Callable[[Sequence[Counts]], float]:
        return lambda some: sum(one["tokens"] for one in some) / sum(one["rounds"][way] for one in some)

    def over(way: str) -> Callable[[Sequence[Counts]], float]:
        return lambda some: tau(COUPLED)(some) / tau(way)(some)

    return {
        "temperature": temperature,
        "tau": {way: spread(counts, tau(way)) for way in WAYS},
        "coupled_over": {way: spread(counts, over(way)) for way in WAYS if way != COUPLED},
        "answers": list(counts),
    }


def spread(counts: Sequence[Counts], value: Callable[[Sequence[Counts]], float]) -> dict[str, float]:
    """A value over some answers, and the middle 95% of what it is over as many of them drawn with replacement."""
    rng = random.Random(0)
    drawn = sorted(value(rng.choices(counts, k=len(counts))) for _ in range(RESAMPLES))
    low, high = drawn[round(0.025 * RESAMPLES)], drawn[round(0.975 * RESAMPLES) - 1]
    return {"value": round(value(counts), 4), "low": round(low, 4), "high": round(high, 4)}


def markdown(result: Mapping[str, Any]) -> str:
    """The document's table: one line for each temperature."""
    lines = [
        "| temperature | answers | likeliest | coupled | independent | coupled over likeliest | over independent |",
        "|---|---|---|---|---|---|---|",
    ]
    for part in result["parts"]:
        values = [part["tau"][way] for way in WAYS] + [part["coupled_over"][way] for way in (ARGMAX, INDEPENDENT)]
        cells = [f"{one['value']:.2f} ({one['low']:.2f} to {one['high']:.2f})" for one in values]
        lines.append(" | ".join([f"| {part['temperature']:g}", str(len(part["answers"])), *cells]) + " |")
    setup, drafter = result["setup"], result["setup"]["drafter"]
    note = (
        "tau: tokens per verify pass, the target's own included; in brackets what 95% of resamples of the prompts say. "
        f"{setup['target']} with {drafter['name']}, {drafter['max_drafts']} drafts, all verified; the first "
        f"{setup['prompts']} prompts of {setup['dataset']}, up to {setup['max_tokens']} tokens."
    )
    return "\n".join([*lines, "", note])


if __name__ == "__main__":
    insert(Path(sys.argv[1]), "draft choices", markdown(json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))))
