"""Stand-ins whose behaviour is known: a target that is a hash of all it has read, and drafters of every quality."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from blockdraft.cache import KVCache
from blockdraft.drafters.base import Proposal
from blockdraft.ops.sampling import Coupling
from blockdraft.targets.base import TargetInfo, TargetOutput


class HashTarget:
    """Logits that depend on every earlier token of the row: one wrong token in the cache changes all that follow.

    `contexts[cache][slot]` plays the cache's memory: what was read, overwritten from the row's length on.
    """

    def __init__(self, vocab_size: int = 61, eos_token_ids: tuple[int, ...] = (0,), max_context: int = 512) -> None:
        device = torch.device("cpu")
        self.info = TargetInfo("hash", 4, 3, vocab_size, eos_token_ids, max_context, torch.float32, device)
        self.table = torch.randn(1009, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
        self.contexts: WeakKeyDictionary[KVCache, list[list[int]]] = WeakKeyDictionary()
        self.tap_ids: tuple[int, ...] = ()
        self.passes = 0

    def set_taps(self, tap_ids: Sequence[int]) -> None:
        self.tap_ids = tuple(tap_ids)

    def embed(self, ids: Tensor) -> Tensor:
        return ids[..., None].float().expand(*ids.shape, self.info.hidden_size)

    def head(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head_rows().T

    def head_rows(self, ids: Tensor | None = None) -> Tensor:
        rows = self.table[: self.info.hidden_size].T
        return rows if ids is None else rows[ids]

    def new_cache(self, slots: int, capacity: int) -> KVCache:
        cache = KVCache(1, slots, capacity, 1, 1, torch.float32, self.info.device)
        self.contexts[cache] = [[] for _ in range(slots)]
        return cache

    def forward(self, ids: Tensor, cache: KVCache, rows: Sequence[int], keep_logits: int | None = None) -> TargetOutput:
        cache.require(rows, ids.shape[1])
        self.passes += 1
        logits = []
        for row, tokens in zip(rows, ids.tolist(), strict=True):
            context = self.contexts[cache][row]
            del context[cache.lengths[row] :]
            assert len(context) == cache.lengths[row]
            for token in tokens:
                context.append(token)
                logits.append(self.logits(context))
        cache.extend(rows, [ids.shape[1]] * len(rows))
        taps = ids[:, :, None, None].float().expand(*ids.shape, len(self.tap_ids), self.info.hidden_size)
        kept = torch.stack(logits).view(*ids.shape, -1)[:, -keep_logits if keep_logits else 0 :]
        return TargetOutput(kept, taps if self.tap_ids else None)

    def logits(self, context: Sequence[int]) -> Tensor:
        """What comes after a context: [V]."""
        state = 7
        for token in context:
            state = (state * 31 + token + 1) % 1009
        return self.table[state]


class FakeDrafter:
    """A drafter that checks what the engine tells it.  Subclasses draft from what a row has committed."""

    name = "fake"
    tap_ids: tuple[int, ...] = (0, 1)

    def __init__(self, max_drafts: int, vocab_size: int) -> None:
        self.max_drafts, self.block_size, self.vocab_size = max_drafts, max_drafts + 1, vocab_size

    def new_state(self, slots: int, capacity: int) -> list[list[int]]:
        return [[] for _ in range(slots)]

    def reset(self, state: list[list[int]], row: int) -> None:
        state[row] = []

    def observe(
        self, state: list[list[int]], rows: Sequence[int], tokens: Tensor, taps: Tensor | None, counts: Sequence[int]
    ) -> None:
        assert taps is not None and taps.shape[:3] == (*tokens.shape, len(self.tap_ids))
        for row, ids, count in zip(rows, tokens.tolist(), counts, strict=True):
            state[row] += ids[:count]

    def propose(
        self, state: list[list[int]], rows: Sequence[int], anchors: Tensor, coupling: Coupling | None = None
    ) -> Proposal:
        drafts = [self.draft([*state[row], anchor]) for row, anchor in zip(rows, anchors.tolist(), strict=True)]
        return Proposal(torch.tensor(drafts).view(len(rows), self.max_drafts))

    def draft(self, committed: list[int]) -> list[int]:
        raise NotImplementedError


class UnrelatedDrafter(FakeDrafter):
    """Random tokens."""

    def __init__(self, max_drafts: int, vocab_size: int, seed: int = 0) -> None:
        super().__init__(max_drafts, vocab_size)
        self.generator = torch.Generator().manual_seed(seed)

    def draft(self, committed: list[int]) -> list[int]:
        return torch.randint(self.vocab_size, (self.max_drafts,), generator=self.generator).tolist()


class OracleDrafter(FakeDrafter):
    """Knows the answers beforehand and drafts them; `spoil` [P] marks the positions, modulo P, where it errs.

    `sequences` are prompts with their answers.  What a row has committed must be the beginning of one.
    """

    def __init__(
        self, max_drafts: int, vocab_size: int, sequences: Sequence[list[int]], spoil: Sequence[bool] = (False,)
    ) -> None:
        super().__init__(max_drafts, vocab_size)
        self.sequences, self.spoil = sequences, spoil

    def draft(self, committed: list[int]) -> list[int]:
        known = [sequence for sequence in self.sequences if sequence[: len(committed)] == committed]
        assert known, "the engine committed tokens that the target did not choose"
        following = known[0][len(committed) : len(committed) + self.max_drafts]
        following += [0] * (self.max_drafts - len(following))
        return [
            (token + self.spoil[(len(committed) + k) % len(self.spoil)]) % self.vocab_size
            for k, token in enumerate(following)
        ]


class ByteTokenizer:
    """One token per byte, with two special ids behind them; the smallest thing that behaves like a tokenizer."""

    bos, eos = 256, 257
    vocab_size = 258
    chat_template: str | None = "yes"

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert skip_special_tokens and not clean_up_tokenization_spaces
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"
