"""The way to an endpoint outside: its name resolved, every address checked, and one of the checked ones connected to.

No name is resolved between the check and the connection, so a name cannot mean one thing for each.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from llmgw.core.addresses import Address, refused
from routing.failures import ConnectFailed, UpstreamError

LIMIT_S = 10.0
"""For everything up to the first byte that can be sent; requests usually wait for less."""
ONE_ADDRESS_S = 1.0
"""For each address of a name but the last."""
ADDRESSES = 8
KEPT_S = 5.0
"""How long a name means what it meant."""
Found = tuple[socket.AddressFamily, socket.SocketKind, int, Any]


class Unusable(UpstreamError):
    """The gateway itself may or can not send there. It says nothing of the endpoint's health."""

    counts = False


@lru_cache(maxsize=8)
def trust(ca_file: str | None) -> ssl.SSLContext:
    """The system's authorities, and those in `ca_file`. Reads files: for a thread."""
    context = ssl.create_default_context()
    if ca_file is not None:
        context.load_verify_locations(ca_file)
    context.set_alpn_protocols(["http/1.1"])
    return context


class Line:
    """One endpoint's. `private` None: an operator named it, so no address is refused; else whether inside ones pass."""

    def __init__(
        self,
        address: Address,
        *,
        private: bool | None,
        ca_file: str | None,
        resolve: Callable[..., list[Any]] = socket.getaddrinfo,
    ) -> None:
        self.address, self._private, self._ca_file, self._resolve = address, private, ca_file, resolve
        self._context: ssl.SSLContext | None = None
        self._asking: asyncio.Future[tuple[Found, ...]] | None = None
        self._kept_until = 0.0

    async def connect(self, protocol: asyncio.BaseProtocol) -> None:
        """Until `protocol` is connected, encrypted where it should be. Raises Unusable or ConnectFailed."""
        try:
            async with asyncio.timeout(LIMIT_S):
                if self.address.tls and self._context is None:
                    self._context = await self._trust()
                connected = await self._connected(await self._found())
                await asyncio.get_running_loop().create_connection(
                    lambda: protocol,
                    sock=connected,
                    ssl=self._context,
                    server_hostname=self.address.host.rstrip(".") if self._context is not None else None,
                )
        except TimeoutError:
            raise ConnectFailed(f"no connection within {LIMIT_S:g} s") from None
        except ssl.SSLCertVerificationError as error:
            raise ConnectFailed(f"its certificate is not trusted ({error.verify_message})") from None
        except ssl.SSLError as error:
            raise ConnectFailed(f"it does not speak TLS as it should ({error.reason})") from None
        except OSError as error:
            known = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror
            raise ConnectFailed(known or str(error)) from None

    async def _trust(self) -> ssl.SSLContext:
        try:
            return await asyncio.to_thread(trust, self._ca_file)
        except OSError:
            raise Unusable("the certificates of gateway.external_ca_file cannot be read") from None

    # --- its name ----------------------------------------------------------------------------------------------------
    async def _found(self) -> tuple[Found, ...]:
        """One question at a time, whoever waits for it: a resolver that hangs holds one thread."""
        loop = asyncio.get_running_loop()
        asked = self._asking
        if asked is None or (asked.done() and (asked.exception() is not None or loop.time() > self._kept_until)):
            asked = self._asking = self._ask(loop)
        return await asyncio.shield(asked)

    def _ask(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[tuple[Found, ...]]:
        answer: asyncio.Future[tuple[Found, ...]] = loop.create_future()
        answer.add_done_callback(lambda done: done.exception())  # nobody may be waiting any more

        def keep(found: tuple[Found, ...]) -> None:
            self._kept_until = loop.time() + KEPT_S
            answer.set_result(found)

        def ask() -> None:
            try:
                tell: Callable[[], None] = partial(keep, self._look_up())
            except (UpstreamError, OSError) as error:
                tell = partial(answer.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the gateway has stopped meanwhile
                loop.call_soon_threadsafe(tell)

        threading.Thread(target=ask, name="resolve", daemon=True).start()  # one that hangs holds up no stop
        return answer

    def _look_up(self) -> tuple[Found, ...]:
        """Every address of the name, when none of them is refused. Blocks."""
        try:
            answers = self._resolve(self.address.host, self.address.port, type=socket.SOCK_STREAM)
        except UnicodeError:
            raise ConnectFailed("its host's name is none") from None
        if self._private is not None:
            for *_, place in answers:
                word = refused(str(place[0]), private=self._private)
                if word is not None:
                    hint = "" if refused(str(place[0]), private=True) else " while gateway.external_private is off"
                    raise Unusable(f"its host has {word} address, which nothing is sent to{hint}")
        return tuple((family, kind, number, place) for family, kind, number, _, place in answers[:ADDRESSES])

    # --- its socket --------------------------------------------------------------------------------------------------
    async def _connected(self, found: tuple[Found, ...]) -> socket.socket:
        loop = asyncio.get_running_loop()
        failure = OSError("its name has no address")
        for left, (family, kind, number, place) in zip(range(len(found) - 1, -1, -1), found, strict=True):
            attempt = socket.socket(family, kind, number)
            attempt.setblocking(False)
            try:
                async with asyncio.timeout(ONE_ADDRESS_S if left else None):
                    await loop.sock_connect(attempt, place)
            except OSError as error:
                attempt.close()
                failure = error
            except BaseException:
                attempt.close()
                raise
            else:
                return attempt
        raise failure
