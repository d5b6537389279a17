"""Directories as PEFT and transformers save them, heads only: what tells an adapter of a model from another."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

UP = "model.layers.0.mlp.up_proj"


def _safetensors(shapes: Mapping[str, Sequence[int]]) -> bytes:
    entries = {name: {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def write_peft(directory: Path, *, rank: int = 4, width: int = 128, kind: str = "LORA") -> Path:
    directory.mkdir()
    config = {"peft_type": kind, "r": rank, "base_model_name_or_path": "org/tiny"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    halves = {
        f"base_model.model.{UP}.lora_A.weight": (rank, width),
        f"base_model.model.{UP}.lora_B.weight": (256, rank),
    }
    (directory / "adapter_model.safetensors").write_bytes(_safetensors(halves))
    return directory


def write_model(directory: Path, *, width: int = 128) -> Path:
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(_safetensors({f"{UP}.weight": (256, width)}))
    return directory
