"""Drafters that go token after token on their own output: what EAGLE-3 and MTP have in common.

Letters: B rows, S context tokens, A chains (blocks) per row, Q steps of a chain, T taps, D hidden width, G key/value
heads, E head width, V vocabulary.

A committed token is a row of its embedding and of features: what the target said at the token before it.  The first
token of a text has nothing before it and no row; nobody sees slot 0.  A chain's first row is the anchor, made the same
way.  Behind it the target has said nothing yet, so each later row, a token with its embedding, has the drafter's own
output of the row before in their place.  The chain's rows see the context and the earlier rows of their own chain.

`ChainModel.step` is one such row of every chain at once.  Training takes the answer's tokens and all chains of a batch
through Q steps (what EAGLE-3 calls training-time test), drafting takes its own drafts, one chain for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.drafters.base import Lender, Proposal
from blockdraft.drafters.block import ContextCache
from blockdraft.drafters.compiled import compile_layers, run_layers
from blockdraft.drafters.head import draw, probability, reduced_head
from blockdraft.drafters.layers import KeysValues, Tables
from blockdraft.drafters.network import Context, DraftNetwork, fitted
from blockdraft.ops.kernel_layer import KernelLayer
from blockdraft.ops.layers import RMSNorm
from blockdraft.ops.sampling import Coupling

# Embedding and features [B, D] of each chain's row k -> its output [B, D] before the final norm.
Step = Callable[[Tensor, Tensor, int], Tensor]


class ChainLayer(Protocol):
    """A layer of a chain: it reads what `ChainModel.enter` or the layer before gives, called as `BlockLayer`."""

    __call__: Any

    def keys_values(self, x: Tensor, tables: Tables) -> KeysValues:
        """What rows leave for others to see, whatever they see themselves: [..., G, E]."""
        ...


class ChainModel(DraftNetwork):
    """The steps of a chain; a family says what its features are, what a row reads, and through which layers."""

    norm: RMSNorm

    def fuse(self, taps: Tensor) -> Tensor:
        """What the target said at a token: taps [..., T, D] -> features [..., D]."""
        raise NotImplementedError

    def enter(self, embedding: Tensor, features: Tensor) -> Tensor:
        """What the first layer reads of a row: two of [..., D] -> [..., its width]."""
        raise NotImplementedError

    def stack(self) -> Sequence[ChainLayer]:
        """The layers, in order."""
        raise NotImplementedError

    def context(
        self, taps: Tensor | None, positions: Tensor, tokens: Tensor | None = None, past: Context | None = None
    ) -> Context:
        """Keys and values of committed tokens, and their features: taps [B, S, T, D] and embeddings [B, S, D].

        `past` None: they are the first ones of their texts.  Otherwise it is the context of those before them, with
        the features [B, 1, D] in front of the first; the last layer's part of it is not looked at, because what that
        layer would say at a committed token is not asked for.
        """
        assert taps is not None, "the caller sets the taps of its drafter"
        assert tokens is not None, "a drafter whose context is tokens is given them"
        said = self.fuse(taps)
        first = torch.zeros_like(said[:, :1]) if past is None else past.features
        features = torch.cat([cast("Tensor", first), said], dim=1)
        skip = 1 if past is None else 0
        x, at = self.enter(tokens[:, skip:], features[:, skip:-1])[:, None], positions[:, None, skip:]
        if past is None:
            seen, lengths = None, torch.zeros_like(positions[:, :1])
        else:
            seen, lengths = visible(past.layers, positions[:, :1])
        tables, made = self.tables(at, x.dtype), []
        layers = self.stack()
        for number, layer in enumerate(layers):
            if number == len(layers) - 1:
                keys, values = layer.keys_values(x, tables)
            else:
                x, (keys, values) = layer(x, tables, seen[number] if seen else self._nothing(x), lengths, at, True)
            made.append((_slots(keys, skip), _slots(values, skip)))
        return Context(made, features)

    def forward(
        self, block: Tensor, positions: Tensor, context: Context, context_lengths: Tensor, before: Tensor | None = None
    ) -> Tensor:
        """Chains of given tokens: embeddings [B, A, Q, D] of [anchor, token, ...] at positions [B, A, Q] -> hidden.

        The final norm is applied; row k, for the head, predicts the token after its own.
        """
        assert before is not None, "a chain begins with what the target said"
        seen, lengths = visible(context.layers, context_lengths)
        features, own, said = before, None, []
        for k in range(block.shape[2]):
            features, own = self.step(block[:, :, k], features, positions[:, :, k], seen, lengths, own)
            said.append(features)
        return self.norm(torch.stack(said, dim=2))

    def step(
        self,
        embedding: Tensor,
        features: Tensor,
        at: Tensor,
        seen: list[KeysValues],
        lengths: Tensor,
        own: list[KeysValues] | None,
    ) -> tuple[Tensor, list[KeysValues]]:
        """One row of each chain: embedding and features [B, A, D] at positions [B, A], over what is `visible`.

        `own` are the keys and values [B, A, k, G, E] of the chain's earlier rows, None for the anchor's.  Returns
        the output before the final norm, which is the next row's features, and `own` with this row.
        """
        x, at, made = self.enter(embedding, features)[:, :, None], at[..., None], []
        tables = self.tables(at, x.dtype)
        for number, layer in enumerate(self.stack()):
            x, rows = layer(x, tables, seen[number], lengths, at, False, None if own is None else own[number])
            made.append(rows)
        return x[:, :, 0], made

    def _nothing(self, x: Tensor) -> KeysValues:
        nothing = x.new_zeros(len(x), self.config.num_kv_heads, 0, self.config.head_dim)
        return nothing, nothing


def visible(layers: Sequence[KeysValues], lengths: Tensor) -> tuple[list[KeysValues], Tensor]:
    """A context without slot 0, which no row stands in: keys and values [B, G, S - 1, E], lengths less by one."""
    return [(keys[:, :, 1:], values[:, :, 1:]) for keys, values in layers], (lengths - 1).clamp(min=0)


def _slots(rows: Tensor, skip: int) -> Tensor:
    """[B, 1, S - skip, G, E] of rows -> [B, G, S, E] of slots, the first `skip` of them empty."""
    return F.pad(rows[:, 0].transpose(1, 2), (0, 0, skip, 0))


class ChainDrafter:
    """A `ChainModel` as the engine's drafter: arg-max drafts, one after the other, on a context cache.

    A chain leaves nothing in the cache: its rows are forgotten with the proposal, and when its tokens are committed
    they are written with what the target said.  Otherwise as `BlockDrafter`.
    """

    def __init__(
        self,
        model: ChainModel,
        target: Lender,
        draft_ids: Tensor | None = None,
        name: str = "chain",
        block_size: int | None = None,
    ) -> None:
        config = fitted(model.config, target.info, block_size)
        self.model, self.config, self.target, self.draft_ids, self.name = model, config, target, draft_ids, name
        self.tap_ids, self.block_size, self.max_drafts = config.tap_ids, config.block_size, config.max_drafts
        borrowed = target.head if draft_ids is None else reduced_head(target.head_rows(draft_ids))
        self._head = borrowed if model.lm_head is None else model.lm_head
        # A chain's rows are passes of one row each, and nobody sees slot 0.
        self._compiled = compile_layers(cast("Sequence[nn.Module]", model.stack()), config, blind=1, alone=True)

    def new_state(self, slots: int, capacity: int) -> ContextCache:
        """The context cache; what is committed in it is what was observed."""
        config, info = self.config, self.target.info
        capacity += config.block_size  # a chain's rows may stand behind the context while it is drafted
        shape = config.num_layers, slots, capacity, config.num_kv_heads, config.head_dim
        state = ContextCache(*shape, info.dtype, info.device)
        state.features = torch.zeros(slots, config.hidden_size, dtype=info.dtype, device=info.device)
        return state

    def reset(self, state: ContextCache, row: int) -> None:
        state.truncate([row], [0])
        cast("Tensor", state.features)[row] = 0

    @torch.no_grad()
    def observe(
        self, state: ContextCache, rows: Sequence[int], tokens: Tensor, taps: Tensor | None, counts: Sequence[int]
    ) -> None:
        """Write the keys and values of tokens just committed, once and for all."""
        assert taps is not None, "the engine sets the taps"
        assert state.features is not None, "a new state has them"
        begins, latest = [state.lengths[row] == 0 for row in rows], state.features[list(rows)]
        for first in (True, False):  # beginnings of texts, whose first token has no row, go apart from the rest
            part = [b for b in range(len(rows)) if begins[b] == first]
            if part:
                some, few = [rows[b] for b in part], [counts[b] for b in part]
                past = None if first else Context(self._gather(state, some, all_layers=False), latest[part][:, None])
                latest[part] = self._write(state, some, tokens[part], taps[part], few, past)
        state.features[list(rows)] = latest  # all rows or none: an interrupted round is done again
        state.extend(rows, counts)

    def _write(
        self,
        state: ContextCache,
        rows: list[int],
        tokens: Tensor,
        taps: Tensor,
        counts: list[int],
        past: Context | None,
    ) -> Tensor:
        """Write the slots behind those that are committed; returns the features after each row's last token [B, D]."""
        starts = torch.tensor([state.lengths[row] for row in rows], device=tokens.device)
        positions = starts[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        context = self.model.context(taps, positions, self.target.embed(tokens), past)
        for layer, (keys, values) in enumerate(context.layers):
            for b, (row, count) in enumerate(zip(rows, counts, strict=True)):
                new = slice(b, b + 1), slice(None), slice(count)
                state.write(layer, [row], [state.lengths[row]], keys[new], values[new])
        return cast("Tensor", context.before(torch.tensor(counts, device=tokens.device)[:, None]))[:, 0]

    @torch.no_grad()
    def propose(
        self, state: ContextCache, rows: Sequence[int], anchors: Tensor, coupling: Coupling | None = None
    ) -> Proposal:
        """A chain per row: anchors [B] -> tokens [B, K], K = `max_drafts`."""
        assert state.features is not None, "a new state has them"
        step = self._steps(state, rows, anchors.device) if self._compiled is None else self._compiled_steps(state, rows)
        features, tokens = state.features[list(rows)], anchors
        chosen, sure = [], []
        for k in range(self.max_drafts):
            features = step(self.target.embed(tokens), features, k)
            logits = self._head(self.model.norm(features))
            tokens = draw(logits, k, coupling, self.draft_ids)
            sure.append(probability(logits, tokens))
            tokens = tokens if self.draft_ids is None else self.draft_ids[tokens]
            chosen.append(tokens)
        return Proposal(torch.stack(chosen, dim=1), torch.stack(sure, dim=1))

    def _steps(self, state: ContextCache, rows: Sequence[int], device: torch.device) -> Step:
        starts = torch.tensor([state.lengths[row] for row in rows], device=device)[:, None]
        seen, lengths = visible(self._gather(state, rows), starts)
        own: list[KeysValues] | None = None

        def step(embedding: Tensor, features: Tensor, k: int) -> Tensor:
            nonlocal own
            said, own = self.model.step(embedding[:, None], features[:, None], starts + k, seen, lengths, own)
            return said[:, 0]

        return step

    def _compiled_steps(self, state: ContextCache, rows: Sequence[int]) -> Step:
        """The same, with a chain's earlier rows in the cache, behind what is committed."""
        starts, layers = [state.lengths[row] for row in rows], cast("list[KernelLayer]", self._compiled)
        positions = torch.tensor(starts)[:, None] + torch.arange(self.max_drafts)
        cosines, sines = self.model.tables(positions, self.target.info.dtype)

        def step(embedding: Tensor, features: Tensor, k: int) -> Tensor:
            at, tables = [start + k for start in starts], (cosines[:, k : k + 1], sines[:, k : k + 1])
            return run_layers(layers, self.model.enter(embedding, features)[:, None], state, rows, at, tables)[:, 0]

        return step

    def _gather(self, state: ContextCache, rows: Sequence[int], all_layers: bool = True) -> list[KeysValues]:
        """Committed keys and values of every layer, or of all but the last."""
        longest = max(state.lengths[row] for row in rows)
        return [state.gather(layer, rows, longest) for layer in range(self.config.num_layers - (not all_layers))]
