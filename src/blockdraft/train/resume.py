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
    old = _flat(TrainConfig.parse(saved["config"], "the saved run").model_dump(mode="json"))
    new = _flat(now["config"])
    for key in sorted(old.keys() | new.keys()):
        if key not in FREE_KEYS and old.get(key) != new.get(key):
            raise ConfigError(f"cannot resume: {key} was {old.get(key)} and is {new.get(key)} now")
    if saved["data_digest"] != now["data_digest"]:
        raise ConfigError("cannot resume: the training data has changed; start a new run with drafter.warm_start")
    if old["steps"] != new["steps"]:
        say(console, f"steps was {old['steps']} and is {new['steps']} now: the learning rate follows the new cosine")


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.loads(json.dumps(value))
    return flat


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
