"""Every family that the papers draft for: transformers' own numbers, and drafted answers that are the target's own."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from cases import LENGTH, Case, references, run_case, shorten, target, untouched
from families import FAMILIES, OTHERS, served, tiny_family
from rows import bits_depend_on_width, check_bits_of_a_row, check_taken_back, fill, random_ids
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockdraft.config import EngineConfig, NgramConfig
from blockdraft.drafters.ngram import NgramDrafter
from blockdraft.engine.profile import measure_costs
from blockdraft.targets import attention, deltanet, experts
from blockdraft.targets.dense import DenseTarget
from blockdraft.targets.hf import HFTarget
from blockdraft.targets.recurrent import Trail
from blockdraft.targets.resolve import load_target

DENSE = ("llama-3.1", "qwen2", "qwen3")
RECURRENT = ("qwen3.5", "qwen3.5-moe", "qwen3-next")
DRAFTERS = ("mixed", "right", "dflash", "dflare", "model", "wrong")


def difference(made: HFTarget | DenseTarget, model: PreTrainedModel) -> float:
    """The largest over logits and taps of three ragged rows, as a share of transformers' own largest number."""
    made.set_taps((0, 1))
    texts = [random_ids(length, seed=length) for length in (75, 14, 130)]
    cache, rows, width = made.new_cache(4, 160), [3, 0, 2], 9
    for row, text in zip(rows, texts, strict=True):
        fill(made, cache, row, text[:-width], (3,))
    out = made.forward(torch.stack([text[-width:] for text in texts]), cache, rows)
    assert cache.lengths == [14, 0, 130, 75] and out.taps is not None
    pairs: list[tuple[Tensor, Tensor]] = []
    taps: list[Tensor] = []  # not `hidden_states`: its last one is behind the final norm
    for layer in model.get_decoder().layers[:2]:
        layer.register_forward_hook(
            lambda _module, _inputs, output: taps.append(output[0] if isinstance(output, tuple) else output)
        )
    for b, text in enumerate(texts):
        taps.clear()
        with torch.no_grad():
            logits = model(input_ids=text[None], use_cache=False).logits[0]
        pairs.append((out.logits[b], logits[-width:]))
        pairs += [(out.taps[b, :, t], taps[t][0, -width:]) for t in (0, 1)]
    return max(float((found - expected).abs().max() / expected.abs().max()) for found, expected in pairs)


