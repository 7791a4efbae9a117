"""Text that grows: whole characters only, stop strings across pieces, the same text as decoding all at once."""

from __future__ import annotations

import random

import pytest
from fakes import ByteTokenizer
from oracles import slow_stop

from blockdraft.text import IncrementalDetokenizer, StopStrings, TextOutput, encode, encode_chat

TEXTS = ["plain", "naïve café", "日本語のテキスト", "👩‍👩‍👧 family", "mixed ü 漢 🎉 end", "\ufffd kept \ufffd", ""]


class SpaceTokenizer:
    """Words that bring a space in front unless they begin the text, as SentencePiece decoders write them."""

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return " ".join("abcdefgh"[token] for token in ids if token < 8)


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_make_up_the_text_and_never_break_a_character(text: str) -> None:
    detokenizer = IncrementalDetokenizer(ByteTokenizer())  # type: ignore[arg-type]
    pieces = [detokenizer.push(token) for token in text.encode()]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == text


def test_any_bytes_give_what_decoding_at_once_gives() -> None:
    random.seed(0)
    tokenizer = ByteTokenizer()
    for _ in range(200):
        pool = random.choice([range(256), [0xE6, 0x97, 0xA5, 0x41, 257], [0xF0, 0x9F, 0x98, 0x80, 0x80]])
        ids = random.choices(pool, k=random.randrange(12))
        detokenizer = IncrementalDetokenizer(tokenizer)  # type: ignore[arg-type]
        text = "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()
        assert text == tokenizer.decode(ids, True, False)
        assert detokenizer.flush() == ""


def test_a_space_that_depends_on_what_went_before() -> None:
    detokenizer = IncrementalDetokenizer(SpaceTokenizer())  # type: ignore[arg-type]
    pieces = [detokenizer.push(token) for token in (0, 1, 9, 2)]
    assert pieces == ["a", " b", "", " c"] and detokenizer.flush() == ""


def test_stop_strings_do_not_depend_on_the_pieces() -> None:
    random.seed(1)
    hits = 0
    for _ in range(2000):
        text = "".join(random.choices("ab\n", k=random.randrange(16)))
        stops = ["".join(random.choices("ab\n", k=random.randrange(1, 5))) for _ in range(random.randrange(4))]
        matcher, released, rest = StopStrings(stops), "", text
        while rest and not matcher.hit:
            size = random.randrange(1, 5)
            released += matcher.push(rest[:size])
            rest = rest[size:]
            expected, _ = slow_stop(text, stops)
            assert expected.startswith(released), "released text must never be taken back"
        assert (released + matcher.flush(), matcher.hit) == slow_stop(text, stops)
        hits += matcher.hit
    assert 300 < hits < 1900


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    matcher = StopStrings(["END", "\n\n"])
    assert [matcher.push(piece) for piece in ("go on", " E", "N", "x", "\n", "y E")] == [
        "go on",
        " ",
        "",
        "ENx",
        "",
        "\ny ",
    ]
    assert not matcher.hit and matcher.flush() == "E"


def test_text_output_puts_both_together() -> None:
    output = TextOutput(ByteTokenizer(), ["é!"])  # type: ignore[arg-type]
    pieces = [output.push(token) for token in "caf né!x".encode()[:-1]]
    assert output.stopped and output.text == "caf n" == "".join(pieces) and output.finish() == ""
    output = TextOutput(ByteTokenizer(), ["é!"])  # type: ignore[arg-type]
    pieces = [output.push(token) for token in [*"né".encode(), 0xC3]]
    assert pieces == ["n", "", "", ""]
    assert output.finish() == "é\ufffd" and output.text == "né\ufffd"


def test_prompts() -> None:
    tokenizer = ByteTokenizer()
    assert encode(tokenizer, "hi") == [104, 105]  # type: ignore[arg-type]
    ids = encode_chat(tokenizer, [{"role": "user", "content": "hi"}])  # type: ignore[arg-type]
    assert bytes(ids).decode() == "<user>hi<assistant>"
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        encode_chat(tokenizer, [{"role": "user", "content": "hi"}])  # type: ignore[arg-type]
