"""Muon's updates against the singular value decomposition, and a step written out by hand."""

import pytest
import torch

from blockdraft.train.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(12, 12), (8, 24), (24, 8)])
def test_updates_keep_the_directions_and_level_the_sizes(shape):
    generator = torch.Generator().manual_seed(0)
    update = torch.randn(shape, generator=generator)
    u, sizes, v = torch.linalg.svd(update, full_matrices=False)
    assert sizes.max() / sizes.min() > 2  # a control: they are not level before
    levelled = torch.diagonal(u.T @ orthogonal(update) @ v.T)
    assert ((levelled > 0.6) & (levelled < 1.3)).all()
    rest = orthogonal(update) - u @ torch.diag(levelled) @ v
    assert rest.abs().max() < 1e-4  # the singular vectors are untouched


def test_a_transposed_matrix_gets_the_transposed_update():
    update = torch.randn(6, 15, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(orthogonal(update.T), orthogonal(update).T)


def test_two_steps_written_out():
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(4, 9, generator=generator)
    first, second = torch.randn(2, 4, 9, generator=generator)
    p = torch.nn.Parameter(start.clone())
    optimizer = Muon([p], lr=0.1, momentum=0.9, weight_decay=0.01)
    for gradient in (first, second):
        p.grad = gradient.clone()
        optimizer.step()
    scale = 0.1 * 0.2 * 9**0.5
    momentum = 0.1 * first
    expected = start * (1 - 0.001) - scale * orthogonal(0.1 * first + 0.9 * momentum)
    momentum = 0.9 * momentum + 0.1 * second
    expected = expected * (1 - 0.001) - scale * orthogonal(0.1 * second + 0.9 * momentum)
    torch.testing.assert_close(p.detach(), expected)
