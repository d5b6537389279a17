"""What is sent to endpoints that llmgw does not run, and what their answers mean."""

from __future__ import annotations

import os
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path

import pytest

from catalog import spec
from llmgw.core.addresses import Address
from routing import openai, outside
from routing.dialing import Unusable
from routing.failures import ConnectFailed, UpstreamError
from routing.outside import LONGEST_KEY, Outside, ProviderFailed, Throttled, check_status, read_key

SECRET = "sk-provider-0123456789"
PASSED = (
    b"content-type: application/json\r\naccept: */*\r\ntraceparent: 00-a-b-01\r\ntracestate: x=y\r\n"
    b"user-agent: curl\r\nopenai-beta: a\r\n"
)


def model(name: str = "m", url: str = "https://provider.example/v1", **changes: str | None) -> spec.Model:
    return spec.Model(name=name, external=replace(spec.External(url, "gpt-x"), **changes))  # type: ignore[arg-type]


def provider(**changes: object) -> Outside:
    (made,) = outside.external([model()], weight=256, private=False)
    return replace(made, **changes)  # type: ignore[arg-type]


def own(url: str = "http://10.0.0.5:8000", **changes: object) -> Outside:
    (made,) = outside.static(name=None, url=url, models=["m"], engine="vllm", weight=16, key_file=None)
    return replace(made, **changes)  # type: ignore[arg-type]


def head(place: Outside, path: str = "/v1/chat/completions", query: bytes = b"", method: str = "POST") -> bytes:
    return place.head(method=method, path=path, query=query, passed=PASSED, request_id="req-1", length=7)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.write_text(f"{SECRET}\n")
    return file


# --- what there is ---------------------------------------------------------------------------------------------------
def test_an_external_model_is_one_endpoint_that_is_placed_nowhere() -> None:
    models = [spec.Model(name="local"), model("far", api_key_file="/k"), model("near", "http://10.0.0.5")]
    far, near = outside.external(models, weight=256, private=False, ca_file="/ca")
    assert (far.replica, far.model, far.name_there, far.key_file) == ("external:far", "far", "gpt-x", "/k")
    assert far.address == Address(True, "provider.example", 443, "/v1")
    assert (far.own, far.private, far.ca_file) == (False, False, "/ca")
    assert near.address.path == ""
    endpoint = far.endpoint()
    assert endpoint.usable
    assert (endpoint.node, endpoint.host, endpoint.port, endpoint.slots) == ("", "provider.example", 443, 256)


@pytest.mark.parametrize(
    ("url", "path", "metrics"),
    [
        ("http://10.0.0.5:8000", "/v1", "/metrics"),
        ("http://10.0.0.5:8000/v1", "/v1", "/metrics"),
        ("http://10.0.0.5:8000/v1/", "/v1", "/metrics"),
        ("https://proxy.example/llama", "/llama/v1", "/llama/metrics"),
    ],
)
def test_a_static_endpoint_has_its_api_under_v1_and_its_metrics_at_its_root(url: str, path: str, metrics: str) -> None:
    place = own(url)
    assert (place.address.path, place.metrics_path, place.own) == (path, metrics, True)


def test_a_static_endpoint_serves_each_of_its_models_under_the_catalogs_name() -> None:
    made = outside.static(name="old", url="http://e", models=["a", "b"], engine="llamacpp", weight=4, key_file=None)
    assert [(each.replica, each.model, each.engine) for each in made] == [
        ("old", "a", "llamacpp"),
        ("old", "b", "llamacpp"),
    ]
    here = outside.joined(made, [spec.Model(name="big", aliases=("b",))])
    assert [(each.model, each.name_there) for each in here] == [("a", "a"), ("big", "b")]


def test_long_names_stay_apart_in_the_columns_of_usage() -> None:
    first, second = outside.external([model("x" * 199 + "a"), model("x" * 199 + "b")], weight=1, private=False)
    assert len(first.replica) == len(second.replica) == 120
    assert first.replica != second.replica


# --- what is sent ----------------------------------------------------------------------------------------------------
def test_a_provider_gets_what_it_needs_and_nothing_else(key_file: Path) -> None:
    assert head(provider(key_file=str(key_file))) == (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: provider.example\r\n"
        b"Authorization: Bearer sk-provider-0123456789\r\n"
        b"content-type: application/json\r\naccept: */*\r\nopenai-beta: a\r\ncontent-length: 7\r\n\r\n"
    )
    assert b"Authorization" not in head(provider())


@pytest.mark.parametrize(
    ("path", "query", "line"),
    [
        ("", b"", b"POST /embeddings HTTP/1.1"),
        ("/v1beta/openai", b"", b"POST /v1beta/openai/embeddings HTTP/1.1"),
        ("/v1", b"key=secret", b"POST /v1/embeddings HTTP/1.1"),
        ("/v1", b"beta=true", b"POST /v1/embeddings?beta=true HTTP/1.1"),
    ],
)
def test_the_rest_of_the_path_follows_that_of_the_url(path: str, query: bytes, line: bytes) -> None:
    place = provider(address=Address(True, "provider.example", 443, path))
    assert head(place, "/v1/embeddings", query).split(b"\r\n")[0] == line


