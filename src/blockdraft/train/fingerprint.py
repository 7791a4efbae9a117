"""What a drafter was trained on, small enough for its provenance: by it, another template or another target shows.

Letters: S tokens of a sample, T taps, D hidden width.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.text import encode_chat
from blockdraft.train.chats import Tokenizer
from blockdraft.train.data import Sample
from blockdraft.train.features import Features

# Turns, a system prompt, digits, code and another script: whatever templates and tokenizers treat each in their way.
PROBE = [
    {"role": "user", "content": "Add 1,234 and 56 in Python: x = f(1)\n"},
    {"role": "assistant", "content": "It is 1290."},
    {"role": "user", "content": "Grüße, 你好!"},
]
SAMPLES = 32


def template_fingerprint(tokenizer: Tokenizer) -> str | None:
    """A hash of a fixed conversation's ids, as the tokenizer and its chat template make them; None: no template."""
    try:
        ids = encode_chat(tokenizer, PROBE)
    except ValueError:
        return None
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]


def tap_sizes(features: Features, samples: Sequence[Sample]) -> list[float]:
    """The root mean square of each tap [T] over the answers of the first few samples."""
    sizes = [_sizes(features.batch([one]).taps[0], one.loss_mask[:-1]) for one in samples[:SAMPLES]]
    return [round(float(size), 4) for size in torch.stack(sizes).mean(dim=0)]


def _sizes(taps: Tensor, answer: Tensor) -> Tensor:
    """taps [S - 1, T, D] -> [T]."""
    return taps[answer.to(taps.device)].float().pow(2).mean(dim=(0, 2)).sqrt().cpu()
