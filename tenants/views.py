"""Pages of the account and of keys: signing in, second factor, password, sessions; list and revoke keys."""

from __future__ import annotations

import django_otp
from django.contrib import messages
from django.contrib.auth import logout, update_session_auth_hash
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.http import url_has_allowed_host_and_scheme, urlencode
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_POST, require_safe

from tenants import actions, sign_in, totp, usage
from tenants.access import members, person
from tenants.audit import Actor
from tenants.figures import milliseconds
from tenants.forms import CodeForm, ConfirmPasswordForm, PasswordChangeForm, SetPasswordForm, SignInForm
from tenants.models import Key, Project, SignInAttempt, User
from tenants.sign_in import NeedsCode, SignedInAs, TooMany, Wrong

KEYS_PAGE = 100


def _next(request: HttpRequest) -> str:
    """Where to go afterwards: a path of ours or nowhere."""
    asked = request.POST.get("next") or request.GET.get("next") or ""
    return asked if url_has_allowed_host_and_scheme(asked, allowed_hosts=None) and asked.startswith("/") else ""


def _confirmation(request: HttpRequest, user: User) -> SignInAttempt | TooMany | None:
    """One try at the person's password, if this is one. A stolen session must not be the way to it."""
    if request.method != "POST":
        return None
    tried = sign_in.confirm(request, user)
    if isinstance(tried, TooMany):
        messages.error(request, _wait_text(tried))
    return tried


def _proven(request: HttpRequest, user: User) -> bool:
    """Whether the second factor was shown in this browser, where there is one."""
    return request.user.is_verified() or not totp.is_enrolled(user)  # type: ignore[union-attr]


def _wait_text(outcome: TooMany) -> str:
    return f"Too many tries from your address. Try again in {milliseconds(outcome.retry_after_s * 1000)}."


# --- signing in -------------------------------------------------------------------------------------------------------
@never_cache
@sensitive_post_parameters("password")
def sign_in_page(request: HttpRequest) -> HttpResponse:
    back = _next(request)
    if request.user.is_authenticated:
        return redirect(back or "home")
    form = SignInForm(request.POST or None)
    status = 200
    if form.is_valid():
        match sign_in.check_password(request, form.cleaned_data["username"], form.cleaned_data["password"]):
            case SignedInAs():
                return redirect(back or "home")
            case NeedsCode():
                return redirect(f"{reverse('sign-in-code')}?{urlencode({'next': back})}")
            case TooMany() as outcome:
                form.add_error(None, _wait_text(outcome))
                status = 429
            case Wrong():
                form.add_error(None, "Name and password do not match. Passwords are case sensitive.")
    return render(request, "tenants/sign_in.html", {"form": form, "next": back}, status=status)


@never_cache
def sign_in_code(request: HttpRequest) -> HttpResponse:
    """The second step: a code of the authenticator, or a backup code."""
    back = _next(request)
    user = sign_in.half_way(request)
    if user is None:
        return redirect(f"{reverse('sign-in')}?{urlencode({'next': back})}")
    form = CodeForm(request.POST or None)
    status = 200
    if form.is_valid():
        match sign_in.check_code(request, user, form.cleaned_data["code"]):
            case SignedInAs():
                return redirect(back or "home")
            case TooMany() as outcome:
                form.add_error("code", _wait_text(outcome))
                status = 429
            case Wrong():
                form.add_error("code", "That code does not fit. Codes work once: wait for the next one and try again.")
    return render(request, "tenants/sign_in_code.html", {"form": form, "next": back}, status=status)


@never_cache
def first_sign_in(request: HttpRequest, code: str) -> HttpResponse:
    """A link is spent by the button, not by the look: previews and scanners open links too."""
    link = sign_in.first_link(code)
    if request.method == "POST" and link is not None:
        match sign_in.use_first_link(request, link):
            case SignedInAs():
                return redirect("password")
            case NeedsCode():
                return redirect("sign-in-code")
            case None:
                link = None
    return render(request, "tenants/first_sign_in.html", {"link": link}, status=200 if link else 404)


@require_POST
def sign_out(request: HttpRequest) -> HttpResponse:
    logout(request)
    return redirect("home")


# --- account ----------------------------------------------------------------------------------------------------------
@require_safe
@members
def account(request: HttpRequest) -> HttpResponse:
    user = person(request)
    now = timezone.now()
    keys = Key.objects.visible_to(user).filter(owner=user).live(now).select_related("project__team").order_by("-pk")
    context = {
        "enrolled": totp.is_enrolled(user),
        "codes_left": totp.backup_codes_left(user),
        "sessions": sign_in.sessions(user),
        "this_session": request.session.session_key,
        "keys": keys[:20],
        "memberships": user.memberships.select_related("team__organisation").order_by("team__name")[:50],
        "mine_today": usage.total(usage.sums_of_today(now).filter(user=user.pk)),
    }
    return render(request, "tenants/account.html", context)


