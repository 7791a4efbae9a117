"""The rows of a batch of blocks, as training has them.

Letters: B samples, S tokens, T taps, A anchors, Q block rows, D hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.drafters.network import Context, DraftNetwork
from blockdraft.targets.base import Target
from blockdraft.train.batches import Batch


def taught_rows(model: DraftNetwork, target: Target, batch: Batch, taps: Tensor | None) -> tuple[Tensor, Context]:
    """Hidden rows [B, A, Q, D] of a batch's blocks, in the model's precision, and the context [B, S - 1] they saw.

    taps [B, S - 1, T, D]; None: the drafter has none.
    """
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        embedded = target.embed(batch.blocks.ids).to(dtype)
        tokens = target.embed(batch.ids).to(dtype) if model.config.reads_tokens else None
    context = model.context(None if taps is None else taps.to(dtype), batch.positions, tokens)
    lengths = batch.blocks.context_lengths
    return model(embedded, batch.blocks.positions, context, lengths, context.before(lengths)), context
