"""The worker's side: one process that has loaded its models once and answers requests, a line of JSON for a line.

Nothing but the standard library is needed here, because every worker runs in the environment of its engine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

# (prompt ids, tokens at most, stop ids) -> the answer: `tokens`, and what the engine tells beside them: `rounds` and
# `round_tokens` (verify passes, and what they emitted), `decode_tokens` and `decode_seconds` (all that came after the
# first tokens were there, and in what time).
Answering = Callable[[list[int], int, list[int]], dict[str, Any]]
Load = Callable[[dict[str, Any]], tuple[dict[str, Answering], dict[str, Any]]]


def serve(load: Load) -> None:
    """Load by the settings on the command line, say so, then answer until standard input ends.

    `load` returns the arms by name, and what the driver should know of them (versions, for one).
    """
    # What libraries print must not get between the answers: it goes where errors go.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    arms, facts = load(json.loads(sys.argv[1]))
    _reply(replies, facts)
    for line in sys.stdin:  # blocks: an idle worker has nothing else to do
        asked = json.loads(line)
        _reply(replies, arms[asked["arm"]](asked["ids"], asked["max_tokens"], asked["stop"]))
    os._exit(0)  # some engines have threads that would outlive this


def after_prefill(tokens: Sequence[int], rounds: Sequence[int]) -> dict[str, Any]:
    """An answer whose rounds are known, each as the number of its tokens; the prompt's own pass is none of them."""
    return {"tokens": list(tokens), "rounds": len(rounds), "round_tokens": sum(rounds)}


def _reply(replies: Any, value: dict[str, Any]) -> None:
    replies.write(json.dumps(value) + "\n")
    replies.flush()
