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

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)
