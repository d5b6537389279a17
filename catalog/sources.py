"""Whether a model's source can be meant at all: a path, an address, or the bare id of a repository. Pure."""

from __future__ import annotations

import re

from agent.sources import SourceError, parse

MAX_SOURCE = 1000
FETCHED = ("http", "https", "pypi")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_REPOSITORY = re.compile(
    r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?(?:/[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?)?\Z"
)


def objection(source: str) -> str | None:
    """Why `source` is refused, as a whole sentence; None when it may stand."""
    if len(source) > MAX_SOURCE:
        return f"The source has {len(source)} characters; {MAX_SOURCE} is the most."
    if source != source.strip() or not source.isprintable():
        return "The source begins or ends with a blank or holds characters that cannot be seen; remove them."
    scheme = _SCHEME.match(source)
    if scheme:
        return _address(source, scheme[1].lower())
    if is_relative(source):
        return _unread(source)
    if is_path(source):
        return None if source.strip("./") else f"The source {source} names no file; write the path of one."
    if source.startswith("~"):
        return f"The source {source} depends on who reads it; write the absolute path."
    if not _REPOSITORY.match(source):
        return (
            f"The source {source} is neither a path, an address nor an id such as org/name. "
            f"For a file write /{source.lstrip('/')} or ./{source.lstrip('/')}."
        )
    return None


def is_path(source: str) -> bool:
    return source.startswith(("/", "./", "../"))


def is_relative(source: str) -> bool:
    """Whether it names a file in each node's own folder of models."""
    return source.startswith(("./", "../"))


def is_fetched(source: str) -> bool:
    """Whether nodes bring it as a single file."""
    return _SCHEME.match(source) is not None


def _address(source: str, scheme: str) -> str | None:
    if scheme == "file":
        return "Write a file's path itself, without file://."
    if scheme not in FETCHED:
        known = ", ".join(f"{name}://" for name in FETCHED)
        return f"Nodes cannot fetch {scheme}://. Known: {known}; a bare org/name too."
    if " " in source:
        return "An address holds no blanks; write %20 for one."
    return _unread(f"{scheme}{source[len(scheme) :]}")


def _unread(source: str) -> str | None:
    """Why nodes, which read it with the same function, could not."""
    try:
        parse(source)
    except SourceError as error:
        text = str(error)
        return f"{text[0].upper()}{text[1:]}"
    return None
