"""What the stand-ins of engines on cards have in common: how they end, what they note, how ranks meet.

What they did is appended to the file STUB_EVENTS, a JSON object a line.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

JOIN_S = 60.0
_never = threading.Event()
_events = threading.Lock()


def pause(seconds: float) -> None:
    """Nobody sets it: this only lets time pass."""
    if seconds:
        _never.wait(seconds)


def fail(message: str, status: int = 1) -> NoReturn:
    print(message, file=sys.stderr, flush=True)
    os._exit(status)


def note(event: str, **told: Any) -> None:
    if path := os.environ.get("STUB_EVENTS"):
        with _events, open(path, "a") as file:
            file.write(json.dumps({"event": event, **told}) + "\n")


# --- what NCCL, Gloo and CUDA would not put up with ------------------------------------------------------------------
def check_cards(wanted: int) -> None:
    """Whether so many cards can be seen from here, where anything is said about it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and len(list(filter(None, visible.split(",")))) < wanted:
        fail(f"ValueError: World size ({wanted}) is larger than the number of available GPUs ({visible or 'none'}) in")


def check_network() -> None:
    """What is set of the network between ranks must be there, and must not contradict itself."""
    names = [name for _, name in socket.if_nameindex()]
    gloo, nccl = os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")
    if gloo is not None and gloo not in names:
        fail(f"RuntimeError: [enforce fail at gloo/transport/tcp/device.cc] Unable to find address for: {gloo}")
    if nccl is not None and nccl.removeprefix("=") not in names:
        fail("ncclInvalidUsage: Bootstrap : no socket interface found")
    if os.environ.get("NCCL_NET") == "IB" and os.environ.get("NCCL_IB_DISABLE") == "1":
        fail("ncclInvalidUsage: Failed to initialize any NET plugin")


# --- ranks of one replica --------------------------------------------------------------------------------------------
def await_ranks(place: tuple[str, int], count: int, on_loss: Callable[[], None]) -> list[socket.socket]:
    """Listen until ranks 1 to `count` are there; `on_loss` when one of them leaves."""
    with socket.create_server(place) as server:
        server.settimeout(JOIN_S)
        joined: dict[int, socket.socket] = {}
        try:
            while len(joined) < count:
                link, _ = server.accept()
                joined[int(link.recv(16))] = link
        except TimeoutError:
            fail(f"RuntimeError: {count - len(joined)} ranks did not join within {JOIN_S:g} s")
    note("joined", ranks=sorted(joined))
    for link in joined.values():
        link.settimeout(None)
        threading.Thread(target=_watch, args=(link, on_loss), daemon=True).start()
    return list(joined.values())


def _watch(link: socket.socket, on_loss: Callable[[], None]) -> None:
    if not _read(link):
        on_loss()


def join(place: tuple[str, int], rank: int) -> bytes:
    """Meet the leader, stay, and hand back its last word; empty when it went without any."""
    end = time.monotonic() + JOIN_S
    while True:
        try:
            link = socket.create_connection(place, timeout=5)
            break
        except OSError as error:
            if time.monotonic() > end:
                fail(f"RuntimeError: no rank 0 at {place[0]}:{place[1]}: {error}")
            pause(0.1)
    link.settimeout(None)
    link.sendall(str(rank).encode())
    note("ready", rank=rank)
    return _read(link)


def _read(link: socket.socket) -> bytes:
    try:
        return link.recv(16)
    except OSError:
        return b""
