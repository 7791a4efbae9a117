"""`blockdraft doctor`: why a drafter's acceptance may be low."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli.options import DeviceOption, TargetOption, ThreadsOption
from blockdraft.cli.wiring import ASSETS, DEFAULT_TARGET

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table
    from transformers import PreTrainedTokenizerBase

    from blockdraft.bench.diagnosis import Finding
    from blockdraft.targets.pretrained import PretrainedTarget
    from blockdraft.train.data import Sample

SIGNS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "fault": "[bold red]fault[/]", "unknown": "[dim]unknown[/]"}
SLOTS = 8


def command(
    target: TargetOption = DEFAULT_TARGET,
    drafter: Annotated[str, typer.Option("--drafter", help="A drafter's folder, or auto.")] = "auto",
    answers: Annotated[
        Path | None, typer.Option(help="JSONL with answers of the target; none: it answers the package's questions.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Answers to look at.", min=1)] = 12,
    max_tokens: Annotated[int, typer.Option(help="Longest answer that is made.", min=16)] = 96,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
) -> None:
    """Say why acceptance may be low: wiring, template, features, learning.  Exit code 1: something is broken."""
    from blockdraft.bench.diagnosis import Finding, verdict
    from blockdraft.cli.wiring import load, prepare
    from blockdraft.config import ConfigError
    from blockdraft.drafters.names import parse_drafter
    from blockdraft.engine.drafting import shipped_folder

    chosen = parse_drafter(drafter)
    if not isinstance(chosen, (str, Path)):
        raise ValueError(f"--drafter {drafter}: only a trained drafter can be looked at: give its folder, or auto")
    prepare(threads)
    loaded, tokenizer = load(target, chosen if isinstance(chosen, str) else None, device=device)
    folder = chosen if isinstance(chosen, Path) else shipped_folder(loaded.info.name, chosen)
    samples = answered(loaded, tokenizer, answers, limit, max_tokens)
    told = provenance(folder)
    try:
        found = examine(loaded, tokenizer, folder, samples, told)
    except ConfigError as error:
        found = [Finding("checkpoint", "fault", str(error))]
    from rich.console import Console

    console = Console(highlight=False)
    console.print(table(found))
    console.print(verdict(found, told))
    if any(finding.level == "fault" for finding in found):
        raise typer.Exit(1)


def answered(
    target: PretrainedTarget, tokenizer: PreTrainedTokenizerBase, answers: Path | None, limit: int, max_tokens: int
) -> list[Sample]:
    """Answers of the target: from a file, or made now, greedily."""
    from blockdraft.bench.prompts import load_prompts
    from blockdraft.cli.wiring import engine_arm, make_chat, make_engine
    from blockdraft.config import DataConfig, SamplingParams
    from blockdraft.train.data import make_sample, read_samples

    eos = target.info.eos_token_ids
    if answers is not None:
        config = DataConfig(files=(str(answers),), limit=limit, min_answer_tokens=4)
        samples = read_samples(config, tokenizer, eos)[0]
    else:
        chat = make_chat(tokenizer, raw=not tokenizer.chat_template)
        asked = load_prompts(str(ASSETS / "demo_prompts.jsonl"))[:limit]
        prompts = [chat.encode([{"role": "user", "content": prompt.turns[0]}]) for prompt in asked]
        engine = make_engine(target, None, tokenizer, max(map(len, prompts)) + max_tokens, SLOTS)
        made = engine_arm("plain", engine).answer(prompts, [SamplingParams(max_tokens=max_tokens)] * len(prompts))
        samples = [
            make_sample("", [*ids, *one.token_ids], [False] * len(ids) + [True] * len(one.token_ids))
            for ids, one in zip(prompts, made, strict=True)
        ]
    samples = [sample for sample in samples if int(sample.loss_mask.sum()) > 1]
    if not samples:
        raise ValueError("no answer of two tokens or more to draft: give --answers with longer ones")
    return samples


def provenance(folder: Path) -> dict[str, Any]:
    """What a drafter's folder says of its training; nothing, if it does not say."""
    import json

    path = folder / "provenance.json"
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        return {}
    return told if isinstance(told, dict) else {}


def examine(
    target: PretrainedTarget,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    samples: Sequence[Sample],
    told: dict[str, Any],
) -> list[Finding]:
    """All findings, from files to behaviour.  ConfigError, ValueError: the drafter cannot be loaded for this target."""
    from blockdraft.bench import diagnosis
    from blockdraft.bench.cached import first_difference
    from blockdraft.bench.faults import FAULTS, Rows
    from blockdraft.bench.measure import Answer
    from blockdraft.bench.replay import ReplayTarget, Told
    from blockdraft.bench.summary import acceptance_by_position, tau
    from blockdraft.cli.wiring import engine_arm, make_engine
    from blockdraft.config import SamplingParams
    from blockdraft.drafters.checkpoint import load_drafter, load_model
    from blockdraft.train.features import OnlineFeatures
    from blockdraft.train.fingerprint import tap_sizes, template_fingerprint

    model, draft_ids = load_model(folder, target.info.dtype, target.info.device)
    drafter = load_drafter(folder, target)
    config, rope = model.config, float(target.draft_defaults()["rope_theta"])
    found = diagnosis.wiring(config, target.info, samples, rope)
    found.append(diagnosis.vocabulary(samples, draft_ids))
    found.append(diagnosis.template(told.get("template"), template_fingerprint(tokenizer)))
    if config.tap_ids:
        sizes = tap_sizes(OnlineFeatures(target, config.tap_ids, 0), samples)
        found.append(diagnosis.tap_sizes(told.get("tap_sizes"), sizes))
    longest = max(samples, key=len)
    found.append(diagnosis.cached_rows(first_difference(target, model, drafter, longest)))
    rows = Rows(target, model, samples, draft_ids)
    here = rows.accepted()
    tried = [(fault, rows.accepted(fault, rope)) for fault in FAULTS if rows.fits(fault, rope)]
    found += diagnosis.deliberate(here, tried)
    found.append(diagnosis.learned(here, told.get("accuracy")))
    known = [Told(tuple(s.ids[: s.prompt_length].tolist()), tuple(s.ids[s.prompt_length :].tolist())) for s in samples]
    replay = ReplayTarget(target, config.tap_ids, known)
    engine = make_engine(replay, drafter, None, max(map(len, samples)) + config.block_size, SLOTS)
    asked = [SamplingParams(max_tokens=len(one.answer), ignore_eos=True) for one in known]
    answers: list[Answer] = engine_arm("drafted", engine).answer([list(one.prompt) for one in known], asked)
    found.append(diagnosis.acceptance(tau(answers) or 1.0, acceptance_by_position(answers)))
    return found


def table(found: Sequence[Finding]) -> Table:
    """The findings, one a line."""
    from rich.table import Table
    from rich.text import Text

    made = Table("what", "", "finding", box=None, pad_edge=False)
    for finding in found:
        made.add_row(finding.check, Text.from_markup(SIGNS[finding.level]), Text(finding.text))
    return made
