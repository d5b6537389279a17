from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from django.test import Client

from catalog import actions, yaml_io
from catalog.defaults import default_catalog
from catalog.models import CatalogVersion, Model
from tenants.audit import SYSTEM
from tenants.models import AuditEntry
from tests.api.cast import World, client
from tests.stubs import tiny_gguf

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


# --- adapters --------------------------------------------------------------------------------------------------------
@pytest.fixture
def tiny(asks: Client, tmp_path: Path) -> dict[str, Any]:
    model = {**M, "name": "org/m", "source": str(tiny_gguf.write_model(tmp_path / "tiny.gguf"))}
    assert put(asks, "models/org/m", model).status_code == 201
    return model


def post(asks: Client, body: Any, model: str = "org/m") -> Any:
    return asks.post(f"/api/v1/models/{model}/adapters", body, content_type="application/json")


def test_an_adapter_is_added_listed_and_removed(asks: Client, tiny: Any, tmp_path: Path) -> None:
    red = {"name": "red", "source": str(tiny_gguf.write_adapter(tmp_path / "red.gguf"))}
    done = post(asks, red)
    assert (done.status_code, done.json()["version"], done.json()["notices"]) == (201, 2, [])
    told = post(asks, {"name": "blue", "source": "/only/on/nodes.gguf"}).json()["notices"]
    assert told[0]["field"] == "adapters"
    assert "each node looks at it before it starts an engine" in told[0]["text"]
    assert [each["name"] for each in asks.get("/api/v1/models/org/m/adapters").json()["results"]] == ["red", "blue"]
    gone = asks.delete("/api/v1/models/org/m/adapters?adapter=blue")
    assert (gone.status_code, gone.json()["changed"]) == (200, ["org/m"])
    assert asks.get("/api/v1/models/org/m").json()["adapters"] == [red]
    assert AuditEntry.objects.filter(action="change catalog", via="api").count() == 4


def test_an_adapter_that_is_none_for_the_model_is_refused(asks: Client, tiny: Any, tmp_path: Path) -> None:
    other = str(tiny_gguf.write_adapter(tmp_path / "other.gguf", architecture="qwen2"))
    answer = post(asks, {"name": "red", "source": other})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], list(error["fields"])) == (
        400,
        "catalog_refused",
        ["models.org/m.adapters"],
    )
    assert "made for qwen2, and the model is llama" in error["message"]
    again = put(asks, "catalog", {"models": [{**tiny, "adapters": [{"name": "red", "source": other}]}]})
    assert again.json()["error"]["message"] == error["message"]
    checked = put(asks, "catalog?check=1", {"models": [{**tiny, "adapters": [{"name": "red", "source": other}]}]})
    assert checked.json()["error"]["message"] == error["message"]
    assert "adapters" not in asks.get("/api/v1/models/org/m").json()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ([], "models.org/m"),
        ({"name": "red"}, "models.org/m.adapters"),
        ({"name": 3, "source": "/a"}, "models.org/m.adapters.name"),
        ({"name": "red", "source": "/a", "rank": 4}, "models.org/m.adapters.rank"),
        ({"name": "org/m", "source": "/a"}, "models.org/m.adapters"),
        ({"name": "", "source": "/a"}, "models.org/m.adapters"),
        ({"name": "red\r\nX: 1", "source": "/a"}, "models.org/m.adapters"),
    ],
)
def test_what_is_no_adapter_is_told_by_its_field(asks: Client, tiny: Any, body: Any, field: str) -> None:
    answer = post(asks, body)
    assert answer.status_code == 400
    assert next(iter(answer.json()["error"]["fields"])).startswith(field)


def test_adapters_of_a_model_that_is_not_there_are_not_there(asks: Client, world: World) -> None:
    assert asks.get("/api/v1/models/a%00b").status_code == 404
    assert post(asks, {"name": "a", "source": "/a"}, "gone").status_code == 404
    assert asks.get("/api/v1/models/gone/adapters").status_code == 404
    assert asks.delete("/api/v1/models/gone/adapters?adapter=a").status_code == 404
    assert client(world.root, "read").post("/api/v1/models/m/adapters", {}).status_code == 403
    assert client(world.alice, "read", "write").get("/api/v1/models/m/adapters").status_code == 404


@pytest.mark.parametrize("name", ["\u4e2d\u6587\u6a21\u578b", "org/name:tag@rev", "a b+c%2F?#", "x" * 200])
def test_a_model_of_any_name_is_put_read_and_removed(asks: Client, name: str) -> None:
    where = f"models/{quote(name, safe='')}"
    assert put(asks, where, {**M, "name": name}).status_code == 201
    assert asks.get(f"/api/v1/{where}").json()["name"] == name
    assert asks.get(f"/api/v1/{where}/adapters").json()["results"] == []
    assert asks.delete(f"/api/v1/{where}").json()["removed"] == [name]


@pytest.mark.parametrize("name", ["a\r\nX-Evil: 1", "x" * 300, "..", "a//b", "/a", "a/adapters", "a\x00", "\u202ea"])
def test_a_name_that_no_address_or_header_could_hold_is_refused(asks: Client, name: str) -> None:
    answer = put(asks, "catalog", {"models": [{**M, "name": name}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["problems"][0]["field"] == "name"
