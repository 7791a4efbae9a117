"""`python with_dflash.py RECORD OUT...`: the authors' package `dflash` and transformers run what `make.py` exported.

Hidden states of one block, and then greedy tokens and rounds, must be ours.  Exit code 1 and a line for each that
is not.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import dflash.model
import torch
from record import Engine, Found, make_row, record, tell
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
from transformers.utils import logging

dflash.model._cuda_time = time.perf_counter  # its clock asks CUDA
COMPARED = "hidden states, tokens, rounds"
TOLERANCE = 1e-4


def main(path: Path, outs: list[Path]) -> int:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    runs = (
        (Engine("dflash", version("dflash"), "dflash", COMPARED), with_dflash),
        (Engine("transformers", version("transformers"), "transformers", COMPARED), with_transformers),
    )
    rows = []
    for out in outs:
        target = AutoModelForCausalLM.from_pretrained(out / "target", dtype=torch.float32).eval()
        for case in json.loads((out / "cases.json").read_text()):
            for engine, run in runs:
                if engine.layout in case["layouts"]:
                    rows.append(tell(make_row(engine, out.name, case, run(out, case, target))))
    return record(path, rows)


@torch.no_grad()
def with_dflash(out: Path, case: dict[str, Any], target: Any) -> Found:
    """The authors' own model class and loop."""
    model, report = dflash.model.DFlashDraftModel.from_pretrained(
        out / "dflash" / case["kind"], dtype=torch.float32, output_loading_info=True
    )
    if any(report.values()):
        return Found(problems=[f"does not load: {report}"])
    model.eval()

    def block(taps: Tensor, embedded: Tensor) -> Tensor:
        positions = torch.arange(taps.shape[1] + embedded.shape[1])[None]
        return model(position_ids=positions, noise_embedding=embedded, target_hidden=taps)

    found = Found(0, 0, 0)
    compare_hidden(found, out / "hidden" / f"{case['kind']}.safetensors", block)
    for number, answer in enumerate(case["answers"]):
        ids = torch.tensor([answer["prompt"]])
        made = dflash.model.dflash_generate(model, target, ids, answer["limit"], answer["ends"], 0.0, return_stats=True)
        tokens = made.output_ids[0, ids.shape[1] :].tolist()
        compare(found, number, answer, tokens, made.acceptance_lengths, model.block_size)
    return found


@torch.no_grad()
def with_transformers(out: Path, case: dict[str, Any], target: Any) -> Found:
    """`generate(speculation_type="dflash")`."""
    model, report = MuseGlimmerAssistantModel.from_pretrained(
        out / "transformers" / case["kind"], dtype=torch.float32, output_loading_info=True
    )
    if any(report.values()):
        return Found(problems=[f"does not load: {report}"])
    model.eval()

    def block(taps: Tensor, embedded: Tensor) -> Tensor:
        length = taps.shape[1] + embedded.shape[1]
        cache = DFlashCache(config=model.config)
        cache.activate_past_recording()
        cache.set_previous_accepted_tokens(taps.shape[1])
        return model(
            noise_embeds=embedded, context_hidden_states=taps, cache=cache,
            attention_mask=torch.ones(1, length, dtype=torch.long), position_ids=torch.arange(length)[None],
        ).last_hidden_state  # fmt: skip

    found = Found(0, 0, 0)
    compare_hidden(found, out / "hidden" / f"{case['kind']}.safetensors", block)
    for number, answer in enumerate(case["answers"]):
        ids, starts = torch.tensor([answer["prompt"]]), []
        before = DFlashTokenCandidateGenerator.get_candidates

        def watched(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
            starts.append(input_ids.shape[1])  # noqa: B023
            return before(self, input_ids, *args, **kwargs)  # noqa: B023

        DFlashTokenCandidateGenerator.get_candidates = watched
        try:
            made = target.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=answer["limit"], do_sample=False,
                eos_token_id=answer["ends"], assistant_model=model, speculation_type="dflash",
            )[0, ids.shape[1] :].tolist()  # fmt: skip
        finally:
            DFlashTokenCandidateGenerator.get_candidates = before
        rounds = [after - start for start, after in pairwise([*starts[1:], ids.shape[1] + len(made)])]
        compare(found, number, answer, made, rounds, model.config.block_size)
    return found


def compare_hidden(found: Found, saved: Path, block: Any) -> None:
    """The block's hidden states, from the same taps and embeddings; the control has none saved."""
    if not saved.exists():
        return
    held = load_file(saved)
    found.worst = float((block(held["taps"].flatten(-2), held["embedded"]) - held["hidden"]).abs().max())
    if not found.worst <= TOLERANCE:
        found.problems.append(f"hidden states differ by {found.worst:.2g}")


def compare(
    found: Found, number: int, answer: dict[str, Any], tokens: list[int], rounds: list[int], block: int
) -> None:
    """Tokens, and the rounds that had room for a whole block: at the limit the authors' loop fills a shorter one, whose
    rows see less of each other."""
    assert found.tokens is not None and found.rounds is not None and found.accepted is not None
    if tokens == answer["tokens"]:
        found.tokens += 1
    else:
        at = next((k for k, (a, b) in enumerate(zip(tokens, answer["tokens"], strict=False)) if a != b), len(tokens))
        found.problems.append(f"prompt {number}: token {at} differs")
    there, here = (with_room(kept, answer["limit"] - block + 1) for kept in (rounds, answer["rounds"]))
    if there == here:
        found.rounds += 1
    else:
        found.problems.append(f"prompt {number}: rounds {there}, ours {here}")
    found.accepted += sum(rounds) - len(rounds)


def with_room(rounds: list[int], last: int) -> list[int]:
    """The rounds that began at no more than `last` tokens (the first token came before them)."""
    kept = list(rounds)
    while kept and sum(kept[:-1]) + 1 > last:
        kept.pop()
    return kept


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]))
