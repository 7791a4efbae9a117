"""Foreign layouts: what one carries comes back bit for bit; what it cannot carry is refused with nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from layouts import IDS, KINDS, MASK, VOCAB, drafter, meaning, save, tiny_target
from safetensors.torch import load_file, save_file

from blockdraft.config import ConfigError
from blockdraft.drafters.checkpoint import load_drafter, load_model
from blockdraft.formats.card import TargetCard
from blockdraft.formats.layouts import LAYOUTS, WRITABLE, export, import_drafter, read_parts, recognise
from blockdraft.targets.resolve import load_target

# What each layout can say of `layouts.KINDS`; everything else it must refuse.
SAYS = {
    "dflash": {
        "plain", "windowed", "sliding", "mixed", "causal", "bias", "linear", "yarn", "yarn-whole", "llama3", "scaled",
    },
    "speculators": {
        "plain", "windowed", "sliding", "mixed", "bias", "linear", "yarn", "yarn-whole", "llama3",
        "anchor", "reduced", "markov", "dspark",
    },
    "transformers": {"plain", "windowed", "linear", "yarn", "yarn-whole", "llama3"},
    "dflare": {"dflare", "dflare-yarn"},
    "angelspec": {"plain", "dflare"},
    "gguf": {"plain", "windowed", "sliding", "causal", "linear", "yarn", "reduced", "markov", "dspark"},
}  # fmt: skip
CARRIED = [(layout, kind) for layout, kinds in SAYS.items() for kind in sorted(kinds)]
REFUSED = [(layout, kind) for layout, kinds in SAYS.items() for kind in KINDS if kind not in kinds]


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> TargetCard:
    return tiny_target(tmp_path_factory.mktemp("target"))


def names(path: Path) -> set[str]:
    return {tensor.name for tensor in gguf.GGUFReader(path).tensors} if path.is_file() else set(tensors(path))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def settings(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def rewrite(folder: Path, changed: dict) -> None:
    (folder / "config.json").write_text(json.dumps(changed))


def test_the_table_above_names_every_layout_of_block_drafters() -> None:
    assert set(SAYS) == {name for name in WRITABLE if LAYOUTS[name].family == "block"}


@pytest.mark.parametrize(("layout", "kind"), CARRIED)
def test_what_a_layout_carries_comes_back_bit_for_bit(layout: str, kind: str, card: TargetCard, tmp_path: Path) -> None:
    model, ids = drafter(kind)
    export(save(tmp_path / "ours", kind), tmp_path / "theirs", layout, card)
    assert recognise(tmp_path / "theirs").name == layout
    found, parts = read_parts(tmp_path / "theirs", card)
    assert found.name == layout
    assert meaning(parts.config) == meaning(model.config)
    expected = model.state_dict()
    assert parts.tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert parts.tensors[name].dtype == torch.float32
        assert torch.equal(parts.tensors[name], value), name
    assert (ids is None) == (parts.draft_ids is None)
    assert ids is None or torch.equal(ids, parts.draft_ids)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]


@pytest.mark.parametrize(("layout", "kind"), REFUSED)
def test_what_it_cannot_carry_is_refused_and_nothing_is_written(
    layout: str, kind: str, card: TargetCard, tmp_path: Path
) -> None:
    save(tmp_path / "ours", kind)
    with pytest.raises(ConfigError, match=f"layout '{layout}' cannot carry this drafter: ") as caught:
        export(tmp_path / "ours", tmp_path / "theirs", layout, card)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_every_reason_is_said_at_once(card: TargetCard, tmp_path: Path) -> None:
    save(tmp_path / "ours", "dspark")
    with pytest.raises(ConfigError) as caught:
        export(tmp_path / "ours", tmp_path / "theirs", "dflash", card)
    for reason in ("anchor_drafts", "Markov head", "37 of 272 tokens", "--to speculators"):
        assert str(caught.value).count(reason) == 1


@pytest.mark.parametrize("layout", sorted(SAYS))
def test_the_last_layer_is_no_tap_that_others_share(layout: str, card: TargetCard, tmp_path: Path) -> None:
    """Hugging Face's last hidden state is normed, a hook's is not, and an engine may have neither."""
    save(tmp_path / "ours", "dflare" if layout == "dflare" else "plain", tap_ids=(0, 1, 3))
    with pytest.raises(ConfigError, match="tap 3 is the target's last layer"):
        export(tmp_path / "ours", tmp_path / "theirs", layout, card)
    with pytest.raises(ConfigError, match="tap 3 is the target's last layer"):
        import_drafter(tmp_path / "ours", tmp_path / "back", card, {})


@pytest.mark.parametrize("layout", sorted(SAYS))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_numbers_stay_as_they_are(layout: str, dtype: str, card: TargetCard, tmp_path: Path) -> None:
    kind = "dflare" if layout == "dflare" else "dspark" if layout in ("speculators", "gguf") else "plain"
    save(tmp_path / "ours", kind, getattr(torch, dtype))
    model, _ = load_model(tmp_path / "ours", getattr(torch, dtype))
    export(tmp_path / "ours", tmp_path / "theirs", layout, card)
    _, parts = read_parts(tmp_path / "theirs", card)
    assert all(torch.equal(parts.tensors[name], value) for name, value in model.state_dict().items())
    assert {str(value.dtype) for value in parts.tensors.values()} == {f"torch.{dtype}"}


def test_another_number_format_can_be_asked_for(card: TargetCard, tmp_path: Path) -> None:
    save(tmp_path / "ours", "plain")
    export(tmp_path / "ours", tmp_path / "half", "dflash", None, "bfloat16")
    model, _ = drafter("plain")
    held = tensors(tmp_path / "half")
    assert all(torch.equal(held[name], value.bfloat16()) for name, value in model.state_dict().items())
    assert settings(tmp_path / "half")["dtype"] == "bfloat16"
    with pytest.raises(ConfigError, match="dtype 'int8' is not one of"):
        export(tmp_path / "ours", tmp_path / "x", "dflash", None, "int8")


def test_numbers_too_large_for_a_format_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "ours", "plain")
    held = tensors(tmp_path / "ours")
    held["norm.weight"][3] = 1e5
    save_file(held, tmp_path / "ours" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"'norm.weight' has numbers that float16 cannot hold"):
        export(tmp_path / "ours", tmp_path / "theirs", "dflash", None, "float16")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


LAYER = {
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
}  # fmt: skip
BODY = {f"layers.{layer}.{name}.weight" for layer in (0, 1) for name in LAYER}
CONTEXT = {f"layers.{layer}.self_attn.{name}_proj_target.weight" for layer in (0, 1) for name in "kv"}
BLOCKS = {
    f"blk.{layer}.{name}.weight"
    for layer in (0, 1)
    for name in (
        "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm",
        "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
    )
}  # fmt: skip
# Written by hand from what the projects say of their files.
NAMES = {
    ("dflash", "plain"): BODY | {"fc.weight", "hidden_norm.weight", "norm.weight"},
    ("dflash", "bias"): BODY
    | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    | {f"layers.{layer}.self_attn.{name}_proj.bias" for layer in (0, 1) for name in "qkvo"},
    ("dflare", "dflare"): BODY | CONTEXT | {"layer_fusion_weights", "hidden_norm.weight", "norm.weight"},
    ("angelspec", "dflare"): BODY
    | CONTEXT
    | {"layer_fusion_weights", "context_norm.weight", "final_norm.weight", "embed_tokens.weight"},
    ("angelspec", "plain"): BODY
    | {"context_proj.weight", "context_norm.weight", "final_norm.weight", "embed_tokens.weight"},
    ("speculators", "plain"): BODY
    | {"fc.weight", "hidden_norm.weight", "norm.weight", "embed_tokens.weight", "lm_head.weight"},
    ("speculators", "dspark"): BODY
    | {"fc.weight", "hidden_norm.weight", "norm.weight", "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
    | {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"},
    ("transformers", "plain"): BODY | {"encoder.fc.weight", "encoder.output_norm_enc.weight", "norm.weight"},
    ("gguf", "plain"): BLOCKS | {"fc.weight", "enc.output_norm.weight", "output_norm.weight"},
    ("gguf", "dspark"): BLOCKS
    | {"fc.weight", "enc.output_norm.weight", "output_norm.weight", "output.weight", "d2t"}
    | {"markov_w1.weight", "markov_w2.weight", "conf_proj.weight"},
}


@pytest.mark.parametrize(("layout", "kind"), list(NAMES))
def test_tensors_have_the_names_that_the_project_gives_them(
    layout: str, kind: str, card: TargetCard, tmp_path: Path
) -> None:
    export(save(tmp_path / "ours", kind), tmp_path / "theirs", layout, card)
    assert names(tmp_path / "theirs") == NAMES[layout, kind]


def test_the_published_settings(card: TargetCard, tmp_path: Path) -> None:
    export(save(tmp_path / "ours", "mixed", is_causal=False), tmp_path / "theirs", "dflash", card)
    values = settings(tmp_path / "theirs")
    assert values["architectures"] == ["DFlashDraftModel"]
    assert values["dflash_config"] == {
        "block_size": 5, "mask_token_id": MASK, "target_layer_ids": [0, 1, 2], "causal": False,
    }  # fmt: skip
    assert (values["block_size"], values["num_target_layers"], values["is_causal"]) == (5, 4, False)
    assert values["layer_types"] == ["sliding_attention", "full_attention"]
    assert (values["sliding_window"], values["use_sliding_window"]) == (6, True)
    assert values["rope_parameters"] == {"rope_theta": 12345.0, "rope_type": "default"}
    assert values["rope_theta"] == 12345.0
    assert not {"auto_map", "markov_rank", "draft_vocab_size"} & set(values)


def test_speculators_settings_and_what_it_holds_of_the_target(card: TargetCard, tmp_path: Path) -> None:
    export(save(tmp_path / "ours", "dspark"), tmp_path / "theirs", "speculators", card)
    values, held = settings(tmp_path / "theirs"), tensors(tmp_path / "theirs")
    assert values["aux_hidden_state_layer_ids"] == [1, 2, 3]  # hidden states: one above the layers
    assert (values["speculators_model_type"], values["architectures"]) == ("dspark", ["DSparkSpeculator"])
    assert values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5  # the anchor's row too
    assert values["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    assert (values["draft_vocab_size"], values["enable_confidence_head"]) == (len(IDS), False)
    target = load_target(card.spec, pack=False)
    assert torch.equal(held["embed_tokens.weight"], target.embed(torch.arange(VOCAB)))
    assert torch.equal(held["lm_head.weight"], target.head_rows(IDS))
    assert [held["d2t"][row] + row for row in range(len(IDS))] == IDS.tolist()
    assert held["t2d"].dtype == torch.bool and held["t2d"].nonzero().flatten().tolist() == IDS.tolist()
    model, _ = drafter("dspark")
    for token in range(VOCAB):
        row = (token == IDS).nonzero().flatten().tolist()
        wanted = model.markov_head.w1.weight[row[0]] if row else torch.zeros(3)
        assert torch.equal(held["markov_head.markov_w1.weight"][token], wanted)
    export(save(tmp_path / "whole", "plain"), tmp_path / "all", "speculators", card)
    values = settings(tmp_path / "all")
    assert values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert values["sliding_window_non_causal"] is True  # else vLLM takes all layers for causal ones
    assert torch.equal(tensors(tmp_path / "all")["lm_head.weight"], target.head_rows())


def test_what_newer_speculators_files_leave_out_is_not_missed(card: TargetCard, tmp_path: Path) -> None:
    export(save(tmp_path / "ours", "plain"), tmp_path / "theirs", "speculators", card)
    held = tensors(tmp_path / "theirs")
    del held["embed_tokens.weight"], held["lm_head.weight"]
    held["verifier_norm.weight"] = torch.ones(32)  # older ones keep it
    save_file(held, tmp_path / "theirs" / "model.safetensors")
    _, parts = read_parts(tmp_path / "theirs", card)
    assert parts.tensors.keys() == drafter("plain")[0].state_dict().keys()


@pytest.mark.parametrize(
    ("layout", "kind", "name", "message"),
    [
        ("speculators", "plain", "lm_head.weight", "'lm_head.weight' is not the target's own"),
        ("speculators", "reduced", "lm_head.weight", "'lm_head.weight' is not the target's own"),
        ("speculators", "plain", "embed_tokens.weight", "'embed_tokens.weight' is not the target's own"),
        ("angelspec", "dflare", "embed_tokens.weight", "'embed_tokens.weight' is not the target's own"),
        ("speculators", "dspark", "markov_head.markov_w1.weight", "rows for tokens outside the draft vocabulary"),
        ("speculators", "dspark", "t2d", "'t2d' and 'd2t' do not map the same tokens"),
        ("speculators", "dspark", "d2t", "'d2t' does not map to distinct tokens"),
    ],
)
def test_copies_that_are_none_any_more_are_refused(
    layout: str, kind: str, name: str, message: str, card: TargetCard, tmp_path: Path
) -> None:
    export(save(tmp_path / "ours", kind), tmp_path / "theirs", layout, card)
    held = tensors(tmp_path / "theirs")
    held[name][6] = 500 if held[name].dtype == torch.int64 else ~held[name][6] if name == "t2d" else 0.25
    save_file(held, tmp_path / "theirs" / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        read_parts(tmp_path / "theirs", card)


def test_copies_of_the_target_beside_a_published_drafter_are_compared_too(card: TargetCard, tmp_path: Path) -> None:
    held = tensors(save(tmp_path / "d", "reduced"))
    target = load_target(card.spec, pack=False)
    held |= {"embed_tokens.weight": target.embed(torch.arange(VOCAB)), "lm_head.weight": target.head_rows(IDS)}
    save_file({name: value.clone() for name, value in held.items()}, tmp_path / "d" / "model.safetensors")
    assert read_parts(tmp_path / "d", card)[1].tensors.keys() == drafter("reduced")[0].state_dict().keys()
    with pytest.raises(ConfigError, match="does not belong here"):
        read_parts(tmp_path / "d")
    save_file({**held, "lm_head.weight": held["lm_head.weight"] + 1}, tmp_path / "d" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"'lm_head.weight' is not the target's own"):
        read_parts(tmp_path / "d", card)


@pytest.mark.parametrize("layout", ["speculators", "angelspec", "gguf"])
def test_a_layout_that_holds_parts_of_the_target_asks_for_it(layout: str, tmp_path: Path) -> None:
    save(tmp_path / "ours", "plain")
    with pytest.raises(ConfigError, match="name it with --target"):
        export(tmp_path / "ours", tmp_path / "theirs", layout, None)


def test_a_place_that_is_taken_is_left_alone(tmp_path: Path) -> None:
    save(tmp_path / "ours", "plain")
    (tmp_path / "theirs").mkdir()
    with pytest.raises(ConfigError, match="is there already"):
        export(tmp_path / "ours", tmp_path / "theirs", "dflash", None)
    assert not list((tmp_path / "theirs").iterdir())


@pytest.mark.parametrize(("layout", "fails"), [("speculators", "layouts.save_file"), ("gguf", "llamacpp._add")])
def test_a_write_that_fails_leaves_nothing(
    layout: str, fails: str, card: TargetCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*args, **kwargs):
        raise OSError("no space left")

    save(tmp_path / "ours", "plain")
    monkeypatch.setattr(f"blockdraft.formats.{fails}", full_disk)
    with pytest.raises(OSError, match="no space"):
        export(tmp_path / "ours", tmp_path / "deep" / "theirs", layout, card)
    assert not list((tmp_path / "deep").iterdir())


@pytest.mark.parametrize(
    ("layout", "kind"), [(name, "dflare" if name == "dflare" else "plain") for name in sorted(SAYS)]
)
def test_an_imported_drafter_drafts_as_before(layout: str, kind: str, card: TargetCard, tmp_path: Path) -> None:
    export(save(tmp_path / "ours", kind), tmp_path / "theirs", layout, card)
    import_drafter(tmp_path / "theirs", tmp_path / "back", card, {"version": "0"})
    provenance = json.loads((tmp_path / "back" / "provenance.json").read_text())
    assert provenance == {"imported_from": layout, "target": card.name, "version": "0"}
    target = load_target(card.spec)
    drafts = []
    for folder in ("ours", "back"):
        one = load_drafter(tmp_path / folder, target)
        state, taps = one.new_state(2, 16), torch.randn(2, 6, 3, 32, generator=torch.Generator().manual_seed(1))
        one.observe(state, [0, 1], torch.zeros(2, 6, dtype=torch.long), taps, [6, 4])
        drafts.append(one.propose(state, [0, 1], torch.tensor([7, 8])).tokens)
    assert torch.equal(*drafts)


def test_what_is_no_drafter_is_not_taken_for_one(card: TargetCard, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        recognise(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="in no layout of a drafter that is known"):
        recognise(card.folder)
    (tmp_path / "file").write_text("text")
    with pytest.raises(ConfigError, match="a file that is no GGUF"):
        recognise(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"architecture 'llama' is not a drafter"):
        read_parts(card.folder / "tiny.gguf", card)
    with pytest.raises(ConfigError, match="layout 'eagle' is not known"):
        read_parts(card.folder, card, "eagle")
    with pytest.raises(ConfigError, match="layout 'blockdraft' is not written for others"):
        export(save(tmp_path / "ours", "plain"), tmp_path / "x", "blockdraft", card)
    assert len(LAYOUTS) == 9
