"""Settings of drafters: the shape of a trained one, and of those that need no training."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from blockdraft.config.strict import Strict


class DraftAxes(Strict):
    """What tells drafters apart: DFlash, DFlare (arXiv 2606.02091) and the ablations of both, and their rivals.

    The defaults are DFlash's.  `drafters.block` says what each choice computes; the two families that draft token
    after token, EAGLE-3 (arXiv 2503.01840) and MTP, are in `drafters.chain` and have few choices.
    """

    family: Literal["block", "eagle3", "mtp"] = Field("block", description="eagle3, mtp: each row feeds the next")
    fusion: Literal["shared", "layerwise"] = Field("shared", description="layerwise: each layer mixes the taps itself")
    fusion_norm: Literal["shared", "layerwise"] = Field("shared", description="layerwise: a norm for each layer's mix")
    context_projections: Literal["shared", "separate"] = Field(
        "shared", description="separate: the context has key and value projections of its own"
    )
    injection: Literal["kv", "input", "none"] = Field("kv", description="where the target's features enter, if at all")
    order: Literal["block", "autoregressive"] = Field("block", description="fill masks at once, or token after token")
    anchor_drafts: bool = Field(False, description="True: row k predicts the token at anchor + k + 1")
    markov_rank: int | None = Field(None, gt=0, description="rank of a Markov head (DSpark); None: no such head")
    norm_before_residual: bool = Field(False, description="eagle3: the features are normed before they are added to")

    @model_validator(mode="after")
    def _family_fits(self) -> DraftAxes:
        if self.norm_before_residual and self.family != "eagle3":
            raise ValueError(f"norm_before_residual is for family 'eagle3', not '{self.family}'")
        if self.family == "block":
            return self
        for axis in ("fusion", "fusion_norm", "context_projections", "injection", "order", "markov_rank"):
            if getattr(self, axis) != DraftAxes.model_fields[axis].default:
                raise ValueError(f"{axis} '{getattr(self, axis)}' is for family 'block', not '{self.family}'")
        if not self.anchor_drafts:
            raise ValueError(f"family '{self.family}' drafts from the anchor's own row: set anchor_drafts")
        return self

    @model_validator(mode="after")
    def _axes_fit(self) -> DraftAxes:
        if self.injection != "kv":
            for axis in ("fusion", "context_projections"):
                if getattr(self, axis) != "shared":
                    raise ValueError(f"{axis} '{getattr(self, axis)}' needs injection 'kv', not '{self.injection}'")
        if self.fusion_norm == "layerwise" and self.fusion != "layerwise":
            raise ValueError("fusion_norm 'layerwise' needs fusion 'layerwise': there is one mix to norm")
        if self.order == "autoregressive" and not self.anchor_drafts:
            raise ValueError("order 'autoregressive' drafts from the anchor's own row: set anchor_drafts")
        if self.order == "autoregressive" and self.markov_rank is not None:
            raise ValueError("order 'autoregressive' sees the token before as its input: leave out markov_rank")
        return self

    @property
    def token_by_token(self) -> bool:
        """Whether a block's rows are the tokens themselves, each drafted before the next, and not masks."""
        return self.family != "block" or self.order == "autoregressive"

    @property
    def reads_tokens(self) -> bool:
        """Whether committed tokens are rows of the drafter, and not only what the target said at them."""
        return self.family != "block" or self.injection != "kv"


