"""Anchors, labels and weights against a slow loop that follows the definition."""

import math

import pytest
import torch

from blockdraft.config import DrafterConfig, LossConfig
from blockdraft.drafters.markov import MarkovHead
from blockdraft.train.blocks import fixed_anchors, make_blocks, sample_anchors
from blockdraft.train.loss import Teacher, block_loss, position_decay


def drafter(**changes):
    values = dict(
        hidden_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=8,
        vocab_size=40,
        block_size=4,
        mask_token_id=39,
        tap_ids=(0,),
        num_target_layers=2,
    )
    return DrafterConfig(**{**values, **changes})


def sequences():
    ids = torch.arange(24).view(2, 12)
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[0, 4:10] = True
    mask[1, [2, 3, 4, 5, 8, 9, 10, 11]] = True
    return ids, mask, torch.tensor([[4, 6, 8], [3, 10, -1]])


@pytest.mark.parametrize("anchor_drafts", [False, True])
def test_blocks_equal_the_oracle(anchor_drafts):
    ids, mask, anchors = sequences()
    blocks = make_blocks(ids, mask, anchors, drafter(anchor_drafts=anchor_drafts), gamma=3.0)
    for b in range(2):
        for a in range(3):
            anchor = int(anchors[b, a])
            if anchor < 0:
                assert not blocks.weights[b, a].any()
                continue
            assert int(blocks.context_lengths[b, a]) == anchor
            for row in range(4):
                assert int(blocks.positions[b, a, row]) == anchor + row
                assert int(blocks.ids[b, a, row]) == (int(ids[b, anchor]) if row == 0 else 39)
                k = row + 1 if anchor_drafts else row  # the row drafts the token k places after the anchor
                through = range(anchor + 1, anchor + k + 1)
                teaches = k >= 1 and all(at < 12 and bool(mask[b, at]) for at in through)
                weight = math.exp(-(k - 1) / 3.0) if teaches else 0.0
                assert float(blocks.weights[b, a, row]) == pytest.approx(weight)
                assert int(blocks.labels[b, a, row]) == (int(ids[b, anchor + k]) if teaches else 0)


def test_token_after_token_the_inputs_are_the_answer_itself():
    ids, mask, anchors = sequences()
    config = drafter(anchor_drafts=True, order="autoregressive")
    blocks = make_blocks(ids, mask, anchors, config, gamma=3.0)
    masked = make_blocks(ids, mask, anchors, drafter(anchor_drafts=True), gamma=3.0)
    for b, a, row in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(4)).tolist():
        at = int(anchors[b, a]) + row
        if anchors[b, a] >= 0 and at < 12:
            assert int(blocks.ids[b, a, row]) == int(ids[b, at])
    for name in ("positions", "context_lengths", "label_positions", "labels", "weights"):
        assert torch.equal(getattr(blocks, name), getattr(masked, name))


def test_fixed_anchors_are_the_multiples_that_can_be_anchors():
    generator = torch.Generator().manual_seed(0)
    for stride in (2, 3, 7):
        mask = torch.rand(50, generator=generator) < 0.7
        slow = [at for at in range(0, 50, stride) if at + 1 < 50 and mask[at] and mask[at + 1]]
        assert fixed_anchors(mask, 99, stride).tolist() == slow
        assert fixed_anchors(mask, 3, stride).tolist() == slow[:3]
    assert fixed_anchors(torch.zeros(9, dtype=torch.bool), 3, 2).tolist() == []


def test_uniform_weights():
    ids, mask, anchors = sequences()
    gamma = position_decay(LossConfig(weights="uniform"), step=5, steps=9, epoch=1)
    weights = make_blocks(ids, mask, anchors, drafter(), gamma).weights
    decayed = make_blocks(ids, mask, anchors, drafter(), 3.0).weights
    assert torch.equal(weights, (decayed > 0).float()) and weights.sum() > decayed.sum() > 0


