from __future__ import annotations

from datetime import timedelta
from typing import Any

import httpx
import pytest
from django.test import Client
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries
from pytest_django.live_server_helper import LiveServer

from tenants import actions
from tenants.audit import SYSTEM
from tenants.keys import digest
from tenants.models import ApiToken, AuditEntry, Key
from tests import factories
from tests.api.cast import NOON, World, client, make_usage


def post(asks: Client, path: str, body: Any) -> Any:
    return asks.post(f"/api/v1/{path}", body, content_type="application/json")


# --- tokens ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change",
    [
        {"expires_at": NOON - timedelta(days=400)},
        {"revoked_at": NOON},
        {"digest": "0" * 64},
    ],
)
def test_a_token_that_is_over_opens_nothing(world: World, change: dict[str, Any]) -> None:
    asks = client(world.alice, "read")
    assert asks.get("/api/v1/me").status_code == 200
    ApiToken.objects.update(**change)
    answer = asks.get("/api/v1/me")
    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, 'Bearer realm="llmgw"')
    assert "expired or was revoked" in answer.json()["error"]["message"]


def test_a_person_who_is_out_is_out_with_their_tokens_and_sessions(world: World) -> None:
    by_token, by_session = client(world.alice, "read"), client(world.alice)
    world.alice.is_active = False
    world.alice.save()
    assert by_token.get("/api/v1/me").status_code == 401
    assert by_session.get("/api/v1/me").status_code == 401


@pytest.mark.parametrize("text", ["Bearer", "Bearer ", "Bearer sk-abc", "Bearer at-" + "x" * 500, "Bearer at-\xe9"])
def test_what_is_no_token_is_refused_and_never_repeated(world: World, text: str) -> None:
    answer = Client(headers={"Authorization": text}).get("/api/v1/me")
    assert answer.status_code == 401
    assert "abc" not in answer.content.decode()


def test_another_scheme_is_left_to_the_session(world: World) -> None:
    assert Client(headers={"Authorization": "Basic eDp5"}).get("/api/v1/me").status_code == 401


def test_last_use_is_noted_at_most_once_a_minute(
    world: World, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    asks = client(world.charlie, "read")
    asks.get("/api/v1/me")
    assert ApiToken.objects.get().last_used_at is not None
    with django_assert_num_queries(2):  # the token with its person; the teams
        asks.get("/api/v1/me")


def test_a_token_hands_on_no_more_than_it_has(world: World) -> None:
    asks = client(world.alice, "write")
    refused = post(asks, "tokens", {"name": "t", "scopes": ["read", "write"]})
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        403,
        "Your own token lacks read and cannot hand it on.",
    )
    made = post(client(world.alice), "tokens", {"name": "t", "scopes": ["read"]}).json()
    assert ApiToken.objects.get(digest=digest(made["secret"])).scopes == ["read"]
    own = client(world.alice)
    assert made["secret"] not in own.get("/api/v1/tokens").content.decode()
    assert post(client(world.charlie), f"tokens/{made['token']['id']}/revoke", {}).status_code == 404
    assert post(own, f"tokens/{made['token']['id']}/revoke", {}).json()["revoked_at"]
    assert Client(headers={"Authorization": f"Bearer {made['secret']}"}).get("/api/v1/me").status_code == 401


