"""What the comparisons leave behind: one row for each engine, target and kind of drafter, and a table of them.

Every script here writes its rows, in whatever environment it runs: this needs nothing but Python.
`python record.py docs/formats.md results/parity.json` renders the table between the page's markers.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- parity: begin -->", "<!-- parity: end -->"
KEY = ("engine", "layout", "target", "kind")


@dataclass
class Found:
    """What an engine made of one case: how many of its answers agree, and in a line each what does not.

    `worst` is the largest difference of numbers, `accepted` the drafts that it accepted by its own count; None: not
    compared there.
    """

    tokens: int | None = None
    rounds: int | None = None
    accepted: int | None = None
    worst: float | None = None
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Engine:
    """An engine, what of it is compared, and the command that does."""

    engine: str
    version: str
    layout: str
    compared: str
    command: str = "make parity"


def accepted(case: dict[str, Any]) -> int:
    """Drafts that we accepted in all answers of a case, up to the end of each."""
    return sum(sum(answer["rounds"]) - len(answer["rounds"]) for answer in case["answers"])


def make_row(engine: Engine, target: str, case: dict[str, Any], found: Found) -> dict[str, Any]:
    """A row of the record; `passed` says whether what must agree does, and only that (None: nothing could be run)."""
    return {
        **asdict(engine),
        "target": target,
        "kind": case["kind"],
        "cases": len(case["answers"]) or 1,
        "must_agree": case["same"],
        "worst_difference": found.worst,
        "tokens_equal": found.tokens,
        "rounds_equal": found.rounds,
        "accepted_here": None if found.accepted is None else accepted(case),
        "accepted_there": found.accepted,
        "problems": found.problems,
        "passed": bool(found.problems) != case["same"],
    }


def tell(one: dict[str, Any]) -> dict[str, Any]:
    """The row as a line on the screen."""
    counted = "" if one["accepted_here"] is None else f", {one['accepted_here']} drafts accepted"
    far = "" if one["worst_difference"] is None else f", within {one['worst_difference']:.1e}"
    told = "; ".join(one["problems"]) or (f"same{counted}{far}" if any((counted, far)) else one["compared"])
    told = told if one["must_agree"] else f"differs, as it must: {bool(one['problems'])}"
    print(f"{one['engine']:<13} {one['layout']:<13} {one['target']:<13} {one['kind']:<11} {told}", flush=True)
    return one


def record(path: Path, rows: list[dict[str, Any]]) -> int:
    """Put rows into the file, in place of those of the same engine, target and kind; 1 if one of them did not pass."""
    held = {_key(one): one for one in (load(path) if path.exists() else [])} | {_key(one): one for one in rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(held[key]) for key in sorted(held)) + "\n]\n", encoding="utf-8")
    return int(any(one["passed"] is False for one in rows))


def load(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def _key(one: dict[str, Any]) -> tuple[str, ...]:
    return tuple(one[name] for name in KEY)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line for each engine, layout and target, the controls counted apart."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for one in rows:
        key = (f"{one['engine']} {one['version']}", one["layout"], one["target"], one["compared"])
        groups.setdefault(key, []).append(one)
    lines = [
        "| engine | layout | target | drafters | compared | farthest | tokens | rounds | accepted | controls |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (engine, layout, target, compared), group in groups.items():
        same, controls = [one for one in group if one["must_agree"]], [one for one in group if not one["must_agree"]]
        far = [one["worst_difference"] for one in same if one["worst_difference"] is not None]
        both = [_total(same, "accepted_here"), _total(same, "accepted_there")]
        seen = f"{sum(one['passed'] for one in controls)} of {len(controls)}" if controls else ""
        cells = [
            engine, layout, target, str(len(same)), compared, f"{max(far):.1e}" if far else "",
            _share(same, "tokens_equal"), _share(same, "rounds_equal"),
            " / ".join(both) if both[1] else "", seen,
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _share(rows: list[dict[str, Any]], name: str) -> str:
    held = [one for one in rows if one[name] is not None]
    return f"{sum(one[name] for one in held)} of {sum(one['cases'] for one in held)}" if held else ""


def _total(rows: list[dict[str, Any]], name: str) -> str:
    held = [one[name] for one in rows if one[name] is not None]
    return str(sum(held)) if held else ""


def main(page: Path, results: Path) -> None:
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, found, after = rest.partition(END)
    assert found, f"{page} has no place for the table ({BEGIN} ... {END})"
    page.write_text(f"{before}{BEGIN}\n{table(load(results))}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
