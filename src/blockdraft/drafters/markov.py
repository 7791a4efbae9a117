"""A Markov head: what a drafted token says about the one after it (DSpark, arXiv 2607.05147).

Letters: V' rows of the draft head.
"""

from __future__ import annotations

from torch import Tensor, nn


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
