"""Data: what is supervised, what is left out, which split a sample is in, and what is said about bad lines."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from models import save_tiny_target
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from blockdraft.config import DataConfig
from blockdraft.targets.resolve import load_tokenizer
from blockdraft.text import encode_chat
from blockdraft.train.chats import DataError
from blockdraft.train.data import Dataset, Sample, load_dataset, preview, read_samples, split

EOS = 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(save_tiny_target(tmp_path_factory.mktemp("target"))))


def write(folder: Path, *rows: Any) -> DataConfig:
    path = folder / "data.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return DataConfig(files=(str(path),), min_answer_tokens=2)


def one(folder: Path, tokenizer: PreTrainedTokenizerBase, row: Any) -> Sample:
    (sample,), _ = read_samples(write(folder, row), tokenizer, [EOS])
    return sample


def learned(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(sample.ids[sample.loss_mask].tolist()))


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_the_answer_and_its_end_are_supervised_and_nothing_else(tmp_path: Path, tokenizer: Any) -> None:
    pair = one(tmp_path, tokenizer, {"prompt": "why?", "response": "because"})
    chat = one(tmp_path, tokenizer, {"messages": [turn("user", "why?"), turn("assistant", "because")]})
    assert learned(pair, tokenizer) == "because<eos>"
    assert tokenizer.decode(pair.ids.tolist()) == "<|user|>why?<|assistant|>because<eos>"
    assert pair.ids[: pair.prompt_length].tolist() == encode_chat(tokenizer, [turn("user", "why?")])
    assert chat.ids.tolist() == pair.ids.tolist() and chat.key == pair.key and chat.prompt_key == pair.prompt_key


def test_every_answer_of_a_conversation_is_supervised(tmp_path: Path, tokenizer: Any) -> None:
    said = [("user", "a?"), ("assistant", "bb"), ("user", "c?"), ("assistant", "dd"), ("user", "e?")]
    turns = [turn(role, content) for role, content in said]
    sample = one(tmp_path, tokenizer, {"conversations": turns})
    assert learned(sample, tokenizer) == "bb<eos>dd<eos>"
    assert tokenizer.decode(sample.ids.tolist()).endswith("dd<eos>"), "what follows the last answer is cut"


def test_exact_ids_win_over_text(tmp_path: Path, tokenizer: Any) -> None:
    ids = [70, 71, 72]
    sample = one(tmp_path, tokenizer, {"prompt": "why?", "response": "other", "response_ids": ids})
    assert sample.ids[sample.loss_mask].tolist() == ids
    turns = [turn("user", "a?"), turn("assistant", "bb"), turn("user", "c?")]
    sample = one(tmp_path, tokenizer, {"messages": turns, "response_ids": ids})
    assert sample.ids[sample.loss_mask].tolist() == ids


def test_a_cut_off_answer_has_no_end(tmp_path: Path, tokenizer: Any) -> None:
    row = {"prompt": "why?", "response": "because"}
    assert learned(one(tmp_path, tokenizer, {**row, "finish": "stop"}), tokenizer) == "because<eos>"
    assert learned(one(tmp_path, tokenizer, {**row, "finish": "length"}), tokenizer) == "because"


def test_what_the_template_writes_behind_an_answer_is_not_learned(tmp_path: Path, tokenizer: Any) -> None:
    kept = tokenizer.chat_template
    try:
        tokenizer.chat_template = kept.replace("<eos>", "<eos>\n")
        turns = [turn("user", "a?"), turn("assistant", "bb"), turn("user", "c?"), turn("assistant", "dd")]
        sample = one(tmp_path, tokenizer, {"messages": turns})
        assert learned(sample, tokenizer) == "bb<eos>dd<eos>"
        assert "bb<eos>\n<|user|>" in tokenizer.decode(sample.ids.tolist())
        # a template that shows only the last answer cannot be split into prompts and answers
        tokenizer.chat_template = (
            "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}{% endfor %}"
        )
        with pytest.raises(DataError, match=r"data.jsonl:1: turn 3: the chat template changes earlier text"):
            one(tmp_path, tokenizer, {"messages": turns})
        tokenizer.chat_template = None
        with pytest.raises(DataError, match="no chat template"):
            one(tmp_path, tokenizer, {"messages": turns})
    finally:
        tokenizer.chat_template = kept


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{oops", r"data.jsonl:2: not JSON"),
        ([1], "expected an object, found list"),
        ({"text": "x"}, "needs turns in 'messages'"),
        ({"prompt": "x"}, "without 'response'"),
        ({"prompt": "x", "response": 3}, "'response' must be text"),
        ({"prompt": "x", "response_ids": [1, "a"]}, "must be a list of token ids"),
        ({"prompt": "x", "response_ids": [1, True]}, "must be a list of token ids"),
        ({"messages": []}, "must be a list of turns"),
        ({"messages": [{"role": "user"}]}, "turn 0 needs text in 'role' and 'content'"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant turn"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, tokenizer: Any, row: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        read_samples(write(tmp_path, {"prompt": "x", "response": "fine"}, row), tokenizer, [EOS])
    assert "data.jsonl:2" in str(error.value) and "\n" not in str(error.value)


def test_missing_files_and_empty_sets(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_samples(DataConfig(files=(str(tmp_path / "nowhere"),)), tokenizer, [EOS])
    config = write(tmp_path, {"prompt": "x", "response": "a"}, {"prompt": "y", "response": "b"})
    config = config.model_copy(update={"min_answer_tokens": 5})
    with pytest.raises(DataError, match=r"nothing to learn .* 2 lines read, 2 with fewer than"):
        load_dataset(config, tokenizer, [EOS], 0)
    config = write(tmp_path, {"prompt": "x" * 900, "response": "ab"})
    with pytest.raises(DataError, match="almost nothing to learn"):
        load_dataset(config, tokenizer, [EOS], 0)
    config = write(tmp_path, {"prompt": "x", "response": "abc"}).model_copy(update={"held_out": 0.999999})
    with pytest.raises(DataError, match="leaves no sample"):
        load_dataset(config, tokenizer, [EOS], 0)


def test_short_long_and_double_samples_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    row = {"prompt": "x", "response": "long enough"}
    other = {"prompt": "x", "response": "another answer"}
    config = write(tmp_path, row, {"prompt": "y", "response": ""}, row, other, {"prompt": "z", "response": "w" * 99})
    samples, report = read_samples(config.model_copy(update={"max_length": 40}), tokenizer, [EOS])
    assert [len(sample) for sample in samples] == [3 + 12, 3 + 15, 40]
    assert (report.lines, report.short, report.duplicates, report.truncated) == (5, 1, 1, 1)
    assert "1 with too little to learn and 1 duplicates left out" in report.line(len(samples))
    few, _ = read_samples(config.model_copy(update={"limit": 2}), tokenizer, [EOS])
    assert [sample.key for sample in few] == [sample.key for sample in samples[:1]] + [few[1].key]


def test_the_split_stays_when_data_grows_and_keeps_prompts_together(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": f"p{n // 2}", "response": f"answer {n}"} for n in range(120)]
    config = write(tmp_path, *rows)
    few, _ = read_samples(config.model_copy(update={"limit": 70}), tokenizer, [EOS])
    many, _ = read_samples(config, tokenizer, [EOS])
    train_few, held_few = split(few, 0.3, seed=1)
    train_many, held_many = split(list(reversed(many)), 0.3, seed=1)
    keys = {sample.key for sample in train_many}
    assert all(sample.key in keys for sample in train_few)
    assert {sample.prompt_key for sample in held_few} <= {sample.prompt_key for sample in held_many}
    assert not {s.prompt_key for s in train_many} & {s.prompt_key for s in held_many}
    assert 8 < len(held_many) < 30, "about three in ten of 60 prompts, one sample each"
    assert {s.prompt_key for s in split(many, 0.3, seed=2)[1]} != {s.prompt_key for s in held_many}
    assert split(many, 0.0, seed=1) == (many, [])


def test_the_digest_is_of_the_content(tmp_path: Path, tokenizer: Any) -> None:
    samples, _ = read_samples(
        write(tmp_path, *({"prompt": f"p{n}", "response": f"answer {n}"} for n in range(4))), tokenizer, [EOS]
    )
    digest = Dataset(samples[:3], samples[3:]).digest
    assert digest == Dataset(samples[2::-1], samples[3:]).digest
    assert digest != Dataset(samples[:2], samples[3:]).digest
    assert digest != Dataset(samples[:2], samples[2:]).digest


def test_preview_shows_both_parts(tmp_path: Path, tokenizer: Any) -> None:
    sample = one(tmp_path, tokenizer, {"prompt": "why?", "response": "because [/b]"})
    file = io.StringIO()
    preview([sample], tokenizer, Console(file=file, force_terminal=True, width=100, color_system="standard"))
    text = file.getvalue()
    assert "\x1b[1;32mbecause [/b]<eos>" in text and "\x1b[2m<|user|>why?<|assistant|>" in text
    assert "13 of 19 tokens supervised" in text
