"""The questions a benchmark asks: the papers' data sets with the papers' wording, or any JSONL file.

A data set comes from a local folder of JSONL files, or through the optional `datasets` library.  Order is the data
set's own, so the first N prompts are the same N on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from blockdraft.text import read_jsonl

STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
WRITE_CODE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
SOLVE_IN_PYTHON = (
    "You are an expert Python programmer. Below is a question with its specification. "
    "Write a correct Python program that meets it and passes all tests, inside a python code fence.\n\n"
)


@dataclass(frozen=True)
class Prompt:
    """One conversation: what the user says, turn by turn."""

    id: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class DataSet:
    """Where a data set lives and how its rows become prompts."""

    file: str  # name inside --data-dir
    hub: tuple[str, str | None, str]  # repository, configuration, split
    fields: tuple[str, ...]  # the first of these that a row has holds the question
    before: str = ""
    after: str = ""
    data_file: str | None = None  # read this file of the repository instead of its configuration


DATASETS = {
    "gsm8k": DataSet("gsm8k_test.jsonl", ("openai/gsm8k", "main", "test"), ("question",), after=STEP_BY_STEP),
    "math500": DataSet("math500.jsonl", ("HuggingFaceH4/MATH-500", None, "test"), ("problem",), after=STEP_BY_STEP),
    "aime25": DataSet("aime25.jsonl", ("MathArena/aime_2025", None, "train"), ("problem",), after=STEP_BY_STEP),
    "humaneval": DataSet(
        "humaneval.jsonl", ("openai/openai_humaneval", None, "test"), ("prompt",), before=WRITE_CODE, after="```"
    ),
    "mbpp": DataSet("mbpp_test.jsonl", ("google-research-datasets/mbpp", "sanitized", "test"), ("prompt", "text")),
    "mt-bench": DataSet("mt_bench.jsonl", ("HuggingFaceH4/mt_bench_prompts", None, "train"), ("turns", "prompt")),
    "livecodebench": DataSet(
        "livecodebench.jsonl",
        ("livecodebench/code_generation_lite", None, "train"),
        ("question_content",),
        before=SOLVE_IN_PYTHON,
        data_file="test.jsonl",
    ),
}


def load_prompts(name: str, data_dir: Path | None = None, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a data set by name, or of a JSONL file with `prompt`, `question` or `turns`.

    Raises ValueError: an unknown name, a missing file, a row without a question, no `datasets` library, no network.
    """
    if name in DATASETS:
        spec = DATASETS[name]
        rows = _hub_rows(name, spec) if data_dir is None else _file_rows(data_dir / spec.file)
    elif Path(name).suffix in {".jsonl", ".json"} or Path(name).exists():
        spec = DataSet(name, ("", None, ""), ("turns", "prompt", "question"))
        rows = _file_rows(Path(name))
    else:
        raise ValueError(f"unknown data set '{name}' (known: {', '.join(DATASETS)}, or a JSONL file)")
    prompts = [_to_prompt(row, where, name, spec) for where, row in islice(rows, limit)]
    if not prompts:
        raise ValueError(f"{name}: no prompts in it")
    return prompts


def _to_prompt(row: dict[str, Any], where: str, name: str, spec: DataSet) -> Prompt:
    field = next((field for field in spec.fields if row.get(field)), None)
    if field is None:
        raise ValueError(f"{where}: needs one of the keys {', '.join(spec.fields)}")
    value = row[field]
    turns = [value] if isinstance(value, str) else value
    if not isinstance(turns, list) or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{where}: '{field}' must be text, or a list of texts")
    # HumanEval's stub ends with a line break already; the fence has to start a line of its own in any case.
    opened = spec.after.startswith("```")
    texts = tuple(spec.before + (turn.rstrip("\n") + "\n" if opened else turn) + spec.after for turn in turns)
    return Prompt(f"{Path(name).stem}-{where.rpartition(':')[2]}", texts)


def _file_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    yield from read_jsonl(path)


def _hub_rows(name: str, spec: DataSet) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"{name} is downloaded with the datasets library: pip install 'blockdraft[bench]', or give --data-dir"
        ) from None
    repository, configuration, split = spec.hub
    try:
        if spec.data_file is None:
            rows: Iterable[dict[str, Any]] = datasets.load_dataset(repository, configuration, split=split)
        else:
            address = f"hf://datasets/{repository}/{spec.data_file}"
            rows = datasets.load_dataset("json", data_files=address, split=split)
    except Exception as error:  # noqa: BLE001  (the library wraps network errors in many classes of its own)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{name}: {repository} could not be loaded ({reason}); give --data-dir") from None
    for number, row in enumerate(rows, start=1):
        yield f"{repository}:{number}", dict(row)
