"""`blockdraft choices`: the likeliest drafts, coupled ones, and independent ones with rejection sampling."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli.options import DeviceOption, DrafterOption, DtypeOption, ImplOption, TargetOption, ThreadsOption
from blockdraft.cli.wiring import DEFAULT_TARGET

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockdraft.bench.prompts import Prompt
    from blockdraft.config import SamplingParams
    from blockdraft.engine.api import LLM


def command(
    dataset: Annotated[str, typer.Option(help="As `bench` has it.")] = "gsm8k",
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the data set's JSONL; none: download it.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many prompts.", min=1)] = None,
    temperatures: Annotated[str, typer.Option(help="By commas, all above 0.")] = "0.7,1",
    target: TargetOption = DEFAULT_TARGET,
    target_impl: ImplOption = "auto",
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    drafter: DrafterOption = "auto",
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 128,
    seed: Annotated[int, typer.Option(help="Prompt i is sampled with seed + i.")] = 0,
    slots: Annotated[int, typer.Option(help="Prompts answered at once.", min=1)] = 8,
    threads: ThreadsOption = None,
    output: Annotated[Path, typer.Option(help="JSON file.")] = Path("results/draft-choices.json"),
) -> None:
    """Compare ways to draft above temperature 0 by how much of the same answers they get right.

    Nothing is timed: the counts are the same on a busy machine.
    """
    from blockdraft.bench.prompts import load_prompts
    from blockdraft.config import DraftModelConfig, SamplingParams
    from blockdraft.drafters.names import parse_drafter

    each = [
        SamplingParams.parse({"max_tokens": max_tokens, "temperature": one, "seed": seed}, "choices")
        for one in parse_temperatures(temperatures)
    ]
    prompts, chosen = load_prompts(dataset, data_dir, limit), parse_drafter(drafter)
    if not isinstance(chosen, (str, Path, DraftModelConfig)):
        raise ValueError(f"--drafter {drafter}: give auto, a folder or model:NAME, whose drafts can be drawn by chance")

    from blockdraft.cli.wiring import load, prepare

    prepare(threads)
    from rich.console import Console

    from blockdraft.bench.choices import describe, markdown
    from blockdraft.bench.report import save
    from blockdraft.cli.bench import describe_drafter, without_folder
    from blockdraft.engine.api import LLM

    loaded, tokenizer = load(target, chosen, target_impl, device, dtype)
    llm = LLM(loaded, chosen, tokenizer=tokenizer, slots=1, capacity=8)
    result: dict[str, Any] = {
        "setup": {
            "command": shlex.join(["blockdraft", *(without_folder(word) for word in sys.argv[1:])]),
            "dataset": Path(dataset).stem,
            "prompts": len(prompts),
            "max_tokens": max_tokens,
            "seed": seed,
            "target": llm.target.info.name,
            "dtype": str(llm.target.info.dtype).removeprefix("torch."),
            "drafter": describe_drafter(chosen, llm),
        },
        "parts": [],
    }
    console = Console(highlight=False)
    for params in each:
        result["parts"].append(describe(params.temperature, count(llm, prompts, params, slots)))
        save(result, output)
        console.print(f"temperature {params.temperature:g} is done", style="dim")
    console.print(markdown(result), soft_wrap=True)


def parse_temperatures(text: str) -> list[float]:
    """Different temperatures above 0.  ValueError: they are none."""
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0.0 or len(set(found)) != len(found):
        raise ValueError(f"--temperatures {text}: give numbers above 0, by commas, each once")
    return found


def count(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, slots: int) -> list[dict[str, Any]]:
    """Plain decoding's answers to the prompts' first turns, and the rounds in which each way would have given them."""
    from blockdraft.bench.choices import ARGMAX, COUPLED, INDEPENDENT
    from blockdraft.bench.rejection import chances, expected_rounds
    from blockdraft.bench.replay import ReplayTarget, Told, greedy
    from blockdraft.cli.bench import room_for
    from blockdraft.cli.wiring import engine_arm, make_chat, make_engine

    assert llm.drafter is not None, "refused by the command"
    chat = make_chat(llm.tokenizer)
    room = room_for(prompts, chat, params.max_tokens)
    asked = [chat.encode([{"role": "user", "content": prompt.turns[0]}]) for prompt in prompts]
    seeds = [params.model_copy(update={"seed": (params.seed or 0) + i}) for i in range(len(prompts))]
    plain = engine_arm("plain", make_engine(llm.target, None, llm.tokenizer, room, slots)).answer(asked, seeds)
    told = [Told(tuple(ids), answer.token_ids) for ids, answer in zip(asked, plain, strict=True)]

    replay = ReplayTarget(llm.target, llm.drafter.tap_ids, told)
    counted: list[dict[str, Any]] = [
        {"id": prompt.id, "tokens": len(one.answer) - 1, "rounds": {}}
        for prompt, one in zip(prompts, told, strict=True)
    ]
    for way in (ARGMAX, COUPLED):
        engine = make_engine(replay, llm.drafter, llm.tokenizer, room, slots, coupled=way == COUPLED)
        again = engine_arm(way, engine).answer(asked, seeds if way == COUPLED else [greedy(params)] * len(asked))
        for one, answer, known in zip(counted, again, told, strict=True):
            assert answer.token_ids == known.answer, "a known answer"
            one["rounds"][way] = answer.rounds
    for one, known in zip(counted, told, strict=True):
        rounds = expected_rounds(chances(llm.target, llm.drafter, known, params), one["tokens"])
        one["rounds"][INDEPENDENT] = round(rounds, 3)
    return counted
