"""Rows of what may be used and what it costs: limits of every subject, budgets, prices, and sums of what was used."""

from __future__ import annotations

from typing import Any, cast

from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import Q

from tenants import limits, money


class Limited(models.Model):
    """What an organisation, team, project or key may use. Nothing set: what the wider ones allow."""

    requests_per_minute = models.PositiveIntegerField(
        null=True, blank=True, validators=[MinValueValidator(1)], help_text="Empty: not limited here."
    )
    tokens_per_minute = models.PositiveBigIntegerField(
        null=True, blank=True, validators=[MinValueValidator(1)], help_text="Read and written. Empty: not limited here."
    )
    max_concurrent = models.PositiveIntegerField(
        "at once",
        null=True,
        blank=True,
        validators=[MinValueValidator(1)],
        help_text="Requests in flight. Empty: not limited here.",
    )
    band = models.CharField(
        max_length=20, blank=True, help_text="Priority band. Empty: the wider one's, else the model's."
    )
    models_allowed = models.JSONField(
        default=list, blank=True, help_text="Names of models and adapters; empty means all that the wider ones allow."
    )

    class Meta:
        abstract = True
        constraints = [
            models.CheckConstraint(
                condition=(Q(requests_per_minute=None) | Q(requests_per_minute__gt=0))
                & (Q(tokens_per_minute=None) | Q(tokens_per_minute__gt=0))
                & (Q(max_concurrent=None) | Q(max_concurrent__gt=0)),
                name="%(class)s_limits_are_positive",
            )
        ]


def _only(subject: str) -> Q:
    return Q(**{f"{name}__isnull": name != subject for name in limits.SUBJECTS})


class BudgetQuerySet(models.QuerySet["Budget"]):
    def visible_to(self, user: Any) -> BudgetQuerySet:
        """Of the teams that a person is in, of what these hold, and of the organisations above them."""
        if user.is_superuser:
            return self
        teams = user.memberships.values("team")
        return self.filter(
            Q(team__in=teams)
            | Q(project__team__in=teams)
            | Q(key__project__team__in=teams)
            | Q(organisation__in=user.memberships.values("team__organisation"))
        )

    def editable_by(self, user: Any) -> BudgetQuerySet:
        """Owners and leads of a team, those of its projects and keys; the team's own is an operator's."""
        if user.is_superuser:
            return self
        teams = user.memberships.filter(role__in=("owner", "lead")).values("team")
        return self.filter(Q(project__team__in=teams) | Q(key__project__team__in=teams))

    def of(self, subject: models.Model) -> BudgetQuerySet:
        return self.filter(**{str(subject._meta.model_name): subject.pk}).order_by("pk")


class Budget(models.Model):
    """What one subject may use in a period. Exactly one of the four subjects is set."""

    class Unit(models.TextChoices):
        MONEY = "money"
        TOKENS = "tokens"

    class Period(models.TextChoices):
        DAY = "day"
        WEEK = "week"
        MONTH = "month"
        TOTAL = "total"

    organisation = models.ForeignKey(
        "tenants.Organisation", on_delete=models.CASCADE, null=True, blank=True, related_name="budgets"
    )
    team = models.ForeignKey("tenants.Team", on_delete=models.CASCADE, null=True, blank=True, related_name="budgets")
    project = models.ForeignKey(
        "tenants.Project", on_delete=models.CASCADE, null=True, blank=True, related_name="budgets"
    )
    key = models.ForeignKey("tenants.Key", on_delete=models.CASCADE, null=True, blank=True, related_name="budgets")
    unit = models.CharField(max_length=6, choices=Unit.choices)
    amount = models.BigIntegerField(help_text="Tokens, or units of 10^-8 of the currency.")
    period = models.CharField(max_length=5, choices=Period.choices)
    stops = models.BooleanField(default=True, help_text="Refuse what goes beyond it; otherwise it only shows.")
    made_at = models.DateTimeField(auto_now_add=True)

    objects = BudgetQuerySet.as_manager()

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=_only("organisation") | _only("team") | _only("project") | _only("key"),
                name="budget_has_one_subject",
            ),
            models.CheckConstraint(condition=Q(amount__gt=0), name="budget_amount_is_positive"),
        ]

    def __str__(self) -> str:
        amount = f"{self.amount:,} tokens" if self.unit == self.Unit.TOKENS else money.text(self.amount)
        return f"{amount} {'in all' if self.period == self.Period.TOTAL else f'a {self.period}'} of {self.subject}"

    @property
    def kind(self) -> limits.Subject:
        return next(name for name in limits.SUBJECTS if getattr(self, f"{name}_id") is not None)

    @property
    def subject(self) -> Any:
        return getattr(self, self.kind)

    def value(self, time_zone: str) -> limits.Budget:
        unit, period = cast(limits.Unit, self.unit), cast(limits.Period, self.period)
        name, pk = str(self.subject.name), int(self.subject.pk)
        return limits.Budget(self.pk, self.kind, pk, name, unit, self.amount, period, time_zone, self.stops)


