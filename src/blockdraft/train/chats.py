"""One line of a JSONL file -> token ids and the mask of what is learned, by the target's chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from blockdraft.text import DataError, encode_chat

Message = dict[str, str]
# The tokenizer of a `transformers` model; its type is not named, because only targets and text know transformers.
Tokenizer = Any


def encode_row(
    row: dict[str, Any], tokenizer: Tokenizer, eos_ids: Sequence[int], where: str
) -> tuple[str, list[int], list[bool]]:
    """A row -> (hash of its prompt, ids, mask).

    A prompt is text in 'prompt' or the turns of 'messages'; 'response' or 'response_ids' is its answer.
    Without either, 'messages' (or 'conversations') holds answers of its own.
    """
    messages = row.get("messages", row.get("conversations"))
    if messages is None:
        if not isinstance(row.get("prompt"), str):
            raise DataError(f"{where}: needs turns in 'messages' or 'conversations', or text in 'prompt'")
        messages = [{"role": "user", "content": row["prompt"]}]
        if "response" not in row and "response_ids" not in row:
            raise DataError(f"{where}: a 'prompt' without 'response' or 'response_ids'")
    turns = check_messages(messages, where)
    response, response_ids = row.get("response"), row.get("response_ids")
    if response_ids is not None:
        if not isinstance(response_ids, list) or not all(type(token) is int and token >= 0 for token in response_ids):
            raise DataError(f"{where}: 'response_ids' must be a list of token ids")
        prompt_ids = _encode_prompt(tokenizer, turns, where)
        mask = [False] * len(prompt_ids) + [True] * len(response_ids)
        return _hash_messages(turns), prompt_ids + response_ids, mask
    if response is not None:
        if not isinstance(response, str):
            raise DataError(f"{where}: 'response' must be text")
        turns = [*turns, {"role": "assistant", "content": response}]
    key, ids, mask = encode_messages(turns, tokenizer, eos_ids, where)
    if row.get("finish") == "length" and any(mask):
        # the answer was cut off, so the end of turn that the template writes is not the target's
        last = max(index for index, learned in enumerate(mask) if learned)
        mask[last] = mask[last] and ids[last] not in eos_ids
    return key, ids, mask


def _encode_prompt(tokenizer: Tokenizer, turns: list[Message], where: str) -> list[int]:
    try:
        return encode_chat(tokenizer, turns)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None


def check_messages(messages: Any, where: str) -> list[Message]:
    """The conversation in {role, content} form.  Raises `DataError`."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: 'messages' must be a list of turns")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise DataError(f"{where}: turn {number} needs text in 'role' and 'content'")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def encode_messages(
    messages: list[Message], tokenizer: Tokenizer, eos_ids: Sequence[int], where: str
) -> tuple[str, list[int], list[bool]]:
    """Find the answers by rendering the chat up to each of them and past it: what is new is the answer.

    The mask of an answer ends with its end-of-turn token; what the template writes behind that the model
    never has to say.
    """
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: no assistant turn to learn from")
    ids: list[int] = []
    mask: list[bool] = []
    text = ""
    first_answer = len(messages)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        first_answer = min(first_answer, number)
        before = _render(tokenizer, messages[:number], True, where)
        after = _render(tokenizer, messages[: number + 1], False, where)
        if not before.startswith(text) or not after.startswith(before):
            raise DataError(
                f"{where}: turn {number}: the chat template changes earlier text when a turn is added, so answers "
                f"cannot be told from prompts; give 'prompt' and 'response_ids' instead"
            )
        ids += _continue(tokenizer, ids, text, before)
        mask += [False] * (len(ids) - len(mask))
        answer = _continue(tokenizer, ids, before, after)
        ends = [index for index, token in enumerate(answer) if token in eos_ids]
        supervised = ends[-1] + 1 if ends else len(answer)
        ids += answer
        mask += [True] * supervised + [False] * (len(answer) - supervised)
        text = after
    return _hash_messages(messages[:first_answer]), ids, mask


def _render(tokenizer: Tokenizer, messages: list[Message], generation_prompt: bool, where: str) -> str:
    if not tokenizer.chat_template:
        raise DataError(f"{where}: this model has no chat template; give 'prompt' and 'response_ids' instead")
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
    except Exception as error:  # templates raise errors of their own kinds
        raise DataError(f"{where}: the chat template rejects these messages: {error}") from error
    return text


def _continue(tokenizer: Tokenizer, ids: list[int], text: str, longer: str) -> list[int]:
    """Ids of what `longer` has behind `text`, whose ids are given.

    Where a token would reach over the border, the new text is encoded alone: the model, too, writes its
    answer behind the prompt's own tokens.
    """
    whole: list[int] = tokenizer(longer, add_special_tokens=False)["input_ids"]
    if whole[: len(ids)] == ids:
        return whole[len(ids) :]
    alone: list[int] = tokenizer(longer[len(text) :], add_special_tokens=False)["input_ids"]
    return alone


def _hash_messages(messages: list[Message]) -> str:
    return hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:32]
