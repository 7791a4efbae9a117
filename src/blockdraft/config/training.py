"""A recipe: the drafter it asks for, its data, its loss, its optimiser."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from blockdraft.config.drafter import DraftAxes, check_chain
from blockdraft.config.strict import Strict


class DataConfig(Strict):
    """What a drafter learns from."""

    files: tuple[str, ...] = Field(min_length=1, description="JSONL files of chats, or of prompt/response pairs")
    held_out: float = Field(0.02, ge=0.0, lt=1.0, description="share of the prompts kept for the acceptance check")
    max_length: int = Field(1024, ge=16)
    min_answer_tokens: int = Field(16, ge=1, description="shorter answers are left out")
    limit: int | None = Field(None, ge=1)


class FeatureConfig(Strict):
    """Where the target's taps come from."""

    mode: Literal["online", "shards"] = "shards"
    folder: str | None = Field(None, description="shards' folder; None: beside the run")
    teacher_top_k: int = Field(0, ge=0, le=256, description="target probabilities kept per token, for soft labels")
    batch_tokens: int = Field(4096, ge=64)


class DraftShape(DraftAxes):
    """The drafter a recipe asks for; what is None is derived from the target.

    A preset sets what its paper sets, and each of its settings can be given another value beside it.
    """

    preset: Literal["dflash", "dflare", "eagle3", "mtp"] = "dflash"
    num_layers: int = Field(5, ge=1)
    block_size: int = Field(16, ge=2)
    num_taps: int = Field(5, ge=1)
    tap_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    intermediate_size: int | None = None
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()
    sliding_window: int | None = None
    draft_vocab_size: int | None = Field(None, description="most frequent tokens of the data kept in the draft head")
    init: Literal["random", "target"] = Field("random", description="target: layers start as copies of target layers")
    fusion_init: Literal["random", "whitened", "peak", "bell"] = Field(
        "random",
        description="of a shared fusion: random, or whitened: taps enter centred and scaled by what they are on the "
        "training answers; layerwise: peak (the authors'): each layer leans on one tap, or bell: on those at its place",
    )
    context_init: Literal["random", "copied"] = Field(
        "random", description="copied: separate context projections start as the layer's own"
    )
    warm_start: str | None = Field(None, description="folder of a trained drafter whose weights the run starts from")

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = {**preset_settings(values.get("preset"))[0], **values}
        start = "peak" if values.get("fusion") == "layerwise" else "random"
        return {"fusion_init": start, **values}

    @model_validator(mode="after")
    def _starts_fit(self) -> DraftShape:
        known = {"shared": ("random", "whitened"), "layerwise": ("peak", "bell")}[self.fusion]
        if self.fusion_init not in known:
            raise ValueError(f"fusion_init '{self.fusion_init}' is not for fusion '{self.fusion}' ({', '.join(known)})")
        if self.fusion_init == "whitened" and self.injection == "none":
            raise ValueError("fusion_init 'whitened' needs the target's features, and injection is 'none'")
        if self.context_init == "copied" and self.context_projections != "separate":
            raise ValueError("context_init 'copied' needs context_projections 'separate'")
        return self

    @model_validator(mode="after")
    def _chain_fits(self) -> DraftShape:
        if self.family == "block":
            return self
        taps = self.num_taps if self.tap_ids is None else len(self.tap_ids)
        check_chain(self.family, self.num_layers, taps, self.layer_types, self.sliding_window)
        if self.mask_token_id is not None:
            raise ValueError(f"mask_token_id is for family 'block': '{self.family}' has no masks")
        if self.family == "mtp" and self.fusion_init != "random":
            raise ValueError(f"fusion_init '{self.fusion_init}' is not for family 'mtp', which fuses no taps (random)")
        if self.family == "eagle3" and self.init != "random":
            raise ValueError("init 'target' is not for family 'eagle3': its layer reads twice the width of a target's")
        return self


