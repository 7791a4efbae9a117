"""Engines turn about: workers that rest, the order of turns, who must equal whom, and what is made of the rows."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks" / "peers"))

import compare
from process import Worker

from blockdraft.bench import peers
from blockdraft.bench.measure import Chat
from blockdraft.bench.prompts import Prompt
from blockdraft.bench.report import load
from blockdraft.config import SamplingParams

STOP = 0
WORKER = f"""
import sys, threading
sys.path.insert(0, {str(compare.HERE)!r})
from serving import after_prefill, serve

def load(settings):
    print("a library says hello")
    if settings["broken"]:
        raise ValueError("no such model")
    if settings["spins"]:
        threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
    def answer(ids, max_tokens, stop):
        print("and goes on talking")
        if len(ids) > 8:
            raise ValueError("too long")
        return after_prefill([*ids, settings["adds"]][:max_tokens], [2, 1])
    return {{"an arm": answer}}, {{"versions": {{"fake": "1"}}}}

serve(load)
"""


def worker(folder: Path, broken: bool = False, spins: bool = False) -> Worker:
    script = folder / "worker.py"
    script.write_text(WORKER)
    settings = {"broken": broken, "spins": spins, "adds": 7}
    return Worker(Path(sys.executable), script, settings, folder / "fake.log", threads=1)


def processor_seconds(pid: int) -> int:
    """In ticks of a hundredth of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_worker_answers_whatever_its_libraries_print(tmp_path: Path) -> None:
    one = worker(tmp_path)
    try:
        assert one.facts == {"versions": {"fake": "1"}}
        expected = {"tokens": [4, 5, 7], "rounds": 2, "round_tokens": 3}
        assert one.ask("an arm", [4, 5], 8, [STOP]) == expected
        assert one.ask("an arm", [4, 5], 2, [STOP])["tokens"] == [4, 5]
        assert "goes on talking" in one.log.read_text()
    finally:
        one.close()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at Linux's list of processes")
def test_a_worker_that_is_not_asked_does_nothing_at_all(tmp_path: Path) -> None:
    """Although a thread of it never rests, as the control sees when it is let go on."""
    one = worker(tmp_path, spins=True)
    try:
        one.ask("an arm", [1], 8, [STOP])
        time.sleep(0.05)
        before = processor_seconds(one.process.pid)
        time.sleep(0.3)
        assert processor_seconds(one.process.pid) == before
        one.resume()
        deadline = time.monotonic() + 20.0
        while processor_seconds(one.process.pid) == before:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        one.close()


def test_a_worker_that_ends_says_why_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^worker fake ended with 1: ValueError: no such model \(all of it: .*\)$"):
        worker(tmp_path, broken=True)
    one = worker(tmp_path)
    try:
        for _ in range(2):  # and again, when nobody is there any more
            with pytest.raises(ValueError, match="worker fake ended with 1: ValueError: too long"):
                one.ask("an arm", list(range(9)), 8, [STOP])
    finally:
        one.close()


class Engines:
    """What workers would say: the prompt's tokens again and a stop, but for an arm that goes astray."""

    def __init__(self, astray: dict[str, int]) -> None:
        self.astray, self.asked = astray, []

    def ask(self, arm: str, ids: Any, max_tokens: int, stop: Any) -> dict[str, Any]:
        self.asked.append((arm, ids[0], max_tokens))
        tokens = [*(ids * max_tokens)[: max_tokens - 1], STOP]
        # Half as precise: all of F16 says something else, and is not wrong for that.
        tokens = [token + 100 if "f16" in arm and token != STOP else token for token in tokens]
        if arm in self.astray and ids[0] == 2:
            tokens[self.astray[arm]] = 99
        told = {"tokens": tokens, "rounds": 3, "round_tokens": len(tokens) - 1}
        return {**told, "decode_tokens": len(tokens) - 1, "decode_seconds": 0.5}


ARMS = "transformers,dflash,llamacpp-f16,llamacpp-f16-dflash,blockdraft-auto,blockdraft-f16,blockdraft-f16-auto"
ASTRAY = {"dflash": 2, "llamacpp-f16-dflash": 1}


def measured(folder: Path, names: str = ARMS, threads: int = 1) -> tuple[dict[str, Any], Engines]:
    """A run over three prompts in which two arms go astray, one of them with F16 weights."""
    engines = Engines(ASTRAY)
    chat = Chat(encode=lambda messages: [int(messages[-1]["content"])], decode=str)
    arms = [compare.make_arm(peer, engines.ask, [STOP]) for peer in peers.chosen(names)]
    prompts, params = [Prompt(f"p{n}", (str(n),)) for n in (1, 2, 3)], SamplingParams(max_tokens=20)
    machine = {"cpu": "a processor", "cores": 2, "threads": threads}
    setup = {
        "dataset": "numbers", "prompts": 3, "params": params.model_dump(mode="json"), "target": "target",
        "arms": peers.facts(peers.chosen(names)), "machine": machine,
        "versions": {"one": {"torch": "2"}, "two": {"torch": "2", "dflash": "0.1"}},
    }  # fmt: skip
    path = folder / compare.default_output(threads).name
    made = compare.compare(prompts, arms, chat, params, setup, path)
    assert load(path) == json.loads(json.dumps(made)) and made["complete"]
    return made, engines


