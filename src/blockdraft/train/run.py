"""From a recipe to a trained drafter: data, drafter, features, loop, in that order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from blockdraft.config import ConfigError, TrainConfig
from blockdraft.train.chats import Tokenizer
from blockdraft.train.data import Dataset, load_dataset
from blockdraft.train.features import Features, OnlineFeatures
from blockdraft.train.fingerprint import tap_sizes, template_fingerprint
from blockdraft.train.loop import Evaluate, TrainResult, train
from blockdraft.train.progress import say
from blockdraft.train.setup import Draft, Teachable, make_draft, recipe_taps, whiten_fusion
from blockdraft.train.shards import build_shards

WHITENING_SAMPLES = 64


@dataclass(frozen=True)
class Prepared:
    """All that a run reads and starts from."""

    dataset: Dataset
    draft: Draft
    features: Features


def train_drafter(
    config: TrainConfig,
    target: Teachable,
    tokenizer: Tokenizer,
    folder: Path,
    version: str,
    evaluate: Evaluate | None,
    resume: bool,
    console: Console,
) -> TrainResult:
    """Train as the recipe says, into `folder`.

    Raises ConfigError, DataError, FeatureError or TrainingError, each with one line.
    """
    check_recipe(config)
    dataset = load_dataset(config.data, tokenizer, target.info.eos_token_ids, config.seed)
    say(console, dataset.report.line(len(dataset.train) + len(dataset.held_out)))
    if evaluate is not None and not dataset.held_out:
        say(console, "no held-out prompts: the acceptance length will not be measured")
    made = prepare(config, target, tokenizer, dataset, folder, console)
    return train(
        config, target, dataset, made.features, made.draft, folder, version, evaluate, resume=resume, console=console
    )


def check_recipe(config: TrainConfig) -> None:
    """Raise ConfigError for settings that do not go together."""
    if config.loss.soft_weight > 0 and config.features.teacher_top_k == 0:
        raise ConfigError("loss.soft_weight > 0 needs soft labels: set features.teacher_top_k")


def prepare(
    config: TrainConfig, target: Teachable, tokenizer: Tokenizer, dataset: Dataset, folder: Path, console: Console
) -> Prepared:
    """The drafter with its first weights, and the features; shards are made where they are missing."""
    draft = make_draft(config.drafter, target, dataset, tokenizer, config.seed)
    say(console, "drafter: " + ", ".join(f"{key} {value}" for key, value in draft.notes.items()))
    features = open_features(config, target, dataset, folder, console)
    if config.drafter.fusion_init == "whitened" and config.drafter.warm_start is None:
        whiten_fusion(draft.model, features, dataset.train[:WHITENING_SAMPLES], config.seed)
    draft.notes["template"] = template_fingerprint(tokenizer)
    if draft.model.config.tap_ids:
        draft.notes["tap_sizes"] = tap_sizes(features, dataset.train)
    return Prepared(dataset, draft, features)


def open_features(config: TrainConfig, target: Teachable, dataset: Dataset, folder: Path, console: Console) -> Features:
    """The features that the recipe asks for; shards are made where they are missing."""
    # The recipe's taps, though a drafter without injection ignores them: ablations share one folder of features.
    taps = recipe_taps(config.drafter, target.info.num_layers)
    top_k = config.features.teacher_top_k
    if config.features.mode == "online":
        return OnlineFeatures(target, taps, top_k)
    shards = Path(config.features.folder) if config.features.folder is not None else folder / "features"
    return build_shards(target, taps, dataset.train, shards, top_k, config.features.batch_tokens, console)
