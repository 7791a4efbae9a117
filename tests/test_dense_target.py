"""Our own layers: the numbers of transformers' and of its hidden states, and a row's bits whatever is beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from models import save_tiny_target
from rows import bits_depend_on_width, check_bits_of_a_row, check_taken_back, fill, random_ids
from torch import Tensor
from transformers import PreTrainedModel

from blockdraft.engine.api import LLM
from blockdraft.targets.dense import DenseTarget, obstacle
from blockdraft.targets.hf import HFTarget
from blockdraft.targets.resolve import load_target

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
# name -> (kind, what is different about it)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-mixed": ("qwen3-mixed", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "one head": ("llama", {"num_key_value_heads": 4}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "linear": ("qwen2", {"rope_parameters": LINEAR}),
    "yarn": ("qwen3", {"rope_parameters": YARN}),
}


def model(name: str) -> PreTrainedModel:
    """One of `MODELS`, with norms and biases that are not the ones and zeros of a fresh model."""
    kind, overrides = MODELS[name]
    made = tiny.tiny_model(kind, **overrides)
    generator = torch.Generator().manual_seed(5)
    for parameter in made.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return made


def dense(name: str, **options: Any) -> DenseTarget:
    return DenseTarget(model(name), name, **options)


def difference(target: DenseTarget, reference: PreTrainedModel) -> float:
    """The largest over logits and taps of three ragged rows, as a share of transformers' own largest number."""
    taps = (2, 0, 3, 2)
    target.set_taps(taps)
    texts = [random_ids(length, seed=length) for length in (75, 14, 130)]
    cache, rows, width = target.new_cache(4, 160), [3, 0, 2], 9
    for row, text in zip(rows, texts, strict=True):
        fill(target, cache, row, text[:-width], (3,))
    out = target.forward(torch.stack([text[-width:] for text in texts]), cache, rows)
    assert cache.lengths == [14, 0, 130, 75]
    assert out.taps is not None and out.taps.shape == (3, width, len(taps), 32)
    pairs: list[tuple[Tensor, Tensor]] = []
    layers: list[Tensor] = []  # not `hidden_states`: its last one is behind the final norm
    for layer in reference.model.layers:
        layer.register_forward_hook(lambda _module, _inputs, output: layers.append(output[0]))
    for b, text in enumerate(texts):
        layers.clear()
        with torch.no_grad():
            own = reference(input_ids=text[None], use_cache=False, output_hidden_states=True)
        assert torch.equal(own.hidden_states[1][0], layers[0])
        pairs.append((out.logits[b], own.logits[0, -width:]))
        pairs += [(out.taps[b, :, t], layers[tap][-width:]) for t, tap in enumerate(taps)]
    return max(float((found - expected).abs().max() / expected.abs().max()) for found, expected in pairs)


@pytest.mark.parametrize("name", MODELS)
def test_ragged_rows_equal_transformers_own(name: str) -> None:
    assert difference(dense(name), model(name)) < 1e-4


def test_without_packed_layers_the_numbers_are_the_same() -> None:
    assert difference(dense("qwen3-mixed", pack=False), model("qwen3-mixed")) < 1e-4


@pytest.mark.parametrize(
    ("name", "other"), [("llama3", "llama"), ("yarn", "qwen3"), ("qwen3-mixed", "qwen3"), ("qwen2", "linear")]
)
def test_what_differs_between_models_matters(name: str, other: str) -> None:
    """Negative control of the test above: rotary scaling and windows change the numbers it compares."""
    assert difference(dense(name), model(other)) > 0.01


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3-mixed", "llama3"])
def test_the_bits_of_a_row_do_not_depend_on_what_is_beside_it(name: str) -> None:
    check_bits_of_a_row(dense(name), (5, 61, 446))


def test_without_packed_layers_bits_do_depend_on_it() -> None:
    """Negative control of the test above: it can fail."""
    assert bits_depend_on_width(DenseTarget(tiny.tiny_llama(hidden_size=64), "tiny", pack=False))


def test_taken_back_is_as_if_never_written() -> None:
    check_taken_back(dense("qwen3-mixed"))


