"""The ASGI entry: `/v1/` goes to the data plane, the agents' stream to Channels, everything else to Django."""

from __future__ import annotations

import gc
import os
import warnings
from typing import Any

# Loading makes a hundred thousand objects that all stay: nothing to collect meanwhile, nor to look through ever after.
gc.disable()
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "llmgw.settings")
# Static files are small, and whitenoise hands them over as synchronous iterators.
warnings.filterwarnings("ignore", message="StreamingHttpResponse must consume synchronous iterators")

import django

django.setup(set_prefix=False)

from asgiref.typing import ASGIReceiveCallable, ASGISendCallable, Scope
from django.core.asgi import get_asgi_application

from agent import protocol
from llmgw.core.bodies import BoundedBodies
from nodes.consumers import AgentStream
from routing.asgi import Gateway

django_app: Any = BoundedBodies(get_asgi_application())
agent_stream: Any = AgentStream.as_asgi()
gateway = Gateway()
gc.freeze()
gc.set_threshold(20_000, 20, 100)  # what a request makes is gone by then, without having been looked through
gc.enable()


async def application(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
    if scope["type"] == "http":
        if gateway.serves(scope["path"]):
            await gateway(scope, receive, send)
        else:
            await django_app(scope, receive, send)
    elif scope["type"] == "websocket":
        if scope["path"] == protocol.PATH:
            await agent_stream(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000, "reason": None})  # before any accept: answers 403
    else:
        await gateway.lifespan(scope, receive, send)
