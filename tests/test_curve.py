"""The curve of a run: what is read from the log, and that an image comes of it."""

import json
import sys

import pytest

from blockdraft.bench.curve import draw, read_log

ROWS = [
    {"step": 5, "loss": 6.0, "tau_chain": 1.2},
    {"step": 10, "loss": 4.0, "tau_chain": 1.5},
    {"step": 10, "eval": {"tau": 1.6}},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_training_and_evaluation_rows_are_told_apart(tmp_path):
    training, evaluations = read_log(write(tmp_path / "log.jsonl", ROWS))
    assert [row["step"] for row in training] == [5, 10] and [row["eval"]["tau"] for row in evaluations] == [1.6]


def test_a_file_that_is_no_log_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"log\.jsonl:1: not a line of a training log"):
        read_log(write(tmp_path / "log.jsonl", ["text"]))
    with pytest.raises(ValueError, match="no training step"):
        read_log(write(tmp_path / "empty.jsonl", []))


def test_an_image_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    draw(write(tmp_path / "log.jsonl", ROWS), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_matplotlib_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'blockdraft\[bench\]'"):
        draw(write(tmp_path / "log.jsonl", ROWS), tmp_path / "curve.png")
