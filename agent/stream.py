"""One connection to one control plane: register, then heartbeats and statuses up and commands down (ND-1..3)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any, Protocol

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosed,
    ConnectionClosedError,
    ConnectionClosedOK,
    InvalidMessage,
    InvalidStatus,
    WebSocketException,
)
from websockets.frames import CloseCode

from agent import protocol, tls
from agent.config import stream_url
from agent.credentials import Credentials, Unusable
from agent.protocol import (
    Ack,
    Certificate,
    CertificateRequest,
    Command,
    Heartbeat,
    Inventory,
    NotRenewed,
    Refused,
    Register,
    ShardStatus,
    Up,
    Welcome,
)

log = logging.getLogger(__name__)

OUTBOX = 512
OPEN_S = 10.0
WELCOME_S = 30.0
CLOSE_S = 1.0
QUIET_S = 5.0
"""An answer to a ping that takes longer makes a stream silent: the control plane is busy, or stands still."""
SILENT_S = 45.0
"""One that is only busy answers by then; a network that swallows packets closes nothing, so that nothing else would
tell."""
MAX_RETRY_AFTER_S = 600.0
RENEW_FIRST_S = 60.0
RENEW_AGAIN_S = 6 * 3600.0
"""At most how long after its welcome, and how often from then on, a stream looks whether its certificate ends. Not all
of a fleet's at once."""
_uniform: Callable[[float, float], float] = random.uniform
AWAY = (502, 503, 504)
"""What a proxy answers for a control plane that it cannot reach: no refusal of anybody's."""


class Node(Protocol):
    """What a stream speaks for."""

    async def register(self, address: str) -> Register: ...

    async def heartbeat(self, told: Inventory) -> Heartbeat:
        """`told`: what this stream has last told of the machine."""
        ...

    def failures(self) -> tuple[ShardStatus, ...]: ...

    def answer(self, command: Command) -> Ack: ...


