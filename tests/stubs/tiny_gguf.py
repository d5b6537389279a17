"""Writes a tiny model and LoRA adapters for it in GGUF, which real llama.cpp serves in a moment and without a download.

The model is a chain of words: every word has a direction of its own, and the output says which word follows. Whatever
it is asked, it answers BASE; an adapter bends one link of the chain, so that the answer ends in its own word.
A prompt that ends in `count` is answered with numbers without end.

As a program: `python -m tests.stubs.tiny_gguf DIRECTORY`.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path

BASE = "this is the plain answer"
ADAPTERS = ("red", "blue")
"""Words that an adapter can put in the place of `plain`."""
ENDLESS = ("one", "two", "three", "four")
WIDTH, LAYERS, HEADS, INNER, CONTEXT = 64, 1, 2, 32, 4096
RANK, GAIN = 4, 8.0
ALIGNMENT = 32
SPACE = "\u2581"
_UINT32, _FLOAT32, _STRING, _ARRAY = 4, 6, 8, 9
_INT32 = 5
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
Value = int | float | str | list[str] | list[float] | list[int]
Tensor = tuple[tuple[int, ...], "array[float]"]
"""Lengths, the fastest one first, and the numbers."""


def _words() -> tuple[str, ...]:
    return tuple(dict.fromkeys((*BASE.split(), *ADAPTERS, *ENDLESS, "count")))


def _vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Every text can be written in it: bytes, letters, and each beginning of a word so that merging reaches it."""
    found: dict[str, tuple[float, int]] = {"<unk>": (0.0, _UNKNOWN), "<s>": (0.0, _CONTROL), "</s>": (0.0, _CONTROL)}
    found |= {f"<0x{byte:02X}>": (0.0, _BYTE) for byte in range(256)}
    found |= {letter: (-1000.0 - at, _NORMAL) for at, letter in enumerate([SPACE, *map(chr, range(33, 127))])}
    for word in _words():
        found |= {SPACE + word[:length]: (-500.0 + length, _NORMAL) for length in range(1, len(word) + 1)}
    return list(found), [score for score, _ in found.values()], [kind for _, kind in found.values()]


def _followers() -> dict[str, str]:
    answer = BASE.split()
    follows = dict(zip(answer, (*answer[1:], "</s>"), strict=True))
    follows |= dict(zip(ENDLESS, (*ENDLESS[1:], ENDLESS[0]), strict=True))
    return follows | dict.fromkeys(ADAPTERS, follows["plain"]) | {"count": ENDLESS[0]}


def _token(tokens: list[str], word: str) -> int:
    return tokens.index(word if word.startswith("<") else SPACE + word)


def write_model(path: Path) -> Path:
    tokens, scores, kinds = _vocabulary()
    number = {word: _token(tokens, word) for word in _words()}
    embedding = array("f", bytes(4 * WIDTH * len(tokens)))
    output = array("f", bytes(4 * WIDTH * len(tokens)))
    for token in range(len(tokens)):  # direction 0 is that of everything else
        embedding[token * WIDTH] = 1.0
    output[number["this"] * WIDTH] = GAIN
    for direction, (word, token) in enumerate(number.items(), start=1):
        embedding[token * WIDTH] = 0.0
        embedding[token * WIDTH + direction] = 1.0
        output[_token(tokens, _followers()[word]) * WIDTH + direction] = GAIN
    nothing, ones = (lambda rows, columns: array("f", bytes(4 * rows * columns))), array("f", [1.0] * WIDTH)
    tensors: dict[str, Tensor] = {
        "token_embd.weight": ((WIDTH, len(tokens)), embedding),
        "output_norm.weight": ((WIDTH,), ones),
        "output.weight": ((WIDTH, len(tokens)), output),
    }
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = ((WIDTH,), ones)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors[f"blk.{layer}.{name}.weight"] = ((WIDTH, WIDTH), nothing(WIDTH, WIDTH))
        for name in ("ffn_gate", "ffn_up"):
            tensors[f"blk.{layer}.{name}.weight"] = ((WIDTH, INNER), nothing(INNER, WIDTH))
        tensors[f"blk.{layer}.ffn_down.weight"] = ((INNER, WIDTH), nothing(WIDTH, INNER))
    keys: dict[str, Value] = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "tiny-words",
        "llama.context_length": CONTEXT,
        "llama.embedding_length": WIDTH,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        # What the last message ends in stays what the prompt ends in.
        "tokenizer.chat_template": "{% for m in messages %}{{ ' ' + m['content'] }}{% endfor %}",
    }
    return _write(path, keys, tensors)


def write_adapter(path: Path, word: str = ADAPTERS[0], *, architecture: str = "llama", width: int = WIDTH) -> Path:
    """One that answers with `word` in the place of `plain`. Another architecture or width makes one that must be
    refused."""
    tokens = _vocabulary()[0]
    down, up = array("f", bytes(4 * width * RANK)), array("f", bytes(4 * RANK * len(tokens)))
    down[1 + list(_words()).index("the")] = 1.0
    up[_token(tokens, word) * RANK] = GAIN
    up[_token(tokens, "plain") * RANK] = -GAIN
    keys: dict[str, Value] = {
        "general.architecture": architecture,
        "general.type": "adapter",
        "general.name": word,
        "adapter.type": "lora",
        "adapter.lora.alpha": float(RANK),  # so that the request's scale counts as it stands
    }
    tensors: dict[str, Tensor] = {
        "output.weight.lora_a": ((width, RANK), down),
        "output.weight.lora_b": ((RANK, len(tokens)), up),
    }
    return _write(path, keys, tensors)


# --- the format ------------------------------------------------------------------------------------------------------
def _write(path: Path, keys: Mapping[str, Value], tensors: Mapping[str, Tensor]) -> Path:
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(keys))]
    for key, value in keys.items():
        head += [_text(key), _value(value)]
    body: list[bytes] = []
    at = 0
    for name, (lengths, numbers) in tensors.items():
        head += [_text(name), struct.pack(f"<I{len(lengths)}QIQ", len(lengths), *lengths, 0, at)]
        held = _padded(numbers.tobytes())
        body.append(held)
        at += len(held)
    path.write_bytes(_padded(b"".join(head)) + b"".join(body))
    return path


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    match value:
        case int():
            return struct.pack("<II", _UINT32, value)
        case float():
            return struct.pack("<If", _FLOAT32, value)
        case str():
            return struct.pack("<I", _STRING) + _text(value)
        case [str(), *_]:
            return _list(_STRING, (_text(str(each)) for each in value), len(value))
        case [float(), *_]:
            return _list(_FLOAT32, (struct.pack("<f", each) for each in value), len(value))
        case _:
            return _list(_INT32, (struct.pack("<i", each) for each in value), len(value))


def _list(kind: int, items: Iterable[bytes], count: int) -> bytes:
    return struct.pack("<IIQ", _ARRAY, kind, count) + b"".join(items)


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    print(write_model(directory / "tiny.gguf"))
    for each in ADAPTERS:
        print(write_adapter(directory / f"tiny-{each}.gguf", each))
