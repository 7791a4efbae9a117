"""What the other engines are compared with: exported drafters, and our own answers round by round.

`python make.py OUT [TARGET...]` (in this project's environment) makes a folder for each target: two tiny ones (Qwen3
and Llama) with random drafters of every kind that somebody else runs, and the default one, all fp32 here, with the
shipped drafter and a plain one that knows some answers by heart.  It exports the drafters and writes down what our
engine does with each.  The other scripts read nothing but these folders, and need none of this.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["BLOCKDRAFT_KERNEL"] = "off"  # it keeps drafters in half precision, and the others have theirs in fp32

import torch
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from gguf_files import dequantise, write_target
from layouts import KINDS, save
from models import save_tiny_target
from overfit import overfit
from record import accepted
from tiny import tiny_llama, tiny_qwen3

from blockdraft.cli import main as blockdraft
from blockdraft.config import EngineConfig, SamplingParams
from blockdraft.drafters.block import BlockModel
from blockdraft.drafters.checkpoint import load_drafter, load_model, save_drafter
from blockdraft.engine.drafting import shipped_folder
from blockdraft.engine.engine import Engine
from blockdraft.formats.card import TargetCard, read_card
from blockdraft.formats.layouts import export
from blockdraft.targets.pretrained import PretrainedTarget
from blockdraft.targets.resolve import gguf_file, load_target, load_tokenizer, resolve_folder
from blockdraft.text import encode_chat
from blockdraft.train.data import Sample
from blockdraft.train.features import OnlineFeatures

DEFAULT = "smollm2-135m"
END, LAYERS = 271, 5
# Prompts longer than the window, and than a block.
PROMPTS = [[7, 11, 5, 3, 9], list(range(20, 41)), [60, 2, 60, 2, 60, 2, 61]]
QUESTIONS = [
    "What is the capital of France?",
    "Write a Python function for the factorial of n.",
    "Why is the sky blue?",
]
CASES = {
    "dflash": (
        "plain", "windowed", "sliding", "mixed", "causal", "bias", "linear", "yarn", "yarn-whole", "llama3", "scaled",
    ),
    "transformers": ("plain", "windowed", "linear", "yarn", "yarn-whole", "llama3"),
    "speculators": ("plain", "mixed", "bias", "yarn", "anchor", "reduced", "markov", "dspark"),
    "gguf": ("plain", "sliding", "windowed", "causal", "linear", "yarn", "reduced", "markov", "dspark"),
}  # fmt: skip
# Of the second tiny target, whose drafters are the same: what of a drafter the target has a part in is in all of them.
FEW = ("plain", "windowed", "dspark")
SHIPPED = ("gguf", "speculators")
SERVED = ("dflash", "speculators")
CONTROL = "off by one"


def main(out: Path, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    for name in names or TARGETS:
        TARGETS[name](out / name)
        print(f"made {out / name}", flush=True)


def tiny(out: Path, build: Callable[..., Any], kinds: Sequence[str]) -> None:
    """A tiny target and its drafters.

    Its head has six rows that matter, three and their opposites, so that random drafts are often right and nothing is
    a near tie; none of them ends a text.
    """
    save_tiny_target(out / "target")
    model = build(vocab_size=272, eos_token_id=END, num_hidden_layers=LAYERS)
    model.lm_head.weight.data[3:6] = -model.lm_head.weight.data[:3]
    model.lm_head.weight.data[6:] *= 1e-3
    model.save_pretrained(out / "target")
    write_target(out / "target" / "target.gguf", model)
    card, target = read_card(str(out / "target")), load_target(str(out / "target"))
    taps = torch.randn(1, 30, 3, 32, generator=torch.Generator().manual_seed(9))
    cases = []
    for kind in kinds:
        layouts = [layout for layout, carried in CASES.items() if kind in carried]
        if not layouts:
            continue
        folder = save(out / "ours" / kind, kind, num_target_layers=LAYERS)
        cases.append(case(out, kind, folder, layouts, card, answers(target, folder, PROMPTS, 48)))
        if kind in CASES["dflash"]:
            hidden(out / "hidden" / f"{kind}.safetensors", folder, target, taps)
    cases.append(control(out, cases[0], out / "ours" / kinds[0], card, target))
    (out / "cases.json").write_text(json.dumps(cases))


def default(out: Path) -> None:
    """The default target."""
    source, tokenizer = gguf_file(DEFAULT), load_tokenizer(DEFAULT)
    assert source is not None, "the default target's package is not installed"
    out.mkdir(parents=True)
    (out / "target").symlink_to(resolve_folder(DEFAULT))
    dequantise(source, out / "target.gguf")
    card, target = read_card(DEFAULT), load_target(DEFAULT)
    prompts = [encode_chat(tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]
    shipped = answers(target, shipped_folder(DEFAULT), prompts, 32)
    tokens = [answer["tokens"] for answer in shipped]
    folder = overfit(out / "overfit", target, tokenizer, QUESTIONS, tokens)
    cases = [case(out, "plain", folder, list(CASES), card, answers(target, folder, prompts, 32))]
    assert [answer["tokens"] for answer in cases[0]["answers"]] == tokens, "no drafter changes an answer"
    ids = torch.tensor([*prompts[1], *tokens[1]])
    model, _ = load_model(folder)
    seen = OnlineFeatures(target, model.config.tap_ids, top_k=0).batch([Sample("", "", ids, torch.ones_like(ids) > 0)])
    hidden(out / "hidden" / "plain.safetensors", folder, target, seen.taps)
    cases.append(control(out, cases[0], folder, card, target))
    cases.append(case(out, "shipped", shipped_folder(DEFAULT), SHIPPED, card, shipped))
    for one in cases:
        layouts = SERVED if one["same"] else SERVED[:1]  # starting a server takes long, and one control is enough
        one["launch"] = {
            layout: launch_line(out, layout, one["kind"]) for layout in layouts if layout in one["layouts"]
        }
    (out / "cases.json").write_text(json.dumps(cases))


TARGETS: dict[str, Callable[[Path], None]] = {
    "tiny-qwen3": lambda out: tiny(out, tiny_qwen3, list(KINDS)),
    "tiny-llama": lambda out: tiny(out, tiny_llama, FEW),
    DEFAULT: default,
}


def case(
    out: Path, kind: str, folder: Path, layouts: Sequence[str], card: TargetCard, made: list[dict[str, Any]]
) -> dict[str, Any]:
    """A drafter in every layout that carries it, and our answers with it, which must be everybody's."""
    for layout in layouts:
        export(folder, out / layout / kind, layout, card, "float32")
    found = {"kind": kind, "layouts": list(layouts), "answers": made, "same": True}
    assert accepted(found), f"{out.name}, {kind}: no draft was accepted, which proves nothing"
    return found


