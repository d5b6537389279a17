"""The pages of nodes, fabrics and replicas over machines with cards and networks (ND-20 to ND-22, WEB-2)."""

from __future__ import annotations

import cProfile
import re

import pytest
from django.test import Client
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from nodes.models import Node
from tests import factories
from tests.pages import machines, rows

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def root(client: Client) -> None:
    client.force_login(rows.make_operator())


def text_of(client: Client, url: str) -> str:
    answer = client.get(url)
    assert answer.status_code == 200
    return re.sub(r"\s+", " ", answer.content.decode()).replace("&#x27;", "'")


def row_of(page: str, name: str) -> str:
    found = re.search(rf"<tr><th[^>]*>(?:<a [^>]*>)?{name}<.*?</tr>", page)
    assert found, name
    return re.sub(r"<[^>]+>", " ", found[0])


def test_the_node_list_counts_cards_used_free_and_faulty_and_says_which_and_why(client: Client) -> None:
    machines.make_fleet()
    page = text_of(client, "/nodes/")
    assert "8 of 8 used · none free" in row_of(page, "gpu-01")
    faulty = row_of(page, "gpu-02")
    assert "4 of 8 used · 2 free" in faulty
    assert "2 faulty : card 5: row remap failure: it has to be replaced; card 6: process 4711" in faulty
    for words in ("310 GiB of 512 GiB", " 17 ", "14.2", "22 %"):
        assert words in faulty, words
    assert "used" not in row_of(page, "cpu-01")


def test_the_dashboard_counts_the_whole_nodes_that_are_free_on_each_fabric(client: Client) -> None:
    machines.make_fleet()
    page = text_of(client, "/dashboard/").split("Whole nodes free per fabric")[1].split("</section>")[0]
    assert row_of(page, "ib0").split() == ["ib0", "h100-80g", "400", "3", "of", "3", "1", "8", "cards"]
    assert "down" in row_of(page, "ib-east")
    assert "gpu-04: adapter mlx5_1 has no ACTIVE port" in page


def test_a_nodes_page_says_first_what_is_wrong_and_what_to_do(client: Client) -> None:
    machines.make_fleet()
    page = text_of(client, "/nodes/gpu-02/")
    assert "Card 5 (NVIDIA H100 80GB HBM3, 00000000:61:00.0): row remap failure: it has to be replaced." in page
    assert "It counts neither used nor free." in page
    assert "4 used · 2 free · 2 faulty · driver 580.65.06 · CUDA 13.0" in page
    for words in (
        "612.5 of 700", "1,980", "9.0", "7 cards", "slowed down: hw thermal", "coretemp Core 5", "2,310 W",
        "computes on CPUs only", "model-00016.safetensors", "subnet manager 1 of fe80:0000:0000:0000",
        "network 10.0.0.0/24 on ens1f0np0", "<td>none</td>", "/replicas/deepseek-1/",
    ):  # fmt: skip
        assert words in page, words
    down = text_of(client, "/nodes/gpu-04/")
    assert "Fabric ib-east is not advertised: adapter mlx5_1 has no ACTIVE port: port 1 is INIT." in down


def test_a_replicas_page_shows_ranks_nodes_cards_ports_and_progress(client: Client) -> None:
    machines.make_fleet()
    page = text_of(client, "/replicas/deepseek-1/")
    for words in (
        "h100-80g 4–7", "h100-80g 0–3", "29501", "weights: 38.2 GiB of 93.1 GiB", "/nodes/gpu-02/",
        "waiting", "ib0", "Placed on gpu-01 and gpu-02 over ib0",
    ):  # fmt: skip
        assert words in page, words
    listed = row_of(text_of(client, "/replicas/"), "deepseek-1")
    assert "gpu-01, gpu-02" in listed
    assert " 8 " in listed


