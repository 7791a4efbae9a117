"""Features recorded during generation: those of a pass of their own, whatever was rejected or shared a slot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fakes import OracleDrafter, UnrelatedDrafter
from tiny import VOCAB, tiny_target
from training import recipe

from blockdraft.cli import main
from blockdraft.config import EngineConfig, SamplingParams, load_config
from blockdraft.engine.engine import Engine
from blockdraft.targets.resolve import load_target, load_tokenizer
from blockdraft.train.data import Sample, load_dataset, make_sample
from blockdraft.train.features import compute
from blockdraft.train.record import Recorder
from blockdraft.train.setup import recipe_taps
from blockdraft.train.shards import ShardFeatures

TAPS, TOP_K = (0, 2), 5


def generate(recorder: Recorder, drafts: str, count: int = 7) -> list[Sample]:
    """Answers to random prompts in three slots, each checked when it is finished; the last one is returned too."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, VOCAB, (3 + number,), generator=generator).tolist() for number in range(count)]
    params = [SamplingParams(max_tokens=5 + number, temperature=0.9, seed=number) for number in range(count)]
    plain = Engine(tiny_target(), None, EngineConfig(slots=1, capacity=64))
    known = [plain.add(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    plain.run()
    sequences = [request.prompt_ids + request.output_ids for request in known]
    drafter = {
        "none": None,
        "unrelated": UnrelatedDrafter(4, VOCAB),
        "half right": OracleDrafter(4, VOCAB, sequences, spoil=(False, False, True)),
    }[drafts]
    engine = Engine(recorder, drafter, EngineConfig(slots=3, capacity=64))
    for prompt, one in zip(prompts, params, strict=True):
        engine.add(prompt, one)
    finished = []
    while engine.has_work:
        for request in engine.step():
            if request.done:
                mask = [False] * len(request.prompt_ids) + [True] * len(request.output_ids)
                sample = make_sample("p", request.prompt_ids + request.output_ids, mask)
                check(recorder, sample)
                finished.append(sample)
    assert sorted(tuple(sample.ids.tolist()) for sample in finished) == sorted(tuple(ids) for ids in sequences)
    return finished


def check(recorder: Recorder, sample: Sample) -> None:
    """What was recorded is what a pass of its own says."""
    found = recorder.take(sample)
    other = tiny_target()
    other.set_taps(TAPS)
    expected = compute(other, [sample], TOP_K)[0]
    assert found is not None and found.teacher is not None and expected.teacher is not None
    torch.testing.assert_close(found.taps, expected.taps, atol=1e-5, rtol=1e-5)
    assert torch.equal(found.teacher[0], expected.teacher[0])
    torch.testing.assert_close(found.teacher[1], expected.teacher[1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("drafts", ["none", "unrelated", "half right"])
def test_recorded_features_are_those_of_a_pass_of_their_own(drafts: str) -> None:
    finished = generate(Recorder(tiny_target(), TAPS, TOP_K, slots=3, capacity=64), drafts)
    assert len(finished) == 7


def test_what_was_not_seen_is_not_made_up() -> None:
    recorder = Recorder(tiny_target(), TAPS, TOP_K, slots=3, capacity=64)
    finished = generate(recorder, "none")
    first, last = finished[0], finished[-1]
    assert recorder.take(first) is None, "its slot went to another prompt"
    changed = last.ids.tolist()
    changed[0] += 1
    assert recorder.take(make_sample("p", changed, last.loss_mask.tolist())) is None, "other tokens"
    mask = last.loss_mask.clone()
    mask[1] = True
    assert recorder.take(make_sample("p", last.ids.tolist(), mask.tolist())) is None, "no logits inside a prompt"
    assert recorder.take(make_sample("p", [5] * 80, [True] * 80)) is None, "longer than a slot"
    assert recorder.take(last) is not None


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of one command, in this process."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


def test_training_finds_what_regenerate_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = recipe(tmp_path, data={"files": [str(tmp_path / "new.jsonl")]})
    (tmp_path / "recipe.json").write_text(config.model_dump_json())
    prompts = [{"id": str(number), "prompt": f"count {number}"} for number in range(9)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    files = [str(tmp_path / name) for name in ("prompts.jsonl", "new.jsonl")]
    options = ["--target", config.target, "--max-tokens", "24", "--slots", "3", "--limit", "6"]
    kept = ["--features", str(tmp_path / "kept"), "--recipe", str(tmp_path / "recipe.json")]
    assert run(capsys, "regenerate", *files, *options, *kept)[0] == 0
    again = load_config(type(config), tmp_path / "recipe.json")
    target, tokenizer = load_target(config.target), load_tokenizer(config.target)
    dataset = load_dataset(again.data, tokenizer, target.info.eos_token_ids, 0)
    shards = ShardFeatures(tmp_path / "kept", dataset.train, target.info.device)  # raises where one is missing
    target.set_taps(recipe_taps(config.drafter, target.info.num_layers))
    for sample in dataset.train:
        expected = compute(target, [sample], config.features.teacher_top_k)[0]
        torch.testing.assert_close(shards.batch([sample]).taps[0], expected.taps, atol=1e-2, rtol=1e-2)
    code, _, err = run(capsys, "regenerate", *files, *options, "--features", str(tmp_path / "kept"))
    assert code == 2 and "--features and --recipe go together" in err
