"""Block attention against a double loop that follows the rule word by word."""

import math

import pytest
import torch

from blockdraft.ops.attention import block_attention


def oracle(query, keys, values, context, lengths, positions, window, causal):
    batch, blocks, rows, heads, width = query.shape
    groups = keys.shape[3]
    out = torch.zeros_like(query)
    for b in range(batch):
        for a in range(blocks):
            for i in range(rows):
                for h in range(heads):
                    g = h // (heads // groups)
                    at = int(positions[b, a, i])
                    seen = []
                    for s in range(int(lengths[b, a])):
                        if window is None or at - s < window:
                            seen.append((context[0][b, g, s], context[1][b, g, s]))
                    for j in range(rows):
                        if (not causal or j <= i) and (window is None or i - j < window):
                            seen.append((keys[b, a, j, g], values[b, a, j, g]))
                    scores = torch.stack([query[b, a, i, h] @ k for k, _ in seen]) / math.sqrt(width)
                    out[b, a, i, h] = scores.softmax(0) @ torch.stack([v for _, v in seen])
    return out


def inputs(seed):
    generator = torch.Generator().manual_seed(seed)

    def make(*shape):
        return torch.randn(*shape, generator=generator)

    lengths = torch.tensor([[0, 5, 9], [3, 11, 1]])
    return (
        make(2, 3, 4, 4, 8),
        make(2, 3, 4, 2, 8),
        make(2, 3, 4, 2, 8),
        (make(2, 2, 11, 8), make(2, 2, 11, 8)),
        lengths,
        lengths[..., None] + torch.arange(4),
    )


@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_the_oracle(window, causal):
    case = inputs(0)
    torch.testing.assert_close(block_attention(*case, window, causal), oracle(*case, window, causal))


def test_what_lies_behind_the_context_length_is_not_seen():
    query, keys, values, context, lengths, positions = inputs(1)
    before = block_attention(query, keys, values, context, lengths, positions)
    for memory in context:
        memory[0, :, 9:] = 1e4
    after = block_attention(query, keys, values, context, lengths, positions)
    assert torch.equal(before[0], after[0])
    context[0][0, :, 4] += 1.0  # a slot that two blocks see and one does not
    changed = block_attention(query, keys, values, context, lengths, positions)
    assert torch.equal(changed[0, 0], after[0, 0])
    assert not torch.equal(changed[0, 1], after[0, 1])


def test_other_blocks_are_not_seen():
    query, keys, values, context, lengths, positions = inputs(2)
    before = block_attention(query, keys, values, context, lengths, positions)
    keys[:, 1] += 1.0
    after = block_attention(query, keys, values, context, lengths, positions)
    assert torch.equal(before[:, [0, 2]], after[:, [0, 2]])
    assert not torch.equal(before[:, 1], after[:, 1])
