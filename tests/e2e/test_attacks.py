"""The real product under people who want in, or want it down: raw sockets, wrong streams, many writers at once."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from agent import protocol
from tests.e2e.product import Product, product
from tests.services import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
LINK = re.compile(r"/first-sign-in/(\S+)")
TOO_LARGE = 8 * 1024 * 1024


@pytest.fixture(scope="module")
def running() -> Iterator[Product]:
    with product() as one:
        yield one


def raw(running: Product, head: str, body: bytes = b"") -> tuple[int, bytes]:
    """Status and the rest of what a raw request gets."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as link:
        link.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
        answer = link.recv(65_536)
    return int(answer.split(b" ", 2)[1]), answer


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("POST /api/v1/keys HTTP/1.1\nHost: localhost:8000/#@x\nContent-Length: 0", 400),
        ("GET /admin/ HTTP/1.1\nHost: localhost/health?x=", 400),
        ("GET /admin/ HTTP/1.1\nHost: a/../b", 400),
        ("GET /admin/ HTTP/1.1\nHost: a\nHost: b", 400),
        ("POST http://other/api/v1/keys HTTP/1.1\nHost: 127.0.0.1\nContent-Length: 0", 401),
        ("GET /api/v1/me HTTP/1.1\nHost: 127.0.0.1\nX-Original-URL: /health\nX-Rewrite-URL: /health", 401),
        ("GET /health/../api/v1/me HTTP/1.1\nHost: 127.0.0.1", 404),
        ("GET /nodes/%00/ HTTP/1.1\nHost: 127.0.0.1", 404),
        ("GET /static/%2e%2e/%2e%2e/settings.py HTTP/1.1\nHost: 127.0.0.1", 404),
        ("GET //evil.example/keys HTTP/1.1\nHost: 127.0.0.1", 404),
        ("OPTIONS * HTTP/1.1\nHost: 127.0.0.1", 404),
    ],
)
def test_no_address_changes_who_is_asked_for_what(running: Product, head: str, status: int) -> None:
    found, answer = raw(running, head)
    assert found == status
    assert b"evil.example" not in answer


def test_forwarded_headers_of_anybody_change_nothing(running: Product) -> None:
    forged = "X-Forwarded-Host: evil.example\nX-Forwarded-Proto: https\nX-Forwarded-For: 10.0.0.1\nForwarded: host=evil"
    status, answer = raw(running, f"GET /sign-in/ HTTP/1.1\nHost: evil.example\n{forged}")
    assert status == 200
    assert b"evil" not in answer
    assert b"secure" not in answer.lower().partition(b"\r\n\r\n")[0].replace(b"security", b"")


def test_a_form_of_many_megabytes_is_refused_before_it_is_read(running: Product) -> None:
    head = "POST /sign-in/ HTTP/1.1\nHost: 127.0.0.1\nContent-Type: application/x-www-form-urlencoded\n"
    assert raw(running, f"{head}Content-Length: {10 * 1024**3}")[0] == 413  # nothing of it was sent


def test_a_form_without_end_is_cut_off(running: Product) -> None:
    head = (
        "POST /sign-in/ HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
        "Content-Type: application/x-www-form-urlencoded\r\n\r\n"
    )
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as link:
        link.sendall(head.encode())
        sent = 0
        try:
            while sent < TOO_LARGE:
                link.sendall(chunk)
                sent += len(chunk)
        except ConnectionError:
            return
        assert link.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("kind", ["utf-16", "utf-7"])
def test_a_form_in_another_alphabet_is_refused(running: Product, kind: str) -> None:
    headers = {"Content-Type": f"application/x-www-form-urlencoded; charset={kind}"}
    answer = httpx.post(f"{running.base_url}/sign-in/", content=b"username=x", headers=headers, timeout=60)
    assert (answer.status_code, answer.text) == (400, "Send the form as UTF-8.")


@pytest.mark.parametrize("path", ["/agent/stream/", "/v1/chat/completions", "/"])
def test_only_agents_have_a_stream(running: Product, path: str) -> None:
    with pytest.raises(InvalidStatus) as refused, connect(f"ws://127.0.0.1:{running.port}{path}", open_timeout=60):
        pass
    assert refused.value.response.status_code == 403


def test_a_stream_without_a_join_token_says_so_and_ends(running: Product) -> None:
    for token in ("", running.key, "nt-" + "x" * 43, "\xe9"):
        headers = {"Authorization": f"Bearer {token}", "Cookie": "llmgw_session=x", "Origin": "https://evil.example"}
        with connect(
            f"ws://127.0.0.1:{running.port}{protocol.PATH}", additional_headers=headers, open_timeout=60
        ) as stream:
            assert json.loads(stream.recv(60))["type"] == "refused"
            with pytest.raises(ConnectionClosed):
                stream.recv(60)


def test_a_first_link_works_once_from_this_site_alone_and_is_in_no_log(running: Product) -> None:
    link: Any = wait_until("the link is printed", lambda: LINK.search(running.stdout() + running.stderr()), 60)
    path, code = link.group(0), link.group(1)
    with httpx.Client(base_url=running.base_url, timeout=60) as browser:
        form = {"csrfmiddlewaretoken": _token(browser.get(path).text)}
        for origin in ("null", "https://evil.example", "http://127.0.0.1:1"):
            assert browser.post(path, data=form, headers={"Origin": origin}).status_code == 403
        assert browser.post(path).status_code == 403
        fixed = browser.cookies.get("llmgw_session")
        assert browser.post(path, data=form).status_code == 302
        assert browser.cookies["llmgw_session"] != fixed
        assert browser.get("/dashboard/").status_code == 200
    with httpx.Client(base_url=running.base_url, timeout=60) as other:
        form = {"csrfmiddlewaretoken": _token(other.get("/sign-in/").text)}
        assert other.post(path, data=form).status_code == 404
    told_at_the_start = running.stderr().count(code)
    assert told_at_the_start <= 1
    assert "/first-sign-in/…" in running.stderr()


def test_twenty_writers_and_readers_at_once_never_meet_a_locked_store(running: Product) -> None:
    token = json.loads((running.data / "secrets" / "ctl.json").read_text())["token"]
    seen: Counter[tuple[str, int]] = Counter()
    end = time.monotonic() + 8

    def write(number: int) -> None:
        with _asking(running, token) as asks:
            while time.monotonic() < end:
                made = asks.post("/api/v1/keys", json={"project": 1, "name": f"writer {number}"})
                seen["make", made.status_code] += 1
                revoked = asks.post(f"/api/v1/keys/{made.json()['key']['id']}/revoke")
                seen["revoke", revoked.status_code] += 1

    def read() -> None:
        with _asking(running, token) as asks:
            while time.monotonic() < end:
                for path in ("summary", "keys", "usage", "events"):
                    seen[path, asks.get(f"/api/v1/{path}").status_code] += 1

    def call() -> None:
        while time.monotonic() < end:
            seen["call", running.chat(max_tokens=1).status_code] += 1

    threads = [threading.Thread(target=write, args=(number,)) for number in range(20)]
    threads += [threading.Thread(target=work) for work in (read, read, call)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {status for _, status in seen} == {200, 201}, seen
    assert "locked" not in running.stderr()


def _asking(running: Product, token: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.Client(base_url=running.base_url, headers=headers, timeout=180)


def _token(page: str) -> str:
    found = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page)
    assert found
    return found.group(1)
