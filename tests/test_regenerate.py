"""Regeneration: resumable, torn lines, keyed seeds and temperatures, our engine and HTTP servers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from blockdraft.train import regenerate as module
from blockdraft.train.chats import DataError
from blockdraft.train.regenerate import Answer, Job, OpenAIAnswers, answered_ids, read_jobs, regenerate

QUIET = Console(quiet=True)


class FakeAnswers:
    """Answers that depend on the job alone, latest first in groups of three; stops after `limit`."""

    def __init__(self, limit: int = 10**6) -> None:
        self.limit, self.asked = limit, list[str]()

    def answer(self, jobs: Iterable[Job]) -> Iterator[Answer]:
        jobs = list(jobs)
        for start in range(0, len(jobs), 3):
            for job in reversed(jobs[start : start + 3]):
                if len(self.asked) == self.limit:
                    raise KeyboardInterrupt
                self.asked.append(job.id)
                yield Answer(job, f"{job.seed} é", [job.seed % 7, 1], "stop", 2)


def write(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts(folder: Path, count: int = 20) -> Path:
    return write(
        folder / "prompts.jsonl", ({"id": f"p{n}", "source": "test", "prompt": f"say {n}"} for n in range(count))
    )


def go(source: Path, output: Path, answers: Any, **changes: Any) -> module.Regenerated:
    options = {"seed": 0, "greedy_share": 0.5, "temperature": 0.7, "limit": None, **changes}
    return regenerate(source, output, answers, console=QUIET, **options)


def rows(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row for row in found}


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    source = prompts(tmp_path)
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "new" / "parts.jsonl"
    assert go(source, whole, FakeAnswers()) == module.Regenerated(0, 20, True)
    assert go(source, parts, FakeAnswers(limit=7)) == module.Regenerated(0, 7, False)
    with parts.open("ab") as file:
        file.write('{"id": "p19", "prompt": "torn é'.encode()[:-1])
    later = FakeAnswers()
    assert go(source, parts, later) == module.Regenerated(7, 13, True)
    assert len(later.asked) == 13 and "p19" in later.asked
    assert rows(parts) == rows(whole)
    assert go(source, parts, FakeAnswers()) == module.Regenerated(20, 0, True)
    expected = {"id", "source", "prompt", "response", "response_ids", "finish", "temperature"}
    assert set(rows(whole)["p3"]) == expected


def test_seeds_and_temperatures_follow_from_the_id(tmp_path: Path) -> None:
    source = prompts(tmp_path, 400)
    jobs = read_jobs(source, 0, 0.7, 0.9)
    backwards = write(tmp_path / "back.jsonl", [json.loads(line) for line in reversed(source.read_text().splitlines())])
    assert sorted(read_jobs(backwards, 0, 0.7, 0.9), key=lambda job: job.id) == sorted(jobs, key=lambda job: job.id)
    greedy = sum(job.temperature == 0.0 for job in jobs)
    assert 240 < greedy < 320 and {job.temperature for job in jobs} == {0.0, 0.9}
    assert len({job.seed for job in jobs}) == 400 and all(0 <= job.seed < 2**31 for job in jobs)
    assert read_jobs(source, 1, 0.7, 0.9)[0].seed != jobs[0].seed
    assert {job.temperature for job in read_jobs(source, 0, 1.0, 0.9)} == {0.0}
    assert {job.temperature for job in read_jobs(source, 0, 0.0, 0.9)} == {0.9}
    with pytest.raises(ValueError, match=r"greedy_share=1\.5"):
        go(source, tmp_path / "out", FakeAnswers(), greedy_share=1.5)


def test_limit(tmp_path: Path) -> None:
    assert go(prompts(tmp_path), tmp_path / "out", FakeAnswers(), limit=4) == module.Regenerated(0, 4, True)


def test_conversations_keep_their_turns_and_lose_the_old_answer(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    old = {"role": "assistant", "content": "go away"}
    source = write(tmp_path / "p.jsonl", [{"messages": [*turns, old]}, {"messages": turns[1:]}])
    go(source, tmp_path / "out", FakeAnswers())
    with_system, alone = sorted(rows(tmp_path / "out").values(), key=lambda row: "prompt" in row)
    assert with_system["messages"] == turns and alone["prompt"] == "hi"
    from models import save_tiny_target

    from blockdraft.config import DataConfig
    from blockdraft.targets.resolve import load_tokenizer
    from blockdraft.train.data import read_samples

    tokenizer = load_tokenizer(str(save_tiny_target(tmp_path / "target")))
    samples, _ = read_samples(DataConfig(files=(str(tmp_path / "out"),), min_answer_tokens=2), tokenizer, [1])
    assert [sample.ids[sample.loss_mask].tolist() for sample in samples] == [
        row["response_ids"] for row in rows(tmp_path / "out").values()
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "a"}, "needs text in 'prompt'"),
        ({"id": "p0", "prompt": "x"}, "id 'p0' occurs twice"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no prompt in front"),
        ({"messages": [{"role": "user"}]}, "turn 0 needs text"),
    ],
)
def test_bad_prompts(tmp_path: Path, row: Any, message: str) -> None:
    source = write(tmp_path / "p.jsonl", [{"id": "p0", "prompt": "fine"}, row])
    with pytest.raises(DataError, match=f"p.jsonl:2: .*{message}"):
        go(source, tmp_path / "out", FakeAnswers())


def test_a_damaged_output_is_not_guessed_at(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text('{"id": "a"}\n{"id": \n{"id": "b"}\n')
    with pytest.raises(DataError, match="out:2: not JSON"):
        answered_ids(path)
    path.write_text('{"text": "other file"}\n')
    with pytest.raises(DataError, match="an answer without 'id'"):
        answered_ids(path)
    assert answered_ids(tmp_path / "nowhere") == set()


class Handler(BaseHTTPRequestHandler):
    """Busy at first for each prompt; echoes what it was asked."""

    seen: dict[str, int]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        self.seen[text] = self.seen.get(text, 0) + 1
        if text == "bad" or self.headers["Authorization"] != "Bearer key":
            self.send_error(400, "no such model")
            return
        if self.seen[text] == 1:
            self.send_error(503, "busy")
            return
        finish = "length" if body["temperature"] else "stop"
        choice = {"message": {"content": f"{text}/{body['seed']}/{body['max_tokens']}"}, "finish_reason": finish}
        reply = {"choices": [choice], "usage": {"completion_tokens": 5}} if text != "odd" else {"error": 1}
        content = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    handler = type("Own", (Handler,), {"seen": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}/v1/"
        running.shutdown()
        thread.join()


def test_an_openai_server_answers(tmp_path: Path, server: str) -> None:
    answers = OpenAIAnswers(server, "m", max_tokens=9, concurrency=3, api_key="key")
    assert go(prompts(tmp_path), tmp_path / "out", answers).finished
    jobs = {job.id: job for job in read_jobs(tmp_path / "prompts.jsonl", 0, 0.5, 0.7)}
    for name, row in rows(tmp_path / "out").items():
        assert row["response"] == f"{row['prompt']}/{jobs[name].seed}/9" and "response_ids" not in row
        assert row["finish"] == ("length" if jobs[name].temperature else "stop")


def test_servers_that_refuse(tmp_path: Path, server: str) -> None:
    source = write(tmp_path / "p.jsonl", [{"prompt": "fine"}, {"prompt": "bad"}])
    with pytest.raises(ValueError, match="400 no such model"):
        go(source, tmp_path / "out", OpenAIAnswers(server, "m", 9, 1, "key"))
    assert len(rows(tmp_path / "out")) == 1, "what was answered before is kept"
    source = write(tmp_path / "p.jsonl", [{"prompt": "odd"}])
    with pytest.raises(ValueError, match="not a chat completion"):
        go(source, tmp_path / "out", OpenAIAnswers(server, "m", 9, 1, "key"))
    with pytest.raises(ValueError, match="refused"):
        go(source, tmp_path / "out", OpenAIAnswers("http://127.0.0.1:9", "m", 9, 1))
    with pytest.raises(ValueError, match="not a http"):
        OpenAIAnswers("127.0.0.1:9", "m", 9, 1)


def test_a_whole_last_line_is_kept_and_ended(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text('{"id": "a"}\n{"id": "b"}')
    assert answered_ids(output) == {"a", "b"}
    assert output.read_text() == '{"id": "a"}\n{"id": "b"}\n'


def test_answers_do_not_go_into_the_prompts(tmp_path: Path) -> None:
    source = prompts(tmp_path)
    before = source.read_text()
    with pytest.raises(ValueError, match="into the file of the prompts"):
        regenerate(source, source, FakeAnswers(), 0, 0.5, 0.7, None, QUIET)
    assert source.read_text() == before


def test_the_same_prompt_twice_is_asked_once_unless_an_id_repeats(tmp_path: Path) -> None:
    twice = write(tmp_path / "twice.jsonl", [{"prompt": "x"}, {"prompt": "x"}])
    assert len(read_jobs(twice, 0, 0.5, 0.7)) == 1
    with pytest.raises(DataError, match="id 'a' occurs twice"):
        read_jobs(write(tmp_path / "ids.jsonl", [{"id": "a", "prompt": "x"}] * 2), 0, 0.5, 0.7)
