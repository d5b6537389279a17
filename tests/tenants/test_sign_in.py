"""Signing in: first links, passwords, codes, and how often one may try."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone
from django_otp import DEVICE_ID_SESSION_KEY
from django_otp.oath import TOTP
from django_otp.plugins.otp_static.models import StaticToken
from django_otp.plugins.otp_totp.models import TOTPDevice
from pytest_django import Settings

import llmgw.settings
from tenants import sign_in, totp
from tenants.audit import SYSTEM
from tenants.models import AuditEntry, FirstLink, SignedIn, SignInAttempt, User
from tests import factories

pytestmark = pytest.mark.django_db
PASSWORD = "correct horse"


def code_of(device: TOTPDevice, steps: int = 0) -> str:
    clock = TOTP(device.bin_key, device.step, device.t0, device.digits)
    clock.time = time.time() + 30 * steps
    return f"{clock.token():06d}"


def enrol(user: User) -> TOTPDevice:
    totp.start_enrolment(user)
    device = totp.confirm(user, code_of(TOTPDevice.objects.get(user=user, confirmed=False)), actor=SYSTEM)
    assert device is not None
    return device


def try_password(client: Client, username: str, password: str, **extra: str) -> int:
    return client.post("/sign-in/", {"username": username, "password": password}, **extra).status_code  # type: ignore[arg-type]


# --- passwords --------------------------------------------------------------------------------------------------------
def test_passwords_are_kept_by_argon2(settings: Settings) -> None:
    settings.PASSWORD_HASHERS = llmgw.settings.PASSWORD_HASHERS
    assert factories.make_user("alice").password.startswith("argon2")


def test_a_password_signs_in_and_leads_where_the_person_was_going(client: Client) -> None:
    user = factories.make_user("alice")
    response = client.post("/sign-in/?next=/account/", {"username": "alice", "password": PASSWORD, "next": "/account/"})
    assert response["Location"] == "/account/"
    assert client.get("/account/").status_code == 200
    assert SignedIn.objects.get().user == user
    assert AuditEntry.objects.get(action="sign in").actor == user


@pytest.mark.parametrize("evil", ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:alert(1)"])
def test_nobody_is_sent_elsewhere_after_signing_in(client: Client, evil: str) -> None:
    factories.make_user("alice")
    response = client.post("/sign-in/", {"username": "alice", "password": PASSWORD, "next": evil})
    assert response["Location"] == "/"


def test_a_wrong_name_and_a_wrong_password_read_the_same(client: Client) -> None:
    factories.make_user("alice")
    texts = set()
    for username in ("alice", "nobody"):
        page = client.post("/sign-in/", {"username": username, "password": "wrong"}).content.decode()
        assert "do not match" in page
        texts.add(page.replace(username, "").count("do not match"))
    assert texts == {1}


def test_the_sixth_try_within_a_quarter_of_an_hour_is_refused_even_when_right(client: Client) -> None:
    factories.make_user("alice")
    assert [try_password(client, "alice", "wrong") for _ in range(5)] == [200] * 5
    response = client.post("/sign-in/", {"username": "Alice", "password": PASSWORD})
    assert response.status_code == 429
    assert "Try again in" in response.content.decode()
    assert try_password(client, "alice", PASSWORD, REMOTE_ADDR="198.51.100.7") == 302


def test_old_tries_are_forgiven(client: Client) -> None:
    factories.make_user("alice")
    for _ in range(6):
        try_password(client, "alice", "wrong")
    SignInAttempt.objects.update(at=timezone.now() - sign_in.WINDOW)
    assert try_password(client, "alice", PASSWORD) == 302
    assert not SignInAttempt.objects.exists()


def test_a_forged_forwarded_header_does_not_make_a_new_address(client: Client) -> None:
    factories.make_user("alice")
    codes = [try_password(client, "alice", "wrong", HTTP_X_FORWARDED_FOR=f"198.51.100.{n}") for n in range(20)]
    assert codes[5:] == [429] * 15


def test_an_address_cannot_try_all_names(client: Client) -> None:
    codes = [try_password(client, f"user{n}", "wrong", REMOTE_ADDR="2001:db8::1") for n in range(sign_in.PER_ADDRESS)]
    assert set(codes) == {200}
    assert try_password(client, "another", "wrong", REMOTE_ADDR="2001:db8::2") == 429
    assert try_password(client, "another", "wrong", REMOTE_ADDR="2001:db8:0:1::2") == 200


def test_tries_are_kept_in_bounds_and_never_in_plain(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sign_in, "KEPT", 5)
    for number in range(12):
        try_password(client, f"user{number}", "wrong", REMOTE_ADDR=f"198.51.100.{number}")
    assert SignInAttempt.objects.count() == 5
    assert not SignInAttempt.objects.filter(who__contains="user").exists()


def test_an_inactive_person_cannot_sign_in(client: Client) -> None:
    factories.make_user("alice", is_active=False)
    assert "do not match" in client.post("/sign-in/", {"username": "alice", "password": PASSWORD}).content.decode()


# --- second factor ----------------------------------------------------------------------------------------------------
def test_with_a_second_factor_the_password_alone_opens_nothing(client: Client) -> None:
    enrol(factories.make_user("alice"))
    response = client.post("/sign-in/", {"username": "alice", "password": PASSWORD, "next": "/keys/"})
    assert response["Location"] == "/sign-in/code/?next=%2Fkeys%2F"
    assert client.get("/keys/").status_code == 302


def test_a_code_works_once(client: Client) -> None:
    device = enrol(factories.make_user("alice"))
    code = code_of(device, 1)
    for expected in (302, 200):
        try_password(client, "alice", PASSWORD)
        assert client.post("/sign-in/code/", {"code": f" {code[:3]} {code[3:]}"}).status_code == expected
        client.post("/sign-out/")


def test_a_wrong_code_while_enrolling_does_not_make_the_right_one_wait() -> None:
    user = factories.make_user("alice")
    totp.start_enrolment(user)
    for _ in range(5):
        assert totp.confirm(user, "000000", actor=SYSTEM) is None
    assert totp.confirm(user, code_of(TOTPDevice.objects.get()), actor=SYSTEM)


def test_the_code_that_enrolled_does_not_sign_in(client: Client) -> None:
    user = factories.make_user("alice")
    totp.start_enrolment(user)
    code = code_of(TOTPDevice.objects.get())
    assert totp.confirm(user, code, actor=SYSTEM)
    try_password(client, "alice", PASSWORD)
    assert client.post("/sign-in/code/", {"code": code}).status_code == 200


def test_codes_are_limited_too(client: Client) -> None:
    enrol(factories.make_user("alice"))
    try_password(client, "alice", PASSWORD)
    codes = [client.post("/sign-in/code/", {"code": "000000"}).status_code for _ in range(6)]
    assert codes == [200] * 5 + [429]


def test_the_second_step_ends_when_the_password_changes(client: Client) -> None:
    user = factories.make_user("alice")
    device = enrol(user)
    try_password(client, "alice", PASSWORD)
    user.set_password("another long phrase")
    user.save()
    assert client.post("/sign-in/code/", {"code": code_of(device, 1)})["Location"].startswith("/sign-in/?")


def test_the_second_step_ends_after_five_minutes(client: Client) -> None:
    enrol(factories.make_user("alice"))
    try_password(client, "alice", PASSWORD)
    session = client.session
    session["half_way"] = [*session["half_way"][:2], time.time() - 1]
    session.save()
    assert client.get("/sign-in/code/").status_code == 302


def test_a_backup_code_works_once_and_is_not_stored(client: Client) -> None:
    user = factories.make_user("alice")
    enrol(user)
    codes = totp.make_backup_codes(user, actor=SYSTEM)
    assert len(set(codes)) == 10
    assert not StaticToken.objects.filter(token__in=[code.replace("-", "") for code in codes]).exists()
    try_password(client, "alice", PASSWORD)
    assert client.post("/sign-in/code/", {"code": codes[3].upper()}).status_code == 302
    assert totp.backup_codes_left(user) == 9
    assert totp.verify(user, codes[3]) is None


def test_a_backup_code_without_enrolment_verifies_nothing() -> None:
    assert totp.verify(factories.make_user(), "abcd-efgh-jkmn") is None


@pytest.mark.parametrize("code", ["", "1" * 500, "é" * 6, "١٢٣٤٥٦", "12345", "a\x01b"])
def test_odd_codes_are_just_wrong(code: str) -> None:
    user = factories.make_user()
    enrol(user)
    totp.make_backup_codes(user, actor=SYSTEM)
    assert totp.verify(user, code) is None


def test_enrolling_anew_replaces_the_old_authenticator() -> None:
    user = factories.make_user()
    old = enrol(user)
    new = enrol(user)
    assert TOTPDevice.objects.get(user=user) == new
    assert totp.verify(user, code_of(old, 1)) is None


def test_a_reload_keeps_the_secret_that_was_scanned() -> None:
    user = factories.make_user()
    first, second = totp.start_enrolment(user), totp.start_enrolment(user)
    assert first.secret == second.secret
    assert first.qr.startswith("<svg")
    assert first.secret.replace(" ", "") not in first.qr


# --- first sign-in link -----------------------------------------------------------------------------------------------
def test_a_first_link_signs_in_once_and_leads_to_a_password(client: Client) -> None:
    user = factories.make_user("root", is_superuser=True)
    path = sign_in.make_first_link(user)
    assert path.startswith("/first-sign-in/")
    assert path.removeprefix("/first-sign-in/") not in FirstLink.objects.get().digest
    assert client.get(path).status_code == 200  # a look spends nothing
    assert client.post(path)["Location"] == "/account/password/"
    assert Client().post(path).status_code == 404
    new = {"new_password1": "a much longer phrase", "new_password2": "a much longer phrase"}
    assert client.post("/account/password/", new)["Location"] == "/account/two-factor/"
    user.refresh_from_db()
    assert user.check_password("a much longer phrase")
    assert "old_password" in client.get("/account/password/").content.decode()


def test_a_first_link_ends_after_an_hour(client: Client) -> None:
    path = sign_in.make_first_link(factories.make_user("root"))
    FirstLink.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    assert client.get(path).status_code == 404
    assert client.post(path).status_code == 404
    sign_in.make_first_link(factories.make_user("other"))
    assert FirstLink.objects.count() == 1


def test_a_first_link_does_not_go_around_the_second_factor(client: Client) -> None:
    user = factories.make_user("root")
    enrol(user)
    assert client.post(sign_in.make_first_link(user))["Location"] == "/sign-in/code/"
    assert client.get("/account/").status_code == 302


def test_two_browsers_with_one_link_sign_in_once(client: Client) -> None:
    path = sign_in.make_first_link(factories.make_user("root"))
    link = sign_in.first_link(path.rpartition("/")[2])
    assert link is not None
    client.post(path)
    assert not FirstLink.objects.filter(pk=link.pk, used_at=None).exists()
    assert sign_in.first_link(path.rpartition("/")[2]) is None


@pytest.mark.parametrize("code", ["x", "x" * 4000, "%00", "ünï"])
def test_made_up_links_are_not_found(client: Client, code: str) -> None:
    assert client.get(f"/first-sign-in/{code}").status_code == 404


# --- sessions ---------------------------------------------------------------------------------------------------------
def test_sessions_are_listed_and_others_can_be_ended(client: Client) -> None:
    factories.make_user("alice")
    other = Client(headers={"user-agent": "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"})
    for browser in (client, other):
        try_password(browser, "alice", PASSWORD)
    page = client.get("/account/").content.decode()
    assert "Firefox on Linux" in page
    mine = SignedIn.objects.get(session_key=client.session.session_key)
    client.post("/account/sessions/end/", {"session": str(mine.pk)})
    assert client.get("/account/").status_code == 200
    client.post("/account/sessions/end/")
    assert other.get("/account/").status_code == 302
    assert client.get("/account/").status_code == 200


def test_nobody_ends_the_sessions_of_another(client: Client) -> None:
    factories.make_user("alice")
    factories.make_user("charlie")
    try_password(client, "alice", PASSWORD)
    alices = SignedIn.objects.get()
    stranger = Client()
    try_password(stranger, "charlie", PASSWORD)
    stranger.post("/account/sessions/end/", {"session": str(alices.pk)})
    assert client.get("/account/").status_code == 200


def test_a_new_password_signs_other_browsers_out_and_keeps_this_one(client: Client) -> None:
    factories.make_user("alice")
    other = Client()
    for browser in (client, other):
        try_password(browser, "alice", PASSWORD)
    new = {"old_password": PASSWORD, "new_password1": "a much longer phrase", "new_password2": "a much longer phrase"}
    assert client.post("/account/password/", new).status_code == 302
    assert client.get("/account/").status_code == 200
    assert other.get("/account/").status_code == 302
    assert SignedIn.objects.count() == 1


def test_signing_in_changes_the_session_key(client: Client) -> None:
    factories.make_user("alice")
    enrol(User.objects.get())
    try_password(client, "alice", PASSWORD)
    half_way = client.session.session_key
    client.post("/sign-in/code/", {"code": code_of(TOTPDevice.objects.get(), 1)})
    assert client.session.session_key != half_way


def test_signing_out_takes_a_post(client: Client) -> None:
    factories.make_user("alice")
    try_password(client, "alice", PASSWORD)
    assert client.get("/sign-out/").status_code == 405
    client.post("/sign-out/")
    assert client.get("/account/").status_code == 302


@pytest.mark.parametrize(
    ("agent", "name"),
    [
        ("Mozilla/5.0 (Windows NT 10.0) AppleWebKit/537.36 Chrome/140.0 Safari/537.36 Edg/140.0", "Edge on Windows"),
        ("Mozilla/5.0 (iPhone; CPU iPhone OS 18_0 like Mac OS X) Version/18.0 Safari/604.1", "Safari on iPhone"),
        ("curl/8.14", "curl"),
        ("something else", "something else"),
        ("", ""),
    ],
)
def test_browsers_are_named_in_two_words(agent: str, name: str) -> None:
    assert sign_in.browser_name(agent) == name


def test_removing_the_second_factor_takes_the_password(client: Client) -> None:
    user = factories.make_user("alice")
    device = enrol(user)
    try_password(client, "alice", PASSWORD)
    client.post("/sign-in/code/", {"code": code_of(device, 1)})
    assert client.post("/account/two-factor/remove/", {"password": "wrong"}).status_code == 200
    assert totp.is_enrolled(user)
    assert client.post("/account/two-factor/remove/", {"password": PASSWORD}).status_code == 302
    assert not totp.is_enrolled(user)


def test_backup_codes_are_shown_once_and_only_to_the_enrolled(client: Client) -> None:
    user = factories.make_user("alice")
    client.force_login(user)
    assert client.post("/account/backup-codes/")["Location"] == "/account/two-factor/"
    device = enrol(user)
    assert client.post("/account/backup-codes/")["Location"] == "/account/two-factor/"  # came by the password alone
    session = client.session
    session[DEVICE_ID_SESSION_KEY] = device.persistent_id
    session.save()
    page = client.post("/account/backup-codes/")
    assert page.status_code == 200
    assert "no-store" in page["Cache-Control"]
