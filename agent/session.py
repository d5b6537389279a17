"""The stream to the control plane: register, heartbeats, statuses up, commands down, for ever (ND-1..3, ND-5)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
from collections.abc import Callable
from time import monotonic
from typing import Protocol

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosedError,
    ConnectionClosedOK,
    InvalidMessage,
    InvalidStatus,
    WebSocketException,
)
from websockets.frames import CloseCode

from agent import join_token, protocol, tls
from agent.backoff import Backoff
from agent.config import AgentSettings, stream_url
from agent.protocol import Ack, Command, Heartbeat, Refused, Register, ShardStatus, Up, Welcome

log = logging.getLogger(__name__)

HEALTHY_S = 60.0
"""How long a stream must hold before earlier failures are forgiven."""
OUTBOX = 512
OPEN_S = 10.0
WELCOME_S = 30.0
CLOSE_S = 1.0
PING_S = 20.0
SILENT_S = 45.0
"""How long a control plane may leave a ping unanswered. One that is only busy answers; a network that swallows packets
closes nothing, so that nothing else would tell."""
MAX_RETRY_AFTER_S = 600.0
AWAY = (502, 503, 504)
"""What a proxy answers for a control plane that it cannot reach: no refusal of anybody's."""


class Node(Protocol):
    """What the session speaks for."""

    async def register(self, address: str) -> Register: ...

    async def heartbeat(self) -> Heartbeat: ...

    def failures(self) -> tuple[ShardStatus, ...]: ...

    def answer(self, command: Command) -> Ack: ...


