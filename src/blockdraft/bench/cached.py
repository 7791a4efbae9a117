"""Whether a drafter over its cache computes what it computed in training.

Letters: G key/value heads, S context tokens, E head width, K drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.drafters.block import BlockDrafter
from blockdraft.drafters.chain import ChainDrafter
from blockdraft.drafters.head import draft_index
from blockdraft.drafters.network import DraftNetwork
from blockdraft.targets.base import Target
from blockdraft.train.batches import make_batch
from blockdraft.train.data import Sample
from blockdraft.train.features import compute
from blockdraft.train.forward import taught_rows

TOLERANCE = 1e-3  # relative to the largest number of a tensor
ANCHORS = 12
CHUNKS = (1, 3, 2, 5)  # tokens committed at once, in turn


@torch.no_grad()
def first_difference(
    target: Target, model: DraftNetwork, drafter: BlockDrafter | ChainDrafter, sample: Sample
) -> str | None:
    """The first tensor that differs between training's rows and drafting, in words; None: none does.

    `model` holds the drafter's weights as training has them.  An answer is committed piece by piece, as rounds would,
    and drafted at some of its tokens; context keys and values are compared, then the first draft of each block, which
    follows from the anchor alone in both.
    """
    config, device = model.config, target.info.device
    taps = None
    if config.tap_ids:
        target.set_taps(config.tap_ids)
        taps = compute(target, [sample], 0)[0].taps[None]
    batch = make_batch([sample], ANCHORS, 0, 0, config, 1.0, device)
    hidden, context = taught_rows(model, target, batch, taps)
    blocks = batch.blocks
    first = hidden[0, :, config.block_size - config.max_drafts]
    expected = _first_drafts(model, target, drafter.draft_ids, first, blocks.ids[0, :, 0])

    state = drafter.new_state(1, len(sample) + config.block_size + 1)
    done = turn = 0
    for anchor, draft in zip(blocks.context_lengths[0].tolist(), expected, strict=True):
        while done < anchor:
            count = min(CHUNKS[turn % len(CHUNKS)], anchor - done)
            part = slice(done, done + count)
            drafter.observe(state, [0], batch.ids[:, part], None if taps is None else taps[:, part], [count])
            done, turn = done + count, turn + 1
        proposal = drafter.propose(state, [0], sample.ids[None, anchor].to(device))
        if int(proposal.tokens[0, 0]) != draft:
            return f"the first draft after token {anchor}"
    for layer, (keys, values) in enumerate(context.layers):
        for name, ours, theirs in (("keys", state.keys, keys), ("values", state.values, values)):
            cached = ours[layer][0, :, :done]
            if float((cached - theirs[0, :, :done]).abs().max()) > TOLERANCE * float(cached.abs().max()):
                return f"the context's {name} in draft layer {layer}"
    return None


def _first_drafts(
    model: DraftNetwork, target: Target, draft_ids: Tensor | None, hidden: Tensor, anchors: Tensor
) -> list[int]:
    """Arg-max tokens of rows that follow the anchors."""
    head = target.head_rows(draft_ids) if model.lm_head is None else model.lm_head.weight
    logits = hidden @ head.to(hidden.dtype).T
    if model.markov_head is not None:
        logits = logits + model.markov_head(draft_index(draft_ids, target.info.vocab_size, anchors.device)[anchors])
    rows = logits.argmax(dim=-1)
    return [int(token) for token in (rows if draft_ids is None else draft_ids[rows])]
