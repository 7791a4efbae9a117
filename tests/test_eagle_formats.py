"""EAGLE-3 between our folders, SGLang's layout and that of speculators; MTP modules, which have none."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import IDS as TOKENS
from layouts import VOCAB, save, tiny_target
from safetensors.torch import load_file, save_file
from test_chain_drafters import chain_config, random_chain

from blockdraft.cli import main
from blockdraft.config import ConfigError, DrafterConfig
from blockdraft.drafters.checkpoint import load_drafter, load_model, save_drafter
from blockdraft.drafters.families import new_model
from blockdraft.formats import eagle3
from blockdraft.formats.card import TargetCard
from blockdraft.formats.launch import launch
from blockdraft.formats.layouts import LAYOUTS, WRITABLE, check, export, import_drafter, read_parts, recognise
from blockdraft.targets.resolve import load_target

KEY = "eagle_aux_hidden_state_layer_ids"
KINDS: dict[str, dict[str, Any]] = {
    "reduced": {"draft_vocab_size": len(TOKENS)},
    "whole": {"draft_vocab_size": None},
    "normed": {"draft_vocab_size": len(TOKENS), "norm_before_residual": True},
    "bias": {"draft_vocab_size": None, "attention_bias": True},
    "llama3": {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        },
    },
}  # fmt: skip
BOTH = ("eagle3", "eagle3-speculators")
# Llama-3.1-8B's EAGLE-3, as it is published: no layer ids, no rotary base, nothing of its target.
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 2048,
    "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 1,
    "pad_token_id": 0, "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.28.1", "use_cache": True, "vocab_size": 128256, "draft_vocab_size": 32000,
}  # fmt: skip
CARD_8B = TargetCard("llama", Path("llama"), 32, 4096, 128256, 131072, ("LlamaForCausalLM",), False, None)


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> TargetCard:
    return tiny_target(tmp_path_factory.mktemp("target"))


def config_of(kind: str = "reduced", **changes: Any) -> DrafterConfig:
    values = {"vocab_size": VOCAB, "draft_vocab_size": len(TOKENS), "tap_ids": (0, 1, 2), "num_target_layers": 4}
    return chain_config("eagle3", **{**values, **KINDS[kind], **changes})


def ours(folder: Path, kind: str = "reduced", dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    config = config_of(kind, **changes)
    save_drafter(folder, random_chain(config, seed=3), TOKENS if config.draft_vocab_size else None, {}, dtype)
    return folder


def mtp(folder: Path) -> Path:
    config = chain_config("mtp-2", vocab_size=VOCAB)
    save_drafter(folder, random_chain(config), None, {}, torch.float32)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def settings(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def change(
    folder: Path, values: dict[str, Any], damage: Callable[[dict[str, torch.Tensor]], Any] | None = None
) -> None:
    """Other settings (None: left out), and tensors damaged in place."""
    said = {key: value for key, value in {**settings(folder), **values}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(said))
    if damage is not None:
        held = tensors(folder)
        damage(held)
        save_file(held, folder / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", BOTH)
def test_a_drafter_comes_back_bit_for_bit(layout: str, kind: str, card: TargetCard, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if kind == "normed" else torch.float32
    model, ids = load_model(ours(tmp_path / "ours", kind, dtype), dtype)
    export(tmp_path / "ours", tmp_path / "theirs", layout, card)
    assert recognise(tmp_path / "theirs").name == layout
    assert all(one.passed for one in check(tmp_path / "theirs", card)[1])
    _, parts = read_parts(tmp_path / "theirs", card)
    assert parts.config == config_of(kind)
    import_drafter(tmp_path / "theirs", tmp_path / "back", card, {})
    again, again_ids = load_model(tmp_path / "back", dtype)
    assert again.config == model.config
    expected = model.state_dict()
    for held in (parts.tensors, again.state_dict()):
        assert held.keys() == expected.keys()
        assert all(torch.equal(held[name], value) and value.dtype == dtype for name, value in expected.items())
    for found in (parts.draft_ids, again_ids):
        assert (found is None) == (ids is None) and (ids is None or torch.equal(found, ids))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "ours", "theirs"]


LAYER = {
    "input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
    "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
}  # fmt: skip
SHARED = {"fc.weight", "norm.weight", "lm_head.weight"}


def test_tensors_and_settings_are_those_of_the_projects(card: TargetCard, tmp_path: Path) -> None:
    ours(tmp_path / "ours", "normed")
    for layout in BOTH:
        export(tmp_path / "ours", tmp_path / layout, layout, card)
    plain, wrapped = (tensors(tmp_path / layout) for layout in BOTH)
    assert set(plain) == {f"midlayer.{name}.weight" for name in LAYER} | SHARED | {"d2t", "t2d"}
    assert set(wrapped) == {f"layers.0.{name}.weight" for name in LAYER} | SHARED | {
        "d2t",
        "t2d",
        "embed_tokens.weight",
    }
    assert wrapped["layers.0.self_attn.k_proj.weight"].shape == (32, 64)  # reads two widths, side by side
    for held in (plain, wrapped):
        assert [held["d2t"][row] + row for row in range(len(TOKENS))] == TOKENS.tolist()
        assert held["t2d"].dtype == torch.bool and held["t2d"].nonzero().flatten().tolist() == TOKENS.tolist()
    embedding = load_target(card.spec, pack=False).embed(torch.arange(VOCAB))
    assert torch.equal(wrapped["embed_tokens.weight"], embedding)
    values = settings(tmp_path / "eagle3")
    assert (values["architectures"], values["model_type"]) == (["LlamaForCausalLMEagle3"], "llama")
    assert values["eagle_config"] == {KEY: [0, 1, 2], "use_aux_hidden_state": True}  # SGLang's: a layer's output
    assert values[KEY] == [1, 2, 3]  # vLLM's: a layer's input
    assert values["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert (values["draft_vocab_size"], values["norm_before_residual"]) == (37, True)
    values = settings(tmp_path / "eagle3-speculators")
    assert (values["architectures"], values["speculators_model_type"]) == (["Eagle3Speculator"], "eagle3")
    assert (values[KEY], values["draft_vocab_size"], values["norm_before_residual"]) == ([1, 2, 3], 37, True)
    assert values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    body = values["transformer_layer_config"]
    assert (body["model_type"], body["num_hidden_layers"], body["vocab_size"]) == ("llama", 1, VOCAB)
    assert not {"layer_types", "sliding_window"} & set(body)


def test_what_readers_default_differently_is_always_said(card: TargetCard, tmp_path: Path) -> None:
    """A norm that is not there is said not to be, and a head of all tokens has a size."""
    ours(tmp_path / "ours", "whole")
    for layout in BOTH:
        export(tmp_path / "ours", tmp_path / layout, layout, card)
        assert settings(tmp_path / layout)["norm_before_residual"] is False
        assert settings(tmp_path / layout)["draft_vocab_size"] == VOCAB
        assert not {"d2t", "t2d"} & set(tensors(tmp_path / layout))
    assert settings(tmp_path / "ours")["draft_vocab_size"] == VOCAB


def test_a_published_file_says_less_than_we_need() -> None:
    config = eagle3.read_config(LLAMA_8B, "config.json", CARD_8B)
    assert (config.tap_ids, config.num_target_layers, config.block_size, config.max_drafts) == ((1, 15, 28), 32, 7, 7)
    assert (config.norm_before_residual, config.rope_theta, config.head_dim) == (False, 10000.0, 128)
    assert eagle3.usual_taps(config) and not eagle3.usual_taps(config.model_copy(update={"tap_ids": (1, 15, 29)}))
    with torch.device("meta"):
        held = {name: list(value.shape) for name, value in new_model(config).state_dict().items()}
    layer = {
        "input_layernorm": [4096], "hidden_norm": [4096], "post_attention_layernorm": [4096],
        "self_attn.q_proj": [4096, 8192], "self_attn.k_proj": [1024, 8192], "self_attn.v_proj": [1024, 8192],
        "self_attn.o_proj": [4096, 4096],
        "mlp.gate_proj": [14336, 4096], "mlp.up_proj": [14336, 4096], "mlp.down_proj": [4096, 14336],
    }  # fmt: skip
    expected = {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    expected |= {"fc.weight": [4096, 12288], "norm.weight": [4096], "lm_head.weight": [32000, 4096]}
    assert held == expected


VARIANTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"eagle_config": {KEY: [2, 9, 20], "use_aux_hidden_state": True}}, {"tap_ids": (2, 9, 20)}),
    ({KEY: [2, 9, 20]}, {"tap_ids": (1, 8, 19)}),
    ({KEY: [3, 10, 21], "eagle_config": {KEY: [2, 9, 20]}}, {"tap_ids": (2, 9, 20)}),
    ({"norm_before_residual": True}, {"norm_before_residual": True}),
    ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {"rope_theta": 5e5}),
    ({"block_size": 3, "fc_norm": False, "target_hidden_size": 4096}, {"block_size": 3}),
]


@pytest.mark.parametrize(("changed", "expected"), VARIANTS)
def test_other_ways_to_say_things(changed: dict[str, Any], expected: dict[str, Any]) -> None:
    plain = eagle3.read_config(LLAMA_8B, "config.json", CARD_8B)
    assert eagle3.read_config({**LLAMA_8B, **changed}, "config.json", CARD_8B) == plain.model_copy(update=expected)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fc_norm": True}, "'fc_norm' is True: that is EAGLE-3.1"),
    ({"norm_output": True}, "'norm_output' is True: that is EAGLE-3.1"),
    ({"norm_before_fc": True}, "'norm_before_fc' is True: that is EAGLE-3.1"),
    ({"pard_token": 128002}, "'pard_token' is 128002: that is P-EAGLE"),
    ({"mask_token_id": 0}, "'mask_token_id' is 0: that is P-EAGLE"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "that is EAGLE-1"),
    ({"eagle_config": [1]}, "'eagle_config' holds list, not settings"),
    ({"target_hidden_size": 5120}, "hidden_size is 4096, target_hidden_size 5120"),
    ({"num_hidden_layers": 2}, "family 'eagle3' is one layer: num_layers is 2"),
    ({"mlp_bias": True}, "that is biases in the MLP"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
    ({"layer_types": ["sliding_attention"], "sliding_window": 8}, "sliding layers are not supported"),
    ({"is_causal": False}, "is_causal is false"),
    ({"eagle_config": {KEY: [2, 9, 32]}}, "must lie in 0..31"),
    ({"eagle_config": {KEY: [9, 2, 20]}}, "must be increasing"),
    ({KEY: [2, 9, 20], "eagle_config": {KEY: [2, 9, 20]}}, "which is not one above"),
    ({"draft_vocab_size": 128257}, "draft_vocab_size=128257 must lie in"),
    ({"num_target_layers": 4}, "4 layers are too few for the usual ones"),
    ({"block_size": 1}, "block_size"),
    ({"hidden_size": None}, "'hidden_size' is missing"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        eagle3.read_config({**LLAMA_8B, **changed}, "config.json", CARD_8B)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="name the target"):
        eagle3.read_config(LLAMA_8B, "config.json", None)


def put(name: str, *shape: int) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda held: held.update({name: torch.zeros(*shape)})


# layout, settings changed, tensors damaged, what is said
BROKEN: list[tuple[str, dict[str, Any], Callable[[dict[str, torch.Tensor]], Any] | None, str]] = [
    ("eagle3", {}, put("mask_hidden", 1, 1, 96), "'mask_hidden' does not belong here, which is P-EAGLE"),
    ("eagle3", {}, put("fc_norm.0.weight", 32), "'fc_norm.0.weight' does not belong here, which is EAGLE-3.1"),
    ("eagle3", {}, put("layers.0.norm.weight", 32), "'layers.0.norm.weight' does not belong here (1 in all)"),
    ("eagle3", {}, put("midlayer.more", 32), "'midlayer.more' does not belong here (1 in all)"),
    ("eagle3", {}, lambda held: held.pop("lm_head.weight"), "'lm_head.weight' is missing"),
    ("eagle3", {}, put("fc.weight", 32, 64), "64 columns are for 2 taps, the settings have 3"),
    ("eagle3", {}, put("midlayer.self_attn.q_proj.weight", 64, 32), "is [64, 32], expected [64, 64]"),
    ("eagle3", {}, lambda held: held["t2d"].logical_not_(), "'t2d' and 'd2t' do not map the same tokens"),
    ("eagle3", {}, lambda held: [held.pop(name) for name in ("d2t", "t2d")], "but the drafter has no map"),
    ("eagle3", {}, put("embed_tokens.weight", VOCAB, 32), "'embed_tokens.weight' is not the target's own"),
    ("eagle3", {"num_target_layers": 9}, None, "made for 9, the target has 4"),
    ("eagle3-speculators", {}, put("embed_tokens.weight", VOCAB, 32), "'embed_tokens.weight' is not the target's own"),
    ("eagle3-speculators", {}, put("layers.1.norm.weight", 32), "'layers.1.norm.weight' does not belong here"),
    ("eagle3-speculators", {}, put("input_norm.weight", 96), "which is EAGLE-3.1 (norm_before_fc)"),
    ("eagle3-speculators", {"norm_before_residual": None}, None, "'norm_before_residual' is missing: vLLM takes true"),
    ("eagle3-speculators", {"speculators_model_type": "peagle"}, None, "is P-EAGLE, which is not supported"),
    ("eagle3-speculators", {"norm_output": True}, None, "that is EAGLE-3.1"),
    ("eagle3-speculators", {"transformer_layer_config": {"model_type": "qwen3"}}, None, "not that of a Llama layer"),
    ("eagle3-speculators", {KEY: [1, 2, 5]}, None, "must lie in 0..3"),
    ("eagle3-speculators", {KEY: [1, 2]}, None, "96 columns are for 3 taps, the settings have 2"),
]


@pytest.mark.parametrize(("layout", "values", "damage", "message"), BROKEN)
def test_every_broken_thing_is_found(
    layout: str, values: dict[str, Any], damage: Any, message: str, card: TargetCard, tmp_path: Path
) -> None:
    export(ours(tmp_path / "ours"), tmp_path / "theirs", layout, card)
    change(tmp_path / "theirs", values, damage)
    found, checks = check(tmp_path / "theirs", card)
    assert found is not None and found.name == layout
    assert any(message in one.found for one in checks if not one.passed), checks
    with pytest.raises(ConfigError):
        import_drafter(tmp_path / "theirs", tmp_path / "back", card, {})
    assert not (tmp_path / "back").exists()


def test_a_foreign_drafter_drafts_and_its_chain_can_have_another_length(card: TargetCard, tmp_path: Path) -> None:
    """All that a published file lacks is taken away; an embedding that is the target's own is let in."""
    ours(tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "theirs", "eagle3", card)
    gone = dict.fromkeys((KEY, "block_size", "num_target_layers", "rope_theta", "rope_scaling", "rope_parameters"))
    change(tmp_path / "theirs", gone, lambda held: held.update({"embed_tokens.weight": card.embedding().clone()}))
    import_drafter(tmp_path / "theirs", tmp_path / "seven", card, {})
    assert load_model(tmp_path / "seven")[0].config == config_of(block_size=7)
    import_drafter(tmp_path / "theirs", tmp_path / "five", card, {}, block_size=5)
    target, drafts = load_target(card.spec), []
    for folder in ("ours", "five"):
        one = load_drafter(tmp_path / folder, target)
        state, taps = one.new_state(2, 16), torch.randn(2, 6, 3, 32, generator=torch.Generator().manual_seed(1))
        one.observe(state, [0, 1], torch.zeros(2, 6, dtype=torch.long), taps, [6, 4])
        drafts.append(one.propose(state, [0, 1], torch.tensor([7, 8])).tokens)
    assert drafts[0].shape == (2, 5) and torch.equal(*drafts)
    for size, message in ((1, "block_size"), (300, "block_size")):
        with pytest.raises(ConfigError, match=message):
            import_drafter(tmp_path / "theirs", tmp_path / "no", card, {}, block_size=size)
    with pytest.raises(ConfigError, match="a block drafter has the blocks that it learned"):
        import_drafter(save(tmp_path / "block", "plain"), tmp_path / "no", card, {}, block_size=4)


