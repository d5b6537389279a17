"""Run one of the control plane's processes: uvicorn for gateway and web, Celery for worker and beat."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import ssl
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from llmgw.ops import sqlite_store

if TYPE_CHECKING:
    from llmgw.config import Settings

log = logging.getLogger(__name__)

STARTUP_FAILURE = 3
"""Uvicorn's exit code for it."""
ROLES = {
    "serve": "gateway,web",
    "gateway": "gateway",
    "web": "web",
    "agents": "agents",
    "worker": "",
    "beat": "",
}


def run(
    role: str, *, config: Path | None = None, host: str | None = None, port: int | None = None, processes: int = 1
) -> int:
    """Run until told to stop; returns the exit code. Raises ConfigError before anything is started."""
    from llmgw.config import ConfigError, current

    if role not in ROLES:
        raise ConfigError(f"there is no role {role!r}. Known: {', '.join(ROLES)}.")
    listener = "LLMGW_AGENTS" if role == "agents" else "LLMGW_LISTEN"
    for name, value in (("LLMGW_CONFIG", config), (f"{listener}__HOST", host), (f"{listener}__PORT", port)):
        if value is not None:
            os.environ[name] = str(value)
    os.environ["DJANGO_SETTINGS_MODULE"] = "llmgw.settings"
    os.environ.setdefault("LLMGW_PROCESS", role)
    settings = current()
    with sqlite_store.claim(settings, role):
        if role in ("worker", "beat"):
            return _celery(role, settings)
        os.environ["LLMGW_ROLES"] = ROLES[role]
        if role == "agents":
            return _agents(settings)
        if "web" in ROLES[role] and (warning := exposed_to(settings)):
            print(f"llmgw: {warning}", file=sys.stderr)
        check_port(settings.listen.host, settings.listen.port)
        return _uvicorn(settings.listen.host, settings.listen.port, processes)


def check_port(host: str, port: int) -> None:
    """Raises ConfigError when nothing can listen there, saying why."""
    from llmgw.config import ConfigError

    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(cannot_listen(host, port, error)) from None


def cannot_listen(host: str, port: int, error: OSError) -> str:
    """The whole sentence with the next step."""
    if error.errno == errno.EADDRINUSE:
        return f"{host}:{port} is taken by another program. Choose another: --port {min(port + 1, 65535)}."
    if error.errno == errno.EACCES:
        return f"port {port} is for root alone. Choose one from 1024 on: --port 8080."
    return f"{host} is no address to listen on: {error.strerror}. Name one of this machine: --host 127.0.0.1."


def _uvicorn(host: str, port: int, processes: int) -> int:
    import uvicorn
    from uvicorn.supervisors import Multiprocess

    from agent import protocol

    config = uvicorn.Config(
        "llmgw.asgi:application",
        host=host,
        port=port,
        workers=processes,
        loop="uvloop",
        http="routing.edge:GatewayProtocol",
        ws="websockets-sansio",
        ws_max_size=protocol.MAX_MESSAGE_BYTES,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=4096,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=10,
        callback_notify=Once(where(os.environ["LLMGW_ROLES"], host, port)),
    )
    if processes > 1:
        Multiprocess(config, sockets=[config.bind_socket()]).run()
        return 0
    config.load_app()
    server = uvicorn.Server(config)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    return 0 if server.started else STARTUP_FAILURE


class Once:
    """Uvicorn calls it as soon as it accepts connections, in each process, and every half minute from then on."""

    def __init__(self, text: str) -> None:
        self.text, self.said = text, False

    async def __call__(self) -> None:
        if not self.said:
            log.info("%s", self.text)
        self.said = True


def where(roles: str, host: str, port: int) -> str:
    """What a process with these roles serves there, for its log."""
    at = f"{'https' if roles == 'agents' else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
    what = {
        "gateway,web": f"pages at {at}/ and the OpenAI API at {at}/v1",
        "gateway": f"the OpenAI API at {at}/v1",
        "web": f"pages, API and agents at {at}/",
        "agents": f"agents with certificates at {at}",
    }
    return f"Serves {what[roles]}"


def exposed_to(settings: Settings) -> str:
    """Who else hears agents' join tokens; empty when nobody should."""
    from nodes.exposure import exposed

    return exposed(settings.listen.host, settings.listen.port, join_tokens=settings.agents.join_tokens)


def queue(settings: Settings) -> str:
    """Where jobs wait, without what is secret of it."""
    if not settings.redis.url:
        return str(settings.data_dir / "queue")
    parts = urlsplit(settings.redis.url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _agents(settings: Settings) -> int:
    """The listener that demands certificates. Raises ConfigError while there is none of its own to show."""
    import uvicorn

    from agent import protocol
    from llmgw.config import ConfigError
    from llmgw.ops import listener, pki

    host, port = settings.agents.host, settings.agents.port
    if port is None:
        raise ConfigError("agents.port is not set, so nothing listens for agents. Set it, or name one: --port 8444.")
    directory = settings.authority_dir
    if pki.make_server_ready(directory):
        print("llmgw: the listener's certificate was renewed.", file=sys.stderr)
    check_port(host, port)
    config = uvicorn.Config(
        "llmgw.agents_asgi:application",
        host=host,
        port=port,
        loop="uvloop",
        http="httptools",
        ws="nodes.certified:CertifiedStream",
        ws_max_size=protocol.MAX_MESSAGE_BYTES,
        ssl_certfile=directory / pki.SERVER_CERT,
        ssl_keyfile=directory / pki.SERVER_KEY,
        ssl_ca_certs=str(directory / pki.CA_CERT),
        ssl_cert_reqs=ssl.CERT_REQUIRED,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=4096,
        timeout_graceful_shutdown=10,
        callback_notify=Once(where("agents", host, port)),
    )
    config.load()
    assert config.ssl is not None
    config.ssl.minimum_version = ssl.TLSVersion.TLSv1_3
    listener.Server(config, listener.Shown(directory, config.ssl)).run()
    return 0


def _celery(role: str, settings: Settings) -> int:
    from llmgw.celery import app
    from llmgw.ops import beat, worker

    if role == "beat":
        return beat.run(app)
    if os.environ.get("LLMGW_WORKER_BEAT") == "1":
        beat.beside_worker(app)
    worker.run(app, queue(settings))
    return 0
