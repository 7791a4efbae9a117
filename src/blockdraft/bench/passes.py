"""What a pass of a target costs, by what computes it: `python -m blockdraft.bench.passes results/kernel.json`.

All arms are timed in one process and take turns, so that a busy moment falls on all of them; the shortest time of each
counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from blockdraft.bench.report import machine, save
from blockdraft.ops.kernel import VARIABLE, describe_kernel, library
from blockdraft.targets.pretrained import PretrainedTarget
from blockdraft.targets.resolve import load_target

# name -> (BLOCKDRAFT_KERNEL, weights)
ARMS = {
    "oneDNN": ("off", None),
    "kernel, AVX2": ("avx2", None),
    "kernel": ("on", None),
    "kernel, float16 weights": ("on", "float16"),
}
ROWS = (1, 2, 4, 8, 16, 64, 256)
PROMPT = 64  # rows from which a pass is taken for one over a prompt, of which only the last logits are wanted
CONTEXT = 256
Times = dict[str, dict[int, float]]


def main(words: list[str]) -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser("python -m blockdraft.bench.passes", description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=30.0, help="for each number of threads")
    options = parser.parse_args(words)
    targets, kernels = {}, {}
    for name, (choice, weights) in ARMS.items():
        os.environ[VARIABLE] = choice
        library.cache_clear()
        targets[name], kernels[name] = load_target(options.target, weights=weights), describe_kernel()
    measured = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        load = os.getloadavg()[0]
        times = shortest(targets, options.seconds)
        measured.append({"threads": threads, "load_before": load, "milliseconds": rounded(times)})
        for name, each in times.items():
            sys.stdout.write(f"{threads} threads, {name}: {', '.join(f'{r}: {ms:.1f}' for r, ms in each.items())}\n")
    setup: dict[str, Any] = {
        "command": " ".join(["python -m blockdraft.bench.passes", f"results/{options.output.name}", *words[1:]]),
        "target": options.target,
        "context": CONTEXT,
        "kernels": kernels,
        "machine": machine(),
    }
    save({"setup": setup, "passes": measured}, options.output)


@torch.inference_mode()
def shortest(targets: dict[str, PretrainedTarget], seconds: float) -> Times:
    """Shortest milliseconds of a pass of each target over so many rows, found in so many seconds, or in one try."""
    ids = torch.randint(100, 1000, (1, CONTEXT + max(ROWS)), generator=torch.Generator().manual_seed(0))
    caches = {name: target.new_cache(1, ids.shape[1]) for name, target in targets.items()}
    for name, target in targets.items():
        target.forward(ids[:, :CONTEXT], caches[name], [0], 1)
    times: Times = {name: {} for name in targets}
    end = time.monotonic() + seconds
    for turn in range(1 << 30):
        if turn and time.monotonic() > end:
            break
        # Passes over a prompt take long and vary little, so they have a turn less often.
        for rows in (rows for rows in ROWS if rows < PROMPT or turn % 8 == 0):
            for name, target in targets.items():
                began = time.perf_counter()
                target.forward(ids[:, CONTEXT : CONTEXT + rows], caches[name], [0], None if rows < PROMPT else 1)
                took = (time.perf_counter() - began) * 1e3
                caches[name].truncate([0], [CONTEXT])
                times[name][rows] = min(took, times[name].get(rows, took))
    return times


def rounded(times: Times) -> dict[str, dict[str, float]]:
    """The same for a file."""
    return {name: {str(rows): round(ms, 2) for rows, ms in each.items()} for name, each in times.items()}


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = [
        "| threads | computed by | " + " | ".join(str(rows) for rows in ROWS) + " |",
        "|---|---|" + "---|" * len(ROWS),
    ]
    for passes in report["passes"]:
        for name, times in passes["milliseconds"].items():
            cells = " | ".join(f"{times[str(rows)]:.1f}" for rows in ROWS)
            lines.append(f"| {passes['threads']} | {name} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
