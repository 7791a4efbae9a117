"""What SpecForge's training is compared with: single steps of ours.

`python make_step.py OUT` (in this project's environment) makes a tiny target and drafters in the published layout, and
for each case writes down one step: texts, the anchors that were drawn, taps, the loss and every gradient.
`with_specforge.py` reads nothing but OUT.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from layouts import VOCAB, drafter
from models import save_tiny_target
from tiny import tiny_qwen3

from blockdraft.config import LossConfig
from blockdraft.drafters.checkpoint import save_drafter
from blockdraft.formats.card import TargetCard, read_card
from blockdraft.formats.layouts import export
from blockdraft.targets.base import Target
from blockdraft.targets.resolve import load_target
from blockdraft.train.batches import Batch, make_batch
from blockdraft.train.blocks import eligible_anchors
from blockdraft.train.data import Sample
from blockdraft.train.features import OnlineFeatures
from blockdraft.train.forward import taught_rows
from blockdraft.train.loss import block_loss, position_decay


@dataclass(frozen=True)
class Case:
    """A step: rows are a text's length and where its answers begin and end."""

    name: str
    block_size: int
    gamma: float | None  # None: all drafts weigh the same
    rows: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    anchors: int = 12
    kind: str = "plain"
    same: bool = True


LONG = (64, ((20, 64),))
CASES = (
    Case("uniform 4", 4, None, (LONG,)),
    Case("uniform 16", 16, None, (LONG,)),
    Case("decay 4", 4, 4.0, (LONG,)),
    Case("decay 16", 16, 7.0, (LONG,)),
    Case("text ends in block", 16, 7.0, ((37, ((30, 37),)),)),
    Case("answer ends in block", 16, 7.0, ((60, ((30, 37),)),)),
    Case("two lengths", 16, 7.0, (LONG, (33, ((25, 33),)))),  # the short text has fewer blocks than the long one
    Case("two answers", 4, 4.0, ((64, ((10, 25), (40, 64))),), anchors=99),
    # Windows longer than the block: shorter ones end inside it here, which SpecForge's leave whole.
    Case("one windowed layer", 4, 4.0, (LONG, (50, ((9, 50),))), kind="mixed"),
    # A block that reaches from one answer into the next goes on learning there in SpecForge.  Ours ends with its own,
    # since what stands between the two is not the target's.
    Case("answers close together", 16, 7.0, ((64, ((10, 30), (34, 64))),), anchors=99, same=False),
)


def main(out: Path) -> None:
    torch.set_num_threads(1)
    save_tiny_target(out / "target")
    tiny_qwen3(vocab_size=VOCAB, initializer_range=0.15).save_pretrained(out / "target")
    card, target = read_card(str(out / "target")), load_target(str(out / "target"))
    cases = [step(out / str(number), case, card, target) for number, case in enumerate(CASES)]
    (out / "cases.json").write_text(json.dumps(cases))
    print(f"made {out}")


def step(folder: Path, case: Case, card: TargetCard, target: Target) -> dict[str, Any]:
    """One step as the training loop takes it, up to the gradient's norm."""
    model, _ = drafter(case.kind, block_size=case.block_size)
    save_drafter(folder / "ours", model, None, {}, torch.float32)
    export(folder / "ours", folder / "dflash", "dflash", card)
    samples = make_samples(case)
    config = LossConfig(weights="uniform") if case.gamma is None else LossConfig(gamma=case.gamma)
    gamma = position_decay(config, step=0, steps=1, epoch=0)
    batch = make_batch(samples, case.anchors, 0, 0, model.config, gamma, torch.device("cpu"))
    features = OnlineFeatures(target, model.config.tap_ids, top_k=0).batch(samples)
    hidden, _ = taught_rows(model, target, batch, features.taps)
    found = block_loss(hidden, batch.blocks, target.head_rows().detach(), None, None, model.config, config)
    found.loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf))
    gradients = {f"gradient.{name}": made(parameter) for name, parameter in model.named_parameters()}
    save_file({**tensors(samples, batch), "taps": features.taps, **gradients}, folder / "step.safetensors")
    told = {"loss": float(found.loss.detach()), "norm": norm, "lengths": [len(sample) for sample in samples]}
    return {**asdict(case), **told, "mask_token_id": model.config.mask_token_id}


def make_samples(case: Case) -> list[Sample]:
    """Random texts with the case's answers."""
    samples = []
    for number, (length, answers) in enumerate(case.rows):
        generator = torch.Generator().manual_seed(number)
        mask = torch.zeros(length, dtype=torch.bool)
        for start, end in answers:
            mask[start:end] = True
        ids = torch.randint(5, VOCAB, (length,), generator=generator)
        samples.append(Sample(f"{number:012x}", "", ids, mask))
    return samples


def tensors(samples: list[Sample], batch: Batch) -> dict[str, Tensor]:
    """ids, loss mask, and what may be an anchor [B, S], padded; the anchors drawn [B, A], -1 where there is none."""
    length = max(len(sample) for sample in samples)
    ids, mask, eligible = (torch.zeros(len(samples), length, dtype=torch.int64) for _ in range(3))
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = sample.ids
        mask[row, : len(sample)] = sample.loss_mask
        eligible[row, eligible_anchors(sample.loss_mask)] = 1
    drawn = (batch.blocks.weights > 0).any(dim=-1)
    anchors = batch.blocks.context_lengths.where(drawn, torch.full_like(batch.blocks.context_lengths, -1))
    return {"ids": ids, "loss_mask": mask, "eligible": eligible, "anchors": anchors}


def made(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "every tensor of a drafter learns"
    return parameter.grad


if __name__ == "__main__":
    main(Path(sys.argv[1]))
