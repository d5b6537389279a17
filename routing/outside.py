"""Endpoints that llmgw does not run: a provider's model (CAT-20), an engine that an operator names (GW-47).

An engine of the operator's own is sent what a replica would be. A provider is sent what it needs and nothing that tells
of this place or its people: no header of the client's but a few, no name but the one that the provider gave the model.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from urllib.parse import quote

from catalog import spec
from llmgw.core.addresses import Address, parse
from nodes.state import Endpoint
from routing import openai
from routing.dialing import Line, Unusable
from routing.failures import UpstreamError
from routing.openai import Refusal

ROUTES = openai.KNOWN_ROUTES | {"/v1/images/generations", "/v1/audio/speech", "/v1/moderations"}
"""What is asked of a provider. Under its key are an account's files, stored answers and settings too."""
PASSED = frozenset({b"content-type", b"accept", b"anthropic-version", b"anthropic-beta", b"openai-beta"})
_QUERY = b"beta=true"
"""The one query that clients send and providers look at (Anthropic's)."""
_MESSAGES = "/v1/messages"
ANTHROPIC_VERSION = b"anthropic-version: 2023-06-01\r\n"
LONGEST_KEY = 8192
LONGEST_REPLICA = 120
RETRY_AFTER_S = 5.0
LONGEST_RETRY_AFTER_S = 3600.0
ACCOUNT = frozenset({401, 402, 403, 407})
"""Statuses that are about the operator's account; what is said beside them is not for clients."""


class ProviderFailed(UpstreamError):
    """A provider's answer that says it could not, or not for this account. What it said beside is not repeated."""

    def __init__(self, status: int, text: str, *, counts: bool = True, soft: bool = True) -> None:
        super().__init__(text)
        self.status, self.counts, self.soft = status, counts, soft


class Throttled(UpstreamError):
    """A provider takes no more for now (429). Another endpoint may; this one is not ill."""

    counts = False

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"it takes no more requests for {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Outside:
    """`model`: its name here; `name_there`: what stands in requests. `private` None: the operator's own engine, which
    may be anywhere and is scraped; else a provider's, and whether it may be inside."""

    replica: str
    model: str
    name_there: str
    address: Address
    """Its path ends where a request's own begins, behind `/v1`."""
    engine: str
    weight: int
    key_file: str | None = None
    ca_file: str | None = None
    private: bool | None = None

    @property
    def own(self) -> bool:
        return self.private is None

    @property
    def metrics_path(self) -> str:
        """At the engine's root, for the operator's own."""
        return f"{self.address.path.removesuffix('/v1')}/metrics"

    def endpoint(self) -> Endpoint:
        """As a gateway's table holds one."""
        return Endpoint(
            replica=self.replica,
            node="",
            model=self.model,
            profile="",
            engine=self.engine,
            host=self.address.host,
            port=self.address.port,
            slots=self.weight,
            state="ready",
            draining=False,
            lost=False,
        )

    def line(self) -> Line:
        return Line(self.address, private=self.private, ca_file=self.ca_file)

    # --- what it is sent ---------------------------------------------------------------------------------------------
    def lines(self, path: str = "") -> bytes:
        """The end of the request line, then the headers that say where and with which key. Raises Unusable."""
        key = read_key(self.key_file) if self.key_file is not None else None
        text = f" HTTP/1.1\r\nHost: {self.address.authority}\r\n"
        if key is not None:
            text += f"Authorization: Bearer {key}\r\n"
            if not self.own and path.startswith(_MESSAGES):
                text += f"x-api-key: {key}\r\n"  # where Anthropic looks for it
        return text.encode()

    def head(self, *, method: str, path: str, query: bytes, passed: bytes, request_id: str, length: int) -> bytes:
        """The whole head. `passed`: the client's header lines that a replica would get. Raises Unusable, and Refusal
        for a route that providers are not asked for."""
        target = quote(self.address.path + path[len("/v1") :], safe="/:@!$&'()*+,;=~")
        ours = b""
        if self.own:
            target += f"?{query.decode('latin-1')}" if query else ""
            ours = b"x-request-id: %b\r\n" % request_id.encode()
        else:
            if method != "POST" or path not in ROUTES:
                raise Refusal(
                    "route_unknown",
                    f"Model {self.model} is served by a provider, which is asked for {', '.join(sorted(ROUTES))} only.",
                )
            target += "?beta=true" if query == _QUERY else ""
            passed = _only_needed(passed)
            if path.startswith(_MESSAGES) and b"anthropic-version:" not in passed:
                ours = ANTHROPIC_VERSION
        return b"%b %b%b%b%bcontent-length: %d\r\n\r\n" % (
            method.encode(),
            target.encode(),
            self.lines(path),
            passed,
            ours,
            length,
        )


