"""A round that is started before the text of the one before it: the same answers, whatever happens in between."""

from __future__ import annotations

import pytest
from fakes import ByteTokenizer, HashTarget, OracleDrafter, UnrelatedDrafter
from oracles import by_hand, check_stats

from blockdraft.config import EngineConfig, SamplingParams
from blockdraft.engine import engine as module
from blockdraft.engine.engine import Engine
from blockdraft.engine.policy import Policy
from blockdraft.engine.request import Request
from blockdraft.engine.step import Flight, Pair, Verdict

BYTES = 258


def make(slots: int, overlap: bool, tokenizer: bool = False) -> Engine:
    target = HashTarget(vocab_size=BYTES, eos_token_ids=(257,))
    config = EngineConfig(slots=slots, capacity=128, overlap=overlap)
    return Engine(target, UnrelatedDrafter(3, BYTES), config, ByteTokenizer() if tokenizer else None)  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_next_pass_begins_before_the_text_is_made(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, events = make(1, overlap, tokenizer=True), []
    forward, tell = engine.target.forward, Request.tell
    monkeypatch.setattr(engine.target, "forward", lambda *a, **k: events.append("pass") or forward(*a, **k))
    monkeypatch.setattr(Request, "tell", lambda *a, **k: events.append("text") or tell(*a, **k))
    engine.add([65, 66], SamplingParams(max_tokens=12, ignore_eos=True))
    engine.run()
    rounds = events[2:]  # the prompt's pass, and the text of its token
    assert events[:2] == ["pass", "text"] and len(rounds) > 8
    # in the end nothing is left to begin
    expected = ["pass", *["pass", "text"] * (len(rounds) // 2 - 1), "text"] if overlap else ["pass", "text"]
    assert rounds == (expected if overlap else expected * (len(rounds) // 2))


def test_the_rounds_are_the_same() -> None:
    counted = []
    for overlap in (False, True):
        engine = make(3, overlap)
        params = [SamplingParams(max_tokens=20 + 9 * i, temperature=i / 2, seed=i, ignore_eos=True) for i in range(3)]
        requests = [engine.add([5, 6 + i], one) for i, one in enumerate(params)]
        engine.run()
        counted.append([(request.output_ids, request.stats) for request in requests])
    assert counted[0] == counted[1]


@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_stop_strings_aborts_and_new_requests_between_start_and_end(
    penalty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots change hands while a round is under way for the requests that had them before."""
    lost, land = [], module.land

    def landed(pair: Pair, flight: Flight, policy: Policy) -> list[tuple[Request, Verdict]]:
        lost.extend({*range(len(flight.slots))} - {*flight.going()})
        return land(pair, flight, policy)

    monkeypatch.setattr(module, "land", landed)
    engine = make(2, overlap=True, tokenizer=True)
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, seed=4, presence_penalty=penalty)
    prompts = [[65 + i, 70] for i in range(6)]
    whole = [by_hand(engine.target, prompt, params) for prompt in prompts]
    # a stop string that the text meets in the middle: one byte of the answer that is a letter
    firsts = [(answer[: 5 + 3 * i], answer[5 + 3 * i :]) for i, answer in enumerate(whole)]  # each at another place
    stops = [next((chr(t) for t in rest if 33 <= t < 127 and t not in first), None) for first, rest in firsts]
    assert sum(stop is not None for stop in stops) >= 3
    asked = [params.model_copy(update={"stop": (stop,) if stop else ()}) for stop in stops]
    # A drafter that knows what there is to say, and refuses to draft after anything else: it was told of its own row.
    known = [[*prompt, *answer] for prompt, answer in zip(prompts, whole, strict=True)]
    drafter = OracleDrafter(3, BYTES, known, [True, False, False])
    config = EngineConfig(slots=2, capacity=128, overlap=True)
    engine = Engine(engine.target, drafter, config, ByteTokenizer())  # type: ignore[arg-type]
    requests = [engine.add(prompt, one) for prompt, one in zip(prompts, asked, strict=True)]
    engine.step()
    gone = engine.running[0]
    engine.abort(gone)
    engine.run()
    for request, answer, stop in zip(requests, whole, stops, strict=True):
        if request is gone:
            assert request.output_ids == answer[: len(request.output_ids)] and request.slot is None
            continue
        end = answer.index(ord(stop)) + 1 if stop else len(answer)
        assert request.output_ids == answer[:end]
        check_stats(request)
    assert sorted(engine.free_slots) == [0, 1] and not engine.has_work
    assert {*lost} == {0, 1}, "either row, with the other under way"


@pytest.mark.parametrize("call", [2, 3, 5])
def test_an_interrupt_while_a_round_is_started_loses_no_text(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls, real = make(2, overlap=True, tokenizer=True), [], module.launch

    def interrupted(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "launch", interrupted)
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    requests = [engine.add([65 + i, 70], params) for i in range(3)]
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    engine.run()
    tokenizer = ByteTokenizer()
    for i, request in enumerate(requests):
        assert request.output_ids == by_hand(engine.target, [65 + i, 70], params)
        assert request.text == tokenizer.decode(request.output_ids, True, False)
        check_stats(request)
