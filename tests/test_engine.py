"""The engine's promises one by one, on a target whose every answer can be worked out by hand."""

from __future__ import annotations

import pytest
import torch
from fakes import ByteTokenizer, HashTarget, OracleDrafter, UnrelatedDrafter
from oracles import by_hand, check_stats

from blockdraft.config import EngineConfig, SamplingParams
from blockdraft.drafters.base import Proposal
from blockdraft.engine.costs import VerifyCosts
from blockdraft.engine.engine import Engine
from blockdraft.engine.request import RequestStats


def test_plain_decoding_is_decoding_by_hand() -> None:
    target = HashTarget()
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine = Engine(target, None, EngineConfig())
    request = engine.add([3, 4, 5], params)
    assert engine.run() == [request]
    assert request.output_ids == by_hand(target, [3, 4, 5], params)
    assert request.finish_reason == "length" and request.stats.tau == 1.0 and request.stats.drafted == 0
    assert target.passes == 40
    check_stats(request)


@pytest.mark.parametrize("width", [None, 3, 0])
def test_a_perfect_drafter_saves_passes_and_changes_nothing(width: int | None) -> None:
    target = HashTarget()
    params = SamplingParams(max_tokens=41, ignore_eos=True)
    answer = by_hand(target, [3, 4, 5], params)
    drafter = OracleDrafter(7, 61, [[3, 4, 5, *answer]])
    engine = Engine(target, drafter, EngineConfig(verify_width=width))
    request = engine.add([3, 4, 5], params)
    engine.run()
    assert request.output_ids == answer
    per_round = (7 if width is None else width) + 1
    assert request.stats.rounds == -(-40 // per_round) and request.stats.emitted == 40
    assert request.stats.tau == 40 / request.stats.rounds
    assert target.passes == request.stats.rounds + 1
    check_stats(request)


def test_a_batch_admitted_late_and_out_of_order_answers_as_if_alone() -> None:
    target = HashTarget()
    params = [SamplingParams(max_tokens=n, seed=n, temperature=0.8 * (n % 2)) for n in (5, 30, 17, 1, 23)]
    prompts = [[7], [1, 2, 3, 4], [9, 9], [8, 1, 1], [5, 4, 3, 2, 1, 2]]
    alone = [by_hand(target, prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    engine = Engine(target, UnrelatedDrafter(5, 61), EngineConfig(slots=2))
    requests = {}
    for index in (3, 1, 0):
        requests[index] = engine.add(prompts[index], params[index])
    engine.step()
    for index in (4, 2):
        requests[index] = engine.add(prompts[index], params[index])
    assert len(engine.run()) + requests[3].done == 5
    for index, request in requests.items():
        assert request.output_ids == alone[index]
        check_stats(request)


class ShortDrafter(OracleDrafter):
    """Right everywhere, but it says that only so many tokens of each row are drafts."""

    tap_ids = ()

    def observe(self, state, rows, tokens, taps, counts):
        assert taps is None
        for row, ids, count in zip(rows, tokens.tolist(), counts, strict=True):
            state[row] += ids[:count]

    def propose(self, state, rows, anchors, coupling=None):
        proposal = super().propose(state, rows, anchors)
        return Proposal(proposal.tokens, counts=[len(state[row]) % 4 for row in rows])


def test_only_what_a_drafter_counts_as_drafts_is_verified() -> None:
    target = HashTarget()
    params = SamplingParams(max_tokens=41, ignore_eos=True)
    prompts = [[3, 4, 5], [6, 7], [1]]
    answers = [by_hand(target, prompt, params) for prompt in prompts]
    known = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    engine = Engine(target, ShortDrafter(7, 61, known), EngineConfig(slots=3))
    requests = [engine.add(prompt, params) for prompt in prompts]
    engine.run()
    for prompt, request, answer in zip(prompts, requests, answers, strict=True):
        assert request.output_ids == answer
        at, rounds, drafted = len(prompt), 0, 0
        while at < len(prompt) + 40:
            width = min(at % 4, len(prompt) + 40 - at - 1)
            at, rounds, drafted = at + width + 1, rounds + 1, drafted + width
        assert (request.stats.rounds, request.stats.drafted, request.stats.accepted) == (rounds, drafted, drafted)
        check_stats(request)


def test_a_round_without_drafts_is_plain_decoding() -> None:
    target = HashTarget()
    widths = []
    forward = target.forward
    target.forward = lambda ids, *rest, **more: widths.append(ids.shape[1]) or forward(ids, *rest, **more)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    drafter = ShortDrafter(7, 61, [[3, 4, 5, 6, *by_hand(target, [3, 4, 5, 6], params)]])
    engine = Engine(target, drafter, EngineConfig())
    engine.add([3, 4, 5, 6], params)
    engine.run()
    assert widths == [4, 1, 2, 4, 1], "a prompt, then as many tokens as were drafted and the anchor"


def test_a_stop_inside_a_block_ends_answer_and_counts() -> None:
    target = HashTarget()
    free = SamplingParams(max_tokens=40, ignore_eos=True)
    answer = by_hand(target, [3, 4, 5], free)
    stop = answer[12]
    end = answer.index(stop) + 1
    assert end % 8 not in (0, 1), "the stop must fall inside a block"
    drafter = OracleDrafter(7, 61, [[3, 4, 5, *answer]])
    engine = Engine(target, drafter, EngineConfig())
    request = engine.add([3, 4, 5], SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(stop,)))
    engine.run()
    assert request.output_ids == answer[:end] and request.finish_reason == "stop"
    assert request.stats.emitted == end - 1 and request.stats.accepted == request.stats.drafted
    assert request.stats.emitted == request.stats.accepted + request.stats.rounds - 1
    check_stats(request)


def test_max_tokens_is_exact_and_nothing_is_verified_beyond_it() -> None:
    target = HashTarget()
    for max_tokens in range(1, 20):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        answer = by_hand(target, [3], params)
        engine = Engine(target, OracleDrafter(7, 61, [[3, *answer]]), EngineConfig())
        request = engine.add([3], params)
        engine.run()
        assert request.output_ids == answer and len(answer) == max_tokens
        assert request.finish_reason == "length"
        assert request.stats.drafted == request.stats.accepted == max_tokens - 1 - request.stats.rounds
        assert (
            len(target.contexts[engine.pair.cache][0]) == max_tokens
        )  # the prompt's token, and all but the last of the answer


def test_the_context_limit_caps_the_answer_and_refuses_a_prompt() -> None:
    target = HashTarget(max_context=20)
    long = SamplingParams(max_tokens=100, ignore_eos=True)
    answers = [by_hand(target, prompt, long, capacity=20) for prompt in ([1] * 12, [2] * 3)]
    assert len(answers[0]) == 8
    drafter = OracleDrafter(7, 61, [[1] * 12 + answers[0], [2] * 3 + answers[1]])
    engine = Engine(target, drafter, EngineConfig(slots=2, capacity=4096))
    requests = [engine.add([1] * 12, long), engine.add([2] * 3, long)]
    engine.run()
    assert [request.output_ids for request in requests] == answers
    assert {request.finish_reason for request in requests} == {"length"}
    with pytest.raises(ValueError, match="20 tokens does not fit a context of 20"):
        engine.add([1] * 20, long)


def test_mistakes_are_one_clear_line() -> None:
    engine = Engine(HashTarget(), None, EngineConfig())
    for prompt, params, message in [
        ([], SamplingParams(), "empty"),
        ([61], SamplingParams(), r"0\.\.60"),
        ([1], SamplingParams(logit_bias={99: 1.0}), r"0\.\.60"),
        ([1], SamplingParams(stop=("x",)), "tokenizer"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            engine.add(prompt, params)
        assert "\n" not in str(error.value)
    assert not engine.has_work


def test_abort_frees_the_slot_and_leaves_the_others_alone() -> None:
    target = HashTarget()
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    engine = Engine(target, UnrelatedDrafter(3, 61), EngineConfig(slots=1))
    first, second, third = (engine.add([n], params) for n in (1, 2, 3))
    engine.step()
    engine.abort(first)
    engine.abort(second)
    engine.abort(second)
    assert engine.run() == [third]
    assert first.finish_reason is None and first.aborted and len(first.output_ids) < 30
    assert third.output_ids == by_hand(target, [3], params)
    assert engine.stats.emitted == 29 and not engine.has_work


def test_engines_may_share_a_target() -> None:
    target = HashTarget()
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    engines = [Engine(target, drafter, EngineConfig()) for drafter in (None, UnrelatedDrafter(3, 61))]
    requests = [engine.add([5], params) for engine in engines]
    while any(engine.has_work for engine in engines):
        for engine in engines:
            engine.step()  # the drafter asserts that it is given taps
    assert [request.output_ids for request in requests] == [by_hand(target, [5], params)] * 2


def test_a_stop_string_ends_the_text_but_not_the_ids() -> None:
    target = HashTarget(vocab_size=258, eos_token_ids=(257,))
    tokenizer = ByteTokenizer()
    target.table[:, 128:] = -50.0  # ASCII only
    free = SamplingParams(max_tokens=40)
    answer = by_hand(target, [65], free)
    text = bytes(answer).decode()
    stop = text[10:13]
    at = text.index(stop)
    for drafter in (None, OracleDrafter(7, 258, [[65, *answer]])):
        engine = Engine(target, drafter, EngineConfig(), tokenizer)  # type: ignore[arg-type]
        request = engine.add([65], SamplingParams(max_tokens=40, stop=(stop,)))
        engine.run()
        assert request.text == text[:at]
        assert request.output_ids == answer[: at + 3] and request.finish_reason == "stop"
        check_stats(request)


def test_the_end_token_is_among_the_ids_but_not_in_the_text() -> None:
    target = HashTarget(vocab_size=258, eos_token_ids=(66,))
    target.table[:, 67:] = -50.0
    target.table[:, 66] += 4.0
    engine = Engine(target, None, EngineConfig(), ByteTokenizer())  # type: ignore[arg-type]
    request = engine.add([65], SamplingParams(max_tokens=400))
    engine.run()
    assert request.finish_reason == "stop" and request.output_ids[-1] == 66
    assert request.text == bytes(request.output_ids[:-1]).decode()


@pytest.mark.parametrize("length", [1, 7, 8, 9, 40])
def test_a_prompt_is_read_in_parts_while_others_are_answered(length: int) -> None:
    target = HashTarget()
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True)
    prompts = [[3, 4, 5], [5 + number % 40 for number in range(length)], [6, 7]]
    read: list[int] = []
    forward = target.forward

    def noted(ids, cache, rows, keep_logits=None):
        read.append(ids.shape[1] if keep_logits == 1 else 0)
        return forward(ids, cache, rows, keep_logits)

    target.forward = noted  # type: ignore[method-assign]
    engine = Engine(target, UnrelatedDrafter(3, 61), EngineConfig(slots=3, capacity=128, prefill_tokens=8))
    requests = [engine.add(prompts[0], params)]
    engine.step()
    assert read == [3, 0], "where nobody is answered, all is read at once"
    requests += [engine.add(prompt, params) for prompt in prompts[1:]]
    said = len(requests[0].output_ids)
    while not requests[1].output_ids:
        read.clear()
        engine.step()
        assert sum(read) <= 8 and len(requests[0].output_ids) > said, "the first one goes on"
        said = len(requests[0].output_ids)
    engine.run()
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_ids == by_hand(HashTarget(), prompt, params)
        check_stats(request)


def test_a_request_may_be_given_up_while_its_prompt_is_read() -> None:
    target, params = HashTarget(), SamplingParams(max_tokens=20, ignore_eos=True)
    engine = Engine(target, UnrelatedDrafter(3, 61), EngineConfig(slots=2, capacity=128, prefill_tokens=4))
    first = engine.add([3, 4, 5], params)
    engine.step()
    long = engine.add(list(range(1, 50)), params)
    engine.step()
    assert 0 < long.num_prefilled < 49 and engine.has_work
    engine.abort(long)
    after = engine.add([7, 8], params)
    engine.run()
    assert long.output_ids == [] and len(engine.free_slots) == 2
    for prompt, request in (([3, 4, 5], first), ([7, 8], after)):
        assert request.output_ids == by_hand(target, prompt, params)


def test_a_seed_is_drawn_when_none_is_given() -> None:
    engine = Engine(HashTarget(), None, EngineConfig(slots=8))
    requests = [engine.add([1, 2], SamplingParams(temperature=1.0, max_tokens=20)) for _ in range(8)]
    engine.run()
    assert len({tuple(request.output_ids) for request in requests}) > 1


def test_stats_add_up() -> None:
    total = RequestStats()
    total.add(RequestStats(2, 5, 6, 3, [2, 1], [0, 0, 0, 2], 0))
    total.add(RequestStats(2, 5, 3, 3, [1, 1, 1], [1, 0, 0, 1], 1))
    assert total == RequestStats(4, 10, 9, 6, [3, 2, 1], [1, 0, 0, 3], 1) and total.tau == 2.5
    assert total.acceptance_rate == pytest.approx(6 / 9)


def test_inference_mode_does_not_leak() -> None:
    engine = Engine(HashTarget(), None, EngineConfig())
    engine.add([1], SamplingParams(max_tokens=3, temperature=1.0))
    engine.run()
    assert not torch.is_inference_mode_enabled()


def test_a_stop_string_in_what_was_held_back_is_a_stop() -> None:
    """Half a character is shown only once nothing follows; here that is at the limit, and it completes the stop."""
    target = HashTarget(vocab_size=258, eos_token_ids=(257,))
    target.table[:, 0xC3] += 100.0
    engine = Engine(target, None, EngineConfig(), ByteTokenizer())  # type: ignore[arg-type]
    request = engine.add([65], SamplingParams(max_tokens=1, stop=("\ufffd",)))
    engine.run()
    assert (request.text, request.finish_reason, request.output_ids) == ("", "stop", [0xC3])


@pytest.mark.parametrize("place", ["accept", "prefill"])
def test_an_interrupt_in_the_middle_loses_nothing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = HashTarget()
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    prompts = [[3, 4, 5], [6, 7], [8, 9, 10]]
    engine = Engine(target, UnrelatedDrafter(5, 61), EngineConfig(slots=2))
    requests = [engine.add(prompt, params) for prompt in prompts]
    calls = []
    module = "step" if place == "accept" else "engine"
    original = getattr(__import__(f"blockdraft.engine.{module}", fromlist=[place]), place)

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(f"blockdraft.engine.{module}.{place}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    engine.run()
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_ids == by_hand(target, prompt, params)
        check_stats(request)


def test_auto_measures_before_it_needs_to_and_answers_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    target = HashTarget()
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    prompts = [[3, 4, 5], [6, 7]]
    answers = [by_hand(target, prompt, params) for prompt in prompts]
    asked = []
    costs = VerifyCosts((1, 2), (1, 8), 64, ((1.0, 1.1), (1.1, 1.2)), ((0.0, 0.0), (0.0, 0.0)), (0.1, 0.1))
    monkeypatch.setattr("blockdraft.engine.engine.known_costs", lambda *facts: asked.append(facts[2:]) or costs)
    drafter = OracleDrafter(7, 61, [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)])
    engine = Engine(target, drafter, EngineConfig(slots=2, capacity=300, verify_width="auto"))
    assert not asked, "a request comes first"
    engine.prepare()
    requests = [engine.add(prompt, params) for prompt in prompts]
    engine.run()
    assert asked == [(2,)]
    assert [request.output_ids for request in requests] == answers
    for request in requests:
        check_stats(request)
        assert request.stats.accepted == request.stats.drafted > 0
    Engine(target, drafter, EngineConfig()).prepare()
    Engine(target, None, EngineConfig(verify_width="auto")).prepare()
    assert len(asked) == 1, "nobody else has to know"
