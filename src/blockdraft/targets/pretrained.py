"""What every target made from a transformers model has, whatever computes its layers.

Letters: B rows, Q tokens per row in one call, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.cache import READ_MULTIPLE, KVCache, Layout
from blockdraft.targets.base import TargetInfo, TargetOutput

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENDING = frozenset({"full_attention", "sliding_attention"})
PROBED = 12  # tokens beyond the shortest window, on which a model is compared with itself
# ids, cache, rows -> logits of all ids
Run = Callable[[Tensor, KVCache, Sequence[int]], Tensor]


class PretrainedTarget:
    """The part of `Target` that follows from a model's configuration, embedding and head.

    ValueError: an architecture with layers that it does not compute, or that lacks what a target needs.
    """

    implementation: str  # its name on the command line
    layer_kinds = ATTENDING  # those of `layer_types` that it computes
    _head: nn.Module

    def __init__(self, model: PreTrainedModel, name: str, eos_token_ids: Sequence[int] | None) -> None:
        self.kind, self.config = type(model).__name__, model.config.get_text_config()
        unknown = set(self._kinds()) - self.layer_kinds
        if unknown:
            known = ", ".join(sorted(self.layer_kinds))
            raise self._refusal(f"it has layers of kind {', '.join(sorted(unknown))}, not only {known}")
        layers = decoder_layers(model)
        if layers is None:
            raise self._refusal("it has no list of decoder layers")
        if model.get_output_embeddings() is None:
            raise self._refusal("it has no output projection")
        longest = _longest_context(self.config)
        if longest is None:
            raise self._refusal("its longest context is not known")
        self._embedding: Tensor = model.get_input_embeddings().weight
        self._head_weight: Tensor = model.get_output_embeddings().weight
        self.tap_ids: tuple[int, ...] = ()
        self.info = TargetInfo(
            name=name,
            num_layers=len(layers),
            hidden_size=self._embedding.shape[1],
            vocab_size=self._head_weight.shape[0],
            eos_token_ids=_eos_ids(model) if eos_token_ids is None else tuple(sorted(set(eos_token_ids))),
            max_context=longest,
            dtype=self._embedding.dtype,
            device=self._embedding.device,
        )

    def set_taps(self, tap_ids: Sequence[int]) -> None:
        """Keep the residual stream after these 0-based layers in each later forward.  ValueError: id out of range."""
        for tap in tap_ids:
            if not 0 <= tap < self.info.num_layers:
                raise ValueError(f"tap {tap} is not a layer of {self.info.name} (0..{self.info.num_layers - 1})")
        self.tap_ids = tuple(tap_ids)

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the input embedding table, without any scaling the model adds: [...] -> [..., D]."""
        return F.embedding(ids, self._embedding).to(self.info.dtype)

    def head(self, hidden: Tensor) -> Tensor:
        """The output projection alone, without the final norm: [..., D] -> [..., V]."""
        result: Tensor = self._head(hidden)
        return result

    def head_rows(self, ids: Tensor | None = None) -> Tensor:
        """Rows of the output projection's weight: [V', D]; all of them if `ids` [V'] is None."""
        return (self._head_weight if ids is None else self._head_weight[ids]).to(self.info.dtype)

    def draft_defaults(self) -> dict[str, Any]:
        """Heads, widths and rotary numbers that a drafter takes over from this target, named as in `DrafterConfig`.

        Rotary positions are plain, whatever the target does (published drafters of M-RoPE and partly rotated targets
        have them so).  A target with experts is taken for the dense model that one token sees: as wide as all the
        experts that a token goes to, shared ones included (Qwen3-30B-A3B: 8 of 768, which is 6144).
        """
        heads, groups, head_dim = self._head_counts()
        rope = getattr(self.config, "rope_parameters", None) or {}
        rope = rope.get("full_attention") or rope  # where kinds of layers have frequencies of their own
        return {
            "num_heads": heads,
            "num_kv_heads": groups,
            "head_dim": head_dim,
            "intermediate_size": self._intermediate_size(),
            "rms_norm_eps": float(f"{getattr(self.config, 'rms_norm_eps', None) or 1e-6:.6g}"),
            "rope_theta": rope.get("rope_theta", 10000.0),
            "max_position_embeddings": self.info.max_context,
        }

    def layer_weights(self, layer: int) -> dict[str, Tensor]:
        """One layer's weights and biases by their usual names, such as `self_attn.q_proj.weight`."""
        raise NotImplementedError

    def new_cache(self, slots: int, capacity: int) -> KVCache:
        """An empty cache for this target.  ValueError: `capacity` is more than the target can look back on."""
        return KVCache(*self._layout(slots, capacity))

    def forward(self, ids: Tensor, cache: KVCache, rows: Sequence[int], keep_logits: int | None = None) -> TargetOutput:
        """Append ids [B, Q] to the cache slots `rows`; see `Target.forward`.  ValueError: the slot is too small."""
        raise NotImplementedError

    def _layout(self, slots: int, capacity: int) -> Layout:
        """What a cache is made from.  ValueError: `capacity` is more than the target can look back on."""
        if capacity > self.info.max_context:
            raise ValueError(f"a context of {capacity} tokens exceeds the {self.info.max_context} of {self.info.name}")
        _, groups, head_dim = self._head_counts()
        return self.info.num_layers, slots, capacity, groups, head_dim, self.info.dtype, self.info.device

    def _kinds(self) -> list[str]:
        """What each layer is, as far as the configuration says so."""
        return list(getattr(self.config, "layer_types", None) or ())

    def _head_counts(self) -> tuple[int, int, int]:
        """Query heads, key/value heads and the width of a head."""
        heads: int = self.config.num_attention_heads
        groups = getattr(self.config, "num_key_value_heads", None) or heads
        return heads, groups, getattr(self.config, "head_dim", None) or self.config.hidden_size // heads

    def _intermediate_size(self) -> int:
        """Width of a layer's feed-forward part as one token sees it.  ValueError: the configuration does not say."""
        width, each = self._said("intermediate_size"), self._experts_per_token()
        expert = self._said("moe_intermediate_size", "expert_intermediate_size") or width
        if each is not None and expert is not None:
            shared = self._said("shared_expert_intermediate_size") or (self._said("n_shared_experts") or 0) * expert
            return each * expert + shared
        if width is None:
            raise ValueError(f"the configuration of {self.info.name} does not say how wide its layers are")
        return width

    def _experts_per_token(self) -> int | None:
        return self._said("num_experts_per_tok", "num_experts_per_token", "top_k_experts")

    def _said(self, *names: str) -> int | None:
        """The first of these settings that is a positive number."""
        values = (getattr(self.config, name, None) for name in names)
        return next((value for value in values if isinstance(value, int) and value > 0), None)

    def _windows(self) -> set[int | None]:
        """The windows that the configuration asks for."""
        window = getattr(self.config, "sliding_window", None)
        if not self._kinds():
            return {window}
        return {window if kind == "sliding_attention" else None for kind in self._kinds() if kind in ATTENDING}

    def _probe(self) -> Tensor:
        """Two lines of a few random ids, longer than the shortest window, on which a model is compared with itself."""
        windows = [window for window in self._windows() if window is not None and window < READ_MULTIPLE]
        length = min(PROBED + max(windows, default=0), self.info.max_context)
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.info.vocab_size, (2, length), generator=generator).to(self.info.device)

    def _through_cache(self, ids: Tensor, run: Run) -> Tensor:
        """Logits [1, Q, V] of the second line of a probe, read in two parts, with the first one beside it."""
        length = ids.shape[1]
        cache, split = self.new_cache(2, length), length // 3
        first = run(ids[1:, :split], cache, [1])
        run(ids[:1, :3], cache, [0])
        both = run(torch.stack([ids[0, 3 : 3 + length - split], ids[1, split:]]), cache, [0, 1])
        return torch.cat([first, both[1:]], dim=1)

    def _compare(self, actual: Tensor, expected: Tensor) -> None:
        """ValueError: logits [1, Q, V] through the cache are not those of the model as it came.

        In half precision most of the last tokens count, not all, and less strictly where there are experts: rounding
        sends a token to another one now and then, which is no fault and shows in all that follows.
        """
        actual, expected = actual[0].float(), expected[0].float()
        if self.info.dtype == torch.float32:
            difference, limit = ((actual - expected).norm() / expected.norm()).item(), 1e-3
        else:
            each = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
            difference, limit = each[-PROBED:].median().item(), 5e-2 if self._experts_per_token() is None else 3e-1
        if not difference < limit:
            raise self._refusal(f"through the cache it differs from itself by {difference:.1e}")

    def _refusal(self, reason: str | Exception) -> ValueError:
        line = (str(reason) or repr(reason)).strip().splitlines()[0]
        return ValueError(f"{self.kind} is not supported as a target: {line}")


def require_fit(ids: Tensor, cache: KVCache, rows: Sequence[int], keep_logits: int | None) -> None:
    """Check the arguments of a forward.  ValueError: a slot is too small."""
    batch, width = ids.shape
    assert batch == len(rows) == len(set(rows)), "one line of ids for each distinct row"
    assert width > 0, "at least one token"
    assert keep_logits is None or 0 < keep_logits <= width, "at least one, at most all"
    cache.require(rows, width)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """A model's decoder layers, under the names that transformers has for them; None if it has no such list."""
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if layers is None:
        layers = getattr(decoder, "h", None)
    return layers if isinstance(layers, nn.ModuleList) else None


def _longest_context(config: Any) -> int | None:
    """Positions the model is made for, short of where rotary frequencies would depend on the longest row."""
    longest: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for settings in (rope, *rope.values()):
        if longest and isinstance(settings, dict) and settings.get("rope_type") in ("dynamic", "longrope"):
            longest = min(longest, settings.get("original_max_position_embeddings") or longest)
    return longest


def _eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Every end-of-sequence id of the generation settings and of the configuration."""
    found: set[int] = set()
    for settings in (model.generation_config, model.config.get_text_config()):
        ids = getattr(settings, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return tuple(sorted(found))
