"""Reads the heads of adapters that are added, and of their models, where this machine can (CAT-40).

A path is a node's: only where it exists here too (one machine, a shared file system) is it read. What cannot be read
is a remark, not a refusal: each node looks again before it starts an engine.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from agent import gguf, lora, lora_files
from agent.gguf import Head, Shape
from agent.lora_files import Unread
from agent.sources import LocalFile, RelativeFile, SourceError, UrlFile, parse
from catalog.engine_args import lora_rank
from catalog.spec import Adapter, Model, Problem
from llmgw.core import addresses

LIMIT_S = 15.0
"""All that one change is waited for; what is not read by then was not read."""
SILENCE_S = 5.0
MAX_REDIRECTS = 5
MAX_LOOKED_AT = 256
AT_ONCE = threading.BoundedSemaphore(4)
"""A file system that hangs keeps its thread: no more than these."""


@dataclass(slots=True)
class Looked:
    """What refuses the adapters, and what is only remarked on."""

    problems: list[Problem] = field(default_factory=list)
    notices: list[Problem] = field(default_factory=list)


def look(new: Sequence[Model], old: Sequence[Model], *, limit_s: float = LIMIT_S) -> Looked:
    """At every adapter of `new` that is not in `old` for the same weights."""
    added = list(_added(new, old))
    if not added:
        return Looked()
    found: list[tuple[Model, Adapter, Looked]] = []
    over, models = threading.Event(), _Models()

    def read() -> None:
        with AT_ONCE:
            for model, adapter in added[:MAX_LOOKED_AT]:
                if over.is_set():
                    return
                found.append((model, adapter, _look_at(model, adapter, models)))

    thread = threading.Thread(target=read, name="looking at adapters", daemon=True)
    thread.start()
    thread.join(limit_s)
    over.set()
    done = found[:]
    looked = Looked()
    for _, _, each in done:
        looked.problems += each.problems
        looked.notices += each.notices
    for model, adapter in added[len(done) :]:
        late = f"there was no time within {limit_s:g} s" if len(done) < MAX_LOOKED_AT else "there are too many"
        looked.notices.append(_not_read(model, adapter, late))
    return looked


def _added(new: Iterable[Model], old: Iterable[Model]) -> Iterator[tuple[Model, Adapter]]:
    known = {(model.source, _engines(model), adapter.source) for model in old for adapter in model.adapters}
    for model in new:
        for adapter in model.adapters:
            if (model.source, _engines(model), adapter.source) not in known:
                yield model, adapter


def _engines(model: Model) -> frozenset[str]:
    return frozenset(profile.engine for profile in model.profiles)


class _Models:
    """What adapters are compared with, each read once for one change. Both raise Unread."""

    def __init__(self) -> None:
        self.heads: dict[str, Head] = {}
        self.tensors: dict[str, Mapping[str, Shape] | None] = {}

    def head(self, source: str) -> Head:
        """Raises gguf.NotGguf too."""
        if source not in self.heads:
            self.heads[source] = _head(source)
        return self.heads[source]

    def shapes(self, source: str) -> Mapping[str, Shape] | None:
        if source not in self.tensors:
            directory = _here(source)
            self.tensors[source] = lora_files.model_shapes(directory) if directory.is_dir() else None
        return self.tensors[source]


def _look_at(model: Model, adapter: Adapter, models: _Models) -> Looked:
    looked = Looked()
    for peft in sorted({engine != "llamacpp" for engine in _engines(model)}):
        look = _look_at_peft if peft else _look_at_gguf
        try:
            said = look(model, adapter, models, looked)
        except Unread as why:
            looked.notices.append(_not_read(model, adapter, str(why)))
        else:
            if said:
                looked.problems.append(_of(model, adapter, said))
    return looked


def _look_at_gguf(model: Model, adapter: Adapter, models: _Models, looked: Looked) -> str | None:
    try:
        found = _head(adapter.source)
    except gguf.NotGguf as fault:
        return f"{adapter.source} {fault}. llama.cpp needs a LoRA adapter converted to GGUF."
    base: Head | None = None
    try:
        base = models.head(model.source)
    except gguf.NotGguf as fault:
        looked.notices.append(Problem(model.name, "", "source", f"{model.source} {fault}."))
    except Unread as why:
        looked.notices.append(_not_compared(model, adapter, str(why), found.architecture))
    return lora.gguf_objection(found, base)


def _look_at_peft(model: Model, adapter: Adapter, models: _Models, looked: Looked) -> str | None:
    found = lora_files.read_peft(_here(adapter.source))
    if isinstance(found, str):
        return found
    for profile in model.profiles:
        most = lora_rank(profile)
        if most is not None and found.ranks[-1] > most:
            return (
                f"Its rank is {found.ranks[-1]}, and profile {profile.name} allows {most}; "
                f"write --max-lora-rank {found.ranks[-1]} among its args."
            )
    try:
        base = models.shapes(model.source)
    except Unread as why:
        looked.notices.append(_not_compared(model, adapter, str(why), found.base_name))
        return None
    if base is None:
        looked.notices.append(_not_compared(model, adapter, "it holds no safetensors", found.base_name))
        return None
    return lora.peft_objection(found, base)


def _of(model: Model, adapter: Adapter, text: str) -> Problem:
    return Problem(model.name, "", "adapters", f"Adapter {adapter.name}: {text}")


def _not_read(model: Model, adapter: Adapter, why: str) -> Problem:
    text = f"{adapter.source} was not read from here ({why}); each node looks at it before it starts an engine."
    return _of(model, adapter, text)


def _not_compared(model: Model, adapter: Adapter, why: str, made_for: str) -> Problem:
    text = f"It was made for {made_for[:80] or 'what it does not say'}. {model.source} was not read from here ({why}),"
    return _of(model, adapter, f"{text} so nodes compare the two.")


# --- opening ---------------------------------------------------------------------------------------------------------
def _head(source: str) -> Head:
    """Raises Unread, and gguf.NotGguf."""
    match _parsed(source):
        case LocalFile(path):
            return lora_files.gguf_head(Path(path))
        case UrlFile(url):
            with _opened(url) as file:
                return gguf.read_head(file)
        case RelativeFile():
            raise Unread("it is in each node's own folder of models")
        case _:
            raise Unread("it is a file inside a wheel")


def _here(source: str) -> Path:
    match _parsed(source):
        case LocalFile(path):
            return Path(path)
        case RelativeFile():
            raise Unread("it is in each node's own folder of models")
        case _:
            raise Unread("it is fetched by nodes")


def _parsed(source: str) -> object:
    try:
        return parse(source)
    except SourceError:
        raise Unread("it is found by the engine itself") from None


class _Body:
    """A response's body as a file that ends when there was nothing for a while, or too much waiting in all."""

    def __init__(self, chunks: Iterator[bytes], until: float) -> None:
        self.chunks, self.until, self.held = chunks, until, bytearray()

    def read(self, size: int, /) -> bytes:
        while len(self.held) < size:
            if time.monotonic() > self.until:
                raise Unread(f"that took longer than {LIMIT_S:g} s")
            chunk = next(self.chunks, None)
            if chunk is None:
                break
            self.held += chunk
        found = bytes(self.held[:size])
        del self.held[:size]
        return found


@contextmanager
def _opened(url: str) -> Iterator[_Body]:
    """No more of it is read than the head takes. Raises Unread."""
    host = urlsplit(url).hostname or ""
    try:
        with (
            httpx.Client(
                timeout=SILENCE_S,
                follow_redirects=True,
                max_redirects=MAX_REDIRECTS,
                event_hooks={"request": [_refuse_strange_addresses]},
            ) as client,
            client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as answer,
        ):
            if answer.status_code != httpx.codes.OK:
                raise Unread(f"{host} answered {answer.status_code}")
            yield _Body(answer.iter_raw(), time.monotonic() + LIMIT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unread(f"{host} could not be reached: {type(error).__name__}") from None


def _refuse_strange_addresses(request: httpx.Request) -> None:
    """Weights may come from inside; never from where clouds hand out credentials, whoever redirects there."""
    host = request.url.host
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        raise Unread(f"{host} has no address") from None
    for address in found:
        word = addresses.refused(address, private=True)
        if word is not None:
            raise Unread(f"{host} is {word} address")
