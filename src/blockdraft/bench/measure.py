"""Arms against each other in one process: same prompts, same stop rule, turn about.

An arm is anything that answers prompts: plain decoding, drafted decoding, another library.  Everything an arm does
for an answer, its prefill included, is inside its measured time.  Which arm goes first changes from prompt to
prompt, so that a machine that warms up or slows down favours nobody.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from blockdraft.bench.prompts import Prompt
from blockdraft.config import SamplingParams

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Answer:
    """One answer and, from an arm that drafts, what its rounds were like."""

    token_ids: tuple[int, ...]
    finish_reason: str
    rounds: int = 0  # verify passes; 0: not known
    round_tokens: int = 0  # tokens that those passes emitted
    accepted_by_position: tuple[int, ...] = ()  # rounds in which drafts 1..k were all right
    rounds_by_width: tuple[int, ...] = ()  # [k]: rounds that verified k drafts
    undrafted: int = 0  # rounds for which the drafter was not asked
    partly_drafted: int = 0  # rounds for which only its free part was


@dataclass(frozen=True)
class Arm:
    """A way to answer: token ids of some prompts and their parameters in, answers out.

    foreign: another library's.  comparable: its tokens must equal those of the arm `like` (None: the reference's, which
    is the first arm); with sampling, another library draws other random numbers and they need not.
    """

    name: str
    answer: Callable[[list[list[int]], list[SamplingParams]], list[Answer]]
    foreign: bool = False
    comparable: bool = True
    like: str | None = None


@dataclass(frozen=True)
class Chat:
    """Text to ids and back, as the target wants it."""

    encode: Callable[[list[dict[str, str]]], list[int]]
    decode: Callable[[Sequence[int]], str]


@dataclass
class Timed:
    """All runs of one arm over one group of prompts."""

    answers: list[Answer]
    seconds: list[float] = field(default_factory=list)
    repeats_agree: bool = True

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def rate(self) -> float:
        """Tokens per second, by the median of the repeats."""
        return self.tokens / statistics.median(self.seconds)


@dataclass(frozen=True)
class Row:
    """One group of prompts (one prompt, unless slots are shared), answered by every arm."""

    ids: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    arms: dict[str, Timed]


def measure(
    prompts: Sequence[Prompt], arms: Sequence[Arm], chat: Chat, params: SamplingParams, repeats: int = 1, slots: int = 1
) -> Iterator[Row]:
    """Ask every arm every prompt, turn by turn, and yield each row as soon as it is known.

    Later turns of a conversation continue with the first arm's answers.  Prompt i is sampled with seed + i.
    Raises ValueError: no arms, or two of one name.
    """
    names = [arm.name for arm in arms]
    if not arms or len(set(names)) != len(names):
        raise ValueError(f"arms {names}: need at least one, each once")
    seed = params.seed or 0
    _warm_up(arms, chat, prompts[0], params)
    number = 0
    for start in range(0, len(prompts), slots):
        group = prompts[start : start + slots]
        histories: list[list[dict[str, str]]] = [[] for _ in group]
        for turn in range(max(len(prompt.turns) for prompt in group)):
            asked = [i for i, prompt in enumerate(group) if turn < len(prompt.turns)]
            for i in asked:
                histories[i].append({"role": "user", "content": group[i].turns[turn]})
            ids = [chat.encode(histories[i]) for i in asked]
            with_seeds = [params.model_copy(update={"seed": seed + start + i}) for i in asked]
            timed = _turn_about(arms, ids, with_seeds, repeats, first=number % len(arms))
            number += 1
            for i, answer in zip(asked, timed[arms[0].name].answers, strict=True):
                histories[i].append({"role": "assistant", "content": chat.decode(answer.token_ids)})
            labels = tuple(group[i].id + (f"/{turn + 1}" if len(group[i].turns) > 1 else "") for i in asked)
            yield Row(labels, tuple(tuple(prompt) for prompt in ids), timed)


def _warm_up(arms: Sequence[Arm], chat: Chat, prompt: Prompt, params: SamplingParams) -> None:
    ids = chat.encode([{"role": "user", "content": prompt.turns[0]}])
    short = params.model_copy(update={"max_tokens": min(WARM_UP_TOKENS, params.max_tokens), "seed": 0})
    for arm in arms:
        arm.answer([ids], [short])


def _turn_about(
    arms: Sequence[Arm], ids: list[list[int]], params: list[SamplingParams], repeats: int, first: int
) -> dict[str, Timed]:
    timed: dict[str, Timed] = {}
    for repeat in range(repeats):
        for offset in range(len(arms)):
            arm = arms[(first + repeat + offset) % len(arms)]
            began = time.perf_counter()
            answers = arm.answer([list(prompt) for prompt in ids], list(params))
            seconds = time.perf_counter() - began
            seen = timed.setdefault(arm.name, Timed(answers))
            seen.seconds.append(seconds)
            seen.repeats_agree &= [a.token_ids for a in answers] == [a.token_ids for a in seen.answers]
    return {arm.name: timed[arm.name] for arm in arms}
