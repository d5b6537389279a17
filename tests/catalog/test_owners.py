"""A model names the team that owns it: one that there is, and only one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from catalog import actions, spec
from catalog.defaults import default_catalog
from catalog.models import Model
from tenants.audit import SYSTEM
from tenants.models import Organisation, Team
from tests import factories

pytestmark = pytest.mark.django_db


def owned_by(team: str) -> spec.Model:
    [model] = default_catalog()
    return replace(model, team=team)


def test_a_model_of_a_team_that_there_is_is_taken() -> None:
    factories.make_team("red")
    actions.put_model(model=owned_by("red"), actor=SYSTEM)
    assert Model.objects.get().team == "red"


def test_a_typo_in_the_team_is_refused_with_the_likely_one() -> None:
    factories.make_team("research")
    with pytest.raises(actions.CatalogRefused) as refused:
        actions.apply_catalog(models=[owned_by("reserach")], actor=SYSTEM)
    [problem] = refused.value.problems
    assert (problem.model, problem.field) == ("smollm2", "team")
    assert "There is no team 'reserach'." in problem.text
    assert "research" in problem.text
    assert not Model.objects.exists()


def test_a_short_name_of_several_organisations_says_which_team_of_none() -> None:
    factories.make_team("red")
    Team.objects.create(organisation=Organisation.objects.create(name="O", slug="o"), name="red", slug="red")
    with pytest.raises(actions.CatalogRefused, match="2 organisations have a team red"):
        actions.put_model(model=owned_by("red"), actor=SYSTEM)


def test_a_team_that_went_since_keeps_nobody_from_changing_other_things() -> None:
    team = factories.make_team("red")
    actions.put_model(model=owned_by("red"), actor=SYSTEM)
    team.delete()
    actions.put_model(model=replace(owned_by("red"), aliases=("other",)), actor=SYSTEM)
    assert Model.objects.get().aliases == ["other"]
