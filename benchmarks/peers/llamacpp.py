"""Worker: llama.cpp through the package xllamacpp, as a server in this process that answers over its own port."""

from __future__ import annotations

import json
import urllib.request
from importlib.metadata import version
from typing import Any

import xllamacpp
from serving import Answering, serve


def load(settings: dict[str, Any]) -> tuple[dict[str, Answering], dict[str, Any]]:
    """One arm: a target, and a drafter if there is one (`drafter`), which drafts `drafts` tokens a round."""
    params, threads = xllamacpp.CommonParams(), settings["threads"]
    params.model.path, params.n_ctx = settings["target"], settings["room"]
    params.n_parallel, params.warmup, params.fit_params, params.cache_ram_mib = 1, False, False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    if settings["drafter"] is not None:
        speculative = params.speculative
        speculative.draft.mparams.path, speculative.draft.n_max = settings["drafter"], settings["drafts"]
        speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH]
        speculative.draft.cpuparams.n_threads = speculative.draft.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    arm = answering(server, settings["drafter"] is not None)
    return {settings["arm"]: arm}, {"versions": {"xllamacpp": version("xllamacpp")}}


def answering(server: Any, drafts: bool) -> Answering:
    def answer(ids: list[int], max_tokens: int, stop: list[int]) -> dict[str, Any]:
        body = {
            "prompt": ids, "n_predict": max_tokens, "temperature": 0, "return_tokens": True, "cache_prompt": False,
        }  # fmt: skip
        request = urllib.request.Request(
            server.listening_address + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            said = json.load(response)
        tokens, timings = said["tokens"], said["timings"]
        # The token that ends a text is made, but not said.
        if said["stop_type"] == "eos" and tokens[-1:] != stop[:1]:
            tokens = [*tokens, stop[0]]
        answer = {
            "tokens": tokens,
            "decode_tokens": len(tokens) - 1,
            "decode_seconds": timings["predicted_ms"] / 1000,
        }
        if drafts:
            # Rounds are not told: each gives its accepted drafts and one token more, unless the end cuts it.
            answer["round_tokens"] = len(tokens) - 1
            answer["rounds"] = max(len(tokens) - 1 - timings.get("draft_n_accepted", 0), 1)
        return answer

    return answer


if __name__ == "__main__":
    serve(load)
