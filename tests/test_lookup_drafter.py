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
