"""The profile of a round: every product of a pass is found, counted and timed, and the file becomes the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import save_tiny_drafter, save_tiny_target

from blockdraft.bench.anatomy import Part, Speed, calls_of, describe, parts_of_a_round, table
from blockdraft.cli import main
from blockdraft.drafters.checkpoint import load_drafter
from blockdraft.ops.kernel import library
from blockdraft.targets.resolve import load_target


@pytest.mark.parametrize("pack", [True, False])
def test_all_products_and_attentions_of_a_pass_are_found(pack: bool, tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target")
    target = load_target(str(tmp_path / "target"), pack=pack)
    cache = target.new_cache(1, 32)
    calls = calls_of(lambda: target.forward(torch.tensor([[1, 2, 3]]), cache, [0]))
    # qkv, output, gate and up, down of each layer, and the head.
    assert len(calls.products) == 4 * target.info.num_layers + 1
    compiled = pack and library() is not None
    assert len(calls.attentions) == (0 if compiled else target.info.num_layers), "the kernel's are in its layers"
    assert [len(x.view(-1, x.shape[-1])) for _, x in calls.products] == [3] * len(calls.products)
    weights = sum(module.in_features * module.out_features for module, _ in calls.products)
    own = [value for layer in range(target.info.num_layers) for value in target.layer_weights(layer).values()]
    assert weights == sum(value.numel() for value in own if value.dim() == 2) + target.head_rows().numel()
    before = [x.clone() for _, x in calls.products]
    calls.multiply()
    calls.attend()
    assert all(torch.equal(x, y) for (_, x), y in zip(calls.products, before, strict=True))


def test_the_parts_of_a_pass_are_the_pass(tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target")
    save_tiny_drafter(tmp_path / "drafter")
    target = load_target(str(tmp_path / "target"))
    drafter = load_drafter(tmp_path / "drafter", target)
    parts = {part.name: part for part in parts_of_a_round(target, drafter, list(range(3, 60)), 3)}
    verify = f"verify {drafter.max_drafts} drafts"
    assert {"propose", "choose and accept", "observe 2 tokens", "plain pass", verify} <= parts.keys()
    rows = drafter.max_drafts + 1
    assert parts[f"{verify}: products"].multiplications == rows * parts["plain pass: products"].multiplications
    assert parts[f"{verify}: products"].read_bytes == parts["plain pass: products"].read_bytes > 0
    for name in (verify, "plain pass"):
        pieces = [part.seconds for other, part in parts.items() if other.startswith(f"{name}: ")]
        assert len(pieces) == (2 if library() is not None else 3) and sum(pieces) >= parts[name].seconds - 1e-9


def test_the_least_is_what_binds() -> None:
    speed = Speed(1e9, 1e10)
    assert Part("read", 1.0, 2 * 10**9, 10**9).least(speed) == 2.0
    assert Part("multiply", 1.0, 10**8, 3 * 10**10).least(speed) == 3.0
    assert Part("neither", 1.0).least(speed) is None
    report = {
        **describe([Part("read", 4.0, 2 * 10**9, 10**9), Part("neither", 0.25)], 5.0, speed),
        "target": "t",
        "dtype": "float32",
        "drafter": "d",
        "context": 9,
        "machine": {"cpu": "c", "threads": 2},
    }
    assert "| read | 4000.0 | 2000.0 |" in table(report) and "| neither | 250.0 |  |" in table(report)


def test_the_command_writes_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny_target(tmp_path / "target")
    save_tiny_drafter(tmp_path / "drafter")
    monkeypatch.setattr("blockdraft.bench.anatomy.READ_BYTES", 1 << 20)
    words = ["profile", "--target", "target", "--drafter", "drafter", "--context", "40", "--repeats", "2"]
    with pytest.raises(SystemExit) as left:
        main([*words, "--max-tokens", "8", "--output", "out.json"])
    assert not left.value.code
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["parts"][-1]["ms"] > 0 and report["context"] == 40
    with pytest.raises(SystemExit) as left:
        main([*words[:-4], "--context", "100000"])
    assert left.value.code == 2