@never_cache
@sensitive_post_parameters()
@members
def password(request: HttpRequest) -> HttpResponse:
    user = person(request)
    first = sign_in.may_set_password(request)
    form_class = SetPasswordForm if first else PasswordChangeForm
    tried = None if first else _confirmation(request, user)
    late = isinstance(tried, TooMany)
    form = form_class(user, None if late else request.POST or None)
    if form.is_valid():
        if isinstance(tried, SignInAttempt):
            sign_in.confirmed(tried)
        actions.change_password(user=user, password=form.cleaned_data["new_password1"], actor=Actor.of(request))
        sign_in.password_is_set(request)
        update_session_auth_hash(request, user)
        sign_in.end_sessions(user, actor=Actor.of(request))
        sign_in.remember(request, user)
        messages.success(request, "Password saved. Other browsers are signed out.")
        return redirect("account" if totp.is_enrolled(user) else "two-factor")
    return render(request, "tenants/password.html", {"form": form, "first": first}, status=429 if late else 200)


@never_cache
@members
def two_factor(request: HttpRequest) -> HttpResponse:
    """Enrol an authenticator; somebody who has one but came without it confirms it here."""
    user = person(request)
    back = _next(request)
    enrolled = totp.is_enrolled(user)
    if enrolled and not request.user.is_verified():  # type: ignore[union-attr]
        sign_in.go_half_way(request, user)
        return redirect(f"{reverse('sign-in-code')}?{urlencode({'next': back})}")
    if enrolled:
        return redirect(back or "account")
    form = CodeForm(request.POST or None)
    if form.is_valid():
        device = totp.confirm(user, form.cleaned_data["code"], actor=Actor.of(request))
        if device is not None:
            django_otp.login(request, device)
            # A browser that came by the password alone, before, would go on without the second factor.
            sign_in.end_sessions(user, actor=Actor.of(request), except_key=request.session.session_key)
            codes = totp.make_backup_codes(user, actor=Actor.of(request))
            return render(request, "tenants/backup_codes.html", {"codes": codes, "next": back, "enrolled_now": True})
        form.add_error("code", "That code does not fit. Check that this device's clock is right and type the next one.")
    context = {"form": form, "enrolment": totp.start_enrolment(user), "next": back}
    return render(request, "tenants/two_factor.html", context)


@never_cache
@sensitive_post_parameters("password")
@members
def two_factor_remove(request: HttpRequest) -> HttpResponse:
    user = person(request)
    if not _proven(request, user):
        return redirect("two-factor")
    tried = _confirmation(request, user)
    late = isinstance(tried, TooMany)
    form = ConfirmPasswordForm(user, None if late else request.POST or None)
    if form.is_valid():
        if isinstance(tried, SignInAttempt):
            sign_in.confirmed(tried)
        totp.remove(user, actor=Actor.of(request))
        messages.success(request, "The second factor is removed.")
        return redirect("two-factor" if user.is_operator else "account")
    return render(request, "tenants/two_factor_remove.html", {"form": form}, status=429 if late else 200)


@never_cache
@require_POST
@members
def backup_codes(request: HttpRequest) -> HttpResponse:
    user = person(request)
    if not totp.is_enrolled(user) or not _proven(request, user):
        return redirect("two-factor")
    codes = totp.make_backup_codes(user, actor=Actor.of(request))
    return render(request, "tenants/backup_codes.html", {"codes": codes, "next": "", "enrolled_now": False})


@require_POST
@members
def end_session(request: HttpRequest) -> HttpResponse:
    """Sign one other browser out, or all others when none is named."""
    named = request.POST.get("session", "")
    ended = sign_in.end_sessions(
        person(request),
        actor=Actor.of(request),
        except_key=request.session.session_key,
        only=int(named) if named.isascii() and named.isdigit() and len(named) < 19 else None,
    )
    messages.success(request, f"{ended} other browser{'' if ended == 1 else 's'} signed out.")
    return redirect("account")


# --- keys -------------------------------------------------------------------------------------------------------------
@require_safe
@members
def key_list(request: HttpRequest) -> HttpResponse:
    user = person(request)
    rows = Key.objects.visible_to(user).select_related("project__team", "owner").order_by("-pk")
    show = request.GET.get("show", "live")
    if show != "all":
        rows = rows.live()
    before = request.GET.get("before", "")
    if before.isascii() and before.isdigit() and len(before) < 19:
        rows = rows.filter(pk__lt=int(before))
    found = list(rows[: KEYS_PAGE + 1])
    editable = set(Project.objects.editable_by(user).values_list("pk", flat=True)[:10_000])
    context = {
        "keys": found[:KEYS_PAGE],
        "older": found[KEYS_PAGE - 1].pk if len(found) > KEYS_PAGE else None,
        "show": show,
        "editable": editable,
        "now": timezone.now(),
    }
    return render(request, "tenants/key_list.html", context)


@members
def key_revoke(request: HttpRequest, pk: int) -> HttpResponse:
    """Says what will happen; the button does it."""
    key = get_object_or_404(Key.objects.editable_by(person(request)).select_related("project__team"), pk=pk)
    if request.method == "POST":
        if actions.revoke_key(key=key, actor=Actor.of(request)):
            messages.success(request, f"{key} is revoked. Gateways refuse it within a second.")
        return redirect("key-list")
    return render(request, "tenants/key_revoke.html", {"key": key})
