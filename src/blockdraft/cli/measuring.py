"""Measures an ablation's arms: acceptance by drafting known answers again, rates turn about with plain decoding."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from blockdraft.bench.ablation import Part
    from blockdraft.bench.measure import Answer, Arm
    from blockdraft.bench.replay import ReplayTarget, Told
    from blockdraft.cli.matrix import Folders
    from blockdraft.config import AblationConfig
    from blockdraft.drafters.base import Drafter
    from blockdraft.engine.api import LLM
    from blockdraft.targets.base import Target


COST_ROUNDS = 3


@dataclass(frozen=True)
class Named:
    """A drafter by what `--drafter` takes, and the size of the blocks it drafts (None: as it was trained)."""

    drafter: str
    block_size: int | None = None


class Measuring:
    """The parts of an ablation, and what all arms share in being measured on them.

    `tap_ids` are the taps of all arms that are trained: read once along plain decoding's answers, and kept.
    """

    def __init__(
        self,
        config: AblationConfig,
        target: Target,
        tokenizer: PreTrainedTokenizerBase,
        parts: Sequence[Part],
        tap_ids: tuple[int, ...],
        folders: Folders,
        console: Console,
    ) -> None:
        from blockdraft.cli.wiring import make_chat

        self.config, self.target, self.tokenizer, self.parts = config, target, tokenizer, parts
        self.tap_ids, self.folders, self.console = tap_ids, folders, console
        self.chat = make_chat(tokenizer)
        self._replays: dict[str, ReplayTarget] = {}

    def accepted(self, result: dict[str, Any]) -> bool:
        """Whether an arm's acceptance has been measured on every part."""
        from blockdraft.bench.ablation import ACCEPTANCE, missing

        return not missing(result, self.parts, ACCEPTANCE)

    def run_plain(self) -> None:
        """Plain decoding's answers to every part, once for all arms."""
        from blockdraft.bench.ablation import ACCEPTANCE, PLAIN, describe_plain, load_result, missing
        from blockdraft.bench.measure import measure
        from blockdraft.bench.report import save
        from blockdraft.cli.wiring import engine_arm, make_engine
        from blockdraft.train.progress import say

        path, slots = self.folders.result(PLAIN), self.config.slots
        about: dict[str, Any] = {"name": PLAIN, "identity": {}, "measured": {}, **load_result(path)}
        for part in missing(about, self.parts, ACCEPTANCE):
            say(self.console, f"{PLAIN}: {part.key}, {len(part.prompts)} prompts")
            engine = make_engine(self.target, None, self.tokenizer, self._room(part), slots)
            rows = list(measure(part.prompts, [engine_arm(PLAIN, engine)], self.chat, part.params, slots=slots))
            about["measured"][part.key] = describe_plain(part, rows)
            save(about, path)

    def accept(self, arm: str, named: Named, about: dict[str, Any]) -> None:
        """Acceptance of an arm's drafter on every part where it is missing, saved after each."""
        from blockdraft.bench.ablation import ACCEPTANCE, PLAIN, describe_acceptance, load_result, missing, told
        from blockdraft.bench.report import save
        from blockdraft.train.progress import say

        llm = self._load(named)
        about |= self._describe_drafter(llm, named)
        plain = load_result(self.folders.result(PLAIN))["measured"]
        for part in missing(about, self.parts, ACCEPTANCE):
            say(self.console, f"{arm}: {part.key}, {len(part.prompts)} prompts")
            answers = self._replay(part, llm.drafter, told(plain[part.key]))
            about["measured"].setdefault(part.key, {})[ACCEPTANCE] = describe_acceptance(part, answers)
            save(about, self.folders.result(arm))

    def time(self, drafters: Mapping[str, Named]) -> None:
        """Rates of all arms that lack them, whose acceptance is measured: one run for each part, saved after each."""
        from blockdraft.bench.ablation import PLAIN, TIMED, describe_timed, load_result, missing
        from blockdraft.bench.report import machine, save
        from blockdraft.cli.bench import make_margin
        from blockdraft.train.progress import say

        abouts = {arm: load_result(self.folders.result(arm)) for arm in drafters}
        abouts = {arm: about for arm, about in abouts.items() if missing(about, self.parts, TIMED)}
        llms = {arm: self._load(drafters[arm]) for arm in abouts}
        costs = self._costs({arm: llm.drafter for arm, llm in llms.items()})
        for arm, about in abouts.items():
            about |= {"machine": machine(), "cost": costs[arm]}
        for part in self.parts:
            untimed = [arm for arm, about in abouts.items() if missing(about, [part], TIMED)]
            if not untimed:
                continue
            say(self.console, f"{part.key}: timing {len(part.timed)} prompts, {PLAIN}, {', '.join(untimed)}")
            plain = self._arm(PLAIN, None, part)
            arms = {arm: self._arm(arm, llms[arm].drafter, part) for arm in untimed}
            rows = self._ask(part, [plain, *arms.values()])
            for arm, timed in arms.items():
                margin = make_margin(llms[arm], self._room(part))
                abouts[arm]["measured"][part.key][TIMED] = describe_timed(part, plain, timed, rows, margin)
                save(abouts[arm], self.folders.result(arm))

    def _load(self, named: Named) -> LLM:
        from blockdraft.drafters.names import parse_drafter
        from blockdraft.engine.api import LLM

        drafter, size = parse_drafter(named.drafter), named.block_size
        return LLM(self.target, drafter, tokenizer=self.tokenizer, slots=1, capacity=8, block_size=size)

    def _replay(self, part: Part, drafter: Drafter | None, conversations: list[Told]) -> list[Answer]:
        """Draft the part's known answers again; the taps along them are read once for all arms."""
        from blockdraft.bench.replay import ReplayTarget, greedy
        from blockdraft.cli.wiring import engine_arm, make_engine

        taps = {*self.tap_ids, *(drafter.tap_ids if drafter is not None else ())}
        replay = self._replays.get(part.key)
        if replay is None or not taps <= set(replay.tap_ids):  # a drafter that was not trained here may have others
            replay = self._replays[part.key] = ReplayTarget(self.target, sorted(taps), conversations)
        engine = make_engine(replay, drafter, self.tokenizer, self._room(part), self.config.slots)
        params = [greedy(part.params)] * len(conversations)
        answers = engine_arm("replay", engine).answer([list(one.prompt) for one in conversations], params)
        assert [answer.token_ids for answer in answers] == [one.answer for one in conversations], "a known answer"
        return answers

    def _describe_drafter(self, llm: LLM, named: Named) -> dict[str, Any]:
        """A drafter's size, where its folder tells, and how a layerwise fusion mixes the taps."""
        from blockdraft.drafters.block import BlockDrafter
        from blockdraft.drafters.names import parse_drafter
        from blockdraft.engine.drafting import shipped_folder

        drafter, chosen = llm.drafter, parse_drafter(named.drafter)
        if drafter is None:
            return {"parameters": 0, "max_drafts": 0}
        folder = shipped_folder(self.target.info.name, chosen) if isinstance(chosen, str) else chosen
        file = folder / "provenance.json" if isinstance(folder, Path) else None
        about: dict[str, Any] = {
            "parameters": json.loads(file.read_text()).get("parameters") if file and file.is_file() else None,
            "max_drafts": drafter.max_drafts,
        }
        if isinstance(drafter, BlockDrafter) and drafter.config.fusion == "layerwise":
            mixes = drafter.model.layer_fusion_weights.float().softmax(dim=-1)
            about["fusion"] = {
                "taps": list(drafter.tap_ids),
                "mixes": [[round(w, 4) for w in row] for row in mixes.tolist()],
            }
        return about

    def _costs(self, drafters: Mapping[str, Drafter | None]) -> dict[str, dict[str, Any]]:
        """The costs of all arms, the median of rounds turn about: a machine that changes its pace favours none."""
        rounds = [{arm: self._cost(drafter) for arm, drafter in drafters.items()} for _ in range(COST_ROUNDS)]
        return {
            arm: {key: statistics.median(one[arm][key] for one in rounds) for key in rounds[0][arm]} for arm in drafters
        }

    def _cost(self, drafter: Drafter | None) -> dict[str, Any]:
        """Median times after the first prompt: a proposal, the target's pass over it, and over a single token."""
        from blockdraft.bench.cost import pass_seconds, propose_seconds

        ids = self.chat.encode([{"role": "user", "content": self.parts[0].prompts[0].turns[0]}])
        width, taps = (1, ()) if drafter is None else (drafter.max_drafts + 1, drafter.tap_ids)
        seconds = {
            "propose_ms": 0.0 if drafter is None else propose_seconds(self.target, drafter, ids),
            "verify_ms": pass_seconds(self.target, ids, width, taps),
            "plain_ms": pass_seconds(self.target, ids, 1),
        }
        return {name: round(value * 1000, 4) for name, value in seconds.items()} | {"context_tokens": len(ids)}

    def _arm(self, name: str, drafter: Any, part: Part) -> Arm:
        from blockdraft.cli.wiring import engine_arm, make_engine

        return engine_arm(name, make_engine(self.target, drafter, self.tokenizer, self._room(part)))

    def _room(self, part: Part) -> int:
        from blockdraft.cli.bench import room_for

        return room_for(part.prompts, self.chat, self.config.max_tokens)

    def _ask(self, part: Part, arms: list[Arm]) -> list[Any]:
        from blockdraft.bench.measure import measure

        return list(measure(part.timed, arms, self.chat, part.timed_params, self.config.repeats))
