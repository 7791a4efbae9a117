"""What waits for the drafter: nothing is lost, nothing is shown twice, and late is as good as at once."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from cases import trained_drafter
from fakes import HashTarget, OracleDrafter
from oracles import by_hand, check_stats

from blockdraft.config import EngineConfig, NgramConfig, SamplingParams
from blockdraft.drafters.base import COSTLY, Drafter, Proposal
from blockdraft.drafters.lookup import LookupDrafter
from blockdraft.drafters.ngram import NgramDrafter
from blockdraft.engine import backlog as backlog_room
from blockdraft.engine.backlog import Backlog
from blockdraft.engine.engine import Engine
from blockdraft.engine.policy import Ask, Fixed, Row
from blockdraft.engine.probe import few, spread


@pytest.mark.parametrize("with_taps", [True, False])
def test_what_is_shown_is_what_was_committed(with_taps: bool) -> None:
    """Rows in any order and company, some rounds done twice, against plain lists."""
    rng, backlog = random.Random(0), Backlog()
    texts: dict[int, list[int]] = {row: [] for row in range(4)}  # what waits
    lengths = dict.fromkeys(range(4), 0)
    shown_at_once = 0
    for _ in range(400):
        rows = rng.sample(range(4), rng.randint(1, 3))
        if rng.random() < 0.2:
            shown = backlog.peek(rows)
            waiting = [row for row in rows if texts[row]]
            assert (shown is None) == (not waiting)
            if shown is not None:
                assert shown.rows == waiting and (shown.taps is not None) == with_taps
                for b, (row, count) in enumerate(zip(shown.rows, shown.counts, strict=True)):
                    assert shown.ids[b, :count].tolist() == texts[row]
                    if shown.taps is not None:
                        assert shown.taps.shape[2:] == (2, 3)
                        assert shown.taps[b, :count, 0, 0].tolist() == [token * 2.0 for token in texts[row]]
                    backlog.forget(row)
                    texts[row] = []
                shown_at_once = max(shown_at_once, *shown.counts)
            continue
        starts = [lengths[row] for row in rows]
        for _ in range(1 + (rng.random() < 0.2)):  # interrupted after the first time
            counts = [rng.randint(1, 4) for _ in rows]
            ids = torch.randint(0, 50, (len(rows), 4), generator=torch.Generator().manual_seed(rng.randrange(999)))
            taps = (ids * 2.0)[..., None, None].expand(-1, -1, 2, 3) if with_taps else None
            said = [row[:count] for row, count in zip(ids.tolist(), counts, strict=True)]
            backlog.add(rows, starts, said, taps)
        for b, (row, count) in enumerate(zip(rows, counts, strict=True)):
            texts[row] += ids[b, :count].tolist()
            lengths[row] += count
    assert shown_at_once > 10


class Rests(Fixed):
    """Drafts in every n-th round."""

    def __init__(self, limit: int, every: int) -> None:
        super().__init__(limit)
        self.every, self.rounds = every, 0

    def begin(self, rows: Sequence[Row]) -> Ask:
        self.rounds += 1
        return Ask.NOBODY if self.rounds % self.every else Ask.ALL


class Watched(OracleDrafter):
    """Notes how much it is shown at once."""

    def __init__(self, max_drafts: int, vocab_size: int, sequences: list[list[int]]) -> None:
        super().__init__(max_drafts, vocab_size, sequences)
        self.shown: list[int] = []

    def observe(self, state, rows, tokens, taps, counts):
        self.shown += counts
        super().observe(state, rows, tokens, taps, counts)


@pytest.mark.parametrize(("every", "piece", "most"), [(1, 128, 8), (10, 128, 17), (10, 5, 5), (1000, 128, 0)])
def test_a_drafter_that_rested_knows_everything(
    every: int, piece: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter asserts that what it was shown is the text; after a rest it drafts right at once.

    One that is never asked is shown nothing, not even the prompts.
    """
    monkeypatch.setattr(backlog_room, "PIECE", piece)
    target, params = HashTarget(), SamplingParams(max_tokens=200, ignore_eos=True)
    prompts = [[3, 4, 5], [6, 7]]
    answers = [by_hand(target, prompt, params) for prompt in prompts]
    drafter = Watched(7, 61, [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)])
    engine = Engine(target, drafter, EngineConfig(slots=2), policy=Rests(7, every))
    requests = [engine.add(prompt, params) for prompt in prompts]
    engine.run()
    assert [request.output_ids for request in requests] == answers
    assert max(drafter.shown, default=0) == most, "not more at once than a piece, and all that waits"
    for request in requests:
        check_stats(request)
        assert request.stats.accepted == request.stats.drafted and (request.stats.drafted > 0) == (every < 1000)


