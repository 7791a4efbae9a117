"""What a round costs: the time of one proposal, and of the target's passes over one token and over a block.

Letters: S prompt tokens, T taps, D hidden width.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

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
    return median_seconds(lambda: drafter.propose(state, [0], tokens[:, -1]), repeats, device)


@torch.inference_mode()
def pass_seconds(target: Target, ids: Sequence[int], width: int, taps: Sequence[int] = (), repeats: int = 20) -> float:
    """Median seconds of the target's pass over `width` tokens of one row that has read S tokens, S >= `width`."""
    tokens = torch.tensor([list(ids)], device=target.info.device)
    target.set_taps(taps)
    cache = target.new_cache(1, len(ids) + width)
    target.forward(tokens, cache, [0], keep_logits=1)

    def once() -> None:
        cache.truncate([0], [len(ids)])
        target.forward(tokens[:, :width], cache, [0])

    return median_seconds(once, repeats, target.info.device)


def median_seconds(
    run: Callable[[], object], repeats: int, device: torch.device, before: Callable[[], object] | None = None
) -> float:
    """Median seconds of so many runs, after a few that do not count; `before` comes before each, untimed."""
    seconds = []
    for _ in range(WARM_UP + repeats):
        if before is not None:
            before()
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[WARM_UP:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
