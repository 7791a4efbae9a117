"""The block drafter: training rows are cached inference, checkpoints are strict, wrong pairs are refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_target

from blockdraft.config import ConfigError, DrafterConfig
from blockdraft.drafters.block import BlockDrafter, BlockModel, initialise
from blockdraft.drafters.checkpoint import default_taps, load_drafter, load_model, save_drafter

MASK = 95
ATTENTION = {
    "full": {},
    "windowed": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6, "is_causal": False},
    "causal": {"is_causal": True},
    "mixed": {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 5},
}

TOKEN_BY_TOKEN = {"order": "autoregressive", "anchor_drafts": True}
DFLARE = {"fusion": "layerwise", "context_projections": "separate"}
FAMILY = {
    "dflash": {},
    "layerwise": {"fusion": "layerwise"},
    "layerwise-norms": {"fusion": "layerwise", "fusion_norm": "layerwise"},
    "separate": {"context_projections": "separate"},
    "dflare": DFLARE,
    "input": {"injection": "input"},
    "none": {"injection": "none", "tap_ids": ()},
    "autoregressive": TOKEN_BY_TOKEN,
    "autoregressive-dflare": {**TOKEN_BY_TOKEN, **DFLARE},
    "autoregressive-input": {**TOKEN_BY_TOKEN, "injection": "input"},
    "autoregressive-none": {**TOKEN_BY_TOKEN, "injection": "none", "tap_ids": ()},
}


def drafter_config(**changes):
    values = dict(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=48,
        vocab_size=96,
        block_size=5,
        mask_token_id=MASK,
        tap_ids=(0, 2),
        num_target_layers=4,
    )
    return DrafterConfig(**{**values, **changes})


def random_model(config, seed=0):
    model = BlockModel(config)
    initialise(model, seed, std=0.3)
    if model.markov_head is not None:  # it says nothing before it is trained
        assert not model.markov_head.w2.weight.any()
        torch.nn.init.normal_(model.markov_head.w2.weight, std=2.0, generator=torch.Generator().manual_seed(seed))
    if config.fusion == "layerwise":
        torch.nn.init.normal_(model.layer_fusion_weights, generator=torch.Generator().manual_seed(seed))
    return model.eval()


def members():
    """Every member with every attention it can have, as (member, attention, anchor_drafts)."""
    for member, axes in FAMILY.items():
        for number, attention in enumerate(ATTENTION):
            if axes.get("order") == "autoregressive":
                yield member, attention, True
            else:
                yield from ((member, attention, bool((number + n) % 2)) for n in range(1 if axes else 2))


def member_config(member, attention="full", **changes):
    values = {**ATTENTION[attention], **FAMILY[member]}
    if values.get("order") == "autoregressive" and values.get("is_causal") is False:
        del values["is_causal"]
    return drafter_config(**{**values, **changes})


@pytest.mark.parametrize(("member", "attention", "anchor_drafts"), list(members()))
@torch.no_grad()
def test_training_rows_equal_cached_inference_at_every_anchor(member, attention, anchor_drafts):
    config = member_config(member, attention, anchor_drafts=anchor_drafts)
    model, target = random_model(config), tiny_target("llama")
    length = 13 if config.order == "autoregressive" else 21
    ids = torch.randint(0, 90, (1, length), generator=torch.Generator().manual_seed(1))
    target.set_taps(config.tap_ids)
    taps = target.forward(ids, target.new_cache(1, 64), [0]).taps

    # inference: token after token, the context cache growing by what was committed; a rejected draft comes along
    seen, proposed = [], []
    handle = model.norm.register_forward_hook(lambda module, args, output: seen.append(output[0, 0]))
    drafter = BlockDrafter(model, target)
    state = drafter.new_state(2, 64)
    for anchor in range(length):
        proposed.append(drafter.propose(state, [1], ids[:, anchor]).tokens[0])
        new = slice(anchor, anchor + 2)
        drafter.observe(state, [1], ids[:, new], None if taps is None else taps[:, new], [1])
    handle.remove()
    proposed, seen = torch.stack(proposed), torch.cat(seen).view(length, config.block_size, -1)
    assert proposed.shape == (length, config.max_drafts)
    if anchor_drafts:
        assert config.max_drafts == config.block_size

    # training: one pass, a block at every anchor
    anchors = torch.arange(length)[None]
    positions = anchors[..., None] + torch.arange(config.block_size)
    block_ids = torch.full_like(positions, MASK)
    if config.order == "autoregressive":  # had the answer been what was drafted
        block_ids[0, :, 1:] = proposed[:, :-1]
    block_ids[..., 0] = ids
    context = model.context(taps, torch.arange(length)[None], target.embed(ids))
    rows = model(target.embed(block_ids), positions, context, anchors, context.before(anchors))
    torch.testing.assert_close(rows[0], seen, rtol=1e-5, atol=1e-5)
    assert torch.equal(target.head(rows[0, :, -config.max_drafts :]).argmax(-1), proposed)


@pytest.mark.parametrize("member", FAMILY)
@torch.no_grad()
def test_rows_of_a_batch_draft_as_they_do_alone(member):
    config = member_config(member)
    target = tiny_target("llama")
    drafter = BlockDrafter(random_model(config), target)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 90, (3, 12), generator=generator)
    taps = torch.randn(3, 12, 2, 32, generator=generator)
    anchors = torch.tensor([7, 8, 9])
    slots, together = [2, 0, 3], drafter.new_state(4, 64)
    commits = [([3, 9, 0], 9), ([2, 1, 3], 3)]  # how many of each row's next tokens, and how many are passed
    for row in slots:
        drafter.reset(together, row)
    for counts, width in commits:
        drafter.observe(together, slots, tokens[:, :width], taps[:, :width], counts)
    proposal = drafter.propose(together, slots, anchors)
    for b in range(3):
        alone = drafter.new_state(1, 64)
        for counts in (counts for counts, _ in commits if counts[b]):
            one = slice(b, b + 1), slice(counts[b])
            drafter.observe(alone, [0], tokens[one], taps[one], counts[b : b + 1])
        assert torch.equal(drafter.propose(alone, [0], anchors[b : b + 1]).tokens[0], proposal.tokens[b])


@torch.no_grad()
def test_scales_on_embeddings_and_logits():
    target = tiny_target("llama")
    plain = random_model(drafter_config())
    scaled = BlockModel(drafter_config(input_embedding_scale=3.5, output_multiplier=0.25, final_logit_softcapping=9.0))
    scaled.load_state_dict(plain.state_dict())
    generator = torch.Generator().manual_seed(3)
    block, taps = torch.randn(1, 2, 5, 32, generator=generator), torch.randn(1, 6, 2, 32, generator=generator)
    positions, lengths = torch.arange(5) + torch.tensor([[[4], [6]]]), torch.tensor([[4, 6]])
    context = plain.context(taps, torch.arange(6)[None])
    expected = plain(block * 3.5, positions, context, lengths) * 0.25
    assert torch.equal(scaled(block, positions, context, lengths), expected)
    assert not torch.allclose(plain(block, positions, context, lengths) * 0.25, expected, atol=1e-3)
    drafts = []
    for model in (plain, scaled):  # the drafter's own path takes the scale too
        drafter = BlockDrafter(model, target)
        state = drafter.new_state(1, 16)
        drafter.observe(state, [0], torch.zeros(1, 6, dtype=torch.long), taps, [6])
        drafts.append(torch.cat([drafter.propose(state, [0], torch.tensor([a])).tokens for a in range(30)]))
    assert not torch.equal(*drafts)


@pytest.mark.parametrize(
    "changes",
    [
        {"input_embedding_scale": 2.0, "injection": "input"},
        {"output_multiplier": 2.0, **TOKEN_BY_TOKEN},
        {"final_logit_softcapping": 30.0, "markov_rank": 2},
    ],
)
def test_scales_that_have_no_meaning_are_refused(changes):
    with pytest.raises(ValueError, match=r"need injection 'kv'|would come before a Markov head"):
        drafter_config(**changes)


def test_a_reduced_head_says_only_its_ids():
    config = drafter_config(draft_vocab_size=7)
    draft_ids = torch.tensor([3, 10, 11, 30, 50, 60, 94])
    target = tiny_target("llama")
    drafter = BlockDrafter(random_model(config), target, draft_ids)
    state = drafter.new_state(1, 64)
    for anchor in range(30):
        tokens = drafter.propose(state, [0], torch.tensor([anchor])).tokens
        assert set(tokens.flatten().tolist()) <= set(draft_ids.tolist())


@pytest.mark.parametrize("reduced", [False, True])
@torch.no_grad()
def test_with_a_markov_head_each_choice_follows_from_the_one_before(reduced):
    draft_ids = torch.arange(1, 96, 2) if reduced else None
    config = drafter_config(markov_rank=3, draft_vocab_size=48 if reduced else None, anchor_drafts=reduced)
    model, target = random_model(config), tiny_target("llama")
    drafter = BlockDrafter(model, target, draft_ids)
    state, seen = drafter.new_state(3, 64), []
    model.norm.register_forward_hook(lambda module, args, output: seen.append(output[:, 0]))
    said = draft_ids.tolist() if reduced else list(range(96))
    changed = 0
    for anchor in range(0, 90, 3):  # among them tokens that the reduced head does not have
        tokens = drafter.propose(state, [0, 1, 2], torch.tensor([anchor, anchor + 1, anchor + 2])).tokens
        for row in range(3):
            previous = anchor + row
            for k, hidden in enumerate(seen[-1][row, -config.max_drafts :]):
                logits = target.head(hidden)[said]
                plain = int(logits.argmax())
                if previous in said:
                    logits = logits + model.markov_head.w2.weight @ model.markov_head.w1.weight[said.index(previous)]
                previous = said[int(logits.argmax())]
                changed += previous != said[plain]
                assert int(tokens[row, k]) == previous
    assert changed > 50


def test_a_saved_drafter_comes_back_equal(tmp_path):
    config = drafter_config(draft_vocab_size=4, markov_rank=2, anchor_drafts=True, **ATTENTION["mixed"])
    model, ids = random_model(config), torch.tensor([5, 6, 20, 95])
    save_drafter(tmp_path / "d", model, ids, {"steps": 3}, dtype=torch.float32)
    save_drafter(tmp_path / "d", model, ids, {"steps": 4}, dtype=torch.float32)  # replaced whole
    loaded, loaded_ids = load_model(tmp_path / "d")
    assert loaded.config == config and torch.equal(loaded_ids, ids)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert json.loads((tmp_path / "d" / "provenance.json").read_text()) == {"steps": 4}
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    names = set(load_file(tmp_path / "d" / "model.safetensors"))
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.q_norm.weight", "d2t"} <= names


def _drop(tensors):
    del tensors["layers.1.mlp.up_proj.weight"]


def _add(tensors):
    tensors["layers.9.extra"] = torch.zeros(1)


def _misshape(tensors):
    tensors["fc.weight"] = torch.zeros(32, 32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop, "lacks tensor 'layers.1.mlp.up_proj"),
        (_add, "unknown tensor 'layers.9.extra'"),
        (_misshape, r"'fc.weight' is \[32, 32\], expected \[32, 64\]"),
    ],
)
def test_loading_is_strict(tmp_path, damage, message):
    save_drafter(tmp_path, random_model(drafter_config()), None, {})
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


def test_files_that_are_no_drafter_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no config"):
        load_model(tmp_path)
    save_drafter(tmp_path, random_model(drafter_config()), None, {})
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="not readable"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="is not a drafter"):
        load_model(tmp_path)


def test_a_failed_save_leaves_the_old_drafter(tmp_path, monkeypatch):
    save_drafter(tmp_path / "d", random_model(drafter_config()), None, {"steps": 1})

    def full_disk(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr("blockdraft.drafters.checkpoint.save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_drafter(tmp_path / "d", random_model(drafter_config(), seed=1), None, {"steps": 2})
    assert json.loads((tmp_path / "d" / "provenance.json").read_text()) == {"steps": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_drafter_for_another_target_is_refused(tmp_path):
    save_drafter(tmp_path, random_model(drafter_config(num_target_layers=7)), None, {})
    with pytest.raises(ValueError, match="for 7 target layers; 'tiny-llama' has 4"):
        load_drafter(tmp_path, tiny_target("llama"))


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [
        (24, 5, (1, 6, 11, 16, 21)),
        (32, 5, (1, 8, 15, 22, 29)),
        (36, 5, (1, 9, 17, 25, 33)),
        (36, 9, (1, 5, 9, 13, 17, 21, 25, 29, 33)),
        (61, 5, (1, 15, 30, 44, 58)),
        (64, 5, (1, 16, 31, 46, 61)),
        (30, 1, (15,)),
    ],
)
def test_default_taps_follow_the_papers_rule(layers, count, expected):
    assert default_taps(layers, count) == expected


def test_too_many_taps_for_a_small_target():
    with pytest.raises(ConfigError, match="no room for 5 distinct taps"):
        default_taps(4, 5)


def test_rotary_settings_of_newer_files_are_not_lost(tmp_path):
    scaling = {"rope_type": "linear", "factor": 4.0}
    save_drafter(tmp_path, random_model(drafter_config(rope_theta=5e4, rope_scaling=scaling)), None, {})
    older = load_model(tmp_path)[0]
    values = json.loads((tmp_path / "config.json").read_text())
    del values["rope_theta"], values["rope_scaling"]
    (tmp_path / "config.json").write_text(json.dumps({**values, "rope_parameters": {"rope_theta": 5e4, **scaling}}))
    newer = load_model(tmp_path)[0]
    assert newer.config == older.config and newer.config.rope_scaling == scaling
    assert torch.equal(newer.inverse_frequencies, older.inverse_frequencies)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[]", "holds list, not settings"), ('{"architectures": null}', "is not a drafter"), ("{", "not readable")],
)
def test_a_config_that_is_none_is_one_line(tmp_path, text, message):
    save_file({}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)
