"""What pages say, how many queries they take, and how fast they are with many rows."""

from __future__ import annotations

import cProfile
import re
from datetime import timedelta

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

import catalog.models
from nodes.models import Backoff, Event, Node, Replica, ReplicaLoad, Shard
from tenants import actions, rollup
from tenants.audit import SYSTEM
from tenants.models import Budget, Key, Role, User
from tests import factories
from tests.pages import rows
from tests.tenants.test_rollup import of

pytestmark = pytest.mark.django_db


@pytest.fixture
def root(client: Client) -> User:
    user = rows.make_operator()
    client.force_login(user)
    return user


@pytest.fixture
def bob(client: Client) -> User:
    team = factories.make_team("Research")
    factories.make_project("evals", team=team)
    user = rows.make_member(team, Role.MEMBER, "bob")
    client.force_login(user)
    return user


def text_of(client: Client, url: str, **headers: str) -> str:
    response = client.get(url, headers=headers)
    assert response.status_code == 200
    return response.content.decode()


# --- home -------------------------------------------------------------------------------------------------------------
def test_the_landing_page_shows_address_models_and_a_request(client: Client, settings: object) -> None:
    factories.make_model()
    factories.make_model("later", position=1)
    factories.make_replica("smollm2-1")
    page = text_of(client, "/")
    assert "/v1/chat/completions" in page
    assert re.search(r'smollm2</th><td class="num"><span class="state ok">ready', page)
    assert "not running" in page
    assert "&quot;smollm2&quot;" in page or '"smollm2"' in page


def test_a_forged_host_appears_on_no_page(client: Client) -> None:
    for url in ("/", "/about/", "/sign-in/", "/keys/"):
        response = client.get(url, headers={"host": "evil.example", "x-forwarded-host": "evil.example"})
        assert b"evil.example" not in response.content
        assert "evil.example" not in response.get("Location", "")


def test_the_checklist_ticks_itself(client: Client, root: User) -> None:
    def done() -> int:
        return text_of(client, "/").count('class="done"')

    assert done() == 0
    factories.make_node("node1")
    assert done() == 1
    factories.make_model()
    assert done() == 2
    key, _ = factories.make_key()
    assert done() == 3
    rows.make_usage(key=key, status=401)
    assert done() == 3
    rows.make_usage(key=key)
    assert "First steps" not in text_of(client, "/")


def test_a_member_is_asked_only_for_what_members_do(client: Client, bob: User) -> None:
    page = text_of(client, "/")
    assert "Make a key" in page
    assert "Connect a node" not in page


def test_a_member_sees_only_models_of_their_projects(client: Client, bob: User) -> None:
    factories.make_model()
    factories.make_model("secret-model", position=1)
    project = bob.memberships.get().team.projects.get()
    project.models_allowed = ["smollm2"]
    project.save()
    page = text_of(client, "/")
    assert "smollm2" in page
    assert "secret-model" not in page


# --- keys -------------------------------------------------------------------------------------------------------------
def test_a_key_needs_only_a_name_and_is_shown_once(client: Client, bob: User) -> None:
    factories.make_model()
    page = client.post("/keys/make/", {"name": "laptop"}).content.decode()
    key = Key.objects.get()
    secret = re.search(r"sk-[\w-]{43}", page)
    assert secret
    assert page.count(secret.group()) == 4
    assert (key.name, key.owner) == ("laptop", bob)
    for url in ("/keys/", f"/keys/{key.pk}/", "/account/", "/requests/"):
        assert secret.group() not in text_of(client, url)


@pytest.mark.parametrize("name", ["", " ", "x" * 81, "a\x00b", "\x1b[31mred", "a\u202eb"])
def test_a_key_without_a_usable_name_is_not_made(client: Client, bob: User, name: str) -> None:
    page = client.post("/keys/make/", {"name": name}).content.decode()
    assert "errorlist" in page
    assert not Key.objects.exists()


