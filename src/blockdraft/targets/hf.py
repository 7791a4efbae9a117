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
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import logging

from blockdraft.cache import KVCache, LayerShape
from blockdraft.ops.layers import pack_linears
from blockdraft.targets.attention import Step, attend
from blockdraft.targets.base import TargetOutput
from blockdraft.targets.deltanet import find_delta_nets, swap_delta_net
from blockdraft.targets.experts import pack_experts
from blockdraft.targets.pretrained import ATTENDING, PretrainedTarget, Run, decoder_layers, require_fit
from blockdraft.targets.recurrent import RecurrentCache, State

ATTENTION, RECURRENT = "blockdraft", "linear_attention"


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
        memories = cache.keys[layer_idx], cache.values[layer_idx]
        for given, memory in zip((key_states, value_states), memories, strict=True):
            expected = [len(step.rows), memory.shape[1], step.width, memory.shape[3]]
            if list(given.shape) != expected:
                raise ValueError(f"layer {layer_idx} caches {list(given.shape)}, not {expected}")
        cache.write(layer_idx, step.rows, step.starts, key_states, value_states)
        self.written.add(layer_idx)
        return memories

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002  # transformers' signature
        """The longest row; positions are passed explicitly, so models only test it for zero."""
        return max(self.step.starts)


AttentionInterface.register(ATTENTION, attend)


class HFTarget(PretrainedTarget):
    """A `transformers` causal language model behind the `Target` protocol.

    Changes the model in place: frozen, in evaluation mode, with our attention and, with `pack`, with packed
    linear layers and experts where they are fp32 on the CPU.  ValueError: an architecture whose state is neither
    keys and values nor that of a gated delta net, or whose result through our cache differs from its own.
    """

    implementation = "hf"
    layer_kinds = ATTENDING | {RECURRENT}

    def __init__(
        self, model: PreTrainedModel, name: str, eos_token_ids: Sequence[int] | None = None, pack: bool = True
    ) -> None:
        super().__init__(model.eval().requires_grad_(False), name, eos_token_ids)
        layers = decoder_layers(model)
        assert layers is not None, "the base class has looked"
        self.model, self._layers = model, layers
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._limits_logits = "logits_to_keep" in parameters
        self._handles: list[RemovableHandle] = []
        self._kept: dict[int, Tensor] = {}
        self._shapes: dict[int, LayerShape] = {}  # of the layers that keep keys and values
        self._empty: dict[int, State] = {}  # of the recurrent layers
        self._adapt(pack)
        self._head = model.get_output_embeddings()

    def set_taps(self, tap_ids: Sequence[int]) -> None:
        """Keep the residual stream after these 0-based layers in each later forward.  ValueError: id out of range."""
        super().set_taps(tap_ids)
        for handle in self._handles:
            handle.remove()
        self._kept.clear()
        self._handles = [self._layers[tap].register_forward_hook(partial(self._keep, tap)) for tap in set(tap_ids)]

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
        layout = self._layout(slots, capacity)
        if self._empty:
            return RecurrentCache(layout, self._shapes, self._empty)
        return KVCache(*layout, shapes=self._shapes)

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
        require_fit(ids, cache, rows, keep_logits)
        batch, width = ids.shape
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

    @torch.no_grad()
    def _adapt(self, pack: bool) -> None:
        """Put our attention (and packed layers) in, and compare a few tokens with the model as it came."""
        ids = self._probe()

        def run(ids: Tensor, cache: KVCache, rows: Sequence[int]) -> Tensor:
            logits, step, view = self._run(ids, cache, rows, None)
            steps.append((step, view))
            return logits

        steps: list[tuple[Step, StepCache]] = []
        try:
            nets = find_delta_nets(self._layers)
            if sorted(nets) != [layer for layer, kind in enumerate(self._kinds()) if kind == RECURRENT]:
                raise ValueError("its linear attention is not a gated delta net as Qwen3-Next and Qwen3.5 have it")
            own = self.model(input_ids=ids[1:], use_cache=True)
            expected, self._shapes = own.logits, _memory_shapes(own[self._cache_argument])
            self.model.set_attn_implementation(ATTENTION)
            self._empty = {layer: swap_delta_net(self._layers[layer], name).empty() for layer, name in nets.items()}
            if pack:
                pack_linears(self.model)
                pack_experts(self.model)
            actual = self._through_cache(ids, run)
        except ValueError as error:
            raise self._refusal(error) from error
        except (TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
            raise self._refusal(f"its code does not run with our cache and attention: {error or error!r}") from error
        # The last layers of some read what an earlier one has written.
        keeping = self.info.num_layers - (getattr(self.config, "num_kv_shared_layers", None) or 0)
        for step, view in steps:
            if view.written != set(range(keeping)) or set(step.masks) != self._windows():
                raise self._refusal("not every layer uses its own key/value cache")
        self._compare(actual, expected)
        self._check_taps(ids, run)

    def _head_counts(self) -> tuple[int, int, int]:
        """Query heads, key/value heads and the width of a head, of the first layer that attends."""
        groups, head_dim, _ = self._shapes[min(self._shapes)]
        return self.config.num_attention_heads, groups, head_dim

    def _check_taps(self, ids: Tensor, run: Run) -> None:
        """ValueError: what comes out of a layer is not one vector per token, as the drafters take it to be."""
        self.set_taps(sorted({0, self.info.num_layers - 1}))
        run(ids, self.new_cache(*ids.shape), [0, 1])
        shapes = {tuple(getattr(kept, "shape", ())) for kept in self._kept.values()}
        self.set_taps(())
        if shapes != {(*ids.shape, self.info.hidden_size)}:
            raise self._refusal(f"its layers hand on {list(min(shapes))}, not one vector of {self.info.hidden_size}")


def _memory_shapes(cache: Any) -> dict[int, LayerShape]:
    """What each layer of transformers' own cache keeps.  ValueError: none keeps keys and values."""
    kept = (
        (index, getattr(layer, "keys", None), getattr(layer, "values", None))
        for index, layer in enumerate(cache.layers)
    )
    shapes = {
        index: (keys.shape[1], keys.shape[-1], values.shape[-1])
        for index, keys, values in kept
        if isinstance(keys, Tensor) and isinstance(values, Tensor)
    }
    if not shapes:
        raise ValueError("no layer keeps keys and values")
    return shapes


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
