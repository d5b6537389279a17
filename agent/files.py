"""Small habits with files: whole or not at all, owner only, and errors as sentences."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

CHUNK_BYTES = 1024 * 1024
MAX_CONFIG_BYTES = 4 * 1024 * 1024
"""Of a model's or an adapter's settings."""


def write_private(path: Path, content: bytes) -> None:
    """Write `path` whole, readable by its owner only from the first byte on."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.writing.{os.getpid()}")
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def regular(path: Path) -> Path:
    """`path`, if it is a file: a pipe or a device would be waited for without end. Raises OSError."""
    if not path.is_file():
        path.stat()
        raise OSError(0, "it is no file")
    return path


def read_json(path: Path, limit_bytes: int) -> object:
    """Raises OSError, and ValueError for what is longer or no JSON."""
    with regular(path).open("rb") as file:
        text = file.read(limit_bytes + 1)
    if len(text) > limit_bytes:
        raise ValueError
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError from None


def remove(path: Path) -> None:
    """Remove a file or a whole directory; that it is not there is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def free_bytes(path: Path) -> int | None:
    """Free space where `path` is, or will be."""
    for place in (path, *path.parents):
        if place.exists():
            try:
                return shutil.disk_usage(place).free
            except OSError:
                return None
    return None


def sentence(error: OSError, what: str) -> str:
    """Why `what` did not work, with the next step where it is known."""
    if error.errno == errno.ENOSPC:
        return f"{what}: the disk is full. Free space, or move work_dir to a larger disk."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{what}: {error.filename or 'the place'} is not writable for this user. Change its owner, or work_dir."
    return f"{what}: {error.strerror or error}."
