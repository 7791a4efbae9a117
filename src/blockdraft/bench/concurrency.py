"""Rates by how many requests run at once: what is asked at each level, and the table of it.

At each level all prompts are asked at the same time and so many of them run, so that a slot is free only at the end.
`python -m blockdraft.bench.concurrency docs/performance.md results/concurrency-*.json` renders the table between the
document's markers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blockdraft.bench.report import insert, on_what


def prompts_at(level: int, limit: int) -> int:
    """Prompts to ask where `level` run at once: `limit`, and as many more as fill the slots to the last."""
    return -(-limit // level) * level


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """The document's table: one line for each temperature and level.  ValueError: a file is not finished."""
    lines = [
        "| temperature | at once | answers | identical | tau | plain | drafted | drafted over plain |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        setup = result["setup"]
        if not result["complete"]:
            raise ValueError(f"{setup['dataset']} at {setup['params']['temperature']:g}: not finished")
        for level in result["levels"]:
            plain, drafted = level["arms"]
            cells = [
                f"{setup['params']['temperature']:g}",
                str(level["slots"]),
                str(drafted["compared_answers"]),
                str(drafted["identical_answers"]),
                f"{drafted['tau'] or 0:.2f}",
                *(f"{arm['tokens_per_second']['total']:.1f}" for arm in (plain, drafted)),
                f"**{level['ratios']['drafted/plain']['total']:.2f}x**",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    notes = dict.fromkeys(_note(result["setup"]) for result in results)
    return "\n".join([*lines, "", *notes])


def _note(setup: Mapping[str, Any]) -> str:
    return (
        f"Tokens per second, all tokens over all time, prefill included; {setup['dataset']}, {setup['target']} in "
        f"{setup['dtype']}, up to {setup['params']['max_tokens']} tokens, {on_what(setup['machine'])}."
    )


if __name__ == "__main__":
    files = [json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[2:]]
    insert(Path(sys.argv[1]), "concurrency", markdown(files))
