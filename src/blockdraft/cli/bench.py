"""`blockdraft bench`: plain, drafted and Hugging Face decoding, turn about in one process."""

from __future__ import annotations

import hashlib
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli.concurrency import parse_slots, run_levels
from blockdraft.cli.options import (
    DeviceOption,
    DrafterOption,
    DtypeOption,
    ImplOption,
    TargetOption,
    ThreadsOption,
    VerifyWidthOption,
    WeightsOption,
    parse_verify_width,
)
from blockdraft.cli.wiring import DEFAULT_DRAFTER, DEFAULT_TARGET

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockdraft.bench.measure import Answer, Arm, Chat
    from blockdraft.bench.prompts import Prompt
    from blockdraft.bench.summary import Margin
    from blockdraft.config import SamplingParams
    from blockdraft.drafters.names import DrafterChoice
    from blockdraft.engine.api import LLM

ARMS = ("plain", "drafted", "hf")


def command(
    dataset: Annotated[
        str, typer.Option(help="gsm8k, humaneval, mbpp, mt-bench, math500, aime25, livecodebench, or a JSONL file.")
    ] = "gsm8k",
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the data set's JSONL; none: download it.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many prompts.", min=1)] = None,
    arms: Annotated[str, typer.Option(help="What to compare, by commas; the first is the reference.")] = ",".join(ARMS),
    target: TargetOption = DEFAULT_TARGET,
    target_impl: ImplOption = "auto",
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    weights: WeightsOption = None,
    drafter: DrafterOption = DEFAULT_DRAFTER,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option()] = 0.0,
    seed: Annotated[int, typer.Option(help="Prompt i is sampled with seed + i.")] = 0,
    repeats: Annotated[int, typer.Option(help="Runs of each arm per prompt; the median counts.", min=1)] = 1,
    slots: Annotated[str, typer.Option(help="Prompts answered at once; several, 1,4,8: compare them.")] = "1",
    verify_width: VerifyWidthOption = "auto",
    coupled: Annotated[
        bool, typer.Option(help="Draft by the noise of the target's choices; else what is likeliest.")
    ] = True,
    block_size: Annotated[int | None, typer.Option(help="Rows of a drafted block; none: as it was trained.")] = None,
    threads: ThreadsOption = None,
    output: Annotated[
        Path | None, typer.Option(help="JSON file; none: results/bench-DATASET-tTEMPERATURE.json.")
    ] = None,
) -> None:
    """Measure tokens per second, acceptance length and whether every answer is the same."""
    from blockdraft.bench.concurrency import prompts_at
    from blockdraft.bench.prompts import load_prompts
    from blockdraft.config import SamplingParams

    names, width = [name.strip() for name in arms.split(",") if name.strip()], parse_verify_width(verify_width)
    if not names or set(names) - set(ARMS) or len(set(names)) != len(names):
        raise ValueError(f"--arms {arms}: give some of {','.join(ARMS)}, each once")
    levels = parse_slots(slots)
    if max(levels) > 1 and "hf" in names:
        raise ValueError("--slots above 1 has no hf arm: leave it out with --arms plain,drafted")
    if len(levels) > 1 and names != ["plain", "drafted"]:
        raise ValueError(f"--slots {slots} compares plain and drafted decoding: give --arms plain,drafted")
    if weights is not None and "hf" in names:
        raise ValueError("the hf arm knows nothing of --weights: leave it out with --arms plain,drafted")
    params = SamplingParams.parse({"max_tokens": max_tokens, "temperature": temperature, "seed": seed}, "bench")
    asked = limit if limit is None or len(levels) == 1 else max(prompts_at(level, limit) for level in levels)
    prompts = load_prompts(dataset, data_dir, asked)
    kind = "bench" if len(levels) == 1 else "concurrency"
    path = output if output is not None else Path("results") / f"{kind}-{Path(dataset).stem}-t{temperature:g}.json"

    from blockdraft.cli.wiring import load, make_chat, make_engine, prepare
    from blockdraft.drafters.names import parse_drafter

    chosen = parse_drafter(drafter) if "drafted" in names else None
    if "drafted" in names and chosen is None:
        raise ValueError("the drafted arm needs a drafter: give --drafter FOLDER, or leave the arm out of --arms")
    if block_size is not None and chosen is None:
        raise ValueError("--block-size is for the drafted arm, and --arms has none")
    prepare(threads)
    from blockdraft.bench.report import machine
    from blockdraft.engine.api import LLM
    from blockdraft.ops.kernel import describe_kernel

    loaded, tokenizer = load(target, chosen, target_impl, device, dtype, weights)
    chat = make_chat(tokenizer)
    room = room_for(prompts, chat, max_tokens)
    llm = LLM(
        loaded,
        chosen,
        tokenizer=tokenizer,
        slots=levels[0],
        capacity=room,
        verify_width=width,
        coupled=coupled,
        block_size=block_size,
    )
    setup = {
        "command": shlex.join(["blockdraft", *(without_folder(word) for word in sys.argv[1:])]),
        "dataset": Path(dataset).stem,
        "prompts": len(prompts),
        "params": params.model_dump(mode="json"),
        "target": llm.target.info.name,
        "target_impl": loaded.implementation,
        "dtype": str(llm.target.info.dtype).removeprefix("torch."),
        "weights": weights,
        "kernel": describe_kernel(),
        "drafter": describe_drafter(chosen, llm),
        "repeats": repeats,
        "slots": levels if len(levels) > 1 else levels[0],
        "verify_width": width,
        "coupled": coupled,
        "machine": machine(),
    }

    def contenders(level: int) -> list[Arm]:
        if level != levels[0]:
            parts = llm.engine.prefill_tokens
            llm.engine = make_engine(llm.target, llm.drafter, tokenizer, room, level, width, coupled, parts)
        llm.engine.prepare()  # what is measured once for a machine is no part of anybody's time
        return [make_arm(name, llm, target, room, level, params) for name in names]

    margin = make_margin(llm, room)
    if len(levels) > 1:
        run_levels(prompts, levels, limit or len(prompts), contenders, chat, params, repeats, setup, path, margin)
    else:
        run(prompts, contenders(levels[0]), chat, params, repeats, levels[0], setup, path, margin)


