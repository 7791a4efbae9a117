"""Ways to draft compared: the expectation along known answers is that of the algorithm, worked out case by case."""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from cases import Case, make_drafter, neighbour, references, target
from models import save_tiny_drafter, save_tiny_target

from blockdraft.bench.choices import WAYS, describe, markdown, spread
from blockdraft.bench.rejection import chances, expected_rounds
from blockdraft.bench.replay import Told
from blockdraft.cli import main
from blockdraft.config import EngineConfig, SamplingParams
from blockdraft.drafters.base import Drafter
from blockdraft.drafters.independent import IndependentDrafter

KIND = "hf-llama"
SIZE, DRAFTS, LENGTH = 3, 2, 4  # a world that is small enough to go through everything that may happen in it
Text = tuple[int, ...]
Distribution = Callable[[Text], list[float]]
Ways = dict[tuple[Text, int], float]  # how probable a text is, in so many rounds


def some_distribution(seed: int) -> Distribution:
    """Any three probabilities for each text, one of them small; the same whenever they are asked for."""

    def distribution(text: Text) -> list[float]:
        weights = [random.Random(f"{seed} {text} {token}").random() ** 2 + 0.01 for token in range(SIZE)]
        return [weight / sum(weights) for weight in weights]

    return distribution


def leviathan(p: Distribution, q: Distribution) -> Ways:
    """Algorithm 1 of arXiv 2211.17192, all that can happen in it: what may come out, and in how many rounds."""
    found: Ways = defaultdict(float)

    def goes_on(text: Text, rounds: int, chance: float) -> None:
        if len(text) >= LENGTH:
            found[text[:LENGTH], rounds] += chance
            return
        for drafts in product(range(SIZE), repeat=DRAFTS):
            drawn = math.prod(q((*text, *drafts[:k]))[draft] for k, draft in enumerate(drafts))
            verify(text, drafts, rounds + 1, chance * drawn)

    def verify(text: Text, drafts: Text, rounds: int, chance: float) -> None:
        if not drafts:
            for token, probability in enumerate(p(text)):
                goes_on((*text, token), rounds, chance * probability)
            return
        targets, drafters = p(text), q(text)
        keep = min(1.0, targets[drafts[0]] / drafters[drafts[0]])
        verify((*text, drafts[0]), drafts[1:], rounds, chance * keep)
        rest = [max(a - b, 0.0) for a, b in zip(targets, drafters, strict=True)]
        for token, weight in enumerate(rest):
            if weight > 0.0 and keep < 1.0:
                goes_on((*text, token), rounds, chance * (1.0 - keep) * weight / sum(rest))

    goes_on((), 0, 1.0)
    return found


def without_residual(p: Distribution, q: Distribution) -> Ways:
    """The mistake that one makes: what is not kept is chosen anew from p itself."""
    found: Ways = defaultdict(float)
    for draft, after in product(range(SIZE), range(SIZE)):
        keep = min(1.0, p(())[draft] / q(())[draft])
        found[(draft,), 1] += q(())[draft] * keep / SIZE
        found[(after,), 1] += q(())[draft] * (1.0 - keep) * p(())[after]
    return found


def texts_of(ways: Ways) -> dict[Text, float]:
    found: dict[Text, float] = defaultdict(float)
    for (text, _), chance in ways.items():
        found[text] += chance
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_reference_says_what_the_target_would(seed: int) -> None:
    """Exactly: every text is as probable as the target has it, and the algorithm without its residual is caught."""
    p, q = some_distribution(seed), some_distribution(seed + 100)
    found = texts_of(leviathan(p, q))
    for text in product(range(SIZE), repeat=LENGTH):
        assert found[text] == pytest.approx(math.prod(p(text[:k])[token] for k, token in enumerate(text)))
    wrong = texts_of(without_residual(p, q))
    assert sum(wrong.values()) == pytest.approx(1.0)
    assert max(abs(wrong[(token,)] - chance) for token, chance in enumerate(p(()))) > 0.01