class DrafterConfig(DraftAxes):
    """The shape of a trained drafter, as of DFlash's (arXiv 2602.06036, sections 3 and 4).

    `tap_ids` are 0-based target layers; a tap is the residual stream *after* that layer.
    """

    hidden_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    vocab_size: int = Field(gt=1)
    block_size: int = Field(ge=2, le=256, description="rows of a block: the anchor and its masks, or drafts")
    mask_token_id: int | None = Field(None, ge=0, description="needed for masks, so by family 'block'")
    tap_ids: tuple[int, ...] = Field(description="none with injection 'none'")
    num_target_layers: int = Field(gt=0)
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 8192
    attention_bias: bool = False
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()
    sliding_window: int | None = Field(None, gt=0)
    is_causal: bool | None = Field(None, description="None: sliding layers causal in the block, full layers not")
    draft_vocab_size: int | None = Field(None, description="rows of a reduced draft head; None: all of the target's")
    input_embedding_scale: float = Field(1.0, gt=0, description="on a block's embeddings (drafters of Gemma targets)")
    output_multiplier: float = Field(1.0, gt=0, description="on the draft logits")
    final_logit_softcapping: float | None = Field(None, gt=0, description="keeps the order of the draft logits")

    @model_validator(mode="after")
    def _consistent(self) -> DrafterConfig:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if bool(self.tap_ids) != (self.injection != "none"):
            wanted = "takes no taps" if self.tap_ids else "needs taps"
            raise ValueError(f"injection '{self.injection}' {wanted}: tap_ids is {list(self.tap_ids)}")
        if not all(0 <= tap < self.num_target_layers for tap in self.tap_ids):
            raise ValueError(f"tap_ids {list(self.tap_ids)} must lie in 0..{self.num_target_layers - 1}")
        if list(self.tap_ids) != sorted(set(self.tap_ids)):
            raise ValueError(f"tap_ids {list(self.tap_ids)} must be increasing and distinct")
        if (self.mask_token_id is None) != (self.family != "block"):
            wanted = "needs a" if self.mask_token_id is None else "has no masks: leave out"
            raise ValueError(f"family '{self.family}' {wanted} mask_token_id")
        if self.mask_token_id is not None and self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id={self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        if self.layer_types and len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries for {self.num_layers} layers")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError("sliding_attention layers need sliding_window")
        if self.draft_vocab_size is not None and not 1 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size} must lie in 2..{self.vocab_size}")
        if self.order == "autoregressive" and self.is_causal is False:
            raise ValueError("order 'autoregressive' is causal in the block: is_causal cannot be false")
        return self

    @model_validator(mode="after")
    def _scales_fit(self) -> DrafterConfig:
        scaled = self.input_embedding_scale != 1.0 or self.output_multiplier != 1.0
        if scaled and (self.reads_tokens or self.token_by_token):
            raise ValueError("input_embedding_scale and output_multiplier need injection 'kv' and order 'block'")
        if self.final_logit_softcapping is not None and self.markov_rank is not None:
            raise ValueError("final_logit_softcapping would come before a Markov head's bias: give one of the two")
        return self

    @model_validator(mode="after")
    def _chain_fits(self) -> DrafterConfig:
        if self.family != "block":
            check_chain(self.family, self.num_layers, len(self.tap_ids), self.layer_types, self.sliding_window)
            if self.is_causal is not None:
                raise ValueError(f"is_causal is for family 'block', not '{self.family}'")
            if self.family == "mtp" and self.tap_ids != (self.num_target_layers - 1,):
                last = self.num_target_layers - 1
                raise ValueError(f"family 'mtp' listens to the target's last layer: tap_ids must be [{last}]")
        return self

    @property
    def num_head_rows(self) -> int:
        """Tokens that can be drafted: the rows of the draft head."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def max_drafts(self) -> int:
        """Tokens one block can draft: every row but the anchor's, or all of them if the anchor's row drafts too."""
        return self.block_size if self.anchor_drafts else self.block_size - 1

    def window(self, layer: int) -> int | None:
        """Keys a row of this layer reaches back over (its own included), or None for all."""
        return self.sliding_window if self.layer_types and self.layer_types[layer] == "sliding_attention" else None

    def causal(self, layer: int) -> bool:
        """Whether a row of this layer is kept from seeing later rows of its own block."""
        if self.token_by_token:
            return True
        return self.is_causal if self.is_causal is not None else self.window(layer) is not None


def check_chain(
    family: str, num_layers: int, num_taps: int, layer_types: tuple[str, ...], sliding_window: int | None
) -> None:
    """ValueError: a shape that a family of chains (eagle3, mtp) does not have."""
    if layer_types or sliding_window is not None:
        name = "layer_types" if layer_types else "sliding_window"
        raise ValueError(f"{name} is for family 'block': the layers of '{family}' see the whole context")
    if family == "eagle3" and num_layers != 1:
        raise ValueError(f"family 'eagle3' is one layer: num_layers is {num_layers}")
    if family == "mtp" and num_taps != 1:
        raise ValueError(f"family 'mtp' listens to one layer, the target's last: {num_taps} taps are asked for")


class NgramConfig(Strict):
    """Drafting by looking up what followed before (Saxena 2023, "Prompt lookup decoding"; the defaults are its own)."""

    max_drafts: int = Field(10, ge=1, le=255)
    longest: int = Field(3, ge=1, description="tokens at the end of the text that are looked for first")
    shortest: int = Field(1, ge=1, description="tokens that must match at least")

    @model_validator(mode="after")
    def _consistent(self) -> NgramConfig:
        if self.shortest > self.longest:
            raise ValueError(f"shortest={self.shortest} is more than longest={self.longest}")
        return self


class DraftModelConfig(Strict):
    """Drafting by a smaller causal language model of its own (Leviathan et al., arXiv 2211.17192)."""

    model: str = Field(min_length=1, description="what names it: a folder, a GGUF file, a Hub id, or a short name")
    max_drafts: int = Field(5, ge=1, le=255)
