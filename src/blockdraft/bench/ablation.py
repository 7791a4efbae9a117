"""An ablation as plain values: what recipe each arm is, what makes it that arm, and what was measured of it.

An arm is a recipe that differs from the base in a few settings, or a drafter that is not trained for it: one by name,
or another arm's.  A part is one prompt set at one temperature.  Plain decoding answers it once and its answers are
kept: acceptance is measured by drafting them again, whoever else is at work on the machine; rates and whether answers
are the same are measured in the end, of all arms in one run, turn about with plain decoding.  Each arm has one file of
results.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blockdraft.bench.measure import Answer, Arm, Row
from blockdraft.bench.prompts import Prompt
from blockdraft.bench.replay import Told
from blockdraft.bench.summary import Margin, acceptance_by_position, summarise, tau
from blockdraft.config import AblationConfig, ConfigError, SamplingParams, TrainConfig
from blockdraft.targets.base import TargetInfo
from blockdraft.train.loop import without_folders
from blockdraft.train.resume import first_change, flat
from blockdraft.train.run import check_recipe

PLAIN, FEATURES = "plain", "features"
ACCEPTANCE, TIMED = "acceptance", "timed"
OTHER = "arm:"
ARM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
SHARED = ("target", "device", "data", "features")


@dataclass(frozen=True)
class Part:
    """One prompt set at one temperature, with the prompts that are timed; the setups are what results depend on."""

    key: str
    prompts: Sequence[Prompt]
    timed: Sequence[Prompt]
    params: SamplingParams
    timed_params: SamplingParams
    setups: dict[str, dict[str, Any]]  # by kind of measurement: ACCEPTANCE, TIMED


@dataclass(frozen=True)
class Ready:
    """A drafter that is not trained for the arm: by name, or that of another arm; in blocks of `block_size`."""

    drafter: str
    block_size: int | None = None

    @property
    def other(self) -> str | None:
        """The arm whose drafter it is, if it is one's."""
        return self.drafter.removeprefix(OTHER) if self.drafter.startswith(OTHER) else None


Recipe = TrainConfig | Ready


def arm_recipes(config: AblationConfig) -> dict[str, Recipe]:
    """Every arm's recipe, or its drafter that is ready.  Raises ConfigError for the first bad one."""
    recipes = {name: _recipe(config, name) for name in config.arms}
    known: dict[str, str] = {}
    for name, recipe in recipes.items():
        twin = known.setdefault(str(recipe) if isinstance(recipe, Ready) else recipe.model_dump_json(), name)
        if twin != name:
            raise ConfigError(f"arms.{name}: the same as arms.{twin}")
        other = recipe.other if isinstance(recipe, Ready) else None
        if other is not None and not isinstance(recipes.get(other), TrainConfig):
            raise ConfigError(f"arms.{name}: there is no arm '{other}' that is trained")
    return recipes


