"""Rotary frequencies against transformers, and packed linear layers against plain ones."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from blockdraft.ops.layers import PackedLinear, RMSNorm, pack_linears, rotary_frequencies, rotary_tables, rotate

SCALINGS = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256},
    # gpt-oss's drafters: the ramp between fast and slow pairs is not cut to whole dimensions
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_rotary_frequencies_are_those_of_transformers(scaling):
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=1,
        head_dim=64,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": 5e4, **scaling},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    ours, our_factor = rotary_frequencies(64, 5e4, scaling)
    torch.testing.assert_close(ours, expected)
    assert our_factor == pytest.approx(factor)


def test_unknown_rotary_scaling_is_refused():
    with pytest.raises(ValueError, match="'wobble' is not supported"):
        rotary_frequencies(64, 1e4, {"rope_type": "wobble", "factor": 2.0})
    with pytest.raises(ValueError, match="'llama3' lacks 'low_freq_factor'"):
        rotary_frequencies(64, 1e4, {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64})


def test_rotary_turns_pairs_by_the_position():
    inverse, factor = rotary_frequencies(4, 100.0, None)
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    turned = rotate(x, rotary_tables(torch.tensor([2]), inverse, factor, torch.float32))[0]
    angle = torch.tensor(2.0)
    torch.testing.assert_close(turned, torch.tensor([[angle.cos(), 0.0, angle.sin(), 0.0]]))


def test_rms_norm_is_the_formula():
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    norm = RMSNorm(8, 1e-3)
    nn.init.uniform_(norm.weight)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize("shape", [(96, 64), (64, 96), (576, 1536), (1536, 576), (192, 576)])
def test_a_packed_row_has_the_same_bits_among_any_others(shape):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator)
    x = torch.randn(70, shape[1], generator=generator)
    packed = PackedLinear(weight)
    torch.testing.assert_close(packed(x), x @ weight.T, rtol=1e-4, atol=1e-3)
    alone = torch.cat([packed(x[i : i + 1]) for i in range(len(x))])
    for rows in (2, 3, 5, 8, 13, 16, 32, 70):
        assert torch.equal(packed(x[:rows]), alone[:rows]), f"{rows} rows"


def test_packing_swaps_every_linear_layer_and_keeps_the_function():
    generator = torch.Generator().manual_seed(1)
    module = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Sequential(nn.Linear(48, 16, bias=False)))
    x = torch.randn(2, 5, 32, generator=generator)
    expected, weight = module(x).detach(), module[0].weight.detach().clone()
    pack_linears(module)
    assert not any(type(part) is nn.Linear for part in module.modules())
    torch.testing.assert_close(module(x), expected)
    assert torch.equal(module[0].weight, weight)


def test_rows_are_padded_and_split_to_where_bits_do_not_change():
    calls = []

    class Changing(PackedLinear):
        def product(self, x):
            calls.append(len(x))
            return super().product(x) + (0.0 if 4 <= len(x) <= 16 else 1e-3)

    generator = torch.Generator().manual_seed(0)
    layer = Changing(torch.randn(32, 32, generator=generator))
    assert layer.span == (4, 16)
    x = torch.randn(35, 32, generator=generator)
    whole = layer(x)
    calls.clear()
    assert torch.equal(torch.cat([layer(x[:1]), layer(x[1:3]), layer(x[3:])]), whole)
    assert calls == [4, 4, 16, 16]
