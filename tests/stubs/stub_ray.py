"""A strict `ray start` look-alike: a head that knows how many cards its cluster has, and nodes that join it.

A node ends at once when no head listens, and with the head; the head tells whoever waits for cards when there are
enough, and ends their connection when a node is lost. STUB_HEAD_S is how long the head takes until it listens.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import socketserver
import sys
import threading
from typing import Any

from acting import JOIN_S, check_cards, check_network, fail, note, pause


def read_flags(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ray", allow_abbrev=False)
    add = parser.add_subparsers(dest="command", required=True).add_parser("start", allow_abbrev=False).add_argument
    add("--head", action="store_true")
    add("--address")
    add("--port", type=int)
    add("--node-ip-address", required=True)
    add("--num-gpus", type=int, required=True)
    add("--num-cpus", type=int)
    add("--include-dashboard", choices=("true", "false"), default="true")
    add("--disable-usage-stats", action="store_true")
    add("--block", action="store_true")
    return parser.parse_args(argv)


def check(flags: argparse.Namespace) -> None:
    if flags.head == bool(flags.address):
        fail("RuntimeError: give --head, or --address of one")
    if flags.port is not None and not flags.head:
        fail("RuntimeError: --port should only be specified when --head is")
    check_cards(flags.num_gpus)
    check_network()


class Cluster:
    def __init__(self, address: str, cards: int) -> None:
        self.nodes = {address: cards}
        self.changed = threading.Condition()
        self.users: set[socket.socket] = set()

    def join(self, address: str, cards: int) -> bool:
        with self.changed:
            if address in self.nodes:
                return False
            self.nodes[address] = cards
            self.changed.notify_all()
        note("joined", node=address)
        return True

    def leave(self, address: str) -> None:
        with self.changed:
            del self.nodes[address]
        for user in list(self.users):
            user.shutdown(socket.SHUT_RDWR)


class Link(socketserver.StreamRequestHandler):
    """One line says what it is: a node with its cards, or somebody who waits for so many. A bare knock says nothing."""

    cluster: Cluster

    def handle(self) -> None:
        line = self.rfile.readline()
        if not line:
            return None
        told: dict[str, Any] = json.loads(line)
        if "node" not in told:
            return self._wait(told["cards"])
        if not self.cluster.join(told["node"], told["cards"]):
            return None
        self.wfile.write(b"welcome\n")
        self.rfile.readline()
        return self.cluster.leave(told["node"])

    def _wait(self, cards: int) -> None:
        with self.cluster.changed:
            if not self.cluster.changed.wait_for(lambda: sum(self.cluster.nodes.values()) >= cards, JOIN_S):
                return
        self.cluster.users.add(self.connection)
        self.wfile.write(b"enough\n")
        self.rfile.readline()
        self.cluster.users.discard(self.connection)


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Somebody left."""


def lead(flags: argparse.Namespace) -> None:
    pause(float(os.environ.get("STUB_HEAD_S", "0")))
    Link.cluster = Cluster(flags.node_ip_address, flags.num_gpus)
    try:
        server = Server((flags.node_ip_address, flags.port), Link)
    except OSError as error:
        fail(f"ConnectionError: Ray cannot start at {flags.node_ip_address}:{flags.port}: {error}")
    note("head", node=flags.node_ip_address, port=flags.port)
    server.serve_forever()


def follow(flags: argparse.Namespace) -> None:
    host, _, port = flags.address.rpartition(":")
    try:
        link = socket.create_connection((host, int(port)), timeout=5)
        link.settimeout(None)
        link.sendall(json.dumps({"node": flags.node_ip_address, "cards": flags.num_gpus}).encode() + b"\n")
        told = link.makefile("rb")
        if not told.readline():
            fail(f"RuntimeError: Every node should have a unique IP address: {flags.node_ip_address}")
    except OSError as error:
        fail(f"ConnectionError: Ray has no head at {flags.address}: {error}")
    told.readline()
    fail("Some Ray subprocesses exited unexpectedly: raylet: the GCS at the head is gone")


def main(argv: list[str]) -> None:
    flags = read_flags(argv)
    check(flags)
    note("start", program="ray", argv=argv)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    print(f"Ray runtime started on {flags.node_ip_address}.", flush=True)
    if not flags.block:
        os._exit(0)  # the rest runs on, away from whoever started it
    (lead if flags.head else follow)(flags)


if __name__ == "__main__":
    main(sys.argv[1:])
