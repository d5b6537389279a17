"""What nobody means to send: bodies without end, addresses that hold NUL, forms in UTF-16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.http import Http404, HttpRequest, HttpResponse
from django.test import AsyncRequestFactory, Client, RequestFactory

from llmgw.core.bodies import MAX_BYTES, BoundedBodies
from llmgw.core.odd_requests import OddRequests


async def _django(scope: Any, receive: Any, send: Any) -> None:
    """Reads all, as Django does, and answers with how much that was."""
    read, more = 0, True
    while more:
        event = await receive()
        read += len(event["body"])
        more = event["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d" % read})


async def answer(chunks: Iterator[bytes], path: str = "/sign-in/", length: int | None = None) -> tuple[int, bytes, int]:
    """Status, body, and how many chunks were taken."""
    taken = 0
    sent: list[Any] = []

    async def receive() -> Any:
        nonlocal taken
        taken += 1
        chunk = next(chunks, None)
        return {"type": "http.request", "body": chunk or b"", "more_body": chunk is not None}

    async def send(event: Any) -> None:
        sent.append(event)

    headers = [(b"content-length", b"%d" % length)] if length is not None else []
    scope: Any = {"type": "http", "path": path, "headers": headers}
    await BoundedBodies(_django)(scope, receive, send)  # type: ignore[arg-type]
    return sent[0]["status"], sent[1]["body"], taken


def endless() -> Iterator[bytes]:
    while True:
        yield b"x" * 65_536


async def test_a_body_within_the_bound_passes() -> None:
    assert await answer(iter([b"a=1", b"&b=2"])) == (200, b"7", 3)


async def test_a_body_without_end_is_cut_off_at_the_bound() -> None:
    status, body, taken = await answer(endless())
    assert status == 413
    assert b"send less" in body
    assert taken * 65_536 <= MAX_BYTES + 65_536


async def test_a_body_announced_as_too_large_is_not_even_read() -> None:
    status, body, taken = await answer(endless(), "/api/v1/keys", length=10 * 1024**3)
    assert (status, taken) == (413, 0)
    assert body.startswith(b'{"error": {"code": "too_large"')


async def test_too_much_after_the_answer_has_begun_changes_nothing_of_it() -> None:
    async def early(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})
        while True:
            await receive()

    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"x" * 65_536, "more_body": True}

    async def send(event: Any) -> None:
        sent.append(event)

    await BoundedBodies(early)({"type": "http", "path": "/", "headers": []}, receive, send)  # type: ignore[arg-type, typeddict-item]
    assert [event["type"] for event in sent] == ["http.response.start", "http.response.body"]


def show(request: HttpRequest) -> HttpResponse:
    return HttpResponse(request.GET.get("show", ""))


@pytest.mark.parametrize("query", ["show=a%00b", "show=a\0b"])
def test_nul_in_a_query_reads_as_unknown(query: str) -> None:
    found = OddRequests(show)(RequestFactory().get("/", QUERY_STRING=query))
    assert found.content.decode() == "a\N{REPLACEMENT CHARACTER}b"


def test_nuls_around_each_other_leave_none() -> None:
    assert b"\0" not in OddRequests(show)(RequestFactory().get("/", QUERY_STRING="show=%%0000%00")).content


def test_other_queries_are_as_they_were() -> None:
    assert OddRequests(show)(RequestFactory().get("/", QUERY_STRING="show=a%20b")).content == b"a b"


async def test_a_path_with_nul_leads_nowhere_also_among_asynchronous_pages() -> None:
    async def page(request: HttpRequest) -> HttpResponse:
        return HttpResponse(request.path)

    middleware: Any = OddRequests(page)  # type: ignore[arg-type]
    assert (await middleware(AsyncRequestFactory().get("/nodes/"))).content == b"/nodes/"
    with pytest.raises(Http404):
        await middleware(AsyncRequestFactory().get("/nodes/%00/"))


@pytest.mark.parametrize("kind", ["utf-16", "latin-1"])
def test_a_form_in_another_alphabet_is_refused_in_words(client: Client, kind: str) -> None:
    odd = f"application/x-www-form-urlencoded; charset={kind}"
    response = client.post("/sign-in/", data=b"username=x", content_type=odd)
    assert (response.status_code, response.content) == (400, b"Send the form as UTF-8.")
