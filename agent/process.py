"""The edge to processes: start in a session of their own, know again, find all of them, end them (AG-20, AG-22).

Everything of a shard carries a mark in its environment, so a child that changed session and name is still found.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec

AGENT_MARK = "LLMGW_AGENT_MARK"
SHARD_MARK = "LLMGW_SHARD_MARK"
PROC = Path("/proc")
_TICKS_S = os.sysconf("SC_CLK_TCK")


class Stat(msgspec.Struct, frozen=True):
    """One line of /proc/PID/stat. `started`: clock ticks since boot; `cpu_s`: user and system time used."""

    pid: int
    parent: int
    group: int
    session: int
    state: str
    started: int
    cpu_s: float

    @property
    def dead(self) -> bool:
        return self.state in "ZXx"


class Identity(msgspec.Struct, frozen=True):
    """What tells a process from a later one with the same number."""

    pid: int
    started: int
    boot: str
    command: str


def stat(pid: int) -> Stat | None:
    try:
        text = (PROC / str(pid) / "stat").read_bytes().decode(errors="replace")
    except OSError:
        return None
    # The name stands in parentheses and may hold any character, parentheses included.
    fields = text[text.rfind(")") + 2 :].split()
    if len(fields) < 20:
        return None
    return Stat(
        pid=pid,
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_S,
        started=int(fields[19]),
    )


@cache
def _boot() -> str:
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _command(pid: int) -> str:
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    return words.replace(b"\0", b" ").decode(errors="replace").strip()


def _environment(pid: int) -> dict[str, str]:
    try:
        block = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in block.split(b"\0"))
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}


def identify(pid: int) -> Identity | None:
    """None when there is no such process, or it is dead and only waits to be reaped."""
    now = stat(pid)
    if now is None or now.dead:
        return None
    return Identity(pid=pid, started=now.started, boot=_boot(), command=_command(pid))


def alive(known: Identity, *, shard_mark: str | None = None) -> bool:
    """Whether `known` still runs and is that very process.

    A wrapper may have replaced its command meanwhile: then the shard's mark in its environment proves it.
    """
    now = identify(known.pid)
    if now is None or (now.started, now.boot) != (known.started, known.boot):
        return False
    if now.command == known.command:
        return True
    return shard_mark is not None and _environment(known.pid).get(SHARD_MARK) == shard_mark


def still_runs(known: Identity) -> bool:
    """The cheap look at a process that was proven to be `known` before."""
    now = stat(known.pid)
    return now is not None and not now.dead and now.started == known.started


def spawn(argv: Sequence[str], environment: Mapping[str, str], output: Path) -> int:
    """Start `argv` as leader of a new session, its output appended to `output`. Raises OSError."""
    path = argv[0] if os.sep in argv[0] else _which(argv[0], environment.get("PATH", os.defpath))
    appending = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        path,
        list(argv),
        dict(environment),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(output), appending, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT],
    )


def _which(name: str, path: str) -> str:
    for folder in path.split(os.pathsep):
        found = os.path.join(folder, name)
        if os.access(found, os.X_OK) and os.path.isfile(found):
            return found
    raise FileNotFoundError(f"{name} is not in PATH")


def reap(pid: int) -> int | None:
    """Collect a dead child; its exit status, negative for a signal. None: it lives, or is nobody's child of ours."""
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if done else None


def is_child(pid: int) -> bool:
    """Whether it is a child of this process that was not collected yet, alive or not."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def ending(code: int | None) -> str:
    """An exit status in words."""
    if code is None:
        return "ended (exit status unknown: an earlier agent had started it)"
    if code < 0:
        return f"killed by signal {-code}"
    return f"exited with status {code}"


def table() -> dict[int, Stat]:
    """Every process there is."""
    pids = (int(name) for name in os.listdir(PROC) if name.isdigit())
    return {pid: found for pid in pids if (found := stat(pid)) is not None}


def members(roots: Iterable[Identity], shard_mark: str) -> set[int]:
    """Live processes of a shard: its roots, their descendants, their sessions, and whoever carries its mark."""
    known = {root.pid: root for root in roots}
    everyone = table()
    first = min((root.started for root in known.values()), default=0)
    found: set[int] = set()
    for pid, one in everyone.items():
        if one.dead or pid == os.getpid():
            continue
        root = known.get(pid)
        if root is not None:
            if one.started == root.started:
                found.add(pid)
            continue
        leader = known.get(one.session)
        # The number of a session cannot be given away while a process of it lives.
        in_session = leader is not None and one.started >= leader.started and _same(everyone.get(leader.pid), leader)
        if in_session or (one.started >= first and _environment(pid).get(SHARD_MARK) == shard_mark):
            found.add(pid)
    while more := {
        pid for pid, one in everyone.items() if one.parent in found and pid not in found and not one.dead
    } - {os.getpid()}:
        found |= more
    return found


def _same(now: Stat | None, known: Identity) -> bool:
    return now is None or now.started == known.started


def marked(agent_mark: str) -> dict[int, str]:
    """Processes that an agent with this mark started, with the mark of their shard."""
    found = {}
    for pid, one in table().items():
        if one.dead or pid == os.getpid():
            continue
        environment = _environment(pid)
        if environment.get(AGENT_MARK) == agent_mark and SHARD_MARK in environment:
            found[pid] = environment[SHARD_MARK]
    return found


def send(pid: int, number: signal.Signals) -> None:
    """Signal one process; that it is gone already is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def send_group(leader: Identity, number: signal.Signals) -> None:
    """Signal the group that `leader` leads, unless its number belongs to another process by now."""
    now = stat(leader.pid)
    if now is None or now.started == leader.started:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader.pid, number)


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds that these processes have used so far."""
    return sum(found.cpu_s for pid in pids if (found := stat(pid)) is not None)


def in_sessions(leaders: Iterable[Identity]) -> list[int]:
    """Processes in the sessions of a shard's commands: found without reading anybody's environment."""
    sessions = {leader.pid for leader in leaders}
    return [pid for pid, one in table().items() if one.session in sessions]


def listens(address: str, port: int, pids: Iterable[int]) -> bool | None:
    """Whether one of `pids` has the socket that a connection to `address` and `port` reaches.

    None: nobody listens there, or this system does not say.
    """
    inodes = _listeners(address, port)
    if not inodes:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for pid in pids:
        with contextlib.suppress(OSError):
            for handle in os.listdir(PROC / str(pid) / "fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(PROC / str(pid) / "fd" / handle) in wanted:
                        return True
    return False


def _listeners(address: str, port: int) -> set[str]:
    number = ipaddress.ip_address(address)
    places = {_kernel_hex(number), "0" * 32}
    if number.version == 4:
        places |= {"0" * 8, _kernel_hex(ipaddress.ip_address(f"::ffff:{number}"))}
    inodes = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                place, _, at = fields[1].rpartition(":")
                if fields[3] == "0A" and int(at, 16) == port and place in places:  # 0A: listening
                    inodes.add(fields[9])
    return inodes


def _kernel_hex(number: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """An address as /proc/net/tcp prints it: words of four bytes, each in the machine's order."""
    packed = number.packed
    words = (packed[start : start + 4] for start in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
