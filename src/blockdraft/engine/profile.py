"""Measures what passes and drafts cost on this machine, once, and remembers it.

Letters: B rows, S tokens of context.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from blockdraft.cache import KVCache
from blockdraft.drafters.base import Drafter
from blockdraft.engine.costs import VerifyCosts, interpolate, load_costs, monotone, save_costs
from blockdraft.ops.kernel import describe_kernel
from blockdraft.ops.native.build import digest
from blockdraft.targets.base import Target

TOKENS = (1, 2, 3, 4, 6, 8, 12, 16)  # of a row in one pass
CONTEXTS = (64, 512)  # tokens before them
CONTEXT_TOKENS = 4096  # of all rows together, where the longer context is shortened
BUDGET = 1.0  # seconds for each number of rows, after the passes that are needed at least
PROMPT = 64  # tokens that the drafter sees before it is timed
TRIES = 4  # of proposals
VERSION = 3


def known_costs(target: Target, drafter: Drafter, slots: int) -> VerifyCosts:
    """Costs for 1 to `slots` rows: as remembered, or measured now and remembered."""
    from blockdraft.targets.resolve import cache_folder

    rows = tuple(sorted({1, slots}))
    about = describe(target, drafter, rows)
    try:
        path = cost_file(cache_folder(), about)
    except RuntimeError:  # a user without a home
        return measure_costs(target, drafter, rows)
    costs = load_costs(path, about)
    if costs is None:
        costs = measure_costs(target, drafter, rows)
        save_costs(path, costs, about)
    return costs


def cost_file(folder: Path, about: dict[str, Any]) -> Path:
    """Where costs about that are kept: a file of their own, so that nobody has to rewrite those of others."""
    return folder / "costs" / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:20]}.json"


def describe(target: Target, drafter: Drafter, rows: Sequence[int]) -> dict[str, Any]:
    """Everything that costs depend on, as far as it is known here."""
    info = target.info
    device = torch.cuda.get_device_name(info.device) if info.device.type == "cuda" else str(info.device)
    shape = info.num_layers, info.hidden_size, info.vocab_size
    return {
        "version": VERSION,
        "machine": [platform.node(), platform.machine(), device, torch.get_num_threads(), torch.__version__],
        "target": [info.name, type(target).__name__, *shape, str(info.dtype), str(info.storage)],
        "kernel": [describe_kernel(), digest()],
        "drafter": [drafter.name, drafter.block_size, drafter.max_drafts, list(drafter.tap_ids)],
        "rows": list(rows),
    }


@torch.inference_mode()
def measure_costs(
    target: Target,
    drafter: Drafter,
    rows: Sequence[int],
    clock: Callable[[], float] = time.perf_counter,
    budget: float = BUDGET,
) -> VerifyCosts:
    """Time passes of the target and proposals of the drafter, for each of so many rows.

    One token and the most that can be verified are always timed; then the numbers between and a longer context,
    and then all of them again, as far as the budget (seconds, for each number of rows) goes.  The shortest time
    counts: nothing makes a pass quicker than it is.
    """
    target.set_taps(drafter.tap_ids)
    most = drafter.max_drafts + 1
    tokens = tuple(sorted({*(size for size in TOKENS if size < most), most}))
    seconds: list[tuple[float, ...]] = []
    slopes: list[tuple[float, float]] = []
    drafting: list[float] = []
    reading: list[float] = []
    short, _ = _contexts(target, drafter, 1)
    for count in rows:
        _, long = _contexts(target, drafter, count)
        bench = _Passes(target, count, long + most, clock)
        if not bench.cache.is_positional:  # a context has to be read, and reading a long one takes long
            long = short
        draft, read = _draft_seconds(target, drafter, count, clock, budget)
        drafting.append(draft)
        reading.append(read)
        ends = sorted({1, most})
        cells = [(size, short) for size in (*ends, *(size for size in tokens if size not in ends))]
        cells += [(size, long) for size in ends if long > short]
        best = bench.best(cells, len(ends), budget)
        timed = [size for size in tokens if (size, short) in best]
        rising = monotone([best[size, short] for size in timed])
        filled = [interpolate(size, timed, rising) for size in tokens]
        fewer = seconds[-1] if seconds else filled  # more rows do not cost less either
        seconds.append(tuple(max(pair) for pair in zip(filled, fewer, strict=True)))
        longer = [best.get((size, long), best[size, short]) - best[size, short] for size in (1, most)]
        few, many = (max(more, 0.0) / max(long - short, 1) for more in longer)
        slopes.append((few, max(few, many)))
    return VerifyCosts(tuple(rows), tokens, short, tuple(seconds), tuple(slopes), tuple(drafting), min(reading))


class _Passes:
    """Passes of a target over random tokens; what it says does not matter.

    The context is made up where slots are all that a row is, and else read.
    """

    def __init__(self, target: Target, rows: int, capacity: int, clock: Callable[[], float]) -> None:
        self.target, self.clock, self.slots = target, clock, list(range(rows))
        self.cache: KVCache = target.new_cache(rows, capacity)
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor.fill_(0.01)  # memory that was never written to is read faster than it will be

    def best(self, cells: Sequence[tuple[int, int]], needed: int, budget: float) -> dict[tuple[int, int], float]:
        """The shortest seconds of each cell (tokens, context), the first `needed` and what the budget allows."""
        best: dict[tuple[int, int], float] = {}
        began = self.clock()
        for again in range(3):
            for number, cell in enumerate(cells):
                if (again > 0 or number >= needed) and self.clock() - began > budget:
                    return best
                tried = self.seconds(*cell)
                if self.clock() - began < budget:  # the first pass of a shape takes longer
                    tried = min(tried, self.seconds(*cell))
                best[cell] = min(tried, best.get(cell, tried))
        return best

    def seconds(self, tokens: int, context: int) -> float:
        """One pass over `tokens` of each row behind `context` tokens."""
        self._stand_behind(context)
        ids = _random_ids(self.target, len(self.slots), tokens)
        _wait(self.target)
        began = self.clock()
        self.target.forward(ids, self.cache, self.slots).logits.argmax(dim=-1)
        _wait(self.target)
        return self.clock() - began

    def _stand_behind(self, context: int) -> None:
        count = len(self.slots)
        if self.cache.is_positional:
            self.cache.truncate(self.slots, [0] * count)
            self.cache.extend(self.slots, [context] * count)
        elif self.cache.lengths[0] >= context:
            self.cache.truncate(self.slots, [context] * count)
        else:
            self.target.forward(_random_ids(self.target, count, context), self.cache, self.slots, keep_logits=1)


def _draft_seconds(
    target: Target, drafter: Drafter, rows: int, clock: Callable[[], float], budget: float
) -> tuple[float, float]:
    """A proposal for so many rows and the observing of two tokens each; and each token when many are observed.

    Of texts in which nothing repeats itself.  A pass of the target comes before each proposal, as in a round: it
    leaves nothing of the drafter in the processor's caches.
    """
    slots, prompt = list(range(rows)), max(2, min(PROMPT, target.info.max_context - TRIES))
    ids, cache = _random_ids(target, rows, prompt + 1), target.new_cache(rows, prompt + TRIES)
    taps = target.forward(ids[:, :prompt], cache, slots, keep_logits=1).taps
    state = drafter.new_state(rows, prompt + 2 * TRIES + drafter.block_size)
    _wait(target)
    began = clock()
    drafter.observe(state, slots, ids[:, :prompt], taps, [prompt] * rows)
    _wait(target)
    reading = (clock() - began) / (rows * prompt)
    taps = None if taps is None else taps[:, :2]
    found: list[float] = []
    while len(found) < 2 or (len(found) < TRIES and sum(found) < budget):
        target.forward(ids[:, :1], cache, slots)
        _wait(target)
        began = clock()
        drafter.propose(state, slots, ids[:, prompt]).tokens.tolist()
        drafter.observe(state, slots, ids[:, :2], taps, [2] * rows)
        _wait(target)
        found.append(clock() - began)
    return min(found), reading


def _contexts(target: Target, drafter: Drafter, rows: int) -> tuple[int, int]:
    """A short context and a longer one, both of which leave room for a pass."""
    room = max(1, target.info.max_context - drafter.max_drafts - 1)
    short = min(CONTEXTS[0], room)
    return short, max(short, min(CONTEXTS[1], room, CONTEXT_TOKENS // rows))


def _random_ids(target: Target, rows: int, tokens: int) -> torch.Tensor:
    ids = torch.randint(target.info.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(tokens))
    return ids.to(target.info.device)


def _wait(target: Target) -> None:
    if target.info.device.type == "cuda":
        torch.cuda.synchronize(target.info.device)
