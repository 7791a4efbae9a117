"""Passes of a fixed shape, recorded once and replayed: on a GPU, launching a small pass takes longer than the pass.

A recording holds addresses, not values.  What changes from pass to pass, the ids and where each row begins, is copied
to where the recording reads it; what was a Python number when it was made stays what it was, so all of those are part
of a recording's key.
Letters: B rows, Q tokens per row in one call, G key/value heads, E head width, S slots read back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blockdraft.cache import KVCache
from blockdraft.targets.attention import attend_batched, causal_mask

SEEN = 2  # passes of a shape that go unrecorded: making a recording takes as long as a dozen of them
KEPT = 64  # recordings of one cache
MULTIPLE = 256  # slots are read in whole multiples, so that one recording serves so many tokens
LONGEST = 32  # tokens of a row; a longer pass keeps a device busy by itself

# ids [B, Q], starts [B] and rows [B] -> tensors; reads nothing else that changes.
Pass = Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]]


class Recorder(Protocol):
    """Runs a pass on inputs that stay where they are; returns how to run it again, and where its results then lie."""

    def __call__(self, run: Pass, *inputs: Tensor) -> tuple[Callable[[], object], Sequence[Tensor]]: ...


class FixedStep:
    """One forward pass of which the host knows the shapes: starts [B] and rows [B] are tensors.

    `slots` are read of each row, at least as many as the pass leaves it with.  `picked` picks the same rows of a
    memory, as `attend_batched` wants them.
    """

    def __init__(
        self,
        cache: KVCache,
        starts: Tensor,
        rows: Tensor,
        picked: slice | Tensor,
        width: int,
        slots: int,
        dtype: torch.dtype,
    ) -> None:
        self.cache, self.rows, self.picked, self.slots, self.dtype = cache, rows, picked, slots, dtype
        self.at = starts[:, None] + torch.arange(width, device=starts.device)
        self.masks: dict[int | None, Tensor] = {}

    def positions(self) -> Tensor:
        """Absolute positions [B, Q]."""
        return self.at

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [B, G, Q, E] of a layer at the positions."""
        for memory, new in ((self.cache.keys[layer], keys), (self.cache.values[layer], values)):
            memory.transpose(1, 2).index_put_((self.rows[:, None], self.at), new.transpose(1, 2))

    def attend(self, layer: int, query: Tensor, scaling: float, window: int | None) -> Tensor:
        """Attention of query [B, H, Q, E] over the rows' slots of a layer: [B, Q, H, E]."""
        if window not in self.masks:
            self.masks[window] = causal_mask(self.at, self.slots, window, self.dtype)[:, None]
        memory = self.cache.keys[layer], self.cache.values[layer]
        return attend_batched(query, *memory, self.picked, self.slots, self.masks[window], scaling)


@dataclass
class Recording:
    """Where a recorded pass reads and writes, and how to run it again."""

    inputs: Sequence[Tensor]
    replay: Callable[[], object]
    results: Sequence[Tensor]


class Graphs:
    """The recordings of passes over one cache; those that were not used for longest go first."""

    def __init__(self, record: Recorder) -> None:
        self.record = record
        self.seen: dict[Hashable, int] = {}
        self.made: OrderedDict[Hashable, Recording] = OrderedDict()

    def run(self, key: Hashable, run: Pass, *inputs: Tensor) -> Sequence[Tensor]:
        """What `run(*inputs)` returns; `key` says all that it depends on beside its arguments."""
        recording = self.made.get(key)
        if recording is None:
            self.seen[key] = self.seen.get(key, 0) + 1
            if self.seen[key] <= SEEN:
                return run(*inputs)
            with torch.inference_mode(False):  # memory that may be written to in any mode
                kept = [torch.empty_like(value).copy_(value) for value in inputs]
            # Recording writes the cache as the pass itself does, in places that nobody reads yet.
            recording = self.made[key] = Recording(kept, *self.record(run, *kept))
            if len(self.made) > KEPT:
                forgotten, _ = self.made.popitem(last=False)
                del self.seen[forgotten]
        self.made.move_to_end(key)
        for place, value in zip(recording.inputs, inputs, strict=True):
            place.copy_(value)
        recording.replay()
        return [result.clone() for result in recording.results]  # the next replay writes to the same place


class CudaRecorder:
    """Records CUDA graphs, all of them in one pool of memory: their results are copied out before another one runs."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Pass, *inputs: Tensor) -> tuple[Callable[[], object], Sequence[Tensor]]:
        # Libraries set themselves up in their first calls, which must not be recorded, nor run on the stream that is.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                run(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            results = run(*inputs)
        return graph.replay, results
