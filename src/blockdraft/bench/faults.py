"""What a drafter would accept if it were wired in another way than its checkpoint says.

A drafter that was trained with taps one layer off, or with labels shifted by one, has learned well and drafts badly:
it gains if the same mistake is made in drafting.  One that has only learned little loses by any of them.  So each
fault is made on purpose, in the rows that training has (all anchors of an answer at once), where even those can be
tried that drafting could not make, such as a context that holds the anchor's own taps.

Letters: B samples, S tokens, T taps, D hidden width, A anchors, Q block rows, K drafted tokens, V' draft head rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from blockdraft.config import LossConfig
from blockdraft.drafters.head import draft_index
from blockdraft.drafters.layers import BlockLayer
from blockdraft.drafters.network import DraftNetwork
from blockdraft.ops.layers import rotary_frequencies
from blockdraft.targets.base import Target
from blockdraft.train.batches import make_batch
from blockdraft.train.data import Sample
from blockdraft.train.features import collate, compute
from blockdraft.train.forward import taught_rows
from blockdraft.train.loss import block_loss

ANCHORS = 48  # of each answer


@dataclass(frozen=True)
class Fault:
    """One thing done otherwise than configured; `told` is what is wrong with a checkpoint that gains by it."""

    name: str
    told: str
    tap_shift: int = 0
    context_shift: int = 0
    position_shift: int = 0
    flip_labels: bool = False
    flip_causality: bool = False
    target_rope: bool = False


AS_CONFIGURED = Fault("as configured", "")
FAULTS = (
    Fault(
        "taps one layer later",
        "its target_layer_ids are one too low: id i is the output of layer i, counted from 0",
        tap_shift=1,
    ),
    Fault(
        "taps one layer earlier",
        "its target_layer_ids are one too high, as ids are that count the embedding as 0: subtract 1",
        tap_shift=-1,
    ),
    Fault(
        "labels shifted by one",
        "its rows were taught another token than the configuration says: sample_from_anchor is the wrong way round",
        flip_labels=True,
    ),
    Fault(
        "context with the anchor",
        "it was trained with the anchor's own features in its context, which nobody has in drafting: the context must "
        "end before the anchor",
        context_shift=1,
    ),
    Fault(
        "context one token short",
        "it was trained with a context that ends one token too early",
        context_shift=-1,
    ),
    Fault(
        "rows one position later", "its rotary positions are one too low: row k stands at anchor + k", position_shift=1
    ),
    Fault(
        "rows one position earlier",
        "its rotary positions are one too high: row k stands at anchor + k",
        position_shift=-1,
    ),
    Fault(
        "causality turned round",
        "its rows saw other rows of their block in training than the configuration says: look at is_causal and "
        "layer_types",
        flip_causality=True,
    ),
    Fault(
        "the target's rotary base", "it was trained with the target's rope_theta, not with its own", target_rope=True
    ),
)


@dataclass(frozen=True)
class Accepted:
    """What a drafter's rows are like at random anchors of known answers, drafts being told the answer so far.

    tau: 1 + mean number of drafts in front of the first miss.  accuracy [K]: of each drafted token by itself.
    """

    tau: float
    accuracy: tuple[float, ...]
    blocks: int


class Rows:
    """Answers with the taps of all layers that any fault asks for, read once."""

    def __init__(
        self, target: Target, model: DraftNetwork, samples: Sequence[Sample], draft_ids: Tensor | None
    ) -> None:
        self.target, self.model, self.samples = target, model, list(samples)
        config, info = model.config, target.info
        self._layers = sorted(
            {tap + shift for tap in config.tap_ids for shift in (-1, 0, 1) if 0 <= tap + shift < info.num_layers}
        )
        self._taps = None
        if self._layers:
            target.set_taps(self._layers)
            read = [compute(target, [sample], 0)[0] for sample in samples]
            self._taps = collate(self.samples, read, info.device).taps
        self.head = (target.head_rows(draft_ids) if model.lm_head is None else model.lm_head.weight).float()
        self.index = draft_index(draft_ids, info.vocab_size, info.device)

    def fits(self, fault: Fault, rope_theta: float | None) -> bool:
        """Whether a fault can be made here, and changes anything."""
        config = self.model.config
        if fault.tap_shift or fault.context_shift:
            shifted = [tap + fault.tap_shift for tap in config.tap_ids]
            return bool(config.tap_ids) and set(shifted) <= set(self._layers)
        if fault.target_rope:
            return rope_theta is not None and config.rope_scaling is None and rope_theta != config.rope_theta
        return not (config.token_by_token and (fault.flip_labels or fault.flip_causality))

    @torch.no_grad()
    def accepted(self, fault: Fault = AS_CONFIGURED, rope_theta: float | None = None) -> Accepted:
        """Draft at the anchors with a fault made; `rope_theta` is the target's."""
        config, device = self.model.config, self.target.info.device
        asked = config.model_copy(update={"anchor_drafts": not config.anchor_drafts}) if fault.flip_labels else config
        batch = make_batch(self.samples, ANCHORS, 0, 0, asked, math.inf, device)
        lengths = (batch.blocks.context_lengths + fault.context_shift).clamp(0, batch.ids.shape[1])
        positions = batch.blocks.positions + fault.position_shift
        blocks = replace(batch.blocks, positions=positions, context_lengths=lengths)
        taps = None
        if self._taps is not None:
            taps = self._taps[:, :, [self._layers.index(tap + fault.tap_shift) for tap in config.tap_ids]]
        with _made(self.model, fault, rope_theta):
            hidden, _ = taught_rows(self.model, self.target, replace(batch, blocks=blocks), taps)
        loss = block_loss(hidden, blocks, self.head, self.index, None, asked, LossConfig(), self.model.markov_head)
        right, count = loss.correct.tolist(), loss.count.tolist()
        return Accepted(
            tau=1.0 + loss.accepted / max(loss.blocks, 1),
            accuracy=tuple(round(r / max(n, 1), 4) for r, n in zip(right, count, strict=True)),
            blocks=loss.blocks,
        )


def gains(configured: Accepted, faulty: Accepted) -> bool:
    """Whether a fault helps by more than chance: a drafter that is wired right loses by every one of them."""
    return faulty.tau - 1.0 > 1.25 * (configured.tau - 1.0) + 0.05


@contextmanager
def _made(model: DraftNetwork, fault: Fault, rope_theta: float | None) -> Iterator[None]:
    """The model with the fault in its layers or its rotary base, for as long as it takes."""
    attentions = []
    if fault.flip_causality:
        attentions = [layer.self_attn for layer in cast("Iterable[BlockLayer]", model.layers)]
    frequencies = model.inverse_frequencies
    try:
        for attention in attentions:
            attention.causal = not attention.causal
        if fault.target_rope and rope_theta is not None:
            made, _ = rotary_frequencies(model.config.head_dim, rope_theta, None)
            model.inverse_frequencies = made.to(frequencies.device)
        yield
    finally:
        model.inverse_frequencies = frequencies
        for attention in attentions:
            attention.causal = not attention.causal
