"""The command line: quick help, one line for a user's mistake, and every sub-command on tiny models."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from models import save_tiny_drafter, save_tiny_target
from tiny import tiny_llama

from blockdraft.cli import main


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_drafter(tmp_path_factory.mktemp("drafters") / "tiny"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of one command, in this process."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    probe = (
        "import sys\n"
        "from blockdraft.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'numpy', 'yaml'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
        seconds.append(time.perf_counter() - began)
        assert done.returncode == 0, done.stderr
        assert "generate" in done.stdout
    # 0.3 s on an idle machine; this one may be busy with other things.
    assert min(seconds) < 1.5


def test_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("generate", "train", "regenerate", "bench", "choices", "ablate", "check", "export", "import", "command")
    for name in (*names, "info"):
        code, out, _ = run(capsys, name, "--help")
        assert code == 0
        assert "Usage: blockdraft " + name in out


def mistakes(folder: Path) -> list[tuple[list[str], str]]:
    """Command lines that cannot work, and what has to be said about each."""
    (folder / "empty.jsonl").write_text("")
    (folder / "prompts.jsonl").write_text('{"prompt": "Hello"}\n')
    (folder / "empty.yaml").write_text("")
    (folder / "bad.yaml").write_text("target: x\ndata: {files: [empty.jsonl]}\nstepz: 3\n")
    (folder / "good.yaml").write_text("target: x\ndata: {files: [nowhere.jsonl]}\n")
    (folder / "folder").mkdir()
    path = str(folder)
    return [
        (["generate", ""], "the prompt is empty"),
        (["generate"], "no prompt"),
        (["generate", "x", "--target", path + "/nowhere", "--drafter", "none"], "not found"),
        (["generate", "x", "--target", path + "/folder", "--drafter", "none"], "empty folder"),
        (["generate", "x", "--target", path + "/empty.jsonl", "--drafter", "none"], "not a .gguf"),
        (["generate", "x", "--target", path + "/nowhere"], "nowhere' not found: give a model folder"),
        (["generate", "x", "--target", "no/such"], "no drafter comes with blockdraft for 'no/such'"),
        (["generate", "x", "--drafter", path + "/nowhere"], "no such folder"),
        (
            ["generate", "x", "--drafter", "eagle"],
            "no such folder, nor another drafter: give auto, mtp, none, ngram, ngram:K,",
        ),
        (["regenerate", path + "/prompts.jsonl", "out", "--drafter", "model"], "model:NAME:K, a drafter's folder"),
        (["generate", "x", "--drafter", "ngram:"], "drafter 'ngram:': max_drafts"),
        (["bench", "--dataset", path + "/prompts.jsonl", "--drafter", "ngram:0"], "drafter 'ngram:0': max_drafts"),
        (["generate", "x", "--drafter", "model:"], "drafter 'model:': model"),
        (["generate", "x", "--drafter", "ngram+ngram"], "needs another drafter behind it"),
        (["generate", "x", "--drafter", "ngram+none"], "needs another drafter behind it"),
        (["generate", "x", "--drafter", f"ngram+{path}/nowhere"], "/nowhere': no such folder"),
        (["generate", "x", "--drafter", "model:y:0"], "drafter 'model:y:0': max_drafts"),
        (["generate", "x", "--drafter", f"model:{path}/nowhere:3"], "/nowhere' not found"),
        (["generate", "x", "--compare", "--drafter", "none"], "needs a drafter"),
        (["generate", "x", "--block-size", "3", "--drafter", "none"], "--block-size needs a drafter"),
        (["generate", "x", "--temperature", "-1"], "temperature"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens"),
        (["generate", "x", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "x", "--raw", "--system", "y"], "--system"),
        (["generate", "x", "--threads", "0", "--drafter", "none"], "--threads 0"),
        (["train", path + "/nowhere.yaml"], "no such file"),
        (["train", path + "/empty.yaml"], "expected settings"),
        (["train", path + "/bad.yaml"], "unknown key 'stepz'"),
        (["train", path + "/good.yaml"], "nowhere.jsonl: no such file"),
        (["train", path + "/good.yaml", "--set", "steps"], "write section.key=value"),
        (["train", path + "/good.yaml", "--set", "steps=-1"], "steps"),
        (["train", path + "/good.yaml", "--set", "optim.lrr=1"], "optim.lrr"),
        (["bench", "--dataset", "nope"], "unknown data set 'nope'"),
        (["bench", "--dataset", "gsm8k", "--data-dir", path + "/nowhere"], "no such file"),
        (["bench", "--dataset", path + "/empty.jsonl"], "no prompts"),
        (["bench", "--arms", "plain,fast"], "--arms"),
        (["bench", "--slots", "2"], "no hf arm"),
        (["bench", "--slots", "4,1"], "--slots 4,1: give a number, or several that rise"),
        (["bench", "--slots", "1,4", "--arms", "plain"], "compares plain and drafted decoding"),
        (["choices", "--temperatures", "0,1"], "--temperatures 0,1: give numbers above 0"),
        (
            ["choices", "--dataset", path + "/prompts.jsonl", "--drafter", "ngram"],
            "whose drafts can be drawn by chance",
        ),
        (["bench", "--limit", "0"], "--limit"),
        (["nonsense"], "nonsense"),
        (["generate", "x", "--nonsense"], "--nonsense"),
    ]


def test_a_mistake_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, message in mistakes(tmp_path):
        code, _, err = run(capsys, *arguments)
        assert code == 2, (arguments, err)
        lines = err.splitlines()
        assert len(lines) == 1, (arguments, err)
        assert lines[0].startswith("error: "), (arguments, err)
        assert message in lines[0], (arguments, err)


def test_devices_and_dtypes_reach_the_target(capsys: pytest.CaptureFixture[str], target: str) -> None:
    common = ["generate", "x", "--target", target, "--drafter", "none", "--max-tokens", "4"]
    for option, value, message in (
        ("--dtype", "float8", "dtype 'float8' is not one of"),
        ("--device", "toaster", "could not be loaded"),
        ("--target-impl", "fast", "'fast' is not one of"),
    ):
        code, _, err = run(capsys, *common, option, value)
        assert (code, len(err.splitlines())) == (2, 1) and message in err
    assert run(capsys, *common, "--dtype", "bfloat16")[0] == 0


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        main(["generate", "", "--debug"])


def test_our_own_mistakes_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(prompts: object, demo: bool) -> list[str]:
        raise AssertionError("ours")

    monkeypatch.setattr("blockdraft.cli.generate.read_prompts", broken)
    with pytest.raises(AssertionError, match="ours"):
        main(["generate", "x"])


def test_interrupt_is_one_line_and_code_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(prompts: object, demo: bool) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr("blockdraft.cli.generate.read_prompts", interrupted)
    code, _, err = run(capsys, "generate", "x")
    assert (code, err.strip()) == (130, "interrupted")


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from blockdraft.cli import main; main(['--help'])"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode in (1, 141)


def test_info(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("blockdraft.cli.info._default_target", lambda: "here")
    code, out, _ = run(capsys, "info")
    assert code == 0
    assert "torch" in out and "here" in out


def test_generate_streams_the_same_answer_with_every_drafter(
    capsys: pytest.CaptureFixture[str], target: str, drafter: str
) -> None:
    common = ["generate", "Hello there", "--target", target, "--max-tokens", "30", "--temperature", "1", "--seed", "3"]
    code, plain, err = run(capsys, *common, "--drafter", "none")
    assert code == 0
    assert "tokens/s" in err and "tau" not in err
    code, drafted, err = run(capsys, *common, "--drafter", drafter)
    assert (code, drafted) == (0, plain)
    assert "tau" in err
    code, coloured, _ = run(capsys, *common, "--drafter", drafter, "--show-accepted", "--verify-width", "2")
    assert (code, coloured) == (0, plain), "no colour codes where there is no terminal"
    for width in ("all", "auto", "0"):
        code, same, err = run(capsys, *common, "--drafter", drafter, "--verify-width", width)
        assert (code, same) == (0, plain)
        assert ("29 of 29 rounds without drafting" in err) == (width == "0"), err
    code, _, err = run(capsys, *common, "--drafter", drafter, "--verify-width", "-1")
    assert (code, err) == (2, "error: --verify-width -1: give a number of drafts, auto or all\n")
    code, smaller, _ = run(capsys, *common, "--drafter", drafter, "--block-size", "2")
    assert (code, smaller) == (0, plain)
    code, _, err = run(capsys, *common, "--drafter", drafter, "--block-size", "9")
    assert (code, err) == (2, "error: block_size=9: the drafter has blocks of 2 to 4\n")
    assert run(capsys, *common[:-1], "4", "--drafter", "none")[1] != plain


@pytest.mark.parametrize(("temperature", "names"), [("0", ("ngram:3", "model:{}:2")), ("1", ("ngram", "model:{}"))])
def test_drafters_that_need_no_training(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    temperature: str,
    names: tuple[str, ...],
) -> None:
    monkeypatch.chdir(Path(target).parent)
    folder = Path(target).name
    common = ["generate", "Hello there there", "--target", folder, "--max-tokens", "30", "--seed", "3"]
    common += ["--temperature", temperature, "--verify-width", "all"]
    _, plain, _ = run(capsys, *common, "--drafter", "none")
    for name in names:
        code, drafted, err = run(capsys, *common, "--drafter", name.format(folder))
        assert (code, drafted) == (0, plain), (name, err)
        assert "tau" in err
        if name.endswith(":2"):
            assert "tau 2.9" in err, "29 tokens in 10 passes: the target itself is always right"


def test_a_draft_model_of_another_vocabulary_is_refused(
    capsys: pytest.CaptureFixture[str], target: str, tmp_path: Path
) -> None:
    tiny_llama(num_hidden_layers=1).save_pretrained(tmp_path / "other")
    capsys.readouterr()  # of saving
    code, _, err = run(capsys, "generate", "Hello", "--target", target, "--drafter", f"model:{tmp_path / 'other'}")
    assert code == 2 and len(err.splitlines()) == 1
    assert "the draft model 'other' has a vocabulary of 96" in err


def test_auto_without_a_shipped_drafter_says_what_to_do(capsys: pytest.CaptureFixture[str], target: str) -> None:
    code, _, err = run(capsys, "generate", "Hello", "--target", target)
    assert code == 2
    assert err.startswith("error: no drafter comes with blockdraft for") and "--drafter none" in err


def test_generate_reads_standard_input_and_raw_prompts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    common = ["--target", target, "--drafter", "none", "--max-tokens", "12"]
    _, expected, _ = run(capsys, "generate", "Hello", *common)
    monkeypatch.setattr("sys.stdin", __import__("io").StringIO("Hello"))
    assert run(capsys, "generate", "-", *common)[1] == expected
    assert run(capsys, "generate", "Hello", "--raw", *common)[1] != expected
    assert run(capsys, "generate", "Hello", "--system", "Be brief", *common)[0] in (0, 2)


def test_generate_stops_at_a_stop_string(capsys: pytest.CaptureFixture[str], target: str) -> None:
    common = ["generate", "Hello", "--target", target, "--drafter", "none", "--max-tokens", "40"]
    _, full, _ = run(capsys, *common)
    text = full.rstrip("\n")
    stop = text[len(text) // 2]
    assert run(capsys, *common, "--stop", stop)[1].rstrip("\n") == text[: text.index(stop)]


def test_compare_shows_both_rates_and_identical(capsys: pytest.CaptureFixture[str], target: str, drafter: str) -> None:
    code, out, _ = run(
        capsys,
        "generate",
        "Hello",
        "Bye [bold]",
        "--compare",
        "--target",
        target,
        "--drafter",
        drafter,
        "--max-tokens",
        "20",
    )
    assert code == 0
    assert out.count("identical") == 3 and "NOT" not in out
    assert "plain" in out and "drafted" in out and "ratio" in out and "tau" in out
    assert "Bye [bold]" in out


def test_compare_fails_when_answers_differ(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, target: str, drafter: str
) -> None:
    from blockdraft.cli import wiring

    honest = wiring.engine_arm

    def dishonest(name: str, engine: object) -> object:
        arm = honest(name, engine)
        if name == "plain":
            return arm

        def answer(prompts: object, params: object) -> object:
            from dataclasses import replace

            return [replace(one, token_ids=(*one.token_ids[:-1], 7)) for one in arm.answer(prompts, params)]

        return type(arm)(name, answer)

    monkeypatch.setattr(wiring, "engine_arm", dishonest)
    code, out, _ = run(
        capsys, "generate", "Hello", "--compare", "--target", target, "--drafter", drafter, "--max-tokens", "20"
    )
    assert code == 1
    assert "NOT IDENTICAL" in out


def test_bench_writes_json_and_tables(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: str, drafter: str
) -> None:
    prompts = tmp_path / "few.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n{"turns": ["One", "Two"]}\n')
    output = tmp_path / "out" / "few.json"
    code, out, _ = run(
        capsys, "bench", "--dataset", str(prompts), "--target", target, "--drafter", drafter, "--max-tokens", "20",
        "--output", str(output), "--repeats", "2",
    )  # fmt: skip
    assert code == 0
    assert "drafted/plain" in out and "drafted/hf" in out and "plain/hf" in out
    report = json.loads(output.read_text())
    assert report["complete"] is True
    assert [arm["name"] for arm in report["arms"]] == ["plain", "drafted", "hf"]
    assert [arm["identical"] for arm in report["arms"]] == [None, True, True]
    assert report["setup"]["params"]["max_tokens"] == 20
    assert report["setup"]["machine"]["versions"]["torch"]
    assert len(report["rows"]) == 3


@pytest.mark.parametrize("kind", ["ngram:4", "model", "ngram+model"])
def test_bench_says_which_drafter_it_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str, kind: str
) -> None:
    prompts, output = tmp_path / "few.jsonl", tmp_path / "few.json"
    prompts.write_text('{"prompt": "Hello"}\n')
    name = kind.replace("model", f"model:{target}:4")
    words = ["bench", "--dataset", str(prompts), "--target", target, "--drafter", name, "--max-tokens", "8"]
    words += ["--arms", "plain,drafted", "--output", str(output)]
    monkeypatch.setattr("sys.argv", ["blockdraft", *words])
    assert run(capsys, *words)[0] == 0
    setup = json.loads(output.read_text())["setup"]
    folder = Path(target).name
    said = kind.replace("ngram:4", "ngram").replace("model", f"model:{folder}")
    settings: dict[str, dict[str, object]] = {
        "ngram:4": {"longest": 3, "shortest": 1},
        "model": {},
        "ngram+model": {"lookup": {"longest": 10, "shortest": 3}},
    }
    assert setup["drafter"] == {"name": said, "block_size": 5, "max_drafts": 4, **settings[kind]}
    spelt = kind.replace("model", f"model:{folder}:4")
    assert f"--drafter {spelt} " in setup["command"], "the command without the folders of this machine"


def test_an_interrupted_bench_keeps_what_it_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str, drafter: str
) -> None:
    from blockdraft.cli import wiring

    honest, calls = wiring.engine_arm, []

    def stopping(name: str, engine: object) -> object:
        arm = honest(name, engine)

        def answer(prompts: object, params: object) -> object:
            calls.append(name)
            if len(calls) > 4:  # the warm-up and one prompt of both arms
                raise KeyboardInterrupt
            return arm.answer(prompts, params)

        return type(arm)(name, answer)

    monkeypatch.setattr(wiring, "engine_arm", stopping)
    prompts, output = tmp_path / "few.jsonl", tmp_path / "few.json"
    prompts.write_text('{"prompt": "Hello"}\n{"prompt": "Bye"}\n')
    code, out, err = run(
        capsys, "bench", "--dataset", str(prompts), "--target", target, "--drafter", drafter, "--max-tokens", "8",
        "--arms", "plain,drafted", "--output", str(output),
    )  # fmt: skip
    assert code == 130
    assert "partial results" in out and "interrupted" in err
    report = json.loads(output.read_text())
    assert report["complete"] is False
    assert len(report["rows"]) == 1


def write_prompts(path: Path, count: int) -> None:
    path.write_text("".join(json.dumps({"id": f"p{n}", "prompt": f"What is {n} + {n}?"}) + "\n" for n in range(count)))


def test_regenerate_resumes_and_repeats_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: str) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    write_prompts(prompts, 6)
    common = ["--target", target, "--max-tokens", "12", "--greedy-share", "0.5", "--temperature", "1"]
    code, out, _ = run(capsys, "regenerate", str(prompts), str(answers), *common, "--limit", "2", "--slots", "1")
    assert (code, "2 of them new" in out) == (0, True)
    code, out, _ = run(capsys, "regenerate", str(prompts), str(answers), *common, "--slots", "3")
    assert (code, "4 of them new" in out) == (0, True)
    rows = {row["id"]: row for row in map(json.loads, answers.read_text().splitlines())}
    assert rows.keys() == {f"p{n}" for n in range(6)}
    assert {row["temperature"] for row in rows.values()} == {0.0, 1.0}
    for drafter in ("none", "ngram:4", f"model:{target}:3"):
        again = tmp_path / f"again-{drafter[:5]}.jsonl"
        options = ["--slots", "6", "--drafter", drafter]
        assert run(capsys, "regenerate", str(prompts), str(again), *common, *options)[0] == 0
        assert {row["id"]: row for row in map(json.loads, again.read_text().splitlines())} == rows


def test_regenerate_mistakes(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: str) -> None:
    prompts, empty, long = tmp_path / "prompts.jsonl", tmp_path / "empty.jsonl", tmp_path / "long.jsonl"
    write_prompts(prompts, 1)
    long.write_text(prompts.read_text() + json.dumps({"id": "tome", "prompt": "word " * 3000}) + "\n")
    empty.write_text("")
    for arguments, message in (
        ([str(tmp_path / "nowhere.jsonl"), "out.jsonl"], "nowhere.jsonl"),
        ([str(empty), "out.jsonl"], "no prompts"),
        ([str(long), "out.jsonl", "--target", target], "prompt 'tome' has"),
        ([str(prompts), "out.jsonl", "--base-url", "http://127.0.0.1:9/v1"], "--model"),
        ([str(prompts), "out.jsonl", "--base-url", "ftp://x", "--model", "y"], "ftp://x"),
    ):
        code, _, err = run(capsys, "regenerate", *arguments)
        assert code == 2
        assert err.startswith("error: ") and message in err and len(err.splitlines()) == 1


RECIPE = """
target: {target}
steps: 4
batch_size: 2
anchors: 4
eval_steps: 2
eval_prompts: 2
eval_max_tokens: 8
data: {{files: [{data}], held_out: 0.3, min_answer_tokens: 4}}
drafter: {{num_layers: 1, block_size: 4, num_taps: 1}}
"""


def test_train_previews_trains_and_resumes(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: str) -> None:
    data, recipe, folder = tmp_path / "data.jsonl", tmp_path / "tiny.yaml", tmp_path / "run"
    rows = [{"prompt": f"Say {n}", "response": f"So I say {n} and no more."} for n in range(12)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe.write_text(RECIPE.format(target=target, data=data))
    code, out, _ = run(capsys, "train", str(recipe), "--preview", "1")
    assert code == 0
    assert "So I say 0" in out and not folder.exists()
    code, out, err = run(capsys, "train", str(recipe), "--run-dir", str(folder), "--set", "steps=2")
    assert code == 0, err
    assert "trained 2 steps" in out and "tau" in out
    code, out, err = run(capsys, "train", str(recipe), "--run-dir", str(folder))
    assert code == 0, err
    assert "trained 4 steps" in out
    code, _, err = run(capsys, "train", str(recipe), "--run-dir", str(folder), "--no-resume")
    assert (code, len(err.splitlines()[-1:])) == (2, 1)
    text = ["generate", "Say 3", "--target", target, "--max-tokens", "16"]
    _, plain, _ = run(capsys, *text, "--drafter", "none")
    assert run(capsys, *text, "--drafter", str(folder / "best"))[1] == plain
