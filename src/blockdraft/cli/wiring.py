"""From what stands on a command line to loaded models.

Here also are the adapters by which rooms meet that never import each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from blockdraft.bench.measure import Answer, Arm, Chat
    from blockdraft.config import SamplingParams
    from blockdraft.drafters.base import Drafter
    from blockdraft.drafters.names import DrafterChoice
    from blockdraft.drafters.network import DraftNetwork
    from blockdraft.engine.engine import Engine
    from blockdraft.targets.base import Target
    from blockdraft.targets.pretrained import PretrainedTarget

DEFAULT_TARGET = "smollm2-135m"
DEFAULT_DRAFTER = "ngram+auto"
ASSETS = Path(__file__).parent.parent / "assets"


def prepare(threads: int | None = None) -> None:
    """Set the CPU threads, and keep the libraries below from giving advice of their own."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if threads is not None:
        import torch

        if threads < 1:
            raise ValueError(f"--threads {threads}: need at least 1")
        torch.set_num_threads(threads)


def load(
    target: str,
    drafter: DrafterChoice,
    implementation: str = "auto",
    device: str = "cpu",
    dtype: str = "float32",
    weights: str | None = None,
) -> tuple[PretrainedTarget, PreTrainedTokenizerBase]:
    """A target and its tokenizer.  Raises ValueError, in one line, also if there is no such drafter for it."""
    from blockdraft.drafters.names import LookupChoice
    from blockdraft.engine.drafting import find_drafter, shipped_folder
    from blockdraft.targets.resolve import canonical_name, is_hub_id, load_target, load_tokenizer, resolve_folder

    if isinstance(drafter, LookupChoice):
        return load(target, drafter.other, implementation, device, dtype, weights)
    if not is_hub_id(target):
        resolve_folder(target)  # a wrong path is the first thing to say
    # A missing drafter should not cost the time of loading a target, let alone of downloading it.
    if isinstance(drafter, str) and not (shipped_folder(canonical_name(target), drafter) / "config.json").is_file():
        raise ValueError(
            f"no drafter comes with blockdraft for '{target}': give --drafter FOLDER, or ngram, or --drafter none"
        )
    if not isinstance(drafter, str):
        find_drafter(drafter, target)
    loaded = load_target(target, implementation=implementation, device=device, dtype=dtype, weights=weights)
    return loaded, load_tokenizer(target)


def make_chat(tokenizer: PreTrainedTokenizerBase, raw: bool = False, system: str | None = None) -> Chat:
    """How conversations become ids: by the chat template, or (`raw`) the last message as it stands."""
    from blockdraft.bench.measure import Chat
    from blockdraft.text import encode, encode_chat

    first = [{"role": "system", "content": system}] if system is not None else []

    def to_ids(messages: list[dict[str, str]]) -> list[int]:
        return encode(tokenizer, messages[-1]["content"]) if raw else encode_chat(tokenizer, [*first, *messages])

    def to_text(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    return Chat(to_ids, to_text)


def make_engine(
    target: Target,
    drafter: Drafter | None,
    tokenizer: PreTrainedTokenizerBase | None,
    capacity: int,
    slots: int = 1,
    verify_width: int | Literal["auto"] | None = None,
    coupled: bool = False,
    prefill_tokens: int | None = None,
) -> Engine:
    """An engine of its own for a target that others may use too.

    It verifies all drafts unless told otherwise: what training and ablations count must not depend on the machine.
    """
    from blockdraft.config import EngineConfig
    from blockdraft.engine.engine import Engine

    room: dict[str, Any] = {"slots": slots, "capacity": max(capacity, 8), "prefill_tokens": prefill_tokens}
    drafting = {"verify_width": verify_width, "coupled": coupled}
    return Engine(target, drafter, EngineConfig.parse({**room, **drafting}, "engine"), tokenizer)


def engine_arm(name: str, engine: Engine) -> Arm:
    """An engine as an arm of a benchmark: all prompts in, run until they are done."""
    from blockdraft.bench.measure import Answer, Arm

    def answer(prompts: list[list[int]], params: list[SamplingParams]) -> list[Answer]:
        requests = [engine.add(ids, one) for ids, one in zip(prompts, params, strict=True)]
        engine.run()
        return [
            Answer(
                token_ids=tuple(request.output_ids),
                finish_reason=request.finish_reason or "length",
                rounds=request.stats.rounds,
                round_tokens=request.stats.emitted,
                accepted_by_position=tuple(request.stats.accepted_by_position),
                rounds_by_width=tuple(request.stats.rounds_by_width),
                undrafted=request.stats.undrafted,
                partly_drafted=request.stats.partly_drafted,
            )
            for request in requests
        ]

    return Arm(name, answer)


def held_out_acceptance(
    target: Target, max_tokens: int
) -> Callable[[DraftNetwork, Tensor | None, Sequence[list[int]]], dict[str, Any]]:
    """What training calls to learn the real acceptance length of a drafter: the engine, on prompts, greedily."""

    def evaluate(model: DraftNetwork, draft_ids: Tensor | None, prompts: Sequence[list[int]]) -> dict[str, Any]:
        from blockdraft.config import SamplingParams
        from blockdraft.drafters.families import as_drafter
        from blockdraft.ops.layers import pack_linears

        if target.info.device.type == "cpu":
            pack_linears(model)
        draft_ids = None if draft_ids is None else draft_ids.to(target.info.device)
        drafter = as_drafter(model, target, draft_ids, "trained")
        room = max(len(prompt) for prompt in prompts) + max_tokens
        engine = make_engine(target, drafter, None, room, slots=min(4, len(prompts)))
        for prompt in prompts:
            engine.add(prompt, SamplingParams(max_tokens=max_tokens))
        engine.run()
        stats = engine.stats
        shares = [round(count / stats.rounds, 4) for count in stats.accepted_by_position] if stats.rounds else []
        return {"tau": round(stats.tau, 4), "rounds": stats.rounds, "accepted_by_position": shares}

    return evaluate
