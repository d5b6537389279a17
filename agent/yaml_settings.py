"""Read one typed tree of settings from YAML and environment; refuse what it does not know, by name and line.

Used by `server.yaml` (llmgw.config) and `agent.yaml` (agent.config); it stands on the agent's side because the
server may import the agent's words and never the other way round.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from agent.errors import ConfigError

__all__ = ["ConfigError", "load"]
Tree = TypeVar("Tree", bound=BaseModel)


def load(tree: type[Tree], path: Path | None, *, env_prefix: str, environ: Mapping[str, str] | None = None) -> Tree:
    """Build `tree` from the YAML file at `path` (None: no file), overridden by `PREFIX_SECTION__FIELD` variables.

    Raises ConfigError naming the file, the key and its line, or the variable.
    """
    values, lines = _read(path) if path else ({}, {})
    origins: dict[tuple[str, ...], str] = {}
    for name, text in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(env_prefix):
            where = tuple(name.removeprefix(env_prefix).lower().split("__"))
            if where[0] in tree.model_fields:
                _put(values, where, yaml.safe_load(text) if text else None)
                origins[where] = name
    try:
        return tree.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_sentence(tree, error, path, lines, origins)) from None


def _read(path: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist. Name an existing file, or leave the option out.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text) if node else {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line} is not YAML: {getattr(error, 'problem', error)}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must be a mapping of settings, not {type(values).__name__}.")
    lines: dict[tuple[str, ...], int] = {}
    if isinstance(node, yaml.MappingNode):
        _collect_lines(node, (), lines, path)
    return values, lines


def _collect_lines(node: yaml.MappingNode, at: tuple[str, ...], lines: dict[tuple[str, ...], int], path: Path) -> None:
    for key, value in node.value:
        here = (*at, str(key.value))
        if here in lines:
            raise ConfigError(f"{path} line {key.start_mark.line + 1}: {'.'.join(here)} is written twice. Remove one.")
        lines[here] = key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            _collect_lines(value, here, lines, path)


def _put(values: dict[str, Any], where: tuple[str, ...], value: Any) -> None:
    for part in where[:-1]:
        inner = values.get(part)
        values[part] = inner = dict(inner) if isinstance(inner, dict) else {}
        values = inner
    values[where[-1]] = value


def _sentence(
    tree: type[BaseModel],
    error: ValidationError,
    path: Path | None,
    lines: dict[tuple[str, ...], int],
    origins: dict[tuple[str, ...], str],
) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = tuple(str(part) for part in first["loc"])
    known = next((where[:end] for end in range(len(where), 0, -1) if where[:end] in origins), None)
    if known:
        place = origins[known]
    else:
        line = next((lines[where[:end]] for end in range(len(where), 0, -1) if where[:end] in lines), None)
        place = f"{path} line {line}" if line else str(path or "settings")
    name = ".".join(where)
    if first["type"] == "extra_forbidden":
        fields = _fields_at(tree, where[:-1])
        near = difflib.get_close_matches(where[-1], fields, 1)
        hint = f"Did you mean {near[0]}?" if near else f"Known here: {', '.join(sorted(fields))}."
        return f"{place}: unknown setting {name}. {hint}"
    return f"{place}: {name} is wrong: {first['msg'].removeprefix('Value error, ')}."


def _fields_at(tree: type[BaseModel], where: tuple[str, ...]) -> list[str]:
    for part in where:
        if part.isdigit():  # one of a list
            continue
        field = tree.model_fields.get(part)
        inner = field.annotation if field else None
        inner = next(iter(get_args(inner)), None) if get_origin(inner) is list else inner
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        tree = inner
    return list(tree.model_fields)
