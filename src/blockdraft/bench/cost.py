"""What a draft costs: the time of one proposal.

Letters: S prompt tokens, T taps, D hidden width.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from blockdraft.drafters.base import Drafter
from blockdraft.targets.base import Target

WARM_UP = 3


@torch.inference_mode()
def propose_seconds(target: Target, drafter: Drafter, ids: Sequence[int], repeats: int = 20) -> float:
    """Median seconds of one `propose` for one row after a prompt of S >= 2 tokens, whose last one is the anchor."""
    device = target.info.device
    tokens = torch.tensor([list(ids)], device=device)
    target.set_taps(drafter.tap_ids)
    read = target.forward(tokens[:, :-1], target.new_cache(1, len(ids)), [0], keep_logits=1)
    state = drafter.new_state(1, len(ids) + drafter.block_size + 1)
    drafter.observe(state, [0], tokens[:, :-1], read.taps, [len(ids) - 1])
    seconds = []
    for _ in range(WARM_UP + repeats):
        _wait(device)
        began = time.perf_counter()
        drafter.propose(state, [0], tokens[:, -1])
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[WARM_UP:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