def test_names_are_shown_as_text_and_never_as_markup(client: Client, bob: User) -> None:
    page = client.post("/keys/make/", {"name": "<script>alert(1)</script>"}).content.decode()
    assert "<script>alert" not in page
    assert "<script>alert" not in text_of(client, "/keys/")


def test_somebody_without_a_project_is_told_whom_to_ask(client: Client) -> None:
    client.force_login(factories.make_user("new"))
    assert "Ask an owner of your team" in text_of(client, "/keys/make/")
    client.post("/keys/make/", {"name": "x"})
    assert not Key.objects.exists()


def test_the_first_call_is_waited_for_told_and_then_left_alone(client: Client, bob: User) -> None:
    client.post("/keys/make/", {"name": "laptop"})
    key = Key.objects.get()
    url = f"/keys/{key.pk}/first-call/"
    assert "every 2s" in text_of(client, url)
    rows.make_usage(key=key, status=404, error_code="model_not_found")
    waiting = text_of(client, url)
    assert "404 model_not_found" in waiting
    assert "every 2s" in waiting
    rows.make_usage(key=key)
    answered = text_of(client, url)
    assert "Latest answer: 20 tokens, 285 ms" in answered
    assert "hx-get" not in answered
    rows.make_usage(1, key=key, status=429)
    assert "Latest answer: 20 tokens, 285 ms" in text_of(client, url)


def test_unknown_tokens_of_the_first_call_are_a_dash(client: Client, bob: User) -> None:
    client.post("/keys/make/", {"name": "laptop"})
    key = Key.objects.get()
    rows.make_usage(key=key, completion_tokens=None)
    assert "Latest answer: – tokens" in text_of(client, f"/keys/{key.pk}/first-call/")


def test_a_key_and_its_owner_have_the_same_sums_of_today(client: Client, bob: User) -> None:
    client.post("/keys/make/", {"name": "laptop"})
    key = Key.objects.get()
    rows.make_usage(key=key, user=bob)
    for url in (f"/keys/{key.pk}/", "/account/"):
        assert "1 request, 12 tokens read, 20 written" in text_of(client, url)
    rows.make_usage(key=key, user=bob, prompt_tokens=1000)
    for url in (f"/keys/{key.pk}/", "/account/"):
        assert "2 requests, 1,012 tokens read, 40 written" in text_of(client, url)


def test_nobody_waits_for_a_first_call_for_ever(client: Client, bob: User) -> None:
    client.post("/keys/make/", {"name": "laptop"})
    Key.objects.update(made_at=timezone.now() - timedelta(minutes=11))
    assert "hx-get" not in text_of(client, f"/keys/{Key.objects.get().pk}/first-call/")


def test_revoked_and_expired_keys_are_listed_apart(client: Client, bob: User) -> None:
    project = bob.memberships.get().team.projects.get()
    revoked, _ = factories.make_key(project=project, name="gone")
    actions.revoke_key(key=revoked, actor=SYSTEM)
    factories.make_key(project=project, name="over", expires_at=timezone.now() - timedelta(days=1))
    factories.make_key(project=project, name="good")
    live, everything = text_of(client, "/keys/"), text_of(client, "/keys/?show=all")
    assert ("gone" in live, "over" in live, "good" in live) == (False, False, True)
    assert ("revoked</span>" in everything, "expired</span>" in everything) == (True, True)
    assert client.post(f"/keys/{revoked.pk}/revoke/").status_code == 302


def test_more_keys_than_a_page_holds_are_one_link_away(client: Client, bob: User) -> None:
    project = bob.memberships.get().team.projects.get()
    Key.objects.bulk_create(
        Key(project=project, name=f"key{n}", prefix="sk-xxxx", digest=f"{n:064}") for n in range(150)
    )
    first = text_of(client, "/keys/")
    older = re.search(r'href="\?(before=\d+)">Older', first)
    assert older
    assert text_of(client, f"/keys/?{older.group(1)}").count("<tr>") == 1 + 50
    for odd in ("before=-1", "before=abc", "before=" + "9" * 40):
        assert text_of(client, f"/keys/?{odd}").count("<tr>") == 1 + 100