@pytest.mark.parametrize("layout", WRITABLE)
def test_a_layout_is_for_one_family(layout: str, card: TargetCard, tmp_path: Path) -> None:
    of_eagle = LAYOUTS[layout].family == "eagle3"
    assert of_eagle == (layout in BOTH)
    other = save(tmp_path / "a", "plain") if of_eagle else ours(tmp_path / "a")
    said = "it is a block drafter, not an EAGLE-3 drafter" if of_eagle else "it is an EAGLE-3 drafter, not a block"
    for folder, message in ((other, said), (mtp(tmp_path / "m"), "an MTP module, which engines load from inside")):
        with pytest.raises(ConfigError, match=f"layout '{layout}' cannot carry this drafter: .*{message}") as caught:
            export(folder, tmp_path / "out", layout, card)
        assert "\n" not in str(caught.value) and ";" not in str(caught.value)  # one reason: the rest follows from it
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tap_ids": (0, 1, 3)}, "tap 3 is the target's last layer"),
        ({"tap_ids": (0, 1)}, "it has 2 taps, and engines give an EAGLE-3 drafter three"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    ],
)
def test_what_the_layouts_cannot_say(changes: dict[str, Any], message: str, card: TargetCard) -> None:
    for layout in BOTH:
        assert any(message in reason for reason in LAYOUTS[layout].refusals(config_of(**changes)))
        assert not LAYOUTS[layout].refusals(config_of())


