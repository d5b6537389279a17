"""OpenAPI schemas of dataclasses, made from the dataclasses themselves: never behind the value."""

from __future__ import annotations

from typing import Any

import msgspec


def shape_of(kind: type) -> dict[str, Any]:
    """Every reference written out."""
    (top,), shapes = msgspec.json.schema_components((kind,), ref_template="{name}")

    def unfold(part: Any) -> Any:
        if isinstance(part, list):
            return [unfold(each) for each in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return unfold(shapes[part["$ref"]])
        known = [each for each in part.get("anyOf", ()) if each != {"type": "null"}]
        if len(known) == 1:  # OpenAPI 3.0 knows no type null
            return {**unfold(known[0]), "nullable": True}
        return {key: unfold(held) for key, held in part.items()}

    whole: dict[str, Any] = unfold(top)
    return whole