def room_for(prompts: Sequence[Prompt], chat: Chat, max_tokens: int) -> int:
    """Tokens that the longest conversation may take."""

    def tokens(prompt: Prompt) -> int:
        said = sum(len(chat.encode([{"role": "user", "content": turn}])) for turn in prompt.turns)
        # An answer that is read back as text for the next turn may take more tokens than it was made of.
        return said + max_tokens + 4 * max_tokens * (len(prompt.turns) - 1)

    return max(tokens(prompt) for prompt in prompts)


def without_folder(word: str) -> str:
    """A path without the folders above it, which only mean something on one machine; other words as they are."""
    option, equals, value = word.rpartition("=") if word.startswith("--") else ("", "", word)
    kind = re.match(r"(ngram\+)?(model:)?", value)
    return option + equals + ((kind[0] if kind else "") + Path(value).name if "/" in value else value)


def describe_drafter(chosen: DrafterChoice, llm: LLM) -> dict[str, Any] | None:
    """What the report says of the drafter: enough to know it again."""
    from blockdraft.drafters.names import LookupChoice
    from blockdraft.engine.drafting import shipped_folder

    if chosen is None or llm.drafter is None:
        return None
    if isinstance(chosen, LookupChoice):
        other = describe_drafter(chosen.other, llm) or {}
        return {**other, "lookup": chosen.ngram.model_dump(include={"longest", "shortest"})}
    facts = {
        "name": llm.drafter.name,
        "block_size": llm.drafter.block_size,
        "max_drafts": llm.drafter.max_drafts,
    }
    if not isinstance(chosen, (str, Path)):
        return {**facts, **chosen.model_dump(exclude={"model"})}  # a model is in the drafter's name, without its path
    folder = chosen if isinstance(chosen, Path) else shipped_folder(llm.target.info.name, chosen)
    return {**facts, "sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()}


def make_arm(name: str, llm: LLM, target: str, room: int, slots: int, params: SamplingParams) -> Arm:
    """The arm of that name; all arms answer with the same model, Hugging Face's with a copy of its own."""
    from blockdraft.bench.measure import Answer, Arm
    from blockdraft.cli.wiring import engine_arm, make_engine

    if name == "drafted":
        return engine_arm(name, llm.engine)
    if name == "plain":
        return engine_arm(
            name, make_engine(llm.target, None, llm.tokenizer, room, slots, prefill_tokens=llm.engine.prefill_tokens)
        )
    from blockdraft.targets.hf import load_reference, reference_generate
    from blockdraft.targets.resolve import resolve_folder

    info = llm.target.info
    model, eos = load_reference(resolve_folder(target), info.dtype, info.device), info.eos_token_ids

    def answer(prompts: list[list[int]], each: list[SamplingParams]) -> list[Answer]:
        answers = []
        for ids, one in zip(prompts, each, strict=True):
            tokens = reference_generate(model, ids, one.max_tokens, eos, one.temperature, one.seed or 0)
            answers.append(Answer(tuple(tokens), "stop" if tokens and tokens[-1] in eos else "length"))
        return answers

    return Arm(name, answer, foreign=True, comparable=params.temperature == 0.0)


def make_margin(llm: LLM, room: int) -> Margin:
    """How far apart two next tokens are in the target's logits: 0 is a tie, which rounding may break either way."""
    import torch

    cache = llm.target.new_cache(1, room)
    known: dict[tuple[int, ...], float] = {}

    def margin(ids: Sequence[int], token: int, other: int) -> float:
        key = (*ids, token, other)
        if key not in known:
            cache.truncate([0], [0])
            llm.target.set_taps(())
            logits = llm.target.forward(torch.tensor([list(ids)], device=llm.target.info.device), cache, [0], 1).logits
            known[key] = round(float(logits[0, -1, token] - logits[0, -1, other]), 6)
        return known[key]

    return margin


def run(
    prompts: Sequence[Prompt],
    arms: Sequence[Arm],
    chat: Chat,
    params: SamplingParams,
    repeats: int,
    slots: int,
    setup: dict[str, Any],
    path: Path,
    margin: Margin,
) -> None:
    """Measure, save after every row so that an interruption loses nothing, and show the tables."""
    from rich.console import Console
    from rich.progress import Progress

    from blockdraft.bench import report
    from blockdraft.bench.measure import Row, measure
    from blockdraft.bench.summary import summarise

    console = Console(highlight=False)
    rows: list[Row] = []
    result: dict[str, Any] = {}
    total = sum(len(prompt.turns) for prompt in prompts)
    try:
        # Drawn when a row is done: a thread that draws all the time would be measured too.
        with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
            task = progress.add_task("warming up", total=total)
            for row in measure(prompts, arms, chat, params, repeats, slots):
                rows.append(row)
                result = {"complete": False, "setup": setup, **summarise(rows, arms, margin)}
                report.save(result, path)
                rates = ", ".join(f"{name} {timed.rate:.1f}" for name, timed in row.arms.items())
                progress.update(task, advance=len(row.ids), description=f"tokens/s: {rates}", refresh=True)
        result["complete"] = True
        report.save(result, path)
    finally:
        if result:
            for table in report.render(result):
                console.print(table)
            console.print(f"{'' if result['complete'] else 'partial results: '}{path}")
