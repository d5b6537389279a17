"""What this machine is and how loaded it is, read from procfs and sysfs under a root that tests choose (AG-3)."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

from agent import files
from agent.discovery.sensors import read_sensors
from agent.protocol import Cpu, Disk, NodeLoad

_REAL = Path("/")


class Machine:
    """Reads one machine. `root` holds `proc`, `sys` and `etc`; `statvfs` answers for its disks."""

    def __init__(
        self, root: Path = _REAL, *, statvfs: Callable[[str], os.statvfs_result] = os.statvfs, work_dir: Path
    ) -> None:
        self._root = root
        self._statvfs = statvfs
        self._work_dir = work_dir
        self._cpu_before: tuple[int, int] | None = None

    def hostname(self) -> str:
        return (self._text("proc/sys/kernel/hostname") or socket.gethostname()).strip()

    def os_name(self) -> str | None:
        for line in (self._text("etc/os-release") or "").splitlines():
            name, _, value = line.partition("=")
            if name == "PRETTY_NAME":
                return value.strip().strip("\"'") or None
        return None

    def kernel(self) -> str | None:
        return (self._text("proc/sys/kernel/osrelease") or "").strip() or None

    def architecture(self) -> str:
        return platform.machine()

    def cpu(self) -> Cpu:
        model: str | None = None
        cores = 0
        for line in (self._text("proc/cpuinfo") or "").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "processor":
                cores += 1
            elif name.strip().lower() in ("model name", "cpu model") and not model:
                model = value.strip() or None
        if self._root == _REAL:
            cores = min(cores or len(os.sched_getaffinity(0)), len(os.sched_getaffinity(0)))
        return Cpu(model=model, cores=cores or None, numa_nodes=self._numa_nodes())

    def memory_bytes(self) -> int | None:
        return self._meminfo().get("MemTotal")

    def disks(self) -> tuple[Disk, ...]:
        """The disk of the work directory first, then every other block device that is mounted, once each."""
        seen: set[str] = set()
        found = [self._disk(str(self._work_dir))]
        for line in (self._text("proc/self/mounts") or self._text("proc/mounts") or "").splitlines():
            fields = line.split()
            # Only local block devices: asking a dead network file system for its size can hang for ever.
            if len(fields) < 3 or not fields[0].startswith("/dev/") or fields[0] in seen or fields[2] == "squashfs":
                continue
            seen.add(fields[0])
            found.append(self._disk(fields[1].encode().decode("unicode_escape")))
        return tuple(found)

    def machine_id(self) -> str:
        """Stable for this installation, also when work_dir moves; another one where a copy of work_dir runs elsewhere.

        It is not the system's own id, which is not for other machines to know.
        """
        path = self._work_dir / "machine-id"
        if not path.exists():
            files.write_private(path, secrets.token_hex(16).encode())
        own = path.read_text().strip()
        system = (self._text("etc/machine-id") or "").strip()
        return hashlib.sha256(f"llmgw agent {system} {own}".encode()).hexdigest()[:32] if system else own

    def load(self) -> NodeLoad:
        """CPU is measured since the last call, so the first one does not know it."""
        average = (self._text("proc/loadavg") or "").split()
        memory = self._meminfo()
        total, available = memory.get("MemTotal"), memory.get("MemAvailable")
        return NodeLoad(
            load_1m=_float(average[0]) if average else None,
            cpu_percent=self._cpu_percent(),
            memory_used_bytes=total - available if total is not None and available is not None else None,
            disk_free_bytes=self._disk(str(self._work_dir)).free_bytes,
            sensors=read_sensors(self._root / "sys/class/hwmon"),
        )

    def _cpu_percent(self) -> float | None:
        first = (self._text("proc/stat") or "").split("\n", 1)[0].split()
        if len(first) < 5 or first[0] != "cpu":
            return None
        ticks = [int(word) for word in first[1:9] if word.isdigit()]
        total, idle = sum(ticks), sum(ticks[3:5])
        before, self._cpu_before = self._cpu_before, (total, idle)
        if before is None or total <= before[0]:
            return None
        return round(100 * (1 - (idle - before[1]) / (total - before[0])), 1)

    def _numa_nodes(self) -> int | None:
        try:
            names = os.listdir(self._root / "sys/devices/system/node")
        except OSError:
            return None
        return sum(name.startswith("node") and name[4:].isdigit() for name in names) or None

    def _meminfo(self) -> dict[str, int]:
        found = {}
        for line in (self._text("proc/meminfo") or "").splitlines():
            name, _, value = line.partition(":")
            words = value.split()
            if words and words[0].isdigit():
                found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
        return found

    def _disk(self, path: str) -> Disk:
        asked = path
        while not os.path.exists(asked) and asked != os.path.dirname(asked):
            asked = os.path.dirname(asked)
        try:
            found = self._statvfs(asked)
        except OSError:
            return Disk(path=path)
        size = found.f_frsize
        return Disk(path=path, total_bytes=found.f_blocks * size, free_bytes=found.f_bavail * size)

    def _text(self, path: str) -> str | None:
        try:
            return (self._root / path).read_text(errors="replace")
        except OSError:
            return None


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
