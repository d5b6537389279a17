"""Documents of any kind, through the actions that store: nothing invalid gets in, nothing valid is lost."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.django import TestCase

from catalog import actions, document, spec, yaml_io
from catalog.actions import CatalogRefused
from catalog.document import MODEL_KEYS, PROFILE_KEYS
from catalog.models import CatalogVersion, Model
from catalog.spec import Problem
from catalog.validate import MAX_PROBLEMS, validate
from tenants.audit import SYSTEM
from tests import factories
from tests.catalog.strategies import TEAMS, catalogs

slow = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
junk = st.recursive(
    st.sampled_from(
        (None, True, 0, -1, 2**40, 1.5, float("inf"), "", "m", "a\0", "a\ud800", "\u200b", "/", "..", "x" * 5000)
    )
    | st.text(max_size=6)
    | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def places(data: object, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in `data` where something stands."""
    found = [at] if at else []
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in entries:
        found += places(value, (*at, key))
    return found


@st.composite
def spoilt(draw: st.DrawFn) -> Any:
    """A valid catalog's document with something else in one or two of its places."""
    whole = copy.deepcopy(document.write(draw(catalogs().filter(bool))))
    for _ in range(draw(st.integers(1, 2))):
        *way, last = draw(st.sampled_from(places(whole)))
        inside: Any = whole
        for step in way:
            inside = inside[step]
        inside[last] = draw(junk)
        if draw(st.booleans()) and isinstance(inside, dict):
            inside[draw(st.sampled_from((*MODEL_KEYS, *PROFILE_KEYS, "typo")))] = draw(junk)
    return whole


class Hostile(TestCase):
    @classmethod
    def setUpTestData(cls) -> None:
        for team in TEAMS:
            factories.make_team(team)

    @slow
    @given(catalogs(), spoilt())
    def test_what_is_spoilt_is_refused_with_its_place_or_is_a_valid_catalog(self, before: Any, data: Any) -> None:
        actions.apply_catalog(models=before, actor=SYSTEM)
        read = document.read(data)
        assert len(read.problems) <= MAX_PROBLEMS
        try:
            assert not read.problems
            actions.apply_catalog(models=read.models, actor=SYSTEM)
        except AssertionError:
            problems: tuple[Problem, ...] = read.problems
        except CatalogRefused as refused:
            problems = refused.problems
        else:
            held = Model.objects.snapshot()
            assert validate(held) == ()
            assert yaml_io.parse(yaml_io.dump(held)).models == held == read.models
            return
        assert problems
        assert all(each.text and (each.model or each.field or each.profile) for each in problems)
        assert Model.objects.snapshot() == before

    @slow
    @given(catalogs(), catalogs())
    def test_an_export_brings_the_same_back_and_twice_is_as_once(self, first: Any, second: Any) -> None:
        actions.apply_catalog(models=first, actor=SYSTEM)
        exported = yaml_io.dump(Model.objects.snapshot())
        actions.apply_catalog(models=second, actor=SYSTEM)
        version = actions.apply_catalog(models=yaml_io.parse(exported).models, actor=SYSTEM).version
        assert Model.objects.snapshot() == first
        assert yaml_io.dump(Model.objects.snapshot()) == exported
        again = actions.apply_catalog(models=yaml_io.parse(exported).models, actor=SYSTEM)
        assert (again.version, again.added, again.changed, again.removed) == (version, (), (), ())

    @slow
    @given(catalogs(), catalogs())
    def test_every_version_can_be_gone_back_to(self, first: Any, second: Any) -> None:
        start = actions.current_version()
        for models in (first, second):
            actions.apply_catalog(models=models, actor=SYSTEM)
        for number in range(start + 1, actions.current_version() + 1):
            text = CatalogVersion.objects.get(number=number).text
            actions.roll_back(version=number, actor=SYSTEM)
            assert yaml_io.dump(Model.objects.snapshot()) == text

    @slow
    @given(catalogs().filter(lambda models: len(models) > 1), st.randoms())
    def test_models_are_put_one_by_one_into_the_same_catalog(self, models: Any, chance: Any) -> None:
        actions.apply_catalog(models=(), actor=SYSTEM)
        for model in models:
            actions.put_model(model=model, actor=SYSTEM)
        assert Model.objects.snapshot() == models
        names = [model.name for model in models]
        chance.shuffle(names)
        for name in names:
            actions.remove_model(name=name, actor=SYSTEM)
        assert Model.objects.snapshot() == ()


def test_a_document_with_very_many_faults_gets_a_bounded_answer() -> None:
    data = {"models": [{"name": f"m{number}", "typo": 1, "args": []} for number in range(2000)]}
    assert len(document.read(data).problems) == document.MAX_PROBLEMS


def test_a_stanza_of_another_kind_is_no_empty_one() -> None:
    for value in (False, 0, [], ""):
        for key in ("scaling", "slo"):
            (problem,) = document.read_model({"name": "m", key: value}).problems
            assert problem.field == key
    assert document.read_model({"name": "m", "scaling": None, "slo": {}}).problems == ()


@pytest.mark.django_db
def test_where_weights_find_room_survives_the_way_through_yaml_and_rows() -> None:
    profile = spec.Profile(name="cpu", engine="llamacpp", min_disk_gb=12.5, required_memory_gb=3)
    models = (spec.Model(name="m", source="/m", profiles=(profile,)),)
    actions.apply_catalog(models=yaml_io.parse(yaml_io.dump(models)).models, actor=SYSTEM)
    assert Model.objects.snapshot()[0].profiles[0].min_disk_gb == 12.5
