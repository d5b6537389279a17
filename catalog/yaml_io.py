"""The catalog as YAML: text to values with the line of every problem, and back (CAT-5). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from catalog import document
from catalog.document import Place, Read
from catalog.spec import Model, Problem
from catalog.validate import validate

MAX_CHARACTERS = 1024 * 1024
MAX_PIECES = 200_000
MAX_DEPTH = 12


class _TooMuch(Exception):
    """The text would unfold (by depth or by aliases of aliases) into more than a catalog ever is."""


def parse(text: str) -> Read:
    """The models in `text`, every rule of CAT-3 checked; `problems` carry their lines."""
    data, lines, problems = _plain(text)
    if problems:
        return Read((), problems)
    found = document.read(data, lines)
    if found.problems:
        return found
    problems = tuple(replace(each, line=_line(each, found.models, lines)) for each in validate(found.models))
    return Read(found.models, problems)


def parse_model(text: str) -> Read:
    """One model by itself, read and not checked: that takes the whole catalog."""
    data, lines, problems = _plain(text)
    return Read((), problems) if problems else document.read_model(data, lines)


def dump_model(model: Model) -> str:
    """YAML that `parse_model` reads back as the same model."""
    return yaml.dump(document.write_model(model), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def dump(models: Sequence[Model]) -> str:
    """YAML that `parse` reads back as the same models."""
    return yaml.dump(document.write(models), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Quotes text that holds line breaks of other alphabets: written plainly they would read back as another one."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _text)


def _line(problem: Problem, models: Sequence[Model], lines: dict[Place, int]) -> int | None:
    """Where the field of `problem` stands, or else its profile, or else its model."""
    at: Place = ("models",)
    found = {model.name: (number, model) for number, model in reversed(list(enumerate(models)))}.get(problem.model)
    if found:
        number, model = found
        profiles = [profile.name for profile in model.profiles]
        at = (*at, number)
        at = (*at, "profiles", profiles.index(problem.profile)) if problem.profile in profiles else at
    whole = (*at, *problem.field.split("."))
    return next((lines[whole[:end]] for end in range(len(whole), 0, -1) if whole[:end] in lines), None)


def _plain(text: str) -> tuple[object, dict[Place, int], tuple[Problem, ...]]:
    if len(text) > MAX_CHARACTERS:
        reason = f"The catalog has {len(text)} characters; {MAX_CHARACTERS} is the most."
        return None, {}, (Problem("", "", "", reason),)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        unfolder = _Unfolder()
        data = unfolder.unfold(node, ()) if node else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or "it holds characters that YAML does not allow"
        return None, {}, (Problem("", "", "", f"This is not YAML: {reason}.", mark.line + 1 if mark else None),)
    except (_TooMuch, RecursionError):
        return None, {}, (Problem("", "", "", "This is nested too deeply or unfolds into too much for a catalog."),)
    return data, unfolder.lines, tuple(unfolder.problems)


@dataclass(slots=True)
class _Unfolder:
    """Turns nodes into plain data; keeps lines; finds keys written twice, which loaders silently drop."""

    lines: dict[Place, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    pieces: int = 0

    def unfold(self, node: yaml.Node, at: Place) -> Any:
        self.pieces += 1
        if self.pieces > MAX_PIECES or len(at) > MAX_DEPTH:
            raise _TooMuch
        line = node.start_mark.line + 1
        self.lines.setdefault(at, line)
        if isinstance(node, yaml.SequenceNode):
            return [self.unfold(each, (*at, number)) for number, each in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            found: dict[str, Any] = {}
            for key, value in node.value:
                self._entry(found, key, value, at)
            return found
        return _scalar(node)

    def _entry(self, found: dict[str, Any], key: yaml.Node, value: yaml.Node, at: Place) -> None:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            self.problems.append(Problem("", "", "", "A key must be a word.", line))
            return
        name = str(key.value)
        if name in found:
            self.problems.append(Problem("", "", name, "It is written twice. Remove one.", line))
            return
        self.lines[(*at, name)] = line
        found[name] = self.unfold(value, (*at, name))


def _scalar(node: yaml.Node) -> object:
    tag, text = node.tag.rpartition(":")[2], str(node.value)
    if tag in ("null", "bool", "int", "float"):
        try:
            return yaml.SafeLoader("").construct_object(node)
        except (ValueError, yaml.YAMLError):
            return text
    return text  # dates, binary and unknown tags stand as they are written
