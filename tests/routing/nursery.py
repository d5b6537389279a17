"""Gateways that need not import everything anew: for each port on standard input, one is forked and its pid said."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "llmgw.settings")
    import django
    import uvicorn

    django.setup(set_prefix=False)
    import nodes.consumers  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here waits for those that ended
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(2, 1)
            options = {"http": "routing.edge:GatewayProtocol", "timeout_graceful_shutdown": 30}
            uvicorn.run("llmgw.asgi:application", port=int(line), **options)  # type: ignore[arg-type]
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
