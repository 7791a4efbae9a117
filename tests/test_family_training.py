"""A drafter for a target with experts and for a hybrid: trained for a few steps, it drafts losslessly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import tiny_family
from training import recipe, run

from blockdraft.config import ConfigError, SamplingParams
from blockdraft.engine.api import LLM

PROMPTS = ["count 3", "a much longer text than that", "b"]


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3.5"])
def test_a_drafter_is_trained_and_drafts_losslessly(name: str, tmp_path: Path) -> None:
    config = recipe(tmp_path, steps=4)
    tiny_family(name, vocab_size=272).save_pretrained(config.target)  # in the Llama's place, with its tokenizer
    assert run(config, tmp_path / "run").finished
    plain, drafted = (
        LLM(config.target, drafter, slots=2, capacity=128, verify_width=None)
        for drafter in (None, tmp_path / "run" / "last")
    )
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=20, temperature=temperature, seed=3, ignore_eos=True)
        expected, found = (llm.generate(PROMPTS, params) for llm in (plain, drafted))
        assert [output.token_ids for output in found] == [output.token_ids for output in expected]
        assert all(output.stats.drafted > 0 for output in found)


@pytest.mark.parametrize(
    ("name", "layers", "reason"),
    [
        ("qwen3-moe", {"num_hidden_layers": 6}, r"layer \d of the target has no 'mlp.gate_proj.weight'"),
        (
            "qwen3.5",
            {"num_hidden_layers": 6, "layer_types": ["linear_attention", "full_attention"] * 3},
            r"layer \d of the target has no 'self_attn.q_proj.weight'|'self_attn.q_proj.weight' is \[128, 32\]",
        ),
    ],
)
def test_layers_of_another_shape_cannot_be_copied(name: str, layers: Any, reason: str, tmp_path: Path) -> None:
    config = recipe(tmp_path, drafter={"init": "target"})
    tiny_family(name, vocab_size=272, **layers).save_pretrained(config.target)
    with pytest.raises(ConfigError, match=f"^drafter.init=target: .*({reason})") as error:
        run(config, tmp_path / "run")
    assert "\n" not in str(error.value)
