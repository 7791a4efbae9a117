"""The Hugging Face adapter: exact, ragged, rolled back, and the same bits whatever is computed beside a row."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import tiny
import torch
from rows import bits_depend_on_width, check_bits_of_a_row, check_taken_back, fill, random_ids
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

from blockdraft.cache import KVCache
from blockdraft.targets.attention import Step, attend, attend_batched, neighbours
from blockdraft.targets.hf import HFTarget


@torch.no_grad()
def reference(model, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Transformers' own forward without a cache: logits [S, V] and hidden states [S, D] by layer."""
    out = model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
    return out.logits[0], [state[0] for state in out.hidden_states]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_ragged_rows_equal_the_model_without_a_cache(kind: str, pack: bool) -> None:
    model, target = tiny.tiny_model(kind), tiny.tiny_target(kind, pack=pack)
    taps = (0, 2)
    target.set_taps(taps)
    texts = [random_ids(length, seed=length) for length in (75, 14, 130)]
    cache, rows, width = target.new_cache(4, 160), [3, 0, 2], 9
    for row, text in zip(rows, texts, strict=True):
        fill(target, cache, row, text[:-width], (3,))
    out = target.forward(torch.stack([text[-width:] for text in texts]), cache, rows)
    assert cache.lengths == [14, 0, 130, 75]
    for b, text in enumerate(texts):
        logits, states = reference(model, text)
        torch.testing.assert_close(out.logits[b], logits[-width:], rtol=1e-5, atol=5e-5)
        for t, tap in enumerate(taps):
            torch.testing.assert_close(out.taps[b, :, t], states[tap + 1][-width:], rtol=1e-5, atol=5e-5)


def test_a_window_shorter_than_the_text_matters() -> None:
    """Negative control of the test above: without the window the same weights answer differently."""
    ids = random_ids(40)
    windowed, _ = reference(tiny.tiny_mistral(), ids)
    full, _ = reference(tiny.tiny_mistral(sliding_window=None), ids)
    assert (windowed - full)[20:].abs().max() > 0.1


def test_logits_are_far_from_ties() -> None:
    logits, _ = reference(tiny.tiny_llama(), random_ids(200))
    best = logits.topk(2, dim=-1).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-4


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_taken_back_is_as_if_never_written(kind: str) -> None:
    check_taken_back(tiny.tiny_target(kind))


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_bits_of_a_row_do_not_depend_on_what_is_beside_it(kind: str) -> None:
    """The lengths cross the points where the CPU's products change their order of summation."""
    check_bits_of_a_row(tiny.tiny_target(kind), (5, 61, 380, 446, 510, 955))


def test_without_packed_layers_bits_do_depend_on_it() -> None:
    """Negative control of the test above: it can fail."""
    assert bits_depend_on_width(tiny.tiny_target(pack=False, hidden_size=64))


def test_attention_in_one_call_equals_attention_row_by_row() -> None:
    """The path of devices other than the CPU, on the CPU: rows of other lengths, windows, bounded scores, sinks."""
    cache = KVCache(1, 4, 256, 2, 16, torch.float32, torch.device("cpu"))
    cache.keys[0].normal_()
    cache.values[0].normal_()
    cache.lengths = [3, 70, 200, 0]
    query = torch.randn(3, 4, 5, 16)
    kinds: list[dict[str, Any]] = [{}, {"softcap": 2.0}, {"s_aux": torch.randn(4)}]
    for rows, window, kind in itertools.product(([2, 3, 1], [0, 1, 2]), (None, 6), kinds):
        step, other = (Step(cache, rows, 5, torch.float32, torch.device("cpu")) for _ in range(2))
        module, memory = torch.nn.Module(), (cache.keys[0], cache.values[0])
        options = {"scaling": 0.3, "sliding_window": window, **kind}
        expected, _ = attend(module, query, *memory, None, blockdraft=step, **options)
        slots = max(run[3] for run in other.runs)
        shape = neighbours(rows), slots, other.batch_mask(window, slots), 0.3
        found = attend_batched(query, *memory, *shape, kind.get("softcap"), kind.get("s_aux"))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_greedy_text_equals_generate() -> None:
    model, target, prompt = tiny.tiny_qwen3_mixed(), tiny.tiny_target("qwen3-mixed"), random_ids(11)
    model.generation_config.eos_token_id = None
    expected = model.generate(prompt[None], max_new_tokens=40, do_sample=False)[0, 11:]
    assert len(expected) == 40
    cache = target.new_cache(1, 64)
    token = fill(target, cache, 0, prompt)[-1].argmax()
    tokens = [token]
    for _ in range(39):
        token = target.forward(token.view(1, 1), cache, [0]).logits[0, 0].argmax()
        tokens.append(token)
    assert torch.stack(tokens).tolist() == expected.tolist()


