"""Signing in (TN-3): first links, passwords, codes, limits on tries, and the browsers a person is signed in with."""

from __future__ import annotations

import hashlib
import ipaddress
import time
from dataclasses import dataclass
from datetime import datetime, timedelta

import django_otp
from django.contrib.auth import authenticate, login
from django.contrib.sessions.models import Session
from django.db import transaction
from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone

from tenants import audit, totp
from tenants.audit import Actor
from tenants.keys import MAX_LENGTH, digest, new_secret
from tenants.models import FirstLink, SignedIn, SignInAttempt, User

LINK_LIFE = timedelta(hours=1)
WINDOW = timedelta(minutes=15)
PER_PERSON = 5
PER_ADDRESS = 50
KEPT = 20_000
HALF_WAY_S = 300
SESSIONS_SHOWN = 20
BACKEND = "django.contrib.auth.backends.ModelBackend"
_HALF_WAY = "half_way"
_MAY_SET_PASSWORD = "may_set_password_until"  # noqa: S105 (a session entry's name)

# Chrome calls itself Safari and Edge calls itself both, so the order matters.
_BROWSERS = (("Firefox/", "Firefox"), ("Edg/", "Edge"), ("Chrome/", "Chrome"), ("Safari/", "Safari"), ("curl/", "curl"))
_SYSTEMS = (
    ("Android", "Android"),
    ("iPhone", "iPhone"),
    ("iPad", "iPad"),
    ("Windows", "Windows"),
    ("Mac OS X", "macOS"),
    ("Linux", "Linux"),
)


@dataclass(frozen=True, slots=True)
class Wrong:
    pass


@dataclass(frozen=True, slots=True)
class TooMany:
    retry_after_s: int


@dataclass(frozen=True, slots=True)
class NeedsCode:
    user: User


@dataclass(frozen=True, slots=True)
class SignedInAs:
    user: User


# --- first sign-in link -----------------------------------------------------------------------------------------------
def make_first_link(user: User) -> str:
    """The path of a link that signs `user` in once within the hour. It is shown once: only its digest is stored."""
    secret = new_secret("fs")
    now = timezone.now()
    FirstLink.objects.filter(expires_at__lt=now).delete()
    FirstLink.objects.create(user=user, digest=secret.digest, expires_at=now + LINK_LIFE)
    return reverse("first-sign-in", args=[secret.text.removeprefix("fs-")])


def first_link(code: str) -> FirstLink | None:
    """The link as long as it may be used."""
    if len(code) > MAX_LENGTH:
        return None
    rows = FirstLink.objects.filter(digest=digest(f"fs-{code}"), used_at=None, expires_at__gt=timezone.now())
    return rows.filter(user__is_active=True).select_related("user").first()


@transaction.atomic
def use_first_link(request: HttpRequest, link: FirstLink) -> NeedsCode | SignedInAs | None:
    """Spend the link; None when somebody else just did. Its person may set a password within the hour."""
    now = timezone.now()
    if not FirstLink.objects.filter(pk=link.pk, used_at=None, expires_at__gt=now).update(used_at=now):
        return None
    if totp.is_enrolled(link.user):
        go_half_way(request, link.user)
        return NeedsCode(link.user)
    finish(request, link.user)
    request.session[_MAY_SET_PASSWORD] = time.time() + LINK_LIFE.total_seconds()
    return SignedInAs(link.user)


def may_set_password(request: HttpRequest) -> bool:
    """Whether this person came by a first link and so need not know the old password."""
    return bool(request.session.get(_MAY_SET_PASSWORD, 0) > time.time())


def password_is_set(request: HttpRequest) -> None:
    request.session.pop(_MAY_SET_PASSWORD, None)


# --- password, then code ----------------------------------------------------------------------------------------------
def check_password(request: HttpRequest, username: str, password: str) -> Wrong | TooMany | NeedsCode | SignedInAs:
    """One try. With a second factor enrolled the person is only half way in; without, they are signed in."""
    address = request.META.get("REMOTE_ADDR", "")
    attempt = _count(address, username)
    if isinstance(attempt, TooMany):
        return attempt
    user = authenticate(request, username=username, password=password)
    if not isinstance(user, User):
        return Wrong()
    _forget(attempt)
    if totp.is_enrolled(user):
        go_half_way(request, user)
        return NeedsCode(user)
    finish(request, user)
    return SignedInAs(user)


def check_code(request: HttpRequest, user: User, code: str) -> Wrong | TooMany | SignedInAs:
    """One try of the second step; a code or backup code works once."""
    attempt = _count(request.META.get("REMOTE_ADDR", ""), f"code of {user.pk}")
    if isinstance(attempt, TooMany):
        return attempt
    device = totp.verify(user, code)
    if device is None:
        return Wrong()
    _forget(attempt)
    finish(request, user, device)
    return SignedInAs(user)


