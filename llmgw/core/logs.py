"""The server's side of agent.logs: Django calls `configure` with the settings, and noisy libraries are kept quiet."""

from __future__ import annotations

import logging
import re

from agent import logs
from agent.logs import context, redact

__all__ = ["configure", "context", "redact"]
CHATTY = (*logs.CHATTY, "celery", "daphne", "kombu", "uvicorn")


_LINK = re.compile(r"(/first-sign-in/)[^/\s]+")


class WithoutLinks(logging.Filter):
    """Cuts the code out of first sign-in links: Django names the path of every request that it refuses."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if "/first-sign-in/" in text:
            record.msg, record.args = _LINK.sub(r"\1…", text), ()
        return True


def _unsaid(record: logging.LogRecord) -> bool:
    """Who answers 503 has said why in a line; Django would say it again, with a traceback of a hundred."""
    return getattr(record, "status_code", None) != 503


def configure(options: dict[str, str]) -> None:
    """`options` has `format` (console, json) and `level`."""
    logs.configure(options["format"], options["level"], chatty=CHATTY)
    for lines in logging.getLogger().handlers:
        lines.addFilter(WithoutLinks())
    # Anybody can ask for what is not there, as often as they like: that is no news, and fills disks.
    logging.getLogger("django.request").setLevel(logging.ERROR)
    logging.getLogger("django.request").addFilter(_unsaid)
    logging.getLogger("django.security.DisallowedHost").setLevel(logging.CRITICAL)
    # Uvicorn's access log would name every request; the gateway accounts for them itself.
    logging.getLogger("uvicorn.access").disabled = True
