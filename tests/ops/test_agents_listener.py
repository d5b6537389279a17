"""The listener that demands certificates, as a real process, and the agent's own way to it (ND-4)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from agent import protocol, renewal, stream, tls
from agent.config import AgentSettings, ConfigError
from llmgw.config import Agents, Settings
from llmgw.ops import pki, up
from tests.agent.conftest import eventually, free_port, settings_for
from tests.agent.test_session import Speaker, speaking

ROOT = Path(__file__).parents[2]
PREPARE = """
from pathlib import Path
from llmgw.ops import nodes, prepare
prepare.prepare()
nodes.ca(())
for name in ("one", "gone"):
    nodes.add(name, None, renew=False)

from datetime import timedelta
from django.utils import timezone
from llmgw.ops import pki
from nodes.models import Certificate
pki.EARLIER, pki.LEAF_DAYS = timedelta(days=600), 100
nodes.add("old", None, renew=False)
Certificate.objects.filter(node="old").update(made_at=timezone.now() - timedelta(days=600))
"""
PROVED = """
import django; django.setup(set_prefix=False)
from nodes.models import Certificate
print(Certificate.objects.filter(node="old", proved_at__isnull=False).count())
"""
ADD = """
from pathlib import Path
from llmgw.config import ConfigError
from llmgw.ops import nodes

def add(name, out=None, renew=False):
    try:
        print(*nodes.add(name, out, renew=renew))
    except ConfigError as error:
        print(error)
    for path in Path("node-other").glob("node.crt"):
        print(hash(path.read_bytes()))

