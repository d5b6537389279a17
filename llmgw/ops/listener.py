"""What the listener for agents shows of itself: the certificate on its disk, renewed in time, without a restart."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from pathlib import Path

import uvicorn

from llmgw.config import ConfigError
from llmgw.ops import pki

log = logging.getLogger(__name__)

LOOK_S = 60.0


class Shown:
    """The pair of files and the live TLS context that they were loaded into. Looks on the loop that accepts, which is
    when nobody else reads that context."""

    def __init__(self, directory: Path, context: ssl.SSLContext) -> None:
        self._directory = directory
        self._context = context
        self._loaded = self._stamp()
        self._fault = ""

    def look(self) -> bool:
        """Renew what ends soon, and show new connections what is there now. Whether that is another than before."""
        try:
            if pki.renew_server(self._directory):
                log.info("The listener's certificate ended soon, and another was made with the same names")
            if (stamp := self._stamp()) == self._loaded:
                return False
            pki.check_server_files(self._directory)  # a pair that is not whole would spoil the context
            self._context.load_cert_chain(self._directory / pki.SERVER_CERT, self._directory / pki.SERVER_KEY)
        except (ConfigError, OSError) as error:
            if str(error) != self._fault:
                log.error("The listener goes on with the certificate that it has: %s", error)
            self._fault = str(error)
            return False
        self._loaded, self._fault = stamp, ""
        log.info("New connections are shown the listener's new certificate; it holds until %s", self._until())
        return True

    def _stamp(self) -> tuple[int, ...]:
        return tuple((self._directory / name).stat().st_mtime_ns for name in (pki.SERVER_CERT, pki.SERVER_KEY))

    def _until(self) -> str:
        return f"{pki.server_ends_at(self._directory):%Y-%m-%d}"


class Server(uvicorn.Server):
    """Uvicorn's, with that look once a minute."""

    def __init__(self, config: uvicorn.Config, shown: Shown) -> None:
        super().__init__(config)
        self._shown = shown
        self._watching: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._watching = asyncio.create_task(self._watch())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._watching:
            self._watching.cancel()
        await super().shutdown(sockets)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._shown.look()