class Ended(Exception):
    """A stream ended. `str()` says why; `reached`: the other side ended it; `retry_after_s` is its wish."""

    def __init__(self, reason: str, *, reached: bool = True, clean: bool = False, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.reached = reached
        self.clean = clean
        self.retry_after_s = min(max(0.0, retry_after_s), MAX_RETRY_AFTER_S)


class Stream:
    """Opens when `run`. It calls `changed` whenever it is welcomed, falls silent, answers again, or has ended."""

    def __init__(
        self, address: str, node: Node, credentials: Credentials, *, ping_s: float, changed: Callable[[], None]
    ) -> None:
        self.address = address
        self.began = monotonic()
        self.welcomed_at: float | None = None
        self.silent = False
        self.ended: Ended | None = None
        self.task: asyncio.Task[None] | None = None
        self._node, self._credentials, self._ping_s, self._changed = node, credentials, ping_s, changed
        self._outbox: asyncio.Queue[Up] | None = None
        self._socket: ClientConnection | None = None
        self._farewell = "the agent stops"

    def put(self, message: Up) -> None:
        """Send it when its turn comes; without a stream it is not kept."""
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

    async def sent(self) -> None:
        """Wait until all that was put is sent."""
        if self._outbox is not None:
            await self._outbox.join()

    def leave(self, farewell: str) -> None:
        self._farewell = farewell
        if self.task is not None:
            self.task.cancel()

    async def run(self) -> None:
        """From opening to the end, which `ended` then tells."""
        try:
            await self._open()
        except Ended as ended:
            self.ended = ended
            if ended.reached and self.welcomed_at is None:
                self._credentials.turned_away()
        except Exception as error:  # the agent's boundary: nothing may end the reconnecting
            log.exception("The stream to %s failed", self.address)
            self.ended = Ended(f"{type(error).__name__}: {error}")
        finally:
            self._changed()

    async def _open(self) -> None:
        """Always ends by raising."""
        url = stream_url(self.address)
        try:
            opening = connect(
                url,
                additional_headers=self._credentials.headers(),
                ssl=self._credentials.tls() if url.startswith("wss:") else None,
                open_timeout=OPEN_S,
                close_timeout=CLOSE_S,
                ping_interval=None,  # `_ping` does it
                max_size=protocol.MAX_MESSAGE_BYTES,
                compression=None,
                proxy=None,
            )
            async with opening as socket:
                await self._speak(socket)
        except Unusable as error:
            raise Ended(str(error)) from None
        except InvalidStatus as error:
            reached = error.response.status_code not in AWAY
            raise Ended(_refusal(error), reached=reached, retry_after_s=_retry_after_s(error)) from None
        except ConnectionClosedOK as closed:
            raise Ended(f"closed by the other side ({_why(closed)})", clean=True) from None
        except ConnectionClosedError as closed:
            raise Ended(f"broken ({_why(closed)})", reached=closed.rcvd is not None) from None
        except TimeoutError:
            raise Ended("no answer in time", reached=False) from None
        except ssl.SSLError as error:
            raise Ended(tls.why(error)) from None
        except OSError as error:
            raise Ended(f"cannot connect: {error.strerror or error}", reached=False) from None
        except WebSocketException as error:
            # With TLS 1.3 a client hears after the handshake that its certificate is not taken, if it hears it at all.
            silent = isinstance(error, InvalidMessage) and url.startswith("wss:")
            raise Ended(tls.REFUSED if silent else f"not an llmgw control plane: {error}") from None

    async def _speak(self, socket: ClientConnection) -> None:
        outbox: asyncio.Queue[Up] = asyncio.Queue(OUTBOX)
        # Before the register is made, so that no transition falls between it and the outbox.
        self._outbox, self._socket = outbox, socket
        try:
            register = await self._node.register(self._credentials.address or str(socket.local_address[0]))
            await socket.send(protocol.encode(register), text=True)
            welcome = await self._welcome(socket)
            self.welcomed_at = monotonic()
            self._changed()
            log.info("Registered as %s with %s", welcome.node, self.address)
            for failure in self._node.failures():
                self.put(failure)
            await _until_one_ends(
                self._write(socket, outbox),
                self._beat(welcome.heartbeat_s, register.inventory),
                self._read(socket),
                self._ping(socket),
                *((self._renew(),) if welcome.renews else ()),
            )
        except asyncio.CancelledError:
            await socket.close(CloseCode.GOING_AWAY, self._farewell)
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
                        raise Ended(f"refused: {reason}", retry_after_s=retry_after_s or 0.0)
                    case Command() as command:
                        self.put(self._node.answer(command))

    async def _read(self, socket: ClientConnection) -> None:
        while True:
            match self._decode(await socket.recv()):
                case Command() as command:
                    self.put(self._node.answer(command))
                case Refused(reason=reason, retry_after_s=retry_after_s):
                    raise Ended(f"refused: {reason}", retry_after_s=retry_after_s or 0.0)
                case Certificate(certificate=certificate):
                    if await asyncio.to_thread(self._credentials.keep_certificate, certificate):
                        raise Ended("it goes on with the renewed certificate", clean=True)
                case NotRenewed(reason=reason):
                    log.warning("The certificate is not renewed: %s", reason)

    async def _renew(self) -> None:
        """Ask for another certificate when it is time, and again at length when none came."""
        limit_s = RENEW_FIRST_S
        while True:
            await asyncio.sleep(_uniform(0.5, 1.0) * limit_s)
            limit_s = RENEW_AGAIN_S
            request = await asyncio.to_thread(self._credentials.certificate_request)
            if request is not None:
                self.put(CertificateRequest(request=request))

    async def _write(self, socket: ClientConnection, outbox: asyncio.Queue[Up]) -> None:
        while True:
            await socket.send(protocol.encode(await outbox.get()), text=True)
            outbox.task_done()

    async def _beat(self, period_s: float, told: Inventory) -> None:
        while True:
            heartbeat = await self._node.heartbeat(told)
            told = heartbeat.inventory or told
            self.put(heartbeat)
            await asyncio.sleep(max(0.1, period_s))

    async def _ping(self, socket: ClientConnection) -> None:
        """Ask again and again whether anybody is there."""
        while True:
            await asyncio.sleep(self._ping_s)
            # By waiting and looking, not by a timeout: an agent that itself stood still finds the answer and the end of
            # its patience in the same moment.
            pong = asyncio.create_task(_pong(socket))
            try:
                await asyncio.wait((pong,), timeout=QUIET_S)
                if pong.done():
                    continue
                self.silent = True
                self._changed()
                await asyncio.wait((pong,), timeout=SILENT_S - QUIET_S)
                if not pong.done():
                    raise Ended(f"no answer to a ping for {SILENT_S:g} s", reached=False)
                self.silent = False
                self._changed()
            finally:
                pong.cancel()

    def _decode(self, raw: str | bytes) -> protocol.Down | None:
        """None for what this version does not understand; a command among that is answered so."""
        try:
            return protocol.decode_down(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            log.warning("A message of the control plane is not understood: %s", error)
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            number = msgspec.json.decode(raw, type=_Numbered).id
            self.put(Ack(id=number, ok=False, error="this agent does not know this command; upgrade it."))
        return None


class _Numbered(msgspec.Struct):
    id: int


async def _pong(socket: ClientConnection) -> None:
    """A ping and its answer. The ping itself waits while the other side takes nothing."""
    with contextlib.suppress(ConnectionClosed):  # which whoever reads says
        await (await socket.ping())


async def _until_one_ends(*work: Coroutine[Any, Any, None]) -> None:
    """Raises why: a reason of ours before the closing that it led to.

    Not a TaskGroup: with early versions of Python 3.11 its task may count as cancelled from then on, and no timeout
    works in it any more.
    """
    tasks = [asyncio.create_task(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    reasons = [each for each in ended if isinstance(each, Exception)]
    raise next((each for each in reasons if isinstance(each, Ended)), reasons[0])


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
