"""The tenant tree (organisation, team, project, key), the people in it, what they used and what they changed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from django.contrib.auth.models import AbstractUser
from django.db import models
from django.db.models import Q
from django.utils import timezone

from tenants import paths
from tenants.keys import Grant
from tenants.limit_models import Budget, CapacityQuota, Limited, Price, UsageSlot
from tenants.limits import SUBJECTS, Subject

__all__ = [
    "ApiToken",
    "AuditEntry",
    "Budget",
    "CapacityQuota",
    "FirstLink",
    "Key",
    "Membership",
    "Organisation",
    "Price",
    "Project",
    "Role",
    "SignInAttempt",
    "SignedIn",
    "Team",
    "Usage",
    "UsageSlot",
    "User",
]


class User(AbstractUser):
    """A person. Superusers are operators; everybody else sees what their memberships show."""

    @property
    def is_operator(self) -> bool:
        return self.is_active and self.is_superuser


class Role(models.TextChoices):
    OWNER = "owner"
    LEAD = "lead"
    MEMBER = "member"
    VIEWER = "viewer"


EDITING_ROLES = (Role.OWNER, Role.LEAD, Role.MEMBER)
LEADING_ROLES = (Role.OWNER, Role.LEAD)

_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent", "band", "models_allowed")


class OrganisationQuerySet(models.QuerySet["Organisation"]):
    def visible_to(self, user: User) -> OrganisationQuerySet:
        return self if user.is_superuser else self.filter(pk__in=user.memberships.values("team__organisation"))

    def limited_by(self, user: User) -> OrganisationQuerySet:
        """Whose limits and budgets this person sets."""
        return self if user.is_superuser else self.none()

    def nodes(self) -> list[paths.Node]:
        return [paths.Node(pk, None, *rest) for pk, *rest in self.values_list("pk", "name", *_LIMITS, "time_zone")]


class Organisation(Limited):
    name = models.CharField(max_length=80, unique=True)
    slug = models.SlugField(max_length=80, unique=True)
    time_zone = models.CharField(max_length=64, default="UTC")
    made_at = models.DateTimeField(auto_now_add=True)

    objects = OrganisationQuerySet.as_manager()

    class Meta(Limited.Meta):
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class TeamQuerySet(models.QuerySet["Team"]):
    def visible_to(self, user: User) -> TeamQuerySet:
        if user.is_superuser:
            return self
        return self.filter(memberships__user=user)

    def limited_by(self, user: User) -> TeamQuerySet:
        """Whose limits and budgets this person sets: a team does not lift its own."""
        return self if user.is_superuser else self.none()

    def nodes(self) -> list[paths.Node]:
        return [paths.Node(*row) for row in self.values_list("pk", "organisation_id", "name", *_LIMITS)]

    def quotas(self) -> dict[str, dict[str, int]]:
        """Of every team, by its slug and GPU class, how many cards its models may hold. Where teams of several
        organisations share a slug the tightest counts. One query."""
        found: dict[str, dict[str, int]] = {}
        for slug, gpu_class, cards in self.order_by().values_list("slug", "quotas__gpu_class", "quotas__cards"):
            held = found.setdefault(slug, {})
            if gpu_class is not None:
                held[gpu_class] = min(cards, held.get(gpu_class, cards))
        return found


class Team(Limited):
    organisation = models.ForeignKey(Organisation, on_delete=models.PROTECT, related_name="teams")
    name = models.CharField(max_length=80)
    slug = models.SlugField(max_length=80)
    made_at = models.DateTimeField(auto_now_add=True)

    objects = TeamQuerySet.as_manager()

    class Meta(Limited.Meta):
        ordering = ["name"]
        constraints = [
            *Limited.Meta.constraints,
            models.UniqueConstraint(fields=["organisation", "slug"], name="team_slug_once_per_organisation"),
        ]

    def __str__(self) -> str:
        return self.name


class Membership(models.Model):
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="memberships")
    team = models.ForeignKey(Team, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=10, choices=Role.choices, default=Role.MEMBER)
    made_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user", "team"], name="one_membership_per_person_and_team")]

    def __str__(self) -> str:
        return f"{self.user} in {self.team} ({self.role})"


class ProjectQuerySet(models.QuerySet["Project"]):
    def visible_to(self, user: User) -> ProjectQuerySet:
        if user.is_superuser:
            return self
        return self.filter(team__memberships__user=user)

    def editable_by(self, user: User) -> ProjectQuerySet:
        """Projects whose keys this person may make and revoke."""
        if user.is_superuser:
            return self
        return self.filter(team__memberships__user=user, team__memberships__role__in=EDITING_ROLES)

    def limited_by(self, user: User) -> ProjectQuerySet:
        """Projects whose limits and budgets this person sets: of teams that they own or lead."""
        if user.is_superuser:
            return self
        return self.filter(team__memberships__user=user, team__memberships__role__in=LEADING_ROLES)

    def nodes(self) -> list[paths.Node]:
        return [paths.Node(*row) for row in self.values_list("pk", "team_id", "name", *_LIMITS)]


class Project(Limited):
    """Belongs to a team, holds keys, and is the unit of fairness and accounting."""

    team = models.ForeignKey(Team, on_delete=models.PROTECT, related_name="projects")
    name = models.CharField(max_length=80)
    slug = models.SlugField(max_length=80)
    made_at = models.DateTimeField(auto_now_add=True)

    objects = ProjectQuerySet.as_manager()

    class Meta(Limited.Meta):
        ordering = ["name"]
        constraints = [
            *Limited.Meta.constraints,
            models.UniqueConstraint(fields=["team", "slug"], name="project_slug_once_per_team"),
        ]

    def __str__(self) -> str:
        return self.name


class KeyQuerySet(models.QuerySet["Key"]):
    def visible_to(self, user: User) -> KeyQuerySet:
        return self if user.is_superuser else self.filter(project__team__memberships__user=user)

    def editable_by(self, user: User) -> KeyQuerySet:
        if user.is_superuser:
            return self
        return self.filter(project__team__memberships__user=user, project__team__memberships__role__in=EDITING_ROLES)

    def limited_by(self, user: User) -> KeyQuerySet:
        if user.is_superuser:
            return self
        return self.filter(project__team__memberships__user=user, project__team__memberships__role__in=LEADING_ROLES)

    def live(self, now: datetime | None = None) -> KeyQuerySet:
        return self.filter(Q(expires_at=None) | Q(expires_at__gt=now or timezone.now()), revoked_at=None)

    def snapshot(self) -> tuple[Grant, ...]:
        """Every key that may still be used, as the gateway knows it: not of people who are out.

        Five queries, the narrow subjects before the wide ones: what a row belongs to is then found.
        """
        rows = self.filter(revoked_at=None).exclude(owner__is_active=False)
        keys = [
            paths.KeyRow(paths.Node(*row[:8]), *row[8:])
            for row in rows.order_by().values_list(
                "pk", "project_id", "name", *_LIMITS, "digest", "prefix", "owner_id", "expires_at"
            )
        ]
        projects, teams = Project.objects.all().nodes(), Team.objects.all().nodes()
        organisations = Organisation.objects.all().nodes()
        return paths.grants(keys, organisations, teams, projects, budget_rows())


def budget_rows() -> list[paths.BudgetRow]:
    """Every budget, in the order in which they were made. One query."""
    ids = [f"{subject}_id" for subject in SUBJECTS]
    rows = Budget.objects.order_by("pk").values_list("pk", "unit", "amount", "period", "stops", *ids)
    found = []
    for pk, unit, amount, period, stops, *owners in rows:
        subject, subject_id = _owner(owners)
        found.append(paths.BudgetRow(pk, subject, subject_id, unit, amount, period, stops))
    return found


def _owner(owners: Sequence[int | None]) -> tuple[Subject, int]:
    return next((subject, pk) for subject, pk in zip(SUBJECTS, owners, strict=True) if pk is not None)


class Key(Limited):
    """A project key. Only the SHA-256 of its 256 random bits is stored; `prefix` is what people see of it."""

    project = models.ForeignKey(Project, on_delete=models.PROTECT, related_name="keys")
    owner = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, blank=True, related_name="keys")
    name = models.CharField(max_length=80)
    prefix = models.CharField(max_length=12, db_index=True)
    digest = models.CharField(max_length=64, unique=True)
    made_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)

    objects = KeyQuerySet.as_manager()

    class Meta(Limited.Meta):
        ordering = ["-made_at", "-pk"]

    def __str__(self) -> str:
        return f"{self.prefix}… {self.name}"


class ApiToken(models.Model):
    """Lets a program use the API as a person, within `scopes` ("read", "write")."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="api_tokens")
    name = models.CharField(max_length=80)
    prefix = models.CharField(max_length=12)
    digest = models.CharField(max_length=64, unique=True)
    scopes = models.JSONField(default=list)
    made_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        verbose_name = "API token"

    def __str__(self) -> str:
        return f"{self.prefix}… {self.name}"


