"""The whitened start of the fusion: what is common to all tokens, and the size of a tap, no longer drown the rest."""

import torch
from test_block_drafter import drafter_config, random_model

from blockdraft.train.data import make_sample
from blockdraft.train.features import FeatureBatch
from blockdraft.train.setup import whiten_fusion


class RandomFeatures:
    """Taps with a large common part, a few large channels, and a second tap a hundred times the first."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        signal = torch.randn(200, 2, 32, generator=generator)
        common = 20 * torch.randn(2, 32, generator=generator)
        size = torch.ones(2, 32)
        size[:, 3] = 30.0
        self.taps = (signal * size + common) * torch.tensor([1.0, 100.0])[:, None]

    def batch(self, samples):
        return FeatureBatch(self.taps[None, : len(samples[0]) - 1], None)


def test_every_tap_and_channel_enters_with_its_own_variance():
    features = RandomFeatures()
    sample = make_sample("a", [1] * 201, [False] * 20 + [True] * 181)
    model = random_model(drafter_config())
    answers = features.taps[20:].flatten(1)

    def shares(weight):
        """Of the fused vectors' size, how much differs between tokens; and how much of that is the smaller tap's."""
        fused = answers @ weight.T
        varies = fused.var(dim=0).sum() / fused.pow(2).mean(dim=0).sum()
        small = (answers[:, :32] @ weight[:, :32].T).var(dim=0).sum()
        return float(varies), float(small / fused.var(dim=0).sum())

    varies, small = shares(model.fc.weight.detach())
    assert varies < 0.5 and small < 0.01  # a control: a plain random mix drowns it
    whiten_fusion(model, features, [sample], seed=0)
    varies, small = shares(model.fc.weight.detach())
    assert varies > 0.95 and 0.4 < small < 0.6
