"""Worker: blockdraft itself, plain, drafted with every draft verified, and drafted as it is by default (`auto`).

Its target's weights are fp32, or (`weights`) in half precision.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from serving import Answering, serve

from blockdraft import __version__
from blockdraft.cli.wiring import make_engine, prepare
from blockdraft.config import SamplingParams
from blockdraft.drafters.checkpoint import load_drafter
from blockdraft.engine.engine import Engine
from blockdraft.targets.resolve import load_target


def load(settings: dict[str, Any]) -> tuple[dict[str, Answering], dict[str, Any]]:
    """One target and one drafter for three engines."""
    import torch

    # What passes cost is measured anew by every run: what is remembered may be of a busier machine.
    os.environ["BLOCKDRAFT_CACHE"] = settings["cache"]
    prepare(settings["threads"])
    target = load_target(settings["target"], weights=settings["weights"])
    drafter, room, arm = load_drafter(Path(settings["drafter"]), target), settings["room"], settings["arm"]
    engines = {
        arm: make_engine(target, None, None, room),
        f"{arm}-dflash": make_engine(target, drafter, None, room),
        f"{arm}-auto": make_engine(target, drafter, None, room, verify_width="auto"),
    }
    for engine in engines.values():
        engine.prepare()  # what is measured once for a machine is no part of anybody's time
    versions = {"blockdraft": __version__, "torch": torch.__version__}
    return {name: answering(engine) for name, engine in engines.items()}, {"versions": versions}


def answering(engine: Engine) -> Answering:
    def answer(ids: list[int], max_tokens: int, stop: list[int]) -> dict[str, Any]:
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(stop), ignore_eos=True)
        request = engine.add(ids, params)
        engine.step()
        first, began = len(request.output_ids), time.perf_counter()
        while engine.has_work:
            engine.step()
        return {
            "tokens": request.output_ids,
            "rounds": request.stats.rounds if engine.drafter is not None else 0,
            "round_tokens": request.stats.emitted if engine.drafter is not None else 0,
            "decode_tokens": len(request.output_ids) - first,
            "decode_seconds": time.perf_counter() - began,
        }

    return answer


if __name__ == "__main__":
    serve(load)
