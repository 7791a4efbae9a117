"""Chats and prompt/response pairs from JSONL -> token ids with a mask of what is learned.

Letters: S tokens of a sample.

A sample ends with its last supervised token: what follows an answer teaches nothing.  Samples are told apart
by a hash of their content and split by a hash of their prompt, so that adding data later neither renames a
sample nor moves one between training and held-out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from torch import Tensor

from blockdraft.config import DataConfig
from blockdraft.text import DataError, read_jsonl
from blockdraft.train.chats import Tokenizer, encode_row

# A set in which fewer tokens than this are supervised has lost its answers somewhere.
LEAST_SUPERVISED = 0.01


@dataclass(frozen=True, eq=False)
class Sample:
    """One conversation: ids [S] int64, loss_mask [S] bool (True: a token that the drafter learns)."""

    key: str
    prompt_key: str
    ids: Tensor
    loss_mask: Tensor

    @property
    def number(self) -> int:
        """The key as an integer, for seeding what is drawn for this sample."""
        return int(self.key[:12], 16)

    @property
    def prompt_length(self) -> int:
        """Tokens in front of the first supervised one."""
        return int(self.loss_mask.to(torch.uint8).argmax())

    def __len__(self) -> int:
        return self.ids.shape[0]


@dataclass
class Report:
    """What became of the lines that were read."""

    lines: int = 0
    duplicates: int = 0
    short: int = 0
    truncated: int = 0
    tokens: int = 0
    supervised: int = 0

    def line(self, kept: int) -> str:
        """One line for the person who started the run."""
        left_out = f"{self.short} with too little to learn and {self.duplicates} duplicates left out"
        share = self.supervised / max(self.tokens, 1)
        return (
            f"{kept} samples of {self.lines} lines ({left_out}, {self.truncated} cut to max_length), "
            f"{self.tokens} tokens, {share:.0%} supervised"
        )


@dataclass
class Dataset:
    """Samples to learn from, samples to measure on, and the digest of both."""

    train: list[Sample]
    held_out: list[Sample]
    report: Report = field(default_factory=Report)

    @property
    def digest(self) -> str:
        """sha256 over ids and masks of all samples, whatever their order."""
        keys = [*sorted(sample.key for sample in self.train), "|", *sorted(sample.key for sample in self.held_out)]
        return hashlib.sha256("\n".join(keys).encode()).hexdigest()


def load_dataset(config: DataConfig, tokenizer: Tokenizer, eos_ids: Sequence[int], seed: int) -> Dataset:
    """Read, mask, filter and split.  Raises `DataError` for a bad line, or if almost nothing is left to learn."""
    samples, report = read_samples(config, tokenizer, eos_ids)
    if not samples:
        raise DataError(
            f"nothing to learn from {', '.join(config.files)}: {report.lines} lines read, {report.short} with fewer "
            f"than data.min_answer_tokens={config.min_answer_tokens} answer tokens"
        )
    if report.supervised < LEAST_SUPERVISED * report.tokens:
        raise DataError(
            f"almost nothing to learn from {', '.join(config.files)}: {report.supervised} of {report.tokens} tokens "
            f"are supervised; look at --preview"
        )
    train, held_out = split(samples, config.held_out, seed)
    if not train:
        raise DataError(f"data.held_out={config.held_out} leaves no sample to learn from")
    return Dataset(train, held_out, report)


def read_samples(config: DataConfig, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> tuple[list[Sample], Report]:
    """All usable samples of the files, in file order, without duplicates."""
    samples: dict[str, Sample] = {}
    report = Report()
    for file in config.files:
        for where, row in read_jsonl(Path(file)):
            report.lines += 1
            sample, length = read_sample(row, config, tokenizer, eos_ids, where)
            report.truncated += length > config.max_length
            if sample is None:
                report.short += 1
            elif sample.key in samples:
                report.duplicates += 1
            else:
                samples[sample.key] = sample
                report.tokens += len(sample)
                report.supervised += int(sample.loss_mask.sum())
            if config.limit is not None and len(samples) == config.limit:
                return list(samples.values()), report
    return list(samples.values()), report


def read_sample(
    row: dict[str, Any], config: DataConfig, tokenizer: Tokenizer, eos_ids: Sequence[int], where: str
) -> tuple[Sample | None, int]:
    """A line's sample, None if it has too little to learn, and the tokens it had before it was cut."""
    prompt_key, ids, mask = encode_row(row, tokenizer, eos_ids, where)
    sample = make_sample(prompt_key, ids[: config.max_length], mask[: config.max_length])
    enough = int(sample.loss_mask.sum()) >= max(config.min_answer_tokens, 2)  # one token has no successor to draft
    return sample if enough else None, len(ids)


def make_sample(prompt_key: str, ids: list[int], mask: list[bool]) -> Sample:
    """A sample cut behind its last supervised token."""
    length = max((index + 1 for index, learned in enumerate(mask) if learned), default=0)
    ids, mask = ids[:length], mask[:length]
    content = json.dumps([ids, [int(learned) for learned in mask]], separators=(",", ":"))
    key = hashlib.sha256(content.encode()).hexdigest()[:32]
    return Sample(key, prompt_key, torch.tensor(ids, dtype=torch.int64), torch.tensor(mask, dtype=torch.bool))


def split(samples: Sequence[Sample], share: float, seed: int) -> tuple[list[Sample], list[Sample]]:
    """(training, held out): a prompt is held out iff its hash falls into the lowest `share` of all hashes.

    Held-out samples come in the order of their hash, one for each prompt.
    """
    train: list[Sample] = []
    held_out: dict[float, Sample] = {}
    for sample in samples:
        place = _place(sample.prompt_key, seed)
        if place >= share:
            train.append(sample)
        else:
            held_out.setdefault(place, sample)
    return train, [held_out[place] for place in sorted(held_out)]


def _place(prompt_key: str, seed: int) -> float:
    """A number in 0..1 for a prompt."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{prompt_key}".encode()).digest()[:6], "big") / 2**48


def preview(samples: Sequence[Sample], tokenizer: Tokenizer, console: Console) -> None:
    """Show samples with the supervised tokens coloured."""
    for sample in samples:
        text = Text()
        for ids, learned in _runs(sample):
            text.append(tokenizer.decode(ids), style="bold green" if learned else "dim")
        learned_count = int(sample.loss_mask.sum())
        console.print(Panel(text, title=f"{learned_count} of {len(sample)} tokens supervised", title_align="left"))


def _runs(sample: Sample) -> Iterator[tuple[list[int], bool]]:
    """Neighbouring tokens that are all supervised or all not."""
    pairs = zip(sample.ids.tolist(), sample.loss_mask.tolist(), strict=True)
    for learned, run in groupby(pairs, key=lambda pair: pair[1]):
        yield [token for token, _ in run], learned