@pytest.mark.parametrize("name", FAMILIES)
def test_ragged_rows_equal_transformers_own(name: str) -> None:
    made = target(name)
    assert isinstance(made, DenseTarget if name in DENSE else HFTarget)
    assert difference(made, untouched(name)) < 1e-4
    if name in DENSE:
        assert difference(HFTarget(untouched(name), name), untouched(name)) < 1e-4


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "gemma2", "qwen3.5"])
def test_in_half_precision_the_numbers_are_close(name: str) -> None:
    made, ids = HFTarget(tiny_family(name).bfloat16(), name), random_ids(40)
    with torch.no_grad():
        expected = tiny_family(name).bfloat16()(input_ids=ids[None], use_cache=False).logits[0].float()
    found = fill(made, made.new_cache(1, 64), 0, ids, (30,)).float()
    assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median() < 0.05


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_have_transformers_own_numbers(name: str) -> None:
    made = served(tiny_family(name), name)
    assert isinstance(made, HFTarget) and difference(made, tiny_family(name)) < 1e-4
    check_taken_back(made)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_has_the_same_bits_whatever_is_beside_it_and_is_taken_back(name: str) -> None:
    check_bits_of_a_row(target(name), (5, 61))
    check_taken_back(target(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_drafted_answers_are_the_targets_own(name: str) -> None:
    """Rows of different lengths, temperatures 0 and 1, stops and limits inside blocks, more requests than slots."""
    accepted = dict.fromkeys(DRAFTERS, 0)
    for seed, drafter in enumerate(DRAFTERS):
        rng = random.Random(f"{name} {drafter}")
        config = EngineConfig(slots=3, capacity=128)
        requests = [(reference, *shorten(reference, 128, rng)) for reference in references(name) * 2]
        for request in run_case(Case(name, drafter, rng.randint(3, 9), config, seed, requests)):
            accepted[drafter] += request.stats.accepted
    assert min(accepted["right"], accepted["mixed"]) > 5, "drafts must be accepted, or nothing was tried"
    assert accepted["wrong"] == 0, "a wrong draft was accepted"


@pytest.mark.parametrize("name", FAMILIES)
def test_what_passes_cost_can_be_measured(name: str) -> None:
    """Also where a context cannot be made up, because a row is more than its slots."""
    drafter = NgramDrafter(NgramConfig(max_drafts=7))
    costs = measure_costs(target(name), drafter, (1, 3), budget=0.02)
    assert costs.verify(3, 8, 100) >= costs.verify(1, 1, 20) > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_answers_are_those_of_transformers(name: str) -> None:
    model = untouched(name)
    model.generation_config.eos_token_id = None
    for reference in references(name)[:2]:
        ids = torch.tensor([reference.prompt])
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        output = model.generate(ids, max_new_tokens=LENGTH, **options)
        assert output[0, ids.shape[1] :].tolist() == reference.answer


VISION = {"hidden_size": 16, "intermediate_size": 16, "image_size": 16, "patch_size": 8}
COMPOSITE = {
    "qwen3.5": ("Qwen3_5", {**VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 32}),
    "gemma3": ("Gemma3", {**VISION, "num_hidden_layers": 1, "num_attention_heads": 2}),
}


@pytest.mark.parametrize("name", COMPOSITE)
def test_of_a_model_that_also_sees_the_text_part_is_served(name: str, tmp_path: Path) -> None:
    kind, vision = COMPOSITE[name]
    text = tiny_family(name).config.to_dict()
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    model.save_pretrained(tmp_path)
    made, ids = load_target(str(tmp_path)), random_ids(60)
    with torch.no_grad():
        expected = model(input_ids=ids[None], use_cache=False).logits[0]
    found = fill(made, made.new_cache(1, 64), 0, ids, (30, 1))
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert made.info.num_layers == len(text["layer_types"])


# --- planted faults: the checks above must notice each of them -------------------------------------------------------


def no_window(queries: Tensor, slots: int, window: int | None, dtype: torch.dtype) -> Tensor:
    return MASK(queries, slots, None, dtype)


def no_sinks(*inputs: Any) -> Tensor:
    *others, _ = inputs
    return SHAPED(*others, None)


def no_softcap(*inputs: Any) -> Tensor:
    *others, _, sinks = inputs
    return SHAPED(*others, None, sinks)


def never_taken_back(self: Trail, position: int, scan: Any) -> Any:
    return self.snapshots[-1][1] if position else AT(self, 0, scan)


def not_read_again(self: Trail, position: int, scan: Any) -> Any:
    state = AT(self, position, scan)
    before = [known for at, known in self.snapshots if at <= position]
    return before[-1] if position else state


def convolution_starts_anew(self: deltanet.DeltaNet, state: Any, inputs: Any) -> Any:
    return SCAN(self, (torch.zeros_like(state[0]), state[1]), inputs)


def experts_without_weights(self: experts.PackedExperts, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return EXPERTS(self, hidden, chosen, torch.full_like(weights, 0.5))


MASK, AT, SCAN = attention.causal_mask, Trail._at, deltanet.DeltaNet._scan
SHAPED: Callable[..., Tensor] = attention._shaped
EXPERTS = experts.PackedExperts.forward
FAULTS: list[tuple[str, Any, str, Any]] = [
    *((name, attention, "causal_mask", no_window) for name in ("mistral", "gpt-oss", "gemma2", "gemma3")),
    ("gpt-oss", attention, "_shaped", no_sinks),
    ("gemma2", attention, "_shaped", no_softcap),
    *((name, Trail, "_at", fault) for name in RECURRENT for fault in (never_taken_back, not_read_again)),
    ("qwen3.5", deltanet.DeltaNet, "_scan", convolution_starts_anew),
    ("qwen3-moe", experts.PackedExperts, "forward", experts_without_weights),
]


@pytest.mark.parametrize(("name", "place", "part", "fault"), FAULTS)
def test_a_planted_fault_is_caught(
    name: str, place: Any, part: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = target(name)
    assert isinstance(made, HFTarget)
    references(name)  # made without the fault
    monkeypatch.setattr(place, part, fault)
    if place is Trail:
        with pytest.raises(AssertionError, match=r"not the target's own|committed tokens that the target"):
            test_drafted_answers_are_the_targets_own(name)
    else:
        assert difference(made, untouched(name)) > 1e-2
        # The same comparison, on a few tokens, stands at the door.
        with pytest.raises(ValueError, match=r"^\w+ is not supported as a target: .*differs from itself"):
            HFTarget(tiny_family(name), name)


def test_without_packed_experts_bits_do_depend_on_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockdraft.targets.hf.pack_experts", lambda model: None)
    assert bits_depend_on_width(HFTarget(tiny_family("qwen3-moe"), "experts apart"))


# --- what a drafter borrows ------------------------------------------------------------------------------------------


def test_a_drafter_gets_raw_embeddings_and_a_raw_head() -> None:
    """Gemma scales what it embeds and bounds what it says; published drafters have their own settings for both."""
    model, made, ids = tiny_family("gemma2"), target("gemma2"), random_ids(2, 3)
    raw = model.get_input_embeddings().weight[ids]
    assert torch.equal(made.embed(ids), raw)
    torch.testing.assert_close(model.get_input_embeddings()(ids), raw * 32**0.5)
    hidden = torch.randn(4, 32)
    torch.testing.assert_close(made.head(hidden), hidden @ model.lm_head.weight.T, rtol=1e-5, atol=1e-5)
    logits = fill(made, made.new_cache(1, 64), 0, random_ids(20))
    assert logits.abs().max() < 8.0, "the target's choice is made from bounded logits"


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("qwen3-moe", {}, {"intermediate_size": 2 * 32}),
        ("gpt-oss", {}, {"intermediate_size": 2 * 64}),
        ("qwen3-next", {}, {"intermediate_size": 2 * 32 + 32, "rope_theta": 10000.0}),
        ("deepseek-v3", {}, {"intermediate_size": 2 * 32 + 32}),
        ("gemma3", {}, {"intermediate_size": 64, "rope_theta": 1e6}),
        ("gemma4", {}, {"intermediate_size": 64, "rope_theta": 1e6, "num_kv_heads": 2, "head_dim": 16}),
        ("qwen3.5", {"intermediate_size": 48}, {"intermediate_size": 48, "num_heads": 4, "head_dim": 16}),
    ],
)
def test_a_drafter_is_as_wide_as_what_one_token_sees(name: str, changes: Any, expected: dict[str, Any]) -> None:
    defaults = served(tiny_family(name, **changes), name).draft_defaults()
    assert {key: defaults[key] for key in expected} == expected


# --- what is refused -------------------------------------------------------------------------------------------------


def small(config: str, model: str, **values: Any) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        made: PreTrainedModel = getattr(transformers, model)(getattr(transformers, config)(**{**tiny.SHAPE, **values}))
        return made

    return make


def with_another_delta_net() -> PreTrainedModel:
    model = tiny_family("qwen3.5")
    net = model.model.layers[0].linear_attn
    net.conv1d.bias = nn.Parameter(torch.zeros(net.conv_dim))
    return model


CONV = {"layer_types": ["conv", "full_attention"] * 2}
REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "mamba": (small("MambaConfig", "MambaForCausalLM", state_size=4), "its longest context|is not a gated delta net"),
    "lfm2": (small("Lfm2Config", "Lfm2ForCausalLM", **CONV), "layers of kind conv, not only full_attention"),
    "llama4": (
        small("Llama4TextConfig", "Llama4ForCausalLM", num_local_experts=2, intermediate_size_mlp=64),
        "layers of kind chunked_attention",
    ),
    "minimax": (small("MiniMaxConfig", "MiniMaxForCausalLM", num_local_experts=2), "is not a gated delta net"),
    "another delta net": (with_another_delta_net, "is not a gated delta net"),
    "doge": (small("DogeConfig", "DogeForCausalLM"), "a mask that the model makes itself"),
    "gemma3n": (
        small("Gemma3nTextConfig", "Gemma3nForCausalLM", num_kv_shared_layers=0, vocab_size_per_layer_input=96),
        r"its layers hand on \[4, 2, \d+, 32\], not one vector of 32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_in_one_line(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(ValueError, match=rf"^\w+ is not supported as a target: .*{reason}") as error:
        HFTarget(make(), name)
    assert "\n" not in str(error.value)
