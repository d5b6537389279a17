"""What the listener for agents shows of itself: renewed in time, without a restart, and said when it is spoilt."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from llmgw.config import Agents, ConfigError, Settings
from llmgw.ops import listener, pki, up
from nodes import asides
from tests.e2e.product import LLMGW, clean_environment
from tests.services import free_port, wait_until


def made(directory: Path, *names: str, days: int = pki.LEAF_DAYS) -> pki.Authority:
    """An authority and a listener's certificate that holds for so many days."""
    authority, _ = pki.open_or_make(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pki, "LEAF_DAYS", days)
        pki.serve_names(authority, names or ("a.example",))
    return authority


def shown(directory: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((directory / pki.SERVER_CERT).read_bytes())


def names_of(certificate: x509.Certificate) -> list[str]:
    held = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(each.value) for each in held]


# --- before a start --------------------------------------------------------------------------------------------------
def test_a_certificate_that_ends_within_30_days_is_renewed_at_a_start_with_its_names(tmp_path: Path) -> None:
    made(tmp_path, "a.example", "10.0.0.1", days=29)
    assert pki.make_server_ready(tmp_path)
    assert names_of(shown(tmp_path)) == ["a.example", "10.0.0.1"]
    assert shown(tmp_path).not_valid_after_utc > datetime.now(UTC) + timedelta(days=700)
    assert not pki.make_server_ready(tmp_path)


def test_one_that_holds_for_longer_stays_and_so_does_one_that_nobody_here_can_renew(tmp_path: Path) -> None:
    made(tmp_path / "long", days=31)
    made(tmp_path / "copied", days=29)
    (tmp_path / "copied" / pki.CA_KEY).unlink()
    for each in ("long", "copied"):
        before = shown(tmp_path / each)
        assert not pki.make_server_ready(tmp_path / each)
        assert shown(tmp_path / each) == before


def test_one_that_ends_with_its_authority_is_not_made_anew_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pki, "AUTHORITY_DAYS", 20)
    made(tmp_path)
    before = shown(tmp_path)
    assert not pki.renew_server(tmp_path)
    assert shown(tmp_path) == before


