"""A store that takes nothing: pages and API say so, and what to do, instead of that something failed."""

from __future__ import annotations

import pytest
from django.db import DataError, InterfaceError, OperationalError
from django.test import AsyncClient, Client

from llmgw.core import store_faults
from tenants import actions
from tests import factories

FULL = OperationalError("database or disk is full")
AWAY = OperationalError("connection to server at 127.0.0.1 failed: Connection refused")


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Exception:
    error: Exception = request.param

    def raising(**_: object) -> None:
        raise error

    monkeypatch.setattr(actions, "revoke_key", raising)
    return error


def asked() -> tuple[int, Client]:
    """The number of a key, and its owner's browser."""
    alice = factories.make_user("alice")
    project = factories.make_project("Apps", team=factories.make_team("Blue", owner=alice))
    key, _ = factories.make_key(project=project, owner=alice)
    client = Client(raise_request_exception=False)
    client.force_login(alice)
    return key.pk, client


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("fault", "status", "says"),
    [
        (FULL, 503, "The disk of the store is full, so this could not be done. Free space there, then try again."),
        (AWAY, 503, "The store cannot be used now, so this could not be done."),
        (InterfaceError("the connection is closed"), 503, "The store cannot be used now, so this could not be done."),
        (DataError("out of range"), 500, "Something failed here."),
    ],
    indirect=["fault"],
)
def test_the_api_says_what_the_store_lacks(fault: Exception, status: int, says: str) -> None:
    key, client = asked()
    answer = client.post(f"/api/v1/keys/{key}/revoke")
    assert answer.status_code == status
    assert answer.json()["error"]["message"].startswith(says)
    assert str(fault) not in answer.content.decode()


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("fault", "status", "says"),
    [(FULL, 503, "Free space there, then try again."), (DataError("x"), 500, "Something went wrong on our side")],
    indirect=["fault"],
)
def test_pages_say_what_the_store_lacks(fault: Exception, status: int, says: str) -> None:
    key, client = asked()
    answer = client.post(f"/keys/{key}/revoke/")
    assert answer.status_code == status
    assert says in answer.content.decode()
    assert ("gateways answer for 10 minutes without the store" in answer.content.decode()) == (status == 503)


@pytest.mark.parametrize("path", ["/keys/", "/api/v1/summary"])
async def test_a_store_that_does_not_even_tell_who_asks_is_said_to_be_at_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    def away(*_: object) -> None:
        raise AWAY

    monkeypatch.setattr("django.contrib.sessions.backends.db.SessionStore.load", away)
    client = AsyncClient(raise_request_exception=False)
    client.cookies["llmgw_session"] = "x" * 32
    answer = await client.get(path)
    assert answer.status_code == 503
    text = answer.content.decode()
    assert "The store cannot be used now, so this could not be done." in text
    assert "changed" not in text, "nobody who looks wants to change"
    [line] = caplog.records
    assert line.exc_info is None, "a traceback says no more than the cause"
    assert path in line.getMessage()
    assert str(AWAY) in line.getMessage()


def test_other_faults_are_not_the_stores() -> None:
    assert store_faults.sentence(None) is None
    assert store_faults.sentence(ValueError("disk is full")) is None
