"""The training loop, written out: batch, features, blocks, context, forward, loss, optimiser, and what is kept.

Letters: B samples, S tokens, A anchors, Q block rows, D hidden width, V' draft vocabulary.

A run lives in a folder: config.json, log.jsonl, checkpoints/, best/ and last/ (drafter folders).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from blockdraft.config import ConfigError, TrainConfig
from blockdraft.drafters.checkpoint import save_drafter
from blockdraft.drafters.head import draft_index
from blockdraft.drafters.network import DraftNetwork
from blockdraft.targets.base import Target
from blockdraft.train.batches import Batch, Batches, make_batch
from blockdraft.train.data import Dataset
from blockdraft.train.features import FeatureBatch, Features
from blockdraft.train.forward import taught_rows
from blockdraft.train.log import Log, Meter
from blockdraft.train.loss import BlockLoss, Teacher, block_loss, position_decay
from blockdraft.train.progress import Meterbar, say
from blockdraft.train.resume import Interrupt, check_identity
from blockdraft.train.setup import Draft
from blockdraft.train.weights import (
    Progress,
    Weights,
    checkpoints,
    learning_rate,
    load_checkpoint,
    save_checkpoint,
)

# (model, draft ids, prompts as ids) -> {"tau": ..., ...}; it may do with the model what it likes
Evaluate = Callable[[DraftNetwork, Tensor | None, Sequence[list[int]]], dict[str, Any]]


class TrainingError(ValueError):
    """Training that cannot go on; one line that says why."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended: its step, the best acceptance measured and where, and whether it was stopped early."""

    step: int
    finished: bool
    best_tau: float
    best_step: int


def train(
    config: TrainConfig,
    target: Target,
    dataset: Dataset,
    features: Features,
    draft: Draft,
    folder: Path,
    version: str,
    evaluate: Evaluate | None = None,
    resume: bool = False,
    console: Console | None = None,
) -> TrainResult:
    """Train until config.steps, or until interrupted; everything that matters is in `folder` afterwards.

    Raises ConfigError if the folder holds a run and `resume` is not set, or a run of other settings or data;
    TrainingError if the loss is no longer a number.
    """
    run = _Run(config, target, dataset, features, draft, folder, version, evaluate, console or Console(stderr=True))
    run.start(resume)
    with Interrupt() as interrupt, Meterbar(run.console, "train", config.steps, "blocks", run.progress.step) as bar:
        while run.progress.step < config.steps and not interrupt.asked:
            run.step(bar)
    return run.finish()


def time_steps(
    config: TrainConfig, target: Target, dataset: Dataset, features: Features, draft: Draft, skip: int, count: int
) -> float:
    """Seconds that a step of this run takes: the mean of `count` steps after `skip`; nothing is kept of them.

    They are the run's own first steps, on a copy of the drafter.  Raises TrainingError as `train` does.
    """
    never = {"steps": skip + count + 1, "log_steps": skip + count + 1, "checkpoint_steps": skip + count + 1}
    config = config.model_copy(update={**never, "checkpoint_minutes": math.inf})
    quiet = Console(quiet=True)
    run = _Run(config, target, dataset, features, copy.deepcopy(draft), Path(), "", None, quiet)
    before = 0.0
    with Meterbar(quiet, "timing", skip + count, "blocks") as bar:
        for number in range(skip + count):
            before = run.progress.seconds if number == skip else before
            run.step(bar)
    return (run.progress.seconds - before) / count