def control(
    out: Path, real: dict[str, Any], folder: Path, card: TargetCard, target: PretrainedTarget
) -> dict[str, Any]:
    """A case again with layer ids one too high, which no engine can see and the comparison must.

    A drafter that knows its answers altogether by heart does not listen to the target, and would not do.
    """
    model, ids = load_model(folder)
    other = BlockModel(model.config.model_copy(update={"tap_ids": tuple(tap + 1 for tap in model.config.tap_ids)}))
    other.load_state_dict(model.state_dict())
    save_drafter(out / "ours" / CONTROL, other, ids, {}, torch.float32)
    prompts, limit = [answer["prompt"] for answer in real["answers"]], real["answers"][0]["limit"]
    shifted = answers(target, out / "ours" / CONTROL, prompts, limit)
    # Rounds of the same tokens: so many drafts more or fewer were accepted.
    pairs = zip(shifted, real["answers"], strict=True)
    far = max(abs(len(one["rounds"]) - len(other["rounds"])) for one, other in pairs)
    assert far > 1, f"{out.name}: layer ids do not matter to this drafter"
    for layout in real["layouts"]:
        export(out / "ours" / CONTROL, out / layout / CONTROL, layout, card, "float32")
    return {**real, "kind": CONTROL, "same": False}


def answers(target: PretrainedTarget, folder: Path, prompts: list[list[int]], limit: int) -> list[dict[str, Any]]:
    """Greedy answers: tokens, and how many each round gave.

    `whole` is what the rounds gave before the last was cut, at `limit` tokens or the end of the text: engines differ in
    what they count of it.
    """
    made, ends = [], set(target.info.eos_token_ids)
    drafter, config = load_drafter(folder, target), EngineConfig.parse({"slots": 1, "capacity": 256}, "engine")
    asked = {"limit": limit, "ends": [*ends], "drafts": drafter.max_drafts}
    for prompt in prompts:
        engine = Engine(target, drafter, config, None)
        request = engine.add(prompt, SamplingParams(max_tokens=limit + 16, ignore_eos=True))
        lengths = [1]  # the first token is the prefill's
        while (length := lasting(request.output_ids, ends, limit)) is None:
            engine.step()
            lengths.append(len(request.output_ids))
        whole = [after - before for before, after in pairwise(lengths)]
        rounds = [after - before for before, after in pairwise([*lengths[:-1], length])]
        tokens = list(request.output_ids)[:length]
        made.append({"prompt": prompt, "tokens": tokens, "rounds": rounds, "whole": whole, **asked})
    return made


def lasting(ids: Sequence[int], ends: set[int], limit: int) -> int | None:
    """How many of the tokens are the answer; None: it goes on."""
    until = next((index + 1 for index, token in enumerate(ids) if token in ends), None)
    if until is None:
        return limit if len(ids) >= limit else None
    return min(until, limit)


@torch.no_grad()
def hidden(path: Path, folder: Path, target: PretrainedTarget, taps: Tensor) -> None:
    """Taps [1, S, T, D], and the hidden states [1, Q, D] of the block behind them."""
    model, _ = load_model(folder)
    assert isinstance(model, BlockModel)
    config, length = model.config, taps.shape[1]
    ids = torch.full((1, config.block_size), config.mask_token_id)
    ids[0, 0] = 5
    embedded = target.embed(ids)
    context = model.context(taps, torch.arange(length)[None])
    positions = torch.arange(length, length + config.block_size)[None, None]
    found = model(embedded[:, None], positions, context, torch.tensor([[length]]))[:, 0]
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"taps": taps, "embedded": embedded * config.input_embedding_scale}
    save_file({**tensors, "hidden": found / config.output_multiplier}, path)


def launch_line(out: Path, layout: str, kind: str) -> str:
    """What `blockdraft command` says that starts vLLM with a drafter."""
    said = io.StringIO()
    command = ["command", "vllm", "--drafter", str(out / layout / kind), "--target", str(out / "target")]
    with redirect_stdout(said), suppress(SystemExit):
        blockdraft(command)
    line = said.getvalue().strip()
    assert line, f"{' '.join(command)} is refused"
    return line


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
