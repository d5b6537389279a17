"""One request under /v1/, in numbered steps: (1) key, (2) body, (3) model and permission, (4) limits and budgets,
(5) a place, (6) endpoints, retries and fallbacks (routing.serving, routing.attempts), (7) the answer (routing.relay),
(8) settle: journal, budgets and metrics, before the answer ends.

An exchange ends in exactly one record when it had a key.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final
from urllib.parse import parse_qs

import msgspec

from llmgw.core import logs
from routing import accounting, answers, bodies, forms, measures, media, openai, serving, settling, translate
from routing.client import Client, ClientLeft, Headers
from routing.direct import DirectClient
from routing.explain import Attempt, Considered, Skipped
from routing.failures import Silent, UpstreamError
from routing.heads import Head
from routing.limits import Account, Hold
from routing.now import epoch, monotonic
from routing.openai import Refusal
from routing.plane import Plane
from routing.run import Run, Signal
from routing.shapes import Peek, Tokens
from routing.table import Served, Target
from routing.upstream import Connection
from tenants.keys import PREFIX_LENGTH, Grant

log = logging.getLogger(__name__)

BODY_SILENCE_S: Final = 30.0
PROGRESS_S: Final = 1.0
DECODE_APART_BYTES: Final = 128 * 1024
"""Compressed bodies beyond this are undone in a thread."""

ANYONE: Final = Grant(digest="", key_id=None, prefix="", project_id=None, user_id=None, models=None, expires_at=None)
"""Whoever asks while `gateway.auth` is off."""
_WHERE: Final = "Your project's page makes a new one."


class Exchange:
    task: Run | None = None
    """What runs it; set by whoever starts it."""
    deadline: float | None = None
    """When the current wait is over, monotonic; the plane's watch looks at it."""
    sending = False
    """Whether what is waited for is that the client takes bytes."""
    left = False
    watcher: asyncio.Task[None] | None = None
    grant: Grant | None = None
    account: Account | None = None
    """What limits its key; None where nothing does."""
    hold: Hold | None = None
    """What was reserved of limits and budgets."""
    reserved_tokens = 0
    raw_body = b""
    """As the client sent it, decompressed."""
    body = b""
    """As the endpoint gets it."""
    body_read = False
    peek: Peek | None = None
    name = ""
    """What the client calls the model."""
    form: bytes | None = None
    """The boundary of a body that is a form."""
    translated = False
    """Whether the endpoint is asked for chat completions instead, since it lacks the route."""
    served: Served | None = None
    target: Target | None = None
    band = ""
    position = 0
    """Place in the queue when it began to wait; 0 when it did not."""
    loaded = False
    """Whether it waited for a replica to become ready."""
    look_at: float | None = None
    """When a waiting request looks around next, monotonic; the plane's watch looks at it."""
    news: Signal | None = None
    """Of a request that waits for its place: set when there may be something new."""
    considered: tuple[Considered, ...] = ()
    failures: tuple[Attempt, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    affinity = ""
    connection: Connection | None = None
    add_usage = False
    answering = False
    """Whether any byte of an answer went to the client."""
    committed = False
    """Whether the client has the head of a stream, and perhaps comments, but nothing of an answer yet."""
    queue_ms = 0.0
    first_byte_at: float | None = None
    recorded = False
    _overdue = False
    _say_again_at = 0.0

    def __init__(self, plane: Plane, head: Head, client: Client) -> None:
        self.plane, self.head, self.client = plane, head, client
        if isinstance(client, DirectClient):
            client.on_left = self.client_left
        self.path, self.method, self.headers = head.path, head.method, head.headers
        self.request_id = plane.next_id()
        self.started = monotonic()
        self.translation = translate.for_route(head.path)

    # --- from outside ------------------------------------------------------------------------------------------------
    def overdue(self) -> None:
        """The watch found the deadline passed."""
        self.deadline = None
        if self.connection is not None and not self.sending:
            self.connection.fail(Silent("it was silent for too long"))
        elif self.task is not None:
            self._overdue = True
            self.task.cancel()

    async def watch_client(self) -> None:
        """Until the client leaves, for clients that must be asked."""
        await self.client.wait_left()
        self.client_left()

    def client_left(self) -> None:
        """The engine's request is aborted at once."""
        self.left = True
        if self.connection is not None:
            self.connection.fail(ClientLeft())
        if self.news is not None:
            self.news.set()

    # --- the steps ---------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        plane = self.plane
        plane.active.add(self)
        try:
            self.grant = self.authenticate()
            self._check_route()
            if self.method != "POST":
                self.body_read = True
            elif not self._has_whole_body():
                await self._read_body()
            await serving.serve(self, self._resolve())
        except Refusal as refusal:
            await self.refuse(refusal)
        except ClientLeft:
            self.record(499, "client_left", self._unanswered())
        except UpstreamError:
            self.client.abort()  # in the middle of an answer: the relay has said and recorded what can be
        except asyncio.CancelledError:
            await self._stopped()
        except Exception:  # noqa: BLE001  the request boundary
            self.say(logging.ERROR, "The gateway failed on a request; please report this", trace=True)
            await self.refuse(
                Refusal("gateway_failed", f"The gateway failed on this request; say {self.request_id} to an operator.")
            )
        finally:
            plane.active.discard(self)
            self.task = None
            if self.watcher is not None:
                self.watcher.cancel()

    def authenticate(self) -> Grant:
        """(1) Whose request this is. Keys are looked up by their SHA-256, so time says nothing about them."""
        self.plane.check_fresh(self.started)
        if not self.plane.bounds.auth:
            return ANYONE
        token = self.head.token
        if token is None:
            raise Refusal(
                "key_missing", "Send a project key as `Authorization: Bearer sk-…`. Your project's page makes one."
            )
        grant = self.plane.table.grants.get(self.head.digest)
        if grant is None:
            raise Refusal(
                "key_unknown",
                f"{_shown_key(token)} does not exist or was revoked. Make a new one on your project's page.",
            )
        if grant.expires_at is not None and grant.expired(epoch()):
            raise Refusal("key_unknown", f"{_shown_key(token)} has expired. {_WHERE}")
        self.account = self.plane.limiter.account(grant)
        return grant

    def _check_route(self) -> None:
        path, method = self.path, self.method
        if path in openai.KNOWN_ROUTES:
            if method != "POST":
                raise Refusal("method_not_allowed", f"{path} takes POST, not {method[:20]}.")
            return
        if "//" in path or "/." in path or "\\" in path or not path.isprintable() or openai.ENGINE_ADMIN.match(path):
            raise Refusal("route_unknown", "There is no such address here. GET /v1/models shows what is.")
        if method not in ("POST", "GET"):
            raise Refusal("method_not_allowed", f"{path[:100]} takes POST or GET, not {method[:20]}.")

    def _has_whole_body(self) -> bool:
        """Whether the body came with the head, plain and within the limit, as most do: then nothing is to be read."""
        client = self.client
        if (
            not isinstance(client, DirectClient)
            or client.more_body
            or client.disconnected
            or b"content-encoding" in self.headers
            or len(client.body) > self.plane.bounds.body_limit_bytes
        ):
            return False
        self.raw_body = self.body = client.take()
        self.body_read = True
        return True

    async def _read_body(self) -> None:
        """(2) The whole body, undone and within the limit."""
        limit = self.plane.bounds.body_limit_bytes
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > limit:
            raise bodies.too_large(limit)
        self.deadline = self.started + BODY_SILENCE_S
        body = await self._read_parts(limit)
        self.deadline = None
        self.body_read = True
        encoding = self.headers.get(b"content-encoding")
        if encoding is not None:
            names = encoding.decode("latin-1").split(",")
            if len(body) > DECODE_APART_BYTES:
                body = await asyncio.to_thread(bodies.decode, body, names, limit)
            else:
                body = bodies.decode(body, names, limit)
        self.raw_body = self.body = body

    async def _read_parts(self, limit: int) -> bytes:
        """All of it. Until it is there, it counts like those that wait for a place."""
        plane, most = self.plane, self.plane.bounds.waiting_bytes
        parts: list[bytes] = []
        size, more = 0, True
        try:
            while more:
                part, more = await self.client.read()
                self.deadline = monotonic() + BODY_SILENCE_S
                parts.append(part)
                size += len(part)
                plane.waiting_bytes += len(part)
                if size > limit:
                    raise bodies.too_large(limit)
                if more and most < plane.waiting_bytes != size:  # one alone may be as large as any body
                    raise bodies.too_many(most)
        finally:
            plane.waiting_bytes -= size
        return b"".join(parts)

    def _resolve(self) -> Served:
        """(3) Which model or adapter, and may this key use it."""
        grant = self.grant
        assert grant is not None
        if self.method == "GET":
            name = _query_model(self.head.query)
        else:
            content_type = self.head.content_type
            if content_type[:10].lower() == b"multipart/":
                self.form = forms.boundary(content_type)
            body = self.raw_body
            peek = self.peek = openai.peek(body, self.path) if self.form is None else forms.peek(body, self.form)
            name = peek.model
            if peek.stream:
                self.add_usage = self.form is None and openai.usage_to_add(self.path, peek, body)
            refusal = translate.misplaced(self.path, peek.spans) if self.form is None else None
            if refusal is None and self.form is None and (field := media.forbidden(body, self.plane.media)) is not None:
                refusal = media.refusal(field)
            if refusal is not None:
                raise refusal
        self.name = name
        served = self.plane.table.names.get(name)
        if served is None:
            raise openai.model_unknown(name, self.plane.table.visible(grant))
        if not grant.allows(served.allowed_as):
            self.served = served
            raise Refusal(
                "model_forbidden",
                f"This key may not use model {served.allowed_as}. GET /v1/models lists those it may.",
                param="model",
            )
        return served

    def prepare(self, served: Served, target: Target) -> None:
        """Leave the body as this endpoint gets it: under the name it knows, and asked for usage."""
        peek = self.peek
        if peek is None:
            return
        known_as = target.known_as or served.name
        self.translated = self.path in target.lacks
        if self.translated:
            assert self.translation is not None, "only such routes are noted as lacking"
            self.body = self.translation.request(self.raw_body, known_as, self.request_id)
            if target.attached is not None:
                self.body = target.attached.fitted(self.body, openai.peek(self.body), served.wanted, add_usage=False)
            return
        if target.attached is not None:
            self.body = target.attached.fitted(self.raw_body, peek, served.wanted, add_usage=self.add_usage)
            return
        if known_as == self.name and not self.add_usage:
            self.body = self.raw_body
            return
        model = None
        if known_as != self.name:
            model = known_as.encode() if self.form is not None else msgspec.json.encode(known_as)
        self.body = openai.rewrite(self.raw_body, peek, model=model, add_usage=self.add_usage)

    # --- while it waits ----------------------------------------------------------------------------------------------
    @property
    def wants_progress(self) -> bool:
        return self.peek is not None and self.peek.stream and self.headers.get(b"x-llmgw-progress") == b"sse"

    async def say_progress(self, stage: bytes) -> bool:
        """GW-35: how it stands, as a comment that every client of SSE skips. False: it was said a moment ago."""
        now = monotonic()
        if now < self._say_again_at:
            return False
        self._say_again_at = now + PROGRESS_S
        if not self.committed:
            self.committed = True
            headers: Headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"x-request-id", self.request_id.encode()),
                *answers.NO_BUFFER,
                *answers.cors(self.plane.cors, self.headers.get(b"origin")),
            ]
            await self.client.start(200, headers)
        self.sending, self.deadline = True, now + self.plane.bounds.idle_timeout_s
        await self.client.write(b": llmgw " + stage + b"\n\n")
        self.sending, self.deadline = False, None
        return True

    # --- ends --------------------------------------------------------------------------------------------------------
    async def refuse(self, refusal: Refusal) -> None:
        measures.ERRORS.of(refusal.code).value += 1
        self.record(refusal.kind.status, refusal.code, None)
        if self.answering:
            self.client.abort()
            return
        self.answering = True
        self.deadline = None
        body = openai.envelope(refusal)
        if self.path.startswith("/v1/messages"):
            body = translate.MESSAGES.error(body, refusal.kind.status)
        if self.committed:
            await self.client.end(b"event: error\ndata: " + body + b"\n\n")
            return
        headers = answers.error_headers(refusal, self.request_id)
        if self.account is not None:
            headers += self.account.headers(monotonic())
        headers += answers.cors(self.plane.cors, self.headers.get(b"origin"))
        if self.served is not None:
            headers.append((b"x-llmgw-queue-ms", b"%d" % self.queue_ms))
        length = self.headers.get(b"content-length", b"")
        unread = not self.body_read and (bool(length) or b"transfer-encoding" in self.headers)
        if not unread:
            await self.client.answer(refusal.kind.status, headers, body)
            return
        small = length.isdigit() and int(length) <= answers.SMALL_BYTES
        # A task of its own, since it uses a time limit of asyncio's.
        await asyncio.create_task(
            answers.refuse_unread(
                self.client, refusal, headers, body, small=small, waits_to_send=b"expect" in self.headers
            )
        )

    async def _stopped(self) -> None:
        """The server cancelled this request because it stops, or the watch did because the client is too slow."""
        if self.sending:
            self.record(499, "client_left", self._unanswered())
            self.client.abort()
        elif self._overdue:
            text = f"No byte of the body came for {BODY_SILENCE_S:g} s; send it again."
            await self.refuse(Refusal("body_too_slow", text))
        else:
            await self.refuse(openai.stopping())

    def _unanswered(self) -> Tokens | None:
        """An engine has worked on the prompt, if one got it, and nobody will say how much."""
        if self.target is None:
            return None
        return accounting.completed(None, prompt_bytes=len(self.body), events=0, answer_bytes=0, streamed=True)

    def record(self, status: int, code: str, tokens: Tokens | None, *, streamed: bool = False) -> None:
        """(8) Once; called before the last byte of an answer is sent."""
        if not self.recorded:
            self.recorded = True
            settling.settle(self, status, code, tokens or accounting.UNKNOWN, streamed)

    def say(self, level: int, text: str, *, trace: bool = False) -> None:
        token = logs.context.set({"request": self.request_id})
        log.log(level, text, exc_info=trace)
        logs.context.reset(token)


def _shown_key(token: bytes) -> str:
    text = token[:PREFIX_LENGTH].decode("latin-1")
    return f"Key {text}…" if text.startswith("sk-") and text.isascii() and text.isprintable() else "This key"


def _query_model(query: bytes) -> str:
    try:
        names = parse_qs(query.decode("latin-1"), max_num_fields=50).get("model", [])
    except ValueError:
        names = []
    if len(names) != 1:
        raise Refusal("body_invalid", "Say which model's engine this is for: add ?model=NAME.", param="model")
    return names[0]
