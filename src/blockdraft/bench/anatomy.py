"""Where the time of a round goes, part by part, and the least that each part could take on this machine.

A pass is run once and its products and attentions are kept with what they were given; then they alone are run again,
in the order of the pass, so that weights come from memory as they do in it.  What is left of the pass is norms,
rotary positions, activations and the host's own steps; and attention, where a compiled kernel does whole layers.
Letters: B rows, Q tokens per row in one call, K drafts, S tokens of context.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from blockdraft.bench.cost import median_seconds
from blockdraft.config import SamplingParams
from blockdraft.drafters.base import Drafter
from blockdraft.engine.engine import Engine
from blockdraft.ops.acceptance import accept
from blockdraft.ops.kernel import KernelLinear
from blockdraft.ops.kernel_layer import KernelLayer
from blockdraft.ops.sampling import ChoiceState, choose
from blockdraft.targets.base import Target

READ_BYTES, READ_TIMES = 1 << 28, 5
SIDE, MULTIPLY_TIMES = 1024, 10


@dataclass(frozen=True)
class Part:
    """One part of a round: its seconds, and what it must read and multiply at least (0: not counted)."""

    name: str
    seconds: float
    read_bytes: int = 0
    multiplications: int = 0

    def least(self, speed: Speed) -> float | None:
        """The seconds that reading or multiplying takes, whichever is longer; None: neither was counted."""
        if not self.read_bytes:
            return None
        return max(self.read_bytes / speed.bytes_per_second, self.multiplications / speed.multiplications_per_second)


@dataclass(frozen=True)
class Speed:
    """What the machine can do at best, with the threads that torch has."""

    bytes_per_second: float
    multiplications_per_second: float


@dataclass
class Calls(TorchFunctionMode):
    """The products and attentions of one pass, with their inputs."""

    products: list[tuple[Any, Tensor]] = field(default_factory=list)
    attentions: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            self.attentions.append((tuple(args), dict(kwargs or {})))
        return func(*args, **(kwargs or {}))

    def keep_layer(self, layer: KernelLayer, rows: int) -> None:
        """A listener to the kernel's layers: keep their products, with inputs of our own."""
        self.products += [(linear, torch.randn(rows, linear.in_features)) for linear in layer.linears]

    def keep(self, module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        """A hook on every module: keep the products."""
        if hasattr(module, "in_features"):
            self.products.append((module, inputs[0].clone()))

    def multiply(self) -> None:
        """All products again."""
        for module, x in self.products:
            module(x)

    def attend(self) -> None:
        """All attentions again."""
        for args, options in self.attentions:
            F.scaled_dot_product_attention(*args, **options)


def calls_of(run: Callable[[], object]) -> Calls:
    """What a pass computes: run it once."""
    calls = Calls()
    hook = nn.modules.module.register_module_forward_hook(calls.keep)
    KernelLayer.listener = calls.keep_layer
    try:
        with calls:
            run()
    finally:
        hook.remove()
        KernelLayer.listener = None
    return calls


def machine_speed(device: torch.device) -> Speed:
    """Measured: summing memory that no cache holds, and a product of two square fp32 matrices."""
    memory = torch.ones(READ_BYTES // 4, device=device)
    square = torch.ones(SIDE, SIDE, device=device)
    reading = median_seconds(memory.sum, READ_TIMES, device)
    multiplying = median_seconds(lambda: square @ square, MULTIPLY_TIMES, device)
    return Speed(READ_BYTES / reading, SIDE**3 / multiplying)


@torch.inference_mode()
def parts_of_a_round(target: Target, drafter: Drafter, ids: Sequence[int], repeats: int = 20) -> list[Part]:
    """One greedy round for one row behind a prompt of S tokens, all drafts verified, and a pass of plain decoding.

    Medians; the tokens are the prompt's own, so what is accepted does not matter.  What the drafter does comes after a
    pass of the target, as in a round, which leaves nothing of the drafter in the processor's caches.
    """
    device, drafts = target.info.device, drafter.max_drafts
    target.set_taps(drafter.tap_ids)
    tokens = torch.tensor([list(ids)], device=device)
    cache = target.new_cache(1, len(ids) + drafts + 1)
    read = target.forward(tokens, cache, [0])
    block = tokens[:, : drafts + 1]

    def forward(width: int) -> Any:
        cache.truncate([0], [len(ids)])
        return target.forward(block[:, :width], cache, [0])

    plain = partial(forward, 1)

    state = drafter.new_state(1, len(ids) + 8 * drafter.block_size)
    drafter.observe(state, [0], tokens, read.taps, [len(ids)])
    fresh = drafter.new_state(1, 1 << 12)
    out, anchor = forward(drafts + 1), tokens[:, -1]
    taps = None if out.taps is None else out.taps[:, :2]

    def choice() -> None:
        states = [ChoiceState(SamplingParams(), 0, ids, target.info.vocab_size, device)]
        chosen = choose(out.logits, states, [len(ids)], block[:, 1:])
        count, following = accept(block[:, 1:], chosen, torch.tensor([drafts], device=device))
        torch.cat([count[:, None], following[:, None]], dim=1).tolist()

    def observe() -> None:
        drafter.reset(fresh, 0)
        drafter.observe(fresh, [0], block[:, :2], taps, [2])

    parts = [
        *_split("propose", lambda: drafter.propose(state, [0], anchor), repeats, device, plain),
        *_split(f"verify {drafts} drafts", lambda: forward(drafts + 1), repeats, device),
        Part("choose and accept", median_seconds(choice, repeats, device)),
        Part("observe 2 tokens", median_seconds(observe, repeats, device, plain)),
    ]
    return [*parts, *_split("plain pass", plain, repeats, device)]


def round_seconds(engine: Engine, prompts: Iterable[Sequence[int]], max_tokens: int) -> float:
    """Median seconds of the engine's rounds, prompts read before the clock starts; all it does is in them."""
    seconds = []
    for ids in prompts:
        request = engine.add(ids, SamplingParams(max_tokens=max_tokens))
        engine.step()  # reads the prompt, and makes a first round
        while not request.done:
            began = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _split(
    name: str,
    run: Callable[[], object],
    repeats: int,
    device: torch.device,
    before: Callable[[], object] | None = None,
) -> list[Part]:
    """A pass as a whole, then its products, its attentions and the rest; `before` comes before each, untimed."""
    calls = calls_of(run)
    whole = median_seconds(run, repeats, device, before)
    products = median_seconds(calls.multiply, repeats, device, before) if calls.products else 0.0
    attentions = median_seconds(calls.attend, repeats, device, before) if calls.attentions else 0.0
    weights = [(module.out_features * module.in_features, x) for module, x in calls.products]
    parts = [Part(name, whole)]
    if products:
        read = sum(size * _width(module, x) for (module, x), (size, _) in zip(calls.products, weights, strict=True))
        multiplied = sum(size * (x.numel() // x.shape[-1]) for size, x in weights)
        parts.append(Part(f"{name}: products", products, read, multiplied))
    if attentions:
        parts.append(Part(f"{name}: attention", attentions))
    return [*parts, Part(f"{name}: the rest", max(whole - products - attentions, 0.0))]


def _width(module: Any, x: Tensor) -> int:
    """Bytes of a stored weight."""
    return int(module.panels.element_size() if isinstance(module, KernelLinear) else x.element_size())


def describe(parts: Sequence[Part], whole: float, speed: Speed) -> dict[str, Any]:
    """The parts as JSON, in milliseconds; what the engine's own rounds take comes last."""
    rows = [
        {"name": part.name, "ms": part.seconds * 1e3, "least_ms": None if least is None else least * 1e3}
        for part in parts
        for least in [part.least(speed)]
    ]
    return {
        "parts": [*rows, {"name": "round of the engine, drafts of its own", "ms": whole * 1e3, "least_ms": None}],
        "speed": {
            "read_gb_per_second": speed.bytes_per_second / 1e9,
            "gflop_per_second": 2 * speed.multiplications_per_second / 1e9,
        },
    }


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    speed, where = report["speed"], report["machine"]
    lines = ["| part of a round | ms | at least, ms |", "|---|---|---|"]
    for part in report["parts"]:
        least = "" if part["least_ms"] is None else f"{part['least_ms']:.1f}"
        lines.append(f"| {part['name']} | {part['ms']:.1f} | {least} |")
    note = (
        f"Medians. At least: what reading the weights at {speed['read_gb_per_second']:.1f} GB/s or multiplying at "
        f"{speed['gflop_per_second']:.0f} GFLOP/s takes, both measured in the same run. {report['target']} in "
        f"{report['dtype']}, drafter {report['drafter']}, {report['context']} tokens of context, {where['cpu']}, "
        f"{where['threads']} threads."
    )
    return "\n".join([*lines, "", note])
