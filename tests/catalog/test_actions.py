from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from hypothesis import HealthCheck, given, settings
from hypothesis.extra.django import TestCase
from pytest_django import DjangoAssertNumQueries

from catalog import actions, spec, yaml_io
from catalog.actions import CatalogRefused
from catalog.defaults import default_catalog
from catalog.models import CatalogVersion, Model
from llmgw.core.models import Revision
from tenants.audit import SYSTEM, Actor
from tenants.models import AuditEntry
from tests import factories
from tests.catalog.strategies import TEAMS, catalogs

ALICE = Actor(name="alice", via="cli")
CPU = spec.Profile(name="cpu", engine="llamacpp")
M = spec.Model(name="m", source="/m/m.gguf", profiles=(CPU,), scaling=spec.scaling(1))
N = replace(M, name="n", fallbacks=("m",))


def names() -> list[str]:
    return [model.name for model in Model.objects.snapshot()]


class Storing(TestCase):
    @classmethod
    def setUpTestData(cls) -> None:
        for team in TEAMS:
            factories.make_team(team)

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(catalogs(), catalogs())
    def test_rows_give_back_what_was_stored(self, first: Any, second: Any) -> None:
        for models in (first, second):
            actions.apply_catalog(models=models, actor=SYSTEM)
            assert Model.objects.snapshot() == models


pytestmark = pytest.mark.django_db


def test_a_change_leaves_one_version_one_audit_row_and_one_ring() -> None:
    before = Revision.current()
    applied = actions.apply_catalog(models=[M, N], actor=ALICE, note="first")
    assert (applied.version, applied.added, applied.changed, applied.removed) == (1, ("m", "n"), (), ())
    version = CatalogVersion.objects.get()
    assert (version.number, version.made_by, version.note) == (1, "alice", "first")
    assert yaml_io.parse(version.text).models == (M, N)
    entry = AuditEntry.objects.get()
    assert (entry.actor_name, entry.via, entry.target) == ("alice", "cli", "version 1: m, n")
    assert [model["name"] for model in entry.after["models"]] == ["m", "n"]
    assert Revision.current() == before + 1


def test_the_same_catalog_again_changes_nothing() -> None:
    actions.apply_catalog(models=default_catalog(), actor=ALICE)
    before = Revision.current()
    again = actions.apply_catalog(models=default_catalog(), actor=ALICE)
    assert (again.version, again.added, again.changed) == (1, (), ())
    assert (CatalogVersion.objects.count(), AuditEntry.objects.count(), Revision.current()) == (1, 1, before)


def test_a_bad_change_leaves_the_old_catalog() -> None:
    actions.apply_catalog(models=[M], actor=ALICE)
    with pytest.raises(CatalogRefused, match="model n, profile cpu: engine: 'lama' is unknown") as refused:
        actions.apply_catalog(models=[replace(N, profiles=(replace(CPU, engine="lama"),))], actor=ALICE)
    assert [problem.field for problem in refused.value.problems] == ["fallbacks", "engine"]
    assert names() == ["m"]
    assert (CatalogVersion.objects.count(), AuditEntry.objects.count()) == (1, 1)


def test_models_keep_their_order_and_a_new_order_is_a_change() -> None:
    actions.apply_catalog(models=[N, M], actor=ALICE)
    keys = dict(Model.objects.values_list("name", "pk"))
    actions.apply_catalog(models=[M, N], actor=ALICE)
    assert names() == ["m", "n"]
    assert dict(Model.objects.values_list("name", "pk")) == keys
    assert AuditEntry.objects.filter(target="version 2: order of models").exists()


def test_one_model_is_put_renamed_and_removed_under_the_rules_of_the_whole() -> None:
    actions.put_model(model=M, actor=ALICE)
    actions.put_model(model=N, actor=ALICE)
    assert actions.put_model(model=replace(M, aliases=("chat",)), actor=ALICE).changed == ("m",)
    assert names() == ["m", "n"]
    with pytest.raises(CatalogRefused, match="No model or alias is named 'm'"):
        actions.put_model(model=replace(M, name="mm"), replaces="m", actor=ALICE)
    with pytest.raises(CatalogRefused, match="No model or alias is named 'm'"):
        actions.remove_model(name="m", actor=ALICE)
    actions.put_model(model=replace(M, name="mm", aliases=("m",)), replaces="m", actor=ALICE)
    assert names() == ["mm", "n"]
    assert actions.remove_model(name="n", actor=ALICE).removed == ("n",)
    with pytest.raises(CatalogRefused, match="Did you mean mm"):
        actions.remove_model(name="mmm", actor=ALICE)
    with pytest.raises(CatalogRefused, match="no model of that name"):
        actions.put_model(model=N, replaces="gone", actor=ALICE)
    with pytest.raises(CatalogRefused, match="already a model's name"):
        actions.put_model(model=replace(M, name="MM"), actor=ALICE)