@pytest.mark.parametrize("schedule", ["constant", "stairs", "linear"])
def test_schedules_equal_a_slow_loop(schedule):
    grows = {} if schedule == "constant" else {"gamma_max": 6.2}
    config = LossConfig(gamma=4.5, schedule=schedule, gamma_step=0.5, **grows)
    per_epoch, steps = 7, 30
    gamma, seen = 4.5, []
    for step in range(steps):
        if schedule == "stairs" and step and step % per_epoch == 0:
            gamma = min(gamma + 0.5, 6.2)
        if schedule == "linear" and step:
            gamma += (6.2 - 4.5) / 29
        seen.append(position_decay(config, step, steps, step // per_epoch))
        assert seen[-1] == pytest.approx(gamma)
    assert seen[-1] == pytest.approx({"constant": 4.5, "stairs": 6.2, "linear": 6.2}[schedule])
    assert position_decay(config, 0, 1, 0) == 4.5


def test_a_block_does_not_run_on_into_the_next_answer():
    ids, mask, _ = sequences()
    blocks = make_blocks(ids[1:], mask[1:], torch.tensor([[5, 3]]), drafter(block_size=6), gamma=3.0)
    assert (blocks.weights[0] > 0).tolist() == [[False] * 6, [False, True, True, False, False, False]]


def test_anchors_are_answer_tokens_with_answer_behind_them():
    _, mask, _ = sequences()
    anchors = sample_anchors(mask[1], 99, seed=0, epoch=0, sample=0)
    assert anchors.tolist() == [2, 3, 4, 8, 9, 10]


def test_anchors_depend_on_seed_epoch_and_sample_alone():
    mask = torch.ones(500, dtype=torch.bool)
    first = sample_anchors(mask, 20, seed=1, epoch=2, sample=3)
    torch.manual_seed(99)
    assert torch.equal(first, sample_anchors(mask, 20, seed=1, epoch=2, sample=3))
    assert len(first.unique()) == 20 and torch.equal(first, first.sort().values)
    for other in ((0, 2, 3), (1, 0, 3), (1, 2, 0)):
        assert not torch.equal(first, sample_anchors(mask, 20, *other))


def test_every_anchor_is_equally_likely():
    mask = torch.ones(11, dtype=torch.bool)
    counts = torch.zeros(10)
    for epoch in range(2000):
        counts[sample_anchors(mask, 3, 0, epoch, 0)] += 1
    assert ((counts / 2000 - 0.3).abs() < 0.045).all()  # 4.4 standard deviations


def slow_loss(hidden, blocks, head, index, teacher, soft, markov=None, ids=None):
    total, weights = torch.zeros(()), torch.zeros(())
    for place in blocks.weights.nonzero().tolist():
        b, a, q = place
        weight = blocks.weights[b, a, q]
        logits = head @ hidden[b, a, q]
        if markov is not None:
            previous = int(index[ids[b, blocks.label_positions[b, a, q] - 1]])
            if previous >= 0:
                logits = logits + markov.w2.weight @ markov.w1.weight[previous]
        log_q = logits.log_softmax(0)
        row = int(index[blocks.labels[b, a, q]])
        loss = -(1 - soft) * log_q[row] if row >= 0 else torch.zeros(())
        if soft:
            at = int(blocks.label_positions[b, a, q])
            pairs = [
                (int(index[i]), p)
                for i, p in zip(teacher.ids[b, at].tolist(), teacher.probabilities[b, at], strict=True)
                if index[i] >= 0
            ]
            mass = sum(p for _, p in pairs)
            loss = loss - soft * sum(p / mass * log_q[i] for i, p in pairs)
        total, weights = total + weight * loss, weights + weight
    return total / weights


@pytest.mark.parametrize("soft", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("anchor_drafts", [False, True])
@pytest.mark.parametrize(("rank", "own_head"), [(None, False), (3, False), (None, True)])
def test_loss_and_gradients_equal_the_oracle(soft, anchor_drafts, rank, own_head):
    generator = torch.Generator().manual_seed(0)
    ids, mask, anchors = sequences()
    config = drafter(anchor_drafts=anchor_drafts)
    blocks = make_blocks(ids, mask, anchors, config, gamma=3.0)
    index = torch.arange(40)
    index[[9, 11]] = -1  # the head cannot say these
    index[index > 11] -= 2
    hidden = torch.randn(2, 3, 4, 8, generator=generator, requires_grad=True)
    head = torch.randn(38, 8, generator=generator)
    teacher = Teacher(
        ids=torch.stack([torch.randperm(40, generator=generator)[:6] for _ in range(24)]).view(2, 12, 6),
        probabilities=torch.rand(2, 12, 6, generator=generator),
    )
    torch.manual_seed(0)
    markov = MarkovHead(38, rank) if rank else None
    learned = [hidden, *markov.parameters()] if markov else [hidden]
    if own_head:
        learned.append(head.requires_grad_())
    ours = block_loss(hidden, blocks, head, index, teacher, config, LossConfig(soft_weight=soft, chunk_rows=3), markov)
    gradients = torch.autograd.grad(ours.loss * 2, learned)
    expected = slow_loss(hidden, blocks, head, index, teacher, soft, markov, ids)
    torch.testing.assert_close(ours.loss, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected * 2, learned))


def test_accepted_counts_the_run_before_the_first_miss():
    ids, mask, anchors = sequences()
    config = drafter(hidden_size=40)
    blocks = make_blocks(ids, mask, anchors, config, gamma=3.0)
    hidden = torch.nn.functional.one_hot(blocks.labels, 40).float()  # right everywhere
    hidden[0, 1, 2] = torch.roll(hidden[0, 1, 2], 1)  # but at anchor 6, second draft
    result = block_loss(hidden, blocks, torch.eye(40), None, None, config, LossConfig())
    # anchor 4 drafts 5 6 7, anchor 6 drafts 7 [8] 9, anchor 8 drafts 9; anchor 3 drafts 4 5, anchor 10 drafts 11
    assert result.count.tolist() == [5, 3, 2]
    assert result.correct.tolist() == [5, 2, 2]
    assert (result.accepted, result.blocks) == (3 + 1 + 1 + 2 + 1, 5)


def test_soft_labels_without_a_teacher_are_refused():
    ids, mask, anchors = sequences()
    blocks = make_blocks(ids, mask, anchors, drafter(), gamma=3.0)
    with pytest.raises(ValueError, match="teacher_top_k"):
        block_loss(
            torch.zeros(2, 3, 4, 8), blocks, torch.zeros(40, 8), None, None, drafter(), LossConfig(soft_weight=0.5)
        )