class _Ended(Exception):
    """A stream ended. `str()` says why; `reached`: the other side ended it; `retry_after_s` is its wish."""

    def __init__(self, reason: str, *, reached: bool = True, clean: bool = False, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.reached = reached
        self.clean = clean
        self.retry_after_s = min(max(0.0, retry_after_s), MAX_RETRY_AFTER_S)


class Session:
    def __init__(
        self,
        settings: AgentSettings,
        node: Node,
        *,
        uniform: Callable[[float, float], float] = random.uniform,
        base_s: float = 1.0,
        healthy_s: float = HEALTHY_S,
    ) -> None:
        self._settings = settings
        self._node = node
        self._backoff = Backoff(uniform, base_s=base_s)
        self._healthy_s = healthy_s
        self._outbox: asyncio.Queue[Up] | None = None
        self._socket: ClientConnection | None = None
        self._welcomed_at: float | None = None
        self._warned: dict[str, str] = {}

    def publish(self, status: ShardStatus) -> None:
        """Send a transition; without a stream it is not kept, because every register tells the whole truth anew."""
        self._put(status)

    async def flush(self, limit_s: float) -> None:
        """Wait until all that was put is sent, as far as it goes in this time."""
        if self._outbox is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._outbox.join()

    async def run(self) -> None:
        """Keep one stream open until cancelled."""
        turn = 0
        while True:
            address = self._settings.control_plane[turn % len(self._settings.control_plane)]
            turn += 1
            began, self._welcomed_at = monotonic(), None
            try:
                await self._stream(address)
                ended = _Ended("the stream ended")
            except _Ended as reason:
                ended = reason
            except Exception as error:  # the agent's boundary: nothing may end the reconnecting
                log.exception("The stream to %s failed", address)
                ended = _Ended(f"{type(error).__name__}: {error}")
            now = monotonic()
            stood_at = now if self._welcomed_at is None else self._welcomed_at
            if now - stood_at >= self._healthy_s:
                self._backoff.healthy()
                began = stood_at
            wait_s = self._backoff.wait_s(
                reached=ended.reached, tried_s=stood_at - began, at_least_s=ended.retry_after_s
            )
            log.log(
                logging.INFO if ended.clean else logging.WARNING,
                "No stream to %s: %s. Trying again in %.1f s",
                address,
                ended,
                wait_s,
            )
            await asyncio.sleep(wait_s)

    async def _stream(self, address: str) -> None:
        """One connection from opening to its end, which is always an _Ended."""
        url = stream_url(address)
        try:
            opening = connect(
                url,
                additional_headers=self._headers(),
                ssl=self._tls() if url.startswith("wss:") else None,
                open_timeout=OPEN_S,
                close_timeout=CLOSE_S,
                ping_interval=PING_S,
                ping_timeout=SILENT_S,
                max_size=protocol.MAX_MESSAGE_BYTES,
                compression=None,
                proxy=None,
            )
            async with opening as socket:
                await self._speak(socket, address)
        except InvalidStatus as error:
            reached = error.response.status_code not in AWAY
            raise _Ended(_refusal(error), reached=reached, retry_after_s=_retry_after_s(error)) from None
        except ConnectionClosedOK as closed:
            raise _Ended(f"closed by the other side ({_why(closed)})", clean=True) from None
        except ConnectionClosedError as closed:
            raise _Ended(f"broken ({_why(closed)})", reached=closed.rcvd is not None) from None
        except TimeoutError:
            raise _Ended("no answer in time", reached=False) from None
        except ssl.SSLError as error:
            raise _Ended(tls.why(error)) from None
        except OSError as error:
            raise _Ended(f"cannot connect: {error.strerror or error}", reached=False) from None
        except WebSocketException as error:
            # With TLS 1.3 a client hears after the handshake that its certificate is not taken, if it hears it at all.
            silent = isinstance(error, InvalidMessage) and url.startswith("wss:")
            raise _Ended(tls.REFUSED if silent else f"not an llmgw control plane: {error}") from None

    async def _speak(self, socket: ClientConnection, address: str) -> None:
        outbox: asyncio.Queue[Up] = asyncio.Queue(OUTBOX)
        # Before the register is made, so that no transition falls between it and the outbox.
        self._outbox, self._socket = outbox, socket
        try:
            here = self._settings.address or str(socket.local_address[0])
            await socket.send(protocol.encode(await self._node.register(here)), text=True)
            welcome = await self._welcome(socket)
            self._welcomed_at = monotonic()
            log.info("Registered as %s with %s", welcome.node, address)
            for failure in self._node.failures():
                self._put(failure)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(socket, outbox))
                tasks.create_task(self._beat(welcome.heartbeat_s))
                tasks.create_task(self._read(socket))
        except BaseExceptionGroup as group:
            raise _first(group) from None
        except asyncio.CancelledError:
            await socket.close(CloseCode.GOING_AWAY, "the agent stops")
            raise
        finally:
            self._outbox = self._socket = None

    async def _welcome(self, socket: ClientConnection) -> Welcome:
        async with asyncio.timeout(WELCOME_S):
            while True:
                match self._decode(await socket.recv()):
                    case Welcome() as welcome:
                        return welcome
                    case Refused(reason=reason, retry_after_s=retry_after_s):
                        raise _Ended(f"refused: {reason}", retry_after_s=retry_after_s or 0.0)
                    case Command() as command:
                        self._put(self._node.answer(command))

    async def _read(self, socket: ClientConnection) -> None:
        while True:
            match self._decode(await socket.recv()):
                case Command() as command:
                    self._put(self._node.answer(command))
                case Refused(reason=reason, retry_after_s=retry_after_s):
                    raise _Ended(f"refused: {reason}", retry_after_s=retry_after_s or 0.0)

    async def _write(self, socket: ClientConnection, outbox: asyncio.Queue[Up]) -> None:
        while True:
            await socket.send(protocol.encode(await outbox.get()), text=True)
            outbox.task_done()

    async def _beat(self, period_s: float) -> None:
        while True:
            self._put(await self._node.heartbeat())
            await asyncio.sleep(max(0.1, period_s))

    def _put(self, message: Up) -> None:
        if self._outbox is None:
            return
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            # The other side does not take what we say. Nobody waits for it: a new stream begins with a new register.
            log.warning("The control plane reads too slowly: %d messages wait. Cutting the stream", OUTBOX)
            self._outbox = None
            if self._socket is not None:
                self._socket.transport.abort()

    def _decode(self, raw: str | bytes) -> protocol.Down | None:
        """None for what this version does not understand; a command among that is answered so."""
        try:
            return protocol.decode_down(raw)
        except msgspec.DecodeError as error:
            log.warning("A message of the control plane is not understood: %s", error)
        try:
            number = msgspec.json.decode(raw, type=_Numbered).id
        except msgspec.DecodeError:
            return None
        self._put(Ack(id=number, ok=False, error="this agent does not know this command; upgrade it."))
        return None

    def _headers(self) -> dict[str, str]:
        path = self._settings.token_file
        if path is None:
            return {}
        try:
            token, warning = join_token.read(path, node=self._settings.node)
        except join_token.TokenError as error:
            raise _Ended(str(error)) from None
        self._warn("token_file", warning)
        return {"Authorization": f"Bearer {token}"}

    def _tls(self) -> ssl.SSLContext:
        try:
            context, warning = tls.context(self._settings)
        except tls.TlsError as error:
            raise _Ended(str(error)) from None
        self._warn("key_file", warning)
        return context

    def _warn(self, setting: str, text: str) -> None:
        """Once, until it is over."""
        if text and text != self._warned.get(setting):
            log.warning("%s %s", setting, text)
        self._warned[setting] = text


class _Numbered(msgspec.Struct):
    id: int


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    """Why a stream ended: a reason of ours before the closing that it led to."""
    found: list[Exception] = []
    pending: list[BaseException] = [group]
    while pending:
        one = pending.pop()
        if isinstance(one, BaseExceptionGroup):
            pending += one.exceptions
        elif isinstance(one, Exception):
            found.append(one)
    return next((one for one in found if isinstance(one, _Ended)), found[0])


def _why(closed: ConnectionClosedOK | ConnectionClosedError) -> str:
    frame = closed.rcvd or closed.sent
    if frame is None:
        return "the connection was cut"
    return f"{frame.code} {frame.reason}".strip()


def _refusal(error: InvalidStatus) -> str:
    status = error.response.status_code
    text = (error.response.body or b"")[:300].decode(errors="replace").strip().replace("\n", " ")
    hint = {
        401: "the join token is missing or wrong; make one with `llmgw ctl node-token NAME`; token_file names it",
        403: "this node may not join; look at its entry in the control plane",
        404: "nothing answers agents at this address; correct control_plane",
    }.get(status, "")
    return f"refused with {status}" + (f" ({text})" if text else "") + (f": {hint}" if hint else "")


def _retry_after_s(error: InvalidStatus) -> float:
    try:
        return float(error.response.headers.get("Retry-After", "0"))
    except ValueError:
        return 0.0
