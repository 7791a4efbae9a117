"""Engines of others beside ours: which arms there are, what their rows say, and the table and plot of finished runs.

Results come from `make peers`, a file for each number of threads; `python -m blockdraft.bench.peers
docs/performance.md results/peers*.json` renders the document's tables between its markers, and draws peers.png beside
the results.  Nothing here runs an engine.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockdraft.bench.measure import Answer, Arm, Row
from blockdraft.bench.report import insert, load_finished
from blockdraft.bench.summary import summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What one gets of ours who asks for nothing but these weights.
OURS = {"F32": "blockdraft-auto", "F16": "blockdraft-f16-auto"}
MEANINGS = (
    "Greedy; every engine has the same prompts as ids, the same stop token and limit, one request at a time, and the "
    "same weights, dense ones. The engines take turns prompt by prompt, each in a process of its own that is stopped "
    "while another answers. Tokens/s: median over prompts of tokens over seconds of the whole answer, prefill "
    "included; decode: the same of what came after the first tokens. tau: tokens per verify pass (llama.cpp does not "
    "tell: from its accepted drafts, up to one pass of an answer). Identical: answers equal, token by token, to "
    "transformers' plain ones, and with F16 weights, which are another target, to the same engine's own plain ones. "
    "The last two columns are medians of ratios prompt by prompt, with the smallest and the largest; `auto` is ours "
    "with the same weights, or with F32 ones where a run has no other."
)


@dataclass(frozen=True)
class Told(Answer):
    """An answer, and from an engine that tells it, the part behind the first tokens, which has no prefill in it."""

    decode_tokens: int = 0
    decode_seconds: float = 0.0


@dataclass(frozen=True)
class Peer:
    """One arm: what the table says of it, the plain arm of its own engine, and the one that it must equal."""

    name: str
    engine: str
    drafting: str
    weights: str = "F32"
    plain: str | None = None
    like: str | None = None


PEERS = (
    Peer("transformers", "transformers", "none"),
    Peer("transformers-lookup", "transformers", "prompt lookup", plain="transformers"),
    Peer("transformers-dflash", "transformers", "DFlash", plain="transformers"),
    Peer("dflash", "authors' package", "DFlash", plain="transformers"),
    Peer("llamacpp-f32", "llama.cpp", "none"),
    Peer("llamacpp-f32-dflash", "llama.cpp", "DFlash", plain="llamacpp-f32"),
    Peer("llamacpp-f32-dflash-3", "llama.cpp", "DFlash, 3 at most", plain="llamacpp-f32"),
    Peer("llamacpp-f16", "llama.cpp", "none", "F16", like="llamacpp-f16"),
    Peer("llamacpp-f16-dflash", "llama.cpp", "DFlash", "F16", "llamacpp-f16", "llamacpp-f16"),
    Peer("llamacpp-f16-dflash-3", "llama.cpp", "DFlash, 3 at most", "F16", "llamacpp-f16", "llamacpp-f16"),
    Peer("blockdraft", "blockdraft", "none"),
    Peer("blockdraft-dflash", "blockdraft", "DFlash, all verified", plain="blockdraft"),
    Peer("blockdraft-auto", "blockdraft", "DFlash, `auto`", plain="blockdraft"),
    Peer("blockdraft-f16", "blockdraft", "none", "F16", like="blockdraft-f16"),
    Peer("blockdraft-f16-dflash", "blockdraft", "DFlash, all verified", "F16", "blockdraft-f16", "blockdraft-f16"),
    Peer("blockdraft-f16-auto", "blockdraft", "DFlash, `auto`", "F16", "blockdraft-f16", "blockdraft-f16"),
)


def chosen(names: str | None) -> list[Peer]:
    """The arms of some names, by commas, in their order here; all of them without names.

    Raises ValueError: a name that is none, or an arm without the one that it must equal.
    """
    wanted = [peer.name for peer in PEERS] if names is None else [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in {peer.name for peer in PEERS}]
    if unknown:
        raise ValueError(f"--arms {unknown[0]}: no such arm (known: {', '.join(peer.name for peer in PEERS)})")
    peers = [peer for peer in PEERS if peer.name in wanted]
    for peer in peers:
        needed = peer.like or PEERS[0].name
        if needed not in wanted:
            raise ValueError(f"--arms without {needed}, with which {peer.name} is compared: add it")
    return peers


def describe(rows: Sequence[Row], arms: Sequence[Arm]) -> dict[str, Any]:
    """`summarise`, and of every answer its rounds, and tokens and seconds after the first tokens, as plain values."""
    result = summarise(rows, arms)
    for row, described in zip(rows, result["rows"], strict=True):
        for name, timed in row.arms.items():
            (answer,) = timed.answers
            assert isinstance(answer, Told), "what the workers' arms give"
            described["arms"][name] |= {
                "rounds": answer.rounds,
                "decode_tokens": answer.decode_tokens,
                "decode_seconds": round(answer.decode_seconds, 4),
            }
    for arm in result["arms"]:
        arm["decode_tokens_per_second"] = _decode_rate([row["arms"][arm["name"]] for row in result["rows"]])
    return result


def facts(peers: Sequence[Peer]) -> dict[str, dict[str, Any]]:
    """The arms by name, for a file of results."""
    return {peer.name: {key: value for key, value in asdict(peer).items() if key != "name"} for peer in peers}


def markdown(reports: Sequence[Mapping[str, Any]]) -> str:
    """The document's part: for each run a heading, a table and the machine; what the columns mean."""
    lines = []
    for report in _ordered(reports):
        lines += [f"### On {_threads(report['setup'])}", "", *_table(report), ""]
        lines += [*_differences(report), _note(report["setup"]), ""]
    return "\n".join([*lines, MEANINGS])


