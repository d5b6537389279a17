"""Everything that changes the tenant tree: one transaction, one audit row, one ring where gateways must know."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from django.db import transaction
from django.utils import timezone
from django.utils.text import slugify

from llmgw.core import doorbell
from tenants import audit
from tenants.audit import Actor
from tenants.keys import new_secret
from tenants.models import ApiToken, Key, Membership, Organisation, Project, Role, Team, User

SCOPES = ("read", "write")


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
