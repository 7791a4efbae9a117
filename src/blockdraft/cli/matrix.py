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

    from blockdraft.bench.ablation import Recipe
    from blockdraft.bench.prompts import Prompt
    from blockdraft.cli.measuring import Named
    from blockdraft.config import AblationConfig, TrainConfig
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
    """Everything the arms share: target, data, features, and how they are measured.

    Raises ConfigError for an arm that does not fit the target or the data.
    """

    def __init__(
        self,
        config: AblationConfig,
        recipes: dict[str, Recipe],
        prompts: Sequence[Sequence[Prompt]],
        folders: Folders,
        console: Console,
    ) -> None:
        from blockdraft.bench.ablation import identity, make_parts
        from blockdraft.cli.measuring import Measuring
        from blockdraft.targets.resolve import load_target, load_tokenizer
        from blockdraft.train.data import load_dataset

        base = config.base
        self.config, self.recipes, self.folders, self.console = config, recipes, folders, console
        self.target: PretrainedTarget = load_target(base.target, device=base.device)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(base.target)
        # One split of the data for all: an arm of another seed learns from the same samples.
        self.dataset: Dataset = load_dataset(base.data, self.tokenizer, self.target.info.eos_token_ids, base.seed)
        self._check_recipes()
        parts = make_parts(config, prompts, self.target.info)
        self.measuring = Measuring(config, self.target, self.tokenizer, parts, self._all_taps(), folders, console)
        self.identities = {arm: identity(config, recipe, self.dataset.digest) for arm, recipe in recipes.items()}

    def check(self, arms: Sequence[str]) -> None:
        """Raise ConfigError for an arm that was begun as another."""
        from blockdraft.bench.ablation import check_identity

        for arm in arms:
            begun = self.folders.identity(arm)
            if begun is not None:
                check_identity(arm, begun, self.identities[arm], self.folders.run(arm))

    def _check_recipes(self) -> None:
        from blockdraft.bench.ablation import Ready
        from blockdraft.config import ConfigError
        from blockdraft.train.setup import make_draft

        for arm, recipe in self.recipes.items():
            if not isinstance(recipe, Ready):
                try:
                    make_draft(recipe.drafter, self.target, self.dataset, self.tokenizer, recipe.seed)
                except ConfigError as error:
                    raise ConfigError(f"arms.{arm}: {error}") from None

    def run(self, arm: str) -> None:
        """Train an arm and measure its acceptance, as far as that is not done.

        Raises TrainingError if its loss left the numbers, StoppedError if a signal asked to stop, ValueError if it
        drafts with another arm's drafter and that is not trained yet.
        """
        from blockdraft.bench.ablation import Ready, load_result, same
        from blockdraft.text import write_whole
        from blockdraft.train.progress import say
        from blockdraft.train.resume import flat

        result, recipe = load_result(self.folders.result(arm)), self.recipes[arm]
        if not same(result.get("identity", {}), self.identities[arm]):
            result = {}
        if result and self.measuring.accepted(result):
            say(self.console, f"{arm}: done")
            return
        write_whole(self.folders.run(arm) / "arm.json", json.dumps(self.identities[arm], indent=2) + "\n")
        about: dict[str, Any] = {"name": arm, "identity": self.identities[arm], "measured": {}, **result}
        about["changes"] = flat(self.config.arms[arm])
        if not isinstance(recipe, Ready):
            say(self.console, f"{arm}: training")
            about["training"] = self._train(arm, recipe)
        self.measuring.accept(arm, self._named(arm), about)

    def time(self, arms: Sequence[str]) -> None:
        """Measure the rates of arms that `run` is done with, as far as they are missing."""
        self.measuring.time({arm: self._named(arm) for arm in arms})

    def _named(self, arm: str) -> Named:
        """What names an arm's drafter."""
        from blockdraft.bench.ablation import Ready
        from blockdraft.cli.measuring import Named

        recipe = self.recipes[arm]
        if isinstance(recipe, Ready) and recipe.other is None:
            return Named(recipe.drafter, recipe.block_size)
        trained, size = (recipe.other or arm, recipe.block_size) if isinstance(recipe, Ready) else (arm, None)
        folder = self.folders.run(trained) / "last"
        if not folder.is_dir():
            raise ValueError(f"arm '{arm}' drafts with the drafter of '{trained}', which is not trained yet")
        return Named(str(folder), size)

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
        from blockdraft.train.shards import build_shards

        features, samples = recipe.features, self.dataset.train
        if features.mode == "online":
            return recipe
        taps = self._all_taps()
        folder = self.folders.runs / FEATURES / "-".join(map(str, taps))
        if features.folder is not None:
            folder = Path(features.folder)
        tokens, top_k = features.batch_tokens, features.teacher_top_k
        build_shards(self.target, taps, samples, folder, top_k, tokens, self.console)
        return recipe.model_copy(update={"features": features.model_copy(update={"folder": str(folder)})})

    def _all_taps(self) -> tuple[int, ...]:
        """The taps of all arms that are trained."""
        from blockdraft.bench.ablation import Ready
        from blockdraft.train.setup import recipe_taps

        layers = self.target.info.num_layers
        trained = [recipe for recipe in self.recipes.values() if not isinstance(recipe, Ready)]
        return tuple(sorted({tap for recipe in trained for tap in recipe_taps(recipe.drafter, layers)}))