def confirm(request: HttpRequest, user: User) -> SignInAttempt | TooMany:
    """Count one try of somebody signed in to prove that they know their password."""
    return _count(request.META.get("REMOTE_ADDR", ""), f"password of {user.pk}")


def confirmed(attempt: SignInAttempt) -> None:
    """That try was right."""
    _forget(attempt)


def go_half_way(request: HttpRequest, user: User) -> None:
    """Remember for five minutes that the first step was passed."""
    request.session.cycle_key()
    request.session[_HALF_WAY] = [user.pk, user.get_session_auth_hash(), time.time() + HALF_WAY_S]


def half_way(request: HttpRequest) -> User | None:
    """Who passed the first step in this browser, unless the time is over or their password changed since."""
    kept = request.session.get(_HALF_WAY)
    if not kept or kept[2] < time.time():
        return None
    user = User.objects.filter(pk=kept[0], is_active=True).first()
    return user if user and user.get_session_auth_hash() == kept[1] else None


def finish(request: HttpRequest, user: User, device: totp.Device | None = None) -> None:
    """Sign in: a new session key, the second factor noted, one audit row, one row in the person's list."""
    request.session.pop(_HALF_WAY, None)
    login(request, user, backend=BACKEND)
    if device is not None:
        django_otp.login(request, device)
    remember(request, user)
    audit.record(Actor.of(request), "sign in", user.username, after={"second_factor": device is not None})


# --- sessions ---------------------------------------------------------------------------------------------------------
def remember(request: HttpRequest, user: User) -> None:
    """List this browser among the person's sessions; call again when the session key changes."""
    if not request.session.session_key:
        request.session.create()
    SignedIn.objects.update_or_create(
        session_key=request.session.session_key,
        defaults={
            "user": user,
            "address": request.META.get("REMOTE_ADDR", "")[:45],
            "browser": browser_name(request.headers.get("User-Agent", "")),
        },
    )


def browser_name(agent: str) -> str:
    """A User-Agent in two words, such as "Firefox on Linux"; its beginning when it is none that we know."""
    name = next((word for mark, word in _BROWSERS if mark in agent), "")
    system = next((word for mark, word in _SYSTEMS if mark in agent), "")
    return f"{name} on {system}" if name and system else name or agent[:60]


def sessions(user: User) -> tuple[SignedIn, ...]:
    """The person's live sessions, newest first; rows whose session is over go away. Three queries."""
    rows = list(SignedIn.objects.filter(user=user).order_by("-pk")[:200])
    live = set(
        Session.objects.filter(
            session_key__in=[row.session_key for row in rows], expire_date__gt=timezone.now()
        ).values_list("session_key", flat=True)
    )
    over = [row.pk for row in rows if row.session_key not in live]
    if over:
        SignedIn.objects.filter(pk__in=over).delete()
    return tuple(row for row in rows if row.session_key in live)[:SESSIONS_SHOWN]


@transaction.atomic
def end_sessions(user: User, *, actor: Actor, except_key: str | None = None, only: int | None = None) -> int:
    """Sign the person out of one browser, or of all but this one. Returns how many."""
    rows = SignedIn.objects.filter(user=user).exclude(session_key=except_key)
    if only is not None:
        rows = rows.filter(pk=only)
    ended, _ = Session.objects.filter(session_key__in=list(rows.values_list("session_key", flat=True))).delete()
    rows.delete()
    if ended:
        audit.record(actor, "end sessions", user.username, after={"ended": ended})
    return ended


# --- limits -----------------------------------------------------------------------------------------------------------
def _count(address: str, who: str) -> SignInAttempt | TooMany:
    """Write the try down first and count then, so that tries at the same instant see each other."""
    now = timezone.now()
    address = _block(address)
    since = now - WINDOW
    hashed = hashlib.sha256(who.casefold().encode("utf-8", "surrogateescape")).hexdigest()
    attempt = SignInAttempt.objects.create(at=now, address=address, who=hashed)
    _tidy(since, attempt.pk)
    recent = SignInAttempt.objects.filter(address=address, at__gt=since)
    mine = recent.filter(who=hashed)
    for rows, limit in ((mine, PER_PERSON), (recent, PER_ADDRESS)):
        if rows.count() > limit:
            attempt.delete()
            return TooMany(_wait_s(rows.order_by("at").values_list("at", flat=True).first(), now))
    return attempt


def _wait_s(oldest: datetime | None, now: datetime) -> int:
    return max(int(((oldest or now) + WINDOW - now).total_seconds()), 1)


def _forget(attempt: SignInAttempt) -> None:
    SignInAttempt.objects.filter(address=attempt.address, who=attempt.who).delete()


def _tidy(since: datetime, newest: int) -> None:
    SignInAttempt.objects.filter(at__lte=since).delete()
    SignInAttempt.objects.filter(pk__lte=newest - KEPT).delete()


def _block(address: str) -> str:
    """What counts as one address: an IPv6 customer has a whole /64."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address[:45]
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((parsed, 64), strict=False).network_address)
    return address