def test_mtp_modules_are_sound_but_ours_alone(card: TargetCard, tmp_path: Path) -> None:
    folder = mtp(tmp_path / "m")
    layout, checks = check(folder, card)
    assert layout is not None and layout.name == "blockdraft" and all(one.passed for one in checks), checks
    for engine in ("sglang", "vllm", "llama.cpp"):
        with pytest.raises(ConfigError, match="an MTP module, which engines load from inside the target's own"):
            launch(engine, folder, card)
    change(folder, {}, put("norm.weight", 32))
    assert [one.found for one in check(folder, card)[1] if not one.passed] == [
        "tensor 'norm.weight' does not belong here: an MTP module's begin with 'mtp.'"
    ]


SGLANG = (
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 python -m sglang.launch_server --model-path T --speculative-algorithm "
    "EAGLE3 --speculative-draft-model-path D --speculative-num-steps 5 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 6"
)
VLLM = 'vllm serve T --speculative-config {"method":"eagle3","model":"D","num_speculative_tokens":5}'


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


def test_the_commands(card: TargetCard, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, of = ours(tmp_path / "ours", max_position_embeddings=1024), ("--target", card.spec)
    assert run(capsys, "export", folder, tmp_path / "e", "--to", "eagle3-speculators", *of)[0] == 0
    assert run(capsys, "import", tmp_path / "e", tmp_path / "back", "--block-size", 3, *of)[0] == 0
    assert load_model(tmp_path / "back")[0].config.block_size == 3
    assert run(capsys, "check", tmp_path / "e", *of)[0] == 0
    code, out, err = run(capsys, "export", folder, tmp_path / "x", "--to", "dflash", *of)
    assert code == 2 and "export --to eagle3 (SGLang, vLLM)" in err and len(err.splitlines()) == 1
    for engine, drafter, line in (("sglang", folder, SGLANG), ("vllm", folder, VLLM), ("vllm", tmp_path / "e", VLLM)):
        code, out, err = run(capsys, "command", engine, "--drafter", drafter, *of)
        words = [word.replace(str(drafter.resolve()), "D") for word in shlex.split(out)]
        words = [word.replace(" ", "") if word[0] == "{" else word.replace(card.name, "T") for word in words]
        assert (code, err, " ".join(words)) == (0, "", line)


NOT_RUN: list[tuple[str, str, str, dict[str, Any], str]] = [
    ("sglang", "normed", "eagle3", {}, "it adds to the features as they are"),
    ("sglang", "bias", "eagle3", {}, "attention_bias is true"),
    ("sglang", "whole", "eagle3", {"draft_vocab_size": None}, "for which it takes the target's head"),
    ("sglang", "reduced", "eagle3", {"eagle_config": None}, "it reads no layer ids beside 'eagle_config'"),
    ("sglang", "reduced", "eagle3-speculators", {}, "OUT --to eagle3"),
    ("vllm", "reduced", "eagle3", {KEY: None}, "it reads no layer ids of 'eagle_config'"),
    ("llama.cpp", "reduced", "eagle3", {}, "no layout for it here has drafters of family 'eagle3'"),
]


@pytest.mark.parametrize(("engine", "kind", "layout", "changed", "message"), NOT_RUN)
def test_what_an_engine_would_not_run_as_it_is(
    engine: str, kind: str, layout: str, changed: dict[str, Any], message: str, card: TargetCard, tmp_path: Path
) -> None:
    export(ours(tmp_path / "ours", kind), tmp_path / "e", layout, card)
    change(tmp_path / "e", changed)
    with pytest.raises(ConfigError) as caught:
        launch(engine, tmp_path / "e", card)
    assert message in str(caught.value) and "--to dflash" not in str(caught.value)
