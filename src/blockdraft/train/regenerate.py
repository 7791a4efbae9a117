"""Prompts -> the target's own answers, written to JSONL as they come.

A drafter has to guess what its target will say, so it is trained on answers that the target itself wrote.
Each prompt has a temperature and a seed that follow from (seed, id) alone: an answer does not depend on the
others, and a run that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from blockdraft.text import DataError, read_jsonl
from blockdraft.train.chats import Message, check_messages
from blockdraft.train.progress import Meterbar, say

TRIES = 4
TIMEOUT = 600.0  # seconds for one answer


@dataclass(frozen=True)
class Job:
    """A prompt to be answered, and how."""

    id: str
    source: str | None
    messages: tuple[Message, ...]
    temperature: float
    seed: int


@dataclass(frozen=True)
class Answer:
    """What the target said.  response_ids is None where only text is known; finish is "stop" or "length"."""

    job: Job
    response: str
    response_ids: list[int] | None
    finish: str
    tokens: int


class Answers(Protocol):
    """Whoever answers: our own engine, or a server."""

    def answer(self, jobs: Iterable[Job]) -> Iterator[Answer]:
        """One answer for each job, in the order in which they are finished."""
        ...


@dataclass(frozen=True)
class Regenerated:
    """Answers in the file before, answers added, and whether any prompt is left."""

    before: int
    added: int
    finished: bool


def regenerate(
    prompts: Path,
    output: Path,
    answers: Answers,
    seed: int,
    greedy_share: float,
    temperature: float,
    limit: int | None,
    console: Console,
) -> Regenerated:
    """Answer the prompts that `output` has no answer to yet.

    A share of the prompts (chosen by a hash of the id) is answered greedily, the others at `temperature`.
    DataError: a line of either file that cannot be read.
    """
    if not 0.0 <= greedy_share <= 1.0 or temperature < 0.0:
        raise ValueError(f"greedy_share={greedy_share} must lie in 0..1 and temperature={temperature} not below 0")
    if output.exists() and prompts.samefile(output):
        raise ValueError(f"{output}: answers would go into the file of the prompts; name another one")
    jobs = read_jobs(prompts, seed, greedy_share, temperature)[:limit]
    answered = answered_ids(output)
    missing = [job for job in jobs if job.id not in answered]
    before, added = len(jobs) - len(missing), 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", encoding="utf-8") as file, Meterbar(console, "answers", len(jobs), "tokens", before) as bar:
        try:
            for answer in answers.answer(missing):
                file.write(json.dumps(answer_row(answer), ensure_ascii=False) + "\n")
                file.flush()
                added += 1
                bar.advance(1, units=answer.tokens)
        except KeyboardInterrupt:
            say(console, f"stopped: {before + added} of {len(jobs)} answered; run the same again to go on")
    return Regenerated(before, added, added == len(missing))


def read_jobs(path: Path, seed: int, greedy_share: float, temperature: float) -> list[Job]:
    """The prompts of a file: {"id"?, "source"?, "prompt" or "messages"}.  DataError: a bad line, or an id twice."""
    jobs: dict[str, Job] = {}
    for where, row in read_jsonl(path):
        messages = _prompt_messages(row, where)
        name = str(row.get("id") or hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16])
        if name in jobs and row.get("id") is None:
            continue  # the same prompt again
        if name in jobs:
            raise DataError(f"{where}: id '{name}' occurs twice")
        greedy = _hash(seed, name, "temperature") / 2**31 < greedy_share
        source = row.get("source")
        own_seed = _hash(seed, name, "answer")
        jobs[name] = Job(name, source, tuple(messages), 0.0 if greedy else temperature, own_seed)
    return list(jobs.values())


def answered_ids(path: Path) -> set[str]:
    """The ids in an answers file; a last line that was torn by a kill is cut off first, a whole one is ended."""
    if not path.exists():
        return set()
    with path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            try:
                json.loads(content[whole:])
                file.write(b"\n")
            except ValueError:
                file.truncate(whole)
    found = set()
    for where, row in read_jsonl(path):
        if "id" not in row:
            raise DataError(f"{where}: an answer without 'id'; is this the right output file?")
        found.add(str(row["id"]))
    return found


def answer_row(answer: Answer) -> dict[str, Any]:
    """The line that is written: what `data` reads as a pair."""
    job = answer.job
    row: dict[str, Any] = {"id": job.id}
    if job.source is not None:
        row["source"] = job.source
    if len(job.messages) == 1 and job.messages[0]["role"] == "user":
        row["prompt"] = job.messages[0]["content"]
    else:
        row["messages"] = list(job.messages)
    row["response"] = answer.response
    if answer.response_ids is not None:
        row["response_ids"] = answer.response_ids
    return {**row, "finish": answer.finish, "temperature": job.temperature}


def _prompt_messages(row: dict[str, Any], where: str) -> list[Message]:
    """The conversation to answer; it must not end with an answer already."""
    if isinstance(row.get("prompt"), str):
        return [{"role": "user", "content": row["prompt"]}]
    if row.get("messages") is None:
        raise DataError(f"{where}: needs text in 'prompt', or turns in 'messages'")
    turns = check_messages(row["messages"], where)
    if turns[-1]["role"] == "assistant":
        turns.pop()  # the answer of another model, which is what gets replaced
    if not turns:
        raise DataError(f"{where}: no prompt in front of the answer")
    return turns


def _hash(*key: object) -> int:
    """31 bits of a key; what servers take as a seed."""
    digest = hashlib.sha256("/".join(str(part) for part in key).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class OpenAIAnswers:
    """Answers by any server with an OpenAI-compatible /chat/completions; ids are not known, only text."""

    def __init__(
        self,
        base_url: str,
        model: str,
        max_tokens: int,
        concurrency: int,
        api_key: str | None = None,
        top_p: float = 1.0,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"'{base_url}' is not a http:// or https:// address")
        self.url = base_url.rstrip("/") + "/chat/completions"
        self.model, self.max_tokens, self.concurrency, self.top_p = model, max_tokens, concurrency, top_p
        self.headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self.headers["Authorization"] = f"Bearer {api_key}"

    def answer(self, jobs: Iterable[Job]) -> Iterator[Answer]:
        """At most `concurrency` requests at once.  ValueError: the server refuses, or cannot be reached."""
        pool = ThreadPoolExecutor(self.concurrency)
        running: set[Future[Answer]] = set()
        try:
            for job in jobs:
                running.add(pool.submit(self._ask, job))
                if len(running) >= self.concurrency:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, job: Job) -> Answer:
        body = {
            "model": self.model,
            "messages": list(job.messages),
            "max_tokens": self.max_tokens,
            "temperature": job.temperature,
            "top_p": self.top_p,
            "seed": job.seed,
        }
        reply = self._post(json.dumps(body).encode())
        try:
            choice = reply["choices"][0]
            text, finish = choice["message"]["content"], choice["finish_reason"]
            if not isinstance(text, str):
                raise TypeError("no text")
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"{self.url}: the reply is not a chat completion") from None
        tokens = (reply.get("usage") or {}).get("completion_tokens", 0)
        return Answer(job, text, None, "length" if finish == "length" else "stop", tokens)

    def _post(self, body: bytes) -> Any:
        """One request; a busy server or a broken connection is tried again a few times."""
        reason = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(2.0**attempt)
            try:
                request = urllib.request.Request(self.url, body, self.headers)
                with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
                    return json.loads(reply.read())
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {error.reason}"
                if error.code < 500 and error.code != 429:
                    break
            except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
                reason = str(getattr(error, "reason", error))
            except json.JSONDecodeError:
                raise ValueError(f"{self.url}: the reply is not JSON") from None
        raise ValueError(f"{self.url}: {reason}")
