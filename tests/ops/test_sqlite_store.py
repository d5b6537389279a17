"""An SQLite store belongs to one control plane, and one that cannot have it says so."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from llmgw import config
from llmgw.ops.sqlite_store import claim, network_kind, warn_of_network
from tests.e2e.product import LLMGW, clean_environment
from tests.services import wait_until

MOUNTS = """\
22 27 0:21 / / rw,relatime - ext4 /dev/vda rw
30 22 0:40 / /srv/with\\040space rw shared:1 - nfs4 server:/export rw
31 22 0:41 / /home rw - cifs //server/home rw
32 31 0:42 / /home/local rw - xfs /dev/vdb rw
33 22 0:43 / /mnt rw - nfs server:/a rw
34 22 0:44 / /mnt rw - tmpfs tmpfs rw
a line that is none
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/llmgw", None),
        ("/srv/with space/data", "nfs4"),
        ("/srv/with space", "nfs4"),
        ("/srv/with spaceship", None),
        ("/home/me/data", "cifs"),
        ("/home/local/data", None),
        ("/mnt/data", None),
    ],
)
def test_the_file_system_is_that_of_the_longest_mount_point(path: str, kind: str | None) -> None:
    assert network_kind(MOUNTS, path) == kind


def test_nothing_is_said_of_mounts_that_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_network(tmp_path, tmp_path / "nowhere")
    assert caplog.text == ""


def test_a_store_on_a_network_file_system_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mounts").write_text(f"22 27 0:21 / {tmp_path} rw - nfs4 server:/ rw\n")
    warn_of_network(tmp_path / "data", tmp_path / "mounts")
    assert "network file system (nfs4)" in caplog.text
    assert "store.url" in caplog.text


def test_each_part_of_a_control_plane_may_run_once_and_gateways_as_often_as_wanted(tmp_path: Path) -> None:
    settings = config.Settings(data_dir=tmp_path)
    with claim(settings, "serve"), claim(settings, "worker"), claim(settings, "beat"), claim(settings, "agents"):
        with claim(settings, "gateway"), claim(settings, "gateway"):
            pass
        parts = {"web": "web", "serve": "web", "worker": "worker", "beat": "beat", "agents": "listener"}
        for role, part in parts.items():
            with pytest.raises(config.ConfigError, match=rf"a {part} runs on it .*PostgreSQL: set store.url"):
                claim(settings, role).__enter__()
    with claim(settings, "web"):
        pass


def test_with_postgresql_any_number_may_run(tmp_path: Path) -> None:
    settings = config.Settings(data_dir=tmp_path, store=config.Store(url="postgresql://llmgw@db/llmgw"))
    with claim(settings, "worker"), claim(settings, "worker"):
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("role", ["beat", "worker"])
def test_a_second_control_plane_on_an_sqlite_store_refuses_to_start_and_says_so(tmp_path: Path, role: str) -> None:
    environment = {**clean_environment(), "LLMGW_DATA_DIR": str(tmp_path / "data")}
    command = [*LLMGW, "server", "run", role]
    with open(tmp_path / "log", "wb") as log:
        first = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        lock = tmp_path / "data" / f"{role}.lock"
        wait_until("the first one has the store", lambda: lock.exists() and lock.read_text() == str(first.pid))
        second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert second.returncode == 2
    assert f"a {role} runs on it already (pid {first.pid})" in second.stderr
    assert "several control planes need PostgreSQL: set store.url" in second.stderr
    assert "Traceback" not in second.stderr
