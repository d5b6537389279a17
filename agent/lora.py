"""Whether a file is a LoRA adapter, and one for this model, from their heads alone (CAT-40). Pure.

GGUF follows what llama.cpp checks at load (src/llama-adapter.cpp), PEFT what vLLM and SGLang take.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.gguf import Head, Shape

MAX_RANK = 4096
_PEFT_NAME = re.compile(r"base_model\.model\.(.+)\.lora_(?:(embedding)_)?([AB])(?:\.weight)?\Z")
_LAYER = re.compile(r"(?:\A|\.)(layers\.\d+\..+)\Z")


# --- GGUF ------------------------------------------------------------------------------------------------------------
def gguf_objection(adapter: Head, base: Head | None) -> str | None:
    """Why `adapter` cannot be attached to `base`, as a whole sentence. `base` None: the model could not be read."""
    kind = adapter.text("general.type")
    if kind != "adapter":
        kind = kind[:40] or "missing"
        return f"It is no adapter: its general.type is {kind}. Convert one with convert_lora_to_gguf.py."
    if adapter.text("adapter.type") != "lora":
        what = adapter.text("adapter.type")[:40] or "missing"
        return f"It is no LoRA adapter: its adapter.type is {what}. llama.cpp attaches lora."
    if not adapter.architecture:
        return "It does not say which architecture it was made for (general.architecture). Convert it again."
    if base is not None and base.architecture != adapter.architecture:
        ours = base.architecture[:40] or "unknown"
        return f"It was made for {adapter.architecture[:40]}, and the model is {ours}. Name one that was made for it."
    pairs = _gguf_pairs(adapter.tensors)
    if isinstance(pairs, str):
        return pairs
    return next(filter(None, (_gguf_pair(name, *pair, base) for name, pair in pairs.items())), None)


def _gguf_pairs(tensors: Mapping[str, Shape]) -> dict[str, tuple[Shape, Shape]] | str:
    halves: dict[str, dict[str, Shape]] = {}
    for name, shape in tensors.items():
        if name.endswith("_norm.weight"):
            continue  # llama.cpp passes over them
        whole, _, half = name.rpartition(".lora_")
        if not whole or half not in ("a", "b"):
            return f"Its tensor {name[:80]} is neither lora_a nor lora_b. Convert it again."
        if len(shape) < 2 or not all(shape):
            return f"Its tensor {name[:80]} is no matrix. Convert it again."
        halves.setdefault(whole, {})[half] = shape
    if not halves:
        return "It holds no tensor that changes the model."
    for name, found in halves.items():
        if len(found) < 2:
            return f"Of its tensor {name[:80]} only one half is there; it was not copied or converted whole."
    return {name: (found["a"], found["b"]) for name, found in halves.items()}


def _gguf_pair(name: str, a: Shape, b: Shape, base: Head | None) -> str | None:
    flipped = "token_embd" in name
    ranks = (a[0], b[0]) if flipped else (a[1], b[0])
    if ranks[0] != ranks[1]:
        return f"The halves of its tensor {name[:80]} have ranks {ranks[0]} and {ranks[1]}. Convert it again."
    if base is None or not base.whole:
        return None
    if name not in base.tensors:
        return f"The model has no tensor {name[:80]}; the adapter was made for another."
    fits = (b[1], a[1]) if flipped else (a[0], b[1])
    return None if base.tensors[name][:2] == fits else _other_size(name, fits, base.tensors[name][:2])


def _other_size(name: str, fits: Shape, is_: Shape) -> str:
    return f"Its {name[:80]} fits {_by(fits)}, and the model's is {_by(is_)}; it was made for a model of another size."


def _by(shape: Shape) -> str:
    return " x ".join(map(str, shape))


# --- PEFT ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Peft:
    """A PEFT adapter as it describes itself. `ranks`: all that its modules have."""

    ranks: tuple[int, ...]
    base_name: str
    modules: Mapping[str, Shape]
    """What each changed module would have to be: out and in, as weights are stored."""


def read_peft(config: object, tensors: Mapping[str, Shape]) -> Peft | str:
    """From adapter_config.json and the heads of its tensors; a whole sentence if engines would not take it."""
    if not isinstance(config, Mapping):
        return "Its adapter_config.json holds no settings of an adapter."
    kind = config.get("peft_type")
    if kind != "LORA":
        return f"It is no LoRA adapter: peft_type in its adapter_config.json is {str(kind)[:40]}, not LORA."
    for field, plain in (("use_dora", False), ("bias", "none")):
        if config.get(field, plain) not in (plain, None):
            return f"{field} in its adapter_config.json is {str(config[field])[:40]}; engines take only {plain} there."
    ranks = _ranks(config)
    if ranks is None:
        return f"The rank r in its adapter_config.json is {str(config.get('r'))[:40]}; it must be 1 to {MAX_RANK}."
    modules = _peft_modules(tensors, ranks)
    if isinstance(modules, str):
        return modules
    name = config.get("base_model_name_or_path")
    return Peft(ranks, name[:200] if isinstance(name, str) else "", modules)


def _ranks(config: Mapping[str, object]) -> tuple[int, ...] | None:
    pattern = config.get("rank_pattern") or {}
    found = [config.get("r"), *(pattern.values() if isinstance(pattern, Mapping) else ())]
    ranks = [each for each in found if isinstance(each, int) and not isinstance(each, bool) and 0 < each <= MAX_RANK]
    return tuple(sorted(set(ranks))) if len(ranks) == len(found) else None


def _peft_modules(tensors: Mapping[str, Shape], ranks: Sequence[int]) -> dict[str, Shape] | str:
    halves: dict[tuple[str, bool], dict[str, Shape]] = {}
    for name, shape in tensors.items():
        named = _PEFT_NAME.match(name)
        if named is None:
            return f"Its tensor {name[:80]} is neither lora_A nor lora_B; engines take nothing else."
        if len(shape) != 2 or not all(shape):
            return f"Its tensor {name[:80]} is no matrix."
        halves.setdefault((named[1], named[2] is not None), {})[named[3]] = shape
    if not halves:
        return "It holds no tensor that changes the model."
    found: dict[str, Shape] = {}
    for (module, embedding), half in halves.items():
        if len(half) < 2:
            return f"Of its module {module[:80]} only one half is there; it was not saved or copied whole."
        a, b = half["A"], half["B"]
        if a[0] != b[1] or a[0] not in ranks:
            said = ", ".join(map(str, ranks))
            return f"The halves of its module {module[:80]} have ranks {a[0]} and {b[1]}; its settings say {said}."
        found[module] = (a[1], b[0]) if embedding else (b[0], a[1])
    return found


def peft_objection(adapter: Peft, base: Mapping[str, Shape]) -> str | None:
    """Why it is not one for the model with these tensors, as a whole sentence."""
    layers: dict[str, set[Shape]] = {}
    for name, shape in base.items():
        # What stands before the layers differs between a stored model and one in memory.
        layers.setdefault(_tail(name), set()).add(shape)
    missing = []
    for module, fits in adapter.modules.items():
        name = f"{module}.weight"
        held = {base[name]} if name in base else layers.get(_tail(name), set())
        if held and fits not in held and all(len(shape) == 2 for shape in held):
            return _other_size(module, fits, min(held))
        if not held and not _stored_otherwise(module, layers):
            missing.append(module)
    # A module may be stored under a name of its own; that all of them are is another model.
    if missing and len(missing) == len(adapter.modules):
        return f"The model has no module {missing[0][:80]}; the adapter was made for another."
    return None


def _tail(name: str) -> str:
    named = _LAYER.search(name)
    return named[1] if named else name


def _stored_otherwise(module: str, layers: Mapping[str, object]) -> bool:
    """Quantised weights have names and shapes of their own, tied and merged ones none."""
    if module.rpartition(".")[2] == "lm_head" or ".experts" in module:
        return True
    return any(name.startswith(f"{_tail(module)}.") for name in layers)