add("one"); add("one", Path("elsewhere")); add("a/b"); add("x" * 65)
add("other"); add("other", renew=True)
"""
REMOVE = """
import django; django.setup(set_prefix=False)
from nodes import actions; from nodes.models import Node; from tenants.audit import SYSTEM
actions.remove_node(node=Node.objects.get(name="gone"), actor=SYSTEM, force=True)
"""


@dataclass
class Listener:
    directory: Path
    environment: dict[str, str]
    port: int

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self.directory / "agents.log").read_text()

    def python(self, code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.directory, env=self.environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def agent(self, node: str, **changes: object) -> AgentSettings:
        """The settings of an agent with the files of a node that was added."""
        files = self.directory / f"node-{node}"
        own = {"certificate_file": files / "node.crt", "key_file": files / "node.key", "ca_file": files / "ca.crt"}
        told = settings_for("http://x", self.directory, None).model_dump() | {"control_plane": [self.url], "node": node}
        return AgentSettings.model_validate(told | own | changes)


class Named(Speaker):
    def __init__(self, node: str) -> None:
        super().__init__()
        self.node = node

    async def register(self, address: str) -> protocol.Register:
        return msgspec.structs.replace(await super().register(address), node=self.node)


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listener]:
    directory = tmp_path_factory.mktemp("plane")
    own = {name: value for name, value in os.environ.items() if not name.startswith("LLMGW_")}
    port = free_port()
    environment = {
        **own,
        "PYTHONPATH": str(ROOT),
        "DJANGO_SETTINGS_MODULE": "llmgw.settings",
        "LLMGW_DATA_DIR": str(directory / "data"),
        "LLMGW_AGENTS__HOST": "127.0.0.1",
        "LLMGW_AGENTS__PORT": str(port),
    }
    one = Listener(directory, environment, port)
    one.python(PREPARE)
    with (directory / "agents.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "llmgw", "server", "run", "agents"],
            cwd=directory, env=environment, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield one
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM), one.log
        assert "Traceback" not in one.log


async def test_an_agent_registers_over_tls_and_another_name_is_refused(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    async with speaking(listener.agent("one"), node=Named("one")):
        await eventually(lambda: "Node one registered" in listener.log)
    async with speaking(listener.agent("one"), node=Named("two")):
        await eventually(lambda: "this certificate is node one's, but the agent says it is two" in caplog.text)


async def test_an_agent_renews_its_certificate_by_itself_and_comes_again_with_it(
    listener: Listener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "RENEW_FIRST_S", 0.0)
    caplog.set_level("INFO")
    settings = listener.agent("old")
    given = [path.read_bytes() for path in (listener.directory / "node-old").iterdir()]
    async with speaking(settings, node=Named("old")):
        await eventually(lambda: "The certificate was renewed; the new one holds until" in caplog.text)
        await eventually(lambda: listener.log.count("Node old registered") == 2)
        assert (await asyncio.to_thread(listener.python, PROVED)).strip() == "2"
    own = settings.work_dir / renewal.FILE
    assert own.stat().st_mode & 0o777 == 0o600
    assert given == [path.read_bytes() for path in (listener.directory / "node-old").iterdir()]


async def test_nobody_speaks_there_without_a_certificate_of_the_authority(
    listener: Listener, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    await eventually(lambda: _listens(listener.port))
    async with speaking(listener.agent("one", certificate_file=None, key_file=None)):
        await eventually(lambda: tls.REFUSED in caplog.text)
    caplog.clear()
    stranger, _ = pki.open_or_make(tmp_path)
    pki.write_node_files(tmp_path, stranger.issue_node("one"), stranger.root)
    forged = {"certificate_file": tmp_path / "node.crt", "key_file": tmp_path / "node.key"}
    async with speaking(listener.agent("one", **forged)):
        await eventually(lambda: tls.REFUSED in caplog.text)


async def test_a_removed_node_is_forgotten_by_a_listener_that_goes_on(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    async with speaking(listener.agent("gone"), node=Named("gone")):
        await eventually(lambda: "Node gone registered" in listener.log)
        await asyncio.to_thread(listener.python, REMOVE)
        await eventually(lambda: "refused: node gone was removed" in caplog.text)
        await eventually(lambda: "the certificate of gone (serial" in caplog.text)


def test_a_node_is_added_once_and_renewed_only_when_asked_to(listener: Listener) -> None:
    once, elsewhere, odd, long, added, first, renewed, second = listener.python(ADD).splitlines()
    assert "holds a certificate already. Renew it with --renew" in once
    assert "node one has a certificate already. Replace it with --renew" in elsewhere
    assert "'a/b' cannot be a node's name" in odd
    assert "at most 64 characters" in long
    assert f'control_plane: ["https://THIS-MACHINE:{listener.port}"]' in added
    assert "certificate_file: node.crt" in renewed
    assert first != second


@pytest.mark.parametrize("names", [("elsewhere.example",), ("127.0.0.2",)])
async def test_a_server_without_the_address_that_was_dialled_is_not_trusted_whatever_it_is_called(
    names: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, _ = pki.open_or_make(tmp_path)
    pki.serve_names(authority, names)
    pki.write_node_files(tmp_path, authority.issue_node("one"), authority.root)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    settings = settings_for(url, tmp_path, None).model_copy(update={"ca_file": tmp_path / "ca.crt"})
    async with speaking(settings):
        await eventually(lambda: "the control plane's certificate is not trusted (IP address mismatch" in caplog.text)
    server.close()
    await server.wait_closed()


async def test_files_that_are_no_certificates_are_said_and_tried_again(
    listener: Listener, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    await eventually(lambda: _listens(listener.port))
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("nonsense")
    for changes, says in (
        ({"key_file": tmp_path / "none"}, f"{tmp_path / 'none'} cannot be read"),
        ({"key_file": nonsense}, "hold no certificate with its key. Make both anew on the control plane"),
        ({"ca_file": nonsense}, f"ca_file {nonsense} holds no certificate"),
        ({"ca_file": tmp_path / "none"}, f"ca_file {tmp_path / 'none'} cannot be read"),
        ({"ca_file": None}, "the control plane's certificate is not trusted"),
    ):
        async with speaking(listener.agent("one", **changes)):
            await eventually(lambda says=says: says in caplog.text, what=says)  # type: ignore[misc]


async def test_a_key_that_others_can_read_is_warned_about(
    listener: Listener, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    key = tmp_path / "node.key"
    key.write_bytes((listener.directory / "node-one" / "node.key").read_bytes())
    key.chmod(0o644)
    async with speaking(listener.agent("one", key_file=key), node=Named("one")):
        await eventually(lambda: f"key_file {key} can be read by others. Run: chmod 600 {key}" in caplog.text)


def test_settings_that_cannot_prove_anybody_are_refused_by_name(tmp_path: Path) -> None:
    told = {"node": "one", "control_plane": ["https://x:1"], "certificate_file": tmp_path / "a"}
    with pytest.raises(ValueError, match="certificate_file and key_file belong together"):
        AgentSettings.model_validate(told)
    with pytest.raises(ValueError, match="http://x:1 takes no certificate; write https://"):
        AgentSettings.model_validate(told | {"key_file": tmp_path / "b", "control_plane": ["http://x:1"]})


def test_a_listener_without_its_certificate_does_not_start(tmp_path: Path) -> None:
    pki.open_or_make(tmp_path)
    with pytest.raises(ConfigError, match=r"server\.crt is not there, or cannot be read\. Make it: llmgw server ca"):
        pki.check_server_files(tmp_path)


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("port", [None, 8444])
def test_up_runs_the_listener_once_its_port_is_set(port: int | None, tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, agents=Agents(port=port))
    names = [part.name for part in up._parts(tmp_path / "agent.yaml", settings)]
    assert names == ["serve", *(["agents"] if port else []), "worker", "agent"]
