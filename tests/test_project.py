"""The project's own rules: layers, what files may say, what the package carries."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT_SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".json", ".jsonl", ".h", ".cpp", ""}
# Paths of somebody's machine.  The brackets keep this file from containing what it looks for.
FORBIDDEN = [re.compile(pattern) for pattern in ("/[w]ork/", "[.]{2}/[s]hared", "/[r]oot/", r"/[h]ome/\w")]


def own_files() -> list[Path]:
    """The files of the checkout that a person wrote, or that are shipped."""
    places = ("src", "tests", "benchmarks", "recipes", "docs", "results", ".ci", "Makefile", "pyproject.toml")
    files = [ROOT / name for name in (*places, "hatch_build.py", *(path.name for path in ROOT.glob("*.md")))]
    found = [path for place in files for path in ([place] if place.is_file() else place.rglob("*"))]
    return [path for path in found if path.is_file() and "__pycache__" not in path.parts]


def lint_imports(folder: Path, config: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "import sys; from importlinter.cli import lint_imports_command; lint_imports_command()",
    ]
    return subprocess.run(
        [*command, "--config", str(config), "--no-cache"],
        cwd=folder,
        env={"PYTHONPATH": str(folder / "src"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_rooms_import_downward_only() -> None:
    done = lint_imports(ROOT, ROOT / "pyproject.toml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("ops/acceptance.py", "from blockdraft.engine import engine"),
        ("drafters/block.py", "import blockdraft.targets.hf"),
        ("train/loop.py", "from blockdraft.engine.engine import Engine"),
        ("engine/step.py", "import transformers"),
        ("bench/report.py", "import fastapi"),
    ],
)
def test_a_forbidden_import_is_found(room: str, line: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("assets", "__pycache__"))
    file = tmp_path / "src" / "blockdraft" / room
    file.write_text(file.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    done = lint_imports(tmp_path, ROOT / "pyproject.toml")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "broken" in done.stdout


def test_no_machine_paths() -> None:
    files = [path for path in own_files() if path.suffix in TEXT_SUFFIXES]
    assert len(files) > 50
    for path in files:
        text = path.read_text(encoding="utf-8")
        for pattern in FORBIDDEN:
            found = pattern.search(text)
            assert found is None, f"{path.relative_to(ROOT)} says {found.group()!r}"


def test_files_stay_readable() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 400, f"{path.relative_to(ROOT)} has {len(lines)} lines"
        if "".join(lines).strip():
            assert lines[0].startswith('"""'), f"{path.relative_to(ROOT)} does not say what it holds"


def test_the_public_names_are_there() -> None:
    import blockdraft

    for name in blockdraft.__all__:
        assert getattr(blockdraft, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = blockdraft.nonsense


def test_one_version() -> None:
    import blockdraft

    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{blockdraft.__version__}"' in text
    assert f"## {blockdraft.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_what_ships_is_small() -> None:
    sizes = {
        path: path.stat().st_size for path in (ROOT / "src" / "blockdraft" / "assets").rglob("*") if path.is_file()
    }
    assert max(sizes.values()) < 45_000_000 and sum(sizes.values()) < 53_000_000
