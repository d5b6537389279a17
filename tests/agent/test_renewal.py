"""The agent renews its certificate by itself, its key stays where it is, and some pair works at any time (ND-4)."""

from __future__ import annotations

import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

import agent.stream
from agent import protocol
from agent.config import AgentSettings
from agent.credentials import Credentials
from agent.renewal import FILE, NotKept, Pair, Renewal
from llmgw.ops import pki
from nodes.signing import Signed
from tests.agent.conftest import ControlPlane, eventually, settings_for
from tests.agent.test_session import speaking

NOW = datetime.now(UTC)
LATE = NOW + timedelta(days=pki.LEAF_DAYS * 0.7)


@pytest.fixture
def authority(tmp_path: Path) -> pki.Authority:
    return pki.open_or_make(tmp_path / "authority")[0]


@pytest.fixture
def ours(authority: pki.Authority, tmp_path: Path) -> AgentSettings:
    """Of an agent with the files of `llmgw node add`."""
    pki.write_node_files(tmp_path / "given", authority.issue_node("n"), authority.root)
    return with_files(tmp_path)


def with_files(directory: Path, url: str = "https://127.0.0.1:1") -> AgentSettings:
    given = directory / "given"
    told = settings_for("http://x", directory, None).model_dump() | {"control_plane": [url]}
    own = {"certificate_file": given / "node.crt", "key_file": given / "node.key", "ca_file": given / "ca.crt"}
    return AgentSettings.model_validate(told | own)


def given(ours: AgentSettings) -> Pair:
    assert ours.certificate_file
    assert ours.key_file
    return Pair(ours.certificate_file, ours.key_file)


def own(ours: AgentSettings) -> Pair:
    return Pair(ours.work_dir / FILE, ours.work_dir / FILE)


def signed(authority: pki.Authority, ours: AgentSettings, request: str | None) -> str:
    assert request
    found = authority.sign_request(ours.node, request, given(ours).certificate_file.read_text())
    assert isinstance(found, Signed)
    return found.certificate


def renewed(authority: pki.Authority, ours: AgentSettings) -> None:
    """What is signed some hours after the first certificate."""
    renewal = Renewal(ours, now=lambda: LATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pki, "EARLIER", timedelta(hours=-1))
        renewal.keep(signed(authority, ours, renewal.request()))


def until(certificate_file: Path) -> datetime:
    return x509.load_pem_x509_certificate(certificate_file.read_bytes()).not_valid_after_utc


def test_nothing_is_asked_for_before_two_thirds_of_its_life_are_over(ours: AgentSettings) -> None:
    ends = until(given(ours).certificate_file)
    due = ends - (ends - NOW) / 3
    assert Renewal(ours, now=lambda: due - timedelta(days=1)).request() is None
    assert Renewal(ours, now=lambda: due + timedelta(days=1)).request() is not None


def test_the_request_holds_the_nodes_name_and_never_a_key_that_is_written_anywhere(ours: AgentSettings) -> None:
    request = Renewal(ours, now=lambda: LATE).request()
    assert request
    asked = x509.load_pem_x509_csr(request.encode())
    assert [str(each.value) for each in asked.subject] == ["n"]
    assert "PRIVATE" not in request
    assert len(request) < protocol.MAX_REQUEST / 8
    assert not ours.work_dir.exists()


def test_the_answer_and_its_key_are_one_private_file_and_what_the_operator_put_there_stays(
    authority: pki.Authority, ours: AgentSettings
) -> None:
    before = [path.read_bytes() for path in (given(ours).certificate_file, given(ours).key_file)]
    renewed(authority, ours)
    path = own(ours).certificate_file
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in ours.work_dir.iterdir()] == [FILE]
    assert before == [each.read_bytes() for each in (given(ours).certificate_file, given(ours).key_file)]
    assert Renewal(ours).pairs() == (own(ours), given(ours))
    assert Renewal(ours, now=lambda: NOW).request() is None
    Credentials(ours).tls()