def test_a_session_changes_nothing_without_its_csrf_token(world: World) -> None:
    asks = Client(enforce_csrf_checks=True)
    asks.force_login(world.alice)
    answer = post(asks, "keys", {"project": world.project.pk, "name": "n"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
    assert Key.objects.count() == 1


def test_me_says_who_where_and_within_what(world: World) -> None:
    assert client(world.vera, "read").get("/api/v1/me").json() == {
        "id": world.vera.pk,
        "username": "vera",
        "email": "",
        "is_operator": False,
        "teams": [{"name": "Blue", "role": "viewer"}],
        "scopes": ["read"],
    }


# --- keys ------------------------------------------------------------------------------------------------------------
def test_a_key_is_made_shown_once_listed_by_prefix_and_revoked(world: World) -> None:
    asks = client(world.alice, "read", "write")
    ends = timezone.now() + timedelta(days=1)
    body = {"project": world.project.pk, "name": "ci", "models_allowed": ["smollm2"], "expires_at": ends.isoformat()}
    answer = post(asks, "keys", body)
    assert answer.status_code == 201
    secret, made = answer.json()["secret"], answer.json()["key"]
    row = Key.objects.get(pk=made["id"])
    assert (row.digest, row.owner, row.models_allowed, row.expires_at) == (
        digest(secret),
        world.alice,
        ["smollm2"],
        ends,
    )
    listed = asks.get(f"/api/v1/keys?prefix={made['prefix']}")
    assert [key["id"] for key in listed.json()["results"]] == [made["id"]]
    assert secret not in listed.content.decode()
    assert row.digest not in listed.content.decode()
    assert post(asks, f"keys/{row.pk}/revoke", {}).json()["revoked_at"]
    assert post(asks, f"keys/{row.pk}/revoke", {}).status_code == 200
    audit = AuditEntry.objects.order_by("pk").filter(action__contains="key")
    assert [(entry.action, entry.actor_name, entry.via) for entry in audit] == [
        ("make key", "alice", "api"),
        ("revoke key", "alice", "api"),
    ]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "a\0b"}, "name"),
        ({"name": "x" * 81}, "name"),
        ({"name": None}, "name"),
        ({"project": "x"}, "project"),
        ({"project": 10**30}, "project"),
        ({"project": None}, "project"),
        ({"models_allowed": "smollm2"}, "models_allowed"),
        ({"models_allowed": [["x"]]}, "models_allowed.0"),
        ({"expires_at": "tomorrow"}, "expires_at"),
        ({"expires_at": "2020-01-01T00:00:00Z"}, "expires_at"),
    ],
)
def test_a_wrong_field_is_named(world: World, change: dict[str, Any], field: str) -> None:
    answer = post(client(world.alice), "keys", {"project": world.project.pk, "name": "n", **change})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], list(error["fields"])) == (400, "invalid", [field])
    assert error["message"].startswith(f"{field}: ")


@pytest.mark.parametrize("body", [b"", b"[]", b"3", b"{", b'{"name": NaN}', b"\xff", b"[" * 100_000, b"9" * 5000])
def test_a_body_that_is_no_object_is_refused_in_the_envelope(world: World, body: bytes) -> None:
    answer = client(world.alice).generic("POST", "/api/v1/keys", body, content_type="application/json")
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"code", "message", "fields"}