@pytest.fixture
def report(tmp_path: Path) -> tuple[dict[str, Any], Engines]:
    return measured(tmp_path)


def test_arms_take_turns_and_warm_up_uncounted(report: tuple[dict[str, Any], Engines]) -> None:
    made, engines = report
    names = ARMS.split(",")
    assert engines.asked[: len(names)] == [(name, 1, 16) for name in names]  # shorter, and no row
    turns = [[arm for arm, ids, tokens in engines.asked[len(names) :] if ids == number] for number in (1, 2, 3)]
    assert turns == [names, names[1:] + names[:1], names[2:] + names[:2]]
    assert [row["ids"] for row in made["rows"]] == [["p1"], ["p2"], ["p3"]]
    assert all(row["arms"][name]["tokens"] == [20] for row in made["rows"] for name in names)


def test_answers_are_compared_with_those_that_they_must_equal(report: tuple[dict[str, Any], Engines]) -> None:
    made, _ = report
    found = {arm["name"]: (arm["identical"], arm["identical_answers"], arm["compared_answers"]) for arm in made["arms"]}
    assert found == {
        "transformers": (None, 0, 0),
        "dflash": (False, 2, 3),
        "llamacpp-f16": (None, 0, 0),
        "llamacpp-f16-dflash": (False, 2, 3),
        "blockdraft-auto": (True, 3, 3),
        "blockdraft-f16": (None, 0, 0),
        "blockdraft-f16-auto": (True, 3, 3),
    }
    places = [(one["arm"], one["position"]) for row in made["rows"] for one in row["differences"]]
    assert places == [("dflash", 2), ("llamacpp-f16-dflash", 1)]


def test_rates_rounds_and_ratios(report: tuple[dict[str, Any], Engines]) -> None:
    made, _ = report
    (ours,) = [arm for arm in made["arms"] if arm["name"] == "blockdraft-auto"]
    assert ours["tau"] == pytest.approx(19 / 3, abs=1e-4) and ours["stopped"] == 3
    assert ours["decode_tokens_per_second"] == {"median": 38.0, "min": 38.0, "max": 38.0}
    assert made["rows"][0]["arms"]["dflash"]["rounds"] == 3
    assert {"blockdraft-auto/dflash", "dflash/transformers", "llamacpp-f16-dflash/llamacpp-f16"} <= set(made["ratios"])


def test_the_document_gets_the_table(report: tuple[dict[str, Any], Engines], tmp_path: Path) -> None:
    made, _ = report
    document = tmp_path / "document.md"
    document.write_text("before\n<!-- peers: begin -->\nold\n<!-- peers: end -->\nafter\n")
    peers.update(document, [tmp_path / "peers-1-thread.json"])
    text = document.read_text()
    peers.update(document, [tmp_path / "peers-1-thread.json"])
    assert document.read_text() == text and "old" not in text
    assert text.startswith("before\n") and text.endswith("<!-- peers: end -->\nafter\n")
    assert "### On 1 thread\n" in text and "torch 2, dflash 0.1." in text
    (line,) = [line for line in text.splitlines() if line.startswith("| llama.cpp | F16 | DFlash |")]
    ratio = made["ratios"]["llamacpp-f16-dflash/llamacpp-f16"]
    assert "| 38.0 | 6.33 | 2 of 3 |" in line and f"| {ratio['median']:.2f}x ({ratio['min']:.2f} - " in line
    assert "- llamacpp-f16-dflash parts in p2 at token 1.\n" in text


