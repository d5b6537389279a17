"""The node's join token in its file: read, and looked at whether anybody else can."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class TokenError(Exception):
    """`str()` is the whole sentence but for its full stop."""


def read(path: Path, *, node: str) -> tuple[str, str]:
    """The token, and a warning when others can read it too, else "". Raises TokenError."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            raw = file.read(4096).strip()
    except OSError as error:
        raise TokenError(f"token_file {path} cannot be read: {error.strerror}. {_next(node)}") from None
    if not raw.isascii() or not raw.decode("ascii", "replace").isprintable() or not raw or b" " in raw:
        raise TokenError(f"token_file {path} does not hold one join token. {_next(node)}")
    return raw.decode(), exposed(path, mode)


def exposed(path: Path, mode: int) -> str:
    """What to do about a token file of this mode; empty when only its owner can read it."""
    return f"{path} can be read by others. Run: chmod 600 {path}" if mode & 0o077 else ""


def _next(node: str) -> str:
    return f"Make a token on the control plane with `llmgw ctl node-token {node}`, and put it into this file"