def update(document: Path, results: Sequence[Path]) -> None:
    """Put the tables of some runs between the document's markers.  Raises ValueError: no markers, or no such runs."""
    insert(document, "peers", markdown(load_finished(results)))


def draw(reports: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Bars of tokens per second by arm, with the slowest and the fastest prompt, as an image (the `bench` extra).

    Runs stand side by side, and an arm has one line in all of them.
    """
    from matplotlib.figure import Figure

    from blockdraft.bench.ablation_plots import save_figure

    measured = {arm["name"] for report in reports for arm in report["arms"]}
    names = [peer.name for peer in PEERS if peer.name in measured]
    size = (2.5 + 5 * len(reports), 1.2 + 0.36 * len(names))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(reports), sharex=True, sharey=True, squeeze=False)[0]
    for axes, report in zip(panels, _ordered(reports), strict=True):
        _bars(axes, report, names)
    panels[0].set(yticks=range(len(names)), yticklabels=names)
    panels[0].invert_yaxis()  # of all of them
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower right", ncols=2, fontsize="small")
    save_figure(figure, path)


def _bars(axes: Axes, report: Mapping[str, Any], names: Sequence[str]) -> None:
    setup = report["setup"]
    for drafted in (False, True):
        own = [arm for arm in report["arms"] if (setup["arms"][arm["name"]]["drafting"] != "none") is drafted]
        rates = [arm["tokens_per_second"] for arm in own]
        middle = [rate["median"] for rate in rates]
        spread = [[rate["median"] - rate["min"] for rate in rates], [rate["max"] - rate["median"] for rate in rates]]
        where, label = [names.index(arm["name"]) for arm in own], "drafted" if drafted else "plain"
        axes.barh(where, middle, height=0.7, xerr=spread, error_kw={"linewidth": 0.8, "capsize": 2}, label=label)
    axes.set(xlabel="tokens per second, prefill included")
    axes.set(title=f"{setup['dataset']}, {setup['prompts']} prompts, {_threads(setup)}")


def _ordered(reports: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The most threads first."""
    return sorted(reports, key=lambda report: -report["setup"]["machine"]["threads"])


def _decode_rate(answers: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Median, min and max over the answers that went on after their first tokens."""
    told = [answer for answer in answers if answer["decode_tokens"] > 0 and answer["decode_seconds"] > 0.0]
    rates = [answer["decode_tokens"] / answer["decode_seconds"] for answer in told]
    if not rates:
        return None
    return {"median": round(statistics.median(rates), 4), "min": round(min(rates), 4), "max": round(max(rates), 4)}


def _table(report: Mapping[str, Any]) -> list[str]:
    heads = [
        "engine",
        "weights",
        "drafts",
        "tokens/s",
        "decode",
        "tau",
        "identical",
        "over its plain",
        "`auto` over it",
    ]
    rows, there = [], report["setup"]["arms"]
    for arm in report["arms"]:
        known, name = there[arm["name"]], arm["name"]
        ours = OURS[known["weights"]] if OURS[known["weights"]] in there else OURS["F32"]
        decode = arm["decode_tokens_per_second"]
        rows.append([
            known["engine"], known["weights"], known["drafting"],
            f"{arm['tokens_per_second']['median']:.1f}",
            f"{decode['median']:.1f}" if decode else "",
            f"{arm['tau']:.2f}" if arm["tau"] else "",
            f"{arm['identical_answers']} of {arm['compared_answers']}" if arm["compared_answers"] else "",
            _times(report["ratios"].get(f"{name}/{known['plain']}")),
            _times(report["ratios"].get(f"{ours}/{name}")),
        ])  # fmt: skip
    return ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows)]


def _times(ratio: Mapping[str, float] | None) -> str:
    return f"{ratio['median']:.2f}x ({ratio['min']:.2f} - {ratio['max']:.2f})" if ratio else ""


def _differences(report: Mapping[str, Any]) -> list[str]:
    """Where answers part from those that they should equal, if any do: a line for each arm."""
    found: dict[str, list[str]] = {}
    for row in report["rows"]:
        for one in row["differences"]:
            found.setdefault(one["arm"], []).append(f"{one['id']} at token {one['position']}")
    lines = [f"- {name} parts in {', '.join(places)}." for name, places in found.items()]
    return [*lines, ""] if lines else []


def _threads(setup: Mapping[str, Any]) -> str:
    count = setup["machine"]["threads"]
    return f"{count} {'thread' if count == 1 else 'threads'}"


def _note(setup: Mapping[str, Any]) -> str:
    where = setup["machine"]
    # Workers that share an environment, or a library, say the same.
    versions = dict.fromkeys(f"{name} {number}" for own in setup["versions"].values() for name, number in own.items())
    return (
        f"{setup['prompts']} prompts of {setup['dataset']}, up to {setup['params']['max_tokens']} tokens; "
        f"{setup['target']}; {where['cpu']}, {where['cores']} cores, {_threads(setup)}; "
        f"{', '.join(versions)}."
    )


if __name__ == "__main__":
    files = [Path(name) for name in sys.argv[2:]]
    update(Path(sys.argv[1]), files)
    draw(load_finished(files), files[0].with_name("peers.png"))