def test_a_crash_before_the_answer_is_whole_leaves_the_pair_that_works(
    authority: pki.Authority, ours: AgentSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewal = Renewal(ours, now=lambda: LATE)
    answer = signed(authority, ours, renewal.request())

    def crash(*_: object) -> Path:
        raise OSError(5, "the machine went down")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", crash)
        with pytest.raises(OSError, match="the machine went down"):
            renewal.keep(answer)
    assert not own(ours).certificate_file.exists()
    assert Renewal(ours).pairs() == (given(ours),)
    assert Renewal(ours, now=lambda: LATE).request() is not None


def test_a_file_of_ours_that_is_spoilt_or_anothers_is_not_used(
    authority: pki.Authority, ours: AgentSettings, caplog: pytest.LogCaptureFixture
) -> None:
    renewed(authority, ours)
    moved = ours.model_copy(update={"node": "other"})
    assert Renewal(moved).pairs() == (given(ours),)
    own(ours).certificate_file.write_text("nonsense")
    assert Renewal(ours).pairs() == (given(ours),)
    assert f"{own(ours).certificate_file} holds no certificate and is not used; remove it" in caplog.text


def test_newer_files_of_the_operator_come_first(
    authority: pki.Authority, ours: AgentSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed(authority, ours)
    monkeypatch.setattr(pki, "EARLIER", timedelta(hours=-2))
    pki.write_node_files(tmp_path / "given", authority.issue_node("n"), authority.root)
    assert Renewal(ours).pairs() == (given(ours), own(ours))


def test_the_renewed_pair_goes_on_without_the_operators_files(authority: pki.Authority, ours: AgentSettings) -> None:
    renewed(authority, ours)
    given(ours).certificate_file.unlink()
    assert Renewal(ours).pairs()[0] == own(ours)
    Credentials(ours).tls()


def test_what_is_not_taken_gives_way_to_the_other_pair(
    authority: pki.Authority, ours: AgentSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[object] = []

    def context(_: AgentSettings, pair: Pair) -> tuple[ssl.SSLContext, str]:
        shown.append(pair)
        return ssl.create_default_context(), ""

    monkeypatch.setattr("agent.tls.context", context)
    renewed(authority, ours)
    credentials = Credentials(ours)
    credentials.tls()
    for _ in range(2):
        credentials.turned_away()
        credentials.tls()
    assert shown == [own(ours), given(ours), own(ours)]


def test_an_answer_that_does_not_belong_to_the_request_is_not_kept(
    authority: pki.Authority, ours: AgentSettings, tmp_path: Path
) -> None:
    renewal = Renewal(ours, now=lambda: LATE)
    for answer, says in (
        ("nonsense", "what came as a new certificate is none"),
        (authority.issue_node("n").certificate.decode(), "for a key that this agent does not have"),
    ):
        assert renewal.request()
        with pytest.raises(NotKept, match=says):
            renewal.keep(answer)
    request = renewal.request()
    assert request
    answer = signed(authority, ours, request)
    assert Renewal(ours, now=lambda: LATE).request()
    with pytest.raises(NotKept, match="a key that this agent does not have"):
        Renewal(ours).keep(answer)  # one that was started anew meanwhile
    late = Renewal(ours, now=lambda: NOW + timedelta(days=4000))
    answer = signed(authority, ours, late.request())
    with pytest.raises(NotKept, match="does not prove n now"):
        late.keep(answer)
    assert not ours.work_dir.exists()


async def test_what_a_control_plane_answers_is_said_and_the_stream_goes_on(
    control_plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent.stream, "RENEW_FIRST_S", 0.0)
    monkeypatch.setattr(agent.stream, "RENEW_AGAIN_S", 0.05)
    monkeypatch.setattr(Credentials, "certificate_request", lambda _: "a request")
    control_plane.first = lambda: protocol.Welcome(node="n", heartbeat_s=0.2, renews=True)
    async with speaking(settings_for(control_plane.url, tmp_path, None)):
        await eventually(lambda: len(control_plane.requests) > 1)
        await control_plane.send_raw('{"type":"not_renewed","reason":"no key here"}')
        await eventually(lambda: "The certificate is not renewed: no key here" in caplog.text)
        await control_plane.send_raw('{"type":"certificate","certificate":"unasked"}')
        await eventually(lambda: "which this agent never asked for" in caplog.text)
        count = len(control_plane.heartbeats)
        await eventually(lambda: len(control_plane.heartbeats) > count)
    assert control_plane.requests[0].request == "a request"
    assert len(control_plane.registers) == 1


async def test_a_control_plane_that_renews_nothing_is_asked_for_nothing(
    control_plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent.stream, "RENEW_FIRST_S", 0.0)
    monkeypatch.setattr(Credentials, "certificate_request", lambda _: "a request")
    async with speaking(settings_for(control_plane.url, tmp_path, None)):
        await eventually(lambda: len(control_plane.heartbeats) > 2)
    assert control_plane.requests == []
