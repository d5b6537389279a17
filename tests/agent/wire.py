"""Makes any message of the protocol, from its structs themselves: a field that is added is tried at once."""

from __future__ import annotations

import types
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import strategies as st

TEXT = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S", "Zs"]), max_size=12)
NUMBERS = st.integers(0, 2**31 - 1)
FIGURES = st.floats(0, 1e12, allow_nan=False)


@lru_cache
def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a struct, or of the type of one of its fields."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        return st.builds(kind, **{name: any_of(hints[name]) for name in kind.__struct_fields__})
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(any_of, inside))
    if origin is Literal:
        return st.sampled_from(inside)
    if origin is tuple:
        return st.lists(any_of(inside[0]), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(any_of(inside[0]), any_of(inside[1]), max_size=2)
    return _PLAIN[kind]


_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    int: NUMBERS,
    float: FIGURES,
    bool: st.booleans(),
    type(None): st.none(),
    datetime: st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),
}