class UsageQuerySet(models.QuerySet["Usage"]):
    def visible_to(self, user: User) -> UsageQuerySet:
        return self if user.is_superuser else self.filter(project__team__memberships__user=user)

    def latest(self, count: int) -> UsageQuerySet:  # type: ignore[override]
        return self.select_related("project", "key").order_by("-at", "-pk")[:count]


class Usage(models.Model):
    """One finished request. `None` token counts are unknown, never zero; no text of prompt or answer, ever."""

    request_id = models.CharField(max_length=64, unique=True)
    at = models.DateTimeField(db_index=True, help_text="When it ended.")
    # Every index is paid for with each request, and most for one whose neighbours are elsewhere each time: by key and
    # model it is looked for among a project's, from where the sums say that there are some (tenants.finding).
    project = models.ForeignKey(Project, on_delete=models.PROTECT, null=True, related_name="usage", db_index=False)
    key = models.ForeignKey(Key, on_delete=models.PROTECT, null=True, related_name="usage", db_index=False)
    user = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, related_name="usage", db_index=False)
    route = models.CharField(max_length=60)
    model = models.CharField(max_length=200)
    adapter = models.CharField(max_length=200, blank=True)
    replica = models.CharField(max_length=120, blank=True)
    node = models.CharField(max_length=120, blank=True)
    status = models.IntegerField()
    error_code = models.CharField(max_length=40, blank=True)
    streamed = models.BooleanField(default=False)
    prompt_tokens = models.BigIntegerField(null=True)
    cached_tokens = models.BigIntegerField(null=True)
    completion_tokens = models.BigIntegerField(null=True)
    reasoning_tokens = models.BigIntegerField(null=True)
    estimated = models.BooleanField(default=False)
    queue_ms = models.FloatField(default=0)
    first_token_ms = models.FloatField(null=True)
    total_ms = models.FloatField()
    cost = models.BigIntegerField(null=True, help_text="In units of 10^-8 of the currency; none without a price.")
    band = models.CharField(max_length=20, blank=True)
    explained = models.JSONField(null=True, help_text="What was decided and why; removed after a while.")

    objects = UsageQuerySet.as_manager()

    class Meta:
        verbose_name_plural = "usage"
        indexes = [
            models.Index(fields=["project", "at"]),
            models.Index(fields=["at"], condition=Q(status__gte=400), name="usage_failed"),
            models.Index(fields=["project", "at"], condition=Q(status__gte=400), name="usage_failed_of_project"),
        ]

    def __str__(self) -> str:
        return self.request_id


