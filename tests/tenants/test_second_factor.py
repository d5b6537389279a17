"""Ways around the second factor and around the limits on tries, each of which must lead nowhere."""

from __future__ import annotations

import pytest
from django.test import Client
from django_otp.plugins.otp_totp.models import TOTPDevice

from tenants import totp
from tenants.audit import SYSTEM
from tenants.models import Key, User
from tests import factories
from tests.tenants.test_sign_in import PASSWORD, code_of, enrol, try_password

pytestmark = pytest.mark.django_db


@pytest.fixture
def alice() -> User:
    return factories.make_user("alice")


def test_enrolling_signs_out_browsers_that_came_by_the_password_alone(client: Client, alice: User) -> None:
    old = Client()
    assert try_password(old, "alice", PASSWORD) == 302
    assert try_password(client, "alice", PASSWORD) == 302
    client.get("/account/two-factor/")
    client.post("/account/two-factor/", {"code": code_of(TOTPDevice.objects.get())})
    assert client.get("/account/").status_code == 200
    assert old.get("/account/").status_code == 302
    assert old.post("/account/backup-codes/").status_code == 302


@pytest.mark.parametrize("url", ["/account/backup-codes/", "/account/two-factor/remove/"])
def test_a_session_without_the_code_cannot_take_the_second_factor_away(client: Client, alice: User, url: str) -> None:
    client.force_login(alice)
    enrol(alice)
    assert client.post(url, {"password": PASSWORD})["Location"] == "/account/two-factor/"
    assert totp.is_enrolled(alice)
    assert totp.backup_codes_left(alice) == 0


@pytest.mark.parametrize(
    "url", ["/", "/account/", "/keys/", "/keys/make/", "/requests/", "/dashboard/", "/admin/", "/api/v1/me"]
)
def test_half_way_in_nothing_opens(client: Client, url: str) -> None:
    enrol(factories.make_user("root", is_superuser=True))
    try_password(client, "root", PASSWORD)
    answer = client.get(url)
    assert "root" not in answer.content.decode()
    assert answer.status_code in (200, 302, 401)
    assert (answer.status_code == 200) == (url == "/")


def test_two_pages_opened_at_once_show_and_take_one_secret(alice: User) -> None:
    for _ in range(2):
        TOTPDevice.objects.create(user=alice, confirmed=False, name="authenticator")
    secrets = {totp.start_enrolment(alice).secret for _ in range(3)}
    assert len(secrets) == 1
    enrol_first = TOTPDevice.objects.order_by("pk").first()
    assert enrol_first is not None
    assert totp.confirm(alice, code_of(enrol_first), actor=SYSTEM)
    assert TOTPDevice.objects.count() == 1


@pytest.mark.parametrize(
    ("url", "field"), [("/account/password/", "old_password"), ("/account/two-factor/remove/", "password")]
)
def test_a_stolen_session_cannot_try_passwords_without_end(client: Client, alice: User, url: str, field: str) -> None:
    client.force_login(alice)
    tries = [client.post(url, {field: f"guess {number}"}).status_code for number in range(6)]
    assert tries == [200] * 5 + [429]
    assert "Too many tries" in client.post(url, {field: PASSWORD}).content.decode()


def test_keys_of_somebody_who_is_out_answer_nobody(client: Client, alice: User) -> None:
    key, _ = factories.make_key(owner=alice)
    factories.make_key(owner=factories.make_user("bob"))
    factories.make_key(owner=None)
    assert len(Key.objects.snapshot()) == 3
    alice.is_active = False
    alice.save()
    assert key.digest not in {grant.digest for grant in Key.objects.snapshot()}
    assert len(Key.objects.snapshot()) == 2
    client.force_login(factories.make_user("root", is_superuser=True))
    for url in ("/keys/", f"/keys/{key.pk}/"):
        assert "owner is out" in client.get(url).content.decode()
