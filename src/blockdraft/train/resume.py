"""Stopping in good order, and going on only with the run that was stopped."""

from __future__ import annotations

import json
import signal
import threading
from typing import Any

from rich.console import Console

from blockdraft.config import ConfigError, TrainConfig
from blockdraft.train.progress import say

# What may change between a checkpoint and the run that goes on from it.
FREE_KEYS = {
    "steps",
    "checkpoint_steps",
    "checkpoint_minutes",
    "eval_steps",
    "eval_prompts",
    "eval_max_tokens",
    "log_steps",
    "tensorboard",
    "data.files",  # the digest says whether what is in them is the same
    "features.folder",
    "features.batch_tokens",
    "loss.chunk_rows",
}


def check_identity(saved: dict[str, Any], now: dict[str, Any], console: Console) -> None:
    """Raise ConfigError naming the first setting that must not change and did.

    A setting that did not exist when the run was saved had its default.
    """
    old = flat(TrainConfig.parse(saved["config"], "the saved run").model_dump(mode="json"))
    new = flat(now["config"])
    changed = first_change(old, new)
    if changed is not None:
        raise ConfigError(f"cannot resume: {changed}")
    if saved["data_digest"] != now["data_digest"]:
        raise ConfigError("cannot resume: the training data has changed; start a new run with drafter.warm_start")
    if old["steps"] != new["steps"]:
        say(console, f"steps was {old['steps']} and is {new['steps']} now: the learning rate follows the new cosine")


def first_change(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """The first of some flat settings that is another now and matters, said in words; None: there is none."""
    for key in sorted(old.keys() | new.keys()):
        if key not in FREE_KEYS and old.get(key) != new.get(key):
            return f"{key} was {old.get(key)} and is {new.get(key)} now"
    return None


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as `section.key`, with values as JSON has them."""
    made: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            made |= flat(value, f"{prefix}{key}.")
        else:
            made[f"{prefix}{key}"] = json.loads(json.dumps(value))
    return made


class Interrupt:
    """Ctrl-C or SIGTERM ask for a stop after the current step; a second one does not wait."""

    asked = False

    def __enter__(self) -> Interrupt:
        self._old: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for kind in (signal.SIGINT, signal.SIGTERM):
                self._old[kind] = signal.signal(kind, self._ask)
        return self

    def _ask(self, *_: object) -> None:
        self.asked = True
        for kind, handler in self._old.items():
            signal.signal(kind, handler)

    def __exit__(self, *error: object) -> None:
        for kind, handler in self._old.items():
            signal.signal(kind, handler)
