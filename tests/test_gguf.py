"""GGUF for llama.cpp: exact keys, names, number formats; what others wrote is read or refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from layouts import IDS, KINDS, MASK, VOCAB, drafter, drafter_config, save, tiny_target, write_tokenizer

from blockdraft.config import ConfigError
from blockdraft.formats.card import TargetCard
from blockdraft.formats.layouts import export, read_parts
from blockdraft.targets.resolve import load_target


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> TargetCard:
    return tiny_target(tmp_path_factory.mktemp("target"))


def test_gguf_has_exactly_the_keys_that_llamacpp_reads(card: TargetCard, tmp_path: Path) -> None:
    export(save(tmp_path / "ours", "sliding", rope_scaling=KINDS["yarn"]["rope_scaling"]), tmp_path / "g", "gguf", card)
    reader = gguf.GGUFReader(tmp_path / "g")
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    tokenizer = {name: value for name, value in fields.items() if name.startswith("tokenizer.")}
    assert {name: value for name, value in fields.items() if name not in tokenizer} == {
        "general.architecture": "dflash",
        "general.file_type": 0,
        "dflash.context_length": 512,
        "dflash.embedding_length": 32,
        "dflash.block_count": 2,
        "dflash.feed_forward_length": 48,
        "dflash.attention.head_count": 4,
        "dflash.attention.head_count_kv": 2,
        "dflash.attention.key_length": 16,
        "dflash.attention.value_length": 16,
        "dflash.attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "dflash.attention.causal": True,
        "dflash.attention.sliding_window": 6,
        "dflash.attention.sliding_window_pattern": [True, True],
        "dflash.rope.dimension_count": 16,
        "dflash.rope.freq_base": 12345.0,
        "dflash.rope.scaling.type": "yarn",
        "dflash.rope.scaling.factor": 4.0,
        "dflash.rope.scaling.original_context_length": 64,
        "dflash.vocab_size": VOCAB,
        "dflash.block_size": 5,
        "dflash.target_layers": [1, 2, 3],
        "dflash.sample_from_anchor": False,
    }
    source = gguf.GGUFReader(card.folder / "tiny.gguf").fields
    copied = {name: field.contents() for name, field in source.items() if name.startswith("tokenizer.")}
    assert tokenizer == {**copied, "tokenizer.ggml.mask_token_id": MASK}
    assert len(tokenizer) == 10


def test_gguf_keeps_vectors_whole_and_lays_rows_out_as_they_were(card: TargetCard, tmp_path: Path) -> None:
    export(save(tmp_path / "ours", "dspark"), tmp_path / "g", "gguf", card, "float16")
    model, _ = drafter("dspark")
    kinds = gguf.GGMLQuantizationType
    held = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "g").tensors}
    assert held["output_norm.weight"].tensor_type == kinds.F32 and held["fc.weight"].tensor_type == kinds.F16
    fc = torch.from_numpy(held["fc.weight"].data.copy())
    assert torch.equal(fc, model.fc.weight.half()) and list(held["fc.weight"].shape) == [96, 32]  # columns first
    assert held["d2t"].tensor_type == kinds.I64 and held["d2t"].data.tolist() == IDS.tolist()  # ids, not offsets
    rows = torch.from_numpy(held["output.weight"].data.copy())
    assert torch.equal(rows, load_target(card.spec, pack=False).head_rows(IDS).half())
    assert not held["conf_proj.weight"].data.any() and list(held["conf_proj.weight"].shape) == [35, 1]
    fields = gguf.GGUFReader(tmp_path / "g").fields
    assert fields["dflash.sample_from_anchor"].contents() is True
    assert fields["dflash.has_confidence_head"].contents() is False


def test_gguf_needs_the_targets_own_file(card: TargetCard, tmp_path: Path) -> None:
    save(tmp_path / "ours", "plain")
    with pytest.raises(ConfigError, match=r"needs the tokenizer of .* from its GGUF file: give that file as --target"):
        export(tmp_path / "ours", tmp_path / "g", "gguf", replace(card, gguf=None))
    write_tokenizer(tmp_path / "other.gguf")
    export(tmp_path / "ours", tmp_path / "g", "gguf", replace(card, gguf=tmp_path / "other.gguf"))
    save(tmp_path / "far", "plain", vocab_size=400, mask_token_id=300)
    with pytest.raises(ConfigError, match="made for 400, the target has 272"):
        export(tmp_path / "far", tmp_path / "h", "gguf", card)


def test_gguf_quantised_by_others_is_refused_by_name(card: TargetCard, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "q", "dflash")
    packed = gguf.quants.quantize(torch.randn(32, 96).numpy(), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("fc.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"tensor 'fc.weight' is Q8_0; only F32, F16 and BF16 are read"):
        read_parts(tmp_path / "q", card)
    (tmp_path / "torn").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="not readable as GGUF"):
        read_parts(tmp_path / "torn", card)


def test_rotary_base_and_epsilon_survive_fp32(card: TargetCard, tmp_path: Path) -> None:
    changed = {"rms_norm_eps": 1e-5, "rope_theta": 1e7}
    export(save(tmp_path / "ours", "plain", **changed), tmp_path / "g", "gguf", card)
    assert read_parts(tmp_path / "g", card)[1].config == drafter_config("plain", **changed)
