"""Every setting of the project, in one place: frozen, strict, and readable from JSON or YAML.

An unknown key, a wrong type or an impossible value is refused: by `parse` and `load_config` with a `ConfigError`
of one line, by a class called directly with pydantic's own ValueError.  Defaults live here and nowhere else; no
other module reads a setting with a fallback of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

ConfigT = TypeVar("ConfigT", bound="Strict")


class ConfigError(ValueError):
    """A setting that cannot be used; the message is one line for the person who wrote it."""


class Strict(BaseModel):
    """Base of all settings: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def parse(cls: type[ConfigT], values: dict[str, Any], where: str = "config") -> ConfigT:
        """Build from a plain dict.  Raises `ConfigError` naming the first bad key."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            if first["type"] == "extra_forbidden":
                section: Any = cls
                for part in first["loc"][:-1]:
                    one = isinstance(part, int)  # an entry of a list
                    section = get_args(section)[0] if one else section.model_fields[part].annotation
                reason = f"unknown key '{key}' (known: {', '.join(sorted(section.model_fields))})"
            else:
                message = first["msg"].removeprefix("Value error, ")
                reason = f"{key}: {message}" if key else message
            raise ConfigError(f"{where}: {reason}") from None


class DraftAxes(Strict):
    """What tells the members of the family apart: DFlash, DFlare (arXiv 2606.02091), and the ablations of both.

    The defaults are DFlash's.  `drafters.block` says what each choice computes.
    """

    fusion: Literal["shared", "layerwise"] = Field("shared", description="layerwise: each layer mixes the taps itself")
    fusion_norm: Literal["shared", "layerwise"] = Field("shared", description="layerwise: a norm for each layer's mix")
    context_projections: Literal["shared", "separate"] = Field(
        "shared", description="separate: the context has key and value projections of its own"
    )
    injection: Literal["kv", "input", "none"] = Field("kv", description="where the target's features enter, if at all")
    order: Literal["block", "autoregressive"] = Field("block", description="fill masks at once, or token after token")
    anchor_drafts: bool = Field(False, description="True: row k predicts the token at anchor + k + 1")
    markov_rank: int | None = Field(None, gt=0, description="rank of a Markov head (DSpark); None: no such head")

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


class DrafterConfig(DraftAxes):
    """The shape of a block-diffusion drafter (DFlash, arXiv 2602.06036, sections 3 and 4).

    `tap_ids` are 0-based target layers; a tap is the residual stream *after* that layer.
    """

    hidden_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    vocab_size: int = Field(gt=1)
    block_size: int = Field(ge=2, le=256, description="rows of a block: the anchor and its masks")
    mask_token_id: int = Field(ge=0)
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
        if self.mask_token_id >= self.vocab_size:
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
        if self.order == "autoregressive":
            return True
        return self.is_causal if self.is_causal is not None else self.window(layer) is not None


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


class SamplingParams(Strict):
    """How the target chooses tokens; names and defaults follow vLLM's.

    `temperature` 0 is arg-max.  `seed` None draws a fresh seed for each request.
    """

    max_tokens: int = Field(256, ge=1)
    temperature: float = Field(0.0, ge=0.0, le=100.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0, description="0: off")
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(1.0, gt=0.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @model_validator(mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("stop"), str):
            values = {**values, "stop": (values["stop"],)}
        return values

    @model_validator(mode="after")
    def _stops_are_not_empty(self) -> SamplingParams:
        if any(not text for text in self.stop):
            raise ValueError("stop strings must not be empty")
        return self


class EngineConfig(Strict):
    """Room and limits of an engine."""

    slots: int = Field(1, ge=1, description="requests that run at once")
    capacity: int = Field(2048, ge=8, description="tokens of context kept per slot")
    verify_width: int | None = Field(None, ge=0, description="drafts verified per round; None: all that are proposed")


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

    preset: Literal["dflash", "dflare"] = "dflash"
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
        if values.get("preset") == "dflare":
            values = {**DFLARE_SHAPE, **values}
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


# What the paper of DFlare sets otherwise than DFlash's: the drafter, and how the decay of its loss moves.
DFLARE_SHAPE: dict[str, Any] = {
    "num_layers": 7,
    "num_taps": 9,
    "fusion": "layerwise",
    "context_projections": "separate",
}
DFLARE_LOSS: dict[str, Any] = {"gamma": 4.5, "schedule": "stairs", "gamma_step": 1.0, "gamma_max": 9.5}


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
        """DFlare's preset has a part in the loss: its schedule, unless the recipe has one of its own."""
        if not isinstance(values, dict):
            return values
        drafter, loss = values.get("drafter"), values.get("loss", {})
        preset = drafter.get("preset") if isinstance(drafter, dict) else getattr(drafter, "preset", None)
        own = not isinstance(loss, dict) or "schedule" in loss or loss.get("weights") == "uniform"
        return values if preset != "dflare" or own else {**values, "loss": {**DFLARE_LOSS, **loss}}


