"""The compiled kernel: right, the same bits for a row whatever is beside it, and not missed where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch
from models import save_tiny_target
from rows import check_bits_of_a_row, fill, random_ids
from torch import Tensor, nn

from blockdraft import SamplingParams
from blockdraft.engine.api import LLM
from blockdraft.ops import kernel
from blockdraft.ops.kernel import KernelLinear, describe_kernel, library
from blockdraft.ops.layers import PackedLinear, pack_linears
from blockdraft.ops.native import build
from blockdraft.targets.dense import DenseTarget
from blockdraft.targets.resolve import load_target

needs_kernel = pytest.mark.skipif(not build.LIBRARY.is_file(), reason="no compiled kernel")
SHAPES = [(96, 64), (100, 37), (1, 5), (49, 1536), (960, 576)]
STORAGES = [torch.float32, torch.float16]


def choose(monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    monkeypatch.setenv("BLOCKDRAFT_KERNEL", choice)
    library.cache_clear()


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads and the path that is taken are the process's."""
    yield
    monkeypatch.undo()
    torch.set_num_threads(1)
    library.cache_clear()
    library()


def choose_path(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Take a path, or skip the test where the processor does not have it."""
    choose(monkeypatch, name)
    try:
        library()
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(params=kernel.PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    choose_path(monkeypatch, request.param)
    return str(request.param)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@needs_kernel
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("path")
def test_a_row_is_right_and_has_the_same_bits_among_any_others(shape: tuple[int, int], storage: torch.dtype) -> None:
    weight, bias, x = numbers(*shape), numbers(shape[0], seed=1), numbers(33, shape[1], seed=2)
    layer = KernelLinear(weight, bias, storage)
    kept = weight.to(storage)
    exact = x.double() @ kept.double().T + bias.double()
    # What a sum of so many products may lose in fp32, in whatever order.
    bound = (shape[1] + 2) * 2**-24 * (x.double().abs() @ kept.double().abs().T + bias.double().abs())
    alone = torch.cat([layer(x[row : row + 1]) for row in range(len(x))])
    assert bool(((alone.double() - exact).abs() <= bound).all())
    for threads, counts in ((1, range(1, 34)), (2, (1, 2, 5, 16, 33))):
        torch.set_num_threads(threads)
        for rows in counts:
            assert torch.equal(layer(x[:rows]), alone[:rows]), f"{rows} rows, {threads} threads"
    assert torch.equal(layer.weight, kept.float())


@needs_kernel
@pytest.mark.parametrize("storage", STORAGES)
def test_wider_registers_change_no_bit(storage: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for name in kernel.QUICK:
        choose_path(monkeypatch, name)
        layer, target = KernelLinear(numbers(100, 1536), numbers(100, seed=1), storage), dense(storage=storage)
        logits = fill(target, target.new_cache(1, 96), 0, random_ids(90), (70, 8, 1))
        found[name] = [layer(numbers(rows, 1536, seed=2)) for rows in (1, 7, 70)], logits
    (wide, wide_text), (narrow, narrow_text) = found.values()
    assert all(torch.equal(*pair) for pair in zip(wide, narrow, strict=True))
    assert torch.equal(wide_text, narrow_text)
    choose(monkeypatch, "portable")
    rounded_twice = KernelLinear(numbers(100, 1536), numbers(100, seed=1), storage)(numbers(7, 1536, seed=2))
    assert not torch.equal(rounded_twice, narrow[1]), "what does not fuse products and sums has other bits"


@needs_kernel
def test_plain_products_of_torch_do_depend_on_the_rows() -> None:
    """Negative control of the test above: it can fail."""
    weight, x = numbers(960, 576), numbers(33, 576, seed=2)
    alone = torch.cat([x[row : row + 1] @ weight.T for row in range(len(x))])
    assert any(not torch.equal(x[:rows] @ weight.T, alone[:rows]) for rows in range(1, 34))


@needs_kernel
@pytest.mark.usefixtures("path")
def test_every_half_is_read_as_what_it_is() -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = halves[halves.isfinite()]
    assert len(halves) == 2 * 31 * 1024
    read = KernelLinear(halves[:, None].float(), None, torch.float16)(torch.ones(1, 1))[0]
    assert torch.equal(read, halves.float())


@needs_kernel
def test_hundreds_of_rows_strided_inputs_and_leading_dimensions() -> None:
    layer, x = KernelLinear(numbers(50, 40)), numbers(40, 150, 2, seed=3)
    whole = layer(x.permute(2, 1, 0))
    assert whole.shape == (2, 150, 50)
    assert torch.equal(whole[1, 7], layer(x[:, 7, 1]))
    torch.testing.assert_close(whole, x.permute(2, 1, 0) @ layer.weight.T, rtol=1e-4, atol=1e-4)


def dense(kind: str = "qwen3-mixed", **options: torch.dtype) -> DenseTarget:
    return DenseTarget(tiny.tiny_model(kind, hidden_size=256, intermediate_size=320), "tiny", **options)


@needs_kernel
@pytest.mark.parametrize("storage", [None, torch.float16])
@pytest.mark.usefixtures("path")
def test_verifying_is_plain_decoding_bit_for_bit(storage: torch.dtype | None) -> None:
    target = dense(storage=storage)
    assert target._compiled
    check_bits_of_a_row(target, (61,))
    text, cache = random_ids(24), target.new_cache(1, 64)
    plain = fill(target, cache, 0, text, (1,) * 23)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        cache.truncate([0], [0])
        assert torch.equal(fill(target, cache, 0, text, (3, 8)), plain)


@needs_kernel
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3-mixed"])
def test_a_compiled_layer_computes_what_its_steps_do(kind: str) -> None:
    target, text = dense(kind), random_ids(100)
    compiled = fill(target, target.new_cache(1, 128), 0, text, (70, 1))
    target._compiled = False
    steps = fill(target, target.new_cache(1, 128), 0, text, (70, 1))
    assert not torch.equal(compiled, steps), "two ways to compute it"
    assert (compiled - steps).abs().max() < 1e-4 * steps.abs().max()
    assert (compiled - steps).abs().mean() < 1e-5 * steps.abs().mean()


@needs_kernel
def test_widths_that_the_kernel_does_not_take_are_computed_step_by_step() -> None:
    target = DenseTarget(tiny.tiny_llama(intermediate_size=60), "odd")
    assert not target._compiled
    assert type(target._layers[0].down) is KernelLinear


@needs_kernel
def test_half_precision_weights_are_a_target_of_their_own(tmp_path: Path) -> None:
    folder = str(save_tiny_target(tmp_path / "target"))
    rounded, whole = load_target(folder, weights="float16"), load_target(folder)
    assert rounded.info.storage == torch.float16
    assert rounded.info.dtype == torch.float32
    own = tiny.tiny_llama(vocab_size=272)
    for parameter in own.parameters():
        parameter.data = parameter.data.half().float()
    text = random_ids(30)
    expected = own(input_ids=text[None]).logits[0].detach()
    found = fill(rounded, rounded.new_cache(1, 64), 0, text)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (fill(whole, whole.new_cache(1, 64), 0, text) - expected).abs().max() > 1e-3, "rounding shows"
    assert torch.equal(rounded.embed(text), own.get_input_embeddings()(text))
    assert torch.equal(rounded.head_rows(text[:3]), own.lm_head.weight[text[:3]])
    assert torch.equal(rounded.head_rows(), own.lm_head.weight)
    assert torch.equal(rounded.layer_weights(1)["mlp.up_proj.weight"], own.model.layers[1].mlp.up_proj.weight)
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=3)
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9]]
    drafted = LLM(folder, "ngram", weights="float16", capacity=64, verify_width=None).generate(prompts, params)
    plain = LLM(folder, None, weights="float16", capacity=64).generate(prompts, params)
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert sum(output.stats.drafted for output in drafted) > 0


@needs_kernel
def test_where_half_precision_weights_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(save_tiny_target(tmp_path / "target"))
    for options, words in (
        ({"weights": "int4"}, "weights 'int4' is not float16"),
        ({"weights": "float16", "dtype": "bfloat16"}, "weights in float16 are for float32 on the CPU"),
        ({"weights": "float16", "device": "cuda"}, "weights in float16 are for float32 on the CPU"),
        ({"weights": "float16", "implementation": "hf"}, "needs our own layers: the implementation asked for is 'hf'"),
    ):
        with pytest.raises(ValueError, match=words):
            load_target(folder, **options)
    large = tiny.tiny_llama()
    large.model.layers[2].mlp.up_proj.weight.data[3, 4] = 1e5
    with pytest.raises(ValueError, match=r"layers.2.mlp.up_proj.weight has numbers that float16 cannot hold"):
        DenseTarget(large, "large", storage=torch.float16)
    choose(monkeypatch, "off")
    with pytest.raises(ValueError, match=r"need the compiled kernel; linear layers are computed by oneDNN"):
        load_target(folder, weights="float16")


def test_without_the_kernel_onednn_does_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def packed() -> nn.Module:
        module = nn.Sequential(nn.Linear(32, 48))
        pack_linears(module)
        return module[0]

    choose(monkeypatch, "off")
    assert type(packed()) is PackedLinear
    assert describe_kernel() == "oneDNN (BLOCKDRAFT_KERNEL=off)"
    monkeypatch.setattr(kernel, "LIBRARY", tmp_path / "kernel.so")
    choose(monkeypatch, "auto")
    assert type(packed()) is PackedLinear
    assert describe_kernel().startswith("oneDNN (the kernel is not compiled: run python -m")
    target = DenseTarget(tiny.tiny_llama(), "tiny")
    assert not target._compiled
    check_bits_of_a_row(target, (5,))
    for choice in ("on", "portable"):
        choose(monkeypatch, choice)
        with pytest.raises(ValueError, match=f"BLOCKDRAFT_KERNEL={choice}, but there is no kernel: run python"):
            packed()
    choose(monkeypatch, "yes")
    with pytest.raises(ValueError, match="BLOCKDRAFT_KERNEL=yes is not one of auto, on, off, avx512, avx2, portable"):
        packed()


@needs_kernel
def test_a_kernel_from_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "digest", lambda: "another")
    choose(monkeypatch, "auto")
    assert library() is None
    assert describe_kernel().startswith("oneDNN (the kernel was compiled from other sources")
    choose(monkeypatch, "on")
    with pytest.raises(ValueError, match="compiled from other sources"):
        library()


@needs_kernel
def test_a_path_that_the_processor_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "CHOICES", (*kernel.CHOICES, "sve"))
    monkeypatch.setattr(kernel, "PATHS", (*kernel.PATHS, "sve"))
    choose(monkeypatch, "sve")
    with pytest.raises(ValueError, match="BLOCKDRAFT_KERNEL=sve, but this processor does not have it"):
        library()


def test_what_cannot_be_loaded_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kernel.so").write_bytes(b"no library")
    monkeypatch.setattr(kernel, "LIBRARY", tmp_path / "kernel.so")
    choose(monkeypatch, "auto")
    with pytest.raises(ValueError, match="the compiled kernel cannot be loaded"):
        library()


@pytest.mark.parametrize(("compiler", "words"), [("missing-compiler", "missing-compiler"), ("false", "false failed")])
def test_without_a_working_compiler_nothing_is_left(
    compiler: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "kernel.so")
    build.LIBRARY.write_bytes(b"an old one")
    monkeypatch.setenv("CXX", compiler)
    assert words in (build.build() or "")
    assert not build.LIBRARY.exists()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (build.build() or "").startswith("no C++ compiler found")