class CapacityQuotaQuerySet(models.QuerySet["CapacityQuota"]):
    def visible_to(self, user: Any) -> CapacityQuotaQuerySet:
        return self if user.is_superuser else self.filter(team__in=user.memberships.values("team"))


class CapacityQuota(models.Model):
    """How many cards of one GPU class the models of a team may hold together (TN-6). No row: no limit."""

    team = models.ForeignKey("tenants.Team", on_delete=models.CASCADE, related_name="quotas")
    gpu_class = models.CharField("GPU class", max_length=limits.MAX_GPU_CLASS, help_text="Such as h100-80g.")
    cards = models.PositiveIntegerField(help_text="How many its models may hold; 0: none.")
    made_at = models.DateTimeField(auto_now_add=True)

    objects = CapacityQuotaQuerySet.as_manager()

    class Meta:
        ordering = ["team__name", "gpu_class"]
        constraints = [
            models.UniqueConstraint(fields=["team", "gpu_class"], name="one_quota_per_team_and_class"),
        ]

    def __str__(self) -> str:
        return f"{self.cards} {self.gpu_class} of {self.team}"


class PriceQuerySet(models.QuerySet["Price"]):
    def snapshot(self) -> tuple[money.Price, ...]:
        """Every price, by model and then by when it began. One query."""
        rows = self.order_by().values_list("model", "valid_from", "input", "output", "cached_input", "request")
        found = (
            money.Price(model, at.timestamp(), input, output, cached_input, request)
            for model, at, input, output, cached_input, request in rows
        )
        # As Python compares names: a database may have an order of its own.
        return tuple(sorted(found, key=lambda price: (price.model, price.valid_from)))


class Price(models.Model):
    """What a model's tokens cost from a time on: units of 10^-8 of the currency, a million tokens and a request."""

    model = models.CharField(max_length=200)
    valid_from = models.DateTimeField()
    input = models.BigIntegerField()
    cached_input = models.BigIntegerField(null=True, blank=True, help_text="Empty: as input.")
    output = models.BigIntegerField()
    request = models.BigIntegerField(default=0)

    objects = PriceQuerySet.as_manager()

    class Meta:
        ordering = ["model", "-valid_from"]
        constraints = [
            models.UniqueConstraint(fields=["model", "valid_from"], name="one_price_per_model_and_time"),
            models.CheckConstraint(
                condition=Q(input__gte=0, output__gte=0, request__gte=0)
                & (Q(cached_input=None) | Q(cached_input__gte=0)),
                name="price_is_not_negative",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.model} from {self.valid_from:%Y-%m-%d %H:%M} UTC"


class UsageSlotQuerySet(models.QuerySet["UsageSlot"]):
    def visible_to(self, user: Any) -> UsageSlotQuerySet:
        if user.is_superuser:
            return self
        from tenants.models import Project  # that module has this one's rows too

        return self.filter(project__in=Project.objects.visible_to(user).values("pk"))


class UsageSlot(models.Model):
    """Sums of the requests that ended in a quarter of an hour. Quarters, so that midnight of every time zone is a
    border. Numbers of what may be gone since, not links; 0 for none. Written by tenants.rollup alone."""

    at = models.DateTimeField(help_text="Where the quarter of an hour begins.")
    project = models.BigIntegerField()
    key = models.BigIntegerField()
    user = models.BigIntegerField()
    model = models.CharField(max_length=200)
    adapter = models.CharField(max_length=200)
    requests = models.BigIntegerField()
    failed = models.BigIntegerField()
    prompt_tokens = models.BigIntegerField()
    cached_tokens = models.BigIntegerField()
    completion_tokens = models.BigIntegerField()
    cost = models.BigIntegerField(help_text="In units of 10^-8 of the currency.")
    unpriced = models.BigIntegerField(help_text="Requests that used tokens and whose model had no price.")

    objects = UsageSlotQuerySet.as_manager()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["at", "project", "key", "user", "model", "adapter"], name="one_slot_per_time_and_user"
            )
        ]
        indexes = [models.Index(fields=[name, "at"]) for name in ("project", "key", "model")]

    def __str__(self) -> str:
        return f"{self.model} at {self.at:%Y-%m-%d %H:%M}"