def test_the_fabric_page_maps_ports_and_marks_what_does_not_agree(client: Client) -> None:
    machines.make_fleet()
    page = text_of(client, "/fabrics/")
    assert "One name over 2 subnet managers (subnet manager 1 of fe80:0000:0000:0000 on gpu-01, gpu-02;" in page
    assert "ib-east reports the same (subnet manager 1 of fe80:0000:0000:0000): if it is one network" in page
    assert "gpu-04: adapter mlx5_1 has no ACTIVE port: port 1 is INIT" in page
    assert "3 of 3" in row_of(page, "ib0")
    assert "4 active in no fabric" in page
    assert "<b>32</b><span>with peers</span>" in page
    assert page.count("mlx5_0") == 4
    only = text_of(client, "/fabrics/?fabric=ib-east")
    assert only.count('<td class="mono">mlx5_') == 2
    spare = text_of(client, "/fabrics/?fabric=none")
    assert spare.count("3 ::ffff:10.0.0.1 (RoCE v2)") == 4
    assert 'href="/fabrics/" aria-current="page">Fabrics' in page


def test_the_fabric_page_says_what_to_do_where_there_is_nothing(client: Client) -> None:
    page = text_of(client, "/fabrics/")
    assert "No node declares one" in page
    assert "fabrics: {ib0: [mlx5_0, mlx5_1]}" in page
    assert "No node reports an InfiniBand or RoCE adapter." in page
    machines.make_fleet()
    assert "None here." in text_of(client, "/fabrics/?fabric=nothing")


def test_zero_nvlink_peers_across_the_fleet_are_called_unknown(client: Client) -> None:
    node = machines.make_node("gpu-01")
    for gpu in node.inventory["gpus"]:
        gpu["peers"] = []
    node.save()
    assert "Read that as unknown, not as absent" in text_of(client, "/fabrics/")


def make_many(count: int) -> None:
    patterns = [machines.make_node("pattern"), machines.make_node("other", manager=7)]
    Node.objects.bulk_create(
        Node(
            name=f"gpu-{number:04}",
            token_digest=f"{number:064}",
            state="ready",
            address="10.0.0.1",
            inventory=patterns[number % 2].inventory,
            load=patterns[0].load,
            last_seen_at=timezone.now(),
        )
        for number in range(count)
    )


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize(("url", "queries"), [("/fabrics/", 4), ("/fabrics/?fabric=ib0&after=gpu-0000", 4)])
def test_the_fabric_page_takes_the_same_queries_however_many_nodes(
    client: Client, django_assert_num_queries: DjangoAssertNumQueries, url: str, queries: int, count: int
) -> None:
    make_many(count)
    with django_assert_num_queries(queries):
        client.get(url)


def test_a_thousand_nodes_are_mapped_quickly_and_come_in_pages(client: Client) -> None:
    make_many(1000)
    client.get("/fabrics/")
    profile = cProfile.Profile()
    page = profile.runcall(text_of, client, "/fabrics/")
    assert sum(entry.callcount for entry in profile.getstats()) < 400_000
    assert page.count("<tr>") < 120
    assert "3,006" in page
    assert "gpu-0000, gpu-0002, gpu-0004, gpu-0006, gpu-0008, gpu-0010, gpu-0012, gpu-0014 and 493 more" in page
    seen: list[str] = []
    url = "/fabrics/?fabric=ib0"
    for _ in range(3):
        page = text_of(client, url)
        names = re.findall(r'<th><a href="/nodes/([^/]+)/', page)
        assert not set(names) & set(seen)
        assert all(names.count(name) == 2 for name in names)
        seen += names
        after = re.search(r'href="\?fabric=ib0&amp;after=([^"]+)"', page)
        assert after
        assert after[1] == names[-1]
        url = f"/fabrics/?fabric=ib0&after={after[1]}"


@pytest.mark.parametrize(
    "url", ["/fabrics/?fabric=%00", "/fabrics/?fabric=<b>&after=<i>", f"/fabrics/?fabric={'x' * 3000}"]
)
def test_odd_addresses_of_the_fabric_page_find_nothing_and_show_no_markup(client: Client, url: str) -> None:
    machines.make_fleet()
    page = text_of(client, url)
    assert "<b>&" not in page
    assert "None here." in page


def test_an_inventory_that_was_never_told_is_no_trouble(client: Client) -> None:
    factories.make_node("new", inventory={})
    assert "No node declares one" in text_of(client, "/fabrics/")
    assert "None found" in text_of(client, "/nodes/new/")
