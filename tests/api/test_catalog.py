from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from catalog import actions, yaml_io
from catalog.defaults import default_catalog
from catalog.models import CatalogVersion, Model
from tenants.audit import SYSTEM
from tenants.models import AuditEntry
from tests.api.cast import World, client

M = {"name": "m", "source": "/m/m.gguf", "profiles": [{"name": "cpu", "engine": "llamacpp"}]}


@pytest.fixture
def asks(world: World) -> Client:
    return client(world.root, "read", "write")


def put(asks: Client, path: str, body: Any, content_type: str = "application/json") -> Any:
    return asks.put(f"/api/v1/{path}", body, content_type=content_type)


def test_the_catalog_is_exported_as_yaml_and_taken_back_unchanged(asks: Client) -> None:
    actions.apply_catalog(models=default_catalog(), actor=SYSTEM)
    answer = asks.get("/api/v1/catalog")
    assert answer.headers["Content-Type"] == "application/yaml; charset=utf-8"
    assert yaml_io.parse(answer.content.decode()).models == default_catalog()
    again = put(asks, "catalog", answer.content, "application/yaml")
    assert (again.status_code, again.json()["version"], again.json()["changed"]) == (200, 1, [])


def test_a_file_is_taken_whole_with_a_note_or_not_at_all(asks: Client) -> None:
    text = "models:\n- name: a\n  source: /a\n  profiles: [{name: cpu, engine: llamacpp}]\n"
    done = put(asks, "catalog?note=why", text, "application/yaml").json()
    assert (done["version"], done["added"]) == (1, ["a"])
    version = CatalogVersion.objects.get()
    assert (version.made_by, version.note) == ("root", "why")
    bad = put(asks, "catalog", text.replace("cpu,", "cpu, tp: 2,"), "application/yaml")
    error = bad.json()["error"]
    assert (bad.status_code, error["code"]) == (400, "catalog_refused")
    assert error["fields"] == {"models.a.profiles.cpu.tp": ["llama.cpp has no parallel ranks; set tp to 1, not 2."]}
    assert error["problems"][0]["line"] == 4
    assert [model.name for model in Model.objects.snapshot()] == ["a"]


def test_checking_changes_nothing(asks: Client) -> None:
    done = put(asks, "catalog?check=true", {"models": [{**M, "fallbacks": ["m"]}]})
    assert (done.status_code, done.json()["version"]) == (200, 0)
    assert done.json()["notices"][0]["field"] == "fallbacks"
    assert put(asks, "catalog?check=true", {"models": [{**M, "source": ""}]}).status_code == 400
    assert not Model.objects.exists()


@pytest.mark.parametrize("body", [b"\xff\xfe", b"models: [", b"", b"a: *b"])
def test_text_that_is_no_catalog_is_refused(asks: Client, body: bytes) -> None:
    answer = put(asks, "catalog", body, "application/yaml")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_one_model_is_put_read_renamed_and_removed(asks: Client) -> None:
    made = put(asks, "models/org/m", {key: value for key, value in M.items() if key != "name"})
    assert (made.status_code, made.json()["added"]) == (201, ["org/m"])
    found = asks.get("/api/v1/models/org/m").json()
    assert found == {**M, "name": "org/m", "scaling": {"min": 0, "max": 0}}
    again = put(asks, "models/org/m", {**found, "name": "mm"})
    assert (again.status_code, again.json()["removed"], again.json()["added"]) == (200, ["org/m"], ["mm"])
    assert asks.get("/api/v1/models/org/m").status_code == 404
    assert [model["name"] for model in asks.get("/api/v1/models").json()["results"]] == ["mm"]
    assert put(asks, "models/gone", {**found, "name": "other"}).status_code == 404
    assert asks.delete("/api/v1/models/mm").json()["removed"] == ["mm"]
    assert asks.delete("/api/v1/models/mm").status_code == 404
    assert {entry.via for entry in AuditEntry.objects.filter(action="change catalog")} == {"api"}


def test_a_model_that_others_fall_back_on_stays(asks: Client) -> None:
    put(asks, "models/m", M)
    put(asks, "models/n", {**M, "name": "n", "fallbacks": ["m"]})
    answer = asks.delete("/api/v1/models/m")
    assert (answer.status_code, list(answer.json()["error"]["fields"])) == (400, ["models.n.fallbacks"])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({**M, "sauce": 1}, "models.m.sauce"),
        ({**M, "source": 3}, "models.m.source"),
        ({**M, "profiles": [{"name": "a", "args": ["\ud800"], "engine": "llamacpp"}]}, "models.m.profiles.a.args"),
        ([], "body"),
        ({**M, "scaling": {"min": 2, "max": 1}}, "models.m.scaling.max"),
    ],
)
def test_a_wrong_field_of_a_model_is_named(asks: Client, body: Any, field: str) -> None:
    answer = put(asks, "models/m", body)
    assert (answer.status_code, list(answer.json()["error"]["fields"])) == (400, [field])


def test_versions_are_listed_read_and_rolled_back_to(asks: Client) -> None:
    put(asks, "models/m", M)
    put(asks, "catalog", {"models": []})
    listed = asks.get("/api/v1/catalog/versions?limit=1").json()
    assert [(row["number"], row["made_by"]) for row in listed["results"]] == [(2, "root")]
    assert [
        row["number"] for row in asks.get(f"/api/v1/catalog/versions?after={listed['next']}").json()["results"]
    ] == [1]
    assert "name: m" in asks.get("/api/v1/catalog/versions/1").json()["text"]
    assert asks.post("/api/v1/catalog/versions/1/roll-back").json()["version"] == 3
    assert asks.post("/api/v1/catalog/versions/9/roll-back").status_code == 404
    CatalogVersion.objects.filter(number=1).update(text="models: [{}]")
    assert asks.post("/api/v1/catalog/versions/1/roll-back").json()["error"]["code"] == "catalog_refused"
    assert [model.name for model in Model.objects.snapshot()] == ["m"]
