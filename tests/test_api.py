"""`LLM`: text, ids and conversations in; ordered, streamed or as-completed answers out; clear refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes import ByteTokenizer, HashTarget, OracleDrafter, UnrelatedDrafter

import blockdraft
from blockdraft import LLM, SamplingParams
from blockdraft.config import NgramConfig
from blockdraft.drafters.lookup import LookupDrafter
from blockdraft.drafters.names import LookupChoice
from blockdraft.drafters.ngram import NgramDrafter
from blockdraft.engine import drafting

GREEDY = SamplingParams(max_tokens=20)


def ascii_target() -> HashTarget:
    target = HashTarget(vocab_size=258, eos_token_ids=(257,))
    target.table[:, 128:] = -50.0
    return target


def make_llm(drafter: Any = None, **options: Any) -> LLM:
    return LLM(ascii_target(), drafter, tokenizer=ByteTokenizer(), **options)  # type: ignore[arg-type]


def test_generate_takes_one_or_many_texts_or_ids_and_keeps_the_order() -> None:
    llm = make_llm(slots=2)
    many = llm.generate(["one", "three", "two"], GREEDY)
    assert [bytes(output.prompt_token_ids).decode() for output in many] == ["one", "three", "two"]
    assert [output.text for output in many] == [llm.generate(text, GREEDY)[0].text for text in ("one", "three", "two")]
    assert llm.generate(list(b"three"), GREEDY)[0].token_ids == many[1].token_ids
    assert llm.generate([list(b"one"), "two"], GREEDY)[1].token_ids == many[2].token_ids
    assert llm.generate([], GREEDY) == []
    each = llm.generate(["one", "one"], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=5)])
    assert [len(output.token_ids) for output in each] == [2, 5]
    assert many[0].finish_reason == "length" and many[0].stats.rounds == 19
    with pytest.raises(ValueError, match="1 sampling parameters for 2 prompts"):
        llm.generate(["one", "two"], [GREEDY])


def test_chat_applies_the_template() -> None:
    llm = make_llm()
    messages = [{"role": "user", "content": "hi"}]
    expected = llm.generate("<user>hi<assistant>", GREEDY)[0]
    assert llm.chat(messages, GREEDY)[0].text == expected.text
    assert "".join(llm.stream(messages, GREEDY)) == expected.text
    assert [output.token_ids for output in llm.chat([messages, messages], GREEDY)] == [expected.token_ids] * 2


@pytest.mark.parametrize("drafted", [False, True])
def test_a_stream_is_the_text_in_pieces(drafted: bool) -> None:
    whole = make_llm().generate("hello", GREEDY)[0]
    known = [*b"hello", *whole.token_ids]
    llm = make_llm(OracleDrafter(4, 258, [known], [False, False, True]) if drafted else None, verify_width=None)
    pieces = list(llm.stream("hello", GREEDY))
    assert "".join(pieces) == whole.text and len(pieces) == 20
    assert list(llm.stream(list(b"hello"), GREEDY)) == pieces
    marked = list(llm.stream_pieces("hello", GREEDY))
    assert [piece.text for piece in marked] == pieces
    assert sum(piece.drafted for piece in marked) == llm.generate("hello", GREEDY)[0].stats.accepted
    assert any(piece.drafted for piece in marked) == drafted


def test_a_stream_that_is_dropped_frees_its_slot() -> None:
    llm = make_llm(UnrelatedDrafter(3, 258), slots=1)
    stream = llm.stream("hello", GREEDY)
    next(stream)
    stream.close()
    assert not llm.engine.has_work
    iterator = llm.as_completed(["a", "b", "c"], [SamplingParams(max_tokens=n) for n in (9, 3, 5)])
    assert next(iterator)[0] == 0
    iterator.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_work
    with pytest.raises(ValueError, match="empty"):
        llm.generate(["fine", ""], GREEDY)
    assert not llm.engine.has_work, "the good prompt must not linger after the bad one"


def test_as_completed_yields_the_first_to_finish_first() -> None:
    llm = make_llm(slots=3)
    params = [SamplingParams(max_tokens=n) for n in (9, 3, 5)]
    assert [index for index, _ in llm.as_completed(["a", "b", "c"], params)] == [1, 2, 0]


def test_two_streams_may_run_at_once() -> None:
    llm = make_llm()
    alone = [list(llm.stream(text, GREEDY)) for text in ("a", "b")]
    together = list(zip(llm.stream("a", GREEDY), llm.stream("b", GREEDY), strict=True))
    assert [list(pieces) for pieces in zip(*together, strict=True)] == alone
    iterator = llm.as_completed(["a", "b", "c"], [SamplingParams(max_tokens=n) for n in (3, 9, 5)])
    assert next(iterator)[0] == 0
    assert list(llm.stream("a", GREEDY)) == alone[0]  # finishes the others too
    assert sorted(index for index, _ in iterator) == [1, 2]


def test_the_seed_of_an_output_repeats_it() -> None:
    llm = make_llm()
    first = llm.generate("x", SamplingParams(max_tokens=20, temperature=1.0))[0]
    again = llm.generate("x", SamplingParams(max_tokens=20, temperature=1.0, seed=first.seed))[0]
    assert first.token_ids == again.token_ids
    assert first.token_ids != llm.generate("x", SamplingParams(max_tokens=20, temperature=1.0))[0].token_ids


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no drafter is shipped for target 'hash': pass drafter=None"):
        make_llm("auto")
    with pytest.raises(ValueError, match="needs its tokenizer"):
        LLM(ascii_target(), None)
    with pytest.raises(ValueError, match="block_size is for a drafter that is loaded here"):
        make_llm(UnrelatedDrafter(3, 258, 0), block_size=3)
    with pytest.raises(ValueError, match="LLM: slots"):
        make_llm(slots=0)
    with pytest.raises(ValueError, match="no drafter is shipped for target 'no/such'"):
        LLM("no/such")


def test_the_shipped_drafter_is_found_beside_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, other in (("auto", "dflash"), ("mtp", "mtp")):
        folder = tmp_path / "assets" / f"hash-{other}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        monkeypatch.setattr(drafting, "files", lambda package: tmp_path)
        assert drafting.find_drafter(name, "hash") == folder
        found = drafting.find_drafter(f"ngram+{name}", "hash")
        assert isinstance(found, LookupChoice) and found.other == folder
    folder = tmp_path / "assets" / "hash-dflash"
    loaded = UnrelatedDrafter(3, 258)
    monkeypatch.setattr(drafting, "load_drafter", lambda path, target, size: loaded if path == folder else None)
    assert make_llm("auto").drafter is loaded


def test_drafters_by_name_and_by_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_llm().generate("one", GREEDY)[0]
    for drafter, max_drafts in (("ngram", 10), ("ngram:3", 3), (NgramConfig(longest=2, max_drafts=4), 4)):
        llm = make_llm(drafter)
        assert isinstance(llm.drafter, NgramDrafter) and llm.drafter.max_drafts == max_drafts
        assert llm.generate("one", GREEDY)[0].token_ids == plain.token_ids
    assert make_llm("none").drafter is None
    asked = []
    monkeypatch.setattr(drafting, "resolve_folder", asked.append)
    monkeypatch.setattr(drafting, "load_target", lambda spec, **options: asked.append(options) or ascii_target())
    llm = make_llm("model:a/b:3", slots=2, verify_width=None)
    assert asked == ["a/b", {"dtype": "float32", "device": "cpu"}]
    assert llm.drafter is not None and llm.drafter.max_drafts == 3
    output = llm.generate("one", GREEDY)[0]
    assert output.token_ids == plain.token_ids and output.stats.accepted == output.stats.drafted > 10
    both = make_llm("ngram+model:a/b:3", slots=2).drafter
    assert isinstance(both, LookupDrafter) and both.max_drafts == 3 and both.lookup.config.longest == 10
    with pytest.raises(ValueError, match="drafter 'nowhere': no such folder"):
        make_llm("nowhere")


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, blockdraft; assert not {'torch', 'transformers', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert all(hasattr(blockdraft, name) for name in blockdraft.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = blockdraft.nothing


def test_a_path_names_a_target_and_never_a_drafter_beside_it(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model-dflash").mkdir()
    (tmp_path / "model-dflash" / "config.json").write_text("{}")
    for spec in (str(tmp_path / "model"), tmp_path / "model"):
        with pytest.raises(ValueError, match="no drafter is shipped for target 'model'"):
            LLM(spec)
        with pytest.raises(ValueError, match="is an empty folder, not a model"):
            LLM(spec, None)


def test_one_text_is_one_prompt_for_as_completed_too() -> None:
    llm = make_llm()
    assert [output.text for _, output in llm.as_completed("one", GREEDY)] == [llm.generate("one", GREEDY)[0].text]