@pytest.mark.parametrize("seed", range(3))
def test_rounds_along_a_known_text_are_those_of_the_reference(seed: int) -> None:
    """Of every text by itself: the rounds of all ways in which the algorithm comes to it, by their probability."""
    p, q = some_distribution(seed), some_distribution(seed + 100)
    ways = leviathan(p, q)
    other_way_round = []
    for text, chance in texts_of(ways).items():
        rounds = sum(rounds * part for (found, rounds), part in ways.items() if found == text) / chance
        ratios = [q(text[:k])[token] / p(text[:k])[token] for k, token in enumerate(text)]
        kept = [[min(1.0, ratio) for ratio in ratios[t : t + DRAFTS]] for t in range(LENGTH)]
        assert expected_rounds(kept, LENGTH) == pytest.approx(rounds)
        wrong = [[min(1.0, 1.0 / ratio) for ratio in ratios[t : t + DRAFTS]] for t in range(LENGTH)]
        other_way_round.append(abs(expected_rounds(wrong, LENGTH) - rounds))
    assert max(other_way_round) > 0.1, "control: how probably a given draft is kept is something else"


def test_rounds_at_the_ends() -> None:
    assert expected_rounds([], 0) == 0.0 and expected_rounds([[]], 1) == 1.0
    always, never = [[1.0] * 3] * 9, [[0.0] * 3] * 9
    assert [expected_rounds(always, n) for n in (1, 3, 4, 5, 8, 9)] == [1, 1, 1, 2, 2, 3]
    assert expected_rounds(never, 9) == 9.0


# --- a real target and drafters --------------------------------------------------------------------------------------


def known(temperature: float) -> list[tuple[Told, SamplingParams]]:
    """Answers; whose they are does not matter."""
    params = SamplingParams(temperature=temperature, top_p=0.9 if temperature < 1 else 1.0, seed=0)
    return [(Told(tuple(one.prompt), tuple(one.answer[:12])), params) for one in references(KIND)[:4]]


def slow_probability(model, ids: list[int], token: int, params: SamplingParams) -> float:  # type: ignore[no-untyped-def]
    """What a model gives a token after others, from a pass of its own."""
    logits = model.forward(torch.tensor([ids]), model.new_cache(1, len(ids)), [0]).logits[0, -1].float()
    chance = (logits / params.temperature).softmax(dim=-1)
    if params.top_p < 1.0:
        order = chance.argsort(descending=True)
        inside = chance[order].cumsum(dim=0) - chance[order] < params.top_p
        kept = torch.zeros_like(chance)
        kept[order[inside]] = chance[order[inside]]
        chance = kept / kept.sum()
    return float(chance[token])


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_chances_are_what_the_two_models_say(temperature: float) -> None:
    """A smaller model as drafter: both distributions from passes of their own, token by token."""
    drafter = IndependentDrafter(neighbour(KIND), target(KIND).info, 3)
    partly = 0
    for told, params in known(temperature):
        found = chances(target(KIND), drafter, told, params)
        assert len(found) == len(told.answer) - 1
        for t, row in enumerate(found):
            assert len(row) == min(3, len(told.answer) - 1 - t)
            for k, chance in enumerate(row):
                ids = [*told.prompt, *told.answer[: t + 1 + k]]
                token = told.answer[t + 1 + k]
                p, q = (slow_probability(one, ids, token, params) for one in (target(KIND), neighbour(KIND)))
                if p > 1e-6:  # top-p leaves out some tokens of answers that were given without it
                    assert chance == pytest.approx(min(1.0, q / p), abs=2e-3)
                partly += 0.01 < chance < 0.99
    assert partly > 20, "or it says little"


def block_drafter(name: str) -> Drafter:
    return make_drafter(Case(KIND, name, 4, EngineConfig(), 0, []))


