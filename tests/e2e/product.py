"""The product as its users run it: `llmgw up` as a real process with a data directory of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.services import free_port, wait_until

FIRST_START_S = 240
LLMGW = [sys.executable, "-m", "llmgw"]
MODEL = "smollm2"


def clean_environment() -> dict[str, str]:
    """This process's environment without what tests or the shell set for llmgw."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LLMGW_", "OPENAI_", "DJANGO_")) and name != "PYTEST_CURRENT_TEST"
    }


def client() -> httpx.Client:
    """One for many requests, since each client reads all certificates; it leaves a connection before servers do."""
    limits = httpx.Limits(keepalive_expiry=1)
    return httpx.Client(verify=False, trust_env=False, limits=limits, timeout=100)


class Product:
    """One `llmgw up`. `stdout` and `stderr` are files, so that what it printed can be read while it runs."""

    def __init__(self, folder: Path, *options: str, port: int | None = None) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.port = port or free_port()
        self.bootstrap_file = folder / "bootstrap.json"
        self.command = [
            *LLMGW, "up", "--data", str(self.data), "--port", str(self.port),
            "--bootstrap-file", str(self.bootstrap_file), *options,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None
        self.http = client()

    # --- life --------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        with open(self.folder / "stdout", "wb") as out, open(self.folder / "stderr", "ab") as err:
            self.process = subprocess.Popen(
                self.command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=clean_environment(), cwd=self.folder
            )
        wait_until("llmgw up serves", self._serves, FIRST_START_S)

    def _serves(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"llmgw up ended: {self.stderr()[-3000:]}"
        return self.bootstrap_file.exists()

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(120)

    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    # --- what a user has ---------------------------------------------------------------------------------------------
    @property
    def bootstrap(self) -> dict[str, Any]:
        found = json.loads(self.bootstrap_file.read_text())
        assert isinstance(found, dict)
        return found

    @property
    def base_url(self) -> str:
        return str(self.bootstrap["base_url"])

    @property
    def key(self) -> str:
        return str(self.bootstrap["project_key"])

    @contextlib.contextmanager
    def openai(self, key: str | None = None) -> Iterator[openai.OpenAI]:
        url = f"{self.base_url}/v1"
        with openai.OpenAI(base_url=url, api_key=key or self.key, max_retries=0, timeout=180) as client:
            yield client

    def ctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*LLMGW, "ctl", *arguments],
            env={**clean_environment(), "LLMGW_DATA_DIR": str(self.data)},
            capture_output=True, text=True, timeout=180,
        )  # fmt: skip

    def ctl_json(self, *arguments: str) -> Any:
        result = self.ctl(*arguments, "--json")
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    def api(self, path: str, change: dict[str, Any] | None = None) -> Any:
        """What the operator's API says; with `change`, that is patched in first."""
        token = json.loads((self.data / "secrets" / "ctl.json").read_text())["token"]
        method = "GET" if change is None else "PATCH"
        headers = {"Authorization": f"Bearer {token}"}
        answer = self.http.request(method, f"{self.base_url}{path}", json=change, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, text: str = "Say hello.", max_tokens: int = 8, **extra: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, **extra}
        return self.http.post(
            f"{self.base_url}/v1/chat/completions",
            json=body, headers={"Authorization": f"Bearer {self.key}"}, timeout=180,
        )  # fmt: skip

    def answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError, FileNotFoundError):
            return self.chat(max_tokens=1).status_code == 200
        return False

    # --- what runs ---------------------------------------------------------------------------------------------------
    def pids(self) -> dict[str, int]:
        found = self.bootstrap["pids"]
        return {name: int(found[name]) for name in ("serve", "worker", "agent")}

    def engine_pids(self) -> list[int]:
        """Processes of this product's engines, found by the launcher and the data directory in their command lines."""
        return [
            pid
            for pid, command in _processes()
            if "llama_server" in command and str(self.data) in command and _alive(pid)
        ]

    def all_pids(self) -> list[int]:
        return [pid for pid, command in _processes() if str(self.folder) in command and _alive(pid)]

    def wait_for_restart(self, part: str, old: int) -> int:
        def changed() -> int:
            with contextlib.suppress(ValueError, FileNotFoundError, TypeError):
                new = self.pids()[part]
                return new if new != old else 0
            return 0

        pid = wait_until(f"{part} is started again", changed, 120)
        assert isinstance(pid, int)
        return pid


def _processes() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    return False


@contextlib.contextmanager
def product(*options: str) -> Iterator[Product]:
    """A started product in a scratch directory; stopped and removed afterwards whatever happened."""
    folder = Path(tempfile.mkdtemp(prefix="llmgw-e2e-"))
    one = Product(folder, *options)
    try:
        one.start()
        yield one
    finally:
        if one.process and one.process.poll() is None:
            one.process.send_signal(signal.SIGTERM)
            try:
                one.process.wait(60)
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
        for pid in one.all_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        one.http.close()
        shutil.rmtree(folder, ignore_errors=True)
