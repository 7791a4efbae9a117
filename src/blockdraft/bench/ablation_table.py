"""The table of an ablation, made from its files of results and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blockdraft.bench.ablation import ACCEPTANCE, PLAIN, TIMED, Recipe, current, load_result
from blockdraft.config import AblationConfig

MEANINGS = (
    "tau: tokens per verify pass, the target's own included, over all answers of a part, which are plain decoding's. "
    "draft k: share of the rounds in which drafts 1 to k were all accepted. propose, verify: median time of a proposal "
    "and of the target's pass over it, one request at a short context; expected: the rate that tau and these times "
    "make, over plain decoding's pass of one token. The rest was measured on the timed prompts of each part, plain "
    "decoding and the arms turn about. Tokens per second: median over prompts, prefill included; over plain: median of "
    "the ratios prompt by prompt; identical: answers equal to plain decoding's, token by token."
)
Results = Mapping[str, dict[str, Any]]


def load_results(folder: Path, config: AblationConfig, recipes: Mapping[str, Recipe]) -> dict[str, dict[str, Any]]:
    """What is there of the arms, in their order, of the ablation as it is asked for now.

    Results of other settings are left out, and so is a part whose acceptance is not of plain decoding's answers.
    """
    plain = load_result(folder / f"{PLAIN}.json")
    setups = {key: part[ACCEPTANCE]["setup"] for key, part in plain.get("measured", {}).items()}
    found = {}
    for name, recipe in recipes.items():
        result = load_result(folder / f"{name}.json")
        if result and current(config, recipe, result):
            measured = {
                key: part
                for key, part in result["measured"].items()
                if ACCEPTANCE in part and part[ACCEPTANCE]["setup"] == setups.get(key)
            }
            found[name] = {**result, "measured": measured}
    return found


def own_numbers(result: Mapping[str, Any], part: str) -> dict[str, Any] | None:
    """What one file says of its arm in a part: acceptance, and where it was timed, rates and the ratio over plain."""
    measured = result["measured"].get(part)
    if measured is None:
        return None
    accepted = measured[ACCEPTANCE]
    # The engine counts as far as a draft was ever accepted; an arm that drafts further has zeros there.
    shares = list(accepted["acceptance_by_position"])
    shares += [0.0] * (result.get("max_drafts", 0) - len(shares))
    numbers = {"tau": accepted["tau"], "acceptance_by_position": shares, "setup": accepted["setup"]}
    if cost := result.get("cost"):
        numbers["expected"] = accepted["tau"] * cost["plain_ms"] / (cost["propose_ms"] + cost["verify_ms"])
    if TIMED in measured:
        (own,) = [arm for arm in measured[TIMED]["arms"] if arm["name"] == result["name"]]
        numbers |= {key: own[key] for key in ("tokens_per_second", "identical_answers", "compared_answers")}
        numbers["over_plain"] = measured[TIMED]["ratios"][f"{result['name']}/{PLAIN}"]
    return numbers


def render(results: Results, arms: Sequence[str], parts: Sequence[str]) -> str:
    """Markdown: all arms in one table, one more for each part, and what the numbers are."""
    heads = ["arm", "changes", "parameters", "steps", "minutes", "propose, ms", "verify, ms"]
    heads += [f"{part}: {what}" for part in parts for what in ("tau", "over plain")] + ["identical"]
    lines = _table(heads, [_overview(name, result, parts) for name, result in results.items()])
    for part in parts:
        lines += ["", *_part(results, part)]
    missing = [name for name in arms if name not in results]
    if missing:
        lines += ["", f"Not measured yet: {', '.join(missing)}."]
    return "\n".join([*lines, "", *_notes(results)]) + "\n"


def _overview(name: str, result: Mapping[str, Any], parts: Sequence[str]) -> list[str]:
    training = result.get("training")
    changes = ", ".join(f"{key} {value}" for key, value in result.get("changes", {}).items())
    parameters, cost = result.get("parameters"), result.get("cost")
    cells = [
        name,
        changes,
        f"{parameters / 1e6:.2f} M" if parameters is not None else "",
        str(training["steps"]) if training else "",
        f"{training['seconds'] / 60:.1f}" if training else "",
        *(f"{cost[name]:.1f}" if cost else "" for name in ("propose_ms", "verify_ms")),
    ]
    same = compared = 0
    for part in parts:
        own = own_numbers(result, part)
        cells += [_number(own["tau"]), _times(_over_plain(own))] if own else ["", ""]
        same += own.get("identical_answers", 0) if own else 0
        compared += own.get("compared_answers", 0) if own else 0
    return [*cells, _identical(same, compared)]


def _part(results: Results, part: str) -> list[str]:
    """One prompt set at one temperature: rates, and acceptance by position."""
    measured = {name: own for name, result in results.items() if (own := own_numbers(result, part)) is not None}
    if not measured:
        return [f"{part}: not measured yet."]
    width = max(len(own["acceptance_by_position"]) for own in measured.values())
    heads = ["arm", "tokens/s", "over plain", "expected", "tau", "identical", *(f"draft {k + 1}" for k in range(width))]
    rows = []
    for name, own in measured.items():
        shares = [f"{share:.3f}" for share in own["acceptance_by_position"]]
        rate = own.get("tokens_per_second")
        cells = [name, f"{rate['median']:.1f}" if rate else "", _times(_over_plain(own)), _times(own.get("expected"))]
        cells.append(_number(own["tau"]))
        cells += [_identical(own.get("identical_answers", 0), own.get("compared_answers", 0)), *shares]
        rows.append(cells + [""] * (width - len(shares)))
    setup = next(iter(measured.values()))["setup"]
    title = f"### {setup['dataset']}, temperature {setup['params']['temperature']:g}: {setup['prompts']} prompts"
    return [f"{title}, up to {setup['params']['max_tokens']} tokens", "", *_table(heads, rows)]


def _notes(results: Results) -> list[str]:
    lines = [MEANINGS]
    budgets = {budget for result in results.values() if (budget := _budget(result))}
    lines += [f"Budget of every arm: {', '.join(sorted(budgets))}."] if budgets else []
    if len({result["identity"].get("data_digest") for result in results.values() if "training" in result}) > 1:
        lines.append("The arms were NOT all trained on the same data.")
    spoken = {_machine(result) for result in results.values() if result.get("machine")}
    if len(spoken) > 1:
        lines.append("The arms were not all measured on the same machine, so their rates do not compare:")
    return [*lines, *sorted(spoken)]


def _budget(result: Mapping[str, Any]) -> str:
    made = result["identity"]
    if "budget.minutes" in made:
        return f"the steps that {made['budget.minutes']:g} minutes hold, by its first {made['budget.timing_steps']}"
    return f"{made['budget.steps']} steps" if "budget.steps" in made else ""


def _machine(result: Mapping[str, Any]) -> str:
    where = result["machine"]
    on = ", ".join([where["cpu"], *where["gpus"]])
    return f"{on}, {where['threads']} threads, torch {where['versions']['torch']}."


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows)]


def _over_plain(own: Mapping[str, Any]) -> float | None:
    """Measured: the median of the ratios prompt by prompt."""
    return own["over_plain"]["median"] if "over_plain" in own else None


def _number(value: float | None) -> str:
    return f"{value:.3f}" if value is not None else ""


def _times(ratio: float | None) -> str:
    return f"{ratio:.2f}x" if ratio is not None else ""


def _identical(same: int, compared: int) -> str:
    return f"{'yes' if same == compared else 'NO'}, {same} of {compared}" if compared else ""
