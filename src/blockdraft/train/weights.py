"""What a training step changes: the model, its fp32 masters, the optimiser's moments, the running average.

All of it is saved and restored bit for bit.  Everything random in training is a function of (seed, epoch,
sample), so there is no generator state.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft.config import ConfigError, OptimConfig
from blockdraft.drafters.network import DraftNetwork
from blockdraft.train.muon import Muon

KEPT_CHECKPOINTS = 2
# The share of the learning rate that a draft head has, by optimiser: Muon's updates are a fifth of AdamW's.
HEAD_SHARE = {"adamw": 1.0, "muon": 0.2}


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Linear warm-up, then cosine: the rate of step 0 .. steps - 1."""
    warmup = math.ceil(config.warmup_ratio * steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(steps - warmup, 1)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)


class Weights:
    """The model that computes, in `dtype`, and what the optimiser keeps for it in fp32."""

    def __init__(self, model: DraftNetwork, config: OptimConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.model = model.to(device).train()
        self.masters = {name: p.detach().float().clone() for name, p in model.named_parameters()}
        if dtype == torch.float32:
            self.masters = {name: p.detach() for name, p in model.named_parameters()}
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)
        self.average = {name: p.clone() for name, p in self.masters.items()} if config.ema > 0 else None
        self._shared = dtype == torch.float32
        # A Markov head's matrices are tables of tokens: rare ones must not be moved as far as frequent ones.
        # The mixes of a layerwise fusion are rows of scalars, each on its own: no direction, and no decay to zero.
        # A draft head of its own is a table too, but a trained one: beside Muon it moves as far as matrices do.
        tables, heads = ("markov_head.", "layer_fusion_weights"), "lm_head."
        named = self.masters.items()
        matrices = [p for name, p in named if p.dim() > 1 and not name.startswith((*tables, heads))]
        groups: list[dict[str, Any]] = [
            {"params": [p for name, p in named if p.dim() <= 1 or name.startswith(tables)]},
            {"params": [p for name, p in named if name.startswith(heads)], "share": HEAD_SHARE[config.name]},
        ]
        groups = [group for group in groups if group["params"]]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, weight_decay=0.0, fused=True)
        ]
        if config.name == "muon":
            self.optimizers.append(Muon(matrices, config.lr, weight_decay=config.weight_decay))
        else:
            decay = config.weight_decay
            self.optimizers.append(
                torch.optim.AdamW(matrices, lr=config.lr, betas=config.betas, weight_decay=decay, fused=True)
            )

    def update(self, step: int, steps: int) -> float:
        """Clip, step, average, and forget the gradients; returns the gradient's norm before clipping.

        Nothing changes if the norm is not finite.
        """
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient"
            self.masters[name].grad = parameter.grad if self._shared else parameter.grad.float()
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters.values(), self.config.clip))
        if math.isfinite(norm):
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, steps, self.config) * group.get("share", 1.0)
                optimizer.step()
            self._follow(step)
        for name, parameter in self.model.named_parameters():
            parameter.grad = self.masters[name].grad = None
        return norm

    @torch.no_grad()
    def _follow(self, step: int) -> None:
        """Bring the computing copy and the running average up to the new masters."""
        if not self._shared:
            self._load_model()
        if self.average is not None:
            # a short memory at first, so that the random start is forgotten
            decay = min(self.config.ema, (1.0 + step) / (10.0 + step))
            torch._foreach_lerp_(list(self.average.values()), list(self.masters.values()), 1.0 - decay)

    @torch.no_grad()
    def _load_model(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self.masters[name])

    @torch.no_grad()
    def snapshot(self) -> DraftNetwork:
        """A copy to evaluate and export, fp32: the running average if there is one."""
        model = copy.deepcopy(self.model).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            parameter.data = (self.masters if self.average is None else self.average)[name].detach().clone()
        return model

    def tensors(self) -> dict[str, Tensor]:
        """Everything that has to survive, by name."""
        saved = {f"model.{name}": p for name, p in self.masters.items()}
        for name, p in self.masters.items():
            for optimizer in self.optimizers:
                for moment, value in optimizer.state.get(p, {}).items():
                    saved[f"{moment}.{name}"] = value
        for name, p in (self.average or {}).items():
            saved[f"average.{name}"] = p
        return {name: p.detach().cpu().contiguous() for name, p in saved.items()}

    @torch.no_grad()
    def restore(self, saved: dict[str, Tensor]) -> None:
        """Take over what `tensors` gave; copies into memory of our own, so that kernels see the same alignment."""
        for name, p in self.masters.items():
            p.copy_(saved[f"model.{name}"])
            for optimizer in self.optimizers:
                if not any(p is owned for group in optimizer.param_groups for owned in group["params"]):
                    continue
                moments = ("momentum",) if isinstance(optimizer, Muon) else ("exp_avg", "exp_avg_sq", "step")
                for moment in moments:
                    value = saved[f"{moment}.{name}"]
                    optimizer.state[p][moment] = torch.zeros_like(value, device=p.device).copy_(value)
            if self.average is not None:
                self.average[name].copy_(saved[f"average.{name}"])
        if not self._shared:
            self._load_model()


@dataclass
class Progress:
    """The part of a run's state that is not tensors: written as JSON beside them."""

    step: int = 0
    best_tau: float = 0.0
    best_step: int = 0  # 0: never measured
    seconds: float = 0.0
    accuracy: list[float] = field(default_factory=list)  # of each drafted token, as last logged
    meter: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(folder: Path, weights: Weights, progress: Progress, identity: dict[str, Any]) -> Path:
    """Write `folder/step-N` whole or not at all, and keep the newest few.  identity: config and data digest."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{progress.step:08}"
    temporary = folder / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    save_file(weights.tensors(), temporary / "state.safetensors")
    state = {"progress": vars(progress), **identity}
    (temporary / "state.json").write_text(json.dumps(state, indent=2) + "\n")
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    for old in checkpoints(folder)[:-KEPT_CHECKPOINTS]:
        shutil.rmtree(old)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(folder.glob("step-*"))


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], Progress, dict[str, Any]]:
    """Tensors, progress and identity.  ConfigError: the checkpoint is damaged."""
    try:
        tensors = load_file(path / "state.safetensors")
        state = json.loads((path / "state.json").read_text())
        progress = Progress(**state.pop("progress"))
    except (OSError, SafetensorError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: damaged checkpoint ({error}); delete it to go on from the one before") from None
    return tensors, progress, state