def _only_needed(passed: bytes) -> bytes:
    lines = passed.split(b"\r\n")
    return b"".join(line + b"\r\n" for line in lines if line.partition(b":")[0] in PASSED)


# --- what there is ---------------------------------------------------------------------------------------------------
def external(
    models: Iterable[spec.Model], *, weight: int, private: bool, ca_file: str | None = None
) -> tuple[Outside, ...]:
    """One endpoint for each external model of a valid catalog."""
    return tuple(
        Outside(
            replica=_short(f"external:{model.name}"),
            model=model.name,
            name_there=model.external.model,
            address=parse(model.external.url),
            engine="external",
            weight=weight,
            key_file=model.external.api_key_file,
            ca_file=ca_file,
            private=private,
        )
        for model in models
        if model.external is not None
    )


def static(
    *,
    name: str | None,
    url: str,
    models: Sequence[str],
    engine: str,
    weight: int,
    key_file: str | None,
    ca_file: str | None = None,
) -> tuple[Outside, ...]:
    """One endpoint for each model of an engine in `endpoints`. Its API is under `/v1`, written or not."""
    address = parse(url)
    if not address.path.endswith("/v1"):
        address = replace(address, path=f"{address.path}/v1")
    return tuple(
        Outside(
            replica=_short(name or f"{address.host}:{address.port}"),
            model=model,
            name_there=model,
            address=address,
            engine=engine,
            weight=weight,
            key_file=key_file,
            ca_file=ca_file,
        )
        for model in models
    )


def joined(places: Iterable[Outside], models: Iterable[spec.Model]) -> tuple[Outside, ...]:
    """`places` under the catalog's names: one that is listed by a model's alias serves that model."""
    known = {alias: model.name for model in models for alias in model.aliases}
    return tuple(replace(place, model=known.get(place.model, place.model)) for place in places)


def _short(name: str) -> str:
    """As a column of usage holds it, still unlike any other."""
    if len(name) <= LONGEST_REPLICA:
        return name
    mark = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{name[: LONGEST_REPLICA - 13]}~{mark}"


# --- keys ------------------------------------------------------------------------------------------------------------
def read_key(path: str) -> str:
    """The key in a file, read anew. Raises Unusable, which tells neither the file's name nor what is in it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Unusable("its key file does not exist") from None
    except (OSError, ValueError):
        raise Unusable("its key file cannot be opened") from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise Unusable("its key file is no plain file")
        found = os.read(handle, LONGEST_KEY + 1)
    except OSError:
        raise Unusable("its key file cannot be read") from None
    finally:
        os.close(handle)
    if len(found) > LONGEST_KEY:
        raise Unusable(f"its key file is longer than {LONGEST_KEY:,} bytes")
    key = found.strip()
    if not key:
        raise Unusable("its key file is empty")
    if any(not 0x21 <= byte <= 0x7E for byte in key):
        raise Unusable("its key file holds more than one word of plain characters")
    return key.decode("ascii")


# --- what it answers -------------------------------------------------------------------------------------------------
def check_status(status: int, retry_after: bytes | None, now: float) -> None:
    """What a provider's status means here. Raises ProviderFailed or Throttled; `now` in epoch seconds."""
    if status == 429:
        raise Throttled(_wait_s(retry_after, now))
    if status in ACCOUNT:
        text = f"it refused this gateway's key or account ({status})"
        raise ProviderFailed(status, text, soft=status not in (401, 402))
    if status >= 500:
        raise ProviderFailed(status, f"it answered {status}")
    # These hang on the route that a client chose, which must not take the model away from others.
    if 300 <= status < 400:
        raise ProviderFailed(status, f"it answered with a redirection ({status}), which is not followed", counts=False)
    if status == 404:
        raise ProviderFailed(status, "it knows no such model or address (404)", counts=False)


def _wait_s(retry_after: bytes | None, now: float) -> float:
    text = (retry_after or b"").decode("latin-1").strip()
    try:
        wait_s = float(text) if text[:1].isdigit() else parsedate_to_datetime(text).timestamp() - now
    except (ValueError, OverflowError):
        return RETRY_AFTER_S
    return min(max(wait_s, 1.0), LONGEST_RETRY_AFTER_S)


def refusal(model: str, failure: UpstreamError) -> Refusal | None:
    """What a client is told when this was the last failure; None: nothing that only a provider's failures say."""
    match failure:
        case Throttled():
            return Refusal(
                "rate_limited",
                f"The provider of model {model} takes no more requests for now. "
                f"Try again in {failure.retry_after_s:.0f} s.",
                retry_after_s=failure.retry_after_s,
            )
        case ProviderFailed():
            return Refusal("engine_failed", f"The provider of model {model} failed: {failure}. Tell an operator.")
        case Unusable():
            return Refusal("engine_failed", f"Model {model} cannot be reached: {failure}. Tell an operator.")
        case _:
            return None
