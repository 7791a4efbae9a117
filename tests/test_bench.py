"""The benchmark measures what it says: the right prompts, honest "identical", ratios that can be redone by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import HashTarget, OracleDrafter, UnrelatedDrafter

from blockdraft.bench import report
from blockdraft.bench.measure import Answer, Arm, Chat, Row, Timed, measure
from blockdraft.bench.prompts import DATASETS, Prompt, load_prompts
from blockdraft.bench.summary import acceptance_by_position, first_difference, summarise, tau
from blockdraft.cli.wiring import engine_arm, make_engine
from blockdraft.config import SamplingParams

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPTS = [Prompt("a", ("one two",)), Prompt("b", ("three", "four")), Prompt("c", ("five six seven",))]
SETUP = {
    "dataset": "tiny",
    "target": "hash",
    "drafter": {"name": "none of note"},
    "dtype": "float32",
    "slots": 1,
    "params": PARAMS.model_dump(mode="json"),
    "machine": report.machine(),
}


def bytes_chat() -> Chat:
    """Letters as ids, turns joined."""

    def encode(messages: list[dict[str, str]]) -> list[int]:
        return [byte % 60 for message in messages for byte in message["content"].encode()]

    def decode(ids: Sequence[int]) -> str:
        return "".join(chr(97 + token % 26) for token in ids)

    return Chat(encode, decode)


def plain_and_unrelated() -> list[Arm]:
    target = HashTarget()
    drafter = UnrelatedDrafter(4, 61)
    return [
        engine_arm("plain", make_engine(target, None, None, 256)),
        engine_arm("drafted", make_engine(target, drafter, None, 256)),
    ]


def wrong(arm: Arm, at: int) -> Arm:
    """The same arm with one token changed."""

    def answer(prompts: list[list[int]], params: list[SamplingParams]) -> list[Answer]:
        answers = []
        for one in arm.answer(prompts, params):
            tokens = list(one.token_ids)
            if len(tokens) > at:
                tokens[at] = (tokens[at] + 1) % 61
            answers.append(replace(one, token_ids=tuple(tokens)))
        return answers

    return Arm("wrong", answer)


def test_report_has_the_promised_shape_and_survives_a_round_trip(tmp_path: Path) -> None:
    arms = plain_and_unrelated()
    rows = list(measure(PROMPTS, arms, bytes_chat(), PARAMS, repeats=2))
    assert [row.ids for row in rows] == [("a",), ("b/1",), ("b/2",), ("c",)]
    result = {"complete": True, "setup": SETUP, **summarise(rows, arms)}
    report.save(result, tmp_path / "deep" / "r.json")
    loaded = report.load(tmp_path / "deep" / "r.json")
    assert loaded == json.loads(json.dumps(result))
    assert [arm["name"] for arm in loaded["arms"]] == ["plain", "drafted"]
    for arm in loaded["arms"]:
        assert {"median", "min", "max", "total"} == arm["tokens_per_second"].keys()
        assert arm["tokens"] == 4 * 24 and arm["repeats_agree"]
    assert loaded["ratios"].keys() == {"drafted/plain"}
    assert loaded["arms"][1]["identical"] is True and loaded["arms"][1]["identical_answers"] == 4
    assert loaded["arms"][0]["identical"] is None
    assert all(len(row["arms"]["plain"]["seconds"]) == 2 for row in loaded["rows"])


def test_a_wrong_arm_is_not_identical_and_is_told_where() -> None:
    plain = plain_and_unrelated()[0]
    arms = [plain, wrong(plain, at=7)]
    seen = []

    def margin(ids: Sequence[int], token: int, other: int) -> float:
        seen.append((len(ids), (token + 1) % 61 == other))
        return 0.25

    result = summarise(list(measure(PROMPTS[:1], arms, bytes_chat(), PARAMS)), arms, margin)
    assert result["arms"][1]["identical"] is False and result["arms"][1]["identical_answers"] == 0
    difference = result["rows"][0]["differences"][0]
    assert difference["position"] == 7 and difference["arm"] == "wrong" and difference["margin"] == 0.25
    assert seen == [(len("one two") + 7, True)]


def test_sampling_arms_of_another_library_are_not_compared() -> None:
    plain = plain_and_unrelated()[0]
    foreign = replace(wrong(plain, at=0), name="hf", foreign=True, comparable=False)
    arms = [plain, foreign]
    result = summarise(list(measure(PROMPTS[:1], arms, bytes_chat(), PARAMS)), arms)
    assert result["arms"][1]["identical"] is None and result["arms"][1]["compared_answers"] == 0
    assert result["ratios"].keys() == {"plain/hf"}


def test_seeded_sampling_is_identical_and_differs_between_prompts() -> None:
    arms = plain_and_unrelated()
    sampled = PARAMS.model_copy(update={"temperature": 1.0, "seed": 5})
    same = [Prompt("x", ("again",)), Prompt("y", ("again",))]
    rows = list(measure(same, arms, bytes_chat(), sampled))
    result = summarise(rows, arms)
    assert result["arms"][1]["identical"] is True
    first, second = (row.arms["plain"].answers[0].token_ids for row in rows)
    assert first != second, "prompt i is sampled with seed + i"


def test_acceptance_is_counted_over_all_rounds() -> None:
    target = HashTarget()
    plain = engine_arm("plain", make_engine(target, None, None, 256))
    ids = bytes_chat().encode([{"role": "user", "content": "one two"}])
    known = [*ids, *plain.answer([ids], [PARAMS])[0].token_ids]
    # Every third position is drafted wrongly.
    drafter = OracleDrafter(5, 61, [known], spoil=(False, False, True))
    answers = engine_arm("drafted", make_engine(target, drafter, None, 256)).answer([ids], [PARAMS])
    assert answers[0].token_ids == tuple(known[len(ids) :])
    shares = acceptance_by_position(answers)
    assert shares == sorted(shares, reverse=True) and 0 < shares[0] <= 1
    rounds = answers[0].rounds
    assert tau(answers) == pytest.approx(answers[0].round_tokens / rounds, abs=1e-4)
    assert sum(shares) * rounds == pytest.approx(sum(answers[0].accepted_by_position), abs=0.01)


def test_tau_weighs_rounds_not_answers() -> None:
    answers = [Answer((), "stop", rounds=1, round_tokens=5), Answer((), "stop", rounds=9, round_tokens=9)]
    assert tau(answers) == 1.4
    assert tau([Answer((), "stop")]) is None


def timed(tokens: int, *seconds: float) -> Timed:
    return Timed([Answer(tuple(range(tokens)), "length")], list(seconds))


def test_rates_and_ratios_by_hand() -> None:
    arms = [Arm("plain", lambda prompts, params: []), Arm("drafted", lambda prompts, params: [])]
    rows = [
        Row(("a",), ((1,),), {"plain": timed(10, 1.0, 9.0, 2.0), "drafted": timed(10, 1.0)}),
        Row(("b",), ((1,),), {"plain": timed(30, 3.0), "drafted": timed(30, 1.0)}),
        Row(("c",), ((1,),), {"plain": timed(20, 2.0), "drafted": timed(20, 4.0)}),
    ]
    result = summarise(rows, arms)
    plain, drafted = result["arms"]
    assert plain["tokens_per_second"] == {"median": 10.0, "min": 5.0, "max": 10.0, "total": round(60 / 7, 4)}
    assert drafted["tokens_per_second"]["total"] == 10.0
    assert result["ratios"]["drafted/plain"] == {"median": 2.0, "min": 0.5, "max": 3.0, "total": round(7 / 6, 4)}


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [4]) == 0


def test_arms_take_turns_and_warm_up() -> None:
    order: list[str] = []

    def make(name: str) -> Arm:
        def answer(prompts: list[list[int]], params: list[SamplingParams]) -> list[Answer]:
            order.append(name + str(params[0].max_tokens))
            return [Answer((1, 2), "length") for _ in prompts]

        return Arm(name, answer)

    list(measure([Prompt("a", ("x",)), Prompt("b", ("y",))], [make("p"), make("d")], bytes_chat(), PARAMS))
    assert order == ["p16", "d16", "p24", "d24", "d24", "p24"]


def test_slots_share_a_batch() -> None:
    target = HashTarget()
    drafter = UnrelatedDrafter(4, 61)
    arms = [
        engine_arm("plain", make_engine(target, None, None, 256, slots=2)),
        engine_arm("drafted", make_engine(target, drafter, None, 256, slots=2)),
    ]
    rows = list(measure(PROMPTS, arms, bytes_chat(), PARAMS, slots=2))
    assert [row.ids for row in rows] == [("a", "b/1"), ("b/2",), ("c",)]
    assert summarise(rows, arms)["arms"][1]["identical"] is True


def test_no_arms_or_two_of_a_name() -> None:
    plain = plain_and_unrelated()[0]
    for arms in ([], [plain, plain]):
        with pytest.raises(ValueError, match="each once"):
            list(measure(PROMPTS, arms, bytes_chat(), PARAMS))


def write(path: Path, *rows: object) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_data_sets_have_the_papers_wording(tmp_path: Path) -> None:
    write(tmp_path / "gsm8k_test.jsonl", {"question": "2 + 2?", "answer": "4"}, {"question": "3 + 3?", "answer": "6"})
    write(tmp_path / "humaneval.jsonl", {"task_id": "HumanEval/0", "prompt": "def f():\n    pass\n"})
    write(tmp_path / "mbpp_test.jsonl", {"text": "Write f.", "task_id": 11})
    write(tmp_path / "mt_bench.jsonl", {"turns": ["Hello.", "And now?"]})
    boxed = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert [prompt.turns for prompt in load_prompts("gsm8k", tmp_path)] == [("2 + 2?" + boxed,), ("3 + 3?" + boxed,)]
    assert len(load_prompts("gsm8k", tmp_path, limit=1)) == 1
    (problem,) = load_prompts("humaneval", tmp_path)[0].turns
    assert problem.endswith("tests:\n```python\ndef f():\n    pass\n```")
    assert load_prompts("mbpp", tmp_path)[0].turns == ("Write f.",)
    assert load_prompts("mt-bench", tmp_path)[0].turns == ("Hello.", "And now?")
    assert len({prompt.id for prompt in load_prompts("gsm8k", tmp_path)}) == 2


def test_prompt_errors_are_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "keys.jsonl", {"text": "no prompt"})
    (tmp_path / "broken.jsonl").write_text('{"prompt": "x"}\n{"prompt"\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    write(tmp_path / "list.jsonl", ["not an object"])
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    for name, folder, message in (
        ("nope", None, "unknown data set 'nope'"),
        ("gsm8k", tmp_path, "no such file"),
        ("gsm8k", None, r"pip install 'blockdraft\[bench\]'"),
        (str(tmp_path / "keys.jsonl"), None, "keys.jsonl:1: needs one of the keys"),
        (str(tmp_path / "broken.jsonl"), None, "broken.jsonl:2: not JSON"),
        (str(tmp_path / "empty.jsonl"), None, "no prompts"),
        (str(tmp_path / "list.jsonl"), None, "expected an object"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            load_prompts(name, folder)
        assert "\n" not in str(caught.value)


def test_the_download_is_asked_for_the_right_data(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class FakeDatasets:
        @staticmethod
        def load_dataset(name: str, configuration: str | None = None, **options: object) -> list[dict[str, str]]:
            asked.append((name, configuration, options))
            if "MATH" in name:
                raise ConnectionError("first line\nsecond line")
            return [{"question": "q", "question_content": "q"}]

    monkeypatch.setitem(__import__("sys").modules, "datasets", FakeDatasets)
    assert load_prompts("gsm8k", limit=5)[0].turns[0].startswith("q\n")
    load_prompts("livecodebench")
    assert asked[0] == ("openai/gsm8k", "main", {"split": "test"})
    assert asked[1][0] == "json" and "code_generation_lite" in str(asked[1][2]["data_files"])
    with pytest.raises(ValueError, match=r"could not be loaded \(first line\); give --data-dir"):
        load_prompts("math500")


def test_every_data_set_has_a_file_and_a_question() -> None:
    assert all(spec.file.endswith(".jsonl") and spec.fields for spec in DATASETS.values())


def test_tables_and_readme(tmp_path: Path) -> None:
    arms = plain_and_unrelated()
    rows = list(measure(PROMPTS[:1], arms, bytes_chat(), PARAMS))
    result = {"complete": True, "setup": SETUP, **summarise(rows, arms)}
    assert len(report.render(result)) == 3 - (not result["arms"][1]["acceptance_by_position"])
    readme, results = tmp_path / "README.md", tmp_path / "r.json"
    report.save(result, results)
    readme.write_text("before\n<!-- results: begin -->\nold\n<!-- results: end -->\nafter\n")
    report.update_readme(readme, [results])
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| tiny | 0 | none of note | 1 | 1 |" in text
    report.update_readme(readme, [results])
    assert readme.read_text() == text, "rendering twice changes nothing"
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="no lines"):
        report.update_readme(readme, [results])


def test_other_json_is_not_a_report(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "y.json").write_text("{")
    for name, message in (("x.json", "not a benchmark report"), ("y.json", "not JSON")):
        with pytest.raises(ValueError, match=message):
            report.load(tmp_path / name)
