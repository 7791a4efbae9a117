"""`check`, `export`, `import` and `command`: every broken thing is found and named, and exit codes say so."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import IDS, KINDS, drafter, save, tiny_target
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft.cli import main
from blockdraft.config import ConfigError
from blockdraft.engine.drafting import shipped_folder
from blockdraft.formats.card import TargetCard, read_card
from blockdraft.formats.launch import launch
from blockdraft.formats.layouts import check, export

FC = torch.zeros(32, 96)


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> TargetCard:
    return tiny_target(tmp_path_factory.mktemp("target"))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


def change(folder: Path, tensors: Callable[[dict[str, Tensor]], Any] | None, settings: dict[str, Any]) -> None:
    """Damage a folder: its tensors in place, its settings by other values."""
    held = load_file(folder / "model.safetensors")
    if tensors is not None:
        tensors(held)
        save_file(held, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **settings}))


def dflash(**changed: Any) -> dict[str, Any]:
    return {"dflash_config": {"block_size": 5, "mask_token_id": 4, "target_layer_ids": [0, 1, 2], **changed}}


# what is damaged in the tensors, in the settings; the check that must find it, and what it says
BROKEN: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "missing": (lambda t: t.pop("layers.1.mlp.up_proj.weight"), {}, "tensor names", "up_proj.weight' is missing (1 in"),
    "extra": (lambda t: t.update(more=FC), {}, "tensor names", "'more' does not belong here (1 in all)"),
    "dflash2": (
        lambda t: t.update({"layers.0.mlp_conv.base_kernel": FC}),
        {}, "tensor names", "which is DFlash 2 (its convolutions)",
    ),
    "shape": (
        lambda t: t.update({"norm.weight": FC[0]}), {}, "tensor shapes", "'norm.weight' is [96], expected [32]",
    ),
    "fc": (
        lambda t: t.update({"fc.weight": FC[:, :64].contiguous()}),
        {}, "fc columns", "64 columns are for 2 taps, the settings have 3",
    ),
    "fc width": (
        lambda t: t.update({"fc.weight": FC[:, :70].contiguous()}),
        {}, "fc columns", "no whole number of taps of width 32",
    ),
    "ids": (None, dflash(target_layer_ids=[0, 1]), "fc columns", "96 columns are for 3 taps, the settings have 2"),
    "nan": (lambda t: t["norm.weight"].fill_(float("nan")), {}, "number format", "'norm.weight' has a NaN"),
    "mixed": (
        lambda t: t.update({"norm.weight": t["norm.weight"].half()}),
        {}, "number format", "float16, float32; all should be",
    ),
    "tap": (None, dflash(target_layer_ids=[0, 1, 4]), "settings", "tap_ids [0, 1, 4] must lie in 0..3"),
    "tap of the target": (
        None, {"num_target_layers": 9, **dflash(target_layer_ids=[0, 1, 8])}, "tap ids", "[0, 1, 8] of 4 layers",
    ),
    "layers": (None, {"num_target_layers": 9}, "target layers", "made for 9, the target has 4"),
    "mask": (None, dflash(mask_token_id=272), "settings", "mask_token_id=272 is outside the vocabulary of 272"),
    "mask of the target": (
        None, {"vocab_size": 400, **dflash(mask_token_id=300)}, "mask token", "300 of 272 tokens",
    ),
    "vocabulary": (None, {"vocab_size": 400}, "target vocabulary", "made for 400, the target has 272"),
    "width": (None, {"hidden_size": 64}, "target width", "made for 64, the target has 32"),
    "d2t": (lambda t: t.update(d2t=IDS), {}, "draft vocabulary", "draft_vocab_size is None, but the drafter has a map"),
    "no d2t": (None, {"draft_vocab_size": 7}, "draft vocabulary", "draft_vocab_size is 7, but the drafter has no map"),
    "kind": (None, {"num_hidden_layers": "two"}, "settings", "num_layers: Input should be a valid integer"),
    "list": (None, {"layer_types": 5}, "settings", "not what the layout 'dflash' holds"),
    "torn": (None, {"architectures": ["GPT"]}, "layout", "in no layout of a drafter that is known"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_every_broken_thing_is_found(
    name: str, card: TargetCard, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors, settings, which, says = BROKEN[name]
    folder = save(tmp_path / "broken", "plain")
    change(folder, tensors, settings)
    failed = {one.name: one.found for one in check(folder, card)[1] if not one.passed}
    assert says in failed[which]
    code, out, err = run(capsys, "check", folder, "--target", card.spec)
    assert code == 1
    assert "FAIL" in out
    assert f"{folder}: {which}: " in err and says in err
    assert len(err.splitlines()) == len(failed)
    with pytest.raises(ConfigError):  # nor can it be exported, to any layout
        export(folder, tmp_path / "out", "speculators", card)
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_sound_drafter_of_any_kind_passes(
    kind: str, card: TargetCard, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path / "sound", kind)
    code, out, err = run(capsys, "check", folder, "--target", card.spec)
    assert (code, err) == (0, "")
    assert "FAIL" not in out and "tap ids" in out


def test_draft_ids_must_be_distinct_tokens(card: TargetCard, tmp_path: Path) -> None:
    folder = save(tmp_path / "d", "reduced")
    change(folder, lambda t: t["d2t"].add_(250), {})
    found = {one.name: one for one in check(folder, card)[1]}["draft vocabulary"]
    assert not found.passed and "not distinct ids of a vocabulary of 272" in found.found


@pytest.mark.slow
def test_the_shipped_drafter_passes_and_two_engines_can_have_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shipped_folder("smollm2-135m")
    assert run(capsys, "check", folder)[0] == 0
    for layout, engine in (("speculators", "vllm"), ("gguf", "llama.cpp")):
        out = tmp_path / layout
        assert run(capsys, "export", folder, out, "--to", layout, "--target", "smollm2-135m")[0] == 0
        assert run(capsys, "check", out)[0] == 0
        code, line, _ = run(capsys, "command", engine, "--drafter", out)
        assert code == 0 and str(out) in line
        back = tmp_path / f"{layout}-back"
        assert run(capsys, "import", out, back)[0] == 0
        ours, theirs = load_file(folder / "model.safetensors"), load_file(back / "model.safetensors")
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_export_and_import_on_the_command_line(
    card: TargetCard, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path / "ours", "dspark")
    out, back = tmp_path / "theirs", tmp_path / "back"
    code, said, _ = run(
        capsys, "export", folder, out, "--to", "speculators", "--target", card.spec, "--dtype", "float32"
    )
    assert code == 0 and f"wrote {out} (speculators)" in said
    code, said, _ = run(capsys, "import", out, back, "--target", card.spec, "--from", "speculators")
    assert code == 0 and f"wrote {back} (from speculators)" in said
    ours, theirs = load_file(folder / "model.safetensors"), load_file(back / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    for arguments, message in (
        (["export", folder, out, "--to", "speculators", "--target", card.spec], "is there already"),
        (["export", folder, tmp_path / "x", "--to", "dflash"], "layout 'dflash' cannot carry this drafter"),
        (["export", folder, tmp_path / "x", "--to", "onnx"], "layout 'onnx' is not known"),
        (["export", tmp_path / "nowhere", tmp_path / "x", "--to", "dflash"], "no such folder or file"),
        (["import", out, tmp_path / "x", "--target", tmp_path / "nowhere"], "not found"),
        (["import", out, tmp_path / "x", "--target", card.spec, "--from", "dflash"], "'hidden_size' is missing"),
    ):
        code, _, err = run(capsys, *arguments)
        assert code == 2 and message in err and len(err.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "ours", "theirs"]


SGLANG = (
    "python -m sglang.launch_server --model-path T --speculative-algorithm DFLASH --speculative-draft-model-path D "
    "--speculative-num-draft-tokens 5"
)
VLLM = 'vllm serve T --speculative-config {"method":"dflash","model":"D","num_speculative_tokens":4}'
LLAMA = "llama-server -m G -md D --spec-type draft-dflash --spec-draft-n-max 4 -np 1 -fa on"
# engine, kind, layout (None: our folder) -> the line, in words
LINES: list[tuple[str, str, str | None, str]] = [
    ("sglang", "plain", None, SGLANG),
    ("sglang", "mixed", "dflash", SGLANG),
    ("vllm", "plain", "dflash", VLLM),
    ("vllm", "mixed", "dflash", "VLLM_USE_V2_MODEL_RUNNER=1 " + VLLM),
    ("vllm", "reduced", "speculators", VLLM),
    ("vllm", "dspark", "speculators", VLLM.replace("dflash", "dspark").replace("4}", "5}")),
    ("llama.cpp", "plain", "gguf", LLAMA),
    (
        "llama.cpp",
        "dspark",
        "gguf",
        LLAMA.replace("draft-dflash", "draft-dspark").replace("n-max 4", "n-max 5 --spec-draft-p-min 0"),
    ),
]


@pytest.mark.parametrize(("engine", "kind", "layout", "expected"), LINES)
def test_launch_lines(
    engine: str, kind: str, layout: str | None, expected: str,
    card: TargetCard, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = save(tmp_path / "a drafter", kind, max_position_embeddings=2048)
    if layout is not None:
        export(folder, tmp_path / "its export", layout, card)
        folder = tmp_path / "its export"
    code, line, _ = run(capsys, "command", engine, "--drafter", folder, "--target", card.spec)
    assert code == 0 and line.count("\n") == 1
    names = {str(folder.resolve()): "D", card.name: "T", str(card.gguf): "G"}
    words = [names.get(word, word) for word in shlex.split(line)]
    words = [word.replace(str(folder.resolve()), "D").replace(" ", "") if word[0] == "{" else word for word in words]
    assert " ".join(words) == expected


def test_a_short_drafter_of_a_long_target_is_let_in(card: TargetCard, tmp_path: Path) -> None:
    line = launch("sglang", save(tmp_path / "d", "plain"), replace(card, max_context=4096)).line
    assert line.startswith("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 python -m sglang")


NOT_RUN: list[tuple[str, str, str | None, str]] = [
    ("sglang", "dspark", None, "sglang would not run this drafter as it is: anchor_drafts is true"),
    ("sglang", "reduced", None, "no place for a reduced draft head"),
    ("sglang", "scaled", None, "does not scale a DFlash drafter's embeddings (input_embedding_scale 5.5)"),
    ("vllm", "scaled", "dflash", "does not scale a DFlash drafter's embeddings (input_embedding_scale 5.5)"),
    ("sglang", "causal", None, "its full layers see the whole block"),
    ("sglang", "plain", "speculators", "sglang does not load layout 'speculators': blockdraft export"),
    ("sglang", "dflare", None, "no released engine loads DFlare"),
    ("sglang", "input", None, "does not load layout 'blockdraft'"),
    ("vllm", "anchor", "speculators", "it drafts from the anchor's row only beside a Markov head"),
    ("vllm", "mixed", "speculators", "one causality for all layers of this layout: export --to dflash"),
    ("vllm", "markov", None, "no place for a Markov head"),
    ("vllm", "plain", "transformers", "does not load layout 'transformers': blockdraft export"),
    ("vllm", "plain", "gguf", "does not load layout 'gguf'"),
    ("llama.cpp", "plain", None, "does not load layout 'dflash': blockdraft export"),
    ("vllm-turbo", "plain", None, "engine 'vllm-turbo' is not known (llama.cpp, sglang, vllm)"),
]


@pytest.mark.parametrize(("engine", "kind", "layout", "message"), NOT_RUN)
def test_what_an_engine_would_not_run_as_it_is(
    engine: str, kind: str, layout: str | None, message: str,
    card: TargetCard, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = save(tmp_path / "d", kind)
    if layout is not None:
        export(folder, tmp_path / "e", layout, card)
        folder = tmp_path / "e"
    code, out, err = run(capsys, "command", engine, "--drafter", folder, "--target", card.spec)
    assert (code, out) == (2, "")
    assert message in err and len(err.splitlines()) == 1


def test_llamacpp_needs_the_targets_file(card: TargetCard, tmp_path: Path) -> None:
    export(save(tmp_path / "d", "plain"), tmp_path / "g", "gguf", card)
    with pytest.raises(ConfigError, match="give the target's own as --target"):
        launch("llama.cpp", tmp_path / "g", replace(card, gguf=None))


def test_a_card_is_read_without_weights(card: TargetCard) -> None:
    assert (card.num_layers, card.hidden_size, card.vocab_size, card.max_context) == (4, 32, 272, 2048)
    assert card.architectures == ("LlamaForCausalLM",) and card.gguf == card.folder / "tiny.gguf"
    assert card.name == str(card.folder.resolve())


def test_a_target_whose_head_is_its_embedding(tmp_path: Path) -> None:
    from tiny import tiny_llama

    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    tied = read_card(str(tmp_path))
    assert tied.tied and torch.equal(tied.head_rows(), tied.embedding()) and tied.embedding().shape == (96, 32)
    unsaid = replace(tied, tied=None)
    assert torch.equal(unsaid.head_rows(), tied.embedding())
    with pytest.raises(ConfigError, match="no head under a name known here"):
        replace(tied, tied=False).head_rows()
    held = load_file(tmp_path / "model.safetensors")
    save_file({f"strange.{name}": value for name, value in held.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="no embedding under a name known here"):
        tied.embedding()
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    with pytest.raises(ConfigError, match="does not say 'num_hidden_layers'"):
        read_card(str(tmp_path))


def test_without_gguf_the_error_says_how_to_install_it(
    card: TargetCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match="pip install gguf"):
        export(save(tmp_path / "d", "plain"), tmp_path / "g", "gguf", card)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_two_drafters_are_not_the_same() -> None:
    """The comparisons above can fail: another seed is another drafter."""
    one, other = (drafter("plain", seed)[0].state_dict() for seed in (0, 1))
    assert not any(torch.equal(one[name], other[name]) for name in one)
