"""Recorded passes: a recording replayed with other ids and starts gives what the pass itself would."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence

import pytest
import tiny
import torch
from rows import fill, random_ids
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PreTrainedModel

from blockdraft.cache import KVCache
from blockdraft.config import EngineConfig, NgramConfig, SamplingParams
from blockdraft.drafters.ngram import NgramDrafter
from blockdraft.engine.engine import Engine
from blockdraft.targets import graphs
from blockdraft.targets.dense import DenseTarget
from blockdraft.targets.graphs import Graphs, Pass


class TraceRecorder:
    """Stands for CUDA graphs where there is no such device: keeps the operations of a pass and the numbers in them.

    As there, a number that the host computed stays what it was, results lie where they lay, and a value that is read
    from a tensor by the host cannot be recorded at all.
    """

    def __init__(self) -> None:
        self.recorded, self.replayed = 0, 0

    def __call__(self, run: Pass, *inputs: Tensor) -> tuple[Callable[[], object], Sequence[Tensor]]:
        with torch.no_grad():
            traced = make_fx(run)(*inputs)
            results = [result.clone() for result in traced(*inputs)]
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            for place, result in zip(results, traced(*inputs), strict=True):
                place.copy_(result)

        return replay, results


def model(kind: str = "llama") -> PreTrainedModel:
    """Two layers where their kinds are not listed: recording takes its time."""
    return tiny.tiny_model(kind, **({} if kind == "qwen3-mixed" else {"num_hidden_layers": 2}))


def two(kind: str = "llama") -> tuple[DenseTarget, DenseTarget, TraceRecorder]:
    """A target that records, and the same one that does not."""
    recorder = TraceRecorder()
    return DenseTarget(model(kind), "a", recorder=recorder), DenseTarget(model(kind), "a"), recorder


@pytest.mark.parametrize(("kind", "rows"), [("llama", [0]), ("qwen3-mixed", [0, 1, 2]), ("qwen3-mixed", [3, 0, 2])])
def test_a_replayed_pass_is_the_pass(kind: str, rows: list[int]) -> None:
    recorded, plain, recorder = two(kind)
    caches = [target.new_cache(4, 700) for target in (recorded, plain)]
    for target, cache in zip((recorded, plain), caches, strict=True):
        target.set_taps((1, 0))
        for row in rows:
            fill(target, cache, row, random_ids(230 + 5 * row, seed=row), (40,))
    made = recorder.recorded
    for turn in range(8):  # over the end of the first 256 slots
        ids = random_ids(len(rows), 4, seed=turn) if len(rows) > 1 else random_ids(4, seed=turn)[None]
        outs = [target.forward(ids, cache, rows) for target, cache in zip((recorded, plain), caches, strict=True)]
        torch.testing.assert_close(outs[0].logits, outs[1].logits, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(outs[0].taps, outs[1].taps, rtol=1e-3, atol=1e-4)
        for cache in caches:  # rows that part: of the second one everything is kept
            cache.truncate(rows[:1], [cache.lengths[rows[0]] - turn % 3])
        assert caches[0].lengths == caches[1].lengths
    assert recorder.recorded > made and recorder.replayed >= 4


def test_what_a_pass_returned_is_not_written_over() -> None:
    target, _, recorder = two()
    cache = target.new_cache(1, 64)
    outs = [target.forward(random_ids(2, seed=turn)[None], cache, [0]).logits for turn in range(5)]
    kept = [out.clone() for out in outs]
    target.forward(random_ids(2, seed=9)[None], cache, [0])
    assert recorder.replayed >= 3
    assert all(torch.equal(out, before) for out, before in zip(outs, kept, strict=True))


def test_a_number_of_the_host_is_recorded_for_good() -> None:
    """Negative control: a pass that asks the host where a row begins is wrong when it is replayed."""
    made, start = Graphs(TraceRecorder()), 0

    def run(ids: Tensor, starts: Tensor, rows: Tensor) -> list[Tensor]:
        return [ids + start]

    found = []
    for turn in range(4):
        start = turn
        found.append(int(made.run("key", run, *(torch.zeros(1),) * 3)[0]))
    assert found == [0, 1, 2, 2]


def test_recordings_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "KEPT", 2)
    target, _, recorder = two()
    cache = target.new_cache(1, 64)
    for width in (1, 2, 3, 1):
        for _ in range(3):
            target.forward(random_ids(width)[None], cache, [0])
    assert recorder.recorded == 4 and len(target._graphs[cache].made) == 2
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None and len(target._graphs) == 0, "recordings do not keep a cache"


def test_a_long_pass_is_not_recorded() -> None:
    target, _, recorder = two()
    cache = target.new_cache(1, 512)
    for _ in range(5):
        target.forward(random_ids(graphs.LONGEST + 1)[None], cache, [0])
    assert recorder.recorded == 0


def test_drafting_with_recordings_gives_plain_decodings_answers() -> None:
    def answers(target: DenseTarget, drafter: NgramDrafter | None) -> list[list[int]]:
        config = EngineConfig.parse({"slots": 2, "capacity": 64}, "engine")
        engine = Engine(target, drafter, config, None)
        prompts = [[5, 6, 7, 5, 6], [9, 8, 9, 8, 9], [3, 4, 3]]
        requests = [
            engine.add(prompt, SamplingParams(max_tokens=24, temperature=b * 0.5, seed=b))
            for b, prompt in enumerate(prompts)
        ]
        engine.run()
        return [list(request.output_ids) for request in requests]

    recorded, plain, recorder = two()
    expected = answers(plain, None)
    assert answers(recorded, NgramDrafter(NgramConfig())) == expected
    assert recorder.replayed > 10


def test_caches_have_recordings_of_their_own() -> None:
    target, plain, _ = two()
    caches: list[KVCache] = [target.new_cache(1, 64), target.new_cache(1, 64)]
    for turn in range(4):
        for seed, cache in enumerate(caches):
            found = target.forward(random_ids(2, seed=seed)[None], cache, [0]).logits
            cache.truncate([0], [0])
            expected = plain.forward(random_ids(2, seed=seed)[None], plain.new_cache(1, 64), [0]).logits
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, msg=f"turn {turn}, cache {seed}")