def test_rolling_back_is_a_new_version_of_the_old_text() -> None:
    actions.apply_catalog(models=[M], actor=ALICE)
    actions.apply_catalog(models=[], actor=ALICE)
    applied = actions.roll_back(version=1, actor=SYSTEM)
    assert (applied.version, applied.added, names()) == (3, ("m",), ["m"])
    newest = CatalogVersion.objects.first()
    assert newest is not None
    assert (newest.made_by, newest.note) == ("llmgw", "roll back to version 1")


def test_a_version_that_is_not_there_or_no_longer_valid_is_refused() -> None:
    with pytest.raises(CatalogRefused, match="There is no version 7"):
        actions.roll_back(version=7, actor=ALICE)
    CatalogVersion.objects.create(number=1, text="models: [{name: x}]", made_by="alice")
    with pytest.raises(CatalogRefused, match="line 1, model x: source"):
        actions.roll_back(version=1, actor=ALICE)
    assert names() == []


def test_reading_the_catalog_takes_two_queries(django_assert_num_queries: DjangoAssertNumQueries) -> None:
    actions.apply_catalog(models=[replace(M, name=f"m{number}") for number in range(20)], actor=ALICE)
    with django_assert_num_queries(2):
        assert len(Model.objects.snapshot()) == 20


def test_a_part_of_the_catalog_reads_as_in_the_whole(django_assert_num_queries: DjangoAssertNumQueries) -> None:
    actions.apply_catalog(models=[M, N, replace(M, name="o", profiles=(CPU, replace(CPU, name="b")))], actor=ALICE)
    first, second, third = Model.objects.snapshot()
    with django_assert_num_queries(2):
        assert Model.objects.filter(name__in=("o", "m")).snapshot() == (first, third)
    with django_assert_num_queries(2):
        assert Model.objects.named("n") == second
    with django_assert_num_queries(1):
        assert Model.objects.named("nobody") is None
    assert Model.objects.none().snapshot() == ()


def test_a_model_that_is_added_while_the_catalog_is_read_is_not_seen_without_its_profiles() -> None:
    actions.apply_catalog(models=[M], actor=ALICE)
    statements = []

    def add_after_the_first(execute: Any, sql: str, *rest: Any) -> Any:
        done = execute(sql, *rest)
        statements.append(sql)
        if len(statements) == 1:
            actions.put_model(model=N, actor=ALICE)
        return done

    with connection.execute_wrapper(add_after_the_first):
        assert Model.objects.snapshot() == (M,)
    assert Model.objects.snapshot() == (M, N)


IN_THREADS = """
import threading
import django
django.setup(set_prefix=False)
from django.core.management import call_command
from django.db import connection
from catalog import actions, spec
from catalog.models import Model
from tenants.audit import SYSTEM
call_command("migrate", verbosity=0)

def put(number):
    model = spec.Model(f"m{number}", source="/m", profiles=(spec.Profile("cpu", "llamacpp"),))
    actions.put_model(model=model, actor=SYSTEM)
    connection.close()

threads = [threading.Thread(target=put, args=(number,)) for number in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(actions.current_version(), sorted(model.name for model in Model.objects.snapshot()))
"""


def test_changes_at_the_same_time_wait_for_each_other(tmp_path: Path) -> None:
    """On a file of its own: the tests' store in memory has other locks than the product's."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("LLMGW_")}
    environment |= {"LLMGW_DATA_DIR": str(tmp_path), "DJANGO_SETTINGS_MODULE": "llmgw.settings"}
    done = subprocess.run(
        [sys.executable, "-c", IN_THREADS], env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.stdout.strip() == "6 ['m0', 'm1', 'm2', 'm3', 'm4', 'm5']", done.stderr