class _Run:
    """One run: what it reads, and the state that steps change."""

    def __init__(
        self,
        config: TrainConfig,
        target: Target,
        dataset: Dataset,
        features: Features,
        draft: Draft,
        folder: Path,
        version: str,
        evaluate: Evaluate | None,
        console: Console,
    ) -> None:
        self.config, self.target, self.dataset, self.features = config, target, dataset, features
        self.draft, self.folder, self.version, self.console = draft, folder, version, console
        self.prompts = [s.ids[: s.prompt_length].tolist() for s in dataset.held_out[: config.eval_prompts]]
        self.evaluate = evaluate if self.prompts else None
        self.device = target.info.device
        self.dtype = getattr(torch, config.dtype)
        self.weights = Weights(draft.model, config.optim, self.dtype, self.device)
        self.batches = Batches(dataset.train, config.batch_size, config.seed)
        self.head = target.head_rows(draft.draft_ids).detach().to(self.dtype)
        draft_ids = None if draft.draft_ids is None else draft.draft_ids.to(self.device)
        self.index = draft_index(draft_ids, target.info.vocab_size, self.device)
        self.progress, self.meter = Progress(), Meter()
        self._saved_at, self._saved_step = time.perf_counter(), 0

    def start(self, resume: bool) -> None:
        """A fresh folder, or the newest checkpoint of this one."""
        saved = checkpoints(self.folder / "checkpoints")
        if saved and not resume:
            raise ConfigError(f"{self.folder} holds a run already: resume it, or choose another folder")
        if saved:
            tensors, self.progress, identity = load_checkpoint(saved[-1])
            check_identity(identity, self._identity(), self.console)
            if self.progress.step > self.config.steps:
                raise ConfigError(f"{self.folder} is at step {self.progress.step}, beyond steps={self.config.steps}")
            self.weights.restore(tensors)
            self.meter = Meter(**self.progress.meter)
            say(self.console, f"going on from step {self.progress.step}")
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.json").write_text(self.config.model_dump_json(indent=2) + "\n")
        self.log = Log(self.folder, self.progress.step, self.config.tensorboard)
        self._saved_at, self._saved_step = time.perf_counter(), self.progress.step

    def step(self, bar: Meterbar) -> None:
        """One optimiser step, and what is due after it."""
        started = time.perf_counter()
        config, number = self.config, self.progress.step
        epoch, samples = self.batches.at(number)
        drafter, fixed = self.draft.model.config, config.anchor_mode == "fixed"
        gamma = position_decay(config.loss, number, config.steps, epoch)
        batch = make_batch(samples, config.anchors, config.seed, epoch, drafter, gamma, self.device, fixed)
        loss = self._loss(batch, self.features.batch(samples))
        if loss.blocks == 0:
            raise TrainingError(f"step {number + 1}: nothing to learn in its batch; look at the data with --preview")
        loss.loss.backward()
        value = float(loss.loss.detach())
        norm = self.weights.update(number, config.steps) if math.isfinite(value) else math.nan
        if not math.isfinite(norm):
            self._diverged(value)
        seconds = time.perf_counter() - started
        self.progress.step = number + 1
        self.progress.seconds += seconds
        self.meter.add(loss, norm, batch.tokens, seconds)
        bar.advance(1, f"loss {value:.3f}", units=loss.blocks)
        self._after(epoch)

    def _loss(self, batch: Batch, features: FeatureBatch) -> BlockLoss:
        model = self.weights.model
        hidden, _ = taught_rows(model, self.target, batch, features.taps)
        teacher: Teacher | None = features.teacher if self.config.loss.soft_weight > 0 else None
        head = self.head if model.lm_head is None else model.lm_head.weight
        blocks, config = batch.blocks, self.config.loss
        return block_loss(hidden, blocks, head, self.index, teacher, model.config, config, model.markov_head)

    def _after(self, epoch: int) -> None:
        """Log, evaluate and save where it is due."""
        config, step = self.config, self.progress.step
        last = step == config.steps
        if step % config.log_steps == 0 or last:
            rate = learning_rate(step - 1, config.steps, config.optim)
            seconds = round(self.progress.seconds, 1)
            row = self.meter.row()
            self.progress.accuracy = row["accuracy"]
            self.log.write({"step": step, "epoch": epoch, "lr": rate, **row, "seconds": seconds})
            self.meter = Meter()
        if self.evaluate is not None and (step % config.eval_steps == 0 or last):
            self._measure()
        minutes = (time.perf_counter() - self._saved_at) / 60
        if step % config.checkpoint_steps == 0 or minutes >= config.checkpoint_minutes or last:
            self.save()

    def _measure(self) -> None:
        """The real acceptance length on held-out prompts; the best drafter so far is exported."""
        assert self.evaluate is not None
        result = self.evaluate(self.weights.snapshot(), self.draft.draft_ids, self.prompts)
        self.log.write({"step": self.progress.step, "eval": result})
        say(self.console, f"step {self.progress.step}: tau {result['tau']:.3f} on {len(self.prompts)} prompts")
        if result["tau"] > self.progress.best_tau:
            self.progress.best_tau, self.progress.best_step = result["tau"], self.progress.step
            self._export("best", result)

    def _export(self, name: str, acceptance: dict[str, Any] | None) -> None:
        provenance = {
            "version": self.version,
            "target": self.target.info.name,
            "step": self.progress.step,
            "blocks_per_step": self.config.batch_size * self.config.anchors,
            "seconds": round(self.progress.seconds, 1),
            "acceptance": acceptance,
            "accuracy": self.progress.accuracy,
            "samples": {"train": len(self.dataset.train), "held_out": len(self.dataset.held_out)},
            "data_digest": self.dataset.digest,
            **self.draft.notes,
            "torch": torch.__version__,
            "config": without_folders(self.config.model_dump(mode="json")),
        }
        save_drafter(self.folder / name, self.weights.snapshot(), self.draft.draft_ids, provenance)

    def _identity(self) -> dict[str, Any]:
        return {"config": self.config.model_dump(mode="json"), "data_digest": self.dataset.digest}

    def save(self) -> None:
        """A checkpoint of this step, unless it has one."""
        if self.progress.step == self._saved_step:
            return
        self.progress.meter = self.meter.state()
        save_checkpoint(self.folder / "checkpoints", self.weights, self.progress, self._identity())
        self._saved_at, self._saved_step = time.perf_counter(), self.progress.step

    def finish(self) -> TrainResult:
        """Export and say how it ended, or how to go on."""
        finished = self.progress.step == self.config.steps
        if finished:
            self._export("last", None)
        else:
            self.save()
            say(self.console, f"stopped at step {self.progress.step}; saved: run the same again to go on")
        self.log.close()
        return TrainResult(self.progress.step, finished, self.progress.best_tau, self.progress.best_step)

    def _diverged(self, loss: float) -> None:
        self.log.close()
        saved = checkpoints(self.folder / "checkpoints")
        kept = f"the last good checkpoint is {saved[-1].name}" if saved else "no checkpoint was made yet"
        raise TrainingError(
            f"step {self.progress.step + 1}: the loss is {loss} and no longer finite with its gradient; "
            f"nothing was saved, {kept}; lower optim.lr"
        )


def without_folders(config: dict[str, Any]) -> dict[str, Any]:
    """A recipe's paths without the folders above them, which mean something on one machine only."""
    config["data"]["files"] = [Path(file).name for file in config["data"]["files"]]
    for section, key in (("features", "folder"), ("drafter", "warm_start")):
        if config[section][key] is not None:
            config[section][key] = Path(config[section][key]).name
    return config
