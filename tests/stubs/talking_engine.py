"""The strict llama-server look-alike, which also talks: it answers chats at once, and streams for as long as asked.

A stream has `max_tokens` events, a tenth of a second apart. Every answer says which process gave it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

import stub_engine

METRICS = b"llamacpp:requests_processing 0\nllamacpp:requests_deferred 0\n"
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}


class Talking(stub_engine.Api):
    def do_GET(self) -> None:
        if self.path != "/metrics" or not self._has_key():
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(METRICS)))
        self.end_headers()
        self.wfile.write(METRICS)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._has_key():
            return self._answer(401, {"error": {"message": "Invalid API Key", "type": "authentication_error"}})
        told = {"id": "chatcmpl-1", "created": 1, "model": self.flags.alias}
        if asked.get("stream"):
            return self._stream(told, int(asked.get("max_tokens") or 1))
        message = {"role": "assistant", "content": str(os.getpid())}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return self._answer(200, {**told, "object": "chat.completion", "choices": [choice], "usage": USAGE})

    def _stream(self, told: dict[str, Any], tokens: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        pause = threading.Event()
        for number in range(tokens):
            last = number == tokens - 1
            choice = {"index": 0, "delta": {"content": "x "}, "finish_reason": "stop" if last else None}
            self._event(json.dumps({**told, "object": "chat.completion.chunk", "choices": [choice]}))
            pause.wait(0.1)
        self._event(json.dumps({**told, "object": "chat.completion.chunk", "choices": [], "usage": USAGE}))
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, text: str) -> None:
        line = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))


if __name__ == "__main__":
    stub_engine.main(sys.argv[1:], Talking)
