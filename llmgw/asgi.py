"""The ASGI entry: `/v1/` goes to the data plane, the agents' stream to Channels, everything else to Django."""

from __future__ import annotations

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "llmgw.settings")

import django

django.setup(set_prefix=False)

from asgiref.typing import ASGIReceiveCallable, ASGISendCallable, Scope
from channels.routing import URLRouter
from django.core.asgi import get_asgi_application
from django.urls import path

from agent import protocol
from nodes.consumers import AgentStream
from routing.asgi import Gateway

ROLES = frozenset(os.environ.get("LLMGW_ROLES", "gateway,web").split(","))
"""What this process serves: `gateway`, `web` or both."""

django_app = get_asgi_application()
streams = URLRouter([path(protocol.PATH.lstrip("/"), AgentStream.as_asgi())])
gateway = Gateway()


async def application(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
    kind = scope["type"]
    if kind == "http":
        if gateway.serves(scope["path"]):
            await gateway(scope, receive, send)
        else:
            await django_app(scope, receive, send)
    elif kind == "websocket":
        await streams(scope, receive, send)
    elif kind == "lifespan":
        await gateway.lifespan(scope, receive, send)
