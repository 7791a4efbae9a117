"""Worker: transformers' `generate`, plain and with what it has built in, and the authors' package `dflash`.

All four decode with one copy of the target.  They need the environment of `make parity`, and nothing of ours.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import dflash.model
import torch
from serving import Answering, after_prefill, serve
from transformers import AutoModelForCausalLM, GenerationConfig, MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator, PromptLookupCandidateGenerator
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

dflash.model._cuda_time = time.perf_counter  # its clock asks CUDA


class Clock(BaseStreamer):
    """When the first tokens were there, and how many: what `generate` tells a streamer."""

    def __init__(self) -> None:
        self.puts, self.first, self.at = 0, 0, 0.0

    def put(self, value: torch.Tensor) -> None:
        """The prompt comes first, then tokens as they are made."""
        self.puts += 1
        if self.puts == 2:
            self.first, self.at = value.numel(), time.perf_counter()

    def end(self) -> None:
        """Nothing is kept back."""


def load(settings: dict[str, Any]) -> tuple[dict[str, Answering], dict[str, Any]]:
    torch.set_num_threads(settings["threads"])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target = whole(AutoModelForCausalLM, settings["target"])
    target.generation_config = GenerationConfig()  # so that a request decides all of it
    arms = {
        "transformers": generating(target, None),
        "transformers-lookup": generating(
            target, PromptLookupCandidateGenerator, prompt_lookup_num_tokens=settings["drafts"]
        ),
        "transformers-dflash": generating(
            target,
            DFlashTokenCandidateGenerator,
            assistant_model=whole(MuseGlimmerAssistantModel, settings["assistant"]),
            speculation_type="dflash",
        ),
        "dflash": authors(target, whole(dflash.model.DFlashDraftModel, settings["dflash"])),
    }
    names = ("torch", "transformers", "dflash")
    return arms, {"versions": {name: version(name) for name in names}}


def whole(kind: Any, folder: str) -> Any:
    """A model with all of its weights: transformers would go on with random ones."""
    model, report = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if any(report.values()):
        raise ValueError(f"{folder} does not load: {report}")
    return model.eval().requires_grad_(False)


def generating(target: Any, generator: Any, **how: Any) -> Answering:
    """`generate`, whose rounds are seen by what asks for drafts (`generator`)."""

    def answer(ids: list[int], max_tokens: int, stop: list[int]) -> dict[str, Any]:
        prompt, clock = torch.tensor([ids]), Clock()
        with watched(generator) as starts, torch.inference_mode():
            made = target.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_tokens, do_sample=False,
                eos_token_id=stop, pad_token_id=stop[0], streamer=clock, **how,
            )[0, len(ids) :].tolist()  # fmt: skip
        seconds = time.perf_counter() - clock.at
        # The prompt's own pass is no round, although drafts of a lookup may already be in it.
        ends = [*starts[1:], len(ids) + len(made)] if starts else []
        rounds = [after - before for before, after in pairwise(ends)]
        decode = {"decode_tokens": len(made) - clock.first, "decode_seconds": seconds}
        return {**after_prefill(made, rounds), **decode}

    return answer


@contextmanager
def watched(generator: Any) -> Iterator[list[int]]:
    """The lengths of the text at which drafts were asked for."""
    starts: list[int] = []
    if generator is None:
        yield starts
        return
    before = generator.get_candidates

    def noting(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        starts.append(input_ids.shape[1])
        return before(self, input_ids, *args, **kwargs)

    generator.get_candidates = noting
    try:
        yield starts
    finally:
        generator.get_candidates = before


def authors(target: Any, model: Any) -> Answering:
    """The loop of the paper's authors."""

    def answer(ids: list[int], max_tokens: int, stop: list[int]) -> dict[str, Any]:
        with torch.inference_mode():
            made = dflash.model.dflash_generate(
                model, target, torch.tensor([ids]), max_tokens, stop, 0.0, return_stats=True
            )
        tokens = made.output_ids[0, len(ids) :].tolist()
        # Its time for one token is that of all rounds over all tokens, the prompt's too.
        decode = {
            "decode_tokens": len(tokens) - 1,
            "decode_seconds": made.time_per_output_token * made.num_output_tokens,
        }
        return {**after_prefill(tokens, made.acceptance_lengths), **decode}

    return answer


if __name__ == "__main__":
    serve(load)
