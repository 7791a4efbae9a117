"""DFlare and the ablations: slow oracles, what collapses into what, checkpoints, combinations that make no sense."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_block_drafter import DFLARE, FAMILY, MASK, TOKEN_BY_TOKEN, drafter_config, member_config, random_model
from tiny import tiny_target

from blockdraft.config import ConfigError, DrafterConfig
from blockdraft.drafters.block import BlockDrafter, BlockModel
from blockdraft.drafters.checkpoint import load_drafter, load_model, save_drafter
from blockdraft.drafters.fusion import bell_weights


@torch.no_grad()
def test_dflare_with_equal_mixes_and_tied_projections_is_the_dflash_it_collapses_to():
    dflash = random_model(drafter_config())
    dflare = BlockModel(drafter_config(**DFLARE)).eval()
    mix = torch.tensor([0.3, 0.7])
    shares = torch.eye(32)
    dflash.fc.weight.copy_(torch.cat([mix[0] * shares, mix[1] * shares], dim=1))
    weights = {name: value for name, value in dflash.state_dict().items() if name != "fc.weight"}
    weights["layer_fusion_weights"] = mix.log().repeat(2, 1) + torch.tensor([[0.0], [5.0]])  # softmax does not see it
    for name in [f"layers.{layer}.self_attn.{kind}_proj" for layer in range(2) for kind in "kv"]:
        weights[f"{name}_target.weight"] = weights[f"{name}.weight"]
    dflare.load_state_dict(weights)
    generator = torch.Generator().manual_seed(3)
    taps, block = torch.randn(2, 9, 2, 32, generator=generator), torch.randn(2, 3, 5, 32, generator=generator)
    lengths = torch.tensor([[0, 4, 9], [1, 2, 8]])
    positions = lengths[..., None] + torch.arange(5)

    def rows(model):
        return model(block, positions, model.context(taps, torch.arange(9).expand(2, -1)), lengths)

    torch.testing.assert_close(rows(dflare), rows(dflash), rtol=1e-5, atol=1e-5)
    dflare.layer_fusion_weights[1, 0] += 1.0
    assert (rows(dflare) - rows(dflash)).abs().max() > 1e-2
    assert dflare.hidden_norm.weight.numel() == 32 and not hasattr(dflare, "fc")


@pytest.mark.parametrize("norms", ["shared", "layerwise"])
@torch.no_grad()
def test_layerwise_fusion_equals_a_slow_loop(norms):
    model = random_model(drafter_config(tap_ids=(0, 1, 2), fusion_norm=norms, **DFLARE))
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if name.startswith("hidden_norm"):
            parameter.uniform_(0.5, 2.0, generator=generator)
    taps = torch.randn(2, 4, 3, 32, generator=generator)
    context = model.context(taps, torch.zeros(2, 4, dtype=torch.long))  # at position 0 nothing is rotated
    for n, layer in enumerate(model.layers):
        powers = [math.exp(float(weight)) for weight in model.layer_fusion_weights[n]]
        norm = model.hidden_norms[n] if norms == "layerwise" else model.hidden_norm
        for b in range(2):
            for s in range(4):
                mixed = sum(power / sum(powers) * taps[b, s, t] for t, power in enumerate(powers))
                fused = mixed * (mixed.pow(2).mean() + 1e-5).rsqrt() * norm.weight
                keys = (layer.self_attn.k_proj_target.weight @ fused).view(2, 16)
                keys = keys * (keys.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * layer.self_attn.k_norm.weight
                values = (layer.self_attn.v_proj_target.weight @ fused).view(2, 16)
                torch.testing.assert_close(context.layers[n][0][b, :, s], keys, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(context.layers[n][1][b, :, s], values, rtol=1e-5, atol=1e-5)


def test_where_the_mixes_start():
    config = drafter_config(num_layers=7, num_target_layers=9, tap_ids=tuple(range(9)), **DFLARE)
    peaks = BlockModel(config).layer_fusion_weights.detach()
    assert peaks.argmax(1).tolist() == [0, 1, 2, 3, 5, 6, 7] and peaks.unique().tolist() == [0.0, 2.0]
    assert float(peaks.softmax(1).max()) == pytest.approx(0.48, abs=0.01)
    assert bell_weights(3, 5).tolist() == [[0, -2, -4, -6, -8], [-4, -2, 0, -2, -4], [-8, -6, -4, -2, 0]]
    assert bell_weights(1, 3).tolist() == [[-2, 0, -2]]


@pytest.mark.parametrize("injection", ["none", "input"])
@torch.no_grad()
def test_context_of_tokens_and_drafting_token_by_token_is_one_causal_pass(injection):
    """Without injection into keys and values, nothing tells the context from a block: all is one causal sequence."""
    model, target = random_model(member_config(f"autoregressive-{injection}")), tiny_target("llama")
    generator = torch.Generator().manual_seed(5)
    ids, taps = torch.randint(0, 90, (2, 11), generator=generator), torch.randn(2, 7, 2, 32, generator=generator)
    x, at, length = target.embed(ids), torch.arange(11).expand(2, -1), torch.tensor([[7], [7]])
    context = model.context(taps, at[:, :7], x[:, :7])
    ours = model(x[:, None, 7:], at[:, None, 7:], context, length, context.before(length))[:, 0]
    if injection == "input":
        said = [torch.zeros(2, 32)]
        for s in range(7):
            fused = torch.cat([taps[:, s, 0], taps[:, s, 1]], dim=-1) @ model.fc.weight.T
            said.append(fused * (fused.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * model.hidden_norm.weight)
        said += [said[-1]] * 3  # behind the anchor nothing newer is known
        x = x + torch.stack(said, dim=1) @ model.input_proj.weight.T
    nothing = torch.zeros(2, 2, 0, 16)
    whole = model.norm(model.rows(x[:, None], at[:, None], [(nothing, nothing)] * 2, torch.zeros_like(length))[0])
    torch.testing.assert_close(ours, whole[:, 0, 7:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("member", ["dflash", "input", "none", "autoregressive"])
@torch.no_grad()
def test_smaller_blocks_can_be_drafted_than_were_trained(member):
    config = member_config(member)
    model, target = random_model(config), tiny_target("llama")
    small = BlockDrafter(model, target, block_size=3)
    assert small.block_size == 3 and small.max_drafts == config.max_drafts - 2
    generator = torch.Generator().manual_seed(6)
    taps, ids = torch.randn(1, 9, 2, 32, generator=generator), torch.randint(0, 90, (1, 9), generator=generator)
    state, seen = small.new_state(1, 64), []
    small.observe(state, [0], ids, taps, [9])
    model.norm.register_forward_hook(lambda module, args, output: seen.append(output[:, 0]))
    drafts = small.propose(state, [0], torch.tensor([7])).tokens
    if config.order == "autoregressive":  # the same drafts, fewer of them
        whole = BlockDrafter(model, target)
        assert torch.equal(whole.propose(state, [0], torch.tensor([7])).tokens[:, :3], drafts)
        return
    anchor, length = torch.tensor([[[7, MASK, MASK]]]), torch.tensor([[9]])
    context = model.context(taps, torch.arange(9)[None], target.embed(ids))
    rows = model(target.embed(anchor), 9 + torch.arange(3)[None, None], context, length, context.before(length))
    torch.testing.assert_close(seen[0], rows[:, 0], rtol=1e-5, atol=1e-5)
    assert drafts.shape == (1, 2)


@pytest.mark.parametrize("size", [1, 6])
def test_block_sizes_that_were_not_trained_are_refused(tmp_path, size):
    save_drafter(tmp_path, random_model(drafter_config()), None, {})
    with pytest.raises(ConfigError, match=f"block_size={size}: the drafter has blocks of 2 to 5"):
        load_drafter(tmp_path, tiny_target("llama"), block_size=size)


@pytest.mark.parametrize("member", FAMILY)
def test_every_member_comes_back_equal(tmp_path, member):
    architectures = {"dflash": "DFlashDraftModel", "dflare": "QwenDFlareDraftModel"}
    config = member_config(member, "mixed")
    model = random_model(config)
    save_drafter(tmp_path, model, None, {}, dtype=torch.float32)
    loaded, _ = load_model(tmp_path)
    assert loaded.config == config
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["architectures"] == [architectures.get(member, "BlockDraftModel")]
    assert ("blockdraft_config" in values) == (member not in architectures)


def test_a_dflare_folder_has_its_authors_names(tmp_path):
    save_drafter(tmp_path, random_model(drafter_config(**DFLARE)), None, {})
    tensors = load_file(tmp_path / "model.safetensors")
    names = {name for name in tensors if not name.startswith("layers.")}
    assert names == {"layer_fusion_weights", "hidden_norm.weight", "norm.weight"}
    projections = {name for name in tensors if name.startswith("layers.1.self_attn.") and "_proj" in name}
    plain = {f"layers.1.self_attn.{x}_proj.weight" for x in "qkvo"}
    assert projections == plain | {f"layers.1.self_attn.{x}_proj_target.weight" for x in "kv"}
    assert tensors["layer_fusion_weights"].shape == (2, 2)
    assert tensors["layers.1.self_attn.k_proj_target.weight"].shape == (32, 32)
    # their checkpoints have another architecture, and settings of their training beside the others
    values = json.loads((tmp_path / "config.json").read_text())
    foreign = {**values, "architectures": ["DFlareQwen3Model"], "num_anchors": 512, "loss_decay_gamma": 7.0}
    (tmp_path / "config.json").write_text(json.dumps(foreign))
    loaded = load_model(tmp_path)[0].config
    assert {axis: getattr(loaded, axis) for axis in DFLARE} == DFLARE

    def refused(message, architecture, changed=None, **settings):
        (tmp_path / "config.json").write_text(json.dumps({**values, "architectures": [architecture], **settings}))
        save_file(tensors if changed is None else changed, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=message):
            load_model(tmp_path)

    refused("lacks tensor 'fc.weight'", "DFlashDraftModel")
    refused("'blockdraft_config' of a BlockDraftModel must say", "BlockDraftModel")
    refused("must say", "BlockDraftModel", blockdraft_config={"fusion": "layerwise"})
    kept = {name: value for name, value in tensors.items() if "k_proj_target" not in name}
    refused("lacks tensor 'layers.0.self_attn.k_proj_target.weight'", "QwenDFlareDraftModel", kept)
    wide = {**tensors, "layer_fusion_weights": torch.zeros(2, 3, dtype=torch.bfloat16)}
    refused(r"'layer_fusion_weights' is \[2, 3\], expected \[2, 2\]", "QwenDFlareDraftModel", wide)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"injection": "none"}, "takes no taps"),
        ({"tap_ids": ()}, "injection 'kv' needs taps"),
        ({"injection": "input", "fusion": "layerwise"}, "fusion 'layerwise' needs injection 'kv', not 'input'"),
        ({"injection": "input", "context_projections": "separate"}, "context_projections 'separate' needs injection"),
        ({"fusion_norm": "layerwise"}, "fusion_norm 'layerwise' needs fusion 'layerwise'"),
        ({"order": "autoregressive"}, "set anchor_drafts"),
        ({**TOKEN_BY_TOKEN, "markov_rank": 2}, "leave out markov_rank"),
        ({**TOKEN_BY_TOKEN, "is_causal": False}, "is_causal cannot be false"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(axes, message):
    with pytest.raises(ConfigError, match=message) as error:
        DrafterConfig.parse({**drafter_config().model_dump(), **axes})
    assert "\n" not in str(error.value)
