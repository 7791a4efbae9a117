"""Any Hugging Face causal language model as a target.

The model's own layers run; what is replaced is where keys and values are kept (our slots with a length per
row) and how attention is computed (`attention.attend`).  Everything about one forward pass travels in a `Step`,
handed through transformers' keyword arguments, so nothing is read from a global.
Letters: B rows, Q tokens per row in one call, T taps, D hidden width, V vocabulary, G key/value heads, E head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import logging

from blockdraft.cache import READ_MULTIPLE, KVCache
from blockdraft.ops.layers import pack_linears
from blockdraft.targets.attention import Step, attend
from blockdraft.targets.base import TargetInfo, TargetOutput

ATTENTION = "blockdraft"
KNOWN_LAYERS = {"full_attention", "sliding_attention"}


class StepCache(Cache):
    """What transformers sees as its cache for one forward pass: it writes to ours and hands out whole slots."""

    def __init__(self, step: Step) -> None:
        super().__init__(layers=[])
        self.step = step
        self.written: set[int] = set()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store [B, G, Q, E] of one layer; returns the layer's whole memory, from which `attend` reads its rows."""
        step, cache = self.step, self.step.cache
        room = cache.keys[layer_idx]
        expected = (len(step.rows), room.shape[1], step.width, room.shape[3])
        if key_states.shape != expected or value_states.shape != expected:
            shapes = f"{list(key_states.shape)} and {list(value_states.shape)}"
            raise ValueError(f"layer {layer_idx} caches keys and values {shapes}, not {list(expected)}")
        cache.write(layer_idx, step.rows, step.starts, key_states, value_states)
        self.written.add(layer_idx)
        return room, cache.values[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002  # transformers' signature
        """The longest row; positions are passed explicitly, so models only test it for zero."""
        return max(self.step.starts)


AttentionInterface.register(ATTENTION, attend)


class HFTarget:
    """A `transformers` causal language model behind the `Target` protocol.

    Changes the model in place: frozen, in evaluation mode, with our attention and, with `pack`, with packed
    linear layers where they are fp32 on the CPU.  ValueError: an architecture whose state is not plain keys
    and values, or whose result through our cache differs from its own.
    """

    def __init__(
        self, model: PreTrainedModel, name: str, eos_token_ids: Sequence[int] | None = None, pack: bool = True
    ) -> None:
        model.eval().requires_grad_(False)
        self.model, self.config = model, model.config.get_text_config()
        self._refuse_unknown_layers()
        self._layers = _decoder_layers(model)
        if model.get_output_embeddings() is None:
            raise ValueError(f"{type(model).__name__} is not supported as a target: it has no output projection")
        self._embedding: Tensor = model.get_input_embeddings().weight
        self._head_weight: Tensor = model.get_output_embeddings().weight
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._limits_logits = "logits_to_keep" in parameters
        self._handles: list[RemovableHandle] = []
        self._kept: dict[int, Tensor] = {}
        self.tap_ids: tuple[int, ...] = ()
        self.info = TargetInfo(
            name=name,
            num_layers=len(self._layers),
            hidden_size=self._embedding.shape[1],
            vocab_size=self._head_weight.shape[0],
            eos_token_ids=_eos_ids(model) if eos_token_ids is None else tuple(sorted(set(eos_token_ids))),
            max_context=_longest_context(model),
            dtype=self._embedding.dtype,
            device=self._embedding.device,
        )
        self._adapt(pack)
        self._head: nn.Module = model.get_output_embeddings()

    def set_taps(self, tap_ids: Sequence[int]) -> None:
        """Keep the residual stream after these 0-based layers in each later forward.  ValueError: id out of range."""
        for tap in tap_ids:
            if not 0 <= tap < self.info.num_layers:
                raise ValueError(f"tap {tap} is not a layer of {self.info.name} (0..{self.info.num_layers - 1})")
        for handle in self._handles:
            handle.remove()
        self.tap_ids = tuple(tap_ids)
        self._kept.clear()
        self._handles = [self._layers[tap].register_forward_hook(partial(self._keep, tap)) for tap in set(tap_ids)]

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the input embedding table, without any scaling the model adds: [...] -> [..., D]."""
        return F.embedding(ids, self._embedding)

    def head(self, hidden: Tensor) -> Tensor:
        """The output projection alone, without the final norm: [..., D] -> [..., V]."""
        result: Tensor = self._head(hidden)
        return result

    def head_rows(self, ids: Tensor | None = None) -> Tensor:
        """Rows of the output projection's weight: [V', D]; all of them if `ids` [V'] is None."""
        return self._head_weight if ids is None else self._head_weight[ids]

    def draft_defaults(self) -> dict[str, Any]:
        """Heads, widths and rotary numbers that a drafter takes over from this target, named as in `DrafterConfig`."""
        config = self.config
        rope = getattr(config, "rope_parameters", None) or {}
        heads = config.num_attention_heads
        return {
            "num_heads": heads,
            "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
            "intermediate_size": config.intermediate_size,
            "rms_norm_eps": float(f"{getattr(config, 'rms_norm_eps', 1e-6):.6g}"),
            "rope_theta": rope.get("rope_theta", 10000.0),
            "max_position_embeddings": self.info.max_context,
        }

    def layer_weights(self, layer: int) -> dict[str, Tensor]:
        """One layer's weights and biases by their usual names, such as `self_attn.q_proj.weight`."""
        found: dict[str, Tensor] = {}
        for name, module in self._layers[layer].named_modules():
            for kind in ("weight", "bias"):
                value = getattr(module, kind, None)
                if isinstance(value, Tensor):
                    found[f"{name}.{kind}"] = value.detach()
        return found

    def new_cache(self, slots: int, capacity: int) -> KVCache:
        """An empty cache for this target.  ValueError: `capacity` is more than the target can look back on."""
        if capacity > self.info.max_context:
            raise ValueError(f"a context of {capacity} tokens exceeds the {self.info.max_context} of {self.info.name}")
        heads = self.config.num_attention_heads
        groups = getattr(self.config, "num_key_value_heads", None) or heads
        head_dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // heads
        return KVCache(self.info.num_layers, slots, capacity, groups, head_dim, self.info.dtype, self.info.device)

    @torch.no_grad()
    def forward(self, ids: Tensor, cache: KVCache, rows: Sequence[int], keep_logits: int | None = None) -> TargetOutput:
        """Append ids [B, Q] to the cache slots `rows`; see `Target.forward`.  ValueError: the slot is too small."""
        logits, _, _ = self._run(ids, cache, rows, keep_logits)
        taps = torch.stack([self._kept[tap] for tap in self.tap_ids], dim=2) if self.tap_ids else None
        self._kept.clear()
        return TargetOutput(logits, taps)

    def _run(
        self, ids: Tensor, cache: KVCache, rows: Sequence[int], keep_logits: int | None
    ) -> tuple[Tensor, Step, StepCache]:
        batch, width = ids.shape
        assert batch == len(rows) == len(set(rows)), "one line of ids for each distinct row"
        assert width > 0, "at least one token"
        assert keep_logits is None or 0 < keep_logits <= width, "at least one, at most all"
        cache.require(rows, width)
        step = Step(cache, rows, width, self.info.dtype, self.info.device)
        view = StepCache(step)
        options: dict[str, Any] = {self._cache_argument: view, "blockdraft": step}
        if keep_logits is not None and self._limits_logits:
            options["logits_to_keep"] = keep_logits
        logits = self.model(input_ids=ids, position_ids=step.positions(), use_cache=True, **options).logits
        cache.extend(rows, [width] * batch)
        return logits if keep_logits is None else logits[:, -keep_logits:], step, view

    def _keep(self, tap: int, _layer: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
        self._kept[tap] = output[0] if isinstance(output, tuple) else output

    def _refuse_unknown_layers(self) -> None:
        unknown = set(getattr(self.config, "layer_types", None) or ()) - KNOWN_LAYERS
        if unknown:
            kinds = ", ".join(sorted(unknown))
            kind = type(self.model).__name__
            raise ValueError(f"{kind} is not supported as a target: it has layers of kind {kinds}, not only attention")

    def _windows(self) -> set[int | None]:
        """The windows that the configuration asks for."""
        window = getattr(self.config, "sliding_window", None)
        types = getattr(self.config, "layer_types", None)
        if not types:
            return {window}
        return {window if kind == "sliding_attention" else None for kind in types}

    @torch.no_grad()
    def _adapt(self, pack: bool) -> None:
        """Put our attention (and packed layers) in, and compare a few tokens with the model as it came."""
        windows = self._windows()
        length = 12 + max((window for window in windows if window is not None and window < READ_MULTIPLE), default=0)
        length = min(length, self.info.max_context)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.info.vocab_size, (2, length), generator=generator).to(self.info.device)
        kind = type(self.model).__name__
        try:
            expected = self.model(input_ids=ids[1:], use_cache=False).logits.float()
            self.model.set_attn_implementation(ATTENTION)
            if pack:
                pack_linears(self.model)
            cache, split = self.new_cache(2, length), length // 3
            parts = [self._run(ids[1:, :split], cache, [1], None), self._run(ids[:1, :3], cache, [0], None)]
            parts.append(self._run(torch.stack([ids[0, 3 : 3 + length - split], ids[1, split:]]), cache, [0, 1], None))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
            reason = (str(error) or repr(error)).strip().splitlines()[0]
            raise ValueError(f"{kind} is not supported as a target: {reason}") from error
        actual = torch.cat([parts[0][0], parts[2][0][1:]], dim=1).float()
        for _, step, view in parts:
            if len(view.written) != self.info.num_layers or set(step.masks) != windows:
                raise ValueError(f"{kind} is not supported as a target: not every layer uses its own key/value cache")
        difference = ((actual - expected).norm() / expected.norm()).item()
        if not difference < (1e-3 if self.info.dtype == torch.float32 else 5e-2):
            raise ValueError(
                f"{kind} is not supported as a target: through the cache it differs from itself by {difference:.1e}"
            )


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if layers is None:
        layers = getattr(decoder, "h", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"{type(model).__name__} is not supported as a target: it has no list of decoder layers")
    return layers


def _longest_context(model: PreTrainedModel) -> int:
    """Positions the model is made for, short of where rotary frequencies would depend on the longest row."""
    config = model.config.get_text_config()
    longest: int | None = getattr(config, "max_position_embeddings", None)
    if longest is None:
        raise ValueError(f"{type(model).__name__} is not supported as a target: its longest context is not known")
    rope = getattr(config, "rope_parameters", None) or {}
    for settings in (rope, *rope.values()):
        if isinstance(settings, dict) and settings.get("rope_type") in ("dynamic", "longrope"):
            longest = min(longest, settings.get("original_max_position_embeddings") or longest)
    return longest


def _eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Every end-of-sequence id of the generation settings and of the configuration."""
    found: set[int] = set()
    for settings in (model.generation_config, model.config.get_text_config()):
        ids = getattr(settings, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return tuple(sorted(found))


def load_reference(folder: str | Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model of a folder as transformers itself runs it: what a benchmark compares with.  Nothing is swapped.

    Its generation settings are emptied, so that `reference_generate` decides all of them.
    """
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True, local_files_only=True)
    finally:
        if shown:
            logging.enable_progress_bar()
    reference: PreTrainedModel = model.to(device).eval().requires_grad_(False)
    reference.generation_config = GenerationConfig()
    return reference


@torch.inference_mode()
def reference_generate(
    model: PreTrainedModel, ids: Sequence[int], max_tokens: int, eos_ids: Sequence[int], temperature: float, seed: int
) -> list[int]:
    """New tokens of transformers' own `generate`, with nothing in the way but the temperature."""
    torch.manual_seed(seed)
    prompt = torch.tensor([list(ids)], device=model.device)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0.0 else {}
    settings = GenerationConfig(
        max_new_tokens=max_tokens, eos_token_id=list(eos_ids) or None, pad_token_id=next(iter(eos_ids), 0), **sampling
    )
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
    tokens: list[int] = output[0, len(ids) :].tolist()
    return tokens
