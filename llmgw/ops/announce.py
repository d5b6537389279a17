"""What `llmgw up` tells the person in front of it: how far the start is, then where everything is and what is next."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import sys
import time
import urllib.request
from datetime import datetime
from pathlib import Path
from typing import Any

from llmgw.config import Settings
from llmgw.ops import prepare

UNDER_WAY = ("ready", "loading", "external")
"""States of a model that answers or will without anybody's help."""
STUCK_AFTER_S = 10.0
"""A model that has just failed is tried again; a person hears of it when that has not helped for so long."""
LOOK_EVERY_S = 1.0


class Progress:
    """Watches the summary while the start lasts. `node` is the local one, whose agent speaks on the same terminal."""

    def __init__(self, settings: Settings, node: str) -> None:
        self.settings, self.node = settings, node
        self._said: set[str] = set()
        self._next_at = 0.0
        self._stuck_since: float | None = None

    def look(self) -> str | None:
        """Say what is new. Returns why nothing serves once that will not change by itself."""
        now = time.monotonic()
        if now < self._next_at:
            return None
        self._next_at = now + LOOK_EVERY_S
        summary = _summary(self.settings)
        for line in news(summary, self.node):
            if line not in self._said:
                self._said.add(line)
                say(line)
        why = stuck(summary)
        if why is None:
            self._stuck_since = None
            return None
        if self._stuck_since is None:
            self._stuck_since = now
        return why if now - self._stuck_since >= STUCK_AFTER_S else None

    def ready_model(self) -> str | None:
        return next((model["name"] for model in _summary(self.settings).get("models", ()) if model["ready"]), None)


def news(summary: dict[str, Any], node: str) -> list[str]:
    """Lines about what starts and the local agent does not tell itself: other nodes, fetching, the next try."""
    lines = []
    for replica in summary.get("replicas", ()):
        if replica["state"] == "fetching" or (replica["node"] != node and replica["state"] in ("starting", "loading")):
            note = f", {replica['note']}" if replica["note"] else ""
            lines.append(f"{replica['model']} on {replica['node']}: {replica['state']}{note}")
    for model in summary.get("models", ()):
        if model["next_try_at"]:
            at = datetime.fromisoformat(model["next_try_at"]).astimezone()
            lines.append(f"{model['name']} is tried again at {at:%H:%M:%S}")
    return lines


def stuck(summary: dict[str, Any]) -> str | None:
    """Why no model answers, when none is on its way either; None while there is hope or nobody knows yet."""
    if not any(node["state"] == "ready" for node in summary.get("nodes", ())):
        return None
    models = summary.get("models", ())
    if any(model["state"] in UNDER_WAY for model in models):
        return None
    for model in models:
        if model["state"] == "failed":
            return f"{model['name']} does not start: {model['note']}"
        if model["state"] == "cannot run":
            return f"{model['name']} finds no place: {'; '.join(model['why_not'][:3])}"
    return "the catalog keeps no model up" if models else "the catalog holds no model"


def tell(settings: Settings, first: prepare.First, *, model: str | None = None, why_not: str | None = None) -> None:
    """The three lines: what is where, how to sign in, the next step. `why_not`: nothing serves, and why."""
    base = settings.base_url
    if why_not is None:
        named = f" (model {model})" if model else ""
        print(f"Ready: pages at {base}/ and the OpenAI API at {base}/v1{named}.{reachable(settings)}")
    else:
        end = "" if why_not.endswith(".") else "."
        print(f"Pages at {base}/; nothing answers at {base}/v1 yet: {why_not}{end}{reachable(settings)}")
    password = settings.secrets_dir / prepare.PASSWORD_FILE
    if first.sign_in_path:
        kept = f"; the password of {first.admin} is in {password}" if first.password else ""
        print(f"Sign in first: {base}{first.sign_in_path} (once, within an hour{kept})")
    else:
        print(f"Sign in: {base}/sign-in/ as {first.admin}" + (f" (password in {password})" if first.password else ""))
    if first.project_key:
        print(f"Next: export OPENAI_BASE_URL={base}/v1 OPENAI_API_KEY={first.project_key} (the key is shown this once)")
        (settings.secrets_dir / prepare.FIRST_KEY_FILE).unlink(missing_ok=True)
    else:
        print(f"Next: make a key at {base}/keys/, or look around with: {command()} ctl status")
    sys.stdout.flush()


def reachable(settings: Settings) -> str:
    """A sentence about who else can come in; empty when nobody."""
    host, port = settings.listen.host, settings.listen.port
    if host in ("127.0.0.1", "::1", "localhost"):
        return ""
    where = "every address of this machine" if host in ("0.0.0.0", "::", "") else host  # noqa: S104
    told = f" It listens on {where}: whoever reaches port {port} there sees the sign-in page, and without TLS."
    if settings.listen.public_url is None and where != host:
        told += " Others need the machine's own address: give it as listen.public_url."
    return told


def command(called: str | None = None) -> str:
    """How a person types this program's name: `llmgw` where that is found, else as it was called."""
    path = Path(sys.argv[0] if called is None else called)
    found = shutil.which("llmgw")
    if path.name != "llmgw" or (found and Path(found).resolve() == path.resolve()):
        return "llmgw"
    return shlex.quote(str(path))


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk, or a reader that has gone, must not end what runs
        print(f"{time.strftime('%H:%M:%S')} up      {text}", file=sys.stderr, flush=True)


def _summary(settings: Settings) -> dict[str, Any]:
    """What `/api/v1/summary` answers; empty while it does not."""
    try:
        ctl = json.loads((settings.secrets_dir / prepare.CTL_FILE).read_text())
        request = urllib.request.Request(  # noqa: S310 - our own address
            f"{settings.base_url_here}/api/v1/summary", headers={"Authorization": f"Bearer {ctl['token']}"}
        )
        with urllib.request.urlopen(request, timeout=2) as answer:  # noqa: S310
            found = json.load(answer)
            return found if isinstance(found, dict) else {}
    except (OSError, ValueError, KeyError):
        return {}
