"""What a run needs before its first step: the drafter's shape, mask token, draft vocabulary and first weights.

Letters: V vocabulary, V' draft vocabulary, D hidden width, T taps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from blockdraft.config import ConfigError, DraftAxes, DrafterConfig, DraftShape
from blockdraft.drafters.block import initialise
from blockdraft.drafters.checkpoint import default_taps, eagle_taps, load_model
from blockdraft.drafters.families import new_model
from blockdraft.drafters.fusion import bell_weights
from blockdraft.drafters.head import draft_index
from blockdraft.drafters.layers import BlockLayer
from blockdraft.drafters.network import DraftNetwork
from blockdraft.targets.base import Target
from blockdraft.train.chats import Tokenizer
from blockdraft.train.data import Dataset, Sample
from blockdraft.train.features import Features


class Teachable(Target, Protocol):
    """A target that a drafter can be modelled on."""

    def draft_defaults(self) -> dict[str, Any]:
        """Heads, widths and rotary numbers of the target, under the names of `DrafterConfig`."""
        ...

    def layer_weights(self, layer: int) -> dict[str, Tensor]:
        """One layer's weights by their usual names (`self_attn.q_proj.weight`, `mlp.up_proj.weight`, ...)."""
        ...


@dataclass(frozen=True)
class Draft:
    """A drafter about to be trained; notes go into its provenance."""

    model: DraftNetwork
    draft_ids: Tensor | None
    notes: dict[str, Any] = field(default_factory=dict)


def make_draft(shape: DraftShape, target: Teachable, dataset: Dataset, tokenizer: Tokenizer, seed: int) -> Draft:
    """Everything from the recipe, the target and the data."""
    samples = dataset.train + dataset.held_out
    highest = max(int(sample.ids.max()) for sample in samples)
    if highest >= target.info.vocab_size:
        raise ConfigError(f"the data has token {highest}, beyond the vocabulary of '{target.info.name}'")
    vocabulary, notes = target.info.vocab_size, dict[str, Any]()
    mask_id = draft_ids = None
    if shape.family == "block":
        spare = spare_tokens(tokenizer, vocabulary, target.info.eos_token_ids)
        mask_id = notes["mask_token_id"] = choose_mask_token(shape.mask_token_id, spare, samples, vocabulary)
    if shape.draft_vocab_size is not None:
        size = shape.draft_vocab_size
        draft_ids, coverage = draft_vocabulary(dataset.train, size, vocabulary, target.info.eos_token_ids)
        notes["draft_vocabulary_coverage"] = round(coverage, 6)
    model = new_model(drafter_config(shape, target, mask_id))
    initialise(model, seed)
    if model.lm_head is not None:
        model.lm_head.load_state_dict({"weight": target.head_rows(draft_ids)})
    if shape.warm_start is not None:
        _copy_weights(model, draft_ids, shape.warm_start)
    else:
        if shape.init == "target":
            copy_target(model, target)
        start_context(model, shape)
    return Draft(model, draft_ids, {"parameters": sum(p.numel() for p in model.parameters()), **notes})


def recipe_taps(shape: DraftShape, num_target_layers: int) -> tuple[int, ...]:
    """The target layers that a recipe's drafter listens to."""
    if shape.tap_ids:
        return shape.tap_ids
    if shape.family == "mtp":
        return (num_target_layers - 1,)
    if shape.family == "eagle3" and shape.num_taps == 3:
        return eagle_taps(num_target_layers)
    return default_taps(num_target_layers, shape.num_taps)


def drafter_config(shape: DraftShape, target: Teachable, mask_token_id: int | None) -> DrafterConfig:
    """The recipe's shape; what it leaves open is the target's."""
    info, defaults = target.info, target.draft_defaults()
    if shape.intermediate_size is not None:
        defaults = {**defaults, "intermediate_size": shape.intermediate_size}
    values = {
        **defaults,
        "hidden_size": info.hidden_size,
        "vocab_size": info.vocab_size,
        "num_target_layers": info.num_layers,
        **{axis: getattr(shape, axis) for axis in DraftAxes.model_fields},
        "num_layers": shape.num_layers,
        "block_size": shape.block_size,
        "mask_token_id": mask_token_id,
        "tap_ids": () if shape.injection == "none" else recipe_taps(shape, info.num_layers),
        "layer_types": shape.layer_types,
        "sliding_window": shape.sliding_window,
        "draft_vocab_size": shape.draft_vocab_size,
    }
    return DrafterConfig.parse(values, "drafter")


