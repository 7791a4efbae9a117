"""Lookup beside another drafter: the text's where it matches, the other's elsewhere, each as it would draft alone."""

from __future__ import annotations

import random

import torch
from fakes import UnrelatedDrafter

from blockdraft.config import NgramConfig
from blockdraft.drafters.lookup import LookupDrafter
from blockdraft.drafters.ngram import NgramDrafter

VOCAB = 50


class Counting(UnrelatedDrafter):
    """Drafts numbers that no text has, and counts for how many rows."""

    asked = 0

    def draft(self, committed: list[int]) -> list[int]:
        self.asked += 1
        return [VOCAB + (sum(committed) + k) % 7 for k in range(self.max_drafts)]


def test_each_row_drafts_as_one_of_the_two_would_alone() -> None:
    settings = NgramConfig(longest=3, shortest=2)
    other, alone = Counting(4, VOCAB), Counting(4, VOCAB)
    drafter, text = LookupDrafter(other, settings), NgramDrafter(settings.model_copy(update={"max_drafts": 4}))
    assert (drafter.tap_ids, drafter.max_drafts, drafter.name) == (other.tap_ids, 4, "ngram+fake")
    states = drafter.new_state(4, 64), text.new_state(4, 64), alone.new_state(4, 64)
    rng, from_text, silent = random.Random(0), 0, 0
    for step in range(80):
        rows = rng.sample(range(4), 3)
        if step % 20 == 19:
            for one, state in zip((drafter, text, alone), states, strict=True):
                one.reset(state, rows[0])
        anchors = torch.tensor([rng.randrange(2 + 2 * row) for row in rows])
        found = text.propose(states[1], rows, anchors)
        drafted = alone.propose(states[2], rows, anchors)
        before = other.asked
        proposal = drafter.propose(states[0], rows, anchors)
        assert found.counts is not None
        assert other.asked - before == found.counts.count(0), "rows that the text serves cost nothing else"
        for b, count in enumerate(found.counts):
            expected = found.tokens[b, :count] if count else drafted.tokens[b]
            assert torch.equal(proposal.tokens[b, : len(expected)], expected)
            assert proposal.counts is None or proposal.counts[b] == len(expected)
            from_text, silent = from_text + bool(count), silent + (not count)
        counts = [rng.randint(1, 3) for _ in rows]
        tokens = torch.cat([anchors[:, None], torch.randint(0, 4, (3, 2))], dim=1)
        taps = torch.zeros(3, 3, 2, 3)
        for one, state in zip((drafter, text, alone), states, strict=True):
            one.observe(state, rows, tokens, taps, counts)
    assert from_text > 30 and silent > 30


def test_the_text_may_be_ahead_of_the_other() -> None:
    """Shown at once, shown again, or late: the text is the same, and the other one drafts from what it was shown."""
    settings, rng = NgramConfig(longest=3, shortest=2), random.Random(1)
    drafters = [LookupDrafter(Counting(4, VOCAB), settings) for _ in range(2)]
    ahead, at_once = (drafter.new_state(2, 64) for drafter in drafters)
    waiting: dict[int, list[int]] = {0: [], 1: []}
    lengths, found = [0, 0], 0
    for step in range(120):
        rows = rng.sample(range(2), rng.randint(1, 2))
        said = [[rng.randrange(3) for _ in range(rng.randint(1, 3))] for _ in rows]
        for _ in range(1 + (step % 7 == 0)):  # an interrupted round is done again
            drafters[0].observe_free(ahead, rows, [lengths[row] for row in rows], said)
        for row, ids in zip(rows, said, strict=True):
            drafters[1].observe(at_once, [row], torch.tensor([ids]), torch.zeros(1, len(ids), 2, 3), [len(ids)])
            waiting[row] += ids
            lengths[row] += len(ids)
        free = drafters[0].propose_free(ahead, [0, 1], torch.tensor([1, 2]))
        alone = drafters[1].propose_free(at_once, [0, 1], torch.tensor([1, 2]))
        assert torch.equal(free.tokens, alone.tokens) and free.counts == alone.counts and free.sources == [1, 1]
        assert [text.ids for text in ahead.texts] == [text.ids for text in at_once.texts]
        found += sum(free.counts or [])
        if step % 10 == 9:
            for row, ids in waiting.items():
                assert ids, "or it says little"
                drafters[0].observe(ahead, [row], torch.tensor([ids]), torch.zeros(1, len(ids), 2, 3), [len(ids)])
                waiting[row] = []
            assert ahead.other == at_once.other and ahead.shown == lengths
            both = [
                one.propose(s, [0, 1], torch.tensor([1, 2])) for one, s in zip(drafters, (ahead, at_once), strict=True)
            ]
            assert torch.equal(both[0].tokens, both[1].tokens)
            row = rng.randrange(2)
            for drafter, state in zip(drafters, (ahead, at_once), strict=True):
                drafter.reset(state, row)
            waiting[row], lengths[row] = [], 0
    assert found > 100