def _recipe(config: AblationConfig, name: str) -> Recipe:
    where, overrides = f"arms.{name}", config.arms[name]
    if not ARM_NAME.fullmatch(name) or name in (PLAIN, FEATURES):
        raise ConfigError(f"{where}: a name is letters, digits, '.', '_' and '-', and neither {PLAIN} nor {FEATURES}")
    if isinstance(overrides.get("drafter"), str):
        drafter, size = str(overrides["drafter"]), overrides.get("block_size")
        if set(overrides) - {"drafter", "block_size"} or not (size is None or isinstance(size, int)):
            raise ConfigError(f"{where}: the drafter '{drafter}' is not trained here and has only a block_size to set")
        return Ready(drafter, size)
    values = config.base.model_dump(mode="json")
    for key, value in flat(overrides).items():
        first, *_ = parts = key.split(".")
        if first == "steps":
            raise ConfigError(f"{where}: steps are the budget's, the same for all arms")
        if key == "drafter.preset":
            raise ConfigError(
                f"{where}: the base says each setting itself, so a preset changes nothing: set them one by one"
            )
        if first in SHARED:
            raise ConfigError(f"{where}: {key} is the same for all arms: set it in base")
        node = values
        for part in parts[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{where}: {key}: '{part}' is not a section")
        node[parts[-1]] = value
    if config.steps is not None:
        values["steps"] = config.steps
    recipe = TrainConfig.parse(values, where)
    try:
        check_recipe(recipe)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return recipe


def identity(config: AblationConfig, recipe: Recipe, data_digest: str) -> dict[str, Any]:
    """What an arm is, flat: its settings, budget and data."""
    if isinstance(recipe, Ready):
        own = {"drafter": recipe.drafter, "block_size": recipe.block_size, "target": config.base.target}
        trained = None if recipe.other is None else _recipe(config, recipe.other)
        return own if trained is None else {**identity(config, trained, data_digest), **own}
    settings = flat(without_folders(recipe.model_dump(mode="json")))
    del settings["steps"]
    budget: dict[str, Any]
    if config.minutes is not None:
        budget = {"budget.minutes": config.minutes, "budget.timing_steps": config.timing_steps}
    else:
        budget = {"budget.steps": config.steps}
    return {**settings, **budget, "data_digest": data_digest}


def check_identity(name: str, old: Mapping[str, Any], new: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError if an arm that was begun is another one now."""
    changed = _change(old, new)
    if changed is not None:
        raise ConfigError(f"arm '{name}' has changed: {changed}; to run it anew, remove {folder}")


def same(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether results are of this arm."""
    return _change(old, new) is None


def _change(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """The first difference, in words.  A setting that did not exist when an arm was begun had its default."""
    new = json.loads(json.dumps(new))
    if "data_digest" in old:
        defaults = TrainConfig.parse({"target": "", "data": {"files": [""]}}).model_dump(mode="json")
        old = {**{key: value for key, value in flat(defaults).items() if key in new}, **old}
    return first_change(dict(old), dict(new))


def current(config: AblationConfig, recipe: Recipe, result: Mapping[str, Any]) -> bool:
    """Whether results are of an arm as it is asked for now; the data, which is not read, is taken to be theirs."""
    old = result["identity"]
    return same(old, identity(config, recipe, old.get("data_digest", "")))


def part_keys(config: AblationConfig) -> list[str]:
    """The parts by name, in the order in which they are measured."""
    return [f"{Path(one.dataset).stem}-t{t:g}" for one in config.bench for t in config.temperatures]


def make_parts(config: AblationConfig, prompts: Sequence[Sequence[Prompt]], info: TargetInfo) -> list[Part]:
    """The parts with their prompts, one list for each data set."""
    made = []
    keys = iter(part_keys(config))
    for one, asked in zip(config.bench, prompts, strict=True):
        timed = asked if one.timed is None else asked[: one.timed]
        for temperature in config.temperatures:
            values = {"max_tokens": config.max_tokens, "temperature": temperature, "seed": config.seed}
            params = SamplingParams.parse(values, "temperatures")
            briefly = params.model_copy(update={"max_tokens": config.timed_tokens or config.max_tokens})
            setups = {
                ACCEPTANCE: _setup(one.dataset, asked, params, info),
                TIMED: {**_setup(one.dataset, timed, briefly, info), "repeats": config.repeats, "slots": 1},
            }
            made.append(Part(next(keys), asked, timed, params, briefly, setups))
    return made


def _setup(dataset: str, prompts: Sequence[Prompt], params: SamplingParams, info: TargetInfo) -> dict[str, Any]:
    return {
        "dataset": Path(dataset).stem,
        "prompts": len(prompts),
        "prompts_digest": hashlib.sha256(json.dumps([prompt.turns for prompt in prompts]).encode()).hexdigest(),
        "params": json.loads(params.model_dump_json()),
        "target": info.name,
        "dtype": str(info.dtype).removeprefix("torch."),
    }


def missing(result: Mapping[str, Any], parts: Sequence[Part], kind: str) -> list[Part]:
    """The parts of which a file of results has no measurement of that kind, or one of other prompts or parameters."""
    measured = result.get("measured", {})
    return [part for part in parts if measured.get(part.key, {}).get(kind, {}).get("setup") != part.setups[kind]]


def describe_plain(part: Part, rows: Sequence[Row]) -> dict[str, Any]:
    """Plain decoding's answers to a part: what arms draft again."""
    kept = [
        {
            "id": name,
            "prompt": " ".join(map(str, prompt)),
            "answer": " ".join(map(str, answer.token_ids)),
            "finish": answer.finish_reason,
        }
        for row in rows
        for name, prompt, answer in zip(row.ids, row.prompts, row.arms[PLAIN].answers, strict=True)
    ]
    return {ACCEPTANCE: {"setup": part.setups[ACCEPTANCE], "answers": kept}}


def told(plain: Mapping[str, Any]) -> list[Told]:
    """The conversations that `describe_plain` kept."""

    def ids(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split()))

    return [Told(ids(one["prompt"]), ids(one["answer"])) for one in plain[ACCEPTANCE]["answers"]]


def describe_acceptance(part: Part, answers: Sequence[Answer]) -> dict[str, Any]:
    """What drafting a part's answers again was like."""
    return {
        "setup": part.setups[ACCEPTANCE],
        "tau": tau(answers),
        "acceptance_by_position": acceptance_by_position(answers),
        "rounds": sum(answer.rounds for answer in answers),
        "tokens": sum(len(answer.token_ids) for answer in answers),
    }


def describe_timed(part: Part, plain: Arm, arm: Arm, rows: Sequence[Row], margin: Margin | None) -> dict[str, Any]:
    """An arm beside plain decoding, of rows that may have more: rates, ratios, and whether answers are the same."""
    arms = [plain, arm]
    both = [replace(row, arms={one.name: row.arms[one.name] for one in arms}) for row in rows]
    return {"setup": part.setups[TIMED], **summarise(both, arms, margin)}


def load_result(path: Path) -> dict[str, Any]:
    """A file of results; empty if there is none yet.  Raises ValueError if it is something else."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not readable ({error})") from None
    if not isinstance(result, dict) or not {"name", "identity", "measured"} <= result.keys():
        raise ValueError(f"{path}: not results of an ablation")
    return result