def spare_tokens(tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> list[int]:
    """Ids that never stand in text, best first: table rows that no token has, then special tokens without a duty."""
    duties = set(eos_ids) | {tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    template = tokenizer.chat_template or ""
    special = [
        token
        for token, added in sorted(tokenizer.added_tokens_decoder.items(), reverse=True)
        if added.special and token not in duties and added.content not in template
    ]
    return [*range(len(tokenizer), vocab_size), *special]


def choose_mask_token(wanted: int | None, spare: Sequence[int], samples: Sequence[Sample], vocab_size: int) -> int:
    """The token that stands for "not known yet": it must never occur in the data.  Raises ConfigError."""
    used = count_tokens((sample.ids for sample in samples), vocab_size) > 0
    if wanted is not None:
        if not 0 <= wanted < vocab_size:
            raise ConfigError(f"drafter.mask_token_id={wanted} is outside the vocabulary of {vocab_size}")
        if used[wanted]:
            raise ConfigError(f"drafter.mask_token_id={wanted} occurs in the training data; choose an unused token")
        return wanted
    for token in spare:
        if 0 <= token < vocab_size and not used[token]:
            return token
    raise ConfigError("no reserved token is unused in the data: set drafter.mask_token_id")


def draft_vocabulary(
    samples: Sequence[Sample], size: int, vocab_size: int, eos_ids: Sequence[int]
) -> tuple[Tensor, float]:
    """The `size` most frequent tokens with every end token, ascending [V'], and the share of the answers they cover.

    Prompts are counted too: names and numbers of a question come back in its answer.
    """
    if not len(eos_ids) < size <= vocab_size:
        raise ConfigError(f"drafter.draft_vocab_size={size} must lie in {len(eos_ids) + 1}..{vocab_size}")
    ranked = count_tokens((sample.ids for sample in samples), vocab_size)
    ranked[list(eos_ids)] = ranked.sum() + 1  # ahead of all
    kept = ranked.sort(descending=True, stable=True).indices[:size].sort().values
    answers = count_tokens((sample.ids[sample.loss_mask] for sample in samples), vocab_size)
    return kept, float(answers[kept].sum() / answers.sum())


def count_tokens(parts: Any, vocab_size: int) -> Tensor:
    """How often each id occurs: [V]."""
    return torch.cat([part.flatten() for part in parts]).bincount(minlength=vocab_size)


def inherited_layers(family: str, num_target_layers: int, count: int) -> tuple[int, ...]:
    """The target layers that draft layers start from: those that read the default taps, or (MTP) the last ones."""
    if family == "mtp":
        return tuple(range(max(num_target_layers - count, 0), num_target_layers))
    return tuple(tap + 1 for tap in default_taps(num_target_layers, count))


@torch.no_grad()
def copy_target(model: DraftNetwork, target: Teachable) -> None:
    """Start the layers as copies of evenly spread target layers, and a shared fusion as the mean of what it fuses.

    What has no counterpart in the target stays as it is: the per-head norms in most, separate context projections
    in all.  ConfigError: the shapes differ.
    """
    config, layers = model.config, cast("Sequence[BlockLayer]", model.layers)
    sources = inherited_layers(config.family, target.info.num_layers, len(layers))
    for layer, source in zip(layers, sources, strict=True):
        weights = target.layer_weights(source)
        for name, parameter in layer.named_parameters():
            if name not in weights:
                if name.endswith(("q_norm.weight", "k_norm.weight", "_proj_target.weight", "_proj_target.bias")):
                    continue
                raise ConfigError(f"drafter.init=target: layer {source} of the target has no '{name}'")
            if weights[name].shape != parameter.shape:
                found, expected = list(weights[name].shape), list(parameter.shape)
                raise ConfigError(f"drafter.init=target: '{name}' is {found} in the target, {expected} in the drafter")
            parameter.copy_(weights[name])
    if config.fusion == "shared" and config.tap_ids:
        fusion = cast("nn.Linear", model.fc).weight
        parts = fusion.shape[1] // config.hidden_size
        fusion.copy_(torch.eye(config.hidden_size).repeat(1, parts) / parts)


@torch.no_grad()
def start_context(model: DraftNetwork, shape: DraftShape) -> None:
    """Where the mixes of a layerwise fusion and separate context projections start, if not as `initialise` has it."""
    if shape.fusion_init == "bell":
        weights = cast("Tensor", model.layer_fusion_weights)
        weights.copy_(bell_weights(*weights.shape))
    if shape.context_init == "copied":
        for layer in cast("Iterable[BlockLayer]", model.layers):
            attention = layer.self_attn
            attention.k_proj_target.load_state_dict(attention.k_proj.state_dict())
            attention.v_proj_target.load_state_dict(attention.v_proj.state_dict())


@torch.no_grad()
def whiten_fusion(model: DraftNetwork, features: Features, samples: Sequence[Sample], seed: int) -> None:
    """Start the fusion as a random mix of taps that are centred and scaled to one, channel by channel.

    Most of a residual stream's size is the same for all tokens and sits in a few channels, and its deeper
    layers are many times larger; a plain random mix, once normed, passes on little else.  The scale goes into
    the columns of `fc`, and the mean is projected out along the direction that costs the signal least: no bias.
    """
    fusion = cast("nn.Linear", model.fc).weight
    answers = torch.cat([features.batch([one]).taps[0].flatten(1)[one.loss_mask[:-1]] for one in samples]).cpu()
    mean, scale = answers.mean(dim=0), answers.std(dim=0).clamp(min=1e-6)
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(fusion.shape, generator=generator) * len(mean) ** -0.5 / scale
    centre = mean / scale**2
    centre = centre / (centre @ mean).clamp(min=1e-6)
    fusion.copy_(mix - (mix @ mean)[:, None] * centre)


@torch.no_grad()
def _copy_weights(model: DraftNetwork, draft_ids: Tensor | None, where: str) -> None:
    """Go on from the trained drafter in a folder.

    A draft vocabulary does not matter where the head is the target's.  A head of the drafter's own goes on with the
    tokens that it knows, and what it does not know starts as the target's; a Markov head starts anew.  Which token a
    row of a block drafts may change: no weight has another shape for it, and it is soon learned.
    """
    source, source_ids = load_model(where)
    shapes = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
    axes = tuple(axis for axis in DraftAxes.model_fields if axis not in ("markov_rank", "anchor_drafts"))
    for key in (*shapes, *axes, "attention_bias", "tap_ids", "rope_theta", "rope_scaling"):
        if getattr(model.config, key) != getattr(source.config, key):
            ours, theirs = getattr(model.config, key), getattr(source.config, key)
            raise ConfigError(f"drafter.warm_start={where}: {key} is {theirs} there and {ours} here")
    tables = ("markov_head.", "lm_head.")
    kept = {name: value for name, value in source.state_dict().items() if not name.startswith(tables)}
    missing, unknown = model.load_state_dict(kept, strict=False)
    others = [*unknown, *(name for name in missing if not name.startswith(tables))]
    if others:
        raise ConfigError(f"drafter.warm_start={where}: '{others[0]}' is in one of the two drafters only")
    if model.lm_head is not None and source.lm_head is not None:
        wanted = torch.arange(model.config.vocab_size) if draft_ids is None else draft_ids
        known = draft_index(source_ids, model.config.vocab_size, torch.device("cpu"))[wanted]
        model.lm_head.weight[known >= 0] = source.lm_head.weight[known[known >= 0]]
