"""The agent's log: one line an event, for people or as JSON, without secrets."""

from __future__ import annotations

import json
import logging
import re
import sys
import time

_SECRETS = re.compile(r"(?<=Bearer )\S+|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)|\b(?:sk|at|nt)-[A-Za-z0-9_-]{20,}")


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return _SECRETS.sub("…", f"{clock} {level}{super().format(record)}")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _SECRETS.sub("…", json.dumps(line, ensure_ascii=False))


def configure(form: str, level: str) -> None:
    """Set up the root logger; `form` is console or json."""
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(_Json() if form == "json" else _Line("%(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [lines]
    root.setLevel(level.upper())
    for chatty in ("httpx", "httpcore", "asyncio", "websockets"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
