"""What tests compare with: plain decoding by hand, stop strings by definition, and what must hold for any counts."""

from __future__ import annotations

from fakes import HashTarget

from blockdraft.config import SamplingParams
from blockdraft.engine.request import Request
from blockdraft.ops.sampling import ChoiceState, choose


def by_hand(target: HashTarget, prompt: list[int], params: SamplingParams, capacity: int = 512) -> list[int]:
    """Plain decoding without engine, cache, slots or blocks."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < params.max_tokens and len(tokens) < capacity:
        state = ChoiceState(params, params.seed or 0, prompt, target.info.vocab_size, target.info.device)
        state.commit(tokens[len(prompt) :])
        tokens.append(int(choose(target.logits(tokens)[None, None], [state], [len(tokens)])))
        if tokens[-1] in target.info.eos_token_ids and not params.ignore_eos:
            break
    return tokens[len(prompt) :]


def check_stats(request: Request) -> None:
    """What must hold for the counts of any finished request."""
    stats = request.stats
    assert stats.emitted == len(request.output_ids) - 1
    assert sum(stats.accepted_by_position) == stats.accepted <= stats.drafted
    # The target's own token of the last round is missing if a draft ended the answer.
    assert stats.rounds - 1 <= stats.emitted - stats.accepted <= stats.rounds or stats.rounds == 0
    assert stats.accepted_by_position == sorted(stats.accepted_by_position, reverse=True)
    assert all(count <= stats.rounds for count in stats.accepted_by_position)
    assert sum(stats.rounds_by_width) == stats.rounds >= stats.undrafted
    assert sum(width * rounds for width, rounds in enumerate(stats.rounds_by_width)) == stats.drafted
    assert stats.undrafted <= (stats.rounds_by_width or [0])[0], "a round without drafting verifies none"
    assert stats.undrafted + stats.partly_drafted <= stats.rounds
    assert stats.tau == (stats.emitted / stats.rounds if stats.rounds else 0.0)


def slow_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """Cut before the stop string that is complete first; of two that end together, before the longer."""
    for end in range(1, len(text) + 1):
        ending = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(ending)], True
    return text, False
