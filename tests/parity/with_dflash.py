"""`python with_dflash.py OUT`: the authors' package `dflash` and transformers run what `make.py` exported.

Hidden states of one block, and then greedy tokens and rounds, must be ours.  Exit code 1 and a line for each that
is not.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import dflash.model
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
from transformers.utils import logging

dflash.model._cuda_time = time.perf_counter  # its clock asks CUDA


def main(out: Path) -> int:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target = AutoModelForCausalLM.from_pretrained(out / "target", dtype=torch.float32).eval()
    wrong = 0
    for case in json.loads((out / "cases.json").read_text()):
        for layout, run in (("dflash", with_dflash), ("transformers", with_transformers)):
            if layout not in case["layouts"]:
                continue
            problems = run(out, case["kind"], target, case["answers"])
            accepted = sum(sum(answer["rounds"]) - len(answer["rounds"]) for answer in case["answers"])
            if not accepted:
                problems.append("no draft was accepted: this proves nothing")
            found = "; ".join(problems) or f"same, {accepted} drafts accepted"
            print(
                f"{layout:<13} {case['kind']:<11} {found if case['same'] else f'differs, as it must: {bool(problems)}'}"
            )
            wrong += bool(problems) == case["same"]
    return int(wrong > 0)


@torch.no_grad()
def with_dflash(out: Path, kind: str, target: Any, answers: list[dict[str, Any]]) -> list[str]:
    """The authors' own model class and loop."""
    model, report = dflash.model.DFlashDraftModel.from_pretrained(
        out / "dflash" / kind, dtype=torch.float32, output_loading_info=True
    )
    if any(report.values()):
        return [f"does not load: {report}"]
    model.eval()
    problems, saved = [], out / "hidden" / f"{kind}.safetensors"
    if saved.exists():
        held, positions = load_file(saved), torch.arange(35)[None]
        taps = held["taps"].flatten(-2)
        found = model(position_ids=positions, noise_embedding=held["embedded"], target_hidden=taps)
        far = float((found - held["hidden"]).abs().max())
        problems += [f"hidden states differ by {far:.2g}"] if far > 1e-4 else []
    for number, answer in enumerate(answers):
        ids = torch.tensor([answer["prompt"]])
        made = dflash.model.dflash_generate(model, target, ids, len(answer["tokens"]), None, 0.0, return_stats=True)
        tokens = made.output_ids[0, ids.shape[1] :].tolist()
        problems += compare(number, answer, tokens, made.acceptance_lengths, model.block_size)
    return problems


def with_transformers(out: Path, kind: str, target: Any, answers: list[dict[str, Any]]) -> list[str]:
    """`generate(speculation_type="dflash")`."""
    model, report = MuseGlimmerAssistantModel.from_pretrained(
        out / "transformers" / kind, dtype=torch.float32, output_loading_info=True
    )
    if any(report.values()):
        return [f"does not load: {report}"]
    problems = []
    for number, answer in enumerate(answers):
        ids, starts = torch.tensor([answer["prompt"]]), []
        before = DFlashTokenCandidateGenerator.get_candidates

        def watched(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
            starts.append(input_ids.shape[1])  # noqa: B023
            return before(self, input_ids, *args, **kwargs)  # noqa: B023

        DFlashTokenCandidateGenerator.get_candidates = watched
        try:
            made = target.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(answer["tokens"]), do_sample=False,
                eos_token_id=None, assistant_model=model.eval(), speculation_type="dflash",
            )[0, ids.shape[1] :].tolist()  # fmt: skip
        finally:
            DFlashTokenCandidateGenerator.get_candidates = before
        rounds = [after - start for start, after in pairwise([*starts[1:], ids.shape[1] + len(made)])]
        problems += compare(number, answer, made, rounds, model.config.block_size)
    return problems


def compare(number: int, answer: dict[str, Any], tokens: list[int], rounds: list[int], block: int) -> list[str]:
    """Tokens, and the rounds that had room for a whole block: at the end the authors' loop fills a shorter one, whose
    rows see less of each other."""
    problems, whole = [], [list(rounds), list(answer["rounds"])]
    for kept in whole:
        while sum(kept[:-1]) + 1 > len(answer["tokens"]) - block + 1:
            kept.pop()
    if tokens != answer["tokens"]:
        at = next((k for k, (a, b) in enumerate(zip(tokens, answer["tokens"], strict=False)) if a != b), len(tokens))
        problems.append(f"prompt {number}: token {at} differs")
    if whole[0] != whole[1]:
        problems.append(f"prompt {number}: rounds {whole[0]}, ours {whole[1]}")
    return problems


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
