"""A strict llama-server look-alike: it takes the flags that llama-server takes, and fails in the ways it is told to.

Run as `stub_engine.py --model FILE --port N …`. What goes wrong is said in STUB_FAIL, a comma list:
  exit      write a line and exit with status 3 before listening
  never     listen, and stay loading for ever
  loads     listen, and stay loading until STUB_SWITCH is there
  unnamed   list another name than the one asked for
  silent    accept connections and never answer, once ready (touch STUB_SWITCH to begin)
  deaf      ignore SIGTERM
  children  leave a child in a session of its own, under another name
"""

from __future__ import annotations

import argparse
import hmac
import http.server
import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
from typing import Any

FAILURES = set(filter(None, os.environ.get("STUB_FAIL", "").split(",")))
SWITCH = os.environ.get("STUB_SWITCH", "")
KEY = os.environ.get("LLAMA_API_KEY", "")


class Strict(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        print(f"error: invalid argument: {message}", file=sys.stderr, flush=True)
        raise SystemExit(1)


def read_flags(argv: list[str]) -> argparse.Namespace:
    parser = Strict(allow_abbrev=False, add_help=False)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-a", "--alias", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("-np", "--parallel", type=int, default=-1)
    parser.add_argument("-c", "--ctx-size", type=int, default=0)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("-ngl", "--n-gpu-layers")
    parser.add_argument("-cram", "--cache-ram", type=int)
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--no-ui", action="store_true")
    parser.add_argument("--embeddings", action="store_true")
    parser.add_argument("--pooling", choices=("none", "mean", "cls", "last", "rank"))
    return parser.parse_args(argv)


class Api(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    flags: argparse.Namespace

    def do_GET(self) -> None:
        if "silent" in FAILURES and (not SWITCH or os.path.exists(SWITCH)):
            threading.Event().wait(60)
        if "never" in FAILURES or ("loads" in FAILURES and not os.path.exists(SWITCH)):
            return self._answer(503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}})
        if self.path in ("/health", "/v1/health"):
            return self._answer(200, {"status": "ok"})
        if not self._has_key():
            error = {"message": "Invalid API Key", "type": "authentication_error", "code": 401}
            return self._answer(401, {"error": error})
        if self.path == "/v1/models":
            name = "another-model" if "unnamed" in FAILURES else self.flags.alias
            return self._answer(200, {"object": "list", "data": [{"id": name, "aliases": [name], "object": "model"}]})
        return self._answer(404, {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}})

    def _has_key(self) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return not KEY or any(hmac.compare_digest(given, key) for key in KEY.split(","))

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True


def main(argv: list[str], api: type[Api] = Api) -> None:
    flags = read_flags(argv)
    print(f"stub engine for {flags.alias}: {' '.join(argv)}", flush=True)
    with open(flags.model, "rb") as file:
        if file.read(4) != b"GGUF":
            print("error: not a GGUF file", file=sys.stderr, flush=True)
            raise SystemExit(1)
    if "deaf" in FAILURES:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "children" in FAILURES:
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    if "exit" in FAILURES:
        print("error: the weights are the wrong shape", file=sys.stderr, flush=True)
        raise SystemExit(3)
    api.flags = flags
    try:
        server = Server((flags.host, flags.port), api)
    except OSError as error:
        print(f"couldn't bind HTTP server socket, hostname: {flags.host}, port: {flags.port}: {error}", flush=True)
        raise SystemExit(1) from None
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
