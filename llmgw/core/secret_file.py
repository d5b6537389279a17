"""Random values kept in 0600 files, made on first use and never overwritten."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from agent.files import write_private


def read_or_make(path: Path) -> str:
    """The text in `path`, or 256 fresh random bits written there first. Safe when two processes start at once."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    if not path.exists():
        write(scratch, secrets.token_urlsafe(32))
        try:
            os.link(scratch, path)  # fails when somebody else was first
        except FileExistsError:
            pass
        finally:
            scratch.unlink()
    return path.read_text().strip()


def write(path: Path, text: str) -> None:
    """Write `text` to `path`, readable by its owner only from the first byte on."""
    write_private(path, text.encode())
