"""What an SQLite store allows: one control plane, with its file on a disk of this machine (ND-50)."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from llmgw.config import ConfigError, Settings

log = logging.getLogger(__name__)

PARTS = {"serve": "web", "web": "web", "worker": "worker", "beat": "beat", "agents": "listener"}
"""What of a control plane each role runs. Gateways are no part of it: of those there may be many."""
NETWORK = re.compile(r"nfs\d?|cifs|smb\d?|smbfs|ceph|lustre|beegfs|afs|fuse\.(sshfs|glusterfs|s3fs|rclone|davfs)")
MOUNTS = Path("/proc/self/mountinfo")


@contextlib.contextmanager
def claim(settings: Settings, role: str) -> Iterator[None]:
    """Be the only process of this role on the store while the block lasts; raises ConfigError when another is. With
    PostgreSQL any number may run."""
    part = PARTS.get(role)
    if settings.store.url or part is None:
        yield
        return
    if part == "web":
        warn_of_network(settings.data_dir)
    settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(settings.data_dir / f"{part}.lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(
                f"the store is an SQLite file in {settings.data_dir}, and a {part} runs on it already (pid "
                f"{file.read().strip() or '?'}). Stop that one; several control planes need PostgreSQL: set store.url."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def warn_of_network(data_dir: Path, mounts: Path = MOUNTS) -> None:
    """Say so when the file is where other hosts can reach it: SQLite's locks do not reach them."""
    with contextlib.suppress(OSError):
        kind = network_kind(mounts.read_text(errors="replace"), os.path.realpath(data_dir))
        if kind:
            log.warning(
                "%s is on a network file system (%s), where an SQLite store can be damaged. Name a directory on a local"
                " disk as data_dir, or set store.url to a PostgreSQL database",
                data_dir,
                kind,
            )


def network_kind(mounts: str, path: str) -> str | None:
    """The file system that `path` is on when it is reached over a network; `mounts` as /proc/self/mountinfo has it."""
    found, longest = "", -1
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if len(fields := before.split()) < 5 or not after:
            continue
        mount = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), fields[4])
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= longest:  # of two at one place the later one is seen
            found, longest = after.split()[0], len(mount)
    return found if NETWORK.fullmatch(found) else None
