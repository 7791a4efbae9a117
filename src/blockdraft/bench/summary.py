"""What measured rows say: rates, ratios, acceptance and whether every answer is the same.

tokens_per_second: a row has one rate (its tokens over the median of its repeats); median, min and max are over rows,
`total` is all tokens over all time.  A ratio is taken row by row, then its median; its `total` is the ratio of the
totals.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from blockdraft.bench.measure import Answer, Arm, Row, Timed

# How far apart two differing tokens were in the target's eyes: (ids so far, token, other token) -> logit difference.
Margin = Callable[[Sequence[int], int, int], float]


def summarise(rows: Sequence[Row], arms: Sequence[Arm], margin: Margin | None = None) -> dict[str, Any]:
    """Arms, ratios between them, and every row, as plain values.

    The first arm is the one that others must equal, unless they are `like` another.
    """
    reference = arms[0].name
    described = [_describe(row, arms, reference, margin) for row in rows]
    return {
        "arms": [_summarise_arm(arm, rows, described) for arm in arms],
        "ratios": {f"{fast}/{slow}": _ratio(rows, fast, slow) for fast, slow in _pairs(arms)},
        "rows": described,
    }


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first position at which two answers differ (one may simply end there), or None if they are identical."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def tau(answers: Sequence[Answer]) -> float | None:
    """Tokens emitted per verify pass, the target's own included, over all passes; None where nothing was verified."""
    rounds = sum(answer.rounds for answer in answers)
    return round(sum(answer.round_tokens for answer in answers) / rounds, 4) if rounds else None


def acceptance_by_position(answers: Sequence[Answer]) -> list[float]:
    """Share of all rounds in which draft k, and every draft before it, was right; k = 1, 2, ..."""
    rounds = sum(answer.rounds for answer in answers)
    width = max((len(answer.accepted_by_position) for answer in answers), default=0)
    right = [0] * width
    for answer in answers:
        for k, count in enumerate(answer.accepted_by_position):
            right[k] += count
    return [round(count / rounds, 4) for count in right] if rounds else []


def rounds_by_width(answers: Sequence[Answer]) -> list[int]:
    """Rounds that verified k drafts; k = 0, 1, ..."""
    return [sum(counts) for counts in zip_longest(*(answer.rounds_by_width for answer in answers), fillvalue=0)]


def _pairs(arms: Sequence[Arm]) -> list[tuple[str, str]]:
    """(over, under) of every two arms: a later arm over an earlier one, but another library always below."""
    pairs = []
    for j, later in enumerate(arms):
        for earlier in arms[:j]:
            below = later.foreign and not earlier.foreign
            pairs.append((earlier.name, later.name) if below else (later.name, earlier.name))
    return pairs


def _summarise_arm(arm: Arm, rows: Sequence[Row], described: Sequence[dict[str, Any]]) -> dict[str, Any]:
    timed = [row.arms[arm.name] for row in rows]
    answers = [answer for one in timed for answer in one.answers]
    same = [flag for row in described for flag in row["identical"].get(arm.name, [])]
    return {
        "name": arm.name,
        "tokens_per_second": _spread([one.rate for one in timed]) | {"total": _short(_total_rate(timed))},
        "tokens": sum(one.tokens for one in timed),
        "seconds": _short(sum(statistics.median(one.seconds) for one in timed)),
        "tau": tau(answers),
        "acceptance_by_position": acceptance_by_position(answers),
        "rounds": sum(answer.rounds for answer in answers),
        "rounds_by_width": rounds_by_width(answers),
        "rounds_without_drafting": sum(answer.undrafted for answer in answers),
        "rounds_with_the_free_part": sum(answer.partly_drafted for answer in answers),
        "identical": all(same) if same else None,
        "identical_answers": sum(same),
        "compared_answers": len(same),
        "repeats_agree": all(one.repeats_agree for one in timed),
        "stopped": sum(answer.finish_reason == "stop" for answer in answers),
    }


def _ratio(rows: Sequence[Row], fast: str, slow: str) -> dict[str, float]:
    by_row = [row.arms[fast].rate / row.arms[slow].rate for row in rows]
    total = _total_rate([row.arms[fast] for row in rows]) / _total_rate([row.arms[slow] for row in rows])
    return _spread(by_row) | {"total": _short(total)}


def _describe(row: Row, arms: Sequence[Arm], reference: str, margin: Margin | None) -> dict[str, Any]:
    """One row as plain values: what each arm did, and where it first left the answer that it must equal."""
    identical: dict[str, list[bool]] = {}
    differences = []
    for arm in arms:
        like = arm.like if arm.like is not None else reference
        if arm.name == like or not (arm.comparable and arms[0].comparable):
            continue
        expected = [answer.token_ids for answer in row.arms[like].answers]
        found = [answer.token_ids for answer in row.arms[arm.name].answers]
        places = [first_difference(want, got) for want, got in zip(expected, found, strict=True)]
        identical[arm.name] = [place is None for place in places]
        for i, place in enumerate(places):
            if place is not None:
                difference = _difference(row.prompts[i], expected[i], found[i], place, margin)
                differences.append({"arm": arm.name, "id": row.ids[i], **difference})
    return {
        "ids": list(row.ids),
        "prompt_tokens": [len(prompt) for prompt in row.prompts],
        "arms": {name: _describe_timed(timed) for name, timed in row.arms.items()},
        "identical": identical,
        "differences": differences,
    }


def _difference(
    prompt: Sequence[int], want: Sequence[int], got: Sequence[int], place: int, margin: Margin | None
) -> dict[str, Any]:
    both = place < min(len(want), len(got))
    far = margin([*prompt, *want[:place]], want[place], got[place]) if margin and both else None
    return {
        "position": place,
        "expected": want[place] if place < len(want) else None,
        "found": got[place] if place < len(got) else None,
        "margin": far,
    }


def _describe_timed(timed: Timed) -> dict[str, Any]:
    return {
        "tokens": [len(answer.token_ids) for answer in timed.answers],
        "seconds": [_short(seconds) for seconds in timed.seconds],
        "tokens_per_second": _short(timed.rate),
        "tau": tau(timed.answers),
        "finish": [answer.finish_reason for answer in timed.answers],
    }


def _total_rate(timed: Sequence[Timed]) -> float:
    return sum(one.tokens for one in timed) / sum(statistics.median(one.seconds) for one in timed)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": _short(statistics.median(values)), "min": _short(min(values)), "max": _short(max(values))}


def _short(value: float) -> float:
    return round(value, 4)