def test_only_the_last_logits_are_made_when_so_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    target, text = dense("llama"), random_ids(2, 20)
    cache = target.new_cache(2, 64)
    full = target.forward(text, cache, [0, 1]).logits
    cache.truncate([0, 1], [0, 0])
    shapes, head = [], target.head
    monkeypatch.setattr(target, "head", lambda hidden: (shapes.append(hidden.shape), head(hidden))[1])
    assert torch.equal(target.forward(text, cache, [0, 1], keep_logits=3).logits, full[:, -3:])
    assert shapes == [(2, 3, 32)]


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "biases", "tied"])
def test_what_training_takes_over_is_the_models_own(name: str) -> None:
    own, target = model(name), dense(name)
    expected = own.model.layers[2].state_dict()
    found = target.layer_weights(2)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    ids, hidden = random_ids(2, 3), torch.randn(2, 3, 32)
    assert torch.equal(target.embed(ids), own.get_input_embeddings()(ids))
    assert torch.equal(target.head_rows(ids[0]), own.lm_head.weight[ids[0]])
    torch.testing.assert_close(target.head(hidden), own.lm_head(hidden), rtol=1e-5, atol=1e-5)
    other = HFTarget(own, name)
    assert (target.info, target.draft_defaults()) == (other.info, other.draft_defaults())


def test_taps_are_checked_and_can_be_trained_on() -> None:
    target = dense("llama")
    cache, text = target.new_cache(1, 64), random_ids(1, 6)
    assert target.forward(text, cache, [0]).taps is None
    with pytest.raises(ValueError, match="tap 4 is not a layer of llama"):
        target.set_taps([4])
    target.set_taps([0])
    weight = torch.ones(32, requires_grad=True)
    (target.forward(text, cache, [0]).taps * weight).sum().backward()
    assert weight.grad is not None
    with pytest.raises(ValueError, match="context of 65 tokens does not fit the 64 of a slot"):
        target.forward(random_ids(1, 53), cache, [0])
    assert cache.lengths == [12]


def test_half_precision_is_close() -> None:
    target, own = DenseTarget(model("qwen3").bfloat16(), "half"), model("qwen3")
    text = random_ids(40)
    found = fill(target, target.new_cache(1, 64), 0, text, (30,))
    assert found.dtype == torch.bfloat16
    expected = own(input_ids=text[None]).logits[0]
    assert (found.float() - expected).norm() / expected.norm() < 0.05


def test_a_model_that_answers_otherwise_is_refused() -> None:
    made = tiny.tiny_llama()
    made.model.norm.register_forward_hook(lambda _module, _inputs, output: output * 1.1)
    with pytest.raises(ValueError, match=r"^LlamaForCausalLM is not supported .* differs from itself by"):
        DenseTarget(made, "wrong")


class CustomLinear(torch.nn.Linear):
    """May compute anything."""


def with_custom_linear() -> PreTrainedModel:
    made = tiny.tiny_llama()
    made.model.layers[1].mlp.up_proj.__class__ = CustomLinear
    return made


def with_another_weight() -> PreTrainedModel:
    made = tiny.tiny_llama()
    made.model.layers[1].mlp.up_proj.register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
    return made


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 128}
OBSTACLES = {
    "none of LlamaForCausalLM": tiny.tiny_mistral,
    "activation is gelu": lambda: tiny.tiny_llama(hidden_act="gelu"),
    "rotary positions are of type dynamic": lambda: tiny.tiny_llama(rope_parameters=DYNAMIC),
    "linear layers are not plain": with_custom_linear,
    "mlp.up_proj.scale": with_another_weight,
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_other_models_are_told_apart(reason: str) -> None:
    made = OBSTACLES[reason]()
    assert reason in (obstacle(made) or "")
    with pytest.raises(ValueError, match=rf"is not supported as a target: .*{reason}"):
        DenseTarget(made, "other")


def test_the_loader_takes_our_layers_where_they_are_known(tmp_path: Path) -> None:
    folder = str(save_tiny_target(tmp_path / "llama"))
    assert isinstance(load_target(folder), DenseTarget)
    assert isinstance(load_target(folder, implementation="dense"), DenseTarget)
    assert isinstance(load_target(folder, implementation="hf"), HFTarget)
    assert isinstance(LLM(folder, None, implementation="hf", capacity=64).target, HFTarget)
    with pytest.raises(ValueError, match="implementation 'fast' is not one of auto, dense, hf"):
        load_target(folder, implementation="fast")
    other = str(tmp_path / "mistral")
    tiny.tiny_mistral().save_pretrained(other)
    assert isinstance(load_target(other), HFTarget)
    with pytest.raises(ValueError, match="MistralForCausalLM is not supported"):
        load_target(other, implementation="dense")
