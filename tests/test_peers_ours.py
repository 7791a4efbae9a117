"""Our own worker beside other engines: three ways to decode, over the weights that it was told to keep."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import save
from models import save_tiny_target
from tiny import tiny_llama

from blockdraft.ops.kernel import library

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks" / "peers"))

import ours


@pytest.mark.parametrize(
    ("arm", "weights"),
    [
        ("blockdraft", None),
        pytest.param(
            "blockdraft-f16", "float16", marks=pytest.mark.skipif(library() is None, reason="no compiled kernel")
        ),
    ],
)
def test_three_arms_say_the_same(
    arm: str, weights: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", "somebody's")
    loaded: list[Any] = []
    load_target = ours.load_target
    monkeypatch.setattr(ours, "load_target", lambda *a, **b: loaded.append(load_target(*a, **b)) or loaded[-1])
    folder = tmp_path / "target"
    save_tiny_target(folder)
    tiny_llama(vocab_size=272, eos_token_id=271, num_hidden_layers=5).save_pretrained(folder)
    drafter = save(tmp_path / "drafter", "plain", num_target_layers=5)
    settings = {"threads": 1, "room": 64, "target": str(folder), "drafter": str(drafter)}
    arms, told = ours.load({**settings, "arm": arm, "weights": weights, "cache": str(tmp_path / "cache")})
    assert list(arms) == [arm, f"{arm}-dflash", f"{arm}-auto"] and set(told["versions"]) == {"blockdraft", "torch"}
    assert [target.info.storage for target in loaded] == [None if weights is None else torch.float16]
    assert os.environ["BLOCKDRAFT_CACHE"] == str(tmp_path / "cache")  # where passes that were timed are remembered
    plain, drafted, auto = (answer([7, 11, 5, 3, 9], 12, [271]) for answer in arms.values())
    assert plain["tokens"] == drafted["tokens"] == auto["tokens"] and len(plain["tokens"]) > 1
    assert plain["rounds"] == 0 < drafted["rounds"] and drafted["round_tokens"] == len(plain["tokens"]) - 1
    assert all(0 < one["decode_tokens"] < len(one["tokens"]) for one in (plain, drafted, auto))