# --- cluster ----------------------------------------------------------------------------------------------------------
def test_the_dashboard_says_what_does_not_run_and_why(client: Client, root: User) -> None:
    factories.make_model()
    factories.make_node("node1")
    reason = "the engine ended with code 1: not a GGUF file"
    Backoff.objects.create(
        model="smollm2", profile="cpu", failures=3, next_try_at=timezone.now() + timedelta(seconds=100), reason=reason
    )
    page = text_of(client, "/dashboard/")
    assert reason in page
    assert "Next try in 1 min" in re.sub(r"<[^>]+>", "", page)


def test_what_needs_a_person_is_said_once_for_all_that_are_alike(client: Client, root: User) -> None:
    for number in range(9):
        factories.make_node(f"n{number}", state="lost")
    factories.make_node("far", state="unreachable")
    page = text_of(client, "/dashboard/")
    assert page.count("is lost; see whether") == 1
    assert "and 8 more alike" in page
    assert "Node far is unreachable" in page
    assert "kinds more" not in page


def test_an_empty_cluster_says_the_next_step(client: Client, root: User) -> None:
    assert "Add a node" in text_of(client, "/dashboard/")
    models = text_of(client, "/models/")
    assert "llmgw ctl models apply" in models
    assert models.count('href="/catalog/add/"') == 2
    assert 'href="/catalog/add/"' in text_of(client, "/models/").split('class="empty"')[1]
    assert "No replica yet" in text_of(client, "/replicas/")


def test_a_models_page_leads_to_where_the_catalog_is_changed(client: Client, root: User) -> None:
    factories.make_model("org/model")
    page = text_of(client, "/models/org/model/")
    assert 'href="/catalog/edit/org/model/">Edit in the catalog</a>' in page
    assert client.get("/catalog/edit/org/model/").status_code == 200


def test_lists_are_sorted_by_links_that_keep_the_chip_and_need_no_script(client: Client, root: User) -> None:
    for number, cpu in enumerate((7.0, 93.0, None)):
        factories.make_node(f"n{number}", load={"cpu_percent": cpu})
    page = text_of(client, "/nodes/?show=ready&sort=-cpu&after=gone")
    assert re.findall(r'<th><a href="/nodes/(n\d)/', page) == ["n1", "n0", "n2"]
    assert '<th class="num" aria-sort="descending"><a href="?show=ready&amp;sort=cpu">CPU</a></th>' in page
    assert '<a href="?show=ready&amp;sort=-memory">Memory</a>' in page
    assert 'hx-get="/nodes/?show=ready&amp;sort=-cpu&amp;after=gone"' in page
    assert 'href="?sort=-cpu&amp;show=ready"' in page
    by_name = text_of(client, "/nodes/")
    assert '<th aria-sort="ascending"><a href="?sort=-name">Node</a></th>' in by_name
    assert "aria-sort" not in text_of(client, "/dashboard/")
    assert 'href="?sort=nothing' not in text_of(client, '/nodes/?sort=nothing"><b>')


@pytest.mark.parametrize("url", ["/models/", "/replicas/", "/nodes/"])
def test_every_head_of_a_list_sorts_it(client: Client, root: User, url: str) -> None:
    rows.make_cluster(3)
    page = text_of(client, url)
    heads = re.findall(r"<th[^>]*>(.*?)</th>", page[: page.index("</thead>")])
    links = [re.search(r'href="(\?sort=[^"]+)"', head) for head in heads]
    assert all(links)
    for link in links:
        assert link
        sorted_page = text_of(client, url + link[1])
        assert sorted_page.count('aria-sort="') == 1
        assert "model-0002" in sorted_page or "node-0002" in sorted_page