# What other papers than DFlash's set otherwise: the drafter, and the decay of its loss.
PRESETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dflare": (
        {"num_layers": 7, "num_taps": 9, "fusion": "layerwise", "context_projections": "separate"},
        {"gamma": 4.5, "schedule": "stairs", "gamma_step": 1.0, "gamma_max": 9.5},
    ),
    # Seven steps of training-time test, each of which weighs 0.8 of the one before: gamma is 1 / ln(1 / 0.8).
    "eagle3": (
        {"family": "eagle3", "num_layers": 1, "num_taps": 3, "block_size": 7, "anchor_drafts": True},
        {"gamma": 4.48},
    ),
    "mtp": (
        {"family": "mtp", "num_layers": 1, "num_taps": 1, "block_size": 4, "anchor_drafts": True},
        {},
    ),
}


def preset_settings(name: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a preset sets of the drafter, and of the loss; nothing if there is no such preset."""
    return PRESETS.get(name, ({}, {})) if isinstance(name, str) else ({}, {})


class LossConfig(Strict):
    """The loss over a block (DFlash, section 4.2), and how its decay moves over training (DFlare)."""

    weights: Literal["decay", "uniform"] = Field("decay", description="uniform: every drafted token weighs the same")
    gamma: float = Field(7.0, gt=0.0, description="weight of the k-th drafted token is exp(-(k-1)/gamma)")
    schedule: Literal["constant", "stairs", "linear"] = Field(
        "constant", description="how gamma grows to gamma_max: stairs, by gamma_step an epoch; linear, over all steps"
    )
    gamma_max: float | None = Field(None, gt=0.0)
    gamma_step: float = Field(0.5, gt=0.0, description="height of a stair")
    soft_weight: float = Field(0.0, ge=0.0, le=1.0, description="share of the loss against the target's distribution")
    chunk_rows: int = Field(2048, ge=1, description="block rows whose logits exist at once")

    @model_validator(mode="after")
    def _schedule_fits(self) -> LossConfig:
        if self.schedule == "constant":
            if self.gamma_max is not None:
                raise ValueError("gamma_max is where a schedule ends: set schedule to stairs or linear")
            return self
        if self.weights == "uniform":
            raise ValueError(f"weights 'uniform' have no gamma for schedule '{self.schedule}' to move")
        if self.gamma_max is None or self.gamma_max < self.gamma:
            raise ValueError(f"schedule '{self.schedule}' needs a gamma_max that is not below gamma={self.gamma}")
        return self


class OptimConfig(Strict):
    """The optimiser, with fp32 masters, warm-up and cosine."""

    name: Literal["adamw", "muon"] = Field("adamw", description="muon: for the matrices; AdamW for the rest")
    lr: float = Field(6e-4, gt=0.0)
    min_lr_ratio: float = Field(0.0, ge=0.0, le=1.0)
    warmup_ratio: float = Field(0.04, ge=0.0, le=1.0)
    weight_decay: float = Field(0.0, ge=0.0)
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = Field(1.0, gt=0.0)
    ema: float = Field(0.0, ge=0.0, lt=1.0, description="decay of a running average of the weights; 0: none")


class TrainConfig(Strict):
    """How a drafter is trained; one recipe file is one of these."""

    target: str
    seed: int = 0
    steps: int = Field(1000, ge=1)
    batch_size: int = Field(4, ge=1, description="sequences a step")
    anchors: int = Field(64, ge=1, description="blocks per sequence")
    anchor_mode: Literal["random", "fixed"] = Field(
        "random", description="fixed: at the multiples of the block size, the same in every epoch"
    )
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    data: DataConfig
    features: FeatureConfig = FeatureConfig()
    drafter: DraftShape = DraftShape()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    checkpoint_steps: int = Field(200, ge=1)
    checkpoint_minutes: float = Field(5.0, gt=0.0)
    eval_steps: int = Field(500, ge=1, description="steps between measurements of the real acceptance length")
    eval_prompts: int = Field(8, ge=0)
    eval_max_tokens: int = Field(96, ge=1)
    log_steps: int = Field(10, ge=1)
    tensorboard: bool = False

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        """A preset has a part in the loss: its decay, unless the recipe has a schedule of its own."""
        if not isinstance(values, dict):
            return values
        drafter, loss = values.get("drafter"), values.get("loss", {})
        preset = drafter.get("preset") if isinstance(drafter, dict) else getattr(drafter, "preset", None)
        own = not isinstance(loss, dict) or "schedule" in loss or loss.get("weights") == "uniform"
        decay = preset_settings(preset)[1]
        return values if own or not decay else {**values, "loss": {**decay, **loss}}
