"""`blockdraft generate`: prompts to text, streamed; plain and drafted side by side with --compare."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from blockdraft.cli.wiring import ASSETS, DEFAULT_DRAFTER, DEFAULT_TARGET

if TYPE_CHECKING:
    from blockdraft.bench.measure import Chat, Row
    from blockdraft.config import SamplingParams
    from blockdraft.engine.api import LLM, Output
    from blockdraft.engine.request import Piece


def command(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT...", help="What to ask; - reads stdin.")
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Ask the questions that come with the package.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run plain and drafted in turn; show rates, tau, identical.")
    ] = False,
    show_accepted: Annotated[bool, typer.Option("--show-accepted", help="Colour what the drafter got right.")] = False,
    target: TargetOption = DEFAULT_TARGET,
    target_impl: ImplOption = "auto",
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    weights: WeightsOption = None,
    drafter: DrafterOption = DEFAULT_DRAFTER,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: the most likely token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int, typer.Option(help="0: off.")] = 0,
    min_p: Annotated[float, typer.Option()] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer; none: a fresh one.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")] = None,
    system: Annotated[str | None, typer.Option(help="System message, instead of the model's own.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The prompt as it stands, without a chat template.")] = False,
    verify_width: VerifyWidthOption = "auto",
    block_size: Annotated[int | None, typer.Option(help="Rows of a drafted block; none: as it was trained.")] = None,
    threads: ThreadsOption = None,
) -> None:
    """Generate an answer: with a drafter it comes faster, and it is the same answer."""
    from blockdraft.config import SamplingParams

    questions, width = read_prompts(prompts or [], demo), parse_verify_width(verify_width)
    if raw and system is not None:
        raise ValueError("--system needs the chat template that --raw leaves out")
    params = SamplingParams.parse(
        {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "stop": tuple(stop or ()),
            # Both runs of a comparison need the same seed.
            "seed": seed if seed is not None else secrets.randbits(31),
        },
        "generate",
    )
    from blockdraft.cli.wiring import load, make_chat, prepare
    from blockdraft.drafters.names import parse_drafter

    chosen = parse_drafter(drafter)
    if compare and chosen is None:
        raise ValueError("--compare needs a drafter: leave out --drafter none")
    if block_size is not None and chosen is None:
        raise ValueError("--block-size needs a drafter: leave out --drafter none")
    if compare and show_accepted:
        raise ValueError("--show-accepted is for a stream: leave out --compare")
    prepare(threads)
    from blockdraft.engine.api import LLM

    loaded, tokenizer = load(target, chosen, target_impl, device, dtype, weights)
    chat = make_chat(tokenizer, raw, system)
    room = max(len(chat.encode([{"role": "user", "content": question}])) for question in questions) + max_tokens
    llm = LLM(
        loaded,
        chosen,
        tokenizer=tokenizer,
        slots=1,
        capacity=max(room, 8),
        verify_width=width,
        block_size=block_size,
    )
    if compare:
        run_comparison(llm, chat, questions, params, room)
    else:
        run_stream(llm, chat, questions, params, show_accepted)


def read_prompts(prompts: Sequence[str], demo: bool) -> list[str]:
    """The texts to ask.  Raises ValueError if there is none, or an empty one."""
    if demo:
        from blockdraft.bench.prompts import load_prompts

        prompts = [*prompts, *(prompt.turns[0] for prompt in load_prompts(str(ASSETS / "demo_prompts.jsonl")))]
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    if not texts:
        raise ValueError("no prompt: give one, or - to read it from standard input, or --demo")
    if not all(text.strip() for text in texts):
        raise ValueError("the prompt is empty")
    return texts


def run_stream(llm: LLM, chat: Chat, questions: Sequence[str], params: SamplingParams, show_accepted: bool) -> None:
    """Print each answer as it comes; what it took goes to standard error."""
    for question in questions:
        began = time.perf_counter()
        output = print_pieces(
            llm.stream_pieces(chat.encode([{"role": "user", "content": question}]), params), show_accepted
        )
        seconds = time.perf_counter() - began
        typer.echo()
        count, drafted = len(output.token_ids), describe_rounds(output) if llm.drafter is not None else ""
        line = f"{count} tokens in {seconds:.1f} s, {count / seconds:.1f} tokens/s{drafted}, ended by "
        typer.secho(line + output.finish_reason, dim=True, err=True)


def describe_rounds(output: Output) -> str:
    """How the drafts fared: tau, how many were verified per round, and rounds without drafting if there were any."""
    stats = output.stats
    mean = stats.drafted / stats.rounds if stats.rounds else 0.0
    kinds = ((stats.undrafted, "without drafting"), (stats.partly_drafted, "with lookup alone"))
    rested = ", ".join(f"{count} of {stats.rounds} rounds {kind}" for count, kind in kinds if count)
    return f", tau {stats.tau:.2f}, {mean:.1f} drafts verified per round{f' ({rested})' if rested else ''}"


def print_pieces(pieces: Generator[Piece, None, Output], show_accepted: bool) -> Output:
    """Print pieces as they come; returns the whole answer."""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            output: Output = end.value
            return output
        right = show_accepted and piece.drafted
        typer.echo(typer.style(piece.text, fg=typer.colors.GREEN) if right else piece.text, nl=False)
        sys.stdout.flush()


def run_comparison(llm: LLM, chat: Chat, questions: Sequence[str], params: SamplingParams, room: int) -> None:
    """Answer each question plainly and with drafts, and show both.  Exit code 1 if the answers differ."""
    from rich.console import Console
    from rich.markup import escape

    from blockdraft.bench.measure import measure
    from blockdraft.bench.prompts import Prompt
    from blockdraft.bench.summary import summarise
    from blockdraft.cli.wiring import engine_arm, make_engine

    prompts = [Prompt(str(number), (question,)) for number, question in enumerate(questions, start=1)]
    plain = make_engine(llm.target, None, llm.tokenizer, room)
    arms = [engine_arm("plain", plain), engine_arm("drafted", llm.engine)]
    console = Console(highlight=False)
    rows: list[Row] = []
    llm.engine.prepare()
    console.print("warming up, then plain and drafted in turn; an answer is shown when both have it", style="dim")
    for question, row in zip(questions, measure(prompts, arms, chat, params), strict=True):
        rows.append(row)
        console.print(f"\n[bold]{escape(question)}[/bold]\n", soft_wrap=True)
        console.print(chat.decode(row.arms["drafted"].answers[0].token_ids), markup=False, soft_wrap=True)
        console.print(verdict(summarise([row], arms)), style="cyan", soft_wrap=True)
    result = summarise(rows, arms)
    if len(rows) > 1:
        console.print(f"\n{len(rows)} prompts: {verdict(result)}", style="bold cyan", soft_wrap=True)
    if not result["arms"][1]["identical"]:
        raise typer.Exit(1)


def verdict(result: dict[str, Any]) -> str:
    """Both rates, their ratio, tau, and whether the answers are the same, in one line."""
    plain, drafted = result["arms"]
    ratio = result["ratios"]["drafted/plain"]["median"]
    same = "identical" if drafted["identical"] else "NOT IDENTICAL"
    return (
        f"plain {plain['tokens_per_second']['median']:.1f} tokens/s, "
        f"drafted {drafted['tokens_per_second']['median']:.1f} tokens/s, ratio {ratio:.2f}x, "
        f"tau {drafted['tau'] or 0:.2f}, {same}"
    )
