"""What people who want in, or want it broken, send to every page and route: odd methods, texts and bodies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from django.test import Client
from django.utils import timezone

from agent import protocol
from catalog.models import Model
from nodes import actions as node_actions
from nodes import intake
from nodes.models import Command, Node
from tenants import actions
from tenants.audit import SYSTEM
from tests import hardware
from tests.pages import rows
from tests.pages.test_access import CLUSTER, World, world

__all__ = ["world"]

pytestmark = pytest.mark.django_db
METHODS = ("HEAD", "OPTIONS", "TRACE", "PUT", "PATCH", "DELETE", "PROPFIND")
TEXTS = (
    "' OR '1'='1",
    "x'; SELECT pg_sleep(5)--",
    '" UNION SELECT digest FROM tenants_key--',
    "%",
    "_",
    "\N{NULL}",
    "a\N{NULL}b",
    "\x1b[31m",
    "<script>alert(1)</script>",
    "{{ 7|add:7 }}{% now 'Y' %}",
    "=HYPERLINK(1)",
    "../../etc/passwd",
    "//evil.example",
    "9" * 400,
    "-1",
    "1e999",
    "x" * 20_000,
    "\N{RIGHT-TO-LEFT OVERRIDE}",
)
QUERIES = (
    *("show", "after", "before", "model", "project", "key", "next", "limit", "since", "prefix", "ordering", "node"),
    *("id", "until", "code", "result"),
)
API = (
    *("me", "tokens", "projects", "keys", "usage", "usage/totals", "catalog", "catalog/versions", "models", "summary"),
    *(
        "nodes",
        "replicas",
        "events",
        "requests",
        "tokens/1/revoke",
        "keys/1/revoke",
        "nodes/node1/cordon",
        "models/smollm2",
    ),
)


@pytest.fixture
def root(client: Client, world: World) -> Client:
    client.raise_request_exception = False
    client.force_login(world.people["root"])
    return client


def addresses(world: World) -> Iterator[str]:
    yield from (url for name, url in world.urls.items() if name != "sign-out")
    yield from (f"/api/v1/{path}" for path in API)


@pytest.mark.parametrize("method", METHODS)
def test_no_odd_method_breaks_or_changes_anything(root: Client, world: World, method: str) -> None:
    for url in addresses(world):
        answer = root.generic(method, url, b"", content_type="application/x-www-form-urlencoded")
        assert answer.status_code < 500, url
    world.key.refresh_from_db()
    assert world.key.revoked_at is None


@pytest.mark.parametrize("text", TEXTS)
def test_no_query_breaks_a_page_or_is_markup_in_it(root: Client, world: World, text: str) -> None:
    query = dict.fromkeys(QUERIES, text)
    for page in ("", "keys/", "requests/", "nodes/", "models/", "replicas/", "dashboard/", "sign-in/", "account/"):
        answer = root.get(f"/{page}", query)
        assert answer.status_code in (200, 302), page
        assert b"<script>alert" not in answer.content
        assert "evil.example" not in answer.get("Location", "")
    for path in API:
        for name in QUERIES:
            if path in ("keys", "usage", "usage/totals", "events", "requests") or name == "limit":
                assert root.get(f"/api/v1/{path}", {name: text}).status_code < 500, (path, name)


@pytest.mark.parametrize("place", ["nodes", "models", "replicas", "requests", "first-sign-in", "api/v1/nodes"])
def test_no_path_breaks_a_page(root: Client, place: str) -> None:
    for text in TEXTS:
        assert root.get(f"/{place}/{quote(text, safe='')}/").status_code in (301, 404), text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b'"x"',
        b"{",
        b"\xff\xfe",
        b'\xef\xbb\xbf{"name": "x"}',
        b'{"name": "\\ud800"}',
        b'{"name": "\\u0000"}',
        b'{"name": {"a": 1}, "project": [1], "scopes": 7}',
        b'{"project": 1e400, "name": true}',
        b'{"project": 99999999999999999999999, "name": "x", "expires_at": "0001-01-01T00:00:00+14:00"}',
        b'{"name": NaN}',
        b"[" * 50_000 + b"]" * 50_000,
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        json.dumps({"name": "x" * 500_000, "source": "\0", "models": [{"name": "\x1b[2J"}]}).encode(),
    ],
)
def test_no_body_breaks_a_route(root: Client, world: World, body: bytes) -> None:
    for path in API:
        for method in ("POST", "PUT"):
            answer = root.generic(method, f"/api/v1/{path}", body, content_type="application/json")
            assert answer.status_code < 500, (method, path)
            assert answer.status_code < 400 or "fields" in answer.json()["error"], (method, path)


@pytest.mark.parametrize(
    "text", ["Bearer ' OR '1'='1", "Bearer %", "Bearer at-%", "Bearer \xe9\xff", "Bearer at-" + "x" * 9]
)
def test_no_token_is_a_query(world: World, text: str) -> None:
    answer = Client(headers={"Authorization": text}).get("/api/v1/me")
    assert answer.status_code == 401
    assert f"Bearer {text}" not in answer.content.decode()


def test_numbers_of_other_teams_lead_nowhere(client: Client, world: World) -> None:
    """Every address with a number or name in it, walked by somebody of another team with a token of every scope."""
    _, secret = actions.make_api_token(user=world.people["charlie"], name="t", scopes=actions.SCOPES, actor=SYSTEM)
    asks = Client(headers={"Authorization": f"Bearer {secret}"})
    key, project = world.key.pk, world.key.project_id
    paths: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", f"keys/{key}", {}),
        ("POST", f"keys/{key}/revoke", {}),
        ("GET", f"projects/{project}", {}),
        ("POST", "keys", {"project": project, "name": "mine"}),
        ("GET", f"usage?project={project}", {}),
        ("GET", f"usage/totals?project={project}", {}),
        ("GET", "requests/req-0", {}),
    ]
    for method, path, body in paths:
        answer = asks.generic(method, f"/api/v1/{path}", json.dumps(body), content_type="application/json")
        assert answer.status_code == 404, path
        assert "evals" not in answer.content.decode()
    client.force_login(world.people["charlie"])
    for query in (f"project={project}", f"key={key}", "model=smollm2"):
        assert "req-0" not in client.get(f"/requests/?{query}").content.decode()


def test_a_clicked_twice_form_makes_what_it_says_each_time_and_shows_each(client: Client, world: World) -> None:
    client.force_login(world.people["bob"])
    pages = [client.post("/keys/make/", {"name": "laptop"}).content.decode() for _ in range(2)]
    assert all("sk-" in page for page in pages)
    assert pages[0] != pages[1]


def test_forms_beyond_their_bounds_are_refused(client: Client, world: World) -> None:
    client.raise_request_exception = False
    client.force_login(world.people["bob"])
    assert client.post("/keys/make/", {f"f{number}": "x" for number in range(1500)}).status_code == 400
    assert client.post("/keys/make/", {"name": "x" * 3_000_000}).status_code == 400
    broken = "multipart/form-data; boundary=x"
    assert client.post("/keys/make/", b"--x\r\nnothing", content_type=broken).status_code in (200, 400)
    assert client.post("/keys/make/", b"x", content_type="multipart/form-data").status_code == 400


def test_names_that_break_out_of_a_command_do_not(client: Client, world: World) -> None:
    Model.objects.update(name="""a'; rm -rf ~; "b""")
    client.force_login(world.people["bob"])
    page = client.post("/keys/make/", {"name": "x"}).content.decode().replace("&#x27;", "'").replace("&quot;", '"')
    assert """{"model": "a'\\''; rm -rf ~; \\"b",""" in page
    assert """model="a'; rm -rf ~; \\"b",""" in page


