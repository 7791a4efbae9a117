"""The block-diffusion drafter (DFlash, arXiv 2602.06036, section 4): one pass fills a block of mask tokens.

Letters: B rows, S context tokens, A blocks per row, Q block rows, T taps, D hidden width, H/G query/key-value
heads, E head width, V vocabulary.

The target's taps become one context vector per committed token, which is injected into the keys and values of
every draft layer.  Training runs many blocks over one sequence, drafting runs one block over the cache; both
call the same two methods, `BlockModel.context` and `BlockModel.forward`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from blockdraft.cache import KVCache
from blockdraft.config import DrafterConfig
from blockdraft.drafters.base import Lender, Proposal
from blockdraft.ops.attention import block_attention
from blockdraft.ops.layers import PackedLinear, RMSNorm, SwiGLU, rotary_frequencies, rotary_tables, rotate

Context = list[tuple[Tensor, Tensor]]
Tables = tuple[Tensor, Tensor]


class BlockSelfAttention(nn.Module):
    """Queries from the block; keys and values from the context and the block, through the same projections."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        bias, width = config.attention_bias, config.hidden_size
        self.head_dim = config.head_dim
        self.window, self.causal = config.window(layer), config.causal(layer)
        self.q_proj = nn.Linear(width, config.num_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, width, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def keys_values(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """x [..., D] -> normed and rotated keys, and values: [..., G, E]."""
        keys = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        return rotate(keys, tables), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def forward(self, x: Tensor, tables: Tables, context: tuple[Tensor, Tensor], lengths: Tensor, at: Tensor) -> Tensor:
        """x [B, A, Q, D] over context keys and values [B, G, S, E] -> [B, A, Q, D]."""
        query = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), tables)
        keys, values = self.keys_values(x, tables)
        mixed = block_attention(query, keys, values, context, lengths, at, self.window, self.causal)
        return self.o_proj(mixed.flatten(-2))


