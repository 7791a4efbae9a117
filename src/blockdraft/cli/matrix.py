"""Runs an ablation arm by arm: train, measure, write down; what is done already is not done again.

RUNS/NAME holds what is at work: one folder of features for all arms and a run's folder for each.  RESULTS/NAME holds
what stays: a JSON file for each arm, the table, the plots.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from blockdraft.bench.ablation import Part
    from blockdraft.bench.measure import Arm, Chat
    from blockdraft.bench.prompts import Prompt
    from blockdraft.config import AblationConfig, TrainConfig
    from blockdraft.drafters.names import DrafterChoice
    from blockdraft.targets.pretrained import PretrainedTarget
    from blockdraft.train.data import Dataset


class StoppedError(Exception):
    """A run was asked to stop and did so in good order."""


@dataclass(frozen=True)
class Folders:
    """Where an ablation keeps its work and its results."""

    runs: Path
    results: Path

    def run(self, arm: str) -> Path:
        return self.runs / arm

    def result(self, arm: str) -> Path:
        return self.results / f"{arm}.json"

    def identity(self, arm: str) -> dict[str, Any] | None:
        """What an arm was when it was begun; None: it was not."""
        path = self.run(arm) / "arm.json"
        return json.loads(path.read_text()) if path.exists() else None


class Matrix:
    """Everything the arms share: target, data, features, prompts, and plain decoding's answers."""

    def __init__(
        self,
        config: AblationConfig,
        recipes: dict[str, TrainConfig | str],
        prompts: Sequence[Sequence[Prompt]],
        folders: Folders,
        console: Console,
    ) -> None:
        from blockdraft.bench.ablation import identity, make_parts
        from blockdraft.cli.wiring import make_chat
        from blockdraft.targets.resolve import load_target, load_tokenizer
        from blockdraft.train.data import load_dataset

        base = config.base
        self.config, self.recipes, self.folders, self.console = config, recipes, folders, console
        self.target: PretrainedTarget = load_target(base.target, device=base.device)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(base.target)
        # One split of the data for all: an arm of another seed learns from the same samples.
        self.dataset: Dataset = load_dataset(base.data, self.tokenizer, self.target.info.eos_token_ids, base.seed)
        self.chat: Chat = make_chat(self.tokenizer)
        self.parts: list[Part] = make_parts(config, prompts, self.target.info)
        self.identities = {arm: identity(config, recipe, self.dataset.digest) for arm, recipe in recipes.items()}

    def check(self, arms: Sequence[str]) -> None:
        """Raise ConfigError for an arm that does not fit the target or the data, or that was begun as another."""
        from blockdraft.bench.ablation import check_identity
        from blockdraft.config import ConfigError
        from blockdraft.train.setup import make_draft

        for arm, recipe in self.recipes.items():
            if not isinstance(recipe, str):
                try:
                    make_draft(recipe.drafter, self.target, self.dataset, self.tokenizer, recipe.seed)
                except ConfigError as error:
                    raise ConfigError(f"arms.{arm}: {error}") from None
        for arm in arms:
            begun = self.folders.identity(arm)
            if begun is not None:
                check_identity(arm, begun, self.identities[arm], self.folders.run(arm))

    def run(self, arm: str) -> None:
        """Train an arm and measure it, as far as that is not done.

        Raises TrainingError if its loss left the numbers, StoppedError if a signal asked to stop.
        """
        from blockdraft.bench.ablation import load_result, missing_parts, same
        from blockdraft.text import write_whole
        from blockdraft.train.progress import say
        from blockdraft.train.resume import flat

        result, recipe = load_result(self.folders.result(arm)), self.recipes[arm]
        if not same(result.get("identity", {}), self.identities[arm]):
            result = {}
        if result and "cost" in result and not missing_parts(result, self.parts):
            say(self.console, f"{arm}: done")
            return
        write_whole(self.folders.run(arm) / "arm.json", json.dumps(self.identities[arm], indent=2) + "\n")
        about: dict[str, Any] = {"name": arm, "identity": self.identities[arm], "measured": {}, **result}
        about["changes"] = flat(self.config.arms[arm])
        if isinstance(recipe, str):
            self._measure(arm, recipe, about)
            return
        say(self.console, f"{arm}: training")
        about["training"] = self._train(arm, recipe)
        self._measure(arm, str(self.folders.run(arm) / "last"), about)

    def run_plain(self) -> None:
        """Plain decoding on every part, once for all arms."""
        from blockdraft.bench.ablation import PLAIN, describe_plain, load_result, missing_parts
        from blockdraft.bench.report import machine, save
        from blockdraft.train.progress import say

        path = self.folders.result(PLAIN)
        about: dict[str, Any] = {"name": PLAIN, "identity": {}, "measured": {}, **load_result(path)}
        for part in missing_parts(about, self.parts):
            say(self.console, f"{PLAIN}: {part.key}, {len(part.prompts)} prompts")
            rows = self._ask(part, self._arm(PLAIN, None, part))
            about["measured"][part.key] = describe_plain(part, rows)
            save({**about, "machine": machine()}, path)

    def _train(self, arm: str, recipe: TrainConfig) -> dict[str, Any]:
        """Train into the arm's folder, or go on there; what the table says of it."""
        from blockdraft import __version__
        from blockdraft.bench.curve import read_log
        from blockdraft.cli.wiring import held_out_acceptance
        from blockdraft.train.budget import steps_in
        from blockdraft.train.loop import train
        from blockdraft.train.run import prepare

        folder = self.folders.run(arm)
        recipe = self._with_features(recipe)
        run = prepare(recipe, self.target, self.tokenizer, self.dataset, folder, self.console)
        notes: dict[str, Any] = {}
        if self.config.minutes is not None:
            timed, path = self.config.timing_steps, folder / "budget.json"
            budget = steps_in(self.config.minutes, timed, recipe, self.target, run, path)
            recipe = recipe.model_copy(update={"steps": budget.steps})
            notes["timed_seconds_per_step"] = budget.seconds_per_step
        evaluate = held_out_acceptance(self.target, recipe.eval_max_tokens) if recipe.eval_prompts else None
        ended = train(
            recipe,
            self.target,
            run.dataset,
            run.features,
            run.draft,
            folder,
            __version__,
            evaluate=evaluate,
            resume=True,
            console=self.console,
        )
        if not ended.finished:
            raise StoppedError
        told = json.loads((folder / "last" / "provenance.json").read_text())
        last = read_log(folder / "log.jsonl")[0][-1]
        return {
            "steps": ended.step,
            "seconds": told["seconds"],
            **notes,
            "blocks_per_step": told["blocks_per_step"],
            "samples": told["samples"],
            "loss": last["loss"],
            "tau_chain": last["tau_chain"],
        }

    def _with_features(self, recipe: TrainConfig) -> TrainConfig:
        """The recipe reading from the one folder of shards that has the taps of all arms; made if need be."""
        from blockdraft.bench.ablation import FEATURES
        from blockdraft.train.setup import recipe_taps
        from blockdraft.train.shards import build_shards

        features, samples = recipe.features, self.dataset.train
        if features.mode == "online":
            return recipe
        trained = [other for other in self.recipes.values() if not isinstance(other, str)]
        layers = self.target.info.num_layers
        taps = sorted({tap for other in trained for tap in recipe_taps(other.drafter, layers)})
        folder = self.folders.runs / FEATURES / "-".join(map(str, taps))
        if features.folder is not None:
            folder = Path(features.folder)
        tokens, top_k = features.batch_tokens, features.teacher_top_k
        build_shards(self.target, taps, samples, folder, top_k, tokens, self.console)
        return recipe.model_copy(update={"features": features.model_copy(update={"folder": str(folder)})})

    def _measure(self, arm: str, drafter: str, about: dict[str, Any]) -> None:
        """What a proposal costs, then every part that is missing; saved after each."""
        from blockdraft.bench.ablation import PLAIN, describe_arm, load_result, missing_parts
        from blockdraft.bench.report import machine, save
        from blockdraft.cli.bench import make_margin
        from blockdraft.drafters.names import parse_drafter
        from blockdraft.engine.api import LLM
        from blockdraft.train.progress import say

        about["machine"] = machine()
        chosen = parse_drafter(drafter)
        llm = LLM(self.target, chosen, tokenizer=self.tokenizer, slots=1, capacity=8)
        about["cost"] = self._cost(llm, chosen)
        path = self.folders.result(arm)
        save(about, path)
        plain = load_result(self.folders.result(PLAIN))["measured"]
        for part in missing_parts(about, self.parts):
            say(self.console, f"{arm}: {part.key}, {len(part.prompts)} prompts")
            rows = self._ask(part, self._arm(arm, llm.drafter, part))
            margin = make_margin(llm, self._room(part))
            about["measured"][part.key] = describe_arm(arm, part, rows, plain[part.key], margin)
            save(about, path)

    def _cost(self, llm: Any, chosen: DrafterChoice) -> dict[str, Any]:
        """The drafter's size, where its folder tells, and the median time of one proposal after the first prompt."""
        from blockdraft.bench.cost import propose_seconds
        from blockdraft.engine.drafting import shipped_folder

        if llm.drafter is None:
            return {"parameters": 0, "max_drafts": 0, "propose_ms": 0.0}
        folder = shipped_folder(self.target.info.name) if chosen == "auto" else chosen
        told = folder / "provenance.json" if isinstance(folder, Path) else None
        ids = self.chat.encode([{"role": "user", "content": self.parts[0].prompts[0].turns[0]}])
        return {
            "parameters": json.loads(told.read_text()).get("parameters") if told and told.is_file() else None,
            "max_drafts": llm.drafter.max_drafts,
            "propose_ms": round(propose_seconds(self.target, llm.drafter, ids) * 1000, 4),
            "context_tokens": len(ids) - 1,
        }

    def _arm(self, name: str, drafter: Any, part: Part) -> Arm:
        from blockdraft.cli.wiring import engine_arm, make_engine

        return engine_arm(name, make_engine(self.target, drafter, self.tokenizer, self._room(part)))

    def _room(self, part: Part) -> int:
        from blockdraft.cli.bench import room_for

        return room_for(part.prompts, self.chat, self.config.max_tokens)

    def _ask(self, part: Part, arm: Arm) -> list[Any]:
        from blockdraft.bench.measure import measure

        return list(measure(part.prompts, [arm], self.chat, part.params, self.config.repeats))
