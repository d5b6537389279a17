"""How `llmgw ctl` reaches a control plane: where it is, with which token, and what its answers mean.

Nothing heavy is imported before a command runs, so that help comes at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    import httpx

REFUSED = 1
"""Exit code: the control plane answered, and the answer is no."""
UNASKED = 2
"""Exit code: nothing could be asked (options, token, nobody there)."""
DEFAULT_URL = "http://127.0.0.1:8080"
TIMEOUT_S = 30.0
CTL_FILE = "ctl.json"
_NAMED = {
    "nodes": ("node", "llmgw ctl nodes"),
    "models": ("model", "llmgw ctl models"),
    "catalog/versions": ("catalog version", "llmgw ctl models versions"),
    "keys": ("key", "llmgw ctl keys list"),
    "budgets": ("budget", "llmgw ctl budgets list"),
    "prices": ("price", "llmgw ctl prices list"),
}
"""Paths under which records have names: what such a record is, and the command that lists them."""


class CtlError(Exception):
    """What went wrong, in one sentence with the next step; `code` is the process's exit code."""

    def __init__(self, message: str, code: int = REFUSED, *, lines: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.code, self.lines = code, lines


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    token: str


def find(url: str | None, token_file: Path | None, environ: Mapping[str, str] | None = None) -> Server:
    """From the options, else LLMGW_URL and LLMGW_TOKEN_FILE, else what `llmgw up` wrote into the data directory."""
    environ = os.environ if environ is None else environ
    url = url or environ.get("LLMGW_URL") or None
    named = token_file or (Path(environ["LLMGW_TOKEN_FILE"]) if environ.get("LLMGW_TOKEN_FILE") else None)
    if named:
        own_url, token = _read(named)
        return Server(_checked(url or own_url or DEFAULT_URL), token)
    kept = _data_dir(environ) / "secrets" / CTL_FILE
    if not kept.exists():
        raise CtlError(
            f"No token: {kept} does not exist. Run this where llmgw was started, set LLMGW_DATA_DIR to its data "
            "directory, or name a file with --token-file.",
            UNASKED,
        )
    own_url, token = _read(kept)
    if url and _checked(url) != _checked(own_url or DEFAULT_URL):
        # A token is for one server; it must not be shown to another because somebody typed an address.
        raise CtlError(f"{kept} holds the token of {own_url}, not of {url}. Name its own with --token-file.", UNASKED)
    return Server(_checked(own_url or DEFAULT_URL), token)


def _data_dir(environ: Mapping[str, str]) -> Path:
    if environ.get("LLMGW_CONFIG"):
        from llmgw.config import current

        return current().data_dir
    return Path(environ.get("LLMGW_DATA_DIR") or "data").expanduser()


def _read(path: Path) -> tuple[str | None, str]:
    """The address, if the file names one, and the token: `{"url", "token"}`, or the bare token."""
    try:
        text = path.read_text(encoding="utf-8").strip()
        held = json.loads(text) if text.startswith("{") else {"token": text}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not what llmgw wrote"
        raise CtlError(f"The token file {path} cannot be read: {reason}.", UNASKED) from None
    token, url = held.get("token"), held.get("url")
    if not (isinstance(token, str) and token.startswith("at-") and token.isascii() and token.isprintable()):
        raise CtlError(f"The file {path} holds no API token (at-…). Name one that does with --token-file.", UNASKED)
    return url if isinstance(url, str) else None, token


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.username is not None or parts.query or parts.fragment:
        raise CtlError(f"{url!r} is not an address such as {DEFAULT_URL}. Correct --url or LLMGW_URL.", UNASKED)
    url = url.rstrip("/")
    if url.endswith("/v1"):
        whole = url.removesuffix("/v1").removesuffix("/api")
        raise CtlError(
            f"{url} is where programs send requests. Leave its path out of --url or LLMGW_URL: {whole}", UNASKED
        )
    return url


class Client:
    """Speaks to one control plane. Every method raises CtlError in words for people."""

    def __init__(self, server: Server, http: httpx.Client) -> None:
        self.server, self.http = server, http

    def get(self, path: str, **query: object) -> Any:
        return self._data(self.ask("GET", path, query=query))

    def text(self, path: str) -> str:
        return self.ask("GET", path).text

    def send(self, method: str, path: str, body: object = None, **query: object) -> Any:
        return self._data(self.ask(method, path, body=body, query=query))

    def _data(self, answer: httpx.Response) -> Any:
        try:
            return answer.json()
        except ValueError:
            raise _foreign(answer, self.server.url) from None

    def ask(
        self, method: str, path: str, *, body: object = None, query: Mapping[str, object] | None = None
    ) -> httpx.Response:
        import httpx

        if any(part in ("", ".", "..") for part in path.split("/")):
            # Such a name would lead to another address, and nothing has one.
            raise CtlError(_nothing(path) or "Nothing has that name.")
        values = {name: str(value) for name, value in (query or {}).items() if value is not None}
        sent: dict[str, Any] = {}
        if isinstance(body, str):
            sent = {"content": body.encode(), "headers": {"Content-Type": "application/yaml"}}
        elif body is not None:
            sent = {"json": body}
        try:
            answer = self.http.request(method, f"{self.server.url}/api/v1/{path}", params=values, **sent)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if "CERTIFICATE" in str(error).upper():
                raise CtlError(f"The certificate of {self.server.url} is not trusted: {error}.", UNASKED) from None
            if any(words in str(error) for words in ("WRONG_VERSION_NUMBER", "record layer failure")):
                plain = self.server.url.replace("https:", "http:", 1)
                raise CtlError(
                    f"What listens at {self.server.url} speaks no TLS. Say {plain} in --url or LLMGW_URL.", UNASKED
                ) from None
            raise CtlError(_nobody(self.server.url, error), UNASKED) from None
        except httpx.TimeoutException:
            raise CtlError(
                f"{self.server.url} did not answer within {TIMEOUT_S:.0f} s. Try again, or look at its log.", UNASKED
            ) from None
        except httpx.HTTPError as error:
            raise CtlError(f"{self.server.url} broke off: {str(error).rstrip('.')}. Try again.", UNASKED) from None
        if answer.is_success:
            return answer
        raise _explained(answer, self.server.url, path)

    def pages(self, path: str, limit: int, **query: object) -> list[Any]:
        """Up to `limit` records, over as many pages as that takes."""
        found: list[Any] = []
        after: str | None = None
        while len(found) < limit:
            page = self.get(path, limit=min(limit - len(found), 1000), after=after, **query)
            found += page["results"]
            after = page["next"]
            if not after:
                break
        return found


def _explained(answer: httpx.Response, url: str, path: str) -> CtlError:
    try:
        error = answer.json()["error"]
        message, problems = str(error["message"]), error.get("problems", [])
    except (ValueError, KeyError, TypeError):
        return _foreign(answer, url)
    if answer.status_code == 401:
        return CtlError(f"{message} Name a valid one with --token-file.", UNASKED)
    if answer.status_code == 404 and (nothing := _nothing(path)):
        return CtlError(nothing)
    return CtlError(message, lines=tuple(_problem(problem) for problem in problems))


def _nothing(path: str) -> str:
    """Which record there is not, and where to see those that there are; empty where `path` names none."""
    for under, (kind, listing) in _NAMED.items():
        if path.startswith(f"{under}/"):
            name = unquote(path.removeprefix(f"{under}/").split("/")[0])
            return f"There is no {kind} {name}. See them: {listing}"
    return ""


def _nobody(url: str, error: Exception) -> str:
    if _is_here(url):
        start = "llmgw up; where its parts run one by one: llmgw server run web"
        return f"No llmgw answers at {url}. Start it with: {start}"
    return (
        f"No llmgw answers at {url} ({error}). Correct --url or LLMGW_URL if that is not its address; "
        "else see whether `llmgw server run web` or `llmgw up` runs there and listens on it."
    )


def _is_here(url: str) -> bool:
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


def _foreign(answer: httpx.Response, url: str) -> CtlError:
    text = f"{url} answers like something else than llmgw (HTTP {answer.status_code}). Check --url."
    return CtlError(text, UNASKED)


def _problem(problem: Mapping[str, Any]) -> str:
    place = [f"line {problem['line']}"] if problem.get("line") else []
    place += [f"{kind} {problem[kind]}" for kind in ("model", "profile") if problem.get(kind)]
    return ": ".join(part for part in (", ".join(place), problem.get("field"), problem.get("text")) if part)


@contextmanager
def connect(url: str | None, token_file: Path | None) -> Iterator[Client]:
    """A client, and an end in words: CtlError becomes a sentence on standard error and the exit code."""
    import typer

    try:
        server = find(url, token_file)
        import httpx

        headers = {"Authorization": f"Bearer {server.token}", "User-Agent": "llmgw-ctl", "Accept": "*/*"}
        # A proxy of the environment has no business between this machine and itself.
        with httpx.Client(headers=headers, timeout=TIMEOUT_S, trust_env=not _is_here(server.url)) as http:
            yield Client(server, http)
    except CtlError as error:
        from llmgw.cli.ctl_show import clean

        # With one problem the sentence has said it already.
        for line in ("llmgw: " + str(error), *(f"  {line}" for line in error.lines if len(error.lines) > 1)):
            typer.echo(clean(line), err=True)
        raise typer.Exit(error.code) from None
