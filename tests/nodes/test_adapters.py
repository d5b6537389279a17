"""Adapters that a replica starts with reach its agent and the gateways, and a change of them rolls it (CAT-40)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import catalog.models
from agent import protocol
from catalog import spec
from nodes import intake
from nodes.models import Replica
from nodes.state import profile_digest
from tests.factories import make_model
from tests.nodes.test_intake import running
from tests.nodes.test_stream import a_register
from tests.worlds import World

RED, BLUE = spec.Adapter("red", "/a/red.gguf"), spec.Adapter("blue", "https://models.example/blue.gguf")
HELD = [{"name": "red", "source": "/a/red.gguf"}, {"name": "blue", "source": "https://models.example/blue.gguf"}]
CPU = spec.Profile("cpu", engine="llamacpp")
FIXED = spec.Profile("gpu", engine="vllm", gpu_class="h100-80g")
FREE = replace(FIXED, max_loaded_adapters=4)


def model(*adapters: spec.Adapter) -> spec.Model:
    return spec.Model("m", source="/models/m", adapters=adapters)


@pytest.mark.parametrize("profile", [CPU, FIXED])
def test_adapters_that_an_engine_has_from_its_start_change_the_digest(profile: spec.Profile) -> None:
    digests = [
        profile_digest(model(*adapters), profile)
        for adapters in ((), (RED,), (RED, BLUE), (BLUE, RED), (replace(RED, source="/a/red-2.gguf"),))
    ]
    assert len(set(digests)) == 5


def test_adapters_that_are_loaded_when_asked_for_replace_nothing_and_how_many_does() -> None:
    assert profile_digest(model(RED), FREE) == profile_digest(model(BLUE), FREE)
    digests = {profile_digest(model(RED), each) for each in (FIXED, FREE, replace(FREE, max_loaded_adapters=5))}
    assert len(digests) == 3


@pytest.mark.django_db
def test_adapters_reach_the_agent_and_the_gateways_in_the_catalogs_order() -> None:
    make_model()
    catalog.models.Model.objects.update(adapters=HELD)
    world = World()
    agent = world.add("one")
    world.run(6)
    [engine] = agent.engines.values()
    assert engine.spec.adapters == tuple(protocol.Adapter(**each) for each in HELD)
    assert engine.spec.max_loaded_adapters is None
    [endpoint] = Replica.objects.all().endpoints()
    assert endpoint.usable
    assert endpoint.adapters == ("red", "blue")
    assert endpoint.adapter_sources == ("/a/red.gguf", "https://models.example/blue.gguf")
    assert endpoint.max_loaded_adapters is None


@pytest.mark.django_db
def test_a_changed_adapter_rolls_the_replica_and_the_old_one_says_what_it_has_until_then() -> None:
    make_model()
    catalog.models.Model.objects.update(adapters=HELD[:1])
    world = World()
    world.add("one")
    world.run(6)
    [before] = Replica.objects.all()
    catalog.models.Model.objects.update(adapters=HELD)
    assert [each.adapters for each in Replica.objects.all().endpoints()] == [("red",)]
    world.run(90)
    [after] = Replica.objects.all()
    assert after.name != before.name
    assert [each.adapters for each in Replica.objects.all().endpoints()] == [("red", "blue")]


@pytest.mark.django_db
def test_a_store_that_forgot_a_replica_learns_its_adapters_from_the_agent() -> None:
    make_model()
    catalog.models.Model.objects.update(adapters=HELD)
    world = World()
    agent = world.add("one")
    world.run(6)
    Replica.objects.all().delete()
    agent.connect()
    [endpoint] = Replica.objects.all().endpoints()
    assert endpoint.adapters == ("red", "blue")


@pytest.mark.parametrize(
    "fields",
    [
        {"adapters": (protocol.Adapter(name="", source="/a"),)},
        {"adapters": (protocol.Adapter(name="a" * 201, source="/a"),)},
        {"adapters": (protocol.Adapter(name="a", source="/" * 1001),)},
        {"max_loaded_adapters": -1},
        {"max_loaded_adapters": 2**31},
    ],
)
def test_adapters_that_no_row_can_hold_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(intake.Unfit, match=r"adapter.* of replica r"):
        intake.fitted(a_register(shards=(running(**fields),)))
    good = {"adapters": (protocol.Adapter(name="a", source="/a"),), "max_loaded_adapters": 2}
    assert intake.fitted(a_register(shards=(running(**good),)))
