"""Measures an ablation's arms: acceptance by drafting known answers again, rates turn about with plain decoding."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
    from blockdraft.drafters.names import DrafterChoice
    from blockdraft.engine.api import LLM
    from blockdraft.targets.base import Target


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
        timing: bool,
    ) -> None:
        from blockdraft.cli.wiring import make_chat

        self.config, self.target, self.tokenizer, self.parts = config, target, tokenizer, parts
        self.tap_ids, self.folders, self.console, self.timing = tap_ids, folders, console, timing
        self.chat = make_chat(tokenizer)
        self._replays: dict[str, ReplayTarget] = {}

    def done(self, result: dict[str, Any]) -> bool:
        """Whether nothing is missing in an arm's results."""
        from blockdraft.bench.ablation import ACCEPTANCE, TIMED, missing

        kinds = (ACCEPTANCE, TIMED) if self.timing else (ACCEPTANCE,)
        return not any(missing(result, self.parts, kind) for kind in kinds)

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

    def run(self, arm: str, drafter: str, block_size: int | None, about: dict[str, Any]) -> None:
        """Acceptance on every part, then rates: what is missing, saved after each."""
        from blockdraft.bench.ablation import (
            ACCEPTANCE,
            PLAIN,
            TIMED,
            describe_acceptance,
            describe_timed,
            load_result,
            missing,
            told,
        )
        from blockdraft.bench.report import machine, save
        from blockdraft.cli.bench import make_margin
        from blockdraft.drafters.names import parse_drafter
        from blockdraft.engine.api import LLM
        from blockdraft.train.progress import say

        chosen = parse_drafter(drafter)
        llm = LLM(self.target, chosen, tokenizer=self.tokenizer, slots=1, capacity=8, block_size=block_size)
        about |= self._describe_drafter(llm, chosen)
        path = self.folders.result(arm)
        plain = load_result(self.folders.result(PLAIN))["measured"]
        for part in missing(about, self.parts, ACCEPTANCE):
            say(self.console, f"{arm}: {part.key}, {len(part.prompts)} prompts")
            answers = self._replay(part, llm.drafter, told(plain[part.key]))
            about["measured"].setdefault(part.key, {})[ACCEPTANCE] = describe_acceptance(part, answers)
            save(about, path)
        if not self.timing:
            return
        about["machine"] = machine()
        about["cost"] = self._cost(llm.drafter)
        for part in missing(about, self.parts, TIMED):
            say(self.console, f"{arm}: {part.key}, timing {len(part.timed)} prompts")
            arms = [self._arm(PLAIN, None, part), self._arm(arm, llm.drafter, part)]
            timed = describe_timed(part, arms, self._ask(part, arms), make_margin(llm, self._room(part)))
            about["measured"][part.key][TIMED] = timed
            save(about, path)

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

    def _describe_drafter(self, llm: LLM, chosen: DrafterChoice) -> dict[str, Any]:
        """A drafter's size, where its folder tells, and how a layerwise fusion mixes the taps."""
        from blockdraft.drafters.block import BlockDrafter
        from blockdraft.engine.drafting import shipped_folder

        drafter = llm.drafter
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

        return list(measure(part.timed, arms, self.chat, part.params, self.config.repeats))
