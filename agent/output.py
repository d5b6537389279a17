"""An engine's output on disk: written by the engine itself, bounded, with its last lines for whoever asks (AG-21)."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from agent import files
from agent.protocol import TAIL_BYTES

log = logging.getLogger(__name__)

MAX_BYTES = 8 * 1024 * 1024


def begin(path: Path) -> None:
    """Keep one earlier run's output beside the new file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists():
        path.replace(previous(path))


def previous(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def bound(path: Path, max_bytes: int = MAX_BYTES) -> bool:
    """Copy and cut a file that has grown past `max_bytes`: the engine goes on writing to the same one.

    On a full disk it is cut without a copy, as it may be what fills it.
    """
    try:
        if path.stat().st_size <= max_bytes:
            return False
        try:
            shutil.copyfile(path, previous(path))
        except OSError:
            previous(path).unlink(missing_ok=True)
        with path.open("r+b") as file:
            file.truncate(0)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            log.warning("%s", files.sentence(error, f"The output {path} cannot be cut"))
        return False
    return True


def tail(path: Path, max_bytes: int = TAIL_BYTES, *, secret: str | None = None) -> str:
    """The last whole lines, at most `max_bytes` of UTF-8; says so when there is no file or nothing in it."""
    text = b""
    for part in (path, previous(path)):
        if len(text) >= max_bytes or not part.exists():
            continue
        with part.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - max_bytes))
            text = file.read(max_bytes) + text
        if part == path and text:
            break
    if not path.exists() and not text:
        return "The engine's output is not there: its file was removed, or an agent with another work_dir started it."
    if not text:
        return "The engine wrote nothing."
    cut = text[-max_bytes:]
    if len(text) >= max_bytes and b"\n" in cut[:-1]:
        cut = cut[cut.index(b"\n") + 1 :]
    words = cut.decode(errors="replace").encode()[-max_bytes:].decode(errors="ignore")
    return words.replace(secret, "…") if secret else words
