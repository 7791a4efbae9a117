"""EAGLE-3 and MTP: training rows are cached drafting, and each step is what was published."""

import pytest
import torch
from tiny import VOCAB, tiny_target

from blockdraft.config import DrafterConfig, EngineConfig, SamplingParams
from blockdraft.drafters.base import Proposal
from blockdraft.drafters.block import initialise
from blockdraft.drafters.chain import ChainDrafter, ChainModel
from blockdraft.drafters.checkpoint import load_drafter, save_drafter
from blockdraft.drafters.families import new_model
from blockdraft.engine.engine import Engine

MEMBERS = {
    "eagle3": {"family": "eagle3", "tap_ids": (0, 1, 3), "draft_vocab_size": 40},
    "eagle3-normed": {"family": "eagle3", "tap_ids": (0, 1, 3), "norm_before_residual": True},
    "mtp": {"family": "mtp", "tap_ids": (3,), "draft_vocab_size": 40},
    "mtp-2": {"family": "mtp", "tap_ids": (3,), "num_layers": 2},
}


def chain_config(member="eagle3", **changes):
    values = dict(
        hidden_size=32,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=48,
        vocab_size=VOCAB,
        block_size=5,
        num_target_layers=4,
        anchor_drafts=True,
    )
    return DrafterConfig(**{**values, **MEMBERS[member], **changes})


def random_chain(config, seed=0):
    model = new_model(config)
    assert isinstance(model, ChainModel)
    initialise(model, seed, std=0.3)
    return model.eval()


def ids_of(config):
    """What a reduced head can say: every second id and a little more."""
    return None if config.draft_vocab_size is None else torch.arange(1, 1 + 2 * config.draft_vocab_size, 2)


def said(target, ids, config):
    """The taps of texts [B, S]: [B, S, T, D]."""
    target.set_taps(config.tap_ids)
    return target.forward(ids, target.new_cache(len(ids), 64), list(range(len(ids)))).taps


@pytest.mark.parametrize("member", MEMBERS)
@torch.no_grad()
def test_training_rows_equal_cached_drafting_at_every_anchor(member):
    config = chain_config(member)
    model, target, length = random_chain(config), tiny_target("llama"), 13
    ids = torch.randint(0, 90, (1, length), generator=torch.Generator().manual_seed(1))
    taps = said(target, ids, config)

    # drafting: token after token, the cache growing by what was committed; a rejected draft comes along
    seen, proposed = [], []
    handle = model.norm.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    drafter = ChainDrafter(model, target, ids_of(config))
    state = drafter.new_state(2, 64)
    for anchor in range(length):
        proposed.append(drafter.propose(state, [1], ids[:, anchor]).tokens[0])
        new = slice(anchor, anchor + 2)
        drafter.observe(state, [1], ids[:, new], taps[:, new], [1])
    handle.remove()
    proposed, seen = torch.stack(proposed), torch.stack(seen).view(length, config.block_size, -1)
    assert proposed.shape == (length, config.max_drafts) == (length, config.block_size)

    # training: one pass, a chain at every anchor, had the answer been what was drafted
    anchors = torch.arange(length)[None]
    positions = anchors[..., None] + torch.arange(config.block_size)
    inputs = torch.cat([ids[0, :, None], proposed[:, :-1]], dim=1)[None]

    def rows(taps):
        context = model.context(taps, torch.arange(length)[None], target.embed(ids))
        return model(target.embed(inputs), positions, context, anchors, context.before(anchors))[0]

    torch.testing.assert_close(rows(taps), seen, rtol=1e-3, atol=3e-4)  # a chain hands its rounding on
    # control: features of the token itself, or of two before, are another drafter
    for shift in (-1, 1):
        assert (rows(taps.roll(shift, dims=1)) - seen)[3:].abs().amax(dim=(1, 2)).min() > 0.1


