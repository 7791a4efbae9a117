"""Random cases for the promise that drafts change nothing: references decoded alone, and mixes of them to run."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from fakes import ByteTokenizer, OracleDrafter, UnrelatedDrafter
from families import FAMILIES, served, tiny_family
from oracles import check_stats, slow_stop
from tiny import EOS, VOCAB, tiny_model
from transformers import PreTrainedModel

from blockdraft.config import DrafterConfig, EngineConfig, NgramConfig, SamplingParams
from blockdraft.drafters.base import Drafter, PartlyFree, Proposal
from blockdraft.drafters.block import BlockDrafter
from blockdraft.drafters.chain import ChainDrafter
from blockdraft.drafters.families import as_drafter, new_model
from blockdraft.drafters.independent import IndependentDrafter
from blockdraft.drafters.lookup import LookupDrafter
from blockdraft.drafters.ngram import NgramDrafter
from blockdraft.engine.adaptive import Adaptive
from blockdraft.engine.costs import VerifyCosts
from blockdraft.engine.engine import Engine
from blockdraft.engine.policy import Ask, Policy, Row, available
from blockdraft.engine.request import Request
from blockdraft.targets.base import Target
from blockdraft.targets.dense import DenseTarget
from blockdraft.targets.hf import HFTarget

MIXED = {"layer_types": ["full_attention", "sliding_attention"]}
# name -> (what computes the layers, whose layers, what is different about them)
KINDS: dict[str, tuple[type[HFTarget | DenseTarget], str, dict[str, Any]]] = {
    "hf-llama": (HFTarget, "llama", {}),
    "dense-llama": (DenseTarget, "llama", {}),
    "hf-qwen3": (HFTarget, "qwen3", {}),
    "dense-qwen3-mixed": (DenseTarget, "qwen3-mixed", MIXED),
}
AXES: dict[str, dict[str, Any]] = {  # real drafters, with random weights
    "dflash": {},
    "dflare": {"fusion": "layerwise", "context_projections": "separate"},
    "autoregressive": {"order": "autoregressive", "anchor_drafts": True},
    "input": {"injection": "input"},
    "eagle3": {"family": "eagle3", "anchor_drafts": True, "mask_token_id": None, "num_layers": 1},
    "mtp": {"family": "mtp", "anchor_drafts": True, "mask_token_id": None, "tap_ids": (1,)},
}
CHAINS = ("eagle3", "mtp")
BLOCKS = tuple(name for name in AXES if name not in CHAINS)
DRAFTERS = ("unrelated", "wrong", "right", "mixed", *BLOCKS, "ngram", "model", "lookup")
LAYERS = 2  # of a target
LENGTH = 28  # tokens of a reference
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "presence_penalty": 0.5},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.2, "logit_bias": {5: 2.0, EOS: 3.0}},
    {"temperature": 1.0, "min_p": 0.05, "frequency_penalty": -0.3},
)
FEW_SETTINGS: tuple[dict[str, Any], ...] = ({}, {}, SETTINGS[4], SETTINGS[5])  # for one of many families


@dataclass(frozen=True)
class Reference:
    """A request without stops, and what plain decoding answers to it."""

    prompt: list[int]
    params: SamplingParams
    answer: list[int]


def untouched(kind: str) -> PreTrainedModel:
    """The model of one of `KINDS` or `FAMILIES`, as transformers makes it."""
    if kind in FAMILIES:
        return tiny_family(kind)
    _, layers, overrides = KINDS[kind]
    return tiny_model(layers, num_hidden_layers=LAYERS, **overrides)


def wrapped(kind: str, model: PreTrainedModel, name: str) -> Target:
    return served(model, name) if kind in FAMILIES else KINDS[kind][0](model, name)


@cache
def target(kind: str) -> Target:
    return wrapped(kind, untouched(kind), kind)


@cache
def neighbour(kind: str) -> Target:
    """A model that often says what the target says: the same weights, disturbed a little."""
    model = untouched(kind)
    generator = torch.Generator().manual_seed(0)
    for _, parameter in sorted(model.named_parameters()):
        parameter.data += 0.01 * torch.randn(parameter.shape, generator=generator)
    return wrapped(kind, model, f"near-{kind}")


@cache
def references(kind: str) -> list[Reference]:
    rng = random.Random(kind)
    found = []
    settings = FEW_SETTINGS if kind in FAMILIES else SETTINGS * 3
    for different in settings:
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 9, 40, 63)))]
        values = {"max_tokens": LENGTH, "ignore_eos": True, "seed": rng.randrange(2**40), **different}
        params = SamplingParams.parse(values)
        engine = Engine(target(kind), None, EngineConfig(capacity=128))
        request = engine.add(prompt, params)
        engine.run()
        found.append(Reference(prompt, params, request.output_ids))
    return found


@dataclass(frozen=True)
class Case:
    """Requests with what is expected of them, the drafter and the engine they meet."""

    kind: str
    drafter: str
    max_drafts: int
    config: EngineConfig
    seed: int
    requests: list[tuple[Reference, SamplingParams, list[int], str, str]]


def make_case(seed: int) -> Case:
    rng = random.Random(seed)
    kind = list(KINDS)[seed % 4]
    chosen = rng.sample(references(kind), rng.randint(1, 5))
    width, capacity = rng.choice((None, None, 0, 1, 3)), rng.choice((80, 100, 200))
    return Case(
        kind,
        drafter=DRAFTERS[seed % len(DRAFTERS)],
        max_drafts=rng.randint(2, 16) - 1,
        config=EngineConfig(
            slots=rng.randint(1, 4), capacity=capacity, verify_width=width, coupled=seed % 3 > 0, overlap=seed % 2 > 0
        ),
        seed=seed,
        requests=[(reference, *shorten(reference, capacity, rng)) for reference in chosen],
    )


def shorten(reference: Reference, capacity: int, rng: random.Random) -> tuple[SamplingParams, list[int], str, str]:
    """Limits and stops for a reference, and the ids, finish reason and text that they leave of it."""
    answer = reference.answer
    values: dict[str, Any] = {"max_tokens": rng.choice((1, 2, rng.randint(3, LENGTH), LENGTH))}
    values["ignore_eos"] = rng.random() < 0.5
    if rng.random() < 0.3:
        values["stop_token_ids"] = (answer[rng.randrange(LENGTH)], rng.randrange(VOCAB))
    if rng.random() < 0.3:
        at, size = rng.randrange(LENGTH - 3), rng.randint(1, 3)
        values["stop"] = (bytes(answer[at : at + size]).decode(), "never there")
    params = SamplingParams.parse({**reference.params.model_dump(), **values})
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    limit = min(params.max_tokens, capacity - len(reference.prompt))
    for count in range(1, limit + 1):
        text = bytes(token for token in answer[: count - 1]).decode()
        if answer[count - 1] in stop_ids:
            return params, answer[:count], "stop", text
        text, hit = slow_stop(bytes(answer[:count]).decode(), list(params.stop))
        if hit:
            return params, answer[:count], "stop", text
    return params, answer[:limit], "length", text


def make_drafter(case: Case) -> Drafter:
    if case.drafter in AXES:
        return trained_drafter(case.kind, case.max_drafts + 1, case.drafter)
    if case.drafter == "ngram":
        return NgramDrafter(NgramConfig(max_drafts=case.max_drafts))
    if case.drafter == "lookup":
        other = trained_drafter(case.kind, case.max_drafts + 1, "dflash")
        return LookupDrafter(other, NgramConfig(longest=2, shortest=1))
    if case.drafter == "model":
        return IndependentDrafter(neighbour(case.kind), target(case.kind).info, case.max_drafts)
    if case.drafter == "unrelated":
        return UnrelatedDrafter(case.max_drafts, VOCAB, case.seed)
    spoil = {
        "right": [False],
        "wrong": [True],
        "mixed": [random.Random(case.seed + k).random() < 0.3 for k in range(37)],
    }
    known = [reference.prompt + reference.answer for reference, *_ in case.requests]
    return OracleDrafter(case.max_drafts, VOCAB, known, spoil[case.drafter])


def trained_drafter(kind: str, block_size: int, member: str) -> BlockDrafter | ChainDrafter:
    """One of `AXES`; where every draft is a pass of its own, blocks are short."""
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "intermediate_size": 32,
        "vocab_size": VOCAB,
        "mask_token_id": VOCAB - 1,
        "tap_ids": (0, 1),
        "num_target_layers": target(kind).info.num_layers,
        **AXES[member],
    }
    short = member in ("autoregressive", *CHAINS)
    config = DrafterConfig(block_size=min(block_size, 5) if short else block_size, **shape)
    torch.manual_seed(block_size)
    return as_drafter(new_model(config).eval(), target(kind), None, member)


class Whim:
    """A policy that does as it likes: drafts for a while or not, and verifies any number of what there is."""

    def __init__(self, limit: int, seed: int, partly_free: bool) -> None:
        self.limit, self.rng = limit, random.Random(seed)
        self.asks = [ask for ask in Ask if partly_free or ask is not Ask.FREE]
        self.asked = Ask.ALL

    def begin(self, rows: Sequence[Row]) -> Ask:
        if self.rng.random() < 0.3:
            self.asked = self.rng.choice(self.asks)
        return self.asked

    def widths(self, proposal: Proposal, limits: Sequence[int]) -> list[int]:
        return [self.rng.randint(0, top) for top in available(proposal, limits)]

    def learn(self, committed: Sequence[Sequence[int]], timed: bool = True) -> None:
        assert all(committed)

    def admit(self, slot: int) -> None:
        self.asked = Ask.NOBODY if slot % 2 else Ask.ALL


def watchful(limit: int, seed: int, partly_free: bool) -> Adaptive:
    """The real policy among costs that are made up, by a clock that stumbles: it turns to and fro all the time."""
    rng = random.Random(seed)
    draft, wide = rng.choice((0.0, 0.05, 0.5)), rng.choice((1.0, 1.2, 3.0))
    costs = VerifyCosts((1, 4), (1, 8), 8, ((1.0, wide), (1.5, 2 * wide)), ((0.0, 0.0), (0.0, 0.0)), (draft, draft))
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += rng.choice((0.1, 1.0, 2.0))
        return now

    return Adaptive(limit, lambda: costs, clock, partly_free)


def run_case(case: Case, make_policy: Callable[[int, int, bool], Policy] | None = None) -> list[Request]:
    """Run a case with its requests admitted in random order at random times; assert all that is promised."""
    rng = random.Random(case.seed)
    tokenizer = ByteTokenizer()
    drafter = make_drafter(case)
    policy = None
    if make_policy is not None:
        policy = make_policy(drafter.max_drafts, case.seed, isinstance(drafter, PartlyFree))
    engine = Engine(target(case.kind), drafter, case.config, tokenizer, policy)  # type: ignore[arg-type]
    order = list(range(len(case.requests)))
    rng.shuffle(order)
    running: dict[int, Request] = {}
    while order or engine.has_work:
        while order and (not engine.has_work or rng.random() < 0.4):
            index = order.pop()
            reference, params, *_ = case.requests[index]
            running[index] = engine.add(reference.prompt, params)
        engine.step()
    for index, (_, params, ids, reason, text) in enumerate(case.requests):
        request = running[index]
        assert request.output_ids == ids, f"case {case.seed}, request {index}: not the target's own answer"
        assert (request.finish_reason, request.text) == (reason, text)
        assert len(request.output_ids) <= params.max_tokens
        check_stats(request)
    return list(running.values())