def test_a_sorted_list_goes_on_where_its_page_ended(client: Client, root: User, thousand: None) -> None:
    first = text_of(client, "/nodes/?sort=-name")
    names = re.findall(r'<th><a href="/nodes/([^/]+)/', first)
    assert (names[0], names[1], len(names)) == ("template", "n0999", 100)
    after = re.search(r'href="(\?sort=-name&amp;after=[^"]+)"', first)
    assert after
    assert (
        re.findall(r'<th><a href="/nodes/([^/]+)/', text_of(client, "/nodes/" + after[1].replace("&amp;", "&")))[0]
        == "n0900"
    )


def test_the_dashboard_says_who_uses_the_cluster_and_what_holds_hardware_for_nobody(client: Client, root: User) -> None:
    rows.make_idle("quiet")
    page = text_of(client, "/dashboard/")
    assert 'href="/replicas/quiet-1/">quiet-1</a>' in page.split("Holding hardware, nobody asking")[1]
    assert "kept up: scaling.min is 1; with 0 it starts on demand" in page
    assert "Nobody just now." in page
    key, _ = factories.make_key(project=factories.make_project("evals", team=factories.make_team("Research")))
    rows.make_usage(10, key=key, model="quiet")
    rollup.add([of(key, at=timezone.now().timestamp())])
    page = text_of(client, "/dashboard/")
    using = page.split("Using the cluster now")[1].split("</section>")[0]
    assert "Research / evals" in using
    assert 'href="/models/quiet/">quiet</a></td><td class="num">10</td><td class="num">64</td>' in using
    assert "Holding hardware" in page
    assert "quiet-1" not in page.split("Holding hardware, nobody asking")[1].split("</section>")[0]


def test_the_dashboard_says_what_is_in_flight_and_what_projects_spend_today(client: Client, root: User) -> None:
    def said(title: str) -> str:
        part = text_of(client, "/dashboard/").split(f"<h2>{title}</h2>")[1].split("</section>")[0]
        return " ".join(re.sub(r"<[^>]+>", " ", part).split())

    factories.make_model()
    told = factories.make_replica("smollm2-1")
    key, _ = factories.make_key(project=factories.make_project("evals", team=factories.make_team("Research")))
    now = timezone.now()
    rollup.add([of(key, at=now.timestamp(), cost=None)])
    assert "unknown in flight now, 1 ready replica not told of" in said("Using the cluster now")
    assert "no price spend" in said("Use today")
    assert "Research / evals 1 no price" in said("Use today")
    assert "unknown" in said("Models")
    rollup.add([of(key, at=now.timestamp(), cost=1_234_500_000)])
    ReplicaLoad.objects.create(gateway="a", replica=told.name, in_flight=1, at=now)
    assert "1 in flight now Nobody just now." in said("Using the cluster now")
    assert "12.35 EUR spend, 1 without a price" in said("Use today")
    assert "Research / evals 2 12.35 EUR in part" in said("Use today")
    assert "smollm2 ready 1 of 1 1 of 2" in said("Models")


def test_a_replica_page_shows_the_engines_last_lines(client: Client, root: User) -> None:
    factories.make_replica("smollm2-1", state="failed", reason="it ended", tail="line one\n<b>line two</b>")
    page = text_of(client, "/replicas/smollm2-1/")
    assert "line one\n&lt;b&gt;line two&lt;/b&gt;" in page


def test_a_node_is_added_with_a_token_shown_once(client: Client, root: User) -> None:
    page = client.post("/add-node/", {"name": "gpu-01"}).content.decode()
    assert re.search(r"nt-[\w-]{43}", page)
    assert "node: gpu-01" in page
    assert "nt-" not in text_of(client, "/nodes/gpu-01/")
    again = client.post("/add-node/", {"name": "gpu-01"}).content.decode()
    assert "already exists" in again
    assert "errorlist" in client.post("/add-node/", {"name": "a b"}).content.decode()


