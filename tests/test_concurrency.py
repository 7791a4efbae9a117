"""Rates by requests at once: whole groups at every level, one line for each, and a command that writes both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models import save_tiny_drafter, save_tiny_target

from blockdraft.bench.concurrency import markdown, prompts_at
from blockdraft.cli import main
from blockdraft.cli.concurrency import parse_slots

ROOT = Path(__file__).parent.parent


def test_slots_are_filled_to_the_last() -> None:
    for level in range(1, 9):
        for limit in range(1, 20):
            count = prompts_at(level, limit)
            assert count % level == 0 and limit <= count < limit + level


def test_slots_are_numbers_that_rise() -> None:
    assert parse_slots("8") == [8] and parse_slots("1,4,32") == [1, 4, 32]
    for text in ("", "0", "4,1", "2,2", "1,x", "1,,2", "-1"):
        with pytest.raises(ValueError, match="--slots"):
            parse_slots(text)


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_the_command_measures_level_by_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], temperature: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "cache"))
    save_tiny_target(tmp_path / "target")
    save_tiny_drafter(tmp_path / "drafter")
    (tmp_path / "few.jsonl").write_text("".join(f'{{"prompt": "What is {n} + {n}?"}}\n' for n in range(9)))
    words = ["bench", "--dataset", "few.jsonl", "--target", "target", "--drafter", "drafter", "--max-tokens", "12"]
    words += ["--arms", "plain,drafted", "--slots", "1,2,4", "--limit", "3", "--temperature", temperature]
    with pytest.raises(SystemExit) as left:
        main([*words, "--repeats", "2"])
    assert not left.value.code, capsys.readouterr().err
    result = json.loads((tmp_path / "results" / f"concurrency-few-t{temperature}.json").read_text())
    assert result["complete"] and result["setup"]["slots"] == [1, 2, 4]
    assert [(level["slots"], level["prompts"]) for level in result["levels"]] == [(1, 3), (2, 4), (4, 4)]
    lengths = []
    for level in result["levels"]:
        plain, drafted = level["arms"]
        assert drafted["identical"] and drafted["compared_answers"] == level["prompts"]
        assert level["ratios"]["drafted/plain"]["total"] == pytest.approx(
            drafted["tokens_per_second"]["total"] / plain["tokens_per_second"]["total"], abs=2e-3
        )
        (row,) = level["rows"]
        assert len(row["arms"]["plain"]["seconds"]) == 2
        lengths.append(row["arms"]["plain"]["tokens"][:3])
    assert lengths[0] == lengths[1] == lengths[2], "the same answers at every level"
    lines = markdown([result]).splitlines()
    assert [line.split(" | ")[1] for line in lines[2:5]] == ["1", "2", "4"]
    assert f"{result['levels'][2]['ratios']['drafted/plain']['total']:.2f}x" in lines[4]
    with pytest.raises(ValueError, match="not finished"):
        markdown([{**result, "complete": False}])


def test_the_document_has_what_results_hold() -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- concurrency: begin -->\n")[2].partition("\n<!-- concurrency: end -->")[0]
    files = sorted((ROOT / "results").glob("concurrency-*.json"))
    assert shown == (
        markdown([json.loads(file.read_text(encoding="utf-8")) for file in files]) if files else "Not measured yet."
    )
