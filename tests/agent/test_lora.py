"""Adapters told from their heads: whether they are any, and for this model (CAT-40)."""

from __future__ import annotations

import contextlib
import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import gguf, launching, lora, lora_files, safetensors
from agent.gguf import Head, NotGguf, Shape
from agent.lora_files import Unread
from agent.safetensors import NotSafetensors
from tests.stubs import tiny_gguf

LAMA = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": "llama"}
PAIR: dict[str, Shape] = {"output.weight.lora_a": (64, 4), "output.weight.lora_b": (4, 300)}
BASE = Head({"general.architecture": "llama"}, {"output.weight": (64, 300), "token_embd.weight": (64, 300)})


def head_of(path: Path) -> Head:
    return gguf.read_head(io.BytesIO(path.read_bytes()))


# --- GGUF ------------------------------------------------------------------------------------------------------------
def test_a_head_is_read_without_the_weights(tmp_path: Path) -> None:
    path = tiny_gguf.write_model(tmp_path / "m.gguf")
    found = head_of(path)
    assert (found.architecture, found.text("general.type"), found.whole) == ("llama", "model", True)
    assert found.keys["llama.context_length"] == tiny_gguf.CONTEXT
    assert found.text("llama.context_length") == ""
    assert found.tensors["blk.0.ffn_down.weight"] == (tiny_gguf.INNER, tiny_gguf.WIDTH)
    assert "tokenizer.ggml.tokens" not in found.keys
    cut = path.read_bytes()[: path.stat().st_size - 64]
    assert gguf.read_head(io.BytesIO(cut)) == found


def test_an_adapter_made_for_the_model_passes(tmp_path: Path) -> None:
    model = head_of(tiny_gguf.write_model(tmp_path / "m.gguf"))
    adapter = head_of(tiny_gguf.write_adapter(tmp_path / "a.gguf"))
    assert lora.gguf_objection(adapter, model) is None
    assert lora.gguf_objection(adapter, None) is None
    assert str(lora.gguf_objection(model, model)).startswith("It is no adapter: its general.type is model.")


def test_one_of_another_architecture_or_size_is_refused(tmp_path: Path) -> None:
    model = head_of(tiny_gguf.write_model(tmp_path / "m.gguf"))
    strange = head_of(tiny_gguf.write_adapter(tmp_path / "a.gguf", architecture="qwen2"))
    assert str(lora.gguf_objection(strange, model)).startswith("It was made for qwen2, and the model is llama.")
    wide = head_of(tiny_gguf.write_adapter(tmp_path / "b.gguf", width=128))
    assert "Its output.weight fits 128 x" in str(lora.gguf_objection(wide, model))


@pytest.mark.parametrize(
    ("keys", "tensors", "says"),
    [
        ({"general.type": 3}, {}, "its general.type is missing"),
        ({"adapter.type": "ia3"}, {}, "its adapter.type is ia3"),
        ({"adapter.type": ""}, {}, "its adapter.type is missing"),
        ({"general.architecture": ""}, {}, "does not say which architecture"),
        ({}, {}, "holds no tensor that changes"),
        ({}, {"blk.0.attn_norm.weight": (4,)}, "holds no tensor that changes"),
        ({}, {"x": (4, 4)}, "x is neither lora_a nor lora_b"),
        ({}, {"x.lora_c": (4, 4)}, "x.lora_c is neither"),
        ({}, {"x.lora_a": (4,)}, "x.lora_a is no matrix"),
        ({}, {"x.lora_a": (4, 0)}, "x.lora_a is no matrix"),
        ({}, {"x.lora_a": (4, 4)}, "only one half"),
        ({}, {**PAIR, "output.weight.lora_b": (8, 300)}, "have ranks 4 and 8"),
        ({}, {"y.lora_a": (64, 4), "y.lora_b": (4, 300)}, "has no tensor y"),
        ({}, {**PAIR, "output.weight.lora_b": (4, 301)}, "fits 64 x 301, and the model's is 64 x 300"),
        ({}, {"token_embd.weight.lora_a": (4, 299), "token_embd.weight.lora_b": (4, 64)}, "fits 64 x 299"),
    ],
)
def test_what_llamacpp_would_not_attach_is_refused_in_a_sentence(
    keys: dict[str, Any], tensors: dict[str, Shape], says: str
) -> None:
    found = str(lora.gguf_objection(Head({**LAMA, **keys}, tensors), BASE))
    assert says in found
    assert found.endswith(".")