@pytest.mark.parametrize("page", ["dashboard", "nodes", "models", "replicas"])
def test_a_fragment_is_the_file_that_the_page_includes(client: Client, root: User, page: str) -> None:
    rows.make_cluster(2)
    whole = text_of(client, f"/{page}/")
    fragment = text_of(client, f"/{page}/", **{"hx-request": "true"})
    assert "<html" not in fragment
    assert re.sub(r"<time.*?</time>", "", fragment).strip() in re.sub(r"<time.*?</time>", "", whole)


@pytest.mark.parametrize(
    ("url", "queries"),
    [
        ("/", 13),
        ("/dashboard/", 18),
        ("/nodes/", 6),
        ("/models/", 11),
        ("/replicas/", 6),
        ("/nodes/?sort=-cpu", 6),
        ("/models/?sort=-load", 11),
        ("/replicas/?sort=node", 6),
        ("/nodes/node-0000/", 12),
        ("/models/model-0000/", 17),
        ("/replicas/model-0000-1/", 9),
        ("/nodes/node-0000/manage/", 5),
        ("/replicas/?model=model-0000", 6),
        ("/fabrics/", 4),
        ("/catalog/", 6),
        ("/projects/", 5),
        ("/requests/", 7),
        ("/requests/?result=failed", 7),
        ("/keys/", 5),
        ("/account/", 9),
    ],
)
@pytest.mark.parametrize("count", [1, 30])
def test_pages_take_the_same_queries_however_many_rows(
    client: Client, root: User, django_assert_num_queries: DjangoAssertNumQueries, url: str, queries: int, count: int
) -> None:
    rows.make_cluster(count)
    for _ in range(count):
        key, _ = factories.make_key()
        rows.make_usage(1, key=key)
        rollup.add([of(key, at=timezone.now().timestamp())])
    with django_assert_num_queries(queries):
        client.get(url)


LISTS = {
    "nodes/node": 5,
    "nodes/replica": 7,
    "nodes/shard": 6,
    "nodes/event": 6,
    "nodes/replicaload": 5,
    "catalog/model": 6,
    "tenants/key": 6,
    "tenants/project": 6,
    "tenants/usage": 6,
    "tenants/usageslot": 5,
}


def test_lists_of_the_admin_take_the_same_queries_however_many_rows(client: Client) -> None:
    rows.sign_in_verified(client, rows.make_operator())
    asked: list[dict[str, int]] = []
    for more in (2, 28):
        rows.make_cluster(len(asked) * 2 + more, first=len(asked) * 2)
        for number in range(more):
            key, _ = factories.make_key()
            rows.make_usage(1, key=key)
            rollup.add([of(key, at=timezone.now().timestamp())])
            ReplicaLoad.objects.create(gateway="g", replica=f"r{len(asked)}{number}", at=timezone.now())
            Event.objects.create(kind="ready", text="It became ready", node=f"node-{number:04}")
        asked.append({})
        for url in LISTS:
            with CaptureQueriesContext(connection) as queries:
                assert client.get(f"/admin/{url}/").status_code == 200
            asked[-1][url] = len(queries)
    assert asked == [LISTS, LISTS]


@pytest.mark.parametrize(("kind", "queries"), [("organisation", 12), ("team", 19), ("project", 15), ("key", 15)])
@pytest.mark.parametrize("count", [1, 30])
def test_pages_of_limits_take_the_same_queries_however_much_there_is(
    client: Client, root: User, django_assert_num_queries: DjangoAssertNumQueries, kind: str, queries: int, count: int
) -> None:
    rows.make_cluster(count)
    team = factories.make_team("Research")
    project = factories.make_project("evals", team=team)
    key, _ = factories.make_key(project=project)
    catalog.models.Model.objects.update(team=team.slug)
    Budget.objects.create(organisation=team.organisation, unit="money", amount=10**9, period="month")
    for number in range(count):
        more, _ = factories.make_key(project=project)
        factories.make_key(project=factories.make_project(team=team))
        rollup.add([of(each, at=timezone.now().timestamp(), model=f"m{number}") for each in (key, more)])
    subjects = {"organisation": team.organisation, "team": team, "project": project, "key": key}
    with django_assert_num_queries(queries):
        client.get(f"/limits/{kind}/{subjects[kind].pk}/")