class AuditEntry(models.Model):
    """What somebody changed. Append-only."""

    at = models.DateTimeField(auto_now_add=True, db_index=True)
    actor = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, related_name="+")
    actor_name = models.CharField(max_length=150)
    via = models.CharField(max_length=10, help_text="web, admin, api, cli or system")
    action = models.CharField(max_length=60)
    target = models.CharField(max_length=200)
    before = models.JSONField(null=True)
    after = models.JSONField(null=True)
    address = models.CharField(max_length=45, blank=True)

    class Meta:
        verbose_name_plural = "audit entries"

    def __str__(self) -> str:
        return f"{self.actor_name} {self.action} {self.target}"


class FirstLink(models.Model):
    """A link that signs one person in, once, within its hour. Only the SHA-256 of its code is stored."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="first_links")
    digest = models.CharField(max_length=64, unique=True)
    made_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"first sign-in of {self.user}"


class SignInAttempt(models.Model):
    """A recent try to sign in. `who` is a digest: what people type there may be their password."""

    at = models.DateTimeField(db_index=True)
    address = models.CharField(max_length=45, db_index=True)
    who = models.CharField(max_length=64)

    class Meta:
        verbose_name = "sign-in attempt"
        indexes = [models.Index(fields=["who", "address"], name="sign_in_attempt_who_address")]

    def __str__(self) -> str:
        return f"{self.address} at {self.at:%Y-%m-%d %H:%M}"


class SignedIn(models.Model):
    """A browser that somebody is signed in with; the session itself is Django's."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="signed_in")
    session_key = models.CharField(max_length=40, unique=True)
    address = models.CharField(max_length=45, blank=True)
    browser = models.CharField(max_length=200, blank=True)
    made_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name = "session"

    def __str__(self) -> str:
        return f"{self.user} from {self.address}"