def test_embeddings_are_stored_turned_and_the_first_of_several_files_is_not_the_whole() -> None:
    turned: dict[str, Shape] = {"token_embd.weight.lora_a": (4, 300), "token_embd.weight.lora_b": (4, 64)}
    assert lora.gguf_objection(Head(LAMA, turned), BASE) is None
    part = Head({"general.architecture": "llama", "split.count": 3}, {})
    assert lora.gguf_objection(Head(LAMA, PAIR), part) is None
    assert "the model is unknown" in str(lora.gguf_objection(Head(LAMA, PAIR), Head({}, {})))


def _head(version: int = 3, tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def _named(name: bytes, rest: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + rest


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "ends within its head"),
        (b"PK\3\4", "does not begin with GGUF"),
        (_head(1), "version 1"),
        (_head(3, 2**40), "more than any model has"),
        (_head(3, 0, 2**40), "more than any model has"),
        (_head(3, 0, 1), "ends within its head"),
        (_head(3, 0, 1, struct.pack("<Q", 2**20)), "too long"),
        (_head(3, 0, 1, _named(b"a", struct.pack("<I", 99))), "kind 99"),
        (_head(3, 0, 1, _named(b"a", struct.pack("<IIQ", 9, 99, 1))), "list of kind 99"),
        (_head(3, 0, 1, _named(b"a", struct.pack("<IIQ", 9, 8, 2**60))), "longer than its head"),
        (_head(3, 0, 1, _named(b"a", struct.pack("<IIQ", 9, 12, 2**60))), "more than 128 MiB"),
        (_head(3, 0, 1, _named(b"a", struct.pack("<IQ", 8, 2**60))), "more than 128 MiB"),
        (_head(3, 1, 0, _named(b"a", struct.pack("<I", 9))), "9 dimensions"),
    ],
)
def test_what_is_no_gguf_is_refused_before_much_is_read(data: bytes, says: str) -> None:
    with pytest.raises(NotGguf, match=says):
        gguf.read_head(io.BytesIO(data))


@given(st.binary(max_size=400), st.integers(0, 400))
def test_no_bytes_break_the_readers(junk: bytes, at: int) -> None:
    whole = _head(3, 1, 2, _named(b"a", struct.pack("<If", 6, 1.0)) + _named(b"b", struct.pack("<IIQ", 9, 5, 3)) + junk)
    for data in (junk, b"GGUF" + junk, whole, whole[:at] + junk, struct.pack("<Q", len(junk)) + junk):
        for read, fault in ((gguf.read_head, NotGguf), (safetensors.read_shapes, NotSafetensors)):
            with contextlib.suppress(fault):
                assert read(io.BytesIO(data)) is not None


# --- PEFT ------------------------------------------------------------------------------------------------------------
UP = "base_model.model.model.layers.0.mlp.up_proj"
CONFIG = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": "org/tiny"}
TENSORS: dict[str, Shape] = {f"{UP}.lora_A.weight": (4, 128), f"{UP}.lora_B.weight": (256, 4)}


