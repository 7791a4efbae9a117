"""One request: what was asked, what has been answered, and how the drafts fared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from blockdraft.config import SamplingParams
from blockdraft.engine.policy import Ask
from blockdraft.ops.sampling import ChoiceState
from blockdraft.text import TextOutput

FinishReason = Literal["stop", "length"]


@dataclass
class RequestStats:
    """Counts over verify passes.  Nothing behind the cut of an answer is in any of them.

    The first token of an answer comes from the prompt's own pass, so it belongs to no round.
    """

    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    rounds_by_width: list[int] = field(default_factory=list)  # [k]: passes that verified k drafts
    undrafted: int = 0  # rounds for which the drafter was not asked
    partly_drafted: int = 0  # rounds for which only its free part was

    @property
    def tau(self) -> float:
        """Acceptance length: tokens emitted per verify pass, the target's own included; 0 without a pass."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts / verified drafts; 0 if none was verified."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def count(self, width: int, num_accepted: int, kept: int, done: bool, asked: Ask) -> None:
        """Note a round that verified `width` drafts and accepted some; `kept` of its tokens were emitted.

        In a round that ends the answer (`done`), drafts behind the last kept token do not count.  `asked`: who was
        asked for drafts.
        """
        accepted = min(num_accepted, kept)
        width = min(width, kept) if done else width
        self.rounds += 1
        self.emitted += kept
        self.accepted += accepted
        self.drafted += width
        self.undrafted += asked is Ask.NOBODY
        self.partly_drafted += asked is Ask.FREE
        _add(self.accepted_by_position, [1] * accepted)
        _add(self.rounds_by_width, [0] * width + [1])

    def add(self, other: RequestStats) -> None:
        """Take in the counts of another request."""
        self.rounds += other.rounds
        self.emitted += other.emitted
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.undrafted += other.undrafted
        self.partly_drafted += other.partly_drafted
        _add(self.accepted_by_position, other.accepted_by_position)
        _add(self.rounds_by_width, other.rounds_by_width)


def _add(counts: list[int], more: Sequence[int]) -> None:
    """Add counts to counts, place by place."""
    counts.extend([0] * (len(more) - len(counts)))
    for place, count in enumerate(more):
        counts[place] += count


@dataclass(frozen=True)
class Piece:
    """Text that became certain with one token, and whether the drafter had that token right."""

    text: str
    drafted: bool


@dataclass(eq=False)
class Request:
    """State of one request; the engine alone changes it.

    `max_tokens` is the parameter's, or what the context leaves.  `output_ids` includes a stop token that
    ended the answer; `output` (None: the engine has no tokenizer) does not.  `pieces` are the parts of
    the text, none of them empty.  `slot` is set while the prompt is read and while the request runs.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    choice: ChoiceState
    output: TextOutput | None
    output_ids: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    aborted: bool = False
    slot: int | None = None
    num_prefilled: int = 0  # tokens of the prompt that have been read
    stats: RequestStats = field(default_factory=RequestStats)

    @property
    def anchor(self) -> int:
        """The last committed token, which the target has not read yet."""
        return self.output_ids[-1]

    @property
    def num_read(self) -> int:
        """Tokens the target has read: all but the anchor."""
        return len(self.prompt_ids) + len(self.output_ids) - 1

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_tokens - len(self.output_ids)

    @property
    def done(self) -> bool:
        """Whether no token will follow."""
        return self.aborted or self.finish_reason is not None

    @property
    def text(self) -> str:
        """The text so far; empty if the engine has no tokenizer."""
        return self.output.text if self.output is not None else ""

    def take(self, tokens: Sequence[int]) -> int:
        """Append tokens up to one that ends the answer; returns how many.  Their text, which may end it earlier, waits
        for `tell`: the next round can begin before."""
        kept = 0
        while kept < len(tokens) and self.finish_reason is None:
            self.output_ids.append(tokens[kept])
            if tokens[kept] in self.stop_ids:
                self.finish_reason = "stop"
            elif self.remaining == 0:
                self.finish_reason = "length"
            kept += 1
        self.choice.commit(tokens[:kept])
        return kept

    def tell(self, kept: int, num_drafted: int) -> int:
        """Make text of the last `kept` tokens, the first `num_drafted` of which are drafts, up to a stop string.

        Tokens behind that one are dropped; returns how many are left.
        """
        if self.output is None:
            return kept
        first = len(self.output_ids) - kept
        for count, token in enumerate(self.output_ids[first:], start=1):
            last = self.finish_reason is not None and count == kept
            text = "" if last and token in self.stop_ids else self.output.push(token)
            text += self.output.finish() if last else ""
            if text:
                self.pieces.append(Piece(text, drafted=count <= num_drafted))
            if self.output.stopped:
                self.finish_reason = "stop"
                del self.output_ids[first + count :]
                return count
        return kept
