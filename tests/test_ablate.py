"""Ablations: arms checked before anything runs, killed and resumed, the same data and budget, the table from files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from training import QUIET, recipe, run

from blockdraft.bench.ablation import Ready, arm_recipes, identity, same
from blockdraft.bench.ablation_table import load_results, render
from blockdraft.cli import main, matrix, measuring
from blockdraft.config import AblationConfig, ConfigError, load_ablation
from blockdraft.targets.resolve import load_target, load_tokenizer
from blockdraft.train import loop
from blockdraft.train.data import load_dataset
from blockdraft.train.run import prepare
from blockdraft.train.shards import FeatureError, build_shards
from blockdraft.train.weights import checkpoints

ARMS: dict[str, Any] = {
    "same": {},
    "wide": {"drafter": {"num_layers": 1}, "drafter.tap_ids": [0, 3], "optim.name": "adamw"},
    "none": {"drafter": "none"},
    "short": {"drafter": "arm:same", "block_size": 2},
}


def write(folder: Path, arms: dict[str, Any] = ARMS, name: str = "abl.yaml", **changes: Any) -> Path:
    """An ablation of the tiny recipe, with its base in a file of its own and two questions."""
    settings = recipe(folder, eval_prompts=0, checkpoint_steps=2, drafter={"draft_vocab_size": None})
    (folder / "base.yaml").write_text(yaml.safe_dump(json.loads(settings.model_dump_json())))
    (folder / "asked.jsonl").write_text('{"prompt": "count 3"}\n{"turns": ["count 4", "and on"]}\n')
    values: dict[str, Any] = {
        "base": "base.yaml",
        "arms": arms,
        "steps": 4,
        "bench": [{"dataset": str(folder / "asked.jsonl"), "timed": 1}],
        "temperatures": [0, 1],
        "max_tokens": 12,
    }
    values = {key: value for key, value in {**values, **changes}.items() if value is not None}
    (folder / name).write_text(yaml.safe_dump(values, sort_keys=False))
    return folder / name


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ablate(*arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        main(["ablate", *map(str, arguments), "--no-plots"])
    return int(left.value.code or 0)


def result(base: Path, arm: str) -> dict[str, Any]:
    return json.loads((base / "results" / "ablations" / "abl" / f"{arm}.json").read_text())


def test_the_matrix_from_end_to_end(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    together, real = [], measuring.Measuring._ask

    def ask(self: measuring.Measuring, part: Any, arms: Any) -> list[Any]:
        together.append([arm.name for arm in arms])
        return real(self, part, arms)

    monkeypatch.setattr(measuring.Measuring, "_ask", ask)
    path = write(base, timed_tokens=5)
    assert ablate(path, "--list") == 0
    assert capsys.readouterr().out.splitlines() == [f"{arm}: missing" for arm in ARMS]
    assert ablate(path, "--report") == 2 and "no results yet" in capsys.readouterr().err
    assert ablate(path, "--only", "wide") == 0
    assert ablate(path) == 0, capsys.readouterr().err
    capsys.readouterr()
    others = ["plain", *(arm for arm in ARMS if arm != "wide")]
    assert together == [["plain", "wide"]] * 2 + [others] * 2, "in one run, but for what was timed before"
    for arm in ARMS:
        made = result(base, arm)
        assert list(made["measured"]) == ["asked-t0", "asked-t1"]
        for part in made["measured"].values():
            plain, own = part["timed"]["arms"]
            assert (plain["name"], own["name"]) == ("plain", arm)
            assert list(part["timed"]["rows"][0]["arms"]) == ["plain", arm], "each file has its own arm's"
            assert own["tokens"] <= 5 == part["timed"]["setup"]["params"]["max_tokens"]
            assert own["identical_answers"] == own["compared_answers"] == 1, "of three answers, one is timed"
            assert part["timed"]["ratios"][f"{arm}/plain"]["median"] > 0
            assert part["acceptance"]["tau"] >= 1.0 and part["acceptance"]["tokens"] > own["tokens"]
        assert ("training" in made) == (arm in {"same", "wide"})
    short, same = (result(base, arm)["measured"]["asked-t0"]["acceptance"] for arm in ("short", "same"))
    assert result(base, "short")["max_drafts"] == 1 < result(base, "same")["max_drafts"], "the same, in smaller blocks"
    assert short["rounds"] >= same["rounds"] and short["tokens"] == same["tokens"]
    trained = [result(base, arm) for arm in ("same", "wide")]
    assert [one["training"]["steps"] for one in trained] == [4, 4], "the budget, whatever base says"
    assert trained[0]["identity"]["data_digest"] == trained[1]["identity"]["data_digest"]
    assert trained[1]["changes"] == {"drafter.num_layers": 1, "drafter.tap_ids": [0, 3], "optim.name": "adamw"}
    assert trained[1]["parameters"] > 0 and min(trained[1]["cost"].values()) > 0
    features = list((base / "runs" / "ablations" / "abl" / "features").iterdir())
    assert [folder.name for folder in features] == ["0-2-3"], "one folder, with the taps of all"

    table = (base / "results" / "ablations" / "abl" / "table.md").read_text()
    shown = f"{trained[0]['measured']['asked-t0']['acceptance']['tau']:.3f}"
    assert f"| same |  | {trained[0]['parameters'] / 1e6:.2f} M | 4 |" in table and shown in table
    assert "yes, 2 of 2" in table and "Budget of every arm: 4 steps." in table and "| draft 3 |" in table
    files = {file: file.stat().st_mtime_ns for file in base.rglob("*") if file.suffix in {".json", ".safetensors"}}
    assert ablate(path) == 0
    assert {file: file.stat().st_mtime_ns for file in files} == files, "what is done is not done again"
    assert not [file for file in base.rglob("*") if file.name.endswith((".tmp", ".part"))]

    capsys.readouterr()
    changed = write(base, {**ARMS, "wide": {"drafter.num_layers": 3}})
    assert ablate(changed) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "arm 'wide' has changed: drafter.num_layers was 1 and is 3 now; to run" in lines[0]
    assert ablate(changed, "--list") == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("wide: changed")
    assert ablate(write(base, steps=5)) == 2 and "budget.steps was 4 and is 5 now" in capsys.readouterr().err
    shutil.rmtree(base / "runs" / "ablations" / "abl" / "wide")
    assert ablate(write(base, {**ARMS, "wide": {"drafter.num_layers": 3}}), "--only", "wide") == 0
    assert result(base, "wide")["identity"]["drafter.num_layers"] == 3
    assert list(result(base, "wide")["measured"]) == ["asked-t0", "asked-t1"]


def test_the_shipped_matrix_is_sound(base: Path) -> None:
    root = Path(__file__).parent.parent / "recipes"
    config = load_ablation(root / "ablation-smollm2.yaml", ("base.data.files=[elsewhere.jsonl]", "steps=7"))
    recipes = arm_recipes(config)
    trained = [one for one in recipes.values() if not isinstance(one, Ready)]
    assert {one.steps for one in trained} == {7} and {one.data.files for one in trained} == {("elsewhere.jsonl",)}
    assert len({one.model_dump_json() for one in trained}) == len(trained) > 8, "no two arms are the same"


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ({"optim": {"lrr": 1}}, "arms.bad: unknown key 'optim.lrr'"),
        ({"optim.lr": -1}, "arms.bad: optim.lr"),
        ({"steps": 3}, "steps are the budget's"),
        ({"data.limit": 3}, "data.limit is the same for all arms"),
        ({"features": {"teacher_top_k": 0}}, "features.teacher_top_k is the same for all arms"),
        ({"seed.x": 3}, "'seed' is not a section"),
        ({"drafter": "none", "seed": 1}, "is not trained here and has only a block_size to set"),
        ({"drafter": "arm:nowhere"}, "arms.bad: there is no arm 'nowhere' that is trained"),
        ({"drafter": "nowhere"}, "arms.bad: drafter 'nowhere'"),
        ({"drafter.num_taps": 4}, "arms.bad: a target of 4 layers has no room for 4"),
        ({"drafter.tap_ids": [2, 9]}, "arms.bad: drafter: tap_ids"),
    ],
)
def test_a_bad_arm_is_refused_before_anything_runs(
    base: Path, capsys: pytest.CaptureFixture[str], arm: dict[str, Any], message: str
) -> None:
    assert ablate(write(base, {"good": {}, "bad": arm})) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line and not line.startswith("Writing")]
    assert len(lines) == 1 and message in lines[0], lines
    assert not (base / "runs").exists() and not (base / "results").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": None}, "one of steps and minutes"),
        ({"minutes": 1}, "one of steps and minutes"),
        (
            {"bench": [{"dataset": "a.jsonl", "lmit": 3}]},
            "unknown key 'bench.0.lmit' (known: data_dir, dataset, limit, timed)",
        ),
        ({"temperatures": [0, 0]}, "each temperature once"),
        ({"base": "nowhere.yaml"}, "nowhere.yaml: no such file"),
        ({"arms": {"plain": {}}}, "arms.plain: a name"),
        ({"arms": {"a/b": {}}}, "arms.a/b: a name"),
        ({"arms": {"a": {}, "b": {"seed": 0}}}, "arms.b: the same as arms.a"),
    ],
)
def test_a_bad_matrix_is_refused(
    base: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    assert ablate(write(base, **changes)) == 2
    assert message in capsys.readouterr().err
    assert ablate(write(base), "--only", "other") == 2 and "no such arm" in capsys.readouterr().err


def test_killed_in_training_and_in_measuring(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed for good while one arm trains; then cut off between two parts; the weights end as uninterrupted ones."""
    path = write(base, {"same": {}, "wide": ARMS["wide"]}, steps=40)
    command = [sys.executable, "-m", "blockdraft", "ablate", str(path), "--no-plots", "--threads", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    saved = base / "runs" / "ablations" / "abl" / "wide" / "checkpoints"
    deadline = time.monotonic() + 240
    while not checkpoints(saved):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1].decode()
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert int(checkpoints(saved)[-1].name[5:]) < 40, "killed in the middle"
    capsys.readouterr()
    assert ablate(path, "--list") == 0
    same, wide = capsys.readouterr().out.splitlines()
    assert same == "same: measured 2 of 2, timed 0" and wide.startswith("wide: training, saved at step ")

    assert ablate(path, "--only", "same") == 0
    kept = result(base, "same")
    asked, real = [], measuring.Measuring._ask

    def cut(self: measuring.Measuring, part: Any, arms: Any) -> list[Any]:
        asked.append((part.key, [arm.name for arm in arms]))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(self, part, arms)

    monkeypatch.setattr(measuring.Measuring, "_ask", cut)
    assert ablate(path, "--no-timing") == 0 and not asked, "rates are left for a quiet hour"
    capsys.readouterr()
    assert ablate(path, "--list") == 0
    assert capsys.readouterr().out.splitlines()[1] == "wide: measured 2 of 2, timed 0"
    assert ablate(path) == 130
    asked_of_wide = [("asked-t0", ["plain", "wide"]), ("asked-t1", ["plain", "wide"])]
    assert asked == asked_of_wide, "'same' is not asked again"
    assert ["timed" in part for part in result(base, "wide")["measured"].values()] == [True, False]
    assert ablate(path) == 0
    assert asked[2:] == asked_of_wide[1:] and result(base, "same") == kept
    whole = write(base, {"wide": ARMS["wide"], "same": {}}, steps=40, name="whole.yaml")
    assert ablate(whole, "--only", "wide") == 0
    one, other = (base / "runs" / "ablations" / name / "wide" / "last" for name in ("abl", "whole"))
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_minutes_become_steps_once(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(base, {"same": {}, "other": {"seed": 1}}, steps=None, minutes=0.2, timing_steps=2, temperatures=[0])
    seconds = iter([2.0, 3.0])
    monkeypatch.setattr("blockdraft.train.budget.time_steps", lambda *_: next(seconds))
    assert ablate(path) == 0
    for arm, steps in (("same", 6), ("other", 4)):
        folder = base / "runs" / "ablations" / "abl" / arm
        assert json.loads((folder / "budget.json").read_text())["steps"] == steps
        rates = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        assert rates[-1]["step"] == steps and result(base, arm)["training"]["steps"] == steps
        assert json.loads((folder / "config.json").read_text())["steps"] == steps, "the cosine ends with the budget"
    assert result(base, "same")["identity"]["data_digest"] == result(base, "other")["identity"]["data_digest"]
    (base / "results" / "ablations" / "abl" / "same.json").unlink()
    assert ablate(path) == 0, "steps are not timed again"


def test_timing_leaves_nothing_behind(base: Path) -> None:
    config = recipe(base, steps=3)
    target, tokenizer = load_target(config.target), load_tokenizer(config.target)
    dataset = load_dataset(config.data, tokenizer, target.info.eos_token_ids, config.seed)
    made = prepare(config, target, tokenizer, dataset, base / "run", QUIET)
    before = {name: value.clone() for name, value in made.draft.model.state_dict().items()}
    files = sorted(base.rglob("*"))
    assert loop.time_steps(config, target, dataset, made.features, made.draft, 1, 2) > 0
    assert all(torch.equal(value, before[name]) for name, value in made.draft.model.state_dict().items())
    assert sorted(base.rglob("*")) == files


def test_a_superset_of_taps_trains_the_same_bits(base: Path) -> None:
    config = recipe(base, drafter={"tap_ids": [1, 3], "fusion_init": "whitened"})
    target, tokenizer = load_target(config.target), load_tokenizer(config.target)
    dataset = load_dataset(config.data, tokenizer, target.info.eos_token_ids, config.seed)
    assert run(config, base / "own").finished
    build_shards(target, (0, 1, 2, 3), dataset.train[:4], base / "all", 4, 128, QUIET)
    shared = config.model_copy(update={"features": config.features.model_copy(update={"folder": str(base / "all")})})
    assert run(shared, base / "shared").finished, "and what the folder lacked is made with all of its taps"
    assert json.loads((base / "all" / "manifest.json").read_text())["tap_ids"] == [0, 1, 2, 3]
    for name in ("own", "shared"):
        assert len(checkpoints(base / name / "checkpoints")) == 2
    a, b = (load_file(checkpoints(base / n / "checkpoints")[-1] / "state.safetensors") for n in ("own", "shared"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    wrong = build_shards(target, (0, 3), dataset.train, base / "all", 4, 128, QUIET).batch(dataset.train[:2])
    right = build_shards(target, (1, 3), dataset.train, base / "all", 4, 128, QUIET).batch(dataset.train[:2])
    assert torch.equal(wrong.taps[:, :, 1], right.taps[:, :, 1]) and not torch.equal(wrong.taps, right.taps)
    with pytest.raises(FeatureError, match=r"tap_ids=\[1, 3\], this run \[0, 1\]"):
        build_shards(target, (0, 1), dataset.train, base / "own" / "features", 4, 128, QUIET)


def measured(name: str, tau: float, rate: float, setup: dict[str, Any]) -> dict[str, Any]:
    arm = {
        "name": name,
        "tokens_per_second": {"median": rate},
        "identical_answers": 1,
        "compared_answers": 2,
    }
    acceptance = {"setup": setup, "tau": tau, "acceptance_by_position": [0.5, 0.25]}
    return {
        "acceptance": acceptance,
        "timed": {"setup": setup, "arms": [arm], "ratios": {f"{name}/plain": {"median": rate / 10}}},
    }


COST = {"propose_ms": 2.5, "verify_ms": 12.5, "plain_ms": 12.0}


def test_table_and_plots_come_from_files(tmp_path: Path) -> None:
    base = {"target": "x", "data": {"files": ["a"]}}
    values = {"base": base, "arms": {"a": {"drafter": "none"}, "b": {}, "c": {"seed": 2}}, "steps": 3}
    config = AblationConfig.parse({**values, "bench": [{"dataset": "q.jsonl"}]})
    recipes = arm_recipes(config)
    setup = {"dataset": "q", "prompts": 2, "params": {"temperature": 0.0, "max_tokens": 8}}
    part = measured("a", 1.75, 15.0, setup)
    own = {"drafter": "none", "block_size": None, "target": "x"}
    files: dict[str, Any] = {
        "plain": {"name": "plain", "identity": {}, "measured": {"q-t0": {"acceptance": {"setup": setup}}}},
        "a": {"name": "a", "identity": own, "measured": {"q-t0": part}},
        "b": {"name": "b", "identity": own, "measured": {"q-t0": part}},
    }
    files["a"] |= {"parameters": 1_230_000, "cost": COST, "fusion": {"taps": [0, 2], "mixes": [[0.75, 0.25]]}}
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    results = load_results(tmp_path, config, recipes)
    assert list(results) == ["a"], "b's file is of other settings"
    text = render(results, list(config.arms), ["q-t0"])
    assert "| a |  | 1.23 M |  |  | 2.5 | 12.5 | 1.750 | 1.50x | NO, 1 of 2 |" in text
    assert "| a | 15.0 | 1.50x | 1.40x | 1.750 | NO, 1 of 2 | 0.500 | 0.250 |" in text
    assert "Not measured yet: b, c." in text
    del part["timed"]
    (tmp_path / "a.json").write_text(json.dumps(files["a"]))
    untimed = render(load_results(tmp_path, config, recipes), list(config.arms), ["q-t0"])
    assert "| 1.750 |  |  |" in untimed and "| a |  |  | 1.40x | 1.750 |  | 0.500 | 0.250 |" in untimed
    part["acceptance"]["setup"] = {**setup, "prompts": 3}
    (tmp_path / "a.json").write_text(json.dumps(files["a"]))
    assert not load_results(tmp_path, config, recipes)["a"]["measured"], "not of plain decoding's answers"
    pytest.importorskip("matplotlib")
    from blockdraft.bench.ablation_plots import draw

    drawn = draw(results, ["q-t0"], tmp_path)
    assert {file.name for file in drawn} == {"tau.png", "acceptance.png", "cost.png", "fusion.png"}
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in drawn)


def test_a_setting_that_did_not_exist_had_its_default() -> None:
    values = {"base": {"target": "x", "data": {"files": ["a"]}}, "arms": {"a": {}}, "bench": [{"dataset": "q.jsonl"}]}
    config = AblationConfig.parse({**values, "steps": 3})
    now = identity(config, arm_recipes(config)["a"], "digest")
    older = {key: value for key, value in now.items() if key != "optim.ema"}
    assert same(older, now) and not same(older, {**now, "optim.ema": 0.5})
    assert not same(older, identity(AblationConfig.parse({**values, "minutes": 3}), config.base, "digest"))
    assert not same(older, {**now, "data_digest": "other"}) and not same({}, now)


def test_matplotlib_is_an_extra(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="2"):
        main(["ablate", str(write(base))])
    assert r"pip install 'blockdraft[bench]', or give --no-plots" in capsys.readouterr().err
    assert not (base / "runs").exists()


def test_an_arm_that_diverges_does_not_stop_the_others(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = matrix.Matrix._train

    def diverges(self: matrix.Matrix, arm: str, settings: Any) -> dict[str, Any]:
        if arm == "bad":
            raise loop.TrainingError("the loss is nan")
        return real(self, arm, settings)

    monkeypatch.setattr(matrix.Matrix, "_train", diverges)
    assert ablate(write(base, {"bad": {"seed": 3}, "good": {}}, steps=1, temperatures=[0])) == 2
    assert "arms that failed: bad: the loss is nan" in capsys.readouterr().err
    assert result(base, "good")["measured"] and not (base / "results" / "ablations" / "abl" / "bad.json").exists()


def test_paths_of_a_base_are_seen_from_the_ablation(base: Path) -> None:
    path = write(base)
    assert load_ablation(path).base.steps == 9
    with pytest.raises(ConfigError, match="write section"):
        load_ablation(path, ("steps",))
