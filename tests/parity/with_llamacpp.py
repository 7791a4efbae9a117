"""`python with_llamacpp.py RECORD OUT...`: llama.cpp (the package xllamacpp) runs the GGUF files of `make.py`.

Its tokens must be those of llama.cpp without a drafter, and ours; accepted drafts must be as many as ours, up to those
of a last round that a length limit cuts.  Exit code 1 and a line for each that is not so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xllamacpp
from record import Engine, Found, make_row, record, tell


def main(path: Path, outs: list[Path]) -> int:
    """Each server has a process of its own: it takes the process along when a file does not please it."""
    engine = Engine("llama.cpp", f"xllamacpp {version('xllamacpp')}", "gguf", "tokens, accepted drafts")
    rows = []
    for out in outs:
        target = str(next(iter([*out.glob("*.gguf"), *out.glob("target/*.gguf")])))
        cases = [case for case in json.loads((out / "cases.json").read_text()) if "gguf" in case["layouts"]]
        prompts = [answer["prompt"] for answer in cases[0]["answers"]]
        limit = cases[0]["answers"][0]["limit"]
        plain = serve(target, "none", 0, prompts, limit)
        if isinstance(plain, str):
            print(f"llama.cpp, {out.name}, the target alone: {plain}")
            return 1
        for case in cases:
            draft = out / "gguf" / case["kind"]
            said = serve(target, str(draft), "dspark" if has_markov(draft) else "dflash", prompts, limit)
            found = Found(problems=[said]) if isinstance(said, str) else compare(said, plain, case["answers"])
            rows.append(tell(make_row(engine, out.name, case, found)))
    return record(path, rows)


def compare(said: list[dict[str, Any]], plain: list[dict[str, Any]], ours: list[dict[str, Any]]) -> Found:
    """Tokens, and accepted drafts up to one in the last round, which ends a token later there."""
    found = Found(0, 0, sum(drafted["accepted"] for drafted in said))
    for number, (drafted, alone, answer) in enumerate(zip(said, plain, ours, strict=True)):
        if drafted["tokens"] != alone["tokens"]:
            found.problems.append(f"prompt {number}: not what it says without a drafter")
        if drafted["tokens"] == answer["tokens"]:
            found.tokens += 1
        else:
            found.problems.append(f"prompt {number}: not our tokens")
        accepted = sum(answer["rounds"]) - len(answer["rounds"])
        if abs(drafted["accepted"] - accepted) <= 1:
            found.rounds += 1
        else:
            found.problems.append(f"prompt {number}: {drafted['accepted']} drafts accepted, ours {accepted}")
    return found


def has_markov(path: Path) -> bool:
    return b"markov_w1.weight" in path.read_bytes()


def serve(target: str, draft: str, kind: Any, prompts: list[list[int]], length: int) -> list[dict[str, Any]] | str:
    """Answers of a server in another process, or what became of it."""
    command = [sys.executable, __file__, "--serve", target, draft, str(kind), json.dumps(prompts), str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    if not lines:
        return f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['nothing said'])[-1]}"
    answers: list[dict[str, Any]] = json.loads(lines[0].removeprefix("ANSWERS "))
    return answers


def server(target: str, draft: str, kind: str, prompts: list[list[int]], length: int) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = target
    params.n_ctx, params.n_parallel, params.warmup, params.fit_params, params.cache_ram_mib = 512, 1, False, False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    if draft != "none":
        speculative = params.speculative
        speculative.draft.mparams.path, speculative.draft.n_max, speculative.draft.p_min = draft, 256, 0.0
        name = f"COMMON_SPECULATIVE_TYPE_DRAFT_{kind.upper()}"
        speculative.types = [getattr(xllamacpp.common_speculative_type, name)]
        speculative.draft.cpuparams.n_threads = speculative.draft.cpuparams_batch.n_threads = 1
    running, answers = xllamacpp.Server(params), []
    for prompt in prompts:
        body = {
            "prompt": prompt, "n_predict": length, "temperature": 0, "return_tokens": True, "cache_prompt": False,
        }  # fmt: skip
        request = urllib.request.Request(
            running.listening_address + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            said = json.load(response)
        answers.append({"tokens": said["tokens"], "accepted": said["timings"].get("draft_n_accepted", 0)})
    print("ANSWERS " + json.dumps(answers), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        server(*sys.argv[2:5], json.loads(sys.argv[5]), int(sys.argv[6]))
        import os

        os._exit(0)  # its threads outlive it otherwise
    sys.exit(main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]))
