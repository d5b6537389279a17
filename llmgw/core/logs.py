"""The server's side of agent.logs: Django calls `configure` with the settings, and noisy libraries are kept quiet."""

from __future__ import annotations

import logging

from agent import logs
from agent.logs import context, redact

__all__ = ["configure", "context", "redact"]
CHATTY = (*logs.CHATTY, "celery", "daphne", "kombu", "uvicorn")


def configure(options: dict[str, str]) -> None:
    """`options` has `format` (console, json) and `level`."""
    logs.configure(options["format"], options["level"], chatty=CHATTY)
    # Uvicorn's access log would name every request; the gateway accounts for them itself.
    logging.getLogger("uvicorn.access").disabled = True
