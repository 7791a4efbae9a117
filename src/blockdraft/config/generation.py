"""How tokens are chosen, and what an engine has room for."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from blockdraft.config.strict import Strict


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
    logit_bias: dict[int, float] = Field(default_factory=dict)
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
    verify_width: int | Literal["auto"] | None = Field(
        None, description="drafts verified per round; auto: as many as pay; None: all that are proposed"
    )
    prefill_tokens: int | None = Field(
        None, ge=1, description="tokens of prompts read per round while others are answered; None: whole prompts"
    )
    overlap: bool | None = Field(
        None, description="start a round before the text of the one before it; None: where the device is asynchronous"
    )
    coupled: bool = Field(False, description="draft by the noise of the target's choices, above temperature 0")

    @field_validator("verify_width", mode="before")
    @classmethod
    def _a_number_of_drafts(cls, value: Any) -> Any:
        number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not (number or value in ("auto", None)):
            raise ValueError("give a number of drafts, 0 or more, or auto")
        return value