def test_too_much_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taps take memory: before there is too much of them the drafter is shown what waits, though nobody asks it."""
    monkeypatch.setattr(backlog_room, "LIMIT", 50 * 2 * 3 * 4)  # 50 tokens of 2 taps of 3 floats
    target, params, prompt = HashTarget(), SamplingParams(max_tokens=200, ignore_eos=True), [3, 4, 5]
    answer = by_hand(target, prompt, params)
    drafter = Watched(7, 61, [[*prompt, *answer]])
    engine = Engine(target, drafter, EngineConfig(slots=2), policy=Rests(7, 1000))
    requests = [engine.add(prompt, params) for _ in range(2)]
    largest = 0
    while engine.has_work:
        engine.step()
        largest = max(largest, engine.pair.backlog.size)
    assert [request.output_ids for request in requests] == [answer] * 2
    assert largest == 50 * 24 and sum(drafter.shown) > 2 * 150
    assert engine.pair.backlog.size == 0 and not any(engine.pair.backlog.waiting.values()), "nobody will ask"


class Few(Fixed):
    """Asks for a few rows only, in every round."""

    def begin(self, rows: Sequence[Row]) -> Ask:  # always the same
        return Ask.SOME


def test_few_rows_are_asked_and_the_others_decoded() -> None:
    """A row that is asked drafts as always, and no answer changes."""
    target, params = HashTarget(), SamplingParams(max_tokens=60, ignore_eos=True)
    prompts = [[3, 4, 5], [6, 7], [8, 9, 1]]
    answers = [by_hand(target, prompt, params) for prompt in prompts]
    drafter = Watched(4, 61, [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)])
    engine = Engine(target, drafter, EngineConfig(slots=3), policy=Few(4))
    requests = [engine.add(prompt, params) for prompt in prompts]
    engine.run()
    assert [request.output_ids for request in requests] == answers
    stats = [request.stats for request in requests]
    assert all(one.accepted == one.drafted for one in stats) and sum(one.drafted for one in stats) > 60
    assert sum(one.undrafted for one in stats) > 30
    for request in requests:
        check_stats(request)


def test_a_proposal_for_some_rows_is_one_for_all() -> None:
    few_rows = [Row(slot, 9, False, waiting) for slot, waiting in enumerate((9, 3, 7, 8))]
    assert few(few_rows) == [1] and few(few_rows * 8) == [1, 5]
    part = Proposal(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[0.5, 0.25], [0.75, 0.1]]), [2, 1], [0, 3])
    whole = spread(part, [2, 0], 3)
    assert whole.tokens.tolist() == [[3, 4], [0, 0], [1, 2]] and whole.counts == [1, 0, 2]
    assert whole.sources is not None and whole.confidence is not None
    assert [whole.sources[b] == COSTLY for b in range(3)] == [False, False, True]
    assert whole.confidence[2].tolist() == [0.5, 0.25] and whole.confidence[1].isnan().all()
    assert spread(Proposal(torch.tensor([[1, 2]])), [1], 2).counts == [0, 2]


class OnlyFree(Fixed):
    """Asks the free part and nobody else."""

    def begin(self, rows: Sequence[Row]) -> Ask:  # always the same
        return Ask.FREE


def test_a_free_part_alone_drafts_as_it_would_without_the_other() -> None:
    """Every count is that of a lookup by itself, while the one behind hears of nothing and is never asked."""
    target, params = HashTarget(), SamplingParams(max_tokens=200, ignore_eos=True)
    prompts, settings = [[3, 4, 5], [6, 7], [3, 4, 5, 9]], NgramConfig(longest=3, shortest=1, max_drafts=5)
    answers = [by_hand(target, prompt, params) for prompt in prompts]
    behind = Watched(5, 61, [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)])
    behind.propose = None  # type: ignore[method-assign, assignment]
    counts: list[list[dict[str, object]]] = []
    pairs: list[tuple[Drafter, Fixed]] = [
        (LookupDrafter(behind, settings), OnlyFree(5)),
        (NgramDrafter(settings), Fixed(5)),
    ]
    for drafter, policy in pairs:
        engine = Engine(target, drafter, EngineConfig(slots=2), policy=policy)
        requests = [engine.add(prompt, params) for prompt in prompts]
        engine.run()
        assert [request.output_ids for request in requests] == answers
        for request in requests:
            check_stats(request)
        counts.append([{**vars(one.stats), "partly_drafted": 0, "undrafted": 0} for one in requests])
    assert counts[0] == counts[1] and min(one["drafted"] for one in counts[0]) > 100  # type: ignore[type-var]
    assert not behind.shown


def test_late_is_as_good_as_at_once() -> None:
    """A block drafter drafts the same after one long look as after many short ones."""
    drafter = trained_drafter("dense-llama", 5, "dflash")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 90, (2, 12), generator=generator)
    taps = torch.randn(2, 12, 2, 32, generator=generator)
    at_once, late = drafter.new_state(2, 64), drafter.new_state(2, 64)
    backlog, lengths = Backlog(), [12, 7]
    for at in range(12):
        rows = [row for row in (0, 1) if at < lengths[row]]
        new = slice(at, at + 1)
        drafter.observe(at_once, rows, ids[rows][:, new], taps[rows][:, new], [1] * len(rows))
        backlog.add(rows, [at] * len(rows), ids[rows][:, new].tolist(), taps[rows][:, new])
    shown = backlog.peek([0, 1])
    assert shown is not None and shown.counts == lengths
    drafter.observe(late, shown.rows, shown.ids, shown.taps, shown.counts)
    proposals: list[Proposal] = [drafter.propose(state, [0, 1], ids[:, 0]) for state in (at_once, late)]
    assert late.lengths == at_once.lengths == lengths
    assert torch.equal(proposals[0].tokens, proposals[1].tokens)
    assert proposals[0].confidence is not None and proposals[1].confidence is not None
    assert torch.allclose(proposals[0].confidence, proposals[1].confidence, atol=1e-5)
