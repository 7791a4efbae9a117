"""What the README says works: its commands parse and run, its Python runs, its table is what results/ holds."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import save_tiny_drafter, save_tiny_target

from blockdraft.bench import anatomy, passes, peers, report
from blockdraft.bench.ablation import arm_recipes, part_keys
from blockdraft.bench.ablation_table import load_results, render
from blockdraft.cli import main
from blockdraft.config import load_ablation

ROOT = Path(__file__).parent.parent
NAMED = ("training", "ablations", "doctor", "performance", "targets", "formats")
TEXTS = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in NAMED))
DRAFTER = ROOT / "src" / "blockdraft" / "assets" / "smollm2-135m-dflash"


def blocks(path: Path, language: str) -> list[str]:
    """Fenced blocks of one language."""
    found: list[str] = []
    opened: str | None = None
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            if opened is None:
                opened = line.removeprefix("```")
                found += [""] if opened == language else []
            else:
                opened = None
        elif opened == language:
            found[-1] += line + "\n"
    assert opened is None, "a fence is not closed"
    return found


def commands() -> list[list[str]]:
    """Every `blockdraft ...` line of the README, as words."""
    lines = [line for block in blocks(ROOT / "README.md", "sh") for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [line for line in words if line and line[0] == "blockdraft"]


def run(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return int(left.value.code or 0)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where the README's names exist, small: data, prompts, models, a recipe."""
    monkeypatch.chdir(tmp_path)
    save_tiny_target(tmp_path / "target")
    save_tiny_drafter(tmp_path / "drafter")
    (tmp_path / "DATA").mkdir()
    (tmp_path / "DATA" / "gsm8k_test.jsonl").write_text('{"question": "1 + 1?"}\n{"question": "2 + 3?"}\n')
    (tmp_path / "DATA" / "mt_bench.jsonl").write_text('{"question_id": 1, "turns": ["Hi?", "Once more."]}\n')
    questions = [f'{{"prompt": "What is {n} + {n}?"}}\n' for n in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(questions))
    (tmp_path / "recipes").mkdir()
    return tmp_path


def shrink(words: list[str]) -> list[str]:
    """The same command for tiny models."""
    words = words[1:]
    if words[0] in ("generate", "bench", "regenerate"):
        words = [*words, "--target", "target"]
    if words[0] in ("generate", "bench"):
        words = [*words, "--drafter", "drafter"]
    for option, small in (("--max-tokens", "24"), ("--limit", "2"), ("--target", "target")):
        if option in words:
            words[words.index(option) + 1] = small
    return words


