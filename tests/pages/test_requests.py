"""The list of requests, one request's page and the list as CSV: what they hold, for whom, and at what cost."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from django.db import connection
from django.http import StreamingHttpResponse
from django.test import AsyncClient, Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from routing import export
from routing.explain import Attempt, Considered, Explained, Skipped
from routing.request_views import stretches
from tenants import finding
from tenants.models import Key, Project, Role, Usage, User
from tests import factories
from tests.pages import rows

pytestmark = pytest.mark.django_db
NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)
WHY = Explained(
    asked="chat",
    band="interactive",
    queued=True,
    position=3,
    considered=(
        Considered("smollm2-1", 0.5),
        Considered("smollm2-2", 0.25),
        Considered("smollm2-3", note="left alone"),
    ),
    attempts=(Attempt("smollm2-2", 121.0, "it refused the connection"), Attempt("smollm2-1", 130.0)),
    skipped=(Skipped("big", "no_endpoint"),),
)


@pytest.fixture
def root(client: Client) -> User:
    user = rows.make_operator()
    client.force_login(user)
    return user


@pytest.fixture
def key() -> Key:
    return factories.make_key(project=factories.make_project("evals", team=factories.make_team("Research")))[0]


@pytest.fixture
def bob(client: Client, key: Key) -> User:
    user = rows.make_member(key.project.team, Role.MEMBER, "bob")
    client.force_login(user)
    return user


def text_of(client: Client, url: str, **headers: str) -> str:
    response = client.get(url, headers=headers)
    assert response.status_code == 200
    return response.content.decode()


def ids(client: Client, query: str = "") -> list[str]:
    return re.findall(r"href=\"/requests/([\w-]+)/", text_of(client, f"/requests/{query}", **{"hx-request": "true"}))


def walk(client: Client, query: str = "?") -> Iterator[tuple[str, list[str]]]:
    """Each page and the ids on it, following its link to the next."""
    while query:
        page = text_of(client, f"/requests/{query}")
        yield page, re.findall(r'href="/requests/([\w-]+)/"', page)
        older = re.search(r'href="(\?[^"]*before=[^"]+)">', page)
        query = older.group(1).replace("&amp;", "&") if older else ""


# --- the list ---------------------------------------------------------------------------------------------------------
def test_walking_the_requests_meets_each_exactly_once(client: Client, root: User) -> None:
    rows.make_usage(130)
    Usage.objects.update(at=NOON)  # all at the same instant: the id breaks the tie
    rows.make_usage(120, ended=NOON - timedelta(seconds=1))
    met: list[str] = []
    for _, found in walk(client):
        met += found
        rows.make_usage(1, request_id=f"late-{len(met)}", ended=NOON + timedelta(seconds=len(met)))
    assert sorted(met) == sorted(f"req-{n}" for n in range(250))


def test_a_member_of_several_projects_walks_them_as_one_list(client: Client, bob: User, key: Key) -> None:
    keys = [key] + [factories.make_key(project=factories.make_project(team=key.project.team))[0] for _ in range(4)]
    stranger, _ = factories.make_key()
    for number in range(250):
        rows.make_usage(1, key=keys[number % 7 % 5], ended=NOON - timedelta(seconds=number // 3))
        rows.make_usage(1, key=stranger, ended=NOON - timedelta(seconds=number // 3), request_id=f"theirs-{number}")
    expected = Usage.objects.exclude(key=stranger).order_by("-at", "-pk").values_list("request_id", flat=True)
    assert [met for _, found in walk(client) for met in found] == list(expected)


@pytest.mark.parametrize("projects", [1, 3, finding.MOST_LANES, finding.MOST_LANES + 5])
def test_a_page_takes_the_same_queries_however_many_projects_somebody_sees(
    client: Client, bob: User, key: Key, django_assert_num_queries: DjangoAssertNumQueries, projects: int
) -> None:
    for _ in range(projects - 1):
        rows.make_usage(2, key=factories.make_key(project=factories.make_project(team=key.project.team))[0])
    rows.make_usage(1, key=key)
    most = 9  # session, person, projects, [how deep to look], places, rows, projects to offer, models' names (2)
    with django_assert_num_queries(most - (projects <= finding.MOST_LANES)):
        assert text_of(client, "/requests/").count("<tr>") == 1 + 1 + min(99, 2 * (projects - 1))


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("before=x", ""),
        ("before=20261129T000000.000000Z_-1", ""),
        ("before=99999999T999999.000000Z_1", ""),
        ("before=_", ""),
        ("page=-1&page_size=1000000000&offset=9", ""),
        ("project=x", "x is not the number of a project"),
        ("project=1e9", "1e9 is not the number"),
        ("key=1e9", "There is no key 1e9 that you can see"),
        ("result=odd", "odd is no result. Say ok, refused, left, failed."),
        ("since=soon", "soon is not a time such as"),
        ("until=9999-12-31T23:59:59-14:00", "is not a time such as"),
        ("since=0001-01-01T00:00:00%2B14:00", "is not a time such as"),
        ("since=2026-11-01&until=2026-10-01", "It lies before since"),
    ],
)
def test_a_bad_filter_is_named_and_filters_nothing(client: Client, root: User, query: str, problem: str) -> None:
    rows.make_usage(1, ended=datetime(2026, 10, 1, tzinfo=UTC))
    page = text_of(client, f"/requests/?{query}")
    assert problem in page
    assert "req-0" in page or "since=2026" in query
    assert "errorlist" in page or not problem


def test_requests_are_narrowed_by_what_is_asked_for(client: Client, root: User, key: Key) -> None:
    rows.make_usage(1, request_id="mine", key=key, ended=NOON - timedelta(hours=1))
    rows.make_usage(1, request_id="other", model="else", ended=NOON)
    rows.make_usage(1, request_id="refused", status=429, error_code="rate_limited", ended=NOON)
    rows.make_usage(1, request_id="left", status=499, error_code="client_left", ended=NOON)
    rows.make_usage(1, request_id="broken", status=502, error_code="engine_failed", ended=NOON)
    assert ids(client, f"?key={key.pk}") == ["mine"]
    assert ids(client, f"?key={key.prefix}") == ["mine"]
    assert ids(client, f"?key={key.prefix}…") == ["mine"]
    assert ids(client, f"?key={key.pk}&model=else") == []
    assert ids(client, f"?project={key.project_id}") == ["mine"]
    assert ids(client, f"?project={key.project_id}&result=failed") == []
    assert ids(client, "?model=else") == ["other"]
    assert ids(client, "?model=else&result=ok") == ["other"]
    assert ids(client, "?result=ok") == ["other", "mine"]
    assert ids(client, "?result=refused") == ["refused"]
    assert ids(client, "?result=left") == ["left"]
    assert ids(client, "?result=failed") == ["broken"]
    assert ids(client, "?code=rate_limited") == ["refused"]
    assert ids(client, "?until=2026-11-29T12:00") == ["mine"]
    assert ids(client, "?since=2026-11-29T12:00%2B01:00&until=2026-11-29T12:00%2B00:00") == ["mine"]


def test_several_keys_that_begin_alike_are_told_apart_by_number(client: Client, root: User, key: Key) -> None:
    factories.make_key(prefix=key.prefix)
    assert f"Several keys begin with {key.prefix}" in text_of(client, f"/requests/?key={key.prefix}")


def test_a_member_finds_nothing_of_others_by_any_filter(client: Client, bob: User, key: Key) -> None:
    stranger, _ = factories.make_key()
    rows.make_usage(1, key=stranger, model="else", request_id="theirs", status=502, error_code="engine_failed")
    rows.make_usage(1, request_id="nobodys")
    queries = (f"project={stranger.project_id}", f"key={stranger.pk}", f"key={stranger.prefix}", "id=theirs", "id=")
    for query in (*queries, "model=else", "result=failed", "code=engine_failed", "since=2020-01-01"):
        assert ids(client, f"?{query}") == []
    assert "that you can see" in text_of(client, f"/requests/?project={stranger.project_id}")
    assert "else" not in text_of(client, f"/requests/?key={stranger.pk}")


def test_what_is_rare_is_looked_for_in_bounded_steps(
    client: Client, bob: User, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "LOOKED_THROUGH", 90)
    other, _ = factories.make_key(project=factories.make_project(team=key.project.team))
    for number in range(200):
        failed = {"status": 502} if number in (20, 190) else {}
        rows.make_usage(1, key=(key, other)[number % 2], ended=NOON - timedelta(seconds=number // 2), **failed)
    rows.make_usage(1, key=other, ended=NOON - timedelta(days=1), status=502, request_id="last")
    pages = list(walk(client, "?result=failed"))
    assert [met for _, found in pages for met in found] == ["req-20", "req-190", "last"]
    assert "Looked back to 2026-11-29 11:59:15 UTC." in pages[0][0]
    assert any("Nothing fits so far." in page for page, _ in pages)
    assert "Looked back" not in pages[-1][0]


def test_a_search_in_steps_meets_each_of_those_that_ended_together(
    client: Client, root: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "LOOKED_THROUGH", 7)
    rows.make_usage(40)
    Usage.objects.filter(pk__in=[row.pk for row in Usage.objects.all()[::3]]).update(status=502)
    Usage.objects.update(at=NOON)
    met = [each for _, found in walk(client, "?result=failed") for each in found]
    assert met == list(Usage.objects.filter(status=502).order_by("-pk").values_list("request_id", flat=True))


def test_the_list_says_the_next_step_when_it_is_empty(client: Client, bob: User) -> None:
    assert "Make a key and copy the request" in text_of(client, "/requests/")
    assert "No request fits." in text_of(client, "/requests/?model=none")
    assert 'begins with <span class="mono">req-9</span>' in text_of(client, "/requests/?id=req-9")


def test_an_alias_finds_its_model_and_other_names_are_remarked_on(client: Client, bob: User, key: Key) -> None:
    factories.make_model("smollm2", aliases=["chat"], adapters=[{"name": "french", "source": "/fr"}])
    rows.make_usage(1, request_id="mine", key=key)
    rows.make_usage(1, request_id="old", model="gone", key=key)
    assert ids(client, "?model=chat") == ids(client, "?model=smollm2") == ["mine"]
    assert "chat is an alias of smollm2, whose requests these are." in text_of(client, "/requests/?model=chat")
    assert "smollm2 is" not in text_of(client, "/requests/?model=smollm2")
    assert "french is an adapter of smollm2;" in text_of(client, "/requests/?model=french")
    assert ids(client, "?model=gone") == ["old"]
    assert "There is no model gone that you can see." in text_of(client, "/requests/?model=gone")
    assert "Did you mean smollm2?" in text_of(client, "/requests/?model=smolm2")
    exported = client.get("/requests.csv?model=chat")
    assert isinstance(exported, StreamingHttpResponse)
    assert b"mine" in b"".join(exported)  # type: ignore[arg-type]


def test_names_of_models_that_a_person_may_not_use_are_not_told(client: Client, bob: User, key: Key) -> None:
    factories.make_model("smollm2")
    factories.make_model("secret", aliases=["chat"], adapters=[{"name": "french", "source": "/fr"}])
    Project.objects.update(models_allowed=["smollm2"])
    for name in ("chat", "french", "secre", "secret"):
        assert f"There is no model {name} that you can see. Requests" in text_of(client, f"/requests/?model={name}")
    Project.objects.update(models_allowed=["french"])
    assert "french is an adapter of secret" in text_of(client, "/requests/?model=french")


def test_a_request_is_found_by_its_id_as_it_is_typed(client: Client, bob: User, key: Key) -> None:
    for number in (10, 11, 20):
        rows.make_usage(1, key=key, request_id=f"req-ab{number}")
    assert ids(client, "?id=req-ab1") == ["req-ab11", "req-ab11", "req-ab10", "req-ab10"]
    assert ids(client, "?id=req-ab20") == ["req-ab20", "req-ab20"]
    assert client.get("/requests/?id=req-ab20")["Location"] == "/requests/req-ab20/"
    assert client.get("/requests/?id=req-ab").status_code == 200
    for odd in ("%25", "_", "req-%C3%A9", "%00", "x" * 500, "' OR 1=1"):
        assert ids(client, f"?id={odd}") == []


def test_models_that_a_member_may_not_use_are_not_offered(client: Client, bob: User, key: Key) -> None:
    factories.make_model()
    factories.make_model("secret-model", position=1)
    key.project.models_allowed = ["smollm2"]
    key.project.save()
    page = text_of(client, "/requests/")
    assert '<option value="smollm2">' in page
    assert "secret-model" not in page


# --- many rows --------------------------------------------------------------------------------------------------------
@pytest.fixture
def twenty_thousand(key: Key) -> None:
    """Half of them of one project, in groups that ended at the same instant."""
    other, _ = factories.make_key()
    Usage.objects.bulk_create(
        (
            Usage(
                request_id=f"req-{number:05}",
                at=NOON - timedelta(seconds=number // 40),
                key=(key, other)[number % 2],
                project=(key, other)[number % 2].project,
                route="/v1/chat/completions",
                model="smollm2",
                status=200,
                total_ms=1.0,
            )
            for number in range(20_000)
        ),
        batch_size=1000,
    )


@pytest.mark.usefixtures("twenty_thousand")
def test_no_page_of_a_large_table_counts_or_skips(client: Client, bob: User, key: Key) -> None:
    """Rows are inserted while the pages are read; what was there at the start is met once, in order."""
    expected = list(Usage.objects.filter(key=key).order_by("-at", "-pk").values_list("pk", flat=True))
    asked = finding.read({}, bob)
    met: list[int] = []
    older = ""
    with CaptureQueriesContext(
        connection,
    ) as queries:
        while True:
            found = finding.find(asked.wanted, before=older, size=500)
            met += [row.pk for row in found.rows]
            rows.make_usage(1, key=key, ended=NOON + timedelta(days=1), request_id=f"late-{len(met)}")
            older = found.older
            if not older:
                break
    assert met == expected
    asked_of_usage = [query["sql"].upper() for query in queries.captured_queries if '"late-' not in query["sql"]]
    assert not any("OFFSET" in sql for sql in asked_of_usage)


@pytest.mark.usefixtures("twenty_thousand")
def test_pages_of_a_large_table_neither_count_nor_read_all_of_it(client: Client, bob: User) -> None:
    with CaptureQueriesContext(connection) as queries:
        for query in ("", "?result=failed", "?model=none", "?before=20261129T115500.000000Z_9", "?id=req-1"):
            text_of(client, f"/requests/{query}")
    assert not any("COUNT(" in each["sql"].upper() for each in queries.captured_queries)
    if connection.vendor == "sqlite":
        for each in queries.captured_queries:
            with connection.cursor() as cursor:
                cursor.execute(f"EXPLAIN QUERY PLAN {each['sql'].replace('%', '%%')}")
                plan = [row[3] for row in cursor.fetchall()]
            assert not any(step.startswith("SCAN tenants_usage") for step in plan), plan


# --- one request ------------------------------------------------------------------------------------------------------
def test_a_request_tells_its_story_with_its_tables(client: Client, bob: User, key: Key) -> None:
    rows.make_usage(
        1,
        key=key,
        queue_ms=120.0,
        first_token_ms=161.0,
        streamed=True,
        band="interactive",
        explained=msgspec.to_builtins(WHY),
    )
    page = text_of(client, "/requests/req-0/")
    for words in (
        "It asked for chat, which is model big.",
        "It waited 120 ms in the queue, from place 3.",
        "So its fallback, model smollm2, got it.",
        "<td>left alone</td>",
        "it refused the connection</span>",
        "queue 120 ms",
        "to the first token 41 ms",
        "the rest 124 ms",
    ):
        assert words in page
    assert re.search(r'smollm2-2</th><td class="num">0.25</td><td>chosen', page)
    assert re.search(r'smollm2-3</th><td class="num">–</td>', page)


def test_attempts_that_failed_are_followed_by_the_one_that_answered(client: Client, bob: User, key: Key) -> None:
    why = Explained(attempts=(Attempt("smollm2-2", 3.0, "it refused the connection"),))
    rows.make_usage(1, key=key, explained=msgspec.to_builtins(why))
    assert re.search(
        r'<td class="fit">then</td><th>smollm2-1</th><td><span class="state ok">', text_of(client, "/requests/req-0/")
    )
    Usage.objects.update(status=502)
    assert ">then</td>" not in text_of(client, "/requests/req-0/")


def test_a_request_without_its_explanation_says_that_it_is_gone(client: Client, root: User) -> None:
    rows.make_usage(
        1, completion_tokens=None, first_token_ms=None, explained={"from": 1, "attempts": "another version"}
    )
    page = text_of(client, "/requests/req-0/")
    assert "is kept for 7 days" in page
    assert "12 read" in page
    assert "– written" in page
    assert "first token after –" in page
    assert "Where it could go" not in page


def test_a_request_that_was_refused_before_a_replica_was_looked_for_misses_nothing(client: Client, root: User) -> None:
    rows.make_usage(1, status=400, error_code="body_invalid", model="", replica="", node="")
    page = text_of(client, "/requests/req-0/")
    assert "its body could not be understood" in page
    assert "is kept for" not in page


def test_what_engines_and_clients_wrote_is_text_and_never_markup(client: Client, root: User) -> None:
    evil = "<script>alert(1)</script>"
    why = Explained(asked=evil, considered=(Considered(evil, note=evil),), attempts=(Attempt(evil, 1.0, evil),))
    rows.make_usage(
        1, model=evil, replica=evil, node=f"a/{evil}", error_code=evil[:40], explained=msgspec.to_builtins(why)
    )
    for url in ("/requests/", "/requests/req-0/"):
        assert "<script>alert" not in text_of(client, url)


@pytest.mark.parametrize(
    ("queue", "first", "total", "expected"),
    [
        (0.0, 41.0, 285.0, [0, 41, 244]),
        (120.0, 161.0, 285.0, [120, 41, 124]),
        (10.0, None, 10.0, [10, 0, 0]),
        (500.0, 900.0, 285.0, [285, 0, 0]),
        (0.0, 0.0, 0.0, [0, 0, 0]),
    ],
)
def test_the_parts_of_its_time_add_up(queue: float, first: float | None, total: float, expected: list[float]) -> None:
    parts = {part.colour: part.ms for part in stretches(Usage(queue_ms=queue, first_token_ms=first, total_ms=total))}
    assert [parts.get(colour, 0) for colour in ("reserved", "starting", "used")] == expected


@pytest.mark.parametrize("name", ["charlie", "stranger"])
def test_people_of_other_teams_learn_nothing_of_a_request(client: Client, key: Key, name: str) -> None:
    rows.make_usage(1, key=key, explained=msgspec.to_builtins(WHY))
    if name == "charlie":
        client.force_login(rows.make_member(factories.make_team("Support"), Role.OWNER, "charlie"))
    else:
        client.force_login(factories.make_user(name))
    assert client.get("/requests/req-0/").status_code == client.get("/requests/none/").status_code == 404
    assert client.get("/requests/?id=req-0").status_code == 200  # a list without it, not the way to its page
    assert ids(client, "?id=req-0") == []


# --- CSV --------------------------------------------------------------------------------------------------------------
def exported(client: Client, query: str = "") -> list[dict[str, str]]:
    answer = client.get(f"/requests.csv{query}")
    assert answer.status_code == 200
    assert answer["Content-Disposition"] == 'attachment; filename="requests.csv"'
    return list(csv.DictReader(io.StringIO(answer.getvalue().decode())))


def test_an_export_holds_what_the_filters_let_through(client: Client, bob: User, key: Key) -> None:
    now = timezone.now()
    rows.make_usage(2, key=key, ended=now - timedelta(minutes=1), cost=1234, cached_tokens=None)
    rows.make_usage(1, key=key, ended=now - timedelta(days=8), request_id="old")
    rows.make_usage(1, key=key, ended=now - timedelta(minutes=1), request_id="failed", status=502)
    rows.make_usage(1, key=factories.make_key()[0], request_id="theirs")
    found = exported(client, "?result=ok")
    assert [line["request_id"] for line in found] == ["req-0", "req-1"]
    assert (found[0]["cost"], found[0]["cached_tokens"], found[0]["project"]) == ("0.00001234", "", "evals")
    since = (now - timedelta(days=9)).isoformat().replace("+", "%2B")
    assert [line["request_id"] for line in exported(client, f"?since={since}")] == ["failed", "req-0", "req-1", "old"]
    assert client.head("/requests.csv").getvalue() == b""


@pytest.mark.parametrize("name", ["=HYPERLINK(1)", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_no_name_is_a_formula_in_a_spreadsheet(client: Client, root: User, name: str) -> None:
    project = factories.make_project(name)
    rows.make_usage(1, key=factories.make_key(project=project, name=name)[0], model=name)
    (line,) = exported(client)
    assert (line["project"], line["key"], line["model"]) == (f"'{name}",) * 3


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("?since=2026-01-01&until=2026-09-01", "spans at most 92 days"),
        ("?since=soon", "since: soon is not a time"),
        ("?project=9999", "There is no project 9999"),
    ],
)
def test_an_export_of_too_much_or_of_nonsense_is_refused(client: Client, root: User, query: str, said: str) -> None:
    answer = client.get(f"/requests.csv{query}")
    assert (answer.status_code, answer["Content-Type"]) == (400, "text/plain; charset=utf-8")
    assert said in answer.content.decode()


def test_an_export_reads_no_further_than_it_is_taken(
    client: Client, root: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "ROWS_AT_ONCE", 10)
    rows.make_usage(200)
    answer = client.get("/requests.csv")
    assert isinstance(answer, StreamingHttpResponse)
    parts = iter(answer)
    with CaptureQueriesContext(connection) as queries:
        sizes = [next(parts).count(b"\n") for _ in range(4)]
    assert sizes == [1, 10, 10, 10]
    assert len(queries) == 6  # places and rows of three pages
    assert sum(part.count(b"\n") for part in parts) == 170


@pytest.mark.django_db(transaction=True)
async def test_an_export_streams_from_the_real_server_too(key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "ROWS_AT_ONCE", 10)
    await rows_to_stream(key)
    client = AsyncClient()
    await client.aforce_login(await User.objects.aget(username="async"))
    answer: Any = await client.get("/requests.csv")
    assert answer.is_async
    parts: AsyncIterator[bytes] = aiter(answer)
    assert [part.count(b"\n") async for part in parts] == [1, 10, 10, 5]


async def rows_to_stream(key: Key) -> None:
    from asgiref.sync import sync_to_async

    await sync_to_async(rows.make_operator)("async")
    await sync_to_async(rows.make_usage)(25, key=key)
