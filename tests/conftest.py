"""What every test gets: one thread, a fixed seed, and a slow mark that can be left out."""

from __future__ import annotations

import os

# Before torch is imported: several test processes may share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests never reach for the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from blockdraft.engine.costs import VerifyCosts

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def costs_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test measures a machine without saying so, nor leaves what it measured in somebody's cache folder."""
    costs = VerifyCosts((1, 4), (1, 8), 64, ((1.0, 1.7), (1.5, 4.0)), ((0.0, 0.0), (0.0, 0.0)), (0.2, 0.4))
    monkeypatch.setattr("blockdraft.engine.engine.known_costs", lambda *_: costs)