def test_the_commands_run_on_tiny_models(stage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the README's order, because later lines use what earlier ones made."""
    lines = commands()
    assert {line[1] for line in lines} == {"generate", "info", "bench", "regenerate", "train", "doctor"}
    for line in lines:
        if line[1] == "train":
            recipe = stage / line[2]
            recipe.write_text(
                "target: target\nsteps: 3\nbatch_size: 2\nanchors: 4\n"
                "eval_steps: 2\neval_prompts: 2\neval_max_tokens: 8\n"
                "data: {files: [answers.jsonl], held_out: 0.2, min_answer_tokens: 4}\n"
                "drafter: {num_layers: 1, block_size: 4, num_taps: 1}\n"
            )
        # A random target may say anything, a mask token too, and the doctor then says so by its exit code.
        allowed = (0, 1) if line[1] == "doctor" else (0,)
        assert run(shrink(line)) in allowed, (line, capsys.readouterr().err)
    assert (stage / "results" / "bench-gsm8k-t0.json").is_file()


def test_every_option_that_is_mentioned_exists(capsys: pytest.CaptureFixture[str]) -> None:
    helps = {}
    for path in TEXTS:
        for words in re.findall(
            r"blockdraft (generate|train|regenerate|bench|choices|ablate|check|export|import|command)([^\n`]*)",
            path.read_text(encoding="utf-8"),
        ):
            if words[0] not in helps:
                assert run([words[0], "--help"]) == 0
                helps[words[0]] = capsys.readouterr().out
            for option in re.findall(r"--[a-z-]+", words[1]):
                assert option in helps[words[0]], (words[0], option)


def test_make_has_what_the_texts_say() -> None:
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set()
    for path in (*TEXTS, ROOT / "CONTRIBUTING.md"):
        named |= set(re.findall(r"(?:^|`)make ([a-z-]+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert {"demo", "test", "test-slow", "format"} <= named
    for name in named:
        assert re.search(rf"^{name}:", rules, re.MULTILINE), name


def test_the_file_tree_is_true() -> None:
    (tree,) = [block for block in blocks(ROOT / "README.md", "") if block.startswith("src/blockdraft/")]
    for line in tree.splitlines()[1:]:
        name = line.split()[0]
        path = ROOT / "src" / "blockdraft" / name if line.startswith("  ") else ROOT / name
        assert path.exists(), name


def test_links_lead_somewhere() -> None:
    for path in (*TEXTS, ROOT / "CONTRIBUTING.md", ROOT / "docs" / "ARCHITECTURE.md"):
        for link in re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
            assert link.startswith("https://") or (path.parent / link).exists(), (path.name, link)


def test_the_table_of_parity_is_what_results_hold(tmp_path: Path) -> None:
    page, copy = ROOT / "docs" / "formats.md", tmp_path / "formats.md"
    copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    script = ROOT / "tests" / "parity" / "record.py"
    subprocess.run([sys.executable, script, copy, ROOT / "results" / "parity.json"], check=True)
    assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


def test_the_table_is_what_results_hold(tmp_path: Path) -> None:
    files = sorted((ROOT / "results").glob("bench-*.json"))
    if not files:
        assert "Not measured yet." in (ROOT / "README.md").read_text(encoding="utf-8")
        return
    copy = tmp_path / "README.md"
    copy.write_text((ROOT / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    report.update_readme(copy, files)
    assert copy.read_text(encoding="utf-8") == (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("output", "steps"), [("ablations", 60), ("ablations-100-steps", 100)])
def test_the_ablations_are_what_results_hold(output: str, steps: int) -> None:
    """A table is what its arms' files make, and every row of the document's stands in it."""
    folder = ROOT / "results" / output / "ablation-smollm2"
    made = (folder / "table.md").read_text(encoding="utf-8").splitlines()
    overrides = "base.data.files=[answers.jsonl]", f"steps={steps}"
    config = load_ablation(ROOT / "recipes" / "ablation-smollm2.yaml", overrides)
    results = load_results(folder, config, arm_recipes(config))
    assert render(results, list(config.arms), part_keys(config)).splitlines() == made
    if steps == 60:
        text = (ROOT / "docs" / "ablations.md").read_text(encoding="utf-8")
        shown = text.partition("<!-- results: begin -->")[2].partition("<!-- results: end -->")[0].strip().splitlines()
        assert len(shown) == 2 + len(config.arms) == 2 + len(results) and set(shown) <= set(made)


def test_the_other_engines_are_what_results_hold(tmp_path: Path) -> None:
    document = ROOT / "docs" / "performance.md"
    text = document.read_text(encoding="utf-8")
    files = sorted((ROOT / "results").glob("peers*.json"))
    if not files:
        assert "<!-- peers: begin -->\nNot measured yet.\n<!-- peers: end -->" in text
        return
    copy = tmp_path / "performance.md"
    copy.write_text(text, encoding="utf-8")
    peers.update(copy, files)
    assert copy.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(("name", "table"), [("kernel", passes.table), ("profile", anatomy.table)])
def test_what_passes_and_rounds_take_is_what_results_hold(name: str, table: Callable[[dict[str, Any]], str]) -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    shown = text.partition(f"<!-- {name}: begin -->")[2].partition(f"<!-- {name}: end -->")[0].strip()
    assert shown == table(json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8")))


def python_example(replace: Callable[[str], str] = str) -> str:
    (code,) = blocks(ROOT / "README.md", "python")
    return replace(code)


def test_the_python_example_runs_on_tiny_models(stage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = python_example(lambda text: text.replace('"smollm2-135m"', '"target"').replace('+auto"', '+drafter"'))
    assert '"target"' in code and '+drafter"' in code
    exec(compile(code, "README.md", "exec"), {})
    assert "passes, tau" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(not (DRAFTER / "config.json").is_file(), reason="no shipped drafter in this checkout")
def test_the_python_example_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(python_example(), "README.md", "exec"), {})
    assert "passes, tau" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(not (DRAFTER / "config.json").is_file(), reason="no shipped drafter in this checkout")
def test_the_demo_is_identical(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--demo", "--compare", "--max-tokens", "48"]) == 0
    assert "NOT IDENTICAL" not in capsys.readouterr().out
