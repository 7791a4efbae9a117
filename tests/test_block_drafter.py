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
    return model.eval()


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("anchor_drafts", [False, True])
@torch.no_grad()
def test_training_rows_equal_cached_inference_at_every_anchor(attention, anchor_drafts):
    config = drafter_config(anchor_drafts=anchor_drafts, **ATTENTION[attention])
    model, target = random_model(config), tiny_target("llama")
    length = 21
    ids = torch.randint(0, 90, (1, length), generator=torch.Generator().manual_seed(1))
    target.set_taps(config.tap_ids)
    taps = target.forward(ids, target.new_cache(1, 64), [0]).taps

    # training: one pass, a block at every anchor
    anchors = torch.arange(length)[None]
    positions = anchors[..., None] + torch.arange(config.block_size)
    block_ids = torch.full_like(positions, MASK)
    block_ids[..., 0] = ids
    context = model.context(taps, torch.arange(length)[None])
    rows = model(target.embed(block_ids), positions, context, anchors)
    drafts = target.head(rows[:, :, -config.max_drafts :]).argmax(-1)

    # inference: token after token, the context cache growing by what was committed
    seen = []
    handle = model.norm.register_forward_hook(lambda module, args, output: seen.append(output))
    drafter = BlockDrafter(model, target)
    state = drafter.new_state(2, 64)
    for anchor in range(length):
        proposal = drafter.propose(state, [1], ids[:, anchor])
        torch.testing.assert_close(seen[-1][0, 0], rows[0, anchor], rtol=1e-5, atol=1e-5)
        assert torch.equal(proposal.tokens[0], drafts[0, anchor])
        drafter.observe(state, [1], ids[:, anchor : anchor + 1], taps[:, anchor : anchor + 1], [1])
    handle.remove()
    if anchor_drafts:
        assert proposal.tokens.shape == (1, config.block_size)


@torch.no_grad()
def test_rows_of_a_batch_draft_as_they_do_alone():
    config = drafter_config()
    target = tiny_target("llama")
    drafter = BlockDrafter(random_model(config), target)
    generator = torch.Generator().manual_seed(2)
    lengths = [3, 9, 0]
    taps = torch.randn(3, 9, 2, 32, generator=generator)
    anchors = torch.tensor([7, 8, 9])
    together = drafter.new_state(4, 64)
    drafter.observe(together, [2, 0, 3], torch.zeros(3, 9, dtype=torch.long), taps, lengths)
    proposal = drafter.propose(together, [2, 0, 3], anchors)
    for b, length in enumerate(lengths):
        alone = drafter.new_state(1, 64)
        drafter.observe(alone, [0], torch.zeros(1, length, dtype=torch.long), taps[b : b + 1, :length], [length])
        assert torch.equal(drafter.propose(alone, [0], anchors[b : b + 1]).tokens[0], proposal.tokens[b])


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