def test_only_the_last_logits_are_made_when_so_asked() -> None:
    target, text = tiny.tiny_target(), random_ids(2, 20)
    cache = target.new_cache(2, 64)
    full = target.forward(text, cache, [0, 1]).logits
    cache.truncate([0, 1], [0, 0])
    last = target.forward(text, cache, [0, 1], keep_logits=3).logits
    assert torch.equal(last, full[:, -3:])


def test_taps_can_be_changed_and_are_checked() -> None:
    target, text = tiny.tiny_target(), random_ids(1, 6)
    cache = target.new_cache(1, 64)
    assert target.forward(text, cache, [0]).taps is None
    target.set_taps([3, 1])
    assert target.forward(text, cache, [0]).taps.shape == (1, 6, 2, 32)
    target.set_taps([])
    assert target.forward(text, cache, [0]).taps is None
    for bad in (-1, 4):
        with pytest.raises(ValueError, match="is not a layer of tiny-llama"):
            target.set_taps([bad])


def test_embeddings_and_head_are_the_models_own() -> None:
    for tied in (True, False):
        model, target = tiny.tiny_llama(tie_word_embeddings=tied), tiny.tiny_target(tie_word_embeddings=tied)
        ids, hidden = random_ids(2, 3), torch.randn(2, 3, 32)
        assert torch.equal(target.embed(ids), model.get_input_embeddings()(ids))
        assert torch.equal(target.head_rows(), model.lm_head.weight)
        assert torch.equal(target.head_rows(ids[0]), model.lm_head.weight[ids[0]])
        torch.testing.assert_close(target.head(hidden), model.lm_head(hidden), rtol=1e-5, atol=1e-5)


def test_training_can_use_what_a_forward_returns() -> None:
    target = tiny.tiny_target()
    target.set_taps([0])
    weight = torch.ones(32, requires_grad=True)
    (target.forward(random_ids(1, 4), target.new_cache(1, 64), [0]).taps * weight).sum().backward()
    assert weight.grad is not None


def test_every_end_of_sequence_id_counts() -> None:
    model = tiny.tiny_llama()
    model.generation_config.eos_token_id = [7, 5]
    assert HFTarget(model, "tiny").info.eos_token_ids == (1, 5, 7)
    assert tiny.tiny_target().info.eos_token_ids == (1,)
    assert HFTarget(tiny.tiny_llama(), "tiny", eos_token_ids=[9, 9]).info.eos_token_ids == (9,)


def test_a_context_that_does_not_fit_is_refused_and_nothing_is_written() -> None:
    target = tiny.tiny_target()
    cache = target.new_cache(2, 16)
    fill(target, cache, 0, random_ids(14))
    with pytest.raises(ValueError, match="context of 17 tokens does not fit the 16 of a slot"):
        target.forward(random_ids(2, 3), cache, [1, 0])
    assert cache.lengths == [14, 0]
    with pytest.raises(ValueError, match="a context of 4096 tokens exceeds the 2048 of tiny-llama"):
        target.new_cache(1, 4096)


def test_rotary_that_depends_on_the_longest_row_limits_the_context() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 128}
    assert tiny.tiny_target(rope_parameters=rope).info.max_context == 128


def test_other_architectures_are_served_or_refused_never_wrong() -> None:
    """GPT-2: learned positions, one key/value head per query head, layers named differently."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2, n_positions=256, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval()
    text = random_ids(90)
    logits, _ = reference(model, text)
    target = HFTarget(model, "gpt2")
    torch.testing.assert_close(fill(target, target.new_cache(1, 128), 0, text, (40, 1)), logits, rtol=1e-5, atol=5e-5)


def test_a_recurrent_model_is_refused() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4))
    with pytest.raises(ValueError, match=r"^MambaForCausalLM .*support"):
        HFTarget(model, "mamba")


def test_layers_of_another_kind_are_refused() -> None:
    for kind, reason in (("conv", "layers of kind conv"), ("linear_attention", "is not a gated delta net")):
        model = tiny.tiny_llama()
        model.config.layer_types = ["full_attention", kind] * 2
        with pytest.raises(ValueError, match=reason):
            HFTarget(model, "hybrid")


def test_a_model_that_differs_through_the_cache_is_refused() -> None:
    """A model that ignores explicit positions would be silently wrong; here it is noticed."""
    model = tiny.tiny_llama()
    forward = model.model.forward
    model.model.forward = lambda **inputs: forward(**{**inputs, "position_ids": inputs["position_ids"] * 0}
                                                   if inputs["position_ids"] is not None else inputs)  # fmt: skip
    with pytest.raises(ValueError, match="differs from itself"):
        HFTarget(model, "wrong")


def test_a_layers_weights_are_the_models_own_though_packed():
    model = tiny.tiny_model("qwen3")
    expected = {name: value.clone() for name, value in model.model.layers[2].state_dict().items()}
    found = HFTarget(model, "tiny").layer_weights(2)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_drafter_takes_over_the_targets_shape():
    defaults = tiny.tiny_target("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e4}).draft_defaults()
    assert defaults == {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e4,
        "max_position_embeddings": 2048,
    }