def test_the_lists_of_the_admin_do_not_read_what_nodes_and_agents_tell_at_length(client: Client) -> None:
    rows.sign_in_verified(client, rows.make_operator())
    rows.make_cluster(2)
    for url in ("nodes/node", "nodes/shard", "nodes/replica"):
        with CaptureQueriesContext(connection) as queries:
            client.get(f"/admin/{url}/")
        assert not [
            each for each in queries.captured_queries if '"inventory"' in each["sql"] or '"tail"' in each["sql"]
        ]
    assert "xllamacpp" in text_of(client, "/admin/nodes/node/node-0000/change/")


@pytest.fixture
def thousand(root: User) -> None:
    now = timezone.now()
    template = factories.make_node("template")
    factories.make_model()
    Node.objects.bulk_create(
        Node(
            name=f"n{n:04}",
            token_digest=f"{n:064}",
            state="ready",
            address="10.0.0.1",
            inventory=template.inventory,
            load=template.load,
            last_seen_at=now,
        )
        for n in range(1000)
    )
    Replica.objects.bulk_create(
        Replica(
            name=f"r{n:04}",
            model="smollm2",
            profile="cpu",
            profile_digest="d",
            engine="llamacpp",
            state="ready",
            ready_at=now,
        )
        for n in range(1000)
    )
    Shard.objects.bulk_create(
        Shard(replica_id=f"r{n:04}", node_id=f"n{n:04}", state="ready", port=9000, cores=1) for n in range(1000)
    )
    key, _ = factories.make_key()
    rows.make_usage(1000, key=key)


@pytest.mark.usefixtures("thousand")
@pytest.mark.parametrize(
    "url",
    [
        "/requests/",
        "/keys/",
        "/",
        "/account/",
        "/nodes/",
        "/models/",
        "/replicas/",
        "/dashboard/",
        "/nodes/n0500/",
        "/models/smollm2/",
        "/replicas/r0500/",
    ],
)
def test_pages_with_a_thousand_rows_are_quick(client: Client, url: str) -> None:
    client.get(url)
    assert _calls(client, url) < 400_000


@pytest.mark.usefixtures("thousand")
@pytest.mark.parametrize("url", ["/nodes/", "/replicas/", "/dashboard/"])
def test_long_lists_come_in_pages(client: Client, url: str) -> None:
    page = text_of(client, url)
    assert page.count("<tr>") < 250
    if url != "/dashboard/":
        after = re.search(r'href="\?(after=[^"]+)"', page)
        assert after
        assert "0100" in text_of(client, f"{url}?{after.group(1)}")


@pytest.mark.usefixtures("thousand")
def test_a_model_of_many_replicas_shows_some_and_leads_to_all(client: Client) -> None:
    factories.make_replica("other", model="else")
    page = text_of(client, "/models/smollm2/")
    assert page.count('href="/replicas/r') == 20
    assert 'href="/replicas/?model=smollm2">All 1000' in page
    listed = text_of(client, "/replicas/?model=smollm2")
    assert "other" not in listed
    assert "?model=smollm2&amp;after=r0099" in listed
    assert "all 1000" in listed


def _calls(client: Client, url: str) -> int:
    """Calls of functions that one answer takes: work without the clock, the same on every machine."""
    profile = cProfile.Profile()
    profile.runcall(client.get, url)
    return sum(entry.callcount for entry in profile.getstats())