class BlockLayer(nn.Module):
    """A pre-norm layer; its input norm is for the block alone, the context has a norm of its own."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockSelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, tables: Tables, context: tuple[Tensor, Tensor], lengths: Tensor, at: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), tables, context, lengths, at)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """What a drafted token says about the next one: a bias of low rank on its logits (DSpark, arXiv 2607.05147).

    The rows of a block are filled at once, so none knows what another one chose; this lets each choice follow from
    the one before.  Tokens are rows of the draft head; one that it does not have (-1) says nothing.
    """

    def __init__(self, tokens: int, rank: int) -> None:
        super().__init__()
        self.w1 = nn.Embedding(tokens, rank)
        self.w2 = nn.Linear(rank, tokens, bias=False)

    def embed(self, previous: Tensor) -> Tensor:
        """Rows of the draft head [...] -> [..., rank]."""
        return self.w1(previous.clamp(min=0)) * (previous >= 0)[..., None]

    def forward(self, previous: Tensor) -> Tensor:
        """The bias on the next token's logits: [...] -> [..., V']."""
        return self.w2(self.embed(previous))


class BlockModel(nn.Module):
    """The drafter's own weights, under the published tensor names; embedding and head are the target's."""

    inverse_frequencies: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.tap_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = MarkovHead(config.num_head_rows, config.markov_rank) if config.markov_rank else None
        inverse, self.rotary_factor = rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self.register_buffer("inverse_frequencies", inverse, persistent=False)

    def context(self, taps: Tensor, positions: Tensor) -> Context:
        """Context keys and values of every layer: taps [B, S, T, D] at positions [B, S] -> per layer [B, G, S, E]."""
        fused = self.hidden_norm(self.fc(taps.flatten(-2)))
        tables = self._tables(positions, fused.dtype)
        layers = cast("Iterable[BlockLayer]", self.layers)
        made = (layer.self_attn.keys_values(fused, tables) for layer in layers)
        return [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in made]

    def forward(self, block: Tensor, positions: Tensor, context: Context, context_lengths: Tensor) -> Tensor:
        """Fill blocks: embeddings [B, A, Q, D] of [anchor, mask, ...] at positions [B, A, Q] -> hidden [B, A, Q, D].

        Every row of block a sees the first context_lengths[b, a] context slots and its own block.  The final
        norm is applied; the target's head turns the result into logits.
        """
        tables = self._tables(positions, block.dtype)
        x = block
        for layer, layer_context in zip(self.layers, context, strict=True):
            x = layer(x, tables, layer_context, context_lengths, positions)
        return self.norm(x)

    def _tables(self, positions: Tensor, dtype: torch.dtype) -> Tables:
        return rotary_tables(positions, self.inverse_frequencies, self.rotary_factor, dtype)


def initialise(model: BlockModel, seed: int, std: float = 0.02) -> None:
    """Random weights: normal matrices, norms of one, biases of zero, and a Markov head that says nothing yet."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        with torch.no_grad():
            if parameter.dim() > 1:
                parameter.normal_(0.0, std, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    if model.markov_head is not None:
        nn.init.zeros_(model.markov_head.w2.weight)


class BlockDrafter:
    """A `BlockModel` as the engine's drafter: context cache, embedding and head of the target, arg-max drafts.

    draft_ids [V'] are the target ids that a reduced draft head can say; None: the target's whole head.
    The model's linear layers are used as they are: pack them first where that pays.
    """

    def __init__(
        self, model: BlockModel, target: Lender, draft_ids: Tensor | None = None, name: str = "dflash"
    ) -> None:
        config, info = model.config, target.info
        if config.hidden_size != info.hidden_size or config.vocab_size != info.vocab_size:
            raise ValueError(
                f"the drafter is for a target of width {config.hidden_size} and vocabulary {config.vocab_size}; "
                f"'{info.name}' has {info.hidden_size} and {info.vocab_size}"
            )
        if config.num_target_layers != info.num_layers:
            raise ValueError(
                f"the drafter is for {config.num_target_layers} target layers; '{info.name}' has {info.num_layers}"
            )
        self.model, self.target, self.draft_ids, self.name = model, target, draft_ids, name
        self.tap_ids, self.block_size, self.max_drafts = config.tap_ids, config.block_size, config.max_drafts
        self._head = target.head if draft_ids is None else _reduced_head(target.head_rows(draft_ids))
        self._head_row = draft_index(draft_ids, info.vocab_size, info.device)

    def new_state(self, slots: int, capacity: int) -> KVCache:
        """The context cache; what is committed in it is what was observed."""
        config, info = self.model.config, self.target.info
        return KVCache(
            config.num_layers, slots, capacity, config.num_kv_heads, config.head_dim, info.dtype, info.device
        )

    def reset(self, state: KVCache, row: int) -> None:
        state.truncate([row], [0])

    @torch.no_grad()
    def observe(
        self,
        state: KVCache,
        rows: Sequence[int],
        tokens: Tensor,  # noqa: ARG002  # this kind of drafter learns of tokens by their taps
        taps: Tensor | None,
        counts: Sequence[int],
    ) -> None:
        """Write the context keys and values of tokens just committed, once and for all."""
        assert taps is not None, "the engine sets the taps of its drafter"
        starts = torch.tensor([state.lengths[row] for row in rows], device=taps.device)
        positions = starts[:, None] + torch.arange(taps.shape[1], device=taps.device)
        for layer, (keys, values) in enumerate(self.model.context(taps, positions)):
            for b, (row, count) in enumerate(zip(rows, counts, strict=True)):
                new = slice(b, b + 1), slice(None), slice(count)
                state.write(layer, [row], [state.lengths[row]], keys[new], values[new])
        state.extend(rows, counts)

    @torch.no_grad()
    def propose(self, state: KVCache, rows: Sequence[int], anchors: Tensor) -> Proposal:
        """One block per row: anchors [B] -> tokens [B, K], K = `max_drafts`."""
        config, device = self.model.config, anchors.device
        ids = torch.full((len(rows), config.block_size), config.mask_token_id, device=device)
        ids[:, 0] = anchors
        lengths = [state.lengths[row] for row in rows]
        starts = torch.tensor(lengths, device=device)[:, None]
        positions = starts[:, None] + torch.arange(config.block_size, device=device)
        context = [state.gather(layer, rows, max(lengths)) for layer in range(config.num_layers)]
        hidden = self.model(self.target.embed(ids)[:, None], positions, context, starts)[:, 0]
        logits = self._head(hidden[:, -self.max_drafts :])
        tokens = logits.argmax(dim=-1) if self.model.markov_head is None else self._follow(logits, anchors)
        return Proposal(tokens if self.draft_ids is None else self.draft_ids[tokens])

    def _follow(self, logits: Tensor, anchors: Tensor) -> Tensor:
        """Choose from left to right, each token knowing the one before: logits [B, K, V'] -> rows [B, K]."""
        assert self.model.markov_head is not None, "the caller looks"
        previous, chosen = self._head_row[anchors], []
        for k in range(logits.shape[1]):
            previous = (logits[:, k] + self.model.markov_head(previous)).argmax(dim=-1)
            chosen.append(previous)
        return torch.stack(chosen, dim=1)


def draft_index(draft_ids: Tensor | None, vocab_size: int, device: torch.device) -> Tensor:
    """Target id -> row of the draft head, -1 where a reduced head has none: [V]."""
    if draft_ids is None:
        return torch.arange(vocab_size, device=device)
    index = torch.full((vocab_size,), -1, dtype=torch.long, device=device)
    index[draft_ids] = torch.arange(len(draft_ids), device=device)
    return index


def _reduced_head(weight: Tensor) -> nn.Module:
    """The head's kept rows [V', D] as a linear layer of their own, packed where that pays."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return PackedLinear(weight)
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return head
