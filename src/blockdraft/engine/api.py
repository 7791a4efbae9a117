"""Text in, text out: the `LLM` that most people use."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from blockdraft.config import EngineConfig, SamplingParams
from blockdraft.drafters.names import LookupChoice
from blockdraft.engine.drafting import Wanted, find_drafter, make_drafter
from blockdraft.engine.engine import Engine
from blockdraft.engine.request import FinishReason, Piece, Request, RequestStats
from blockdraft.targets.base import Target
from blockdraft.targets.resolve import canonical_name, load_target, load_tokenizer
from blockdraft.text import encode, encode_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, str]]
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Output:
    """One answer.  `token_ids` includes a stop token that ended it, `text` does not; `seed` would repeat it."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: RequestStats
    prompt_token_ids: list[int]
    seed: int


class LLM:
    """A target and a drafter, ready to answer.

    `target` is a name or path (see `targets.resolve`), or a loaded target together with its `tokenizer`.
    `implementation` says what computes a target's layers: ours ("dense"), transformers' ("hf"), or ours where they
    are known ("auto").
    `weights` "float16" keeps the target's matrices in half precision, sums in float32: a target of its own, read twice
    as fast, whose drafted answers are its plain ones.  CPU, our own layers and the compiled kernel only.
    `drafter` is "auto" (the one shipped for the target), None (plain decoding), a folder, "ngram" (what followed the
    same words before), "model:NAME" (a smaller model), the settings of one of these, or a drafter that is ready;
    "ngram+" in front of a name looks the text up first and asks that drafter where there is nothing.
    `block_size` has the drafter draft smaller blocks than it was trained with.
    `verify_width` is how many drafts a round verifies: "auto" as many as pay on this machine, down to none, which
    takes a moment to measure at the first use; a number at most so many; None all.
    `coupled` lends the drafter the noise of the target's choices, so that at temperatures above 0 it drafts what the
    target would draw, and not what is likeliest: more of it is right.
    `prefill_tokens` of prompts are read in one round while others are answered; None: whole prompts, which keeps
    those waiting.
    The answers are the same with every drafter, `slots` (requests at once) and whatever is said of drafting: exactly
    in float32 on a CPU where the compiled kernel or oneDNN is available, elsewhere up to near ties that kernels of
    another shape may decide otherwise.
    Raises ValueError, in one line, for what cannot be found or does not fit.
    """

    def __init__(
        self,
        target: str | Path | Target = "smollm2-135m",
        drafter: Wanted = "ngram+auto",
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: str = "float32",
        weights: str | None = None,
        device: str = "cpu",
        implementation: str = "auto",
        slots: int = 8,
        capacity: int = 2048,
        verify_width: int | Literal["auto"] | None = "auto",
        coupled: bool = True,
        prefill_tokens: int | None = 256,
        block_size: int | None = None,
    ) -> None:
        if block_size is not None and not isinstance(drafter, (str, Path, LookupChoice)):
            raise ValueError("block_size is for a drafter that is loaded here: give a folder, or 'auto'")
        values = {
            "slots": slots,
            "capacity": capacity,
            "verify_width": verify_width,
            "coupled": coupled,
            "prefill_tokens": prefill_tokens,
        }
        config = EngineConfig.parse(values, "LLM")
        if isinstance(target, (str, Path)):
            spec = str(target)
            # The drafter is looked up first: a missing one should not cost the time of loading a target.
            found = find_drafter(drafter, canonical_name(spec))
            # The target next: of a folder that is no model it says what is wrong, the tokenizer only that it lacks one.
            target = load_target(spec, dtype=dtype, device=device, implementation=implementation, weights=weights)
            tokenizer = tokenizer if tokenizer is not None else load_tokenizer(spec)
        else:
            found = find_drafter(drafter, target.info.name)
            if tokenizer is None:
                raise ValueError("a loaded target needs its tokenizer: pass tokenizer=")
        self.target, self.tokenizer = target, tokenizer
        self.drafter = make_drafter(found, target, block_size)
        self.engine = Engine(target, self.drafter, config, tokenizer)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Output]:
        """Continue plain text (no chat template) or token ids; one output per prompt, in order.

        `params` are for all prompts, or one for each.
        """
        return self._ordered(prompts, params)

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """Answer conversations, each a list of {"role": ..., "content": ...}, through the chat template."""
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        many: Sequence[Messages] = [conversations] if single else conversations  # type: ignore[list-item, assignment]
        return self._ordered([encode_chat(self.tokenizer, messages) for messages in many], params)

    def as_completed(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[tuple[int, Output]]:
        """Like `generate`, but yields (index of the prompt, output) as soon as each is finished."""
        listed = _as_list(prompts)
        each = _one_each(params, len(listed))
        indices: dict[Request, int] = {}
        try:
            for index, (prompt, one) in enumerate(zip(listed, each, strict=True)):
                indices[self.engine.add(self._ids(prompt), one)] = index
            while indices:
                # Not from what `step` returns: a stream read in between may have finished some.
                for request in [request for request in indices if request.done]:
                    yield indices.pop(request), _output(request)
                self.engine.step()
        finally:
            for request in indices:
                self.engine.abort(request)

    def stream(self, prompt: Prompt | Messages, params: SamplingParams | None = None) -> Generator[str, None, Output]:
        """Yield the answer to one prompt (text, ids or a conversation) as it grows; the pieces make up its text."""
        pieces = self.stream_pieces(prompt, params)
        while True:
            try:
                yield next(pieces).text
            except StopIteration as end:
                output: Output = end.value
                return output

    def stream_pieces(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None
    ) -> Generator[Piece, None, Output]:
        """Like `stream`, with a note on each piece whether the drafter had it right."""
        request = self.engine.add(self._ids(prompt), params if params is not None else SamplingParams())
        seen = 0
        try:
            while seen < len(request.pieces) or not request.done:
                if seen < len(request.pieces):
                    seen += 1
                    yield request.pieces[seen - 1]
                else:
                    self.engine.step()
        finally:
            self.engine.abort(request)
        return _output(request)

    def _ordered(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Output]:
        outputs = dict(self.as_completed(prompts, params))
        return [outputs[index] for index in range(len(outputs))]

    def _ids(self, prompt: Prompt | Messages) -> list[int]:
        if isinstance(prompt, str):
            return encode(self.tokenizer, prompt)
        if prompt and isinstance(prompt[0], Mapping):
            return encode_chat(self.tokenizer, prompt)  # type: ignore[arg-type]
        return list(prompt)  # type: ignore[arg-type]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Prompts as a list, where one text or one list of ids is allowed too."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params if params is not None else SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling parameters for {count} prompts: give one for all, or one for each")
    return params


def _output(request: Request) -> Output:
    assert request.finish_reason is not None
    return Output(
        request.text, request.output_ids, request.finish_reason, request.stats, request.prompt_ids, request.seed
    )
