"""Everything that changes the tenant tree: one transaction, one audit row, one ring where gateways must know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from django.db import transaction
from django.utils import timezone
from django.utils.text import slugify

from llmgw.core import doorbell
from tenants import audit
from tenants.audit import Actor
from tenants.keys import new_secret
from tenants.limits import MAX_BUDGETS, MAX_QUOTAS, Period, Unit
from tenants.models import (
    ApiToken,
    Budget,
    CapacityQuota,
    Key,
    Membership,
    Organisation,
    Price,
    Project,
    Role,
    Team,
    User,
)

SCOPES = ("read", "write")
LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent", "band", "models_allowed")
Subject = Organisation | Team | Project | Key


@transaction.atomic
def make_default_tree(*, owner: User, actor: Actor) -> Project:
    """The one organisation, team and project of a fresh install; found again when they are there."""
    organisation, _ = Organisation.objects.get_or_create(slug="default", defaults={"name": "Default"})
    team, _ = Team.objects.get_or_create(organisation=organisation, slug="default", defaults={"name": "Default"})
    project, made = Project.objects.get_or_create(team=team, slug="default", defaults={"name": "Default"})
    Membership.objects.get_or_create(user=owner, team=team, defaults={"role": Role.OWNER})
    if made:
        audit.record(actor, "make project", str(project))
    return project


@transaction.atomic
def make_operator(*, username: str, password: str, actor: Actor) -> User:
    user = User.objects.create_superuser(username=username, password=password)
    audit.record(actor, "make operator", username)
    return user


@transaction.atomic
def change_password(*, user: User, password: str, actor: Actor) -> None:
    user.set_password(password)
    user.save(update_fields=["password"])
    audit.record(actor, "change password", user.username)


@transaction.atomic
def make_project(*, team: Team, name: str, actor: Actor) -> Project:
    project = Project.objects.create(team=team, name=name, slug=slugify(name) or "project")
    audit.record(actor, "make project", f"{team} / {name}")
    return project


@transaction.atomic
def make_key(
    *,
    project: Project,
    name: str,
    actor: Actor,
    models_allowed: Sequence[str] = (),
    expires_at: datetime | None = None,
) -> tuple[Key, str]:
    """A new key and its secret, which is nowhere else and cannot be shown again."""
    secret = new_secret("sk")
    key = Key.objects.create(
        project=project,
        owner=actor.user,
        name=name,
        prefix=secret.prefix,
        digest=secret.digest,
        models_allowed=list(models_allowed),
        expires_at=expires_at,
    )
    audit.record(actor, "make key", str(key), after={"project": project.name, "models": list(models_allowed)})
    doorbell.table_changed()
    return key, secret.text


@transaction.atomic
def revoke_key(*, key: Key, actor: Actor) -> bool:
    """Stop a key at once (GW-21). False when it was revoked already."""
    revoked = Key.objects.filter(pk=key.pk, revoked_at=None).update(revoked_at=timezone.now())
    if not revoked:
        return False
    audit.record(actor, "revoke key", str(key))
    doorbell.table_changed()
    return True


@transaction.atomic
def make_api_token(
    *, user: User, name: str, scopes: Sequence[str], actor: Actor, expires_at: datetime | None = None
) -> tuple[ApiToken, str]:
    """A token for the API that acts as `user` within `scopes` ("read", "write"); shown once."""
    unknown = set(scopes) - set(SCOPES)
    if unknown:
        raise ValueError(f"unknown scope {', '.join(sorted(unknown))}; known: {', '.join(SCOPES)}")
    secret = new_secret("at")
    token = ApiToken.objects.create(
        user=user, name=name, prefix=secret.prefix, digest=secret.digest, scopes=list(scopes), expires_at=expires_at
    )
    audit.record(actor, "make API token", str(token), after={"scopes": list(scopes)})
    return token, secret.text


@transaction.atomic
def revoke_api_token(*, token: ApiToken, actor: Actor) -> bool:
    revoked = ApiToken.objects.filter(pk=token.pk, revoked_at=None).update(revoked_at=timezone.now())
    if revoked:
        audit.record(actor, "revoke API token", str(token))
    return bool(revoked)


# --- limits, budgets, prices -----------------------------------------------------------------------------------------
@transaction.atomic
def set_limits(*, subject: Subject, values: Mapping[str, Any], actor: Actor) -> bool:
    """Set those of LIMITS that `values` names, checked by whoever calls. False when they stood so already."""
    row = type(subject)._default_manager.select_for_update().get(pk=subject.pk)  # type: ignore[attr-defined]
    after = {name: value for name, value in values.items() if name in LIMITS and getattr(row, name) != value}
    if not after:
        return False
    before = {name: getattr(row, name) for name in after}
    type(subject)._default_manager.filter(pk=subject.pk).update(**after)  # type: ignore[attr-defined]
    for name, value in after.items():
        setattr(subject, name, value)
    audit.record(actor, "set limits", named(subject), before=before, after=after)
    doorbell.table_changed()
    return True


@transaction.atomic
def make_budget(
    *, subject: Subject, unit: Unit, amount: int, period: Period, stops: bool = True, actor: Actor
) -> Budget:
    """`amount` as tenants.limits.amount_of makes it. ValueError when the subject has as many as it may."""
    type(subject)._default_manager.select_for_update().get(pk=subject.pk)  # type: ignore[attr-defined]
    if len(Budget.objects.of(subject)[:MAX_BUDGETS]) == MAX_BUDGETS:
        raise ValueError(f"{named(subject)} has {MAX_BUDGETS} budgets, which is the most. Change or remove one.")
    budget = Budget(unit=unit, amount=amount, period=period, stops=stops)
    setattr(budget, str(subject._meta.model_name), subject)
    budget.save()
    audit.record(actor, "make budget", named(subject), after=_told(budget))
    doorbell.table_changed()
    return budget


@transaction.atomic
def change_budget(*, budget: Budget, values: Mapping[str, Any], actor: Actor) -> bool:
    """Change `unit`, `amount`, `period` or `stops`. False when nothing is different, or the budget is gone."""
    row = Budget.objects.select_for_update().filter(pk=budget.pk).first()
    if row is None:
        return False
    before = _told(row)
    for each in (row, budget):
        for name in ("unit", "amount", "period", "stops"):
            setattr(each, name, values.get(name, getattr(row, name)))
    after = _told(row)
    if before == after:
        return False
    row.save()
    audit.record(actor, "change budget", named(row.subject), before=before, after=after)
    doorbell.table_changed()
    return True


@transaction.atomic
def remove_budget(*, budget: Budget, actor: Actor) -> bool:
    subject, before = named(budget.subject), _told(budget)
    removed, _ = Budget.objects.filter(pk=budget.pk).delete()
    if not removed:
        return False
    audit.record(actor, "remove budget", subject, before=before)
    doorbell.table_changed()
    return True


@transaction.atomic
def set_quota(*, team: Team, gpu_class: str, cards: int | None, actor: Actor) -> bool:
    """How many cards of the class the team's models may hold; None lifts it. What they hold already they keep.

    False when it stood so already. ValueError when the team has as many quotas as it may.
    """
    Team.objects.select_for_update().get(pk=team.pk)
    old = CapacityQuota.objects.filter(team=team, gpu_class=gpu_class).first()
    if (old.cards if old else None) == cards:
        return False
    if cards is None:
        CapacityQuota.objects.filter(team=team, gpu_class=gpu_class).delete()
    elif old is None and CapacityQuota.objects.filter(team=team).count() >= MAX_QUOTAS:
        raise ValueError(f"{named(team)} has {MAX_QUOTAS} capacity quotas, which is the most. Lift one of them.")
    else:
        CapacityQuota.objects.update_or_create(team=team, gpu_class=gpu_class, defaults={"cards": cards})
    before = {gpu_class: old.cards} if old else None
    audit.record(
        actor, "set capacity quota", named(team), before=before, after=None if cards is None else {gpu_class: cards}
    )
    return True


@transaction.atomic
def set_price(
    *,
    model: str,
    valid_from: datetime,
    input: int,
    output: int,
    cached_input: int | None = None,
    request: int = 0,
    actor: Actor,
) -> Price:
    """What a model costs from then on, in units of 10^-8. What was recorded before keeps the cost that it had."""
    old = Price.objects.select_for_update().filter(model=model, valid_from=valid_from).first()
    values = {"input": input, "output": output, "cached_input": cached_input, "request": request}
    before = {name: getattr(old, name) for name in values} if old else None
    if old and before == values:
        return old
    price, _ = Price.objects.update_or_create(model=model, valid_from=valid_from, defaults=values)
    audit.record(actor, "set price", str(price), before=before, after=values)
    doorbell.table_changed()
    return price


@transaction.atomic
def remove_price(*, price: Price, actor: Actor) -> bool:
    before = {name: getattr(price, name) for name in ("input", "output", "cached_input", "request")}
    removed, _ = Price.objects.filter(pk=price.pk).delete()
    if not removed:
        return False
    audit.record(actor, "remove price", str(price), before=before)
    doorbell.table_changed()
    return True


def named(subject: Subject) -> str:
    """How the audit tells apart what may bear the same name: "project Research / bot"."""
    match subject:
        case Team():
            return f"team {subject}"
        case Project():
            return f"project {subject.team} / {subject}"
        case Key():
            return f"key {subject}"
        case _:
            return f"organisation {subject}"


def _told(budget: Budget) -> dict[str, Any]:
    return {name: getattr(budget, name) for name in ("unit", "amount", "period", "stops")}
