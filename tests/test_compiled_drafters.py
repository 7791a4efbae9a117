"""Drafters in the compiled kernel draft what the same layers draft in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import drafter
from models import save_tiny_target
from test_chain_drafters import chain_config, ids_of, random_chain
from torch import Tensor

from blockdraft.drafters.block import BlockDrafter, BlockModel
from blockdraft.drafters.chain import ChainDrafter
from blockdraft.drafters.compiled import compile_layers
from blockdraft.ops.kernel import library
from blockdraft.ops.layers import pack_linears
from blockdraft.targets.pretrained import PretrainedTarget
from blockdraft.targets.resolve import load_target

BLOCKS = ("plain", "windowed", "sliding", "mixed", "causal", "bias", "yarn", "scaled", "anchor", "dspark", "dflare")
CHAINS = ("mtp", "mtp-2")
needs_kernel = pytest.mark.skipif(library() is None, reason="no compiled kernel")
ROWS, COUNTS, ANCHORS = [2, 0], [40, 17], torch.tensor([9, 31])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> PretrainedTarget:
    return load_target(str(save_tiny_target(tmp_path_factory.mktemp("compiled") / "target")))


def made(kind: str, target: PretrainedTarget, packed: bool) -> BlockDrafter | ChainDrafter:
    """The drafter of a kind, in torch, or packed in fp32 and so in the kernel."""
    if kind in CHAINS:
        config = chain_config(kind, vocab_size=target.info.vocab_size)
        chain, ids = random_chain(config), ids_of(config)
        if packed:
            pack_linears(chain)
        return ChainDrafter(chain, target, ids)
    model, ids = drafter(kind)
    if packed:
        pack_linears(model)
    return BlockDrafter(model, target, ids)


@torch.inference_mode()
def proposals(ready: BlockDrafter | ChainDrafter, target: PretrainedTarget) -> list[tuple[Tensor, Tensor | None]]:
    """Of rows with contexts of their own, twice, and once more behind what was committed in between."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 200, (2, max(COUNTS)), generator=generator)
    taps = torch.randn(2, max(COUNTS), len(ready.tap_ids), 32, generator=generator)
    state: Any = ready.new_state(3, 64)
    ready.observe(state, ROWS, ids, taps, COUNTS)
    found = [ready.propose(state, ROWS, ANCHORS) for _ in range(2)]
    ready.observe(state, ROWS, ids[:, :3], taps[:, :3], [3, 1])
    found += [ready.propose(state, ROWS, ANCHORS), ready.propose(state, [0], ANCHORS[:1])]
    return [(proposal.tokens, proposal.confidence) for proposal in found]


@needs_kernel
@pytest.mark.parametrize("kind", [*BLOCKS, *CHAINS])
def test_the_kernel_drafts_the_same(kind: str, target: PretrainedTarget) -> None:
    compiled, plain = made(kind, target, packed=True), made(kind, target, packed=False)
    assert compiled._compiled is not None and plain._compiled is None
    for (tokens, sure), (expected, as_sure) in zip(proposals(compiled, target), proposals(plain, target), strict=True):
        assert torch.equal(tokens, expected)
        assert sure is not None and as_sure is not None
        torch.testing.assert_close(sure, as_sure, rtol=1e-3, atol=1e-5)


@needs_kernel
@pytest.mark.parametrize(("kind", "wrong"), [("plain", {"alone": True}), ("mtp", {"blind": 0, "alone": True})])
def test_who_sees_whom_matters(kind: str, wrong: dict[str, Any], target: PretrainedTarget) -> None:
    """Negative control: a block that is causal, or a chain that sees slot 0, drafts otherwise."""
    compiled, plain = made(kind, target, packed=True), made(kind, target, packed=False)
    model = compiled.model
    layers = list(model.layers) if isinstance(model, BlockModel) else list(model.stack())  # type: ignore[arg-type]
    compiled._compiled = compile_layers(layers, compiled.config, **wrong)
    pairs = zip(proposals(compiled, target), proposals(plain, target), strict=True)
    assert any(not torch.allclose(sure, other, rtol=1e-3) for (_, sure), (_, other) in pairs)  # type: ignore[arg-type]


@needs_kernel
def test_what_the_kernel_is_not_made_for_stays_in_torch(target: PretrainedTarget) -> None:
    for kind in ("token-by-token", "input"):
        assert made(kind, target, packed=True)._compiled is None
    config = chain_config("eagle3", vocab_size=target.info.vocab_size)
    chain = random_chain(config)
    pack_linears(chain)
    assert ChainDrafter(chain, target, ids_of(config))._compiled is None