def ratio_to_ours(text: str, engine: str, weights: str) -> str:
    """The last column of an engine's plain arm."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {engine} | {weights} | none |")]
    return line.rstrip(" |").rpartition("| ")[2].partition("x")[0]


def test_ours_stands_beside_what_has_the_same_weights(tmp_path: Path) -> None:
    made, _ = measured(tmp_path)
    # Rates as far apart as they are by chance in no run.
    ratios = {"blockdraft-f16-auto/llamacpp-f16": 3.0, "blockdraft-auto/llamacpp-f16": 2.0}
    made["ratios"] |= {name: {"median": ratio, "min": 1.0, "max": 9.0} for name, ratio in ratios.items()}
    assert ratio_to_ours(peers.markdown([made]), "llama.cpp", "F16") == "3.00"
    del made["setup"]["arms"]["blockdraft-f16-auto"]
    made["arms"] = made["arms"][:-1]
    assert ratio_to_ours(peers.markdown([made]), "llama.cpp", "F16") == "2.00"


def test_runs_on_one_thread_and_on_two_stand_in_one_document(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text("<!-- peers: begin -->\n<!-- peers: end -->\n")
    for threads in (1, 2):
        measured(tmp_path, ARMS if threads == 2 else "transformers,blockdraft-auto", threads)
    files = sorted(tmp_path.glob("peers*.json"))
    assert [file.name for file in files] == ["peers-1-thread.json", "peers.json"]
    peers.update(document, files)
    both = document.read_text().partition("### On 2 threads\n")[2].partition("### On 1 thread\n")
    assert [part.count("| blockdraft |") for part in both] == [3, 0, 1]
    assert both[2].count(peers.MEANINGS) == 1 and both[0].count(peers.MEANINGS) == 0
    pytest.importorskip("matplotlib")
    peers.draw([load(file) for file in files], tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes()[:4] == b"\x89PNG"


def test_a_file_for_each_number_of_threads() -> None:
    asked = ["--drafter", "d", "--prompts", "p.jsonl"]
    outputs = [compare.parse([*asked, "--threads", str(count)]).output.name for count in (1, 2, 4)]
    assert outputs == ["peers-1-thread.json", "peers.json", "peers-4-threads.json"]
    assert compare.parse(asked).output == Path("results/peers.json")
    assert compare.parse([*asked, "--threads", "1", "--output", "mine.json"]).output == Path("mine.json")


def test_what_was_not_finished_gets_into_no_document(report: tuple[dict[str, Any], Engines], tmp_path: Path) -> None:
    made, _ = report
    (tmp_path / "half.json").write_text(json.dumps({**made, "complete": False}))
    document = tmp_path / "document.md"
    document.write_text("<!-- peers: begin -->\n<!-- peers: end -->\n")
    with pytest.raises(ValueError, match="not finished"):
        peers.update(document, [tmp_path / "half.json"])


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        ("transformers,vllm", "vllm: no such arm"),
        ("blockdraft", "without transformers, with which blockdraft"),
        ("transformers,blockdraft,blockdraft-f16-auto", "without blockdraft-f16, with which blockdraft-f16-auto"),
    ],
)
def test_arms_that_cannot_be_compared_are_refused(arms: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        peers.chosen(arms)


def test_every_arm_has_a_worker_and_a_baseline() -> None:
    names = [peer.name for peer in peers.PEERS]
    paths = {name: name for name in ("target", "dflash", "assistant", *(f"{a}-{b}" for a in ("target", "drafter")
             for b in ("f32", "f16")))}  # fmt: skip
    options = compare.parse(["--drafter", "d", "--prompts", "p.jsonl", "--threads", "5"])
    planned = list(compare.plans(paths, {"block_size": 8}, options, 300))
    assert sorted(name for *_, arms in planned for name in arms) == sorted(names)
    assert all((compare.HERE / script).is_file() for _, script, *_ in planned)
    assert all(s["drafts"] == (3 if arms[0].endswith("-3") else 7) for *_, s, arms in planned)
    assert {peer.plain or peer.name for peer in peers.PEERS} <= set(names)
    assert {s["threads"] for *_, s, _ in planned} == {5}
    ours = {s["arm"]: s["weights"] for _, script, s, _ in planned if script == "ours.py"}
    assert ours == {"blockdraft": None, "blockdraft-f16": "float16"}
    # Half precision is another target: nobody there is compared with fp32, and everybody with a plain arm.
    halves = [peer for peer in peers.PEERS if peer.weights == "F16"]
    assert len(halves) == 6 and all(peer.like == (peer.plain or peer.name) for peer in halves)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--threads", "0"], "error: --threads 0: need at least 1"),
        (["--arms", "nobody"], "error: --arms nobody: no such arm"),
        (["--prompts", "none.jsonl"], "error: none.jsonl: no such file"),
    ],
)
def test_mistakes_are_one_line(changes: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--drafter", "nowhere", "--prompts", "none.jsonl", *changes]) == 2
    said = capsys.readouterr().err
    assert said.startswith(message) and said.count("\n") == 1


def test_a_data_set_is_asked_in_the_papers_words(tmp_path: Path) -> None:
    for name in ("gsm8k_test.jsonl", "mine.jsonl"):
        (tmp_path / name).write_text('{"question": "1 + 1?"}\n{"question": "2 + 3?"}\n')
    asked, name = compare.read_prompts(tmp_path / "gsm8k_test.jsonl", 1)
    assert (name, len(asked)) == ("gsm8k", 1) and "step by step" in asked[0].turns[0]
    asked, name = compare.read_prompts(tmp_path / "mine.jsonl", 2)
    assert name == "mine" and [prompt.turns for prompt in asked] == [("1 + 1?",), ("2 + 3?",)]