def test_messages_carry_the_key_and_the_version_where_anthropic_looks_for_them(key_file: Path) -> None:
    sent = head(provider(key_file=str(key_file)), "/v1/messages")
    assert b"\r\nx-api-key: sk-provider-0123456789\r\n" in sent
    assert sent.count(b"anthropic-version: 2023-06-01\r\n") == 1
    written = provider().head(
        method="POST",
        path="/v1/messages/count_tokens",
        query=b"",
        passed=b"anthropic-version: 2024-01-01\r\n",
        request_id="r",
        length=0,
    )
    assert written.count(b"anthropic-version") == 1
    assert b"x-api-key" not in written


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/files"),
        ("POST", "/v1/files"),
        ("POST", "/v1/fine_tuning/jobs"),
        ("GET", "/v1/responses/resp_1"),
        ("GET", "/v1/chat/completions"),
        ("POST", "/v1/organization/admin_api_keys"),
    ],
)
def test_the_rest_of_the_operators_account_is_out_of_reach(method: str, path: str) -> None:
    with pytest.raises(openai.Refusal) as caught:
        head(provider(), path, method=method)
    assert caught.value.code == "route_unknown"


def test_the_operators_own_engine_gets_what_a_replica_gets(key_file: Path) -> None:
    assert head(own(key_file=str(key_file)), "/v1/any thing", b"a=b", method="GET") == (
        b"GET /v1/any%20thing?a=b HTTP/1.1\r\nHost: 10.0.0.5:8000\r\nAuthorization: Bearer sk-provider-0123456789\r\n"
        + PASSED
        + b"x-request-id: req-1\r\ncontent-length: 7\r\n\r\n"
    )
    assert b"x-api-key" not in head(own(key_file=str(key_file)), "/v1/messages")
    assert own().lines() == b" HTTP/1.1\r\nHost: 10.0.0.5:8000\r\n"


# --- keys ------------------------------------------------------------------------------------------------------------
def test_a_key_is_read_anew_each_time(key_file: Path) -> None:
    place = provider(key_file=str(key_file))
    assert SECRET.encode() in head(place)
    key_file.write_text("sk-new")
    assert b"Bearer sk-new\r\n" in head(place)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"two words", "more than one word"),
        (b"a\r\nHost: evil", "more than one word"),
        ("schlüssel".encode(), "more than one word"),
        (b"x" * (LONGEST_KEY + 1), "is longer than"),
    ],
)
def test_a_file_that_holds_no_key_is_refused_without_repeating_it(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "hidden-name"
    file.write_bytes(content)
    _refused(file, says, content)


def test_a_file_that_cannot_be_read_is_refused_without_naming_it(tmp_path: Path) -> None:
    _refused(tmp_path / "hidden-name", "does not exist")
    directory = tmp_path / "hidden-name"
    directory.mkdir()
    _refused(directory, "is no plain file")
    pipe = tmp_path / "hidden-name-2"
    os.mkfifo(pipe)
    _refused(pipe, "is no plain file")
    _refused(tmp_path / ("hidden-name" * 100), "cannot be opened")
    _refused(tmp_path / "hidden-name\0", "cannot be opened")


def _refused(file: Path, says: str, content: bytes = b"") -> None:
    with pytest.raises(Unusable, match=says) as caught:
        read_key(str(file))
    assert "hidden-name" not in str(caught.value)
    assert not content.strip() or content.decode()[:5] not in str(caught.value)
    assert not caught.value.counts
    assert caught.value.__cause__ is None


# --- what it answers -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("status", [200, 201, 400, 405, 413, 422])
def test_an_answer_and_a_refusal_of_the_request_pass(status: int) -> None:
    check_status(status, None, 0.0)


@pytest.mark.parametrize(
    ("status", "counts", "soft"),
    [
        (401, True, False),
        (402, True, False),
        (403, True, True),
        (407, True, True),
        (500, True, True),
        (503, True, True),
        (301, False, True),
        (307, False, True),
        (404, False, True),
    ],
)
def test_what_says_that_the_provider_could_not_is_a_failure(status: int, counts: bool, soft: bool) -> None:
    with pytest.raises(ProviderFailed, match=str(status)) as caught:
        check_status(status, None, 0.0)
    assert (caught.value.status, caught.value.counts, caught.value.soft) == (status, counts, soft)


@pytest.mark.parametrize(
    ("retry_after", "wait_s"),
    [
        (None, 5.0),
        (b"", 5.0),
        (b"soon", 5.0),
        (b"-3", 5.0),
        (b"7", 7.0),
        (b"0", 1.0),
        (b"2.5", 2.5),
        (b"999999", 3600.0),
        (b"1e999", 3600.0),
        (formatdate(1_000_030, usegmt=True).encode(), 30.0),
        (formatdate(999_000, usegmt=True).encode(), 1.0),
        (b"\xff", 5.0),
    ],
)
def test_a_provider_that_is_full_says_for_how_long(retry_after: bytes | None, wait_s: float) -> None:
    with pytest.raises(Throttled) as caught:
        check_status(429, retry_after, 1_000_000.0)
    assert caught.value.retry_after_s == wait_s
    assert not caught.value.counts


@pytest.mark.parametrize(
    ("failure", "code", "retry_after_s"),
    [
        (Throttled(7.0), "rate_limited", 7),
        (ProviderFailed(401, "it refused this gateway's key or account (401)"), "engine_failed", None),
        (Unusable("its key file is empty"), "engine_failed", None),
    ],
)
def test_the_client_is_told_which_model_and_what_next(
    failure: UpstreamError, code: str, retry_after_s: int | None
) -> None:
    refusal = outside.refusal("m", failure)
    assert refusal is not None
    assert (refusal.code, refusal.retry_after_s) == (code, retry_after_s)
    assert "odel m " in refusal.message


def test_other_failures_are_told_as_those_of_any_engine() -> None:
    assert outside.refusal("m", ConnectFailed("refused")) is None
