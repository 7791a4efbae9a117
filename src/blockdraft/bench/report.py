"""What a benchmark leaves behind: a JSON file that grows as it runs, a table on the screen, and the README's table.

`python -m blockdraft.bench.report README.md results/bench-*.json` renders the table between the README's markers.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table

from blockdraft import __version__
from blockdraft.text import write_whole

PACKAGES = ("torch", "transformers", "safetensors", "numpy")


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    import torch

    return {
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "versions": {"blockdraft": __version__, **{name: version(name) for name in PACKAGES}},
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def save(report: dict[str, Any], path: Path) -> None:
    """Write the JSON, whole or not at all."""
    write_whole(path, json.dumps(report, indent=1) + "\n")


def load(path: Path) -> dict[str, Any]:
    """A report that `save` wrote.  Raises ValueError if it is none."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error.msg})") from None
    if not isinstance(report, dict) or not {"arms", "ratios", "setup"} <= report.keys():
        raise ValueError(f"{path}: not a benchmark report")
    return report


def render(report: dict[str, Any]) -> list[Table]:
    """The report as tables for a terminal: arms, ratios, and acceptance by position where something was drafted."""
    setup = report["setup"]
    title = f"{setup['dataset']}: {len(report['rows'])} answers, temperature {setup['params']['temperature']:g}"
    arms = Table("arm", "tokens/s", "min - max", "total", "tau", "identical", title=title)
    for arm in report["arms"]:
        rate = arm["tokens_per_second"]
        arms.add_row(
            arm["name"],
            f"{rate['median']:.1f}",
            f"{rate['min']:.1f} - {rate['max']:.1f}",
            f"{rate['total']:.1f}",
            f"{arm['tau']:.2f}" if arm["tau"] else "",
            _identical(arm),
        )
    tables = [arms]
    if report["ratios"]:
        ratios = Table("ratio", "median", "min - max", "of totals")
        for name, ratio in report["ratios"].items():
            spread = f"{ratio['min']:.2f} - {ratio['max']:.2f}"
            ratios.add_row(name, f"{ratio['median']:.2f}x", spread, f"{ratio['total']:.2f}x")
        tables.append(ratios)
    drafting = [arm for arm in report["arms"] if arm["acceptance_by_position"]]
    if drafting:
        width = max(len(arm["acceptance_by_position"]) for arm in drafting)
        places = Table("right up to draft", *(str(k + 1) for k in range(width)))
        for arm in drafting:
            places.add_row(arm["name"], *(f"{share:.2f}" for share in arm["acceptance_by_position"]))
        tables.append(places)
    return tables


def markdown(reports: Sequence[dict[str, Any]]) -> str:
    """The README's table: one line for each report that compares drafted with plain decoding."""
    lines = [
        "| prompts | temperature | drafter | answers | identical | tau | plain | drafted | HF | over plain | over HF |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for report in reports:
        arms = {arm["name"]: arm for arm in report["arms"]}
        if "plain" not in arms or "drafted" not in arms:
            continue
        setup, drafted = report["setup"], arms["drafted"]
        cells = [
            setup["dataset"],
            f"{setup['params']['temperature']:g}",
            setup["drafter"]["name"],
            str(drafted["compared_answers"]),
            str(drafted["identical_answers"]),
            f"{drafted['tau'] or 0:.2f}",
            *(_rate(arms.get(name)) for name in ("plain", "drafted", "hf")),
            *(_times(report["ratios"].get(f"drafted/{name}")) for name in ("plain", "hf")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    notes = dict.fromkeys(_note(report["setup"]) for report in reports)
    return "\n".join([*lines, "", *notes])


def update_readme(readme: Path, results: Sequence[Path]) -> None:
    """Put the table of some results between the README's markers.  Raises ValueError if it has none."""
    insert(readme, "results", markdown(load_finished(results)))


def load_finished(results: Sequence[Path]) -> list[dict[str, Any]]:
    """Reports of benchmarks that ran to their end.  Raises ValueError if one did not, or is none."""
    reports = [load(path) for path in results]
    for path, report in zip(results, reports, strict=True):
        if not report["complete"]:
            raise ValueError(f"{path}: the benchmark was not finished")
    return reports


def insert(document: Path, name: str, table: str) -> None:
    """Put a table between a document's markers of that name.  Raises ValueError if it has none."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = document.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        raise ValueError(f"{document}: no lines '{begin}' and '{end}'")
    head, tail = text.partition(begin)[0], text.partition(end)[2]
    document.write_text(f"{head}{begin}\n{table}\n{end}{tail}", encoding="utf-8")


def _identical(arm: dict[str, Any]) -> str:
    if arm["identical"] is None:
        return ""
    return f"{arm['identical_answers']} of {arm['compared_answers']}"


def _rate(arm: dict[str, Any] | None) -> str:
    return f"{arm['tokens_per_second']['median']:.1f}" if arm else ""


def _times(ratio: dict[str, Any] | None) -> str:
    return f"**{ratio['median']:.2f}x**" if ratio else ""


def _note(setup: dict[str, Any]) -> str:
    return (
        f"Tokens per second, median over prompts, prefill included; {setup['target']} in {setup['dtype']}, up to "
        f"{setup['params']['max_tokens']} tokens, {setup['slots']} at once, {on_what(setup['machine'])}."
    )


def on_what(measured: dict[str, Any]) -> str:
    """What `machine` has told, as the end of a sentence."""
    versions = measured["versions"]
    return (
        f"{measured['cpu']}, {measured['threads']} threads, torch {versions['torch']}, "
        f"transformers {versions['transformers']}"
    )


if __name__ == "__main__":
    update_readme(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