@torch.no_grad()
def slow_eagle(model, embedding, taps, tokens, anchor, drafts):
    """EAGLE-3 from its description, one number of one row at a time: logits after the anchor and after each draft.

    Rows are (embedding of a token, features of the token before it); attention is over all of them, causal.
    """
    weights, config = model.state_dict(), model.config
    groups, width = config.num_kv_heads, config.head_dim

    def norm(x, name):
        return x / (x.pow(2).mean() + config.rms_norm_eps).sqrt() * weights[f"{name}.weight"]

    def turned(x, position):  # rotary, pair by pair
        half, result = width // 2, x.clone()
        for i in range(half):
            angle = torch.tensor(position * config.rope_theta ** (-2 * i / width))
            a, b = x[..., i], x[..., i + half]
            result[..., i], result[..., i + half] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
        return result

    keys, values = [], []

    def row(token, features, position):
        x = torch.cat([norm(embedding[token], "midlayer.input_layernorm"), norm(features, "midlayer.hidden_norm")])
        q, k, v = (weights[f"midlayer.self_attn.{name}_proj.weight"] @ x for name in "qkv")
        keys.append(turned(k.view(groups, width), position))
        values.append(v.view(groups, width))
        query, mixed = turned(q.view(config.num_heads, width), position), []
        for head in range(config.num_heads):
            group = head * groups // config.num_heads
            scores = torch.stack([query[head] @ key[group] for key in keys]) / width**0.5
            mixed.append(sum(p * value[group] for p, value in zip(scores.softmax(0), values, strict=True)))
        residual = norm(features, "midlayer.hidden_norm") if config.norm_before_residual else features
        x = residual + weights["midlayer.self_attn.o_proj.weight"] @ torch.cat(mixed)
        y = norm(x, "midlayer.post_attention_layernorm")
        gate, up = (weights[f"midlayer.mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
        return x + weights["midlayer.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)

    fused = [weights["fc.weight"] @ torch.cat(list(tap)) for tap in taps]
    for position in range(1, anchor):
        row(tokens[position], fused[position - 1], position)
    features, logits = fused[anchor - 1], []
    for k, token in enumerate([tokens[anchor], *drafts]):
        features = row(token, features, anchor + k)
        logits.append(weights["lm_head.weight"] @ norm(features, "norm"))
    return torch.stack(logits)


@pytest.mark.parametrize("member", ["eagle3", "eagle3-normed"])
@torch.no_grad()
def test_eagle_is_its_description(member):
    config = chain_config(member)
    model, target = random_chain(config), tiny_target("llama")
    for parameter in model.parameters():  # norms of one would hide a norm left out
        parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    ids = torch.randint(0, 90, (2, 12), generator=torch.Generator().manual_seed(3))
    taps = said(target, ids, config)
    context = model.context(taps, torch.arange(12).expand(2, -1), target.embed(ids))
    anchors = torch.tensor([[3, 7], [1, 6]])
    positions = anchors[..., None] + torch.arange(5)
    inputs = ids.gather(1, positions.flatten(1)).view_as(positions)
    hidden = model(target.embed(inputs), positions, context, anchors, context.before(anchors))
    ours = model.lm_head(hidden)
    embedding = target.embed(torch.arange(VOCAB))
    for b in range(2):
        for a in range(2):
            anchor = int(anchors[b, a])
            slow = slow_eagle(model, embedding, taps[b], ids[b].tolist(), anchor, inputs[b, a, 1:].tolist())
            torch.testing.assert_close(ours[b, a], slow, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_mtp_is_its_description():
    """One causal pass per step over all rows so far: what is fed back is the output before the final norm."""
    config = chain_config("mtp-2")
    model, target = random_chain(config), tiny_target("llama")
    ids = torch.randint(0, 90, (1, 9), generator=torch.Generator().manual_seed(4))
    taps, anchor = said(target, ids, config), 5
    context = model.context(taps[:, :anchor], torch.arange(anchor)[None], target.embed(ids[:, :anchor]))
    at = torch.tensor([[anchor]])
    positions = at[..., None] + torch.arange(4)
    ours = model(target.embed(ids[:, None, anchor:]), positions, context, at, context.before(at))[0, 0]

    def norm(x, weight):
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    features, nothing = [taps[0, p - 1, 0] for p in range(1, anchor + 1)], torch.zeros(1, 2, 0, 16)
    for k in range(4):
        tokens = target.embed(ids[0, 1 : anchor + 1 + k])
        parts = (
            norm(tokens, model.pre_fc_norm_embedding.weight),
            norm(torch.stack(features), model.pre_fc_norm_hidden.weight),
        )
        x = (torch.cat(parts, dim=-1) @ model.fc.weight.T)[None, None]
        row = torch.arange(1, anchor + 1 + k)[None, None]
        for layer in model.layers:
            x, _ = layer(x, model.tables(row, x.dtype), (nothing, nothing), torch.zeros(1, 1), row, True)
        features.append(x[0, 0, -1])
        torch.testing.assert_close(ours[k], norm(x[0, 0, -1], model.norm.weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("member", MEMBERS)
@torch.no_grad()
def test_rows_of_a_batch_draft_as_they_do_alone_and_twice_the_same(member):
    config = chain_config(member)
    target = tiny_target("llama")
    drafter = ChainDrafter(random_chain(config), target, ids_of(config))
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 90, (3, 12), generator=generator)
    taps = torch.randn(3, 12, len(config.tap_ids), 32, generator=generator)
    anchors = torch.tensor([7, 8, 9])
    slots, together = [2, 0, 3], drafter.new_state(4, 64)
    commits = [([3, 9, 0], 9), ([2, 1, 3], 3), ([1, 1, 2], 2)]  # how many of each row's next tokens; how many passed
    for row in slots:
        drafter.reset(together, row)
    for counts, width in commits:
        drafter.observe(together, slots, tokens[:, :width], taps[:, :width], counts)
        drafter.propose(together, slots, anchors)  # of a round that is then interrupted
    proposal = drafter.propose(together, slots, anchors)
    assert torch.equal(drafter.propose(together, slots, anchors).tokens, proposal.tokens)
    for b in range(3):
        alone = drafter.new_state(1, 64)
        for counts in (counts for counts, _ in commits if counts[b]):
            one = slice(b, b + 1), slice(counts[b])
            drafter.observe(alone, [0], tokens[one], taps[one], counts[b : b + 1])
        assert torch.equal(drafter.propose(alone, [0], anchors[b : b + 1]).tokens[0], proposal.tokens[b])
    drafter.reset(together, 2)  # another text in the slot
    for row, b in ((2, 1),):
        drafter.observe(together, [row], tokens[b : b + 1], taps[b : b + 1], [4])
        fresh = drafter.new_state(1, 64)
        drafter.observe(fresh, [0], tokens[b : b + 1], taps[b : b + 1], [4])
        again = drafter.propose(together, [row], anchors[:1]).tokens
        assert torch.equal(again, drafter.propose(fresh, [0], anchors[:1]).tokens)


class Guided(ChainDrafter):
    """Notes what each row has committed, and drafts what follows in texts that it is told, with errors."""

    def __init__(self, *args, texts):
        super().__init__(*args)
        self.texts, self.committed = texts, {}

    def reset(self, state, row):
        super().reset(state, row)
        self.committed[row] = []

    def observe(self, state, rows, tokens, taps, counts):
        super().observe(state, rows, tokens, taps, counts)
        for row, ids, count in zip(rows, tokens.tolist(), counts, strict=True):
            self.committed[row] += ids[:count]

    def propose(self, state, rows, anchors, coupling=None):
        drafts = super().propose(state, rows, anchors).tokens
        for b, (row, anchor) in enumerate(zip(rows, anchors.tolist(), strict=True)):
            done = [*self.committed[row], anchor]
            text = next(text for text in self.texts if text[: len(done)] == done)
            for k, token in enumerate(text[len(done) : len(done) + self.max_drafts]):
                drafts[b, k] = token + ((len(done) + k) % 5 == 0)
        return Proposal(drafts)


@pytest.mark.parametrize("member", ["eagle3", "mtp-2"])
@torch.no_grad()
def test_what_rounds_leave_is_what_one_pass_over_the_text_would(member):
    config, target = chain_config(member), tiny_target("llama")
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 90, (n,), generator=generator).tolist() for n in (1, 7, 30)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)

    def answers(drafter):
        engine = Engine(target, drafter, EngineConfig(slots=3, capacity=64))
        requests = [engine.add(prompt, params) for prompt in prompts]
        engine.run()
        return engine, [request.output_ids for request in requests]

    _, plain = answers(None)
    texts = [prompt + answer for prompt, answer in zip(prompts, plain, strict=True)]
    drafter = Guided(random_chain(config), target, texts=texts)
    engine, drafted = answers(drafter)
    assert drafted == plain and engine.stats.accepted > 30 and engine.stats.drafted > engine.stats.accepted + 10
    state = engine.pair.state
    for row, text in drafter.committed.items():
        ids, length = torch.tensor([text]), len(text)
        assert state.lengths[row] == length > 15, (
            "all but what the last round gave, which is shown when it is next asked"
        )
        context = drafter.model.context(said(target, ids, config), torch.arange(length)[None], target.embed(ids))
        for layer, (keys, values) in enumerate(context.layers):  # but slot 0, which nobody reads
            torch.testing.assert_close(state.keys[layer][row, :, 1:length], keys[0, :, 1:], rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(state.values[layer][row, :, 1:length], values[0, :, 1:], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(state.features[row], context.features[0, -1], rtol=1e-3, atol=1e-4)


def test_a_slot_can_be_filled_to_its_end():
    config = chain_config("eagle3")
    drafter = ChainDrafter(random_chain(config), tiny_target("llama"), ids_of(config))
    state = drafter.new_state(1, 64)
    drafter.observe(state, [0], torch.zeros(1, 63, dtype=torch.long), torch.zeros(1, 63, 3, 32), [63])
    assert drafter.propose(state, [0], torch.tensor([5])).tokens.shape == (1, 5)
    drafter.observe(state, [0], torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, 3, 32), [1])
    assert state.lengths == [64]


def test_shorter_chains_are_the_beginnings_of_longer_ones(tmp_path):
    config, target = chain_config("eagle3"), tiny_target("llama")
    save_drafter(tmp_path, random_chain(config), ids_of(config), {}, torch.float32)
    long, short = load_drafter(tmp_path, target), load_drafter(tmp_path, target, block_size=2)
    assert (long.max_drafts, short.max_drafts) == (5, 2)
    drafts = []
    for drafter in (long, short):
        state = drafter.new_state(1, 64)
        ids = torch.arange(7)[None]
        drafter.observe(state, [0], ids, said(target, ids, config), [7])
        drafts.append(drafter.propose(state, [0], torch.tensor([7])).tokens)
    assert torch.equal(drafts[0][:, :2], drafts[1])
    assert set(drafts[0].flatten().tolist()) <= set(ids_of(config).tolist())