@pytest.mark.parametrize("name", ["dflash", "autoregressive", "eagle3"])
def test_every_drafter_that_draws_can_be_asked(name: str) -> None:
    """A target that thinks as the drafter does keeps all; a strange one keeps what its own words are worth to it."""
    for told, params in known(1.0):
        found = chances(target(KIND), block_drafter(name), told, params)
        values = [chance for row in found for chance in row]
        assert all(0.0 <= chance <= 1.0 for chance in values) and 0.0 < sum(values) < len(values)
    own = IndependentDrafter(target(KIND), target(KIND).info, 3)
    assert (
        min(chance for told, params in known(1.0) for row in chances(target(KIND), own, told, params) for chance in row)
        > 0.999
    )


def test_a_lookup_has_no_chances() -> None:
    told, params = known(1.0)[0]
    with pytest.raises(AssertionError, match="does not draw"):
        chances(target(KIND), block_drafter("ngram"), told, params)


# --- results ---------------------------------------------------------------------------------------------------------


def some_counts() -> list[dict[str, object]]:
    rng = random.Random(0)
    return [
        {
            "id": f"p{n}",
            "tokens": 100 + n,
            "rounds": {way: 40 + 10 * place + rng.randint(-5, 5) for place, way in enumerate(WAYS)},
        }
        for n in range(8)
    ]


def test_results_by_hand() -> None:
    counts = some_counts()
    part = describe(0.7, counts)
    tokens = sum(100 + n for n in range(8))
    for way in WAYS:
        rounds = sum(one["rounds"][way] for one in counts)  # type: ignore[index]
        found = part["tau"][way]
        assert found["value"] == pytest.approx(tokens / rounds, abs=1e-4)
        assert found["low"] < found["value"] < found["high"]
    ratio = part["tau"]["coupled"]["value"] / part["tau"]["argmax"]["value"]
    assert part["coupled_over"]["argmax"]["value"] == pytest.approx(ratio, abs=1e-3)
    alike = spread([{"x": 3.0}] * 5, lambda some: sum(one["x"] for one in some) / len(some))
    assert alike == {"value": 3.0, "low": 3.0, "high": 3.0}


def test_the_table_has_what_the_file_has() -> None:
    drafter = {"name": "d", "max_drafts": 7}
    setup = {"target": "t", "drafter": drafter, "prompts": 8, "dataset": "gsm8k", "max_tokens": 128}
    result = json.loads(json.dumps({"setup": setup, "parts": [describe(t, some_counts()) for t in (0.7, 1.0)]}))
    lines = markdown(result).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| 0.7", "| 1"]
    assert f"{result['parts'][0]['tau']['coupled']['value']:.2f}" in lines[2]


def test_the_command_counts_the_same_answers_three_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny_target(tmp_path / "target")
    save_tiny_drafter(tmp_path / "drafter")
    (tmp_path / "few.jsonl").write_text("".join(f'{{"prompt": "What is {n} + {n}?"}}\n' for n in range(3)))
    words = ["choices", "--dataset", "few.jsonl", "--target", "target", "--drafter", "drafter", "--max-tokens", "16"]
    with pytest.raises(SystemExit) as left:
        main([*words, "--temperatures", "0.5,2", "--slots", "2", "--output", "out.json"])
    assert not left.value.code, capsys.readouterr().err
    result = json.loads((tmp_path / "out.json").read_text())
    assert [part["temperature"] for part in result["parts"]] == [0.5, 2.0]
    for answer in (one for part in result["parts"] for one in part["answers"]):
        assert set(answer["rounds"]) == set(WAYS)
        assert all(1 <= rounds <= answer["tokens"] for rounds in answer["rounds"].values()), answer


def test_the_document_has_what_results_hold() -> None:
    root = Path(__file__).parent.parent
    text = (root / "docs" / "performance.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- draft choices: begin -->\n")[2].partition("\n<!-- draft choices: end -->")[0]
    file = root / "results" / "draft-choices.json"
    assert shown == (markdown(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else "Not measured yet.")
