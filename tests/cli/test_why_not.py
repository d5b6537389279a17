"""Why a model has no place, end to end: a fleet that passes decided on, told by page, API and command line alike."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from django.test import Client
from django.utils import timezone

from agent import protocol
from nodes import actions
from nodes.models import Backoff, Node
from tenants.audit import SYSTEM
from tenants.models import CapacityQuota, User
from tests import factories
from tests.cli.conftest import Ctl
from tests.worlds import World

GPU: dict[str, Any] = {"name": "gpu", "engine": "vllm", "gpu_class": "h100-80g", "tp": 2, "gpus_per_node": 2}
Build = protocol.Build


@dataclass(frozen=True)
class Case:
    """A fleet, what the model asks for, and lines of which each must be told."""

    fleet: Callable[[World], None]
    profile: dict[str, Any]
    lines: tuple[str, ...]
    team: str = ""


def two_nodes(world: World) -> None:
    world.add_cards("one", cards=2)
    world.add_cards("two", cards=2)


def changed(**fields: object) -> Callable[[World], None]:
    """Two nodes that tell something else of themselves."""

    def fleet(world: World) -> None:
        two_nodes(world)
        for agent in world.agents.values():
            agent.inventory = msgspec.structs.replace(agent.inventory, **fields)
            agent.connect()

    return fleet


def cordoned(world: World) -> None:
    two_nodes(world)
    for node in Node.objects.all():
        actions.cordon_node(node=node, actor=SYSTEM)


def with_another_quota(world: World) -> None:
    two_nodes(world)
    CapacityQuota.objects.create(team=factories.make_team("red"), gpu_class="b300-270g", cards=0)


def one_cordoned(world: World) -> None:
    two_nodes(world)
    actions.cordon_node(node=Node.objects.get(name="one"), actor=SYSTEM)
    Node.objects.filter(name="two").update(disabled_engines=["vllm"])


def disabled(world: World) -> None:
    two_nodes(world)
    Node.objects.update(disabled_engines=["vllm"])


def silent(world: World) -> None:
    two_nodes(world)
    for agent in world.agents.values():
        agent.silent = True
    world.run(30, step=10)


def with_quota(world: World) -> None:
    two_nodes(world)
    team = factories.make_team("red")
    CapacityQuota.objects.create(team=team, gpu_class="h100-80g", cards=3)
    factories.make_model("held", profiles=(GPU,), team="red")
    world.run(8)


def spoiled(world: World) -> None:
    two_nodes(world)
    for agent in world.agents.values():
        gpus = tuple(msgspec.structs.replace(gpu, healthy=False, fault="ECC") for gpu in agent.inventory.gpus)
        agent.inventory = msgspec.structs.replace(agent.inventory, gpus=gpus)
        agent.connect()


DOWN = protocol.Fabric(name="ib0", up=False, reason="adapter mlx5_0 has no ACTIVE port")
CASES = {
    "no node": Case(lambda world: None, GPU, ("m: no node has joined yet; add one with `llmgw ctl node-token NAME`",)),
    "cards nobody has": Case(
        two_nodes,
        {**GPU, "gpu_class": "b300-270g"},
        (
            "gpu: no node has b300-270g; the cluster has 4 h100-80g. Add a node with them, "
            "or change gpu_class of profile gpu",
        ),
    ),
    "more cards than a node has": Case(
        two_nodes,
        {**GPU, "tp": 4, "gpus_per_node": 4},
        ("one, two (gpu): needs 4 h100-80g and has 2; ask for fewer a node",),
    ),
    "faulty cards": Case(spoiled, GPU, ("one, two (gpu): needs 2 h100-80g; 0 free of 2: 2 faulty (ECC); repair them",)),
    "a fabric that is down": Case(
        changed(fabrics=(DOWN,)),
        {**GPU, "nodes": 2, "tp": 4},
        ("one, two (gpu): fabric ib0 is down: adapter mlx5_0 has no ACTIVE port; repair its link",),
    ),
    "a full disk": Case(
        changed(disks=(protocol.Disk(path="/", total_bytes=10**12, free_bytes=40 * 10**9),)),
        {**GPU, "min_disk_gb": 100},
        (
            "gpu: no node has 100.0 GB of disk free; the most is 40.0 GB, on one. "
            "Lower min_disk_gb of profile gpu, add a node with more, or free some",
        ),
    ),
    "disks that are too small": Case(
        changed(disks=(protocol.Disk(path="/", total_bytes=10**12, free_bytes=900 * 10**9),)),
        {**GPU, "min_disk_gb": 5000},
        (
            "gpu: no node has a disk of 5000.0 GB; the largest has 1000.0 GB, on one. "
            "Lower min_disk_gb of profile gpu, or add a node with a larger one",
        ),
    ),
    "a quota": Case(
        with_quota,
        GPU,
        (
            "gpu: team red may hold 3 h100-80g and holds 2: held 2; this needs 2 more. "
            "Stop one of its replicas, or: llmgw ctl quota set red h100-80g 4",
        ),
        team="red",
    ),
    "cordoned nodes": Case(cordoned, GPU, ("one, two (gpu): is cordoned; to use it: llmgw ctl uncordon NODE",)),
    "one cordoned node": Case(
        one_cordoned,
        GPU,
        (
            "one (gpu): is cordoned; to use it: llmgw ctl uncordon one",
            "two (gpu): has vllm disabled; enable it for the node, or add a profile with another engine",
        ),
    ),
    "a quota of cards that nobody has": Case(
        with_another_quota,
        {**GPU, "gpu_class": "b300-270g"},
        (
            "gpu: no node has b300-270g; the cluster has 4 h100-80g. Add a node with them, or change gpu_class of "
            "profile gpu; besides: team red may hold 0 b300-270g and holds 0; this needs 2 more. "
            "Raise it: llmgw ctl quota set red b300-270g 2",
        ),
        team="red",
    ),
    "silent nodes": Case(silent, GPU, ("one, two (gpu): is unreachable; see whether the machine and its agent run",)),
    "an engine disabled": Case(
        disabled,
        GPU,
        ("one, two (gpu): has vllm disabled; enable it for the node, or add a profile with another engine",),
    ),
    "an engine without a build": Case(
        changed(builds=()),
        GPU,
        ("one, two (gpu): has no build of vllm; install one there, or add a profile with another engine",),
    ),
    "a build that cannot run": Case(
        changed(builds=(Build(engine="vllm", name="cu13", version="1", usable=False, reason="no driver"),)),
        GPU,
        ("one, two (gpu): cannot run vllm: cu13: no driver",),
    ),
    "labels that match nothing": Case(
        two_nodes,
        {**GPU, "labels": {"zone": "west"}},
        ("gpu: no node has the label zone=west that profile gpu asks for; label a node so, or change the profile",),
    ),
    "a node nobody has": Case(
        two_nodes,
        {**GPU, "only_nodes": ["nine"]},
        ("gpu: no node is named nine; correct only_nodes of profile gpu",),
    ),
    "too few cores": Case(
        two_nodes,
        {**GPU, "reserved_cores": 100},
        (
            "one, two (gpu): has 64 of 64 cores left, 100 are needed; add a larger node, "
            "or lower reserved_cores of the profile",
        ),
    ),
    "too little memory": Case(
        two_nodes,
        {"name": "cpu", "engine": "vllm", "required_memory_gb": 400},
        (
            "one, two (cpu): has 17.2 GB of memory, 400.0 GB are required; add a larger node, "
            "or lower required_memory_gb",
        ),
    ),
}


def page_of(user: User, url: str) -> str:
    client = Client()
    client.force_login(user)
    return html.unescape(client.get(url).content.decode())


@pytest.mark.parametrize("name", CASES)
def test_why_a_model_has_no_place_is_said_alike_everywhere(llmgw: Ctl, root: User, name: str) -> None:
    case, world = CASES[name], World()
    case.fleet(world)
    factories.make_model("m", profiles=(case.profile,), team=case.team)
    world.reconcile()
    lines = tuple(line.removeprefix("m: ") for line in case.lines)
    data = json.loads(llmgw("ctl", "status", "--json").stdout)
    [model] = [line for line in data["models"] if line["name"] == "m"]
    assert (model["state"], tuple(model["why_not"])) == ("cannot run", lines)
    page, listed = page_of(root, "/models/m/"), page_of(root, "/dashboard/")
    status, why = llmgw("ctl", "status").stdout, llmgw("why", "m").stdout
    for line in lines:
        assert f"<li>{line}</li>" in page
        assert line in listed
        assert f"  m: {line}\n" in status
        assert f"  {line}\n" in why


def test_a_raised_quota_gives_the_model_its_place(llmgw: Ctl) -> None:
    world = World()
    with_quota(world)
    factories.make_model("m", profiles=(GPU,), team="red")
    world.run(8)
    assert not world.ready("m")
    command = re.search(r"llmgw (ctl quota set \S+ \S+ \d+)", llmgw("why", "m").stdout)
    assert command
    done = llmgw(*command[1].split())
    assert done.exit_code == 0, done.output
    world.run(8)
    assert world.ready("m")
    assert ["red", "h100-80g", "4", "4", "held", "2,", "m", "2"] in [
        line.split() for line in llmgw("ctl", "quota", "list").stdout.splitlines()
    ]


def test_a_thousand_nodes_are_told_in_a_line_each_for_what_they_share(llmgw: Ctl, root: User) -> None:
    world = World()
    world.add_cards("pattern", cards=8)
    pattern = Node.objects.get()
    Node.objects.bulk_create(
        Node(
            name=f"node-{n:04}",
            token_digest=f"{n:064}",
            state="ready",
            cordoned_at=world.now if n % 4 == 0 else None,
            inventory=pattern.inventory,
            load=pattern.load,
            registered_at=world.now,
            last_seen_at=world.now,
        )
        for n in range(1000)
    )
    factories.make_model("m", profiles=({**GPU, "tp": 16, "gpus_per_node": 16},))
    world.reconcile()
    page, why = page_of(root, "/models/m/"), llmgw("why", "m").stdout
    for line in (
        "node-0001, node-0002, node-0003, node-0005, node-0006, node-0007, node-0009, node-0010 and 743 more (gpu): "
        "needs 16 h100-80g and has 8; ask for fewer a node",
        "node-0000, node-0004, node-0008, node-0012, node-0016, node-0020, node-0024, node-0028 and 242 more (gpu): "
        "is cordoned; to use it: llmgw ctl uncordon NODE",
    ):
        assert line in page
        assert line in why
    assert page.count("<li>") < 60
    assert len(why.splitlines()) < 20


def test_where_a_model_waits_after_failures_is_shown_by_node_with_the_next_try(
    llmgw: Ctl,
    root: User,
) -> None:
    world = World()
    world.now = timezone.now()
    for name in ("one", "two"):
        world.add_cards(name).broken = "out of memory"
    factories.make_model("m", profiles=(GPU,))
    world.run(10)
    held = {each.node: each for each in Backoff.objects.all()}
    assert set(held) == {"", "one", "two"}
    Backoff.objects.update(next_try_at=timezone.now() + timezone.timedelta(minutes=10))
    told = f"{next(iter(held.values())).profile} waits on node one after"
    page, why, status = page_of(root, "/models/m/"), llmgw("why", "m").stdout, llmgw("ctl", "status").stdout
    assert "Left alone after failures" in page
    for name in ("one", "two"):
        assert f'<a href="/nodes/{name}/">{name}</a>' in page
    assert "everywhere" in page
    assert "in 9 min" in page
    for text in (why, status):
        assert told in text
        assert "gpu waits everywhere after" in text
        assert "next try in 9 min, at " in text
        assert "out of memory" in text


def test_a_rank_that_waits_for_its_leader_is_shown_waiting(llmgw: Ctl, root: User) -> None:
    world = World()
    two_nodes(world)
    factories.make_model("wide", profiles=({**GPU, "nodes": 2, "tp": 4},))
    world.reconcile()
    note = "rank 1 on two waiting until rank 0 listens"
    assert note in page_of(root, "/replicas/")
    assert note in llmgw("ctl", "replicas").stdout
    [replica] = json.loads(llmgw("ctl", "replicas", "--json").stdout)
    page = page_of(root, f"/replicas/{replica['name']}/")
    assert '<span class="state warn">waiting</span>' in page
    assert note in page


# --- one summary -----------------------------------------------------------------------------------------------------
FIGURES = ("total", "used", "starting", "free", "closed", "faulty", "reserved")


def of_page(page: str) -> dict[str, dict[str, str]]:
    """The capacity lines of a page, as it prints them; what it leaves out is nothing."""
    found = {}
    line = r'<div><span class="mono">(\S+?)</span>.*?<span class="figures">(.*?)</span></div>'
    for name, inside in re.findall(line, page, re.DOTALL):
        text = re.sub(r"<.*?>", "", inside).replace("none free", "0 free")
        used, total = re.match(r"(\S+) of (\S+) ", text).groups()  # type: ignore[union-attr]
        parts = dict(reversed(part.split()) for part in text.split(" · ")[1:])  # type: ignore[misc]
        found[name] = {**dict.fromkeys(FIGURES, "0"), "used": used, "total": total, **parts}
    return found


def test_page_api_and_command_print_the_same_figures(llmgw: Ctl, root: User) -> None:
    world = World()
    world.now = timezone.now()
    with_quota(world)
    world.add_cards("three", cards=5)
    world.add_cards("four", cards=4)
    bad = world.agents["three"]
    gpus = tuple(
        msgspec.structs.replace(gpu, healthy=gpu.index > 1, fault="ECC" * (gpu.index < 2)) for gpu in bad.inventory.gpus
    )
    bad.inventory = msgspec.structs.replace(bad.inventory, gpus=gpus)
    bad.connect()
    Node.objects.filter(name="four").update(cordoned_at=world.now)
    Node.objects.filter(name="one").update(reserved_cores=3.5)
    factories.make_model("next", profiles=({**GPU, "reserved_cores": 2},))
    world.reconcile()
    data = json.loads(llmgw("ctl", "status", "--json").stdout)
    by_api = {line["gpu_class"]: {key: f"{line[key]:g}" for key in FIGURES} for line in data["capacity"]}
    assert by_api["h100-80g"] == {
        "total": "13", "used": "2", "starting": "2", "free": "3", "closed": "4", "faulty": "2", "reserved": "0",
    }  # fmt: skip
    assert by_api["cpu"]["reserved"] == "3.5"
    assert of_page(page_of(root, "/dashboard/")) == by_api
    printed = [line.split() for line in llmgw("ctl", "status").stdout.splitlines()]
    for name, figures in by_api.items():
        unit = "cores" if name == "cpu" else "cards"
        assert [name, unit, *figures.values()] in [line[:-1] for line in printed]
    [quota] = data["quotas"]
    assert (quota["team"], quota["held"], quota["allowed"], quota["models"]) == ("red", 2, 3, ["held 2"])
    assert ["red", "h100-80g", "2", "3", "held", "2"] in printed
    row = (
        '<th>red</th><td class="mono">h100-80g</td><td class="num">2</td><td class="num">3</td><td class="note">held 2'
    )
    assert row in page_of(root, "/dashboard/")
    client = Client()
    client.force_login(root)
    whole = client.get("/api/v1/summary").json()
    assert (whole["capacity"], whole["quotas"]) == (data["capacity"], data["quotas"])
    for model in data["models"]:
        words = [model["name"], *model["state"].split(), str(model["ready"]), str(model["wanted"])]
        assert words in [line[: len(words)] for line in printed]
        assert f"{model['ready']} of {model['wanted']}" in page_of(root, "/dashboard/")
