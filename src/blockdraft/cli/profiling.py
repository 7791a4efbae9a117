"""`blockdraft profile`: where the time of a round goes."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from blockdraft.cli.options import DeviceOption, DtypeOption, ImplOption, TargetOption, ThreadsOption
from blockdraft.cli.wiring import ASSETS, DEFAULT_TARGET

PROMPTS = 4


def command(
    target: TargetOption = DEFAULT_TARGET,
    target_impl: ImplOption = "auto",
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    drafter: Annotated[str, typer.Option("--drafter", help="auto, mtp, or a drafter's folder.")] = "auto",
    context: Annotated[int, typer.Option(help="Tokens before the round.", min=16)] = 256,
    repeats: Annotated[int, typer.Option(help="Times each part is run; the median counts.", min=1)] = 20,
    max_tokens: Annotated[int, typer.Option(help="Longest answer of the engine's own rounds.", min=4)] = 96,
    threads: ThreadsOption = None,
    output: Annotated[Path, typer.Option(help="JSON file.")] = Path("results/profile.json"),
) -> None:
    """Time each part of a round alone, and say what the machine would need for it at least."""
    from blockdraft.cli.wiring import load, make_chat, make_engine, prepare
    from blockdraft.drafters.names import parse_drafter

    chosen = parse_drafter(drafter)
    if not isinstance(chosen, (str, Path)):
        raise ValueError(f"--drafter {drafter}: only a trained drafter has parts to time: give its folder, auto or mtp")
    prepare(threads)
    from rich.console import Console
    from rich.markdown import Markdown

    from blockdraft.bench.anatomy import describe, machine_speed, parts_of_a_round, round_seconds, table
    from blockdraft.bench.prompts import load_prompts
    from blockdraft.bench.report import machine, save
    from blockdraft.cli.bench import without_folder
    from blockdraft.engine.drafting import find_drafter, make_drafter

    loaded, tokenizer = load(target, chosen, target_impl, device, dtype)
    room = loaded.info.max_context
    made = make_drafter(find_drafter(chosen, loaded.info.name), loaded)
    assert made is not None, "plain decoding was refused above"
    if context + 2 * made.block_size > room:
        raise ValueError(f"--context {context}: with a block behind it that is more than the target's {room} tokens")
    chat = make_chat(tokenizer, raw=not tokenizer.chat_template)
    asked = load_prompts(str(ASSETS / "demo_prompts.jsonl"))[:PROMPTS]
    prompts = [chat.encode([{"role": "user", "content": prompt.turns[0]}]) for prompt in asked]
    text = [token for ids in prompts for token in ids]
    ids = (text * (context // len(text) + 1))[:context]

    speed = machine_speed(loaded.info.device)
    parts = parts_of_a_round(loaded, made, ids, repeats)
    engine = make_engine(loaded, made, tokenizer, max(map(len, prompts)) + max_tokens)
    report = {
        "command": shlex.join(["blockdraft", *(without_folder(word) for word in sys.argv[1:])]),
        "target": loaded.info.name,
        "dtype": str(loaded.info.dtype).removeprefix("torch."),
        "drafter": made.name,
        "context": context,
        "machine": machine(),
        **describe(parts, round_seconds(engine, prompts, max_tokens), speed),
    }
    save(report, output)
    Console().print(Markdown(table(report)))