def test_a_cluster_with_names_of_every_kind_is_drawn(client: Client, world: World) -> None:
    rows.make_cluster(3)
    client.force_login(world.people["root"])
    for url in ("/dashboard/", "/nodes/", "/models/", "/replicas/"):
        assert client.get(url).status_code == 200


MARKUP = "<img src=x onerror=alert(1)>\u202e\u2066{{ 7 }}\x1b[2J"


def hostile(part: object, kept: frozenset[str] = frozenset()) -> object:
    """`part` of a message with MARKUP at the end of every text that may be any text."""
    if isinstance(part, dict):
        return {name: value if name in kept else hostile(value, kept) for name, value in part.items()}
    if isinstance(part, list):
        return [hostile(value, kept) for value in part]
    return f"{part[:20]}{MARKUP}" if isinstance(part, str) else part


def test_nothing_that_an_agent_says_of_its_machine_is_markup_or_turns_the_text(client: Client, world: World) -> None:
    kept = frozenset({"uuid", "peers", "slice_of", "gpu_class", "state", "engine", "link_layer", "name", "adapters"})
    told = msgspec.json.decode(msgspec.json.encode(hardware.INVENTORY))
    inventory = msgspec.convert(hostile(told, kept), protocol.Inventory)
    status = protocol.ShardState(replica="smollm2-1", state="failed", reason=f"so{MARKUP}\nready  all is well")
    register = protocol.Register(
        node="node1",
        agent_version="1",
        machine_id="m",
        address="127.0.0.1",
        inventory=inventory,
        labels={"rack": "<u>x"},
    )
    node = Node.objects.get(pk="node1")
    node.machine_id = ""
    node.save()
    fit = intake.fitted(protocol.decode_up(protocol.encode(register)))
    assert isinstance(fit, protocol.Register)
    now = timezone.now()
    node_actions.register_node(node=node, register=fit, connection="c", now=now)
    heard = intake.fitted(protocol.ShardStatus(status=status, tail=f"tail{MARKUP}"))
    assert isinstance(heard, protocol.ShardStatus)
    node_actions.shard_status(node="node1", connection="c", report=heard, now=now)
    ack = intake.fitted(protocol.Ack(id=1, ok=False, error=f"no{MARKUP}"))
    assert isinstance(ack, protocol.Ack)
    Command.objects.create(pk=1, node=node, body={"type": "fetch", "source": "/x"})
    node_actions.acknowledge(node="node1", ack=ack, now=now)
    client.force_login(world.people["root"])
    seen = ""
    for name in CLUSTER:
        page = client.get(world.urls[name])
        assert page.status_code == 200, name
        text = page.content.decode()
        assert "<img src=x" not in text, name
        for turned in ("\u202e", "\u2066", "\x1b", "<u>x"):
            assert turned not in text, (name, turned)
        seen += text
    assert "&lt;img src=x onerror=alert(1)&gt;" in seen
    for path in ("nodes/node1", "summary", "events", "replicas/smollm2-1", "fabrics"):
        assert "\u202e" not in json.loads(client.get(f"/api/v1/{path}").content).__repr__()
