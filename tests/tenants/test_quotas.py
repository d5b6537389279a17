"""Capacity quotas as rows and changes (TN-6)."""

from __future__ import annotations

import pytest
from django.db import IntegrityError, transaction
from pytest_django import DjangoAssertNumQueries

from tenants import actions, limits
from tenants.audit import SYSTEM
from tenants.models import AuditEntry, CapacityQuota, Organisation, Team
from tests import factories

CLASS = "h100-80g"


@pytest.mark.parametrize(
    ("gpu_class", "fine"),
    [
        ("h100-80g", True),
        ("a100-mig-3g-20g", True),
        ("H100-80g", False),
        ("h100", False),
        ("h100-80g\n", False),
        ("", False),
        ("x" * 40 + "-80g", False),
    ],
)
def test_a_class_is_a_product_and_its_memory(gpu_class: str, fine: bool) -> None:
    assert (limits.class_objection(gpu_class) == "") == fine


@pytest.mark.django_db
def test_a_quota_is_set_changed_and_lifted_each_with_its_audit() -> None:
    team = factories.make_team("Red")
    steps = [actions.set_quota(team=team, gpu_class=CLASS, cards=n, actor=SYSTEM) for n in (8, 8, 0, None, None)]
    assert steps == [True, False, True, True, False]
    assert not CapacityQuota.objects.exists()
    told = AuditEntry.objects.order_by("pk").values_list("action", "target", "before", "after")
    assert list(told) == [
        ("set capacity quota", "team Red", None, {CLASS: 8}),
        ("set capacity quota", "team Red", {CLASS: 8}, {CLASS: 0}),
        ("set capacity quota", "team Red", {CLASS: 0}, None),
    ]


@pytest.mark.django_db
def test_a_team_has_a_bounded_number_of_quotas() -> None:
    team = factories.make_team("Red")
    CapacityQuota.objects.bulk_create(
        CapacityQuota(team=team, gpu_class=f"c{n}-8g", cards=1) for n in range(limits.MAX_QUOTAS)
    )
    with pytest.raises(ValueError, match="Lift one of them"):
        actions.set_quota(team=team, gpu_class=CLASS, cards=1, actor=SYSTEM)
    assert actions.set_quota(team=team, gpu_class="c1-8g", cards=2, actor=SYSTEM)


@pytest.mark.django_db
def test_there_is_one_row_a_team_and_class() -> None:
    team = factories.make_team("Red")
    CapacityQuota.objects.create(team=team, gpu_class=CLASS, cards=1)
    with pytest.raises(IntegrityError), transaction.atomic():
        CapacityQuota.objects.create(team=team, gpu_class=CLASS, cards=2)


@pytest.mark.django_db
def test_every_team_is_read_in_one_query_and_of_one_name_the_tightest_counts(
    django_assert_num_queries: DjangoAssertNumQueries,
) -> None:
    red, blue = factories.make_team("red"), factories.make_team("blue")
    other = Organisation.objects.create(name="Other", slug="other")
    namesake = Team.objects.create(organisation=other, name="red", slug="red")
    for team, cards in ((red, 8), (namesake, 4)):
        CapacityQuota.objects.create(team=team, gpu_class=CLASS, cards=cards)
    CapacityQuota.objects.create(team=red, gpu_class="l4-22g", cards=0)
    with django_assert_num_queries(1):
        found = Team.objects.all().quotas()
    assert found == {"red": {CLASS: 4, "l4-22g": 0}, blue.slug: {}}