class BenchSet(Strict):
    """Prompts that an ablation is measured on."""

    dataset: str = Field(description="a data set by name, or a JSONL file")
    data_dir: str | None = Field(None, description="folder with the data set's JSONL; None: download it")
    limit: int | None = Field(None, ge=1, description="only the first so many prompts")


class AblationConfig(Strict):
    """Arms that differ in a few settings, trained on the same data within the same budget, measured alike.

    An arm changes settings of `base`, nested or as `section.key`; or, if its `drafter` is a text, it is a drafter
    of that name that needs no training.  The budget is `steps`, or `minutes` of training for each arm.
    """

    base: TrainConfig
    arms: dict[str, dict[str, Any]] = Field(min_length=1)
    steps: int | None = Field(None, ge=1)
    minutes: float | None = Field(None, gt=0.0)
    timing_steps: int = Field(20, ge=1, description="steps by which `minutes` become steps")
    bench: tuple[BenchSet, ...] = Field(min_length=1)
    temperatures: tuple[float, ...] = Field((0.0,), min_length=1)
    max_tokens: int = Field(256, ge=1)
    seed: int = Field(0, description="prompt i is sampled with seed + i")
    repeats: int = Field(1, ge=1, description="runs per prompt; the median counts")

    @model_validator(mode="after")
    def _consistent(self) -> AblationConfig:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("the budget is one of steps and minutes")
        stems = [Path(one.dataset).stem for one in self.bench]
        if len(set(stems)) != len(stems) or len(set(self.temperatures)) != len(self.temperatures):
            raise ValueError("bench and temperatures: each data set and each temperature once")
        return self


def load_ablation(path: str | Path, overrides: tuple[str, ...] = ()) -> AblationConfig:
    """`load_config`, where `base` may also be the path of a recipe, seen from the ablation's own folder."""
    values = read_settings(path)
    if isinstance(values.get("base"), str):
        values["base"] = read_settings(Path(path).parent / values["base"])
    return AblationConfig.parse(override_settings(values, overrides), str(path))


def load_config(cls: type[ConfigT], path: str | Path, overrides: tuple[str, ...] = ()) -> ConfigT:
    """Read YAML or JSON, apply `section.key=value` overrides (values are YAML), check everything.

    Raises `ConfigError` for a missing or unreadable file, a malformed override, or a bad setting.
    """
    return cls.parse(override_settings(read_settings(path), overrides), str(path))


def read_settings(path: str | Path) -> dict[str, Any]:
    """What a YAML or JSON file holds.  Raises `ConfigError` if it is missing or holds no settings."""
    path = Path(path)
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected settings, found {type(values).__name__}")
    return values


def override_settings(values: dict[str, Any], overrides: tuple[str, ...]) -> dict[str, Any]:
    """The same settings with `section.key=value` written into them.  Raises `ConfigError` for a malformed one."""
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"override '{override}': write section.key=value")
        parts = key.split(".")
        node = values
        for part in parts[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"override '{override}': '{part}' is not a section")
        try:
            node[parts[-1]] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"override '{override}': not readable as YAML: {str(error).splitlines()[0]}") from None
    return values
