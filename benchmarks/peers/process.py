"""The driver's side: one worker process for an engine, which does nothing at all while it is not asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any


class Worker:
    """A process of `serving.serve`.

    Between two answers it is stopped by a signal, so that no thread of it spins, polls or tidies up while another
    engine is timed.  `facts` is what it said of itself when it had loaded.
    """

    def __init__(self, python: Path, script: Path, settings: dict[str, Any], log: Path, threads: int) -> None:
        """Start it and wait until it has loaded.  Raises ValueError: it did not, with the last that it said."""
        self.name, self.log = log.stem, log
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [str(python), str(script), json.dumps(settings)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
            )  # fmt: skip
        self.facts = self._read()
        self.rest()

    def ask(self, arm: str, ids: Sequence[int], max_tokens: int, stop: Sequence[int]) -> dict[str, Any]:
        """One answer.  Raises ValueError: the worker has ended."""
        self.resume()
        try:
            asked = {"arm": arm, "ids": list(ids), "max_tokens": max_tokens, "stop": list(stop)}
            self._pipe(self.process.stdin).write(json.dumps(asked) + "\n")
            self._pipe(self.process.stdin).flush()
            return self._read()
        except BrokenPipeError:
            raise self._ended() from None
        finally:
            self.rest()

    def rest(self) -> None:
        """Stop all of its threads."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End it, whatever it is doing."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):  # what it did not come to read
                self._pipe(pipe).close()

    def _read(self) -> dict[str, Any]:
        line = self._pipe(self.process.stdout).readline()
        if not line:
            raise self._ended()
        told: dict[str, Any] = json.loads(line)
        return told

    def _ended(self) -> ValueError:
        code = self.process.wait()
        said = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it said nothing"]
        return ValueError(f"worker {self.name} ended with {code}: {said[-1].strip()} (all of it: {self.log})")

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None, "Popen was asked for it"
        return pipe
