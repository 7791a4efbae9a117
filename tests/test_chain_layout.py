"""Folders and settings of EAGLE-3 and MTP drafters: published names, and a strict reader."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_chain_drafters import MEMBERS, chain_config, ids_of, random_chain

from blockdraft.config import ConfigError, DrafterConfig
from blockdraft.drafters.checkpoint import eagle_taps, load_model, save_drafter


@pytest.mark.parametrize("member", MEMBERS)
def test_a_saved_drafter_comes_back_equal(tmp_path, member):
    config = chain_config(member, rope_theta=5e4, rope_scaling={"rope_type": "linear", "factor": 2.0})
    model, ids = random_chain(config), ids_of(config)
    save_drafter(tmp_path, model, ids, {}, torch.float32)
    loaded, loaded_ids = load_model(tmp_path)
    assert type(loaded) is type(model) and loaded.config == config
    assert (loaded_ids is None) == (ids is None) and (ids is None or torch.equal(loaded_ids, ids))
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_folders_have_the_published_names(tmp_path):
    config = chain_config("eagle3")
    save_drafter(tmp_path / "e", random_chain(config), ids_of(config), {})
    tensors = load_file(tmp_path / "e" / "model.safetensors")
    attention = {f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"}
    norms = {f"midlayer.{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    mlp = {f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert set(tensors) == {*attention, *norms, *mlp, "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (64, 64)
    assert tensors["fc.weight"].shape == (32, 96) and tensors["lm_head.weight"].shape == (40, 32)
    assert tensors["t2d"].nonzero()[:, 0].tolist() == (tensors["d2t"] + torch.arange(40)).tolist()
    values = json.loads((tmp_path / "e" / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLMEagle3"] and values["model_type"] == "llama"
    assert values["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], "use_aux_hidden_state": True}
    assert (values["draft_vocab_size"], values["norm_before_residual"], values["num_hidden_layers"]) == (40, False, 1)
    save_drafter(tmp_path / "m", random_chain(chain_config("mtp-2")), None, {})
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    own = {f"mtp.{name}.weight" for name in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    assert {name for name in tensors if not name.startswith("mtp.layers.")} == own
    assert "mtp.layers.1.self_attn.q_norm.weight" in tensors


def _drop(name):
    return lambda tensors: tensors.pop(name)


def _other_tokens(tensors):
    tensors["t2d"] = tensors["t2d"].roll(1)


@pytest.mark.parametrize(
    ("member", "damage", "message"),
    [
        ("eagle3", _drop("midlayer.hidden_norm.weight"), "lacks tensor 'midlayer.hidden_norm.weight'"),
        ("eagle3", _drop("lm_head.weight"), "lacks tensor 'lm_head.weight'"),
        ("eagle3", _drop("t2d"), "lacks tensor 't2d'"),
        ("eagle3", _drop("d2t"), "draft_vocab_size is 40, but model.safetensors lacks 'd2t'"),
        ("eagle3", _other_tokens, "'t2d' and 'd2t' do not name the same tokens"),
        ("eagle3", lambda t: t.update({"midlayer.extra": torch.zeros(1)}), "unknown tensor 'midlayer.extra'"),
        ("eagle3", lambda t: t.update({"fc.weight": torch.zeros(32, 64)}), r"'fc.weight' is \[32, 64\], expected"),
        ("mtp", _drop("mtp.fc.weight"), "lacks tensor 'mtp.fc.weight'"),
        ("mtp", lambda t: t.update({"norm.weight": torch.zeros(32)}), "unknown tensor 'norm.weight'"),
    ],
)
def test_loading_is_strict(tmp_path, member, damage, message):
    config = chain_config(member)
    save_drafter(tmp_path, random_chain(config), ids_of(config), {})
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("member", "changes", "message"),
    [
        ("eagle3", {"eagle_config": None}, "'eagle_config' is missing"),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "it is not an EAGLE-3 drafter"),
        ("eagle3", {"num_hidden_layers": 2}, "family 'eagle3' is one layer: num_layers is 2"),
        ("eagle3", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("eagle3", {"mlp_bias": True}, "mlp_bias is not supported"),
        ("mtp", {"mtp_config": {"target_layer_ids": [2, 3]}}, "listens to one layer"),
        ("mtp", {"block_size": None}, "'block_size' is missing"),
    ],
)
def test_settings_of_a_folder_are_checked(tmp_path, member, changes, message):
    config = chain_config(member)
    save_drafter(tmp_path, random_chain(config), ids_of(config), {})
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, **changes}))
    with pytest.raises(ConfigError, match=message) as error:
        load_model(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": "autoregressive"}, "order 'autoregressive' is for family 'block', not 'eagle3'"),
        ({"injection": "input"}, "injection 'input' is for family 'block'"),
        ({"fusion": "layerwise"}, "fusion 'layerwise' is for family 'block'"),
        ({"markov_rank": 3}, "markov_rank '3' is for family 'block'"),
        ({"anchor_drafts": False}, "set anchor_drafts"),
        ({"mask_token_id": 3}, "family 'eagle3' has no masks: leave out mask_token_id"),
        ({"is_causal": True}, "is_causal is for family 'block'"),
        ({"layer_types": ("full_attention",)}, "layer_types is for family 'block'"),
        ({"num_layers": 2}, "is one layer"),
        ({"family": "mtp"}, "listens to one layer, the target's last: 3 taps"),
        ({"family": "mtp", "tap_ids": (2,)}, r"the target's last layer: tap_ids must be \[3\]"),
        ({"family": "mtp", "tap_ids": (3,), "norm_before_residual": True}, "for family 'eagle3', not 'mtp'"),
        ({"family": "block"}, "family 'block' needs a mask_token_id"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        DrafterConfig.parse({**chain_config("eagle3").model_dump(), **changes})
    assert "\n" not in str(error.value)


def test_eagles_three_layers():
    assert eagle_taps(36) == (1, 17, 32) and eagle_taps(30) == (1, 14, 26)
    with pytest.raises(ConfigError, match=r"no room for EAGLE-3's taps: set drafter.tap_ids"):
        eagle_taps(4)
