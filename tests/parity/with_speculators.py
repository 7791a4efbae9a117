"""`python with_speculators.py OUT`: the speculators library, whose layout vLLM reads, loads what `make.py` exported.

Nothing may be missing, left over or misshapen, and every number must be what the file holds.  (What it computes is not
compared: its forward is for training.)  Exit code 1 and a line for each that is not so.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.dspark.core import DSparkDraftModel
from transformers.utils import logging


def main(out: Path) -> int:
    logging.disable_progress_bar()
    wrong = 0
    for case in json.loads((out / "cases.json").read_text()):
        if "speculators" not in case["layouts"] or not case["same"]:
            continue
        folder = out / "speculators" / case["kind"]
        settings, held = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        kind = DSparkDraftModel if settings["speculators_model_type"] == "dspark" else DFlashDraftModel
        model, report = kind.from_pretrained(folder, output_loading_info=True)
        problems = [f"{name}: {sorted(found)}" for name, found in report.items() if found]
        loaded = model.state_dict()
        problems += [f"'{name}' is not there" for name in held if name not in loaded]
        problems += [
            f"'{name}' differs"
            for name, value in held.items()
            if name in loaded and not torch.equal(loaded[name].to(value.dtype), value)
        ]
        print(f"speculators   {case['kind']:<11} {'; '.join(problems) or f'loaded, {len(held)} tensors equal'}")
        wrong += bool(problems)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
