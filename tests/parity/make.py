"""What the other engines are compared with: exported drafters, and our own answers round by round.

`python make.py OUT` (in this project's environment) makes a tiny target and a drafter of every kind that somebody
else runs, exports them, and writes down what our engine does with each; and the same of the shipped drafter with the
default target, whose numbers are all fp32 here.  The other scripts read nothing but OUT, and need none of this.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent.parent))

from gguf_files import dequantise, write_target
from layouts import KINDS, MASK, drafter, save
from models import save_tiny_target
from tiny import tiny_qwen3

from blockdraft.config import EngineConfig, SamplingParams
from blockdraft.drafters.checkpoint import load_drafter
from blockdraft.engine.drafting import shipped_folder
from blockdraft.engine.engine import Engine
from blockdraft.formats.card import read_card
from blockdraft.formats.layouts import export
from blockdraft.targets.pretrained import PretrainedTarget
from blockdraft.targets.resolve import gguf_file, load_target, load_tokenizer
from blockdraft.text import encode_chat

TOKENS, END, LAYERS = 48, 271, 5
# Prompts longer than the window, and than a block.
PROMPTS = [[7, 11, 5, 3, 9], list(range(20, 41)), [60, 2, 60, 2, 60, 2, 61]]
QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function for the factorial of n.",
    "Why is the sky blue?",
)
CASES = {
    "dflash": (
        "plain", "windowed", "sliding", "mixed", "causal", "bias", "linear", "yarn", "yarn-whole", "llama3", "scaled",
    ),
    "transformers": ("plain", "windowed", "linear", "yarn", "yarn-whole", "llama3"),
    "speculators": ("plain", "mixed", "bias", "yarn", "anchor", "reduced", "markov", "dspark"),
    "gguf": ("plain", "sliding", "windowed", "causal", "linear", "yarn", "reduced", "markov", "dspark"),
}  # fmt: skip


def main(out: Path) -> None:
    torch.set_num_threads(1)
    tiny(out / "tiny")
    default(out / "default")
    print(f"made {out}")


def tiny(out: Path) -> None:
    """The tiny target and its drafters.

    Its head has six rows that matter, three and their opposites, so that random drafts are often right and nothing is
    a near tie; none of them ends a text.
    """
    save_tiny_target(out / "target")
    model = tiny_qwen3(vocab_size=272, eos_token_id=END, num_hidden_layers=LAYERS)
    model.lm_head.weight.data[3:6] = -model.lm_head.weight.data[:3]
    model.lm_head.weight.data[6:] *= 1e-3
    model.save_pretrained(out / "target")
    write_target(out / "target" / "target.gguf", model)
    card, target = read_card(str(out / "target")), load_target(str(out / "target"))
    cases = []
    for kind in KINDS:
        layouts = [layout for layout, kinds in CASES.items() if kind in kinds]
        if not layouts:
            continue
        folder = save(out / "ours" / kind, kind, num_target_layers=LAYERS)
        for layout in layouts:
            export(folder, out / layout / kind, layout, card)
        if kind in CASES["dflash"]:
            hidden(out / "hidden" / f"{kind}.safetensors", kind, target)
        cases.append({"kind": kind, "layouts": layouts, "answers": answers(target, folder, PROMPTS), "same": True})
    # The control: layer ids one too high, which no engine can see and the comparison must.
    folder = save(out / "ours" / "off by one", "plain", num_target_layers=LAYERS, tap_ids=(1, 2, 3))
    for layout in CASES:
        export(folder, out / layout / "off by one", layout, card)
    cases.append({**cases[0], "kind": "off by one", "layouts": list(CASES), "same": False})
    (out / "cases.json").write_text(json.dumps(cases))


def default(out: Path) -> None:
    """The shipped drafter and the default target, for llama.cpp."""
    name = "smollm2-135m"
    source, tokenizer = gguf_file(name), load_tokenizer(name)
    assert source is not None, "the default target's package is not installed"
    out.mkdir(parents=True)
    dequantise(source, out / "target.gguf")
    export(shipped_folder(name), out / "gguf" / "shipped", "gguf", read_card(name), "float32")
    prompts = [encode_chat(tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]
    found = answers(load_target(name), shipped_folder(name), prompts)
    (out / "cases.json").write_text(
        json.dumps([{"kind": "shipped", "layouts": ["gguf"], "answers": found, "same": True}])
    )


def answers(target: PretrainedTarget, folder: Path, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Greedy answers: tokens, and how many each round gave."""
    made = []
    for prompt in prompts:
        config = EngineConfig.parse({"slots": 1, "capacity": 256}, "engine")
        engine = Engine(target, load_drafter(folder, target), config, None)
        request = engine.add(prompt, SamplingParams(max_tokens=TOKENS))
        lengths = [1]  # the first token is the prefill's
        while engine.has_work:
            engine.step()
            lengths.append(len(request.output_ids))
        rounds = [after - before for before, after in pairwise(lengths)]
        made.append({"prompt": prompt, "tokens": list(request.output_ids), "rounds": rounds})
    return made


@torch.no_grad()
def hidden(path: Path, kind: str, target: PretrainedTarget) -> None:
    """Taps [1, 30, 3, D], and the hidden states of the block behind them."""
    model, _ = drafter(kind)
    taps = torch.randn(1, 30, 3, 32, generator=torch.Generator().manual_seed(9))
    ids = torch.tensor([[5, MASK, MASK, MASK, MASK]])
    embedded = target.embed(ids)
    context = model.context(taps, torch.arange(30)[None])
    found = model(embedded[:, None], torch.arange(30, 35)[None, None], context, torch.tensor([[30]]))[:, 0]
    path.parent.mkdir(parents=True, exist_ok=True)
    scale = model.config.input_embedding_scale
    save_file({"taps": taps, "embedded": embedded * scale, "hidden": found / model.config.output_multiplier}, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
