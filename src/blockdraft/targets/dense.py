"""Llama, Qwen2 and Qwen3 in layers of our own: the same numbers in fewer steps than transformers takes.

With a few rows and a small model, most of a pass is spent between the products.  Here projections that share an
input are one product, rotary tables are made once per pass, and keys and values go straight into the cache.
Letters: B rows, Q tokens per row in one call, D hidden width, H/G query/key-value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.cache import KVCache
from blockdraft.ops.kernel_layer import KernelLayer, KernelPass, layer_fits
from blockdraft.ops.layers import pack_linears, rms_norm, rotary_tables, rotate
from blockdraft.targets.attention import Step, neighbours
from blockdraft.targets.base import TargetOutput
from blockdraft.targets.graphs import LONGEST, MULTIPLE, CudaRecorder, FixedStep, Graphs, Recorder
from blockdraft.targets.pretrained import PretrainedTarget, decoder_layers, require_fit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The models whose layers are the ones below; whether a layer's window is read from `layer_types`.
FAMILIES = {"LlamaForCausalLM": False, "Qwen2ForCausalLM": True, "Qwen3ForCausalLM": True}
# Those whose frequencies do not depend on the length of what is read.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
PROJECTIONS = tuple(name for names in FUSED.values() for name in names)


class DenseLayer(nn.Module):
    """One decoder layer, made from one of transformers; `window` is how far back it sees."""

    qkv: nn.Module
    out: nn.Module
    gate_up: nn.Module
    down: nn.Module

    def __init__(self, layer: Any, shape: tuple[int, int, int], eps: float, window: int | None) -> None:
        super().__init__()
        self.heads, self.groups, self.head_dim = shape
        self.eps, self.window = eps, window
        self.parts = {name: layer.get_submodule(name).weight.shape[0] for name in PROJECTIONS}
        for fused, names in FUSED.items():
            setattr(self, fused, _fuse([layer.get_submodule(name) for name in names]))
        self.input_norm, self.post_norm = (_detached(layer.get_submodule(name)) for name in NORMS)
        self.head_norms: Tensor | None = None  # [H + G, E]: queries' and keys' in one
        if hasattr(layer.self_attn, "q_norm"):
            query, key = (_detached(layer.get_submodule(name)) for name in HEAD_NORMS)
            self.head_norms = torch.cat([query.expand(self.heads, -1), key.expand(self.groups, -1)])
        self.compiled: KernelLayer | None = None

    def compile_layer(self) -> bool:
        """Have the kernel compute the whole layer from now on; False: it is not made for this one."""
        linears = [getattr(self, fused) for fused in FUSED]
        norms = (self.input_norm, self.post_norm)
        if layer_fits(linears, norms if self.head_norms is None else (*norms, self.head_norms), self.head_dim):
            shape = self.heads, self.groups, self.head_dim
            self.compiled = KernelLayer(linears, norms, self.head_norms, shape, self.eps, self.window)
        return self.compiled is not None

    def forward(self, x: Tensor, index: int, step: Step | FixedStep, tables: tuple[Tensor, Tensor]) -> Tensor:
        """The residual stream x [B, Q, D] after the layer, which is number `index`; writes its keys and values."""
        batch, width, _ = x.shape
        qkv = self.qkv(rms_norm(x, self.input_norm, self.eps)).view(batch, width, -1, self.head_dim)
        turned, value = qkv.split([self.heads + self.groups, self.groups], dim=2)
        if self.head_norms is not None:
            turned = F.rms_norm(turned.float(), (self.head_dim,), None, self.eps).to(x.dtype) * self.head_norms
        query, key = (part.transpose(1, 2) for part in rotate(turned, tables).split([self.heads, self.groups], dim=2))
        step.write(index, key, value.transpose(1, 2))
        mixed = step.attend(index, query, self.head_dim**-0.5, self.window)
        x = x + self.out(mixed.view(batch, width, -1))
        gate, up = self.gate_up(rms_norm(x, self.post_norm, self.eps)).chunk(2, dim=-1)
        result: Tensor = x + self.down(F.silu(gate) * up)
        return result

    def weights(self) -> dict[str, Tensor]:
        """The layer's weights and biases under transformers' names, unpacked anew at each call."""
        found = dict(zip((f"{name}.weight" for name in NORMS), (self.input_norm, self.post_norm), strict=True))
        if self.head_norms is not None:
            found |= {f"{HEAD_NORMS[0]}.weight": self.head_norms[0], f"{HEAD_NORMS[1]}.weight": self.head_norms[-1]}
        for fused, names in FUSED.items():
            sizes = [self.parts[name] for name in names]
            for kind in ("weight", "bias"):
                value = getattr(getattr(self, fused), kind)
                if value is not None:
                    parts = value.detach().split(sizes)
                    found |= {f"{name}.{kind}": part for name, part in zip(names, parts, strict=True)}
        return found


class DenseTarget(PretrainedTarget):
    """A Llama, Qwen2 or Qwen3 of transformers behind the `Target` protocol, run by `DenseLayer`.

    Takes the model apart, so that its weights are never held twice: it is of no use afterwards.  With `pack`,
    linear layers are packed where they are fp32 on the CPU; `storage` float16 then halves what is read.  `recorder`
    records passes of a few tokens, which then are torch's own operations, to replay them; None: CUDA graphs on such a
    device, nothing elsewhere.  ValueError: a model that `obstacle` objects to, that has numbers beyond what `storage`
    can hold, or whose own result is another.
    """

    implementation = "dense"

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        eos_token_ids: Sequence[int] | None = None,
        pack: bool = True,
        storage: torch.dtype | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(model.eval().requires_grad_(False), name, eos_token_ids)
        reason = obstacle(model)
        if reason is not None:
            raise self._refusal(reason)
        if storage is not None:
            self._round_matrices(model, storage)
        ids = self._probe()
        with torch.no_grad():
            expected = model(input_ids=ids[1:], use_cache=False).logits
        decoder, layers = model.get_decoder(), decoder_layers(model)
        assert layers is not None, "the base class has looked"
        self.eps: float = self.config.rms_norm_eps
        self._norm = _detached(decoder.norm)
        # As the model has them: computed from the same settings, by whatever its family does with them.
        self._rotary = (decoder.rotary_emb.inv_freq.float(), float(decoder.rotary_emb.attention_scaling))
        network = nn.ModuleDict({"head": model.get_output_embeddings()})
        for index, window in enumerate(self._layer_windows()):
            network[str(index)] = DenseLayer(layers[index], self._head_counts(), self.eps, window)
            layers[index] = nn.Identity()
        if pack and recorder is None:
            pack_linears(network, storage or torch.float32)
        self._head = network.pop("head")
        self._layers: list[Any] = list(network.values())
        # All of them or none, so that it is one kind of attention.
        self._compiled = all(layer.compile_layer() for layer in self._layers)
        on_cuda = self.info.device.type == "cuda"
        self._recorder = CudaRecorder() if recorder is None and on_cuda else recorder
        self._graphs: WeakKeyDictionary[KVCache, Graphs] = WeakKeyDictionary()
        self._compare(self._through_cache(ids, lambda *inputs: self.forward(*inputs).logits), expected)

    def layer_weights(self, layer: int) -> dict[str, Tensor]:
        """One layer's weights and biases by their usual names, such as `self_attn.q_proj.weight`."""
        found: dict[str, Tensor] = self._layers[layer].weights()
        return found

    @torch.no_grad()
    def forward(self, ids: Tensor, cache: KVCache, rows: Sequence[int], keep_logits: int | None = None) -> TargetOutput:
        """Append ids [B, Q] to the cache slots `rows`; see `Target.forward`.  ValueError: the slot is too small."""
        require_fit(ids, cache, rows, keep_logits)
        batch, width = ids.shape
        if self._recorder is None:
            step = Step(cache, rows, width, self.info.dtype, self.info.device)
            logits, taps = self._run(ids, step, keep_logits)
        else:
            logits, taps = self._run_recorded(ids, cache, rows, keep_logits)
        cache.extend(rows, [width] * batch)
        return TargetOutput(logits, taps)

    def _run(self, ids: Tensor, step: Step | FixedStep, keep_logits: int | None) -> tuple[Tensor, Tensor | None]:
        """Logits and taps; keys and values go into the cache, whose lengths do not change."""
        tables = rotary_tables(step.positions(), *self._rotary, self.info.dtype)
        x = F.embedding(ids, self._embedding).to(self.info.dtype)
        kept: dict[int, Tensor] = {}
        whole = None
        if self._compiled and isinstance(step, Step):
            whole = KernelPass(step.rows, step.starts, step.width, tables)
        for index, layer in enumerate(self._layers):
            if whole is not None:
                x = layer.compiled(x, whole, step.cache.keys[index], step.cache.values[index])
            else:
                x = layer.forward(x, index, step, tables)
            if index in self.tap_ids:
                kept[index] = x
        taps = torch.stack([kept[tap] for tap in self.tap_ids], dim=2) if self.tap_ids else None
        last = x if keep_logits is None else x[:, -keep_logits:]
        return self.head(rms_norm(last, self._norm, self.eps)), taps

    def _run_recorded(
        self, ids: Tensor, cache: KVCache, rows: Sequence[int], keep_logits: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """The same in kernels that are launched at once, where such a pass has come before."""
        assert self._recorder is not None, "the caller has looked"
        width, dtype, device = ids.shape[1], self.info.dtype, self.info.device
        lengths, picked = [cache.lengths[row] for row in rows], neighbours(list(rows))
        slots = min(-(-(max(lengths) + width) // MULTIPLE) * MULTIPLE, cache.keys[0].shape[2])

        def run(ids: Tensor, starts: Tensor, places: Tensor) -> list[Tensor]:
            step = FixedStep(
                cache, starts, places, picked if isinstance(picked, slice) else places, width, slots, dtype
            )
            return [result for result in self._run(ids, step, keep_logits) if result is not None]

        starts, places = (torch.tensor(numbers, device=device) for numbers in (lengths, list(rows)))
        if width > LONGEST:
            logits, *taps = run(ids, starts, places)
        else:
            graphs = self._graphs.setdefault(cache, Graphs(self._recorder))
            key = (tuple(rows), width, slots, keep_logits, self.tap_ids)
            logits, *taps = graphs.run(key, run, ids, starts, places)
        return logits, taps[0] if taps else None

    def _round_matrices(self, model: PreTrainedModel, storage: torch.dtype) -> None:
        """Round every matrix of the model, which so becomes the reference, and keep the tables of tokens as stored."""
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                rounded = parameter.data.to(storage)
                if not bool(rounded.isfinite().all()):
                    raise self._refusal(f"{name} has numbers that {str(storage).removeprefix('torch.')} cannot hold")
                parameter.data = rounded.to(self.info.dtype)
        tied = self._head_weight is self._embedding
        self._embedding = self._embedding.to(storage)
        self._head_weight = self._embedding if tied else self._head_weight.to(storage)
        self.info = replace(self.info, storage=storage)

    def _layer_windows(self) -> list[int | None]:
        if not FAMILIES[self.kind]:
            return [None] * self.info.num_layers
        sliding = [kind == "sliding_attention" for kind in self.config.layer_types]
        return [self.config.sliding_window if slides else None for slides in sliding]


def obstacle(model: PreTrainedModel) -> str | None:
    """Why a model cannot run as a `DenseTarget`, to be read after "because"; None: it can."""
    kind, config = type(model), model.config
    if kind.__name__ not in FAMILIES or not kind.__module__.startswith("transformers."):
        return f"it is none of {', '.join(FAMILIES)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    rope: dict[str, Any] = config.rope_parameters or {}
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        return f"its rotary positions are of type {rope['rope_type']}, not one of {', '.join(ROPE_TYPES)}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "only a part of each head is rotated"
    known = {f"{name}.weight" for name in (*NORMS, *HEAD_NORMS, *PROJECTIONS)}
    known |= {f"{name}.bias" for name in PROJECTIONS}
    for layer in decoder_layers(model) or ():
        unknown = {name for name, _ in layer.named_parameters()} - known
        if unknown:
            return f"it has {min(unknown)} in a layer"
        if any(type(layer.get_submodule(name)) is not nn.Linear for name in PROJECTIONS):
            return "its linear layers are not plain ones"
    return None


def _fuse(linears: list[Any]) -> nn.Linear:
    """One linear layer whose outputs are those of several, one after the other."""
    biases = [linear.bias for linear in linears]
    width = sum(linear.out_features for linear in linears)
    fused = nn.Linear(linears[0].in_features, width, bias=biases[0] is not None, device="meta")
    fused.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    if biases[0] is not None:
        fused.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return fused


def _detached(module: Any) -> Tensor:
    weight: Tensor = module.weight.detach()
    return weight
