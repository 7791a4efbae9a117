"""The doctor: a drafter that learned well, each way of breaking it, and one that only learned little."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from training import recipe, run

from blockdraft.cli import main
from blockdraft.config import EngineConfig, SamplingParams, TrainConfig
from blockdraft.drafters.block import BlockDrafter
from blockdraft.engine.engine import Engine
from blockdraft.targets.resolve import load_target, load_tokenizer
from blockdraft.text import encode_chat
from blockdraft.train import batches


def settings(folder: Path, steps: int = 150, **drafter: Any) -> TrainConfig:
    """A run that knows its dozen answers by heart within seconds."""
    shape = {"draft_vocab_size": None, "markov_rank": None, "tap_ids": [1, 2], "fusion_init": "whitened"}
    return recipe(
        folder,
        steps=steps,
        batch_size=4,
        anchors=16,
        drafter={**shape, "block_size": 5, **drafter},
        optim={"name": "muon", "lr": 0.02, "ema": 0.0},
        loss={"soft_weight": 0.0},
        eval_prompts=0,
        checkpoint_steps=1000,
    )


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, answers.jsonl, and a drafter that knows them in run/last."""
    base = tmp_path_factory.mktemp("doctor")
    run(settings(base), base / "run")
    return base


@pytest.fixture
def base(learned: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(learned, tmp_path / "copy"))


