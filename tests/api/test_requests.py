"""The API of requests: filters, pages, the record of one with its explanation and its story."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest
from drf_spectacular.generators import SchemaGenerator

from routing.explain import Attempt, Considered, Explained, Skipped, in_words, read
from tenants import finding
from tests import factories
from tests.api.cast import NOON, World, client, make_usage

WHY = Explained(
    asked="chat",
    considered=(Considered("a", 0.25), Considered("b", note="left alone")),
    attempts=(Attempt("a", 3.0, "it refused the connection"),),
    skipped=(Skipped("big", "no_endpoint"),),
)


def found(world: World, query: str = "", person: Any = None) -> list[str]:
    answer = client(person or world.vera).get(f"/api/v1/requests{query}")
    assert answer.status_code == 200, answer.content
    return [row["request_id"] for row in answer.json()["results"]]


def test_requests_are_found_by_what_is_known_of_them(world: World) -> None:
    make_usage(world.project, request_id="r2", status=502, error_code="engine_failed", at=NOON - timedelta(hours=1))
    make_usage(world.project, request_id="r3", status=429, model="big", at=NOON - timedelta(hours=2))
    make_usage(factories.make_project(), world.key, request_id="theirs", at=NOON - timedelta(hours=3))
    assert found(world) == ["req-1", "r2", "r3"]
    assert found(world, f"?key={world.key.pk}") == ["req-1"]
    assert found(world, f"?key={world.key.prefix}&project={world.project.pk}") == ["req-1"]
    assert found(world, "?result=failed") == found(world, "?code=engine_failed") == ["r2"]
    assert found(world, "?result=refused&model=big") == ["r3"]
    assert found(world, "?since=2026-11-29T10:30&until=2026-11-29T12:00:00Z") == ["r2"]
    assert found(world, "", world.root) == ["req-1", "r2", "r3", "theirs"]
    assert found(world, "", world.charlie) == []
    factories.make_model("big", aliases=["chat"])
    assert found(world, "?model=chat") == ["r3"]


def test_pages_are_walked_without_gap_while_requests_end(world: World) -> None:
    made = {make_usage(world.project, request_id=f"r{number}").request_id for number in range(7)} | {"req-1"}
    asks = client(world.alice)
    met: list[str] = []
    after: str | None = ""
    while after is not None:
        page = asks.get(f"/api/v1/requests?limit=3&after={after}").json()
        met += [row["request_id"] for row in page["results"]]
        make_usage(world.project, request_id=f"late-{len(met)}", at=NOON + timedelta(seconds=1))
        after = page["next"]
    assert (len(met), set(met)) == (8, made)


def test_a_page_that_is_not_full_may_have_a_next_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "LOOKED_THROUGH", 2)
    for number in range(6):
        make_usage(world.project, request_id=f"r{number}", at=NOON - timedelta(hours=1 + number))
    make_usage(world.project, request_id="broken", status=502, at=NOON - timedelta(days=1))
    asks = client(world.alice)
    first = asks.get("/api/v1/requests?result=failed").json()
    assert (first["results"], first["next"] is None) == ([], False)
    pages, after = 1, first["next"]
    while after is not None:
        page = asks.get(f"/api/v1/requests?result=failed&after={after}").json()
        pages, after = pages + 1, page["next"]
    assert (pages, [row["request_id"] for row in page["results"]]) == (3, ["broken"])


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("result=odd", "result"),
        ("since=soon", "since"),
        ("until=9999-12-31T23:59:59-14:00", "until"),
        ("since=2026-02-01&until=2026-01-01", "until"),
        ("project=x", "project"),
        ("key=nothing", "key"),
        ("limit=0", "limit"),
        ("limit=1000000000", "limit"),
        ("after=abc", "after"),
    ],
)
def test_a_wrong_query_is_named(world: World, query: str, field: str) -> None:
    answer = client(world.alice).get(f"/api/v1/requests?{query}")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], list(error["fields"])) == (400, "invalid", [field])


def test_what_is_not_theirs_is_not_there(world: World) -> None:
    asks = client(world.charlie)
    for path in ("requests/req-1", f"requests?project={world.project.pk}", f"requests?key={world.key.pk}"):
        assert asks.get(f"/api/v1/{path}").status_code == 404, path
    assert asks.get(f"/api/v1/requests?key={world.key.prefix}").status_code == 400


def test_one_request_says_what_was_decided_in_fields_and_in_words(world: World) -> None:
    row = make_usage(
        world.project, world.key, request_id="why", replica="a", cost=1234, explained=msgspec.to_builtins(WHY)
    )
    answer = client(world.vera).get("/api/v1/requests/why").json()
    assert answer["words"] == list(in_words(row, WHY, "EUR"))
    assert "It cost 0.00001234 EUR." in answer["words"]
    assert read(answer["explained"]) == WHY
    assert answer["explained"]["considered"][0] == {"replica": "a", "score": 0.25, "note": ""}
    assert (answer["cost"], answer["result"], answer["cached_tokens"]) == (1234, "ok", None)
    assert "user" not in answer


@pytest.mark.parametrize("stored", [None, {"attempts": "another version"}])
def test_an_explanation_that_is_gone_is_null_and_the_words_remain(world: World, stored: object) -> None:
    make_usage(world.project, request_id="old", explained=stored)
    answer = client(world.vera).get("/api/v1/requests/old").json()
    assert answer["explained"] is None
    assert answer["words"][0] == "It asked for model smollm2."


def test_lists_leave_explanations_out(world: World) -> None:
    make_usage(world.project, request_id="why", explained=msgspec.to_builtins(WHY))
    for path in ("requests", "usage"):
        (row, *_) = client(world.vera).get(f"/api/v1/{path}").json()["results"]
        assert {"explained", "words"}.isdisjoint(row)


def test_the_schema_says_what_an_explanation_holds(world: World) -> None:
    schema = SchemaGenerator().get_schema(request=None, public=True)  # type: ignore[no-untyped-call]
    shapes = schema["components"]["schemas"]
    assert set(shapes["Explained"]["properties"]) == set(Explained.__struct_fields__)
    assert set(shapes["Considered"]["properties"]) == set(Considered.__struct_fields__)
    assert set(shapes["Attempt"]["properties"]) == set(Attempt.__struct_fields__)
    assert set(shapes["Skipped"]["properties"]) == set(Skipped.__struct_fields__)
    assert {"explained", "words", "result"} <= set(shapes["Request"]["properties"])
