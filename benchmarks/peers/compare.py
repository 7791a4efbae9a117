"""`make peers`: other engines and ours on the same prompts, with the same weights and the same drafter, turn about.

It starts one worker process for each engine and kind of weights, in the environment of that engine, asks them in turn,
and writes one JSON file.  Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from process import Worker

from blockdraft.bench.measure import Answer, Arm, Chat, Row, measure
from blockdraft.bench.peers import Peer, Told, chosen, describe, facts, markdown
from blockdraft.bench.prompts import DATASETS, Prompt, load_prompts
from blockdraft.bench.report import machine, save
from blockdraft.config import SamplingParams

HERE = Path(__file__).parent
TARGET = "smollm2-135m"
THREADS = 2
LEFT_TO_ITSELF = 3  # what llama.cpp drafts a round unless it is told
SPARE = 64  # llama.cpp has drafts behind the last token in its context too
Ask = Callable[[str, Sequence[int], int, Sequence[int]], Mapping[str, Any]]


def main(arguments: Sequence[str]) -> int:
    """Exit code 0, or 2 and one line for a mistake of the person at the keyboard."""
    try:
        run(parse(arguments), arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="compare.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--drafter", type=Path, required=True, help="folder of a plain DFlash drafter")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file; a data set's gets the papers' wording")
    parser.add_argument("--prompts-limit", type=int, default=10, help="only the first so many")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--threads", type=int, default=THREADS, help="of every engine")
    parser.add_argument("--arms", help="only these, by commas")
    parser.add_argument("--output", type=Path, help="JSON; results/peers.json, or peers-1-thread.json and so on")
    parser.add_argument("--environments", type=Path, default=Path(".parity"), help="where `make peers` installs")
    options = parser.parse_args(arguments)
    options.output = options.output or default_output(options.threads)
    return options


def default_output(threads: int) -> Path:
    """A file for each number of threads; the usual number has the plain name."""
    name = {1: "peers-1-thread", THREADS: "peers"}.get(threads, f"peers-{threads}-threads")
    return Path("results") / f"{name}.json"


def run(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Everything from files to files.  Raises ValueError, in one line, for what is missing or does not fit."""
    from material import make_material

    from blockdraft.cli.bench import room_for, without_folder
    from blockdraft.cli.wiring import make_chat, prepare
    from blockdraft.targets.resolve import load_tokenizer

    for name in ("threads", "prompts_limit", "max_tokens"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: need at least 1")
    peers = chosen(options.arms)
    prompts, dataset = read_prompts(options.prompts, options.prompts_limit)
    prepare(options.threads)
    tokenizer = load_tokenizer(TARGET)
    chat, params = make_chat(tokenizer), SamplingParams(max_tokens=options.max_tokens)
    room = room_for(prompts, chat, options.max_tokens) + SPARE
    material = make_material(TARGET, options.drafter, options.environments / "peers")
    with ExitStack() as stack:
        asks, versions = start(peers, plans(material.paths, material.drafter, options, room), options, stack)
        setup = {
            "command": shlex.join(["benchmarks/peers/compare.py", *(without_folder(word) for word in arguments)]),
            "dataset": dataset,
            "prompts": len(prompts),
            "params": params.model_dump(mode="json"),
            "target": TARGET,
            "drafter": material.drafter,
            "arms": facts(peers),
            "machine": machine(),
            "versions": versions,
        }
        arms = [make_arm(peer, asks[peer.name], [tokenizer.eos_token_id]) for peer in peers]
        report = compare(prompts, arms, chat, params, setup, options.output)
    print(f"{markdown([report])}\n\n{options.output}")


def read_prompts(path: Path, limit: int) -> tuple[list[Prompt], str]:
    """The first prompts of a file, and what they are; a data set's own file is asked in the papers' words."""
    known = next((name for name, spec in DATASETS.items() if spec.file == path.name), None)
    if known is not None:
        return load_prompts(known, path.parent, limit), known
    return load_prompts(str(path), limit=limit), path.stem


def plans(
    paths: Mapping[str, str], drafter: Mapping[str, Any], options: argparse.Namespace, room: int
) -> Iterator[tuple[Path, str, dict[str, Any], list[str]]]:
    """Each worker: its Python, its script, what it loads, and the arms that it answers for."""
    common = {"threads": options.threads, "room": room, "drafts": drafter["block_size"] - 1}
    own = {"target": paths["target"], "dflash": paths["dflash"], "assistant": paths["assistant"]}
    names = ["transformers", "transformers-lookup", "transformers-dflash", "dflash"]
    yield options.environments / "reference" / "bin" / "python", "reference.py", {**common, **own}, names
    for weights in ("f32", "f16"):
        arm, draft = f"llamacpp-{weights}", paths[f"drafter-{weights}"]
        for own in (
            {"arm": arm, "drafter": None},
            {"arm": f"{arm}-dflash", "drafter": draft},
            {"arm": f"{arm}-dflash-3", "drafter": draft, "drafts": min(LEFT_TO_ITSELF, common["drafts"])},
        ):
            own = {**common, **own, "target": paths[f"target-{weights}"]}
            yield options.environments / "llamacpp" / "bin" / "python", "llamacpp.py", own, [own["arm"]]
    cache = str(options.environments / "peers" / "cache")
    ours = {"target": paths["target"], "drafter": paths["dflash"], "cache": cache}
    for arm, kept in (("blockdraft", None), ("blockdraft-f16", "float16")):
        own = {**common, **ours, "arm": arm, "weights": kept}
        yield Path(sys.executable), "ours.py", own, [arm, f"{arm}-dflash", f"{arm}-auto"]


def start(
    peers: Sequence[Peer],
    planned: Iterator[tuple[Path, str, dict[str, Any], list[str]]],
    options: argparse.Namespace,
    stack: ExitStack,
) -> tuple[dict[str, Ask], dict[str, dict[str, str]]]:
    """The workers that are needed, one after the other: whom to ask for each arm, and the versions by worker."""
    asks: dict[str, Ask] = {}
    versions: dict[str, dict[str, str]] = {}
    for python, script, settings, names in planned:
        if not {peer.name for peer in peers} & set(names):
            continue
        if not python.is_file():
            raise ValueError(f"{python} is not there: `make peers` installs the other engines")
        log = options.environments / "peers" / f"{names[0]}.log"
        print(f"loading {', '.join(names)}", file=sys.stderr, flush=True)
        worker = Worker(python, HERE / script, settings, log, options.threads)
        stack.callback(worker.close)
        versions[names[0]] = worker.facts["versions"]
        asks |= dict.fromkeys(names, worker.ask)
    return asks, versions


def make_arm(peer: Peer, ask: Ask, stop: Sequence[int]) -> Arm:
    """A worker's arm as one of a benchmark's, which asks one prompt at a time."""

    def answer(prompts: list[list[int]], params: list[SamplingParams]) -> list[Answer]:
        answers: list[Answer] = []
        for ids, one in zip(prompts, params, strict=True):
            told = ask(peer.name, ids, one.max_tokens, stop)
            tokens = tuple(told["tokens"])
            answers.append(
                Told(
                    token_ids=tokens,
                    finish_reason="stop" if tokens[-1] in stop else "length",
                    **{key: value for key, value in told.items() if key != "tokens"},
                )
            )
        return answers

    return Arm(peer.name, answer, foreign=peer.engine != "blockdraft", like=peer.like)


def compare(
    prompts: Sequence[Prompt],
    arms: Sequence[Arm],
    chat: Chat,
    params: SamplingParams,
    setup: Mapping[str, Any],
    path: Path,
) -> dict[str, Any]:
    """Ask all of them in turn, and save after every prompt, so that an interruption loses nothing."""
    rows: list[Row] = []
    report: dict[str, Any] = {}
    for row in measure(prompts, arms, chat, params):
        rows.append(row)
        report = {"complete": False, "setup": dict(setup), **describe(rows, arms)}
        save(report, path)
        rates = ", ".join(f"{name} {timed.rate:.1f}" for name, timed in row.arms.items())
        print(f"{len(rows)}/{len(prompts)} tokens/s: {rates}", file=sys.stderr, flush=True)
    report["complete"] = True
    save(report, path)
    return report


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the workers have to be ended, the stopped ones too
    sys.exit(main(sys.argv[1:]))
