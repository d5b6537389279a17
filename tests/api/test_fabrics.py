from __future__ import annotations

import pytest
from django.test import Client
from pytest_django import DjangoAssertNumQueries

from tests.api.cast import World, client
from tests.pages import machines


@pytest.fixture
def asks(world: World) -> Client:
    return client(world.root, "read")


def test_the_map_of_fabrics_says_what_the_page_says(asks: Client) -> None:
    machines.make_fleet()
    found = asks.get("/api/v1/fabrics").json()
    lines = {each["name"]: each for each in found["fabrics"]}
    assert (lines["ib0"]["nodes"], lines["ib0"]["up"], lines["ib0"]["rate_gbit_s"]) == (3, 3, 400.0)
    assert "One name over 2 subnet managers" in lines["ib0"]["marks"][0]
    assert lines["ib-east"]["rate_gbit_s"] is None
    assert (len(found["ports"]), found["undeclared"], found["links"]["linked"]) == (12, 4, 32)


def test_ports_are_narrowed_to_one_fabric_or_to_none(asks: Client) -> None:
    machines.make_fleet()
    ports = asks.get("/api/v1/fabrics?fabric=ib-east").json()["ports"]
    assert [(port["node"], port["adapter"], port["state"]) for port in ports] == [
        ("gpu-04", "mlx5_0", "ACTIVE"),
        ("gpu-04", "mlx5_1", "INIT"),
    ]
    spare = asks.get("/api/v1/fabrics?fabric=none").json()["ports"]
    assert {(port["adapter"], port["gids"]) for port in spare} == {("mlx5_9", "3 ::ffff:10.0.0.1 (RoCE v2)")}


@pytest.mark.parametrize("count", [1, 20])
def test_the_map_takes_the_same_queries_however_many_nodes(
    asks: Client, django_assert_num_queries: DjangoAssertNumQueries, count: int
) -> None:
    for number in range(count):
        machines.make_node(f"gpu-{number}")
    asks.get("/api/v1/fabrics")
    with django_assert_num_queries(2):
        asks.get("/api/v1/fabrics")
