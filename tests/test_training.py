"""Training: resume bit for bit, keyed randomness, strict settings, and a drafter that learns what it is shown."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_block_drafter import drafter_config
from test_chain_drafters import chain_config
from torch import Tensor
from training import recipe, run, write_answers

from blockdraft.cli.wiring import held_out_acceptance
from blockdraft.config import ConfigError, EngineConfig, OptimConfig, SamplingParams
from blockdraft.drafters.block import BlockModel
from blockdraft.drafters.checkpoint import load_model
from blockdraft.drafters.families import new_model
from blockdraft.drafters.fusion import bell_weights, peak_weights
from blockdraft.drafters.head import draft_index
from blockdraft.engine.engine import Engine
from blockdraft.targets.resolve import load_target, load_tokenizer
from blockdraft.text import encode_chat
from blockdraft.train import loop
from blockdraft.train.batches import Batches, make_batch
from blockdraft.train.data import Sample, make_sample
from blockdraft.train.setup import choose_mask_token, draft_vocabulary
from blockdraft.train.weights import Weights, checkpoints, learning_rate

DFLARE = {"preset": "dflare", "tap_ids": [0, 2, 3], "fusion_init": "bell", "context_init": "copied"}
TOKEN_BY_TOKEN = {"order": "autoregressive", "anchor_drafts": True, "markov_rank": None}
EAGLE = {"preset": "eagle3", "num_layers": 1, "tap_ids": [0, 2, 3], "markov_rank": None}
MTP = {"preset": "mtp", "num_layers": 1, "markov_rank": None}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    recipe(tmp_path)
    return tmp_path


def state(folder: Path) -> dict[str, Tensor]:
    return load_file(checkpoints(folder / "checkpoints")[-1] / "state.safetensors")


def log(folder: Path) -> list[dict[str, Any]]:
    """The log without what a clock has a part in."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in row if "second" not in key} for row in rows]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def fake_tau(model: BlockModel, draft_ids: Tensor | None, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Something that depends on the weights, and spoils the model that it was given."""
    value = abs(float(model.norm.weight.sum())) + 1
    with torch.no_grad():
        model.norm.weight.zero_()
    return {"tau": value, "prompts": len(prompts)}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "bfloat16"},
        {"features": {"mode": "online"}, "optim": {"ema": 0.0}},
        {"optim": {"name": "muon"}, "drafter": {"fusion_init": "whitened"}},
        {"drafter": DFLARE, "optim": {"name": "muon"}, "loss": {"schedule": "linear", "gamma": 2.0, "gamma_max": 4.0}},
        {"drafter": TOKEN_BY_TOKEN, "anchor_mode": "fixed"},
        {"drafter": {**EAGLE, "fusion_init": "whitened"}, "optim": {"name": "muon"}},
        {"drafter": MTP, "dtype": "bfloat16"},
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(base: Path, changes: dict[str, Any]) -> None:
    config = recipe(base, checkpoint_steps=2, **changes)
    whole, parts = base / "whole", base / "parts"
    assert run(config, whole, fake_tau).finished
    target = load_target(config.target)
    embed, calls = target.embed, []

    def stops(ids: Tensor) -> Tensor:
        calls.extend([1] * (ids.dim() == 3))  # the blocks of a step; some drafters ask for the context's tokens too
        if len(calls) == 6:
            raise RuntimeError("power cut")
        return embed(ids)

    target.embed = stops  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="power cut"):
        run(config, parts, fake_tau, target=target)
    assert checkpoints(parts / "checkpoints")[-1].name == "step-00000004"
    (parts / "log.jsonl").open("a").write('{"step": 5, "torn')
    run(config, parts, fake_tau)
    assert same(state(whole), state(parts))
    assert log(whole) == log(parts)
    for name in ("best", "last"):
        assert same(load_file(whole / name / "model.safetensors"), load_file(parts / name / "model.safetensors"))
    provenance = json.loads((parts / "last" / "provenance.json").read_text())
    assert provenance["step"] == 9 and provenance["config"]["steps"] == 9 and len(provenance["data_digest"]) == 64
    assert 0 < provenance["draft_vocabulary_coverage"] <= 1 and provenance["version"] == "test"
    assert len(checkpoints(parts / "checkpoints")) == 2


