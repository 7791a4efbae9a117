"""The block drafter: one network for DFlash (arXiv 2602.06036), DFlare (arXiv 2606.02091) and their ablations.

Letters: B rows, S context tokens, A blocks per row, Q block rows, T taps, N draft layers, D hidden width, H/G
query/key-value heads, E head width, V vocabulary.

The target's taps become context vectors for each committed token, which are injected into the keys and values of
every draft layer; one pass then fills a block of mask tokens.  Training runs many blocks over one sequence, drafting
runs one block over the cache; both call the same two methods, `BlockModel.context` and `BlockModel.forward`.

What `config.DraftAxes` changes of that:

- `fusion`: one context vector per token for all layers, a projection of all taps, normed; or (layerwise, DFlare) one
  for each layer, that layer's own softmax mix of the taps, normed by one norm or by the layer's own.
- `context_projections`: the context's keys and values come from the block's projections, or from separate ones.
- `injection`: `kv`, as above.  With `none` the drafter is a language model of its own: committed tokens are rows of
  its layers like any other, causal, and the keys and values that they leave are the block's context.  `input` is the
  same, but every token's embedding comes with a projection of what the target said at the token before it, as in
  EAGLE; nobody knows yet what it says at the anchor, so all rows of a block have what it said before the anchor.
- `order`: a block is filled at once; or token after token, where row k is the k-th token itself, sees those before it
  and predicts the next.  In training those are the answer's tokens, in drafting the drafter's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from blockdraft.cache import KVCache
from blockdraft.config import DrafterConfig
from blockdraft.drafters.base import Lender, Proposal
from blockdraft.drafters.compiled import compile_layers, run_layers
from blockdraft.drafters.fusion import mix_taps, peak_weights
from blockdraft.drafters.head import draft_index, draw, probability, reduced_head
from blockdraft.drafters.layers import BlockLayer, KeysValues
from blockdraft.drafters.markov import MarkovHead
from blockdraft.drafters.network import Context, DraftNetwork, fitted
from blockdraft.ops.layers import RMSNorm
from blockdraft.ops.sampling import Coupling


class BlockModel(DraftNetwork):
    """The drafter's own weights, under the published tensor names; embedding and head are the target's."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        width, taps = config.hidden_size, len(config.tap_ids)
        if config.fusion == "layerwise":
            self.layer_fusion_weights = nn.Parameter(peak_weights(config.num_layers, taps))
        elif config.injection != "none":
            self.fc = nn.Linear(taps * width, width, bias=False)
        if config.fusion_norm == "layerwise":
            self.hidden_norms = nn.ModuleList(RMSNorm(width, config.rms_norm_eps) for _ in range(config.num_layers))
        elif config.injection != "none":
            self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        if config.injection == "input":
            self.input_proj = nn.Linear(width, width, bias=False)
        self.layers = nn.ModuleList(BlockLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.markov_head = MarkovHead(config.num_head_rows, config.markov_rank) if config.markov_rank else None

    def context(
        self, taps: Tensor | None, positions: Tensor, tokens: Tensor | None = None, past: Context | None = None
    ) -> Context:
        """The context of committed tokens: taps [B, S, T, D] at positions [B, S].

        Unless injection is `kv`, it also takes the tokens' embeddings [B, S, D], and the context of those before
        them, whose features (if any) are [B, 1, D], the ones just before the first of these tokens.
        """
        if self.config.injection == "kv":
            assert taps is not None, "the caller sets the taps of its drafter"
            return Context(self._inject(taps, positions))
        assert tokens is not None, "a drafter whose context is tokens is given them"
        features = None
        if self.config.injection == "input":
            assert taps is not None, "the caller sets the taps of its drafter"
            fused = self.hidden_norm(self.fc(taps.flatten(-2)))
            first = torch.zeros_like(fused[:, :1]) if past is None else past.features
            features = torch.cat([cast("Tensor", first), fused], dim=1)
            tokens = tokens + self.input_proj(features[:, :-1])
        config = self.config
        nothing = tokens.new_zeros(len(tokens), config.num_kv_heads, 0, config.head_dim)
        seen = [(nothing, nothing)] * config.num_layers if past is None else past.layers
        _, made = self.rows(tokens[:, None], positions[:, None], seen, positions[:, :1], causal=True)
        return Context([(keys[:, 0].transpose(1, 2), values[:, 0].transpose(1, 2)) for keys, values in made], features)

    def forward(
        self, block: Tensor, positions: Tensor, context: Context, context_lengths: Tensor, before: Tensor | None = None
    ) -> Tensor:
        """Fill blocks: embeddings [B, A, Q, D] of [anchor, mask, ...] at positions [B, A, Q] -> hidden [B, A, Q, D].

        Every row of block a sees the first context_lengths[b, a] context slots and its own block.  `before` [B, A, D]
        are the features in front of the anchors (see `Context.before`).  The final norm is applied; the target's head
        turns the result into logits.
        """
        return self.leave(self.rows(self.enter(block, before), positions, context.layers, context_lengths)[0])

    def leave(self, x: Tensor) -> Tensor:
        """What the head is given of the last layer's rows [..., D]."""
        hidden = self.norm(x)
        return hidden if self.config.output_multiplier == 1.0 else hidden * self.config.output_multiplier

    def enter(self, block: Tensor, before: Tensor | None) -> Tensor:
        """A block's embeddings [B, A, Q, D] with the features [B, A, D] in front of its anchor, if it takes them."""
        if self.config.input_embedding_scale != 1.0:
            block = block * self.config.input_embedding_scale
        return block if before is None else block + self.input_proj(before)[:, :, None]

    def rows(
        self, x: Tensor, positions: Tensor, context: list[KeysValues], lengths: Tensor, causal: bool | None = None
    ) -> tuple[Tensor, list[KeysValues]]:
        """All layers on x [B, A, Q, D], before the final norm; and the rows' own keys and values [B, A, Q, G, E].

        `causal` None: in the block as each layer is configured.
        """
        tables, made = self.tables(positions, x.dtype), []
        for layer, layer_context in zip(self.layers, context, strict=True):
            x, own = layer(x, tables, layer_context, lengths, positions, causal)
            made.append(own)
        return x, made

    def _inject(self, taps: Tensor, positions: Tensor) -> list[KeysValues]:
        """Keys and values [B, G, S, E] of every layer from taps [B, S, T, D]."""
        layers = list(cast("Iterable[BlockLayer]", self.layers))
        if self.config.fusion == "shared":
            fused = [self.hidden_norm(self.fc(taps.flatten(-2)))] * len(layers)
        else:
            mixes = mix_taps(taps, self.layer_fusion_weights)
            norms = self.hidden_norms if self.config.fusion_norm == "layerwise" else [self.hidden_norm] * len(layers)
            fused = [norm(mix) for norm, mix in zip(norms, mixes.unbind(-2), strict=True)]
        tables = self.tables(positions, fused[0].dtype)
        made = (layer.self_attn.context_keys_values(x, tables) for layer, x in zip(layers, fused, strict=True))
        return [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in made]


def initialise(model: DraftNetwork, seed: int, std: float = 0.02) -> None:
    """Random weights: normal matrices, norms of one, biases of zero, and a Markov head that says nothing yet.

    Layerwise fusion starts as its authors have it.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        with torch.no_grad():
            if name == "layer_fusion_weights":
                parameter.copy_(peak_weights(*parameter.shape))
            elif parameter.dim() > 1:
                parameter.normal_(0.0, std, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    if model.markov_head is not None:
        nn.init.zeros_(model.markov_head.w2.weight)


class ContextCache(KVCache):
    """The context of a drafter: its keys and values, and where features enter at the input, the latest [slots, D]."""

    features: Tensor | None = None


class BlockDrafter:
    """A `BlockModel` as the engine's drafter: context cache, embedding and head of the target, arg-max drafts.

    draft_ids [V'] are the target ids that a reduced draft head can say; None: the target's whole head.
    `block_size`, if given, is that of the blocks it drafts, not above the one it was trained with.  The model's
    linear layers are used as they are: pack them first where that pays.
    """

    def __init__(
        self,
        model: BlockModel,
        target: Lender,
        draft_ids: Tensor | None = None,
        name: str = "dflash",
        block_size: int | None = None,
    ) -> None:
        info = target.info
        config = fitted(model.config, info, block_size)
        self.model, self.config, self.target, self.draft_ids, self.name = model, config, target, draft_ids, name
        self.tap_ids, self.block_size, self.max_drafts = config.tap_ids, config.block_size, config.max_drafts
        self._head = target.head if draft_ids is None else reduced_head(target.head_rows(draft_ids))
        self._head_row = draft_index(draft_ids, info.vocab_size, info.device)
        plain = config.injection == "kv" and config.order == "block"
        self._compiled = compile_layers(list(model.layers), config) if plain else None

    def new_state(self, slots: int, capacity: int) -> ContextCache:
        """The context cache; what is committed in it is what was observed."""
        config, info = self.config, self.target.info
        capacity += config.block_size  # a block's rows may stand behind the context while it is drafted
        shape = config.num_layers, slots, capacity, config.num_kv_heads, config.head_dim
        state = ContextCache(*shape, info.dtype, info.device)
        if config.injection == "input":
            state.features = torch.zeros(slots, config.hidden_size, dtype=info.dtype, device=info.device)
        return state

    def reset(self, state: ContextCache, row: int) -> None:
        state.truncate([row], [0])
        if state.features is not None:
            state.features[row] = 0

    @torch.no_grad()
    def observe(
        self, state: ContextCache, rows: Sequence[int], tokens: Tensor, taps: Tensor | None, counts: Sequence[int]
    ) -> None:
        """Write the context keys and values of tokens just committed, once and for all."""
        starts = torch.tensor([state.lengths[row] for row in rows], device=tokens.device)
        positions = starts[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        if self.config.injection == "kv":
            context = self.model.context(taps, positions)
        else:
            before = None if state.features is None else state.features[list(rows)][:, None]
            past = Context(self._gather(state, rows, int(starts.max())), before)
            context = self.model.context(taps, positions, self.target.embed(tokens), past)
        for layer, (keys, values) in enumerate(context.layers):
            for b, (row, count) in enumerate(zip(rows, counts, strict=True)):
                new = slice(b, b + 1), slice(None), slice(count)
                state.write(layer, [row], [state.lengths[row]], keys[new], values[new])
        if state.features is not None:
            last = context.before(torch.tensor(counts, device=tokens.device)[:, None])
            state.features[list(rows)] = cast("Tensor", last)[:, 0]
        state.extend(rows, counts)

    @torch.no_grad()
    def propose(
        self, state: ContextCache, rows: Sequence[int], anchors: Tensor, coupling: Coupling | None = None
    ) -> Proposal:
        """One block per row: anchors [B] -> tokens [B, K], K = `max_drafts`."""
        lengths = [state.lengths[row] for row in rows]
        before = None if state.features is None else state.features[list(rows)][:, None]
        if self.config.order == "autoregressive":
            return self._one_by_one(state, rows, anchors, lengths, before, coupling)
        config, device = self.config, anchors.device
        assert config.mask_token_id is not None, "a drafter of masks has one"
        ids = torch.full((len(rows), config.block_size), config.mask_token_id, device=device)
        ids[:, 0] = anchors
        starts = torch.tensor(lengths, device=device)[:, None]
        positions = starts[:, None] + torch.arange(config.block_size, device=device)
        if self._compiled is not None:
            tables = self.model.tables(positions, self.target.info.dtype)
            entered = self.model.enter(self.target.embed(ids), None)
            hidden = self.model.leave(run_layers(self._compiled, entered, state, rows, lengths, tables))
        else:
            context = Context(self._gather(state, rows, max(lengths)))
            hidden = self.model(self.target.embed(ids)[:, None], positions, context, starts, before)[:, 0]
        logits = self._head(hidden[:, -self.max_drafts :])
        tokens, sure = self._follow(logits, anchors, coupling)
        return Proposal(tokens if self.draft_ids is None else self.draft_ids[tokens], sure)

    def _one_by_one(
        self,
        state: ContextCache,
        rows: Sequence[int],
        tokens: Tensor,
        lengths: list[int],
        before: Tensor | None,
        coupling: Coupling | None,
    ) -> Proposal:
        """Each draft is the next row's input: anchors [B] -> tokens [B, K].

        Rows leave their keys and values behind the context, uncommitted, where the rows after them see them.
        """
        chosen, sure = [], []
        for k in range(self.max_drafts):
            at = torch.tensor(lengths, device=tokens.device)[:, None]
            x = self.model.enter(self.target.embed(tokens)[:, None, None], before)
            x, made = self.model.rows(x, at[..., None], self._gather(state, rows, max(lengths)), at)
            for layer, (keys, values) in enumerate(made):
                state.write(layer, rows, lengths, keys[:, 0].transpose(1, 2), values[:, 0].transpose(1, 2))
            logits = self._head(self.model.norm(x)[:, 0, 0])
            tokens = draw(logits, k, coupling, self.draft_ids)
            sure.append(probability(logits, tokens))
            tokens = tokens if self.draft_ids is None else self.draft_ids[tokens]
            chosen.append(tokens)
            lengths = [length + 1 for length in lengths]
        return Proposal(torch.stack(chosen, dim=1), torch.stack(sure, dim=1))

    def _gather(self, state: ContextCache, rows: Sequence[int], length: int) -> list[KeysValues]:
        return [state.gather(layer, rows, length) for layer in range(self.config.num_layers)]

    def _follow(self, logits: Tensor, anchors: Tensor, coupling: Coupling | None) -> tuple[Tensor, Tensor]:
        """Choose from left to right: logits [B, K, V'] -> head rows and confidence [B, K].

        With a Markov head each choice knows the one before.
        """
        previous, chosen, sure = self._head_row[anchors], [], []
        for k in range(logits.shape[1]):
            scores = logits[:, k]
            if self.model.markov_head is not None:
                scores = scores + self.model.markov_head(previous)
            previous = draw(scores, k, coupling, self.draft_ids)
            chosen.append(previous)
            sure.append(probability(scores, previous))
        return torch.stack(chosen, dim=1), torch.stack(sure, dim=1)
