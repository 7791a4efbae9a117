"""An ablation as plain values: what recipe each arm is, what makes it that arm, and what was measured of it.

An arm is a recipe that differs from the base in a few settings, or a drafter that needs no training.  A part is one
prompt set at one temperature; plain decoding is measured once per part and its answers are kept, so that every arm
is compared with the same ones.  Each arm has one file of results, and so has plain decoding.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.bench.measure import Answer, Arm, Row, Timed
from blockdraft.bench.prompts import Prompt
from blockdraft.bench.summary import Margin, summarise
from blockdraft.config import AblationConfig, ConfigError, SamplingParams, TrainConfig
from blockdraft.targets.base import TargetInfo
from blockdraft.train.loop import without_folders
from blockdraft.train.resume import first_change, flat
from blockdraft.train.run import check_recipe

PLAIN, FEATURES = "plain", "features"
ARM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
SHARED = ("target", "device", "data", "features")


@dataclass(frozen=True)
class Part:
    """One prompt set at one temperature; `setup` is what a measurement of it depends on."""

    key: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    setup: dict[str, Any]


def arm_recipes(config: AblationConfig) -> dict[str, TrainConfig | str]:
    """Every arm's recipe, or the name of its untrained drafter.  Raises ConfigError for the first bad one."""
    recipes = {name: _recipe(config, name) for name in config.arms}
    known: dict[str, str] = {}
    for name, recipe in recipes.items():
        twin = known.setdefault(recipe if isinstance(recipe, str) else recipe.model_dump_json(), name)
        if twin != name:
            raise ConfigError(f"arms.{name}: the same as arms.{twin}")
    return recipes


def _recipe(config: AblationConfig, name: str) -> TrainConfig | str:
    where, overrides = f"arms.{name}", config.arms[name]
    if not ARM_NAME.fullmatch(name) or name in (PLAIN, FEATURES):
        raise ConfigError(f"{where}: a name is letters, digits, '.', '_' and '-', and neither {PLAIN} nor {FEATURES}")
    if isinstance(overrides.get("drafter"), str):
        if len(overrides) > 1:
            raise ConfigError(f"{where}: the drafter '{overrides['drafter']}' is not trained and has no other settings")
        return str(overrides["drafter"])
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


def identity(config: AblationConfig, recipe: TrainConfig | str, data_digest: str) -> dict[str, Any]:
    """What an arm is, flat: its settings, budget and data."""
    if isinstance(recipe, str):
        return {"drafter": recipe, "target": config.base.target}
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


def current(config: AblationConfig, recipe: TrainConfig | str, result: Mapping[str, Any]) -> bool:
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
        digest = hashlib.sha256(json.dumps([prompt.turns for prompt in asked]).encode()).hexdigest()
        for temperature in config.temperatures:
            values = {"max_tokens": config.max_tokens, "temperature": temperature, "seed": config.seed}
            params = SamplingParams.parse(values, "temperatures")
            setup = {
                "dataset": Path(one.dataset).stem,
                "prompts": len(asked),
                "prompts_digest": digest,
                "params": json.loads(params.model_dump_json()),
                "target": info.name,
                "dtype": str(info.dtype).removeprefix("torch."),
                "repeats": config.repeats,
                "slots": 1,
            }
            made.append(Part(next(keys), asked, params, setup))
    return made


def missing_parts(result: Mapping[str, Any], parts: Sequence[Part]) -> list[Part]:
    """The parts that a file of results does not have, or has of other prompts or parameters."""
    measured = result.get("measured", {})
    return [part for part in parts if measured.get(part.key, {}).get("setup") != part.setup]


def describe_plain(part: Part, rows: Sequence[Row]) -> dict[str, Any]:
    """Plain decoding of a part, with its answers: what arms are compared with."""
    kept = [
        {
            "ids": list(row.ids),
            "tokens": [" ".join(map(str, answer.token_ids)) for answer in row.arms[PLAIN].answers],
            "finish": [answer.finish_reason for answer in row.arms[PLAIN].answers],
            "seconds": row.arms[PLAIN].seconds,
            "repeats_agree": row.arms[PLAIN].repeats_agree,
        }
        for row in rows
    ]
    return {"setup": part.setup, **summarise(rows, [_named(PLAIN)]), "answers": kept}


def describe_arm(
    name: str, part: Part, rows: Sequence[Row], plain: Mapping[str, Any], margin: Margin | None = None
) -> dict[str, Any]:
    """An arm's rows of a part beside plain decoding's: rates, ratios, acceptance, and whether answers are the same.

    Raises ValueError if the two were not asked the same questions.
    """
    joined = []
    for row, kept in zip(rows, plain["answers"], strict=True):
        if list(row.ids) != kept["ids"]:
            raise ValueError(f"{part.key}: plain decoding was asked {kept['ids']} where '{name}' was asked {row.ids}")
        answers = [
            Answer(tuple(map(int, tokens.split())), finish)
            for tokens, finish in zip(kept["tokens"], kept["finish"], strict=True)
        ]
        timed = Timed(answers, list(kept["seconds"]), kept["repeats_agree"])
        joined.append(Row(row.ids, row.prompts, {PLAIN: timed, **row.arms}))
    return {"setup": part.setup, **summarise(joined, [_named(PLAIN), _named(name)], margin)}


def _named(name: str) -> Arm:
    """An arm that only stands for its name: its answers are known."""
    return Arm(name, lambda *_: [])


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
