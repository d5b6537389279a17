"""Logs: a short readable line for people or one JSON object a line, with ids from the context and secrets cut out.

Server and agent write alike; this stands on the agent's side because the server may import the agent's words.
"""

from __future__ import annotations

import contextvars
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterable
from typing import Any

SECRETS = re.compile(r"\b(sk|at|nt)-[A-Za-z0-9_-]{20,}|(?<=Bearer )\S+|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
PROCESS = os.environ.get("LLMGW_PROCESS", "llmgw")
"""Which part of the product writes, so that the parts of one `llmgw up` can be told apart."""
CHATTY = ("asyncio", "httpcore", "httpx", "websockets")
context: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("log_context", default={})  # noqa: B039
"""Ids (request, replica, node) that every line written meanwhile carries."""


# What could move a terminal's cursor or forge a line; line ends of tracebacks stay.
CONTROL = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "�")


def redact(text: str) -> str:
    """`text` with keys, tokens and URL credentials cut to what may be seen of them, and control characters replaced."""
    text = text.translate(CONTROL)
    return SECRETS.sub(lambda found: f"{found.group(0)[:7]}…" if found.group(1) else "…", text)


class ConsoleLine(logging.Formatter):
    """What is said stays on one line, also where it quotes more (databases' errors do); a traceback has its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        return " ".join(line.strip() for line in text.splitlines()) if "\n" in text else text

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        ids = "".join(f" {name}={value}" for name, value in context.get().items())
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return redact(f"{clock} {PROCESS:7} {level}{text}{ids}")


class JsonLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "process": PROCESS,
            "logger": record.name,
            "message": record.getMessage(),
            **context.get(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return redact(json.dumps(line, ensure_ascii=False, default=str))


def configure(form: str, level: str, *, chatty: Iterable[str] = CHATTY) -> None:
    """Set up the root logger. `form`: console or json; `chatty` loggers are heard from warnings on."""
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(JsonLine() if form == "json" else ConsoleLine("%(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [lines]
    root.setLevel(level.upper())
    for name in chatty:
        logging.getLogger(name).setLevel(logging.WARNING)
