"""What a layout has to know of a target: its shape, and where asked for its embedding, its head, its GGUF file.

Letters: V vocabulary, V' rows of a reduced draft head, D hidden width.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from blockdraft.config import ConfigError
from blockdraft.targets.resolve import ALIASES, gguf_file, is_hub_id, resolve_folder

EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "embed_tokens.weight")
HEADS = ("lm_head.weight", "model.lm_head.weight", "language_model.lm_head.weight")


@dataclass(frozen=True)
class TargetCard:
    """A target's shape, read from its config.json; no weights are loaded for it."""

    spec: str
    folder: Path
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_context: int | None
    architectures: tuple[str, ...]
    tied: bool | None  # None: not said, so it is where there is no head
    gguf: Path | None  # the target's own GGUF file, if what names the target is one or brings one

    @property
    def name(self) -> str:
        """What another engine finds the target by: its Hub id, or the absolute path of its folder."""
        if self.spec in ALIASES:
            return ALIASES[self.spec][1]
        return self.spec if is_hub_id(self.spec) else str(self.folder.resolve())

    def embedding(self) -> Tensor:
        """The input embedding table [V, D]."""
        table = self._tensor(EMBEDDINGS)
        if table is None:
            raise ConfigError(f"target '{self.spec}': no embedding under a name known here ({', '.join(EMBEDDINGS)})")
        return table[: self.vocab_size]

    def head_rows(self, ids: Tensor | None = None) -> Tensor:
        """The output projection's rows [V', D]; all of them for None."""
        rows = None if self.tied else self._tensor(HEADS)
        if rows is None and self.tied is False:
            raise ConfigError(f"target '{self.spec}': no head under a name known here ({', '.join(HEADS)})")
        rows = self.embedding() if rows is None else rows
        return rows[: self.vocab_size] if ids is None else rows[ids]

    def _tensor(self, names: tuple[str, ...]) -> Tensor | None:
        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in sorted(names, key=len):
                    if name in file.keys():  # noqa: SIM118  # not a dict
                        tensor: Tensor = file.get_tensor(name)
                        return tensor
        return None


def read_card(spec: str) -> TargetCard:
    """The card of a target named as anywhere else: folder, GGUF file, Hub id or short name.

    ValueError: no such target; ConfigError: its config.json lacks what a card says.
    """
    folder = resolve_folder(spec)
    path = folder / "config.json"
    try:
        whole: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"target '{spec}': {path} is not readable as JSON") from None
    values = whole.get("text_config") or whole

    def need(key: str) -> int:
        if not isinstance(values.get(key), int):
            raise ConfigError(f"target '{spec}': config.json does not say '{key}'")
        return int(values[key])

    tied = whole.get("tie_word_embeddings", values.get("tie_word_embeddings"))
    return TargetCard(
        spec=spec,
        folder=folder,
        num_layers=need("num_hidden_layers"),
        hidden_size=need("hidden_size"),
        vocab_size=need("vocab_size"),
        max_context=values.get("max_position_embeddings"),
        architectures=tuple(whole.get("architectures") or ()),
        tied=tied,
        gguf=gguf_file(spec),
    )
