"""`python with_specforge.py RECORD OUT`: SpecForge, SGLang's trainer, repeats the steps that `make_step.py` wrote down.

From the same files of weights, the same texts and the same anchors, its loss, the norm of its gradient and the gradient
of every tensor must be ours within 1e-4, as must taps and the tokens that may be anchors.  Four faults, planted in
its side of each case, must be seen in the loss or the norm.  Exit code 1 and a line for each that is not so.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from record import Engine, Found, make_row, record
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

warnings.filterwarnings("ignore", message="flash_attn is not found")

from specforge.algorithms.common import dflash_family_model as family  # noqa: E402
from specforge.modeling.draft.dflash import DFlashDraftModel, extract_context_feature  # noqa: E402

TOLERANCE = 1e-4
FAULTS = ("anchor in context", "labels one late", "taps one late", "other weights")


def main(path: Path, out: Path) -> int:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target = AutoModelForCausalLM.from_pretrained(out / "target", dtype=torch.float32).eval().requires_grad_(False)
    engine, rows = Engine("specforge", version("specforge"), "dflash", "loss, gradients of a step"), []
    print(f"{'':<23} {'loss':>9} {'SpecForge':>9} {'norm':>9} {'SpecForge':>9}   largest difference")
    for number, case in enumerate(json.loads((out / "cases.json").read_text())):
        folder = out / str(number)
        held = load_file(folder / "step.safetensors")
        loss, gradients, problems = repeat(folder, case, held, target, None)
        found = differences(case, held, loss, gradients)
        worst = max(found, key=lambda name: found[name])
        problems += [f"{name} differs by {far:.1e}" for name, far in found.items() if far > TOLERANCE]
        told = f"{found[worst]:.1e} ({worst})" if case["same"] else f"differs, as it must: {bool(problems)}"
        norm = total(gradients)
        print(f"{case['name']:<23} {case['loss']:9.5f} {loss:9.5f} {case['norm']:9.5f} {norm:9.5f}   {told}")
        if case["same"]:
            seen = planted(folder, case, held, target)
            print("    planted: " + ", ".join(f"{fault} {far:.1e}" for fault, far in seen.items()), flush=True)
            problems += [f"planted {fault}: not seen" for fault, far in seen.items() if far <= 10 * TOLERANCE]
            for problem in problems:
                print(f"    {problem}")
        made = Found(worst=found[worst], problems=problems)
        rows.append(make_row(engine, "tiny-qwen3", {**case, "kind": case["name"], "answers": []}, made))
    return record(path, rows)


def planted(folder: Path, case: dict[str, Any], held: dict[str, Tensor], target: Any) -> dict[str, float]:
    """How far each fault on SpecForge's side moves the loss or the norm of the gradient."""
    seen = {}
    for fault in FAULTS:
        loss, gradients, _ = repeat(folder, case, held, target, fault)
        found = differences(case, held, loss, gradients)
        seen[fault] = max(found["loss"], found["norm"])
    return seen


def repeat(
    folder: Path, case: dict[str, Any], held: dict[str, Tensor], target: Any, fault: str | None
) -> tuple[float, dict[str, Tensor], list[str]]:
    """SpecForge's loss and gradients of a step, perhaps with a fault in it, and what differed before the loss."""
    draft, report = DFlashDraftModel.from_pretrained(folder / "dflash", dtype=torch.float32, output_loading_info=True)
    problems = [f"does not load: {report}"] if any(report.values()) else []
    ids, mask, anchors = held["ids"], held["loss_mask"], held["anchors"]
    gamma = case["gamma"]
    if fault == "other weights":
        gamma = 4.0 if gamma is None else None
    trainer = family.OnlineDFlashModel(
        draft.train(), target.lm_head, target.get_input_embeddings(), case["mask_token_id"], case["block_size"],
        attention_backend="sdpa", num_anchors=ids.numel(), loss_decay_gamma=gamma,
    )  # fmt: skip
    problems += check_anchors(trainer, held)
    trainer._sample_anchor_positions = lambda *_: (anchors.clamp(min=0), anchors >= 0)
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
    taps = extract_context_feature(states, draft.target_layer_ids)
    for row, length in enumerate(case["lengths"]):
        ours = held["taps"][row, : length - 1].flatten(1)
        far = apart(taps[row, : length - 1], ours)
        problems += [f"taps of row {row} differ by {far:.1e}"] if far > TOLERANCE else []
    before = family.create_dflash_sdpa_mask
    if fault == "anchor in context":
        family.create_dflash_sdpa_mask = lambda anchor_positions, **rest: before(anchor_positions + 1, **rest)
    elif fault == "taps one late":
        taps = taps.roll(1, dims=1)
    elif fault == "labels one late":
        inputs, real = trainer._create_noise_embed, ids
        trainer._create_noise_embed = lambda _, *rest: inputs(real, *rest)
        ids = ids.roll(-1, dims=1)
    try:
        loss, _, _ = trainer(ids, taps, mask)
    finally:
        family.create_dflash_sdpa_mask = before
    loss.backward()
    return float(loss.detach()), {name: parameter.grad for name, parameter in draft.named_parameters()}, problems


def check_anchors(trainer: Any, held: dict[str, Tensor]) -> list[str]:
    """What SpecForge draws from, which is all of it when it may draw any number, against what we draw from."""
    drawn, kept = trainer._sample_anchor_positions(held["ids"].shape[1], held["loss_mask"], torch.device("cpu"))
    eligible = [row[keep].tolist() for row, keep in zip(drawn, kept, strict=True)]
    ours = [row.nonzero()[:, 0].tolist() for row in held["eligible"]]
    return [] if eligible == ours else [f"anchors may be {eligible}, ours {ours}"]


def differences(
    case: dict[str, Any], held: dict[str, Tensor], loss: float, gradients: dict[str, Tensor]
) -> dict[str, float]:
    """Relative differences of the loss, of the gradient's norm, and of the gradient of each tensor."""
    ours = {name.removeprefix("gradient."): held[name] for name in held if name.startswith("gradient.")}
    assert ours.keys() == gradients.keys(), "drafters have the same tensors"
    found = {"loss": abs(loss / case["loss"] - 1), "norm": abs(total(gradients) / case["norm"] - 1)}
    return found | {name: apart(gradients[name], ours[name]) for name in ours}


def apart(found: Tensor, ours: Tensor) -> float:
    return float((found - ours).norm() / ours.norm())


def total(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
