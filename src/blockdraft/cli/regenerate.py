"""`blockdraft regenerate`: prompts to answers by the target itself, for training a drafter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from blockdraft.cli.options import DeviceOption, DrafterOption, DtypeOption, ImplOption, TargetOption, ThreadsOption
from blockdraft.cli.wiring import DEFAULT_TARGET

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdraft.config import TrainConfig
    from blockdraft.drafters.names import DrafterChoice
    from blockdraft.engine.api import LLM
    from blockdraft.engine.request import Request
    from blockdraft.targets.base import Target
    from blockdraft.train.record import Recording
    from blockdraft.train.regenerate import Answer, Job


def command(
    prompts: Annotated[Path, typer.Argument(help="JSONL with 'prompt' or 'messages', and perhaps 'id'.")],
    output: Annotated[Path, typer.Argument(help="JSONL to add answers to; prompts answered there are skipped.")],
    target: TargetOption = DEFAULT_TARGET,
    target_impl: ImplOption = "auto",
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    drafter: DrafterOption = "none",
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 256,
    greedy_share: Annotated[float, typer.Option(help="Share of the prompts that is answered greedily.")] = 0.67,
    temperature: Annotated[float, typer.Option(help="For the others.")] = 0.7,
    top_p: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int, typer.Option(help="Decides which are greedy, and the others' random numbers.")] = 0,
    slots: Annotated[int, typer.Option(help="Prompts answered at once.", min=1)] = 32,
    limit: Annotated[int | None, typer.Option(help="Only the first so many prompts.", min=1)] = None,
    threads: ThreadsOption = None,
    features: Annotated[
        Path | None,
        typer.Option(help="Keep the features that --recipe trains on in this folder, for its features.folder."),
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="The recipe that --features are for.")] = None,
    base_url: Annotated[str | None, typer.Option(help="Ask this OpenAI-compatible server instead (.../v1).")] = None,
    model: Annotated[str | None, typer.Option(help="The server's name for the target.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="For the server.")] = None,
) -> None:
    """Let the target answer prompts; interrupted at any moment, the same command goes on where it stopped."""
    from rich.console import Console

    from blockdraft.config import TrainConfig, load_config
    from blockdraft.train.regenerate import Answers, OpenAIAnswers, read_jobs, regenerate

    console = Console(stderr=True, highlight=False)
    # Everything that can be wrong with the files is found before a model is loaded.
    jobs = read_jobs(prompts, seed, greedy_share, temperature)[:limit]
    if not jobs:
        raise ValueError(f"{prompts}: no prompts in it")
    if (features is None) != (recipe is None):
        raise ValueError("--features and --recipe go together: a folder, and the recipe that will train on it")
    if features is not None and base_url is not None:
        raise ValueError("--features needs the target itself: a server does not hand out its hidden states")
    config = load_config(TrainConfig, recipe) if recipe is not None else None
    if config is not None and config.features.mode != "shards":
        raise ValueError(f"{recipe}: features.mode is {config.features.mode}: training would not read what is kept")
    answers: Answers
    if base_url is not None:
        if model is None:
            raise ValueError("--base-url needs --model: the server's name for the target")
        answers = OpenAIAnswers(base_url, model, max_tokens, slots, api_key, top_p)
    else:
        from blockdraft.cli.wiring import load, prepare
        from blockdraft.drafters.names import parse_drafter

        prepare(threads)
        from blockdraft.targets.resolve import canonical_name

        if config is not None and canonical_name(config.target) != canonical_name(target):
            raise ValueError(f"{recipe}: the recipe is for target '{config.target}', and the answers are by '{target}'")
        chosen = parse_drafter(drafter)
        loaded, tokenizer = load(target, chosen, target_impl, device, dtype)
        kept = (config, features) if config is not None and features is not None else None
        answers = EngineAnswers(loaded, tokenizer, chosen, jobs, max_tokens, top_p, slots, kept)
    result = regenerate(prompts, output, answers, seed, greedy_share, temperature, limit, console)
    if not result.finished:
        raise typer.Exit(130)
    typer.echo(f"{result.before + result.added} answers in {output}, {result.added} of them new")


class EngineAnswers:
    """Answers by our own engine; only a few more prompts than there are slots wait in it at any time.

    `kept` asks for the features of the answers too: the recipe that they are for, and their folder.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: PreTrainedTokenizerBase,
        drafter: DrafterChoice,
        jobs: list[Job],
        max_tokens: int,
        top_p: float,
        slots: int,
        kept: tuple[TrainConfig, Path] | None = None,
    ) -> None:
        from blockdraft.engine.api import LLM
        from blockdraft.text import encode_chat

        self.ids = {job.id: encode_chat(tokenizer, job.messages) for job in jobs}
        longest = max(self.ids, key=lambda name: len(self.ids[name]))
        room = max(len(self.ids[longest]) + max_tokens, 8)
        if room > target.info.max_context:
            raise ValueError(
                f"prompt '{longest}' has {len(self.ids[longest])} tokens; with {max_tokens} for its answer, that is "
                f"more than the {target.info.max_context} of {target.info.name}: leave it out, or lower --max-tokens"
            )
        self.max_tokens, self.top_p, self.slots = max_tokens, top_p, slots
        self.recording: Recording | None = None
        if kept is not None:
            from blockdraft.train.record import Recording

            self.recording = Recording(kept[0], target, tokenizer, kept[1], slots, room)
        answering = self.recording.target if self.recording is not None else target
        # A recorder would take the passes that "auto" measures for those of a prompt.
        width: Literal["auto"] | None = "auto" if self.recording is None else None
        self.llm: LLM = LLM(answering, drafter, tokenizer=tokenizer, slots=slots, capacity=room, verify_width=width)

    def answer(self, jobs: Iterable[Job]) -> Iterator[Answer]:
        """One answer for each job, in the order in which they are finished.  ValueError: a prompt is too long."""
        from blockdraft.train.regenerate import answer_row

        try:
            for answer in self._answers(jobs):
                if self.recording is not None:
                    self.recording.keep(answer_row(answer))
                yield answer
        finally:
            if self.recording is not None:
                self.recording.close()

    def _answers(self, jobs: Iterable[Job]) -> Iterator[Answer]:
        from blockdraft.config import SamplingParams
        from blockdraft.train.regenerate import Answer

        engine, coming = self.llm.engine, iter(jobs)
        running: dict[Request, Job] = {}
        while True:
            while len(running) < 2 * self.slots and (job := next(coming, None)) is not None:
                values = {"max_tokens": self.max_tokens, "top_p": self.top_p}
                values |= {"temperature": job.temperature, "seed": job.seed}
                running[engine.add(self.ids[job.id], SamplingParams.parse(values, "regenerate"), job.id)] = job
            if not running:
                return
            for request in engine.step():
                if request.done:
                    job, ids = running.pop(request), request.output_ids
                    yield Answer(job, request.text, ids, request.finish_reason or "length", len(ids))
