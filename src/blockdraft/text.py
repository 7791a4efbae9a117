"""Text on both sides of the engine: lines of files, prompts to ids, text that can be shown at once, stop strings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What a tokenizer writes for bytes that are not, or not yet, a character.
REPLACEMENT = "\ufffd"


class DataError(ValueError):
    """Data that cannot be used; one line that names the file and line."""


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, object) for each line that is not blank."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not JSON ({error.msg})") from None
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected an object, found {type(row).__name__}")
        yield where, row


def write_whole(path: Path, text: str) -> None:
    """Write a file under a temporary name and move it, so that a reader never sees half of it; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of plain text, with the special tokens that the model expects around it."""
    return list(tokenizer(text)["input_ids"])


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Ids of a conversation up to where the assistant answers.

    Raises ValueError if the model has no chat template or the template rejects the messages.
    """
    if not tokenizer.chat_template:
        raise ValueError("this model has no chat template: give plain text instead of messages")
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # templates raise errors of their own kinds
        raise ValueError(f"the chat template rejects these messages: {error}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


class IncrementalDetokenizer:
    """Turns ids into text piece by piece; the pieces together are what decoding all ids at once gives.

    A token that ends inside a character is held back until the character is whole.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        # ids[start:end] is the last stretch that was turned into text; it is decoded again in front of
        # what follows, because a tokenizer may write a token differently at the beginning of a text.
        self.start = self.end = 0

    def push(self, token: int) -> str:
        """The text that became final with this token, perhaps none."""
        self.ids.append(token)
        known, text = self._decode(self.ids[self.start : self.end]), self._decode(self.ids[self.start :])
        if len(text) <= len(known) or text.endswith(REPLACEMENT):
            return ""
        self.start, self.end = self.end, len(self.ids)
        return text[len(known) :]

    def flush(self) -> str:
        """What is still held back, with a replacement character for what never became one."""
        known, text = self._decode(self.ids[self.start : self.end]), self._decode(self.ids[self.start :])
        self.start, self.end = self.end, len(self.ids)
        return text[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class StopStrings:
    """Finds the first stop string in a growing text, and holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.held = ""
        self.hit = False

    def push(self, piece: str) -> str:
        """The text that is now known to stand before any stop string; sets `hit` when one is complete."""
        text = self.held + piece
        found = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.hit, self.held = True, ""
            return text[: min(found)[1]]
        keep = max((self._overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, once it is clear that nothing follows."""
        text, self.held = self.held, ""
        return text

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class TextOutput:
    """The text of one answer as it grows: `text` holds what is certain so far, `stopped` is set by a stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> None:
        self.detokenizer = IncrementalDetokenizer(tokenizer)
        self.stops = StopStrings(stops)
        self.text = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed; the text ends before it."""
        return self.stops.hit

    def push(self, token: int) -> str:
        """The text that became certain with this token."""
        return self._append(self.stops.push(self.detokenizer.push(token)))

    def finish(self) -> str:
        """What was held back and, now that no token follows, is text after all."""
        if self.stopped:
            return ""
        return self._append(self.stops.push(self.detokenizer.flush()) + self.stops.flush())

    def _append(self, piece: str) -> str:
        self.text += piece
        return piece
