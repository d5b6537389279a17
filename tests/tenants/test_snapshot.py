"""From the rows of the tenant tree to what each key allows: the path's limits, budgets, names and band."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from django.db import IntegrityError, transaction
from hypothesis import given
from hypothesis import strategies as st
from pytest_django import DjangoAssertNumQueries

from tenants import limits, money, paths
from tenants.keys import Grant
from tenants.limits import Level, Limit, Rate, effective
from tenants.models import Budget, Key, Organisation, Price, Project, Team
from tests import factories

QUERIES = 5


def the_grant() -> Grant:
    (grant,) = Key.objects.snapshot()
    return grant


def tree() -> tuple[Organisation, Team, Project, Key]:
    key, _ = factories.make_key(name="production", project=factories.make_project("bot"))
    return key.project.team.organisation, key.project.team, key.project, key


@pytest.mark.django_db
def test_a_key_without_anything_set_on_its_path_is_not_limited() -> None:
    tree()
    grant = the_grant()
    assert (grant.limits, grant.budgets, grant.models, grant.band) == ((), (), None, "")


@pytest.mark.django_db
def test_a_grant_carries_every_limit_on_its_path_widest_first() -> None:
    organisation, _, project, key = tree()
    Organisation.objects.update(requests_per_minute=1000)
    Project.objects.update(tokens_per_minute=5000, max_concurrent=4)
    Key.objects.update(requests_per_minute=60)
    assert the_grant().limits == (
        Limit("organisation", organisation.pk, organisation.name, requests_per_minute=1000),
        Limit("project", project.pk, "bot", tokens_per_minute=5000, concurrent=4),
        Limit("key", key.pk, "production", requests_per_minute=60),
    )


@pytest.mark.django_db
def test_a_grant_carries_every_budget_on_its_path_in_the_organisations_time_zone() -> None:
    _, team, _, key = tree()
    Organisation.objects.update(time_zone="Asia/Kathmandu")
    of_key = Budget.objects.create(key=key, unit="tokens", amount=7, period="total")
    of_team = Budget.objects.create(team=team, unit="money", amount=350, period="month", stops=False)
    also = Budget.objects.create(team=team, unit="tokens", amount=9, period="day")
    Budget.objects.create(team=factories.make_team(), unit="tokens", amount=1, period="day")
    assert the_grant().budgets == (
        limits.Budget(of_team.pk, "team", team.pk, team.name, "money", 350, "month", "Asia/Kathmandu", stops=False),
        limits.Budget(also.pk, "team", team.pk, team.name, "tokens", 9, "day", "Asia/Kathmandu"),
        limits.Budget(of_key.pk, "key", key.pk, "production", "tokens", 7, "total", "Asia/Kathmandu"),
    )


@pytest.mark.django_db
def test_a_key_may_use_what_everybody_on_its_path_allows_and_its_band_is_the_nearest() -> None:
    tree()
    Organisation.objects.update(models_allowed=["a", "b", "adapter"], band="batch")
    Team.objects.update(models_allowed=[])
    Project.objects.update(models_allowed=["b", "adapter", "c"], band="interactive")
    assert (the_grant().models, the_grant().band) == (frozenset({"b", "adapter"}), "interactive")
    Key.objects.update(models_allowed=["c"])
    assert the_grant().models == frozenset()


@pytest.mark.django_db
def test_reading_all_keys_costs_the_same_queries_however_many_there_are_and_shares_what_is_equal(
    django_assert_num_queries: DjangoAssertNumQueries,
) -> None:
    project = factories.make_project(models_allowed=["a"], requests_per_minute=5)
    Budget.objects.create(project=project, unit="tokens", amount=5, period="day")
    for _ in range(20):
        factories.make_key(project=project)
        factories.make_key(models_allowed=["b", "c"])
    with django_assert_num_queries(QUERIES):
        found = Key.objects.snapshot()
    mine = [grant for grant in found if grant.project_id == project.pk]
    for part in ("limits", "budgets", "models"):
        assert len({id(getattr(grant, part)) for grant in mine}) == 1
    assert len({id(grant.models) for grant in found}) == 2


def test_a_key_whose_project_went_away_meanwhile_is_left_out() -> None:
    key = paths.KeyRow(paths.Node(1, 2, "k", None, None, None, "", []), "d", "p", None, None)
    project = paths.Node(2, 3, "p", None, None, None, "", [])
    assert paths.grants([key], [], [], [], []) == ()
    assert paths.grants([key], [], [], [project], []) == ()


@pytest.mark.django_db
def test_prices_come_by_model_and_then_by_time() -> None:
    old, new = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 6, 1, tzinfo=UTC)
    Price.objects.create(model="b", valid_from=old, input=3, output=4)
    Price.objects.create(model="a", valid_from=new, input=5, output=6, cached_input=1, request=2)
    Price.objects.create(model="a", valid_from=old, input=1, output=2)
    assert Price.objects.all().snapshot() == (
        money.Price("a", old.timestamp(), 1, 2),
        money.Price("a", new.timestamp(), 5, 6, 1, 2),
        money.Price("b", old.timestamp(), 3, 4),
    )


@pytest.mark.django_db
@pytest.mark.parametrize("field", ["requests_per_minute", "tokens_per_minute", "max_concurrent"])
@pytest.mark.parametrize("kind", [Organisation, Team, Project, Key])
def test_no_row_holds_a_limit_of_nothing(kind: type[Organisation], field: str) -> None:
    tree()
    with pytest.raises(IntegrityError), transaction.atomic():
        kind.objects.update(**{field: 0})


@pytest.mark.django_db
@pytest.mark.parametrize("subjects", [(), ("organisation", "team"), ("project", "key"), ("team", "key")])
def test_a_budget_has_exactly_one_subject(subjects: tuple[str, ...]) -> None:
    held = dict(zip(limits.SUBJECTS, tree(), strict=True))
    with pytest.raises(IntegrityError), transaction.atomic():
        Budget.objects.create(unit="tokens", amount=1, period="day", **{subject: held[subject] for subject in subjects})


@pytest.mark.django_db
@pytest.mark.parametrize("change", [{"amount": 0}, {"amount": -1}])
def test_a_budget_of_nothing_is_refused(change: dict[str, int]) -> None:
    team = factories.make_team()
    with pytest.raises(IntegrityError), transaction.atomic():
        Budget.objects.create(**{"team": team, "unit": "tokens", "amount": 1, "period": "day", **change})


# --- what holds on a path, as values ---------------------------------------------------------------------------------
RATES = st.none() | st.integers(1, 5)
NAMES = st.none() | st.frozensets(st.sampled_from("abc"))
LEVELS = st.builds(
    Level,
    st.builds(Limit, st.just("team"), st.integers(), st.text(), RATES, RATES, RATES),
    st.sampled_from(["", "x", "y"]),
    NAMES,
)


@given(st.lists(LEVELS, max_size=4))
def test_the_effective_rate_is_the_smallest_on_the_path_and_says_whose_it_is(path: list[Level]) -> None:
    found = effective(path)
    for rate in found.rates:
        values = [value for level in path if (value := getattr(level.limit, rate.kind)) is not None]
        assert rate.value == min(values, default=None)
        if rate.of is None:
            assert not values
        else:
            assert getattr(rate.of, rate.kind) == rate.value


@given(st.lists(LEVELS, max_size=4))
def test_the_effective_names_are_those_that_everybody_allows_and_the_band_is_the_nearest(path: list[Level]) -> None:
    found = effective(path)
    for name in "abcd":
        allowed = all(level.models is None or name in level.models for level in path)
        assert (found.models is None or name in found.models) == allowed
    assert len(found.models_of) == sum(level.models is not None for level in path)
    bands = [level.band for level in path if level.band]
    assert found.band == (bands[-1] if bands else "")
    assert (found.band_of is None) == (not bands)


def test_of_equal_limits_the_widest_is_named() -> None:
    wide, narrow = Limit("team", 1, "t", requests_per_minute=5), Limit("key", 2, "k", requests_per_minute=5)
    assert effective([Level(wide), Level(narrow)]).rates[0] == Rate("requests_per_minute", 5, wide)
