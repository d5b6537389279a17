"""Adapters and models on this machine's disk, read as far as agent.lora needs them: heads, each of bounded size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agent import files, gguf, lora, safetensors
from agent.gguf import Shape

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt")
MAX_INDEX_BYTES = 64 * 1024 * 1024
MAX_SHARDS = 1024


class Unread(Exception):
    """The file could not be read at all; `str()` says why, as the end of a sentence about it."""


def gguf_head(path: Path) -> gguf.Head:
    """Raises Unread, and gguf.NotGguf."""
    try:
        with files.regular(path).open("rb") as file:
            return gguf.read_head(file)
    except OSError as error:
        raise _unread(error) from None


def gguf_refusal(adapter: Path, weights: Path) -> str | None:
    """Why llama.cpp would not attach `adapter` to `weights`, as a whole sentence. Raises Unread."""
    try:
        found = gguf_head(adapter)
    except gguf.NotGguf as fault:
        return f"{adapter} {fault}."
    try:
        base = gguf_head(weights)
    except gguf.NotGguf:
        base = None  # for the engine to say: the adapter is not at fault
    return lora.gguf_objection(found, base)


def peft_refusal(adapter: Path, weights: Path) -> str | None:
    """Why vLLM and SGLang would not load `adapter` for the model at `weights`, as a whole sentence. Raises Unread."""
    found = read_peft(adapter)
    if isinstance(found, str):
        return found
    base = model_shapes(weights) if weights.is_dir() else None
    return None if base is None else lora.peft_objection(found, base)


def read_peft(directory: Path) -> lora.Peft | str:
    """The adapter in `directory`, or why it is none. Raises Unread."""
    try:
        if not directory.is_dir():
            directory.stat()  # tells what is not there from what is something else
            return f"{directory} is no directory of an adapter ({CONFIG} and {TENSORS})."
        if not (directory / CONFIG).exists():
            return f"{directory} holds no {CONFIG}; name the directory of an adapter that was saved with PEFT."
        if not (directory / TENSORS).exists():
            pickled = next((name for name in PICKLES if (directory / name).exists()), "")
            why = f"{pickled} is a pickle, which can run code" if pickled else "its tensors are missing"
            return f"{directory} holds no {TENSORS} ({why}). Save it as safetensors."
        config = files.read_json(directory / CONFIG, files.MAX_CONFIG_BYTES)
        with files.regular(directory / TENSORS).open("rb") as file:
            return lora.read_peft(config, safetensors.read_shapes(file))
    except OSError as error:
        raise _unread(error) from None
    except safetensors.NotSafetensors as fault:
        return f"{directory / TENSORS} {fault}."
    except ValueError:
        return f"{directory / CONFIG} is not JSON."


def model_shapes(directory: Path) -> Mapping[str, Shape] | None:
    """The tensors of the model in `directory`; None when it holds none that can be read so. Raises Unread."""
    try:
        index = directory / "model.safetensors.index.json"
        names = ["model.safetensors"]
        if index.exists():
            held = files.read_json(index, MAX_INDEX_BYTES)
            parts = held.get("weight_map") if isinstance(held, dict) else None
            names = sorted({str(name) for name in parts.values()}) if isinstance(parts, dict) else []
        if not names or len(names) > MAX_SHARDS or any("/" in name or not name for name in names):
            return None
        shapes: dict[str, Shape] = {}
        for name in names:
            with files.regular(directory / name).open("rb") as file:
                shapes |= safetensors.read_shapes(file)
        return shapes
    except OSError as error:
        raise _unread(error) from None
    except ValueError:
        return None


def _unread(error: OSError) -> Unread:
    return Unread((error.strerror or str(error))[:200].lower())