@pytest.mark.parametrize("days", [29, pki.LEAF_DAYS])
def test_up_renews_it_too(tmp_path: Path, days: int) -> None:
    made(tmp_path / "data" / "authority", days=days)
    before = shown(tmp_path / "data" / "authority")
    environment = {"LLMGW_AGENTS__PORT": str(free_port()), "LLMGW_AGENTS__HOST": "127.0.0.1"}
    options = ["--data", str(tmp_path / "data"), "--port", str(free_port()), "--bootstrap-file", "no/where.json"]
    done = subprocess.run(
        [*LLMGW, "up", *options], capture_output=True, text=True, timeout=110, cwd=tmp_path,
        env={**clean_environment(), **environment},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert (shown(tmp_path / "data" / "authority") != before) is (days == 29)


# --- spoilt files ----------------------------------------------------------------------------------------------------
def spoil(name: str) -> Callable[[Path], None]:
    def harm(directory: Path) -> None:
        (directory / name).write_text("nonsense")

    return harm


def another_key(directory: Path) -> None:
    made(directory / "other")
    shutil.copy(directory / "other" / pki.SERVER_KEY, directory / pki.SERVER_KEY)


def no_names(directory: Path) -> None:
    shutil.copy(directory / pki.CA_CERT, directory / pki.SERVER_CERT)


@pytest.mark.parametrize(
    ("harm", "file", "step"),
    [
        (spoil(pki.SERVER_CERT), pki.SERVER_CERT, "llmgw server ca --name NAME"),
        (no_names, pki.SERVER_CERT, "llmgw server ca --name NAME"),
        (spoil(pki.CA_CERT), pki.CA_CERT, "restore it from a backup"),
        (spoil(pki.SERVER_KEY), pki.SERVER_KEY, "llmgw server ca"),
        (another_key, pki.SERVER_KEY, "llmgw server ca"),
    ],
)
def test_a_file_that_is_spoilt_is_named_with_the_next_step(
    tmp_path: Path, harm: Callable[[Path], None], file: str, step: str
) -> None:
    made(tmp_path)
    (tmp_path / pki.CA_KEY).unlink()  # a host that cannot mend it
    harm(tmp_path)
    with pytest.raises(ConfigError) as raised:
        pki.make_server_ready(tmp_path)
    assert str(tmp_path / file) in str(raised.value)
    assert step in str(raised.value)


def test_a_name_that_cannot_be_read_is_an_error_for_server_ca_too(tmp_path: Path) -> None:
    authority = made(tmp_path)
    spoil(pki.SERVER_CERT)(tmp_path)
    with pytest.raises(ConfigError, match=r"server\.crt holds no certificate of a listener"):
        pki.serve_names(authority, ("a.example",))
    (tmp_path / pki.SERVER_CERT).unlink()
    (tmp_path / pki.SERVER_CERT).mkdir()
    with pytest.raises(ConfigError, match=r"server\.crt cannot be read"):
        pki.serve_names(authority, ("a.example",))


@pytest.mark.parametrize("mend", [lambda a: pki.serve_names(a, ()), lambda a: pki.make_server_ready(a.directory)])
def test_a_key_and_a_certificate_that_do_not_belong_together_are_made_anew(
    tmp_path: Path, mend: Callable[[pki.Authority], object]
) -> None:
    """As a crash between the two leaves them."""
    authority = made(tmp_path, "a.example")
    another_key(tmp_path)
    mend(authority)
    pki.check_server_files(tmp_path)
    assert names_of(shown(tmp_path)) == ["a.example"]


# --- while it runs ---------------------------------------------------------------------------------------------------
@pytest.fixture
def look(tmp_path: Path) -> listener.Shown:
    made(tmp_path)
    return listener.Shown(tmp_path, context_of(tmp_path))


def context_of(directory: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / pki.SERVER_CERT, directory / pki.SERVER_KEY)
    return context


def test_a_running_listener_renews_what_ends_soon(tmp_path: Path) -> None:
    made(tmp_path, days=20)
    running = listener.Shown(tmp_path, context_of(tmp_path))
    assert running.look()
    assert shown(tmp_path).not_valid_after_utc > datetime.now(UTC) + timedelta(days=700)
    assert not running.look()


def test_a_running_listener_goes_on_with_what_it_has_while_its_files_are_spoilt(
    tmp_path: Path, look: listener.Shown, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / pki.CA_KEY).unlink()
    (tmp_path / pki.SERVER_CERT).write_text("nonsense")
    assert not look.look()
    assert not look.look()
    [line] = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert f"goes on with the certificate that it has: {tmp_path / pki.SERVER_CERT} holds no" in line.getMessage()
    (tmp_path / pki.SERVER_CERT).unlink()
    assert not look.look()


def test_new_connections_of_a_running_listener_are_shown_the_new_certificate(tmp_path: Path) -> None:
    """The real process: its files are replaced, and it is looked at over TLS."""
    data, port = tmp_path / "data", free_port()
    authority = made(data / "authority", "127.0.0.1")
    pki.write_node_files(tmp_path / "n", authority.issue_node("n"), authority.root)
    code = "from llmgw.ops import listener, serve; listener.LOOK_S = 0.1; serve.run('agents')"
    own = {name: value for name, value in os.environ.items() if not name.startswith("LLMGW_")}
    environment = {
        **own, "LLMGW_DATA_DIR": str(data), "LLMGW_AGENTS__PORT": str(port), "LLMGW_AGENTS__HOST": "127.0.0.1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment, stdout=log, stderr=log)
    try:
        first = shown(data / "authority")
        wait_until("it shows the first", lambda: seen(port, tmp_path / "n") == first)
        pki.serve_names(authority, ("127.0.0.2",))
        second = shown(data / "authority")
        assert second != first
        wait_until("it shows the second", lambda: seen(port, tmp_path / "n") == second)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert "New connections are shown the listener's new certificate" in (tmp_path / "log").read_text()
    assert "Traceback" not in (tmp_path / "log").read_text()


def seen(port: int, files: Path) -> x509.Certificate | None:
    """What it shows."""
    context = ssl.create_default_context(cafile=files / "ca.crt")
    context.load_cert_chain(files / "node.crt", files / "node.key")
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as link,
        ):
            return x509.load_der_x509_certificate(link.getpeercert(binary_form=True) or b"")
    except OSError:
        return None


# --- what the dashboard says -----------------------------------------------------------------------------------------
def test_its_end_is_read_where_a_listener_is_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.conf import settings

    ours = Settings(data_dir=tmp_path, agents=Agents(port=8444))
    monkeypatch.setattr(settings, "LLMGW", ours)
    assert asides.listener_ends_at() is None
    made(tmp_path / "authority")
    assert asides.listener_ends_at() == shown(tmp_path / "authority").not_valid_after_utc
    spoil(pki.SERVER_CERT)(tmp_path / "authority")
    assert asides.listener_ends_at() is None
    monkeypatch.setattr(settings, "LLMGW", Settings(data_dir=tmp_path))
    assert asides.listener_ends_at() is None


# --- a start whose preparing is killed -------------------------------------------------------------------------------
def killed(_: str, *, scripted: bool) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_start_whose_preparing_is_killed_says_so_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmgw.ops.prepare.everything", killed)
    with pytest.raises(ConfigError, match=r"the process that prepares the store was killed .* Start again"):
        up._prepared(scripted=False)
