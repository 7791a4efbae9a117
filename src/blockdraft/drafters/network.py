"""What training and drafting have in common for the networks of all families.

Letters: B rows, S context tokens, A blocks per row, Q block rows, T taps, D hidden width, G key/value heads, E head
width, V' rows of a draft head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blockdraft.config import ConfigError, DrafterConfig
from blockdraft.drafters.base import TargetFacts
from blockdraft.drafters.layers import KeysValues, Tables
from blockdraft.drafters.markov import MarkovHead
from blockdraft.ops.layers import rotary_frequencies, rotary_tables


@dataclass(frozen=True)
class Context:
    """What blocks see of the committed tokens: keys and values [B, G, S, E] of every layer.

    Where features enter with the tokens also features [B, S + 1, D]: row p is what the target said before the token
    at p.
    """

    layers: list[KeysValues]
    features: Tensor | None = None

    def before(self, anchors: Tensor) -> Tensor | None:
        """The features in front of anchors at [B, A]: [B, A, D]; None where features do not enter that way."""
        if self.features is None:
            return None
        return self.features.gather(1, anchors[..., None].expand(-1, -1, self.features.shape[-1]))


class DraftNetwork(nn.Module):
    """A drafter's own weights; both training and drafting go through `context` and what `forward` is made of.

    `lm_head` is a draft head of its own [V', D]; None: the target's is borrowed.
    """

    inverse_frequencies: Tensor
    lm_head: nn.Linear | None
    markov_head: MarkovHead | None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.lm_head = self.markov_head = None
        inverse, self.rotary_factor = rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self.register_buffer("inverse_frequencies", inverse, persistent=False)

    def context(
        self, taps: Tensor | None, positions: Tensor, tokens: Tensor | None = None, past: Context | None = None
    ) -> Context:
        """The context of committed tokens: taps [B, S, T, D], embeddings [B, S, D], at positions [B, S].

        A network that `reads_tokens` is given the embeddings, and the context of the tokens before them.
        """
        raise NotImplementedError

    def forward(
        self, block: Tensor, positions: Tensor, context: Context, context_lengths: Tensor, before: Tensor | None = None
    ) -> Tensor:
        """Rows of blocks: embeddings [B, A, Q, D] at positions [B, A, Q] -> hidden [B, A, Q, D] for the head.

        Every row of block a sees the first context_lengths[b, a] context slots and its own block; `before` [B, A, D]
        are the features in front of the anchors (see `Context.before`).
        """
        raise NotImplementedError

    def tables(self, positions: Tensor, dtype: torch.dtype) -> Tables:
        """Rotary cosines and sines [..., 1, E] of positions [...]."""
        return rotary_tables(positions, self.inverse_frequencies, self.rotary_factor, dtype)


def fitted(config: DrafterConfig, info: TargetFacts, block_size: int | None) -> DrafterConfig:
    """The drafter's settings with the block size that is asked for, if it fits the target.

    ConfigError, ValueError: the block size is not one it can draft; it is for another target.
    """
    if block_size is not None:
        if not 2 <= block_size <= config.block_size:
            raise ConfigError(f"block_size={block_size}: the drafter has blocks of 2 to {config.block_size}")
        config = config.model_copy(update={"block_size": block_size})
    if config.hidden_size != info.hidden_size or config.vocab_size != info.vocab_size:
        raise ValueError(
            f"the drafter is for a target of width {config.hidden_size} and vocabulary {config.vocab_size}; "
            f"'{info.name}' has {info.hidden_size} and {info.vocab_size}"
        )
    if config.num_target_layers != info.num_layers:
        raise ValueError(
            f"the drafter is for {config.num_target_layers} target layers; '{info.name}' has {info.num_layers}"
        )
    return config