def test_a_body_beyond_the_bound_or_of_another_kind_is_refused(world: World) -> None:
    asks = client(world.alice)
    for each in (asks, client(world.alice, "write")):
        answer = each.generic("POST", "/api/v1/keys", b" " * (2 * 1024 * 1024 + 1), content_type="application/json")
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    answer = asks.post("/api/v1/keys", {"name": "n"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    answer = asks.post("/api/v1/keys", {}, "application/json", headers={"Transfer-Encoding": "chunked"})
    assert answer.status_code == 400  # its length is there too: the body was read, and lacks fields
    answer = asks.put("/api/v1/keys", {}, content_type="application/json")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


def test_a_body_without_a_length_is_not_taken_for_an_empty_one(world: World, live_server: LiveServer) -> None:
    _, secret = actions.make_api_token(user=world.alice, name="t", scopes=["write"], actor=SYSTEM)
    answer = httpx.post(
        f"{live_server.url}/api/v1/keys",
        content=iter([b'{"name": "n"}']),
        headers={"Authorization": f"Bearer {secret}", "Content-Type": "application/json"},
        trust_env=False,
        timeout=60,
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (411, "length_required")


# --- pages -----------------------------------------------------------------------------------------------------------
def test_pages_follow_each_other_without_gap_while_keys_are_made(
    world: World, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    made = {factories.make_key(project=world.project)[0].pk for _ in range(7)} | {world.key.pk}
    asks = client(world.alice)
    seen: list[int] = []
    after = ""
    while True:
        with django_assert_num_queries(3):  # session, person, the page
            page = asks.get(f"/api/v1/keys?limit=3&after={after}").json()
        seen += [key["id"] for key in page["results"]]
        factories.make_key(project=world.project)
        after = page["next"]
        if after is None:
            break
    assert set(seen) == made
    assert seen == sorted(seen, reverse=True)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("keys?limit=0", "limit"),
        ("keys?limit=-1", "limit"),
        ("keys?limit=1001", "limit"),
        ("keys?limit=%D9%A1", "limit"),
        ("keys?after=abc", "after"),
        ("usage?after=abc", "after"),
        ("usage?since=soon", "since"),
        ("usage?since=0001-01-01T00:00:00%2B14:00", "since"),
        ("usage?until=9999-12-31T23:59:59-14:00", "until"),
        ("usage/totals?until=9999-12-31T23:59:59-14:00", "until"),
        ("usage?project=x", "project"),
        ("usage/totals?since=2000-01-01", "since"),
    ],
)
def test_a_wrong_query_is_named(world: World, path: str, field: str) -> None:
    answer = client(world.alice).get(f"/api/v1/{path}")
    assert (answer.status_code, list(answer.json()["error"]["fields"])) == (400, [field])


@pytest.mark.parametrize("path", ["keys?after=99999999999999999999999", "keys?prefix=%00sk", "usage?model=%00"])
def test_a_strange_query_breaks_nothing(world: World, path: str) -> None:
    assert client(world.alice).get(f"/api/v1/{path}").status_code == 200


# --- usage -----------------------------------------------------------------------------------------------------------
def test_usage_is_summed_filtered_and_paged(world: World) -> None:
    other = make_usage(factories.make_project(), request_id="theirs")
    for number in range(4):
        unknown = {"prompt_tokens": None} if number == 3 else {}
        make_usage(world.project, request_id=f"r{number}", status=500 if number == 0 else 200, model="big", **unknown)
    asks = client(world.vera)
    page = asks.get("/api/v1/usage?limit=3").json()
    rest = asks.get(f"/api/v1/usage?limit=3&after={page['next']}").json()
    ids = [row["request_id"] for row in page["results"] + rest["results"]]
    assert (ids, rest["next"]) == (["r3", "r2", "r1", "r0", "req-1"], None)
    assert page["results"][0]["prompt_tokens"] is None
    totals = asks.get("/api/v1/usage/totals?since=2026-11-29&until=2026-11-30&model=big").json()
    assert totals == {
        "since": "2026-11-29T00:00:00Z",
        "until": "2026-11-30T00:00:00Z",
        "requests": 4,
        "failed": 1,
        "prompt_tokens": 9,
        "completion_tokens": 16,
    }
    assert asks.get(f"/api/v1/requests/{other.request_id}").status_code == 404
    assert client(world.root).get("/api/v1/usage?until=2026-11-29T11:00:00%2B00:00").json()["results"] == []


def test_a_request_says_what_became_of_it(world: World) -> None:
    found = client(world.vera).get("/api/v1/requests/req-1").json()
    assert (found["project_name"], found["key_prefix"], found["status"]) == ("Apps", world.key.prefix, 200)
    assert "user" not in found


def test_what_nobody_expected_is_told_without_its_insides(world: World, caplog: pytest.LogCaptureFixture) -> None:
    from rest_framework.views import APIView

    from tenants.api_rules import explain_error

    request = client(world.alice).get("/api/v1/me").wsgi_request
    answer = explain_error(RuntimeError("secret detail"), {"request": APIView().initialize_request(request)})
    assert (answer.status_code, answer.data["error"]["code"]) == (500, "internal")
    assert "secret" not in str(answer.data)
    assert "secret detail" in caplog.text


def test_actions_through_the_command_line_are_recorded_as_such(world: World) -> None:
    _, secret = actions.make_api_token(user=world.alice, name="ctl", scopes=["write"], actor=SYSTEM)
    asks = Client(headers={"Authorization": f"Bearer {secret}", "User-Agent": "llmgw-ctl"})
    post(asks, f"keys/{world.key.pk}/revoke", {})
    assert AuditEntry.objects.get(action="revoke key").via == "cli"
