"""A tiny model folder on disk, with a tokenizer and a chat template, and a drafter folder for it: for commands."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny import tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from blockdraft.config import DrafterConfig
from blockdraft.drafters.block import BlockModel, initialise
from blockdraft.drafters.checkpoint import save_drafter

SPECIAL = ("<bos>", "<eos>", "<|user|>", "<|assistant|>", "<spare>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)


def save_tiny_target(folder: Path, chat: bool = True) -> Path:
    """A byte-level tokenizer and a random Llama of four layers, as `save_pretrained` writes them."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=list(SPECIAL[2:]),
    )
    if chat:
        fast.chat_template = TEMPLATE + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    fast.save_pretrained(folder)
    tiny_llama(vocab_size=272).save_pretrained(folder)
    return folder


def save_tiny_drafter(folder: Path) -> Path:
    """A random drafter for `save_tiny_target`."""
    config = DrafterConfig(
        hidden_size=32,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=64,
        vocab_size=272,
        block_size=4,
        mask_token_id=4,
        tap_ids=(0, 2),
        num_target_layers=4,
    )
    model = BlockModel(config)
    initialise(model, seed=0)
    save_drafter(folder, model, None, {}, torch.float32)
    return folder