def write_own_answers(base: Path) -> None:
    """Answers that the tiny target really gives, too many to be learned by heart."""
    target, tokenizer = load_target(str(base / "target")), load_tokenizer(str(base / "target"))
    engine = Engine(target, None, EngineConfig(slots=16, capacity=64))
    spare = dict.fromkeys(range(260, 272), -1000.0)  # one of them is to be the mask token
    for number in range(96):
        prompt = encode_chat(tokenizer, [{"role": "user", "content": f"count {number}"}])
        params = SamplingParams(max_tokens=24, ignore_eos=True, logit_bias=spare)
        engine.add(prompt, params, str(number))
    rows = [{"prompt": f"count {one.request_id}", "response_ids": one.output_ids} for one in engine.run()]
    (base / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def doctor(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *more: str
) -> tuple[int, str]:
    """Exit code, and what was printed, in one line."""
    monkeypatch.setenv("COLUMNS", "400")
    drafter, answers = base / "run" / "last", base / "answers.jsonl"
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--target", str(base / "target"), "--drafter", str(drafter), "--answers", str(answers), *more])
    told = capsys.readouterr()
    return int(left.value.code or 0), " ".join((told.out + told.err).split())


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def config_of(base: Path) -> Path:
    return base / "run" / "last" / "config.json"


def test_a_healthy_drafter(base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = doctor(base, capsys, monkeypatch)
    assert (
        code == 0
        and "healthy: wired as it was trained" in said
        and "fault" not in said.replace("deliberate faults", "")
    )
    assert "unknown" not in said, "its provenance says all that is asked for"


@pytest.mark.parametrize("family", ["eagle3", "mtp"])
def test_drafters_that_feed_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Healthy ones are told so, and one whose layer ids are off is not."""
    taps = {"eagle3": [1, 2], "mtp": [3]}[family]
    shape = {"family": family, "num_layers": 1, "tap_ids": taps, "anchor_drafts": True, "fusion_init": "random"}
    run(settings(tmp_path, **shape), tmp_path / "run")
    code, said = doctor(tmp_path, capsys, monkeypatch)
    assert code == 0 and "healthy" in said and "none: it drafts token after token" in said
    if family == "eagle3":
        edit(config_of(tmp_path), lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 3]))
        code, said = doctor(tmp_path, capsys, monkeypatch)
        assert code == 1 and "taps one layer earlier" in said.split("broken: ")[1]


PLANTED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "ids that count the embedding": (
        lambda c: c["dflash_config"].update(target_layer_ids=[2, 3]),
        "taps one layer earlier",
    ),
    "ids one too low": (lambda c: c["dflash_config"].update(target_layer_ids=[0, 1]), "taps one layer later"),
    "labels": (lambda c: c["dflash_config"].update(sample_from_anchor=True), "labels shifted by one"),
    "rotary": (lambda c: c.update(rope_theta=c["rope_theta"] * 1000), "the target's rotary base"),
    "mask": (lambda c: c["dflash_config"].update(mask_token_id=1), "mask token"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_fault_in_the_configuration_is_named(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    change, name = PLANTED[planted]
    edit(config_of(base), change)
    code, said = doctor(base, capsys, monkeypatch)
    assert code == 1 and "broken: " in said and name in said.split("broken: ")[1], said


def train_wrongly(base: Path, config: TrainConfig, monkeypatch: pytest.MonkeyPatch, **moved: int) -> None:
    """A run whose blocks are laid out as drafting does not lay them out."""
    real = batches.make_blocks

    def faulty(*values: Any) -> Any:
        blocks = real(*values)
        return replace(blocks, **{name: getattr(blocks, name) + by for name, by in moved.items()})

    with monkeypatch.context() as patch:
        patch.setattr(batches, "make_blocks", faulty)
        run(config, base / "run")


def test_positions_that_were_off_in_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train_wrongly(tmp_path, settings(tmp_path), monkeypatch, positions=1)
    code, said = doctor(tmp_path, capsys, monkeypatch)
    assert code == 1 and "rows one position later" in said.split("broken: ")[1], said


def test_a_context_that_held_the_anchor_in_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are the target's own here, and its last layer at the anchor gives away what comes next."""
    config = settings(tmp_path, steps=200, num_layers=1, tap_ids=[3], block_size=3)
    write_own_answers(tmp_path)
    train_wrongly(tmp_path, config, monkeypatch, context_lengths=1)
    code, said = doctor(tmp_path, capsys, monkeypatch)
    assert code == 1 and "context with the anchor" in said.split("broken: ")[1], said


def test_another_template_and_another_target(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = base / "target" / "chat_template.jinja"
    template.write_text("<bos>" + template.read_text())
    code, said = doctor(base, capsys, monkeypatch)
    assert code == 1 and said.endswith("broken: chat template")
    template.write_text(template.read_text().removeprefix("<bos>"))
    weights = base / "target" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.0.mlp.down_proj.weight"] *= 2.0
    save_file(tensors, weights, metadata={"format": "pt"})
    code, said = doctor(base, capsys, monkeypatch)
    assert code == 1 and "size of the taps" in said.split("broken: ")[1]


def test_drafting_that_is_not_training(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache whose positions are off by one, as an engine of another make might have it."""
    real = BlockDrafter.observe

    def late(self: BlockDrafter, state: Any, rows: Any, tokens: Any, taps: Any, counts: Any) -> None:
        real(self, state, rows, tokens, torch.roll(taps, 1, dims=1), counts)

    monkeypatch.setattr(BlockDrafter, "observe", late)
    code, said = doctor(base, capsys, monkeypatch)
    assert code == 1 and "drafting against training" in said.split("broken: ")[1]


def test_a_drafter_that_learned_little_is_not_called_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(settings(tmp_path, steps=12), tmp_path / "run")
    code, said = doctor(tmp_path, capsys, monkeypatch)
    assert code == 0 and "undertrained for these prompts, not broken" in said and "has seen 768 blocks" in said


def test_a_checkpoint_that_does_not_load_and_bad_input(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(config_of(base), lambda c: c["dflash_config"].update(target_layer_ids=[1, 9]))
    code, said = doctor(base, capsys, monkeypatch)
    assert code == 1 and "tap_ids [1, 9] must lie in 0..3" in said and said.endswith("broken: checkpoint")
    (base / "run" / "last" / "provenance.json").write_text("{")
    edit(config_of(base), lambda c: c["dflash_config"].update(target_layer_ids=[1, 2]))
    code, said = doctor(base, capsys, monkeypatch)
    assert code == 0 and "does not say" in said
    (base / "answers.jsonl").write_text("\n")
    assert doctor(base, capsys, monkeypatch) == (
        2,
        "error: no answer of two tokens or more to draft: give --answers with longer ones",
    )
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--drafter", "ngram"])
    assert "only a trained drafter can be looked at" in capsys.readouterr().err
