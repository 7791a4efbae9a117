"""`python with_speculators.py RECORD OUT...`: the library whose layout vLLM reads loads what `make.py` exported.

Nothing may be missing, left over or misshapen, and every number must be what the file holds.  (What it computes is not
compared: its forward is for training.)  Exit code 1 and a line for each that is not so.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

from record import Engine, Found, make_row, record, tell
from safetensors.torch import load_file
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.dspark.core import DSparkDraftModel
from transformers.utils import logging


def main(path: Path, outs: list[Path]) -> int:
    logging.disable_progress_bar()
    engine = Engine("speculators", version("speculators"), "speculators", "tensors as they load")
    rows = []
    for out in outs:
        for case in json.loads((out / "cases.json").read_text()):
            if "speculators" in case["layouts"] and case["same"]:
                rows.append(tell(make_row(engine, out.name, case, load(out / "speculators" / case["kind"]))))
    return record(path, rows)


def load(folder: Path) -> Found:
    """What the library makes of a folder, against what is in it."""
    settings, held = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    kind = DSparkDraftModel if settings["speculators_model_type"] == "dspark" else DFlashDraftModel
    model, report = kind.from_pretrained(folder, output_loading_info=True)
    problems = [f"{name}: {sorted(found)}" for name, found in report.items() if found]
    loaded, worst = model.state_dict(), 0.0
    for name, value in held.items():
        if name not in loaded or loaded[name].shape != value.shape:
            problems.append(f"'{name}' is not there as it should be")
            continue
        far = float((loaded[name].to(value.dtype).float() - value.float()).abs().max())
        worst = max(worst, far)
        problems += [f"'{name}' differs by {far:.2g}"] if far != 0 else []
    return Found(worst=worst, problems=problems)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]))
