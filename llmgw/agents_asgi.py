"""The ASGI entry of the listener that demands certificates: agents' streams, and nothing else."""

from __future__ import annotations

import os
from typing import Any

from asgiref.typing import ASGIReceiveCallable, ASGISendCallable, Scope

from agent import protocol

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "llmgw.settings")

import django

django.setup(set_prefix=False)

from django.conf import settings

from llmgw.core import doorbell
from llmgw.ops import pki
from nodes.consumers import AgentStream

agent_stream: Any = AgentStream.as_asgi(sign=pki.signer(settings.LLMGW.authority_dir))
NOTHING_ELSE = b"Agents' streams are all there is here.\n"


async def application(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
    if scope["type"] == "lifespan":
        await _lifespan(receive, send)
    elif scope["type"] == "http":
        headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(NOTHING_ELSE))]
        await send({"type": "http.response.start", "status": 404, "headers": headers, "trailers": False})
        await send({"type": "http.response.body", "body": NOTHING_ELSE, "more_body": False})
    elif scope["path"] == protocol.PATH:
        await agent_stream(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 1000, "reason": None})  # before any accept: answers 403


async def _lifespan(receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
    await receive()
    async with doorbell.relayed():
        await send({"type": "lifespan.startup.complete"})
        await receive()
    await send({"type": "lifespan.shutdown.complete"})
