"""`accept` against a loop that reads like the definition."""

from __future__ import annotations

import torch

from blockdraft.ops.acceptance import accept


def slow_accept(drafts: list[int], choices: list[int], width: int) -> tuple[int, int]:
    count = 0
    while count < width and drafts[count] == choices[count]:
        count += 1
    return count, choices[count]


def test_accept_is_the_longest_matching_prefix() -> None:
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(300):
        rows, count = (int(torch.randint(1, high, (1,), generator=generator)) for high in (5, 9))
        drafts = torch.randint(0, 2, (rows, count), generator=generator)
        choices = torch.randint(0, 2, (rows, count + 1), generator=generator)
        widths = torch.randint(0, count + 1, (rows,), generator=generator)
        accepted, following = accept(drafts, choices, widths)
        expected = [slow_accept(*row) for row in zip(drafts.tolist(), choices.tolist(), widths.tolist(), strict=True)]
        assert list(zip(accepted.tolist(), following.tolist(), strict=True)) == expected
        seen |= {one for one, _ in expected}
    assert seen >= set(range(5)), "the cases must reach deep into a block"


def test_a_match_behind_a_mismatch_counts_for_nothing() -> None:
    accepted, following = accept(torch.tensor([[1, 9, 3, 4]]), torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([4]))
    assert (accepted.tolist(), following.tolist()) == ([1], [2])


def test_padding_is_never_accepted_even_if_it_matches() -> None:
    drafts, choices = torch.tensor([[1, 2, 3]] * 3), torch.tensor([[1, 2, 3, 4]] * 3)
    accepted, following = accept(drafts, choices, torch.tensor([0, 2, 3]))
    assert (accepted.tolist(), following.tolist()) == ([0, 2, 3], [1, 3, 4])


def test_without_drafts_the_choice_is_next() -> None:
    accepted, following = accept(torch.empty(2, 0, dtype=torch.long), torch.tensor([[7], [8]]), torch.tensor([0, 0]))
    assert (accepted.tolist(), following.tolist()) == ([0, 0], [7, 8])