def start(base: Path, name: str, steps: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(Path(__file__).with_name("training.py")), str(base), name, str(steps)]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        saved = checkpoints(folder / "checkpoints")
        if saved and int(saved[-1].name[5:]) >= step:
            return
        assert process.poll() is None, process.communicate()[1].decode()
        time.sleep(0.01)
    raise AssertionError("no checkpoint in time")


def test_kill_and_terminate(base: Path) -> None:
    steps = 120
    config = recipe(base, steps=steps)
    run(config, base / "whole")
    process = start(base, "killed", steps)
    wait_for_step(base / "killed", 8, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    killed_at = int(checkpoints(base / "killed" / "checkpoints")[-1].name[5:])
    assert killed_at < steps, "killed in the middle"
    process = start(base, "killed", steps)
    wait_for_step(base / "killed", killed_at + 8, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0, "stops in good order"
    stopped_at = int(checkpoints(base / "killed" / "checkpoints")[-1].name[5:])
    assert killed_at < stopped_at < steps
    run(config, base / "killed")
    assert same(state(base / "whole"), state(base / "killed"))
    assert log(base / "whole") == log(base / "killed")


def test_a_run_is_not_mixed_with_another(base: Path) -> None:
    run(recipe(base, steps=4), base / "run")
    with pytest.raises(ConfigError, match="holds a run already"):
        run(recipe(base), base / "run", resume=False)
    for changes, key in (
        ({"optim": {"lr": 1e-4}}, r"optim.lr was 0.003 and is 0.0001 now"),
        ({"seed": 4}, "seed was 0 and is 4 now"),
        ({"drafter": {"num_layers": 3}}, "drafter.num_layers was 2 and is 3 now"),
        ({"steps": 3}, "is at step 4, beyond steps=3"),
    ):
        with pytest.raises(ConfigError, match=key):
            run(recipe(base, **changes), base / "run")
    write_answers(base / "answers.jsonl", count=13)
    with pytest.raises(ConfigError, match="the training data has changed"):
        run(recipe(base, steps=5), base / "run")
    write_answers(base / "answers.jsonl")
    saved = checkpoints(base / "run" / "checkpoints")[-1] / "state.json"
    values = json.loads(saved.read_text())
    del values["config"]["anchor_mode"], values["config"]["drafter"]["fusion"]  # saved before there were such settings
    saved.write_text(json.dumps(values))
    assert run(recipe(base, steps=5, log_steps=1, checkpoint_steps=9), base / "run").finished


def test_a_damaged_checkpoint_is_said_so(base: Path) -> None:
    run(recipe(base), base / "run")
    newest = checkpoints(base / "run" / "checkpoints")[-1]
    (newest / "state.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match=r"step-00000009: damaged checkpoint"):
        run(recipe(base), base / "run")


def test_a_loss_that_is_not_a_number_stops_and_overwrites_nothing(base: Path) -> None:
    config = recipe(base, checkpoint_steps=2)
    target = load_target(config.target)
    embed, calls = target.embed, []

    def poisoned(ids: Tensor) -> Tensor:
        calls.append(1)
        return embed(ids) * (math.nan if len(calls) == 4 else 1.0)

    target.embed = poisoned  # type: ignore[method-assign]
    with pytest.raises(loop.TrainingError, match=r"step 4: the loss is nan .* last good checkpoint is step-00000002"):
        run(config, base / "run", target=target)
    assert all(value.isfinite().all() for value in state(base / "run").values())
    assert not (base / "run" / "last").exists()


def test_the_best_drafter_is_kept_and_loads(base: Path) -> None:
    taus = iter([1.5, 2.5, 2.0])

    def evaluate(model: BlockModel, draft_ids: Tensor | None, prompts: Sequence[list[int]]) -> dict[str, Any]:
        assert draft_ids is not None and len(draft_ids) == 40 and prompts
        return {"tau": next(taus)}

    result = run(recipe(base), base / "run", evaluate)
    assert (result.best_tau, result.best_step, result.finished) == (2.5, 6, True)
    provenance = json.loads((base / "run" / "best" / "provenance.json").read_text())
    assert provenance["step"] == 6 and provenance["acceptance"] == {"tau": 2.5}
    _, draft_ids = load_model(base / "run" / "best")
    assert draft_ids is not None and 1 in draft_ids, "the end token can be drafted"
    ended = load_model(base / "run" / "last")[0]
    # With and without a Markov head, which starts anew; and in blocks that draft from the anchor's own row.
    for rank, anchor in ((4, False), (None, False), (None, True)):
        changes = {"warm_start": str(base / "run" / "last"), "markov_rank": rank, "anchor_drafts": anchor}
        warm = recipe(base, drafter=changes, steps=1, optim={"lr": 1e-9, "ema": 0.0})
        run(warm, base / f"warm-{rank}-{anchor}")
        started = load_model(base / f"warm-{rank}-{anchor}" / "last")[0]
        assert started.config.anchor_drafts == anchor
        assert torch.allclose(started.fc.weight, ended.fc.weight, atol=1e-6)
        if rank is not None:
            assert ended.markov_head.w2.weight.any() and started.markov_head.w2.weight.abs().max() < 1e-6


def test_dflare_starts_as_the_recipe_says(base: Path) -> None:
    still = {"steps": 1, "optim": {"lr": 1e-12, "ema": 0.0}}
    run(recipe(base, drafter={**DFLARE, "init": "target", "num_layers": 1}, **still), base / "run")
    model, _ = load_model(base / "run" / "last")
    weights = load_target(recipe(base).target, pack=False).layer_weights(3)
    for kind in "kv":
        theirs = weights[f"self_attn.{kind}_proj.weight"].bfloat16().float()
        for name in (f"self_attn.{kind}_proj.weight", f"self_attn.{kind}_proj_target.weight"):
            assert torch.allclose(model.layers[0].get_parameter(name), theirs, atol=1e-6), name
    assert torch.allclose(model.layer_fusion_weights, bell_weights(1, 3))
    apart = {**DFLARE, "context_init": "random", "fusion_init": "peak"}
    run(recipe(base, drafter=apart, **still), base / "apart")
    model, _ = load_model(base / "apart" / "last")
    attention = model.layers[1].self_attn
    assert not torch.allclose(attention.k_proj.weight, attention.k_proj_target.weight, atol=1e-3)
    assert torch.allclose(model.layer_fusion_weights, peak_weights(2, 3))


def test_the_mixes_of_a_layerwise_fusion_are_not_moved_as_a_matrix() -> None:
    model = BlockModel(drafter_config(fusion="layerwise"))
    weights = Weights(model, OptimConfig(name="muon"), torch.float32, torch.device("cpu"))
    adam, muon = (
        {id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in weights.optimizers
    )
    assert id(weights.masters["layer_fusion_weights"]) in adam
    assert id(weights.masters["layers.0.mlp.up_proj.weight"]) in muon and not adam & muon


def test_a_head_of_its_own_moves_as_far_as_the_matrices() -> None:
    for name, share in (("muon", 0.2), ("adamw", 1.0)):
        model = new_model(chain_config("eagle3"))
        weights = Weights(model, OptimConfig(name=name, lr=1e-2, warmup_ratio=0.0), torch.float32, torch.device("cpu"))
        before = {key: value.clone() for key, value in weights.masters.items()}
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 1e-3
        weights.update(0, 10)
        moved = {key: (weights.masters[key] - before[key]).abs().mean() for key in before}
        assert float(moved["lm_head.weight"]) == pytest.approx(share * 1e-2, rel=1e-2)
        assert float(moved["norm.weight"]) == pytest.approx(1e-2, rel=1e-2)
        assert share / 2 < float(moved["fc.weight"]) / 1e-2 < share * 1.01


def test_eagles_head_starts_as_the_targets_and_goes_on_as_its_own(base: Path) -> None:
    still = {"steps": 1, "optim": {"lr": 1e-12, "ema": 0.0}}
    run(recipe(base, drafter=EAGLE, **still), base / "still")
    model, ids = load_model(base / "still" / "last")
    target = load_target(recipe(base).target)
    assert ids is not None and model.lm_head is not None
    assert torch.allclose(model.lm_head.weight, target.head_rows(ids).bfloat16().float(), atol=1e-6)
    run(recipe(base, drafter=EAGLE), base / "run")
    learned, _ = load_model(base / "run" / "last")
    assert learned.lm_head is not None
    assert not torch.allclose(learned.lm_head.weight, model.lm_head.weight, atol=1e-3)
    # from its folder, with another draft vocabulary: known tokens keep their rows, new ones have the target's
    warm = {**EAGLE, "warm_start": str(base / "run" / "last"), "draft_vocab_size": 50}
    run(recipe(base, drafter=warm, **still), base / "warm")
    wider, more = load_model(base / "warm" / "last")
    assert more is not None and wider.lm_head is not None and len(more) == 50
    for row, token in enumerate(more.tolist()):
        known = (ids == token).nonzero()
        expected = learned.lm_head.weight[int(known)] if len(known) else target.head_rows(more)[row].bfloat16().float()
        assert torch.allclose(wider.lm_head.weight[row], expected, atol=1e-6)


def test_a_module_that_starts_as_the_targets_last_layers(base: Path) -> None:
    still = {"steps": 1, "optim": {"lr": 1e-12, "ema": 0.0}}
    run(recipe(base, drafter={**MTP, "init": "target", "num_layers": 2}, **still), base / "run")
    model, _ = load_model(base / "run" / "last")
    assert model.config.tap_ids == (3,) and model.config.mask_token_id is None
    for number, source in enumerate((2, 3)):
        weights = load_target(recipe(base).target, pack=False).layer_weights(source)
        for name in ("self_attn.k_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"):
            ours = model.layers[number].get_parameter(name)
            assert torch.allclose(ours, weights[name].bfloat16().float(), atol=1e-6), name
    assert torch.allclose(model.fc.weight, torch.eye(32).repeat(1, 2) / 2, atol=1e-6)


def test_the_decay_moves_with_the_steps(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, int, bool]] = []

    def spy(samples: Any, count: int, seed: int, epoch: int, drafter: Any, gamma: float, *rest: Any) -> Any:
        seen.append((gamma, epoch, rest[-1]))
        return make_batch(samples, count, seed, epoch, drafter, gamma, *rest)

    monkeypatch.setattr(loop, "make_batch", spy)
    changes: dict[str, Any] = {"loss": {"schedule": "stairs", "gamma": 2.0, "gamma_max": 2.7}, "steps": 16}
    run(recipe(base, anchor_mode="fixed", **changes), base / "run")
    assert {epoch for _, epoch, _ in seen} >= {0, 1, 2} and all(fixed for *_, fixed in seen)
    assert [gamma for gamma, *_ in seen] == [min(2.0 + 0.5 * epoch, 2.7) for _, epoch, _ in seen]


@pytest.mark.parametrize(
    "drafter",
    [
        {**DFLARE, "fusion_norm": "layerwise"},
        {"injection": "input"},
        {**TOKEN_BY_TOKEN, "injection": "none"},
        EAGLE,
        {**MTP, "num_layers": 2},
    ],
)
def test_every_member_of_the_family_learns(base: Path, drafter: dict[str, Any]) -> None:
    run(recipe(base, drafter=drafter, optim={"lr": 1e-2}, steps=40, log_steps=5, checkpoint_steps=99), base / "run")
    losses = [row["loss"] for row in log(base / "run") if "loss" in row]
    assert losses[-1] < 0.7 * losses[0], losses
    model, draft_ids = load_model(base / "run" / "last")
    if drafter.get("injection") == "none":
        assert model.config.tap_ids == () and not hasattr(model, "fc")
    target = load_target(str(base / "target"))
    assert held_out_acceptance(target, 8)(model, draft_ids, [[5, 6, 7]])["tau"] >= 1.0
    with pytest.raises(ConfigError, match=r"drafter\.warm_start="):
        run(recipe(base, drafter={"warm_start": str(base / "run" / "last")}, steps=1), base / "other")


def test_layers_start_as_copies_of_the_target(base: Path) -> None:
    config = recipe(base, drafter={"init": "target", "num_layers": 1}, steps=1, optim={"lr": 1e-12, "ema": 0.0})
    run(config, base / "run")
    model, _ = load_model(base / "run" / "last")
    weights = load_target(config.target, pack=False).layer_weights(3)
    for name in ("self_attn.k_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"):
        assert torch.allclose(model.layers[0].get_parameter(name), weights[name].bfloat16().float(), atol=1e-6), name
    with pytest.raises(ConfigError, match=r"mlp.gate_proj.weight' is \[64, 32\] in the target, \[48, 32\]"):
        run(recipe(base, drafter={"init": "target", "num_layers": 1, "intermediate_size": 48}), base / "other")


def lengths(count: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(5, 60, (count,), generator=generator).tolist()
    return [make_sample(str(n), [n + 2] * size, [False] * 2 + [True] * (size - 2)) for n, size in enumerate(sizes)]


def test_every_epoch_shows_every_sample_once_in_another_order() -> None:
    samples = lengths(203)
    batches = Batches(samples, 4, seed=0)
    seen = []
    for epoch in range(2):
        steps = [batches.at(epoch * batches.per_epoch + step) for step in range(batches.per_epoch)]
        assert all(number == epoch and len(batch) == 4 for number, batch in steps)
        seen.append([sample.key for _, batch in steps for sample in batch])
        assert len(set(seen[-1])) == len(seen[-1]) == 200
    assert seen[0] != seen[1]
    assert [s.key for s in Batches(samples, 4, seed=0).at(77)[1]] == [s.key for s in batches.at(77)[1]]
    assert [s.key for s in Batches(samples, 4, seed=1).at(77)[1]] != [s.key for s in batches.at(77)[1]]
    padded = sum(4 * max(len(s) for s in batches.at(step)[1]) for step in range(batches.per_epoch))
    assert padded < 1.1 * sum(len(s) for step in range(batches.per_epoch) for s in batches.at(step)[1])
    assert len(Batches(samples[:3], 8, seed=0).at(0)[1]) == 3


def test_anchors_are_drawn_anew_each_epoch_and_again_the_same(base: Path) -> None:
    samples = lengths(3)
    run(recipe(base, steps=1), base / "run")
    config, cpu = load_model(base / "run" / "last")[0].config, torch.device("cpu")

    def anchors(epoch: int, seed: int = 0, order: int = 1) -> Tensor:
        picked = samples[::order]
        blocks = make_batch(picked, 6, seed, epoch, config, 4.0, cpu).blocks
        return blocks.positions[:, :, 0].flip(0) if order < 0 else blocks.positions[:, :, 0]

    assert torch.equal(anchors(0), anchors(0)) and torch.equal(anchors(0), anchors(0, order=-1))
    assert not torch.equal(anchors(0), anchors(1)) and not torch.equal(anchors(0), anchors(0, seed=1))


def test_the_learning_rate_warms_up_and_follows_a_cosine() -> None:
    config = OptimConfig(lr=1.0, warmup_ratio=0.1, min_lr_ratio=0.2)
    rates = [learning_rate(step, 100, config) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0 and max(rates) == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True) and 0.2 < rates[-1] < 0.201
    assert rates[55] == pytest.approx(0.6)
    assert learning_rate(0, 1, OptimConfig(lr=1.0, warmup_ratio=0.0)) == 1.0


def test_mask_token_and_draft_vocabulary() -> None:
    samples = [make_sample("a", [5, 6, 6, 7, 7, 7, 8], [False] + [True] * 6)]
    assert choose_mask_token(None, [7, 30, 9], samples, 20) == 9
    assert choose_mask_token(11, [], samples, 20) == 11
    for wanted, message in ((7, "occurs in the training data"), (20, "outside the vocabulary"), (None, "set drafter")):
        with pytest.raises(ConfigError, match=message):
            choose_mask_token(wanted, [5], samples, 20)
    kept, coverage = draft_vocabulary(samples, 3, 20, [2])
    assert kept.tolist() == [2, 6, 7] and coverage == pytest.approx(5 / 6)
    assert draft_vocabulary(samples, 4, 20, [2])[0].tolist() == [2, 5, 6, 7], "prompts count too, ties by id"
    index = draft_index(kept, 20, torch.device("cpu"))
    assert index[kept].tolist() == [0, 1, 2] and int((index >= 0).sum()) == 3
    with pytest.raises(ConfigError, match="draft_vocab_size=1"):
        draft_vocabulary(samples, 1, 20, [2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": {"teacher_top_k": 0}}, "needs soft labels"),
        ({"drafter": {"mask_token_id": 1}}, "mask_token_id=1 occurs in the training data"),
        ({"drafter": {"num_taps": 4}}, "no room for 4 distinct taps"),
        ({"drafter": {"warm_start": "nowhere"}}, "nowhere: no config.json"),
    ],
)
def test_impossible_recipes(base: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(recipe(base, **changes), base / "run")


def test_unknown_tokens_in_the_data(base: Path) -> None:
    row = {"prompt": "x", "response_ids": [300, 4, 5, 6, 7]}
    (base / "answers.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match="token 300, beyond the vocabulary"):
        run(recipe(base, data={"held_out": 0.0}), base / "run")


def test_tensorboard_is_an_extra(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'blockdraft\[train-logging\]'"):
        run(recipe(base, tensorboard=True), base / "run")


@pytest.mark.parametrize("drafter", [{}, EAGLE, MTP])
def test_it_learns_one_answer_by_heart(base: Path, drafter: dict[str, Any]) -> None:
    """The gate: position accuracy near one, and an engine that accepts nearly whole blocks."""
    config = recipe(base)
    target = load_target(config.target)
    engine = Engine(target, None, EngineConfig(slots=1, capacity=256))
    prompt = encode_chat(load_tokenizer(config.target), [{"role": "user", "content": "abc"}])
    request = engine.add(prompt, SamplingParams(max_tokens=48, ignore_eos=True))
    engine.run()
    (base / "answers.jsonl").write_text(json.dumps({"prompt": "abc", "response_ids": request.output_ids}) + "\n")
    changes: dict[str, Any] = {
        "data": {"held_out": 0.0},
        "drafter": {**drafter, "anchor_drafts": True, "draft_vocab_size": None, "block_size": 4},
        "loss": {"soft_weight": 0.0},
        "optim": {"lr": 1e-2, "ema": 0.0},
        "anchors": 64,
        "log_steps": 20,
        "checkpoint_steps": 1000,
    }
    run(recipe(base, steps=1, **changes), base / "untrained")
    run(recipe(base, steps=160, **changes), base / "run")
    accuracy = log(base / "run")[-1]["accuracy"]
    assert len(accuracy) == 4 and min(accuracy) > 0.97, accuracy
    measure = held_out_acceptance(target, 40)
    before = measure(*load_model(base / "untrained" / "last"), [prompt])["tau"]
    after = measure(*load_model(base / "run" / "last"), [prompt])["tau"]
    assert after > 3.0 > before + 0.5, (before, after)