def st_bytes(shapes: dict[str, Any]) -> bytes:
    entries = {name: {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    return struct.pack("<Q", len(text)) + text


def test_a_peft_adapter_says_what_it_changes() -> None:
    found = lora.read_peft(CONFIG, safetensors.read_shapes(io.BytesIO(st_bytes(TENSORS))))
    assert found == lora.Peft((4,), "org/tiny", {"model.layers.0.mlp.up_proj": (256, 128)})
    embedding: dict[str, Shape] = {
        "base_model.model.model.embed_tokens.lora_embedding_A": (4, 64),
        "base_model.model.model.embed_tokens.lora_embedding_B": (128, 4),
    }
    other = lora.read_peft({**CONFIG, "base_model_name_or_path": None}, embedding)
    assert other == lora.Peft((4,), "", {"model.embed_tokens": (64, 128)})


@pytest.mark.parametrize(
    ("config", "tensors", "says"),
    [
        ([], TENSORS, "no settings"),
        ({"r": 4}, TENSORS, "peft_type in its adapter_config.json is None"),
        ({**CONFIG, "peft_type": "PREFIX_TUNING"}, TENSORS, "is PREFIX_TUNING"),
        ({**CONFIG, "use_dora": True}, TENSORS, "use_dora"),
        ({**CONFIG, "bias": "all"}, TENSORS, "bias in its adapter_config.json is all; engines take only none"),
        ({**CONFIG, "r": 0}, TENSORS, "r in its adapter_config.json is 0"),
        ({**CONFIG, "r": True}, TENSORS, "is True"),
        ({**CONFIG, "r": "4"}, TENSORS, "must be 1 to 4096"),
        ({**CONFIG, "rank_pattern": {"x": -1}}, TENSORS, "must be 1 to 4096"),
        ({**CONFIG, "r": 8}, TENSORS, "have ranks 4 and 4; its settings say 8"),
        (CONFIG, {**TENSORS, f"{UP}.lora_B.weight": (256, 8)}, "have ranks 4 and 8"),
        (CONFIG, {**TENSORS, "base_model.model.score.weight": (2, 4)}, "score.weight is neither lora_A nor lora_B"),
        (CONFIG, {f"{UP}.lora_magnitude_vector": (4,)}, "neither lora_A"),
        (CONFIG, {f"{UP}.lora_A.weight": (4,)}, "no matrix"),
        (CONFIG, {f"{UP}.lora_A.weight": (4, 128)}, "only one half"),
        (CONFIG, {}, "no tensor that changes"),
    ],
)
def test_what_engines_would_not_load_is_refused_in_a_sentence(config: Any, tensors: Any, says: str) -> None:
    found = lora.read_peft(config, tensors)
    assert isinstance(found, str)
    assert says in found
    assert found.endswith(".")


def test_ranks_of_single_modules_count_too() -> None:
    found = lora.read_peft({**CONFIG, "r": 2, "rank_pattern": {"up_proj": 4}, "use_dora": None}, TENSORS)
    assert isinstance(found, lora.Peft)
    assert found.ranks == (2, 4)


@pytest.mark.parametrize(
    ("modules", "base", "says"),
    [
        ({"model.layers.0.up": (2, 3)}, {"model.layers.0.up.weight": (2, 3)}, ""),
        ({"model.layers.0.up": (2, 3)}, {"model.language_model.layers.0.up.weight": (2, 3)}, ""),
        ({"model.layers.0.up": (2, 3)}, {"model.layers.0.up.weight": (2, 4)}, "fits 2 x 3, and the model's is 2 x 4"),
        ({"model.layers.0.up": (2, 3)}, {"x.layers.0.up.weight": (2, 4)}, "fits 2 x 3"),
        ({"model.layers.0.up": (2, 3)}, {"a.layers.0.up.weight": (9, 9), "b.layers.0.up.weight": (2, 3)}, ""),
        ({"model.layers.0.up": (2, 3)}, {"model.layers.0.up.weight": (7,)}, ""),
        ({"model.layers.0.up": (2, 3)}, {"model.layers.0.up.qweight": (1, 1)}, ""),
        ({"lm_head": (2, 3)}, {"model.embed_tokens.weight": (2, 3)}, ""),
        ({"model.layers.0.mlp.experts.1.up": (2, 3)}, {}, ""),
        ({"model.layers.0.up": (2, 3)}, {"h.0.attn.weight": (2, 3)}, "The model has no module model.layers.0.up"),
        ({"model.layers.9.up": (2, 3), "lm_head": (1, 1)}, {}, ""),
    ],
)
def test_a_peft_adapter_is_compared_with_the_models_tensors(modules: Any, base: Any, says: str) -> None:
    found = lora.peft_objection(lora.Peft((4,), "", modules), base)
    assert (says in str(found)) if says else found is None


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "does not begin"),
        (struct.pack("<Q", 2**40), "does not begin"),
        (struct.pack("<Q", 40) + b"{}", "ends within"),
        (struct.pack("<Q", 2) + b"[]", "does not say"),
        (struct.pack("<Q", 2) + b"{{", "does not say"),
        (st_bytes({"a": ["x"]}), "does not say"),
        (st_bytes({"a": [-1]}), "does not say"),
        (struct.pack("<Q", 13) + b'{"a":{"b":1}}', "does not say"),
        (struct.pack("<Q", 21) + b'{"a":{"shape":{"b":1}', "does not say"),
        (struct.pack("<Q", 17) + b'{"a":{"shape":1}}', "does not say"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(NotSafetensors, match=says):
        safetensors.read_shapes(io.BytesIO(data))


# --- on disk ---------------------------------------------------------------------------------------------------------
def write_peft(directory: Path, config: Any = CONFIG, tensors: dict[str, Any] = TENSORS) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(config))
    (directory / "adapter_model.safetensors").write_bytes(st_bytes(tensors))
    return directory


def write_hf(directory: Path, shapes: dict[str, Any], *, parts: int = 1) -> Path:
    directory.mkdir()
    if parts == 1:
        (directory / "model.safetensors").write_bytes(st_bytes(shapes))
        return directory
    names = {name: f"model-{number % parts}.safetensors" for number, name in enumerate(shapes)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    for part in set(names.values()):
        (directory / part).write_bytes(st_bytes({name: shapes[name] for name in names if names[name] == part}))
    return directory


HF = {"model.layers.0.mlp.up_proj.weight": (256, 128), "model.embed_tokens.weight": (64, 128)}


@pytest.mark.parametrize("parts", [1, 2])
def test_the_agent_compares_a_directory_with_the_models(tmp_path: Path, parts: int) -> None:
    adapter = write_peft(tmp_path / "a")
    model = write_hf(tmp_path / "m", HF, parts=parts)
    assert launching.look_at_adapter("vllm", "red", adapter, model) is None
    narrow = write_hf(tmp_path / "n", {**HF, "model.layers.0.mlp.up_proj.weight": (256, 64)}, parts=parts)
    said = str(launching.look_at_adapter("sglang", "red", adapter, narrow))
    assert said.startswith("adapter red: Its model.layers.0.mlp.up_proj fits 256 x 128, and the model's is 256 x 64")
    assert launching.look_at_adapter("vllm", "red", adapter, tmp_path / "m" / "model.safetensors") is None


def test_the_agent_refuses_a_gguf_adapter_of_another_model(tmp_path: Path) -> None:
    model = tiny_gguf.write_model(tmp_path / "m.gguf")
    good = tiny_gguf.write_adapter(tmp_path / "a.gguf")
    bad = tiny_gguf.write_adapter(tmp_path / "b.gguf", architecture="qwen2")
    assert launching.look_at_adapter("llamacpp", "red", good, model) is None
    said = str(launching.look_at_adapter("llamacpp", "red", bad, model))
    assert said.startswith("adapter red: It was made for qwen2, and the model is llama.")
    torn = tmp_path / "c.gguf"
    torn.write_bytes(good.read_bytes()[:60])
    assert "c.gguf ends within its head" in str(launching.look_at_adapter("llamacpp", "red", torn, model))
    assert launching.look_at_adapter("llamacpp", "red", good, torn) is None
    assert "cannot be read: no such file" in str(launching.look_at_adapter("llamacpp", "r", good, tmp_path / "none"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda at: (at / "adapter_config.json").unlink(), "holds no adapter_config.json"),
        (lambda at: (at / "adapter_config.json").write_text("{"), "adapter_config.json is not JSON"),
        (lambda at: (at / "adapter_config.json").write_text("[" * 100_000), "adapter_config.json is not JSON"),
        (
            lambda at: (at / "adapter_config.json").write_bytes(b" " * (4 * 2**20 + 1)),
            "adapter_config.json is not JSON",
        ),
        (lambda at: (at / "adapter_model.safetensors").unlink(), "(its tensors are missing)"),
        (lambda at: (at / "adapter_model.safetensors").rename(at / "adapter_model.bin"), "is a pickle"),
        (lambda at: (at / "adapter_model.safetensors").write_bytes(b"x"), "does not begin as a safetensors"),
    ],
)
def test_a_directory_that_is_no_adapter_says_what_it_lacks(tmp_path: Path, change: Any, says: str) -> None:
    directory = write_peft(tmp_path / "a")
    change(directory)
    found = lora_files.read_peft(directory)
    assert isinstance(found, str)
    assert says in found


def test_what_cannot_be_read_is_no_fault_of_the_adapter(tmp_path: Path) -> None:
    with pytest.raises(Unread, match="no such file or directory"):
        lora_files.read_peft(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    assert "is no directory of an adapter" in str(lora_files.read_peft(tmp_path / "file"))
    with pytest.raises(Unread, match="it is no file"):
        lora_files.gguf_head(tmp_path)
    with pytest.raises(Unread, match="no such file"):
        lora_files.model_shapes(tmp_path)
    for index in ('{"weight_map": {"a": "../x"}}', "{}", "[]", "{"):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        assert lora_files.model_shapes(tmp_path) is None
