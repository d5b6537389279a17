"""What an agent's stream is held to: stops that end, no flood, and one machine for each node (ND-3, ND-4, ND-6)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from channels.testing import WebsocketCommunicator
from django.utils import timezone

from agent import protocol
from nodes import actions, asides, commands, consumers, contest, flow, intake, keeping
from nodes.alerts import of_claims
from nodes.models import Command, Event, Node, Replica, Shard
from tenants.audit import SYSTEM
from tests.factories import make_node, make_replica
from tests.nodes.fleets import NOW
from tests.nodes.test_stream import a_register, connected, full_register, heard, in_db, refusal, tell, until
from tests.nodes.test_stream import token as token

pytestmark = pytest.mark.django_db(transaction=True)
READY = protocol.ShardState(replica="r", state="ready", port=9001)


# --- stops -----------------------------------------------------------------------------------------------------------
async def told_to_stop(link: WebsocketCommunicator) -> protocol.Command:
    await tell(link, full_register())
    await heard(link)
    await Replica.objects.aupdate(wanted="stop")
    await in_db(commands.store, node="one", body=protocol.StopShard(replica="r"), now=NOW)
    message = await heard(link)
    assert isinstance(message, protocol.Command)
    return message


async def beat(link: WebsocketCommunicator, load: float, *shards: protocol.ShardState) -> None:
    """Heard and written down. What a heartbeat tells is news in it, so that it is."""
    errand = protocol.Errand(command=int(load), what="/x")
    await tell(link, protocol.Heartbeat(load=protocol.NodeLoad(load_1m=load), shards=shards, errands=(errand,)))
    await until(Node.objects.filter(load__load_1m=load).aexists)


async def test_a_shard_that_is_to_stop_holds_its_cards_until_a_heartbeat_does_not_list_it(token: str) -> None:
    async with connected(token) as link:
        stop = await told_to_stop(link)
        await beat(link, 1.0)  # made before the agent heard of the stop: it says nothing of it
        assert (await Shard.objects.aget()).state != "stopped"
        await tell(link, protocol.Ack(id=stop.id))
        stopping = protocol.ShardState(replica="r", state="stopping", port=9001)
        await beat(link, 2.0, stopping)
        assert (await Shard.objects.aget()).state == "stopping"
        await tell(link, protocol.Heartbeat(load=protocol.NodeLoad(load_1m=3.0)))
        await until(Shard.objects.filter(state="stopped").aexists)


async def test_a_shard_that_its_agent_does_not_know_is_free_once_it_says_so(token: str) -> None:
    async with connected(token) as link:
        stop = await told_to_stop(link)
        await tell(link, protocol.Ack(id=stop.id))
        await tell(link, protocol.Heartbeat(load=protocol.NodeLoad()))
        await until(Replica.objects.filter(state="stopped").aexists)


async def test_a_replica_that_is_not_to_stop_is_not_ended_by_what_a_heartbeat_leaves_out(token: str) -> None:
    async with connected(token) as link:
        stop = await told_to_stop(link)
        await Replica.objects.aupdate(wanted="run")
        await tell(link, protocol.Ack(id=stop.id))
        await beat(link, 2.0)
        assert (await Shard.objects.aget()).state == "loading"


async def test_an_end_that_was_reported_needs_no_heartbeat_and_is_not_waited_for(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[consumers.AgentStream] = []
    awaits = consumers.AgentStream._await_end

    def watched(stream: consumers.AgentStream, command: protocol.Command) -> None:
        streams.append(stream)
        awaits(stream, command)

    monkeypatch.setattr(consumers.AgentStream, "_await_end", watched)
    async with connected(token) as link:
        stop = await told_to_stop(link)
        await tell(link, protocol.Ack(id=stop.id))
        await tell(link, protocol.ShardStatus(status=protocol.ShardState(replica="r", state="stopped")))
        await until(Shard.objects.filter(state="stopped").aexists)
        assert streams[0].stops == {}


def test_a_stream_waits_for_no_more_ends_than_a_node_has_shards() -> None:
    stream = consumers.AgentStream()
    for number in range(2 * protocol.MAX_SHARDS):
        stream._await_end(protocol.Command(id=number + 1, body=protocol.StopShard(replica=str(number))))
    assert len(stream.stops) == protocol.MAX_SHARDS


def test_what_another_node_runs_is_not_ended_by_what_this_one_leaves_out() -> None:
    make_node("one", connection="one")
    make_replica("r", node=make_node("two"), wanted="stop")
    load = protocol.NodeLoad()
    for ended in ([("r", 0)], [("r", 7)], [("unknown", 0)]):
        heard = actions.heartbeat(node="one", connection="one", load=load, changed=(), now=timezone.now(), ended=ended)
        assert heard == "ok"
    assert Shard.objects.get().state == "ready"
    assert not Command.objects.exists()


# --- floods ----------------------------------------------------------------------------------------------------------
async def test_a_flood_ends_its_stream_with_a_reason_and_the_next_one_is_no_fresh_start(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "MOST", 300.0)
    monkeypatch.setattr(flow, "A_SECOND", 0.001)
    monkeypatch.setattr(consumers.AgentStream, "flow", flow.Flow())
    reason = "node one says more than 8192 messages at once and 50 a second from then on"
    async with connected(token) as link:
        await tell(link, a_register())
        await heard(link)
        for _ in range(300):
            await tell(link, protocol.Heartbeat(load=protocol.NodeLoad()))
        assert reason in await refusal(link)
    async with connected(token) as link:
        await tell(link, a_register())
        assert reason in await refusal(link)


async def test_every_shard_of_a_node_may_change_its_state_at_once(token: str) -> None:
    states = [protocol.ShardState(replica="r", state="loading", port=each) for each in range(1, protocol.MAX_SHARDS)]
    async with connected(token) as link:
        await tell(link, full_register())
        await heard(link)
        await tell(link, protocol.Heartbeat(load=protocol.NodeLoad(), shards=tuple(states[:1])))
        for each in states[-200:]:
            await tell(link, protocol.ShardStatus(status=each))
        await until(Shard.objects.filter(port=states[-1].port).aexists)
        assert await link.receive_nothing(timeout=0.1)


# --- copies of a machine ---------------------------------------------------------------------------------------------
def come(node: Node, instance: str, address: str, now: Any) -> protocol.Welcome | protocol.Refused:
    register = a_register(instance=instance, address=address)
    return actions.register_node(node=node, register=register, connection=f"of {instance}", now=now, peer=address)


def test_two_copies_of_a_machine_do_not_replace_each_other_for_ever() -> None:
    node, now = actions.make_node(name="one", actor=SYSTEM)[0], timezone.now()
    answers = [
        come(node, *(("a", "10.0.0.1") if turn % 2 == 0 else ("b", "10.0.0.2")), now + timedelta(seconds=turn))
        for turn in range(8)
    ]
    assert [isinstance(each, protocol.Refused) for each in answers] == [False] * 4 + [True, False, True, False]
    refused = answers[4]
    assert isinstance(refused, protocol.Refused)
    assert refused.retry_after_s == 60
    assert "somewhere at 10.0.0.2, which is kept, and somewhere at 10.0.0.1" in refused.reason
    assert "give the copy a node, a token and a machine id of its own" in refused.reason
    row = Node.objects.get()
    assert (row.connection, row.address) == ("of b", "10.0.0.2")
    [event] = Event.objects.filter(kind="refused", node="one")
    assert "two agents take turns to speak for node one" in event.text.lower()
    [alert] = of_claims(asides.claims(now + timedelta(seconds=8)))
    assert (alert.state, alert.subject) == ("failed", "one")
    assert "10.0.0.1" in alert.text
    assert "10.0.0.2" in alert.text
    assert asides.claims(now + contest.WITHIN * 2) == ()


def test_the_copy_gets_the_node_when_the_one_that_was_kept_is_gone() -> None:
    node, now = actions.make_node(name="one", actor=SYSTEM)[0], timezone.now()
    for turn in range(5):
        answer = come(node, "ab"[turn % 2], f"10.0.0.{turn % 2}", now + timedelta(seconds=turn))
    assert isinstance(answer, protocol.Refused)
    later = now + timedelta(seconds=60)  # of silence
    assert isinstance(come(node, "a", "10.0.0.0", later), protocol.Welcome)
    actions.leave(node="one", connection="of a")
    assert isinstance(come(node, "b", "10.0.0.1", later), protocol.Welcome)


def test_one_machine_that_comes_again_and_again_is_never_refused() -> None:
    """Its network is cut and its agent started anew all the time, and its old streams still seem to be there."""
    node, now = actions.make_node(name="one", actor=SYSTEM)[0], timezone.now()
    for turn in range(60):
        address = f"10.0.{turn % 3}.1"  # over whichever of its networks
        answer = come(node, f"process{turn // 3}", address, now + timedelta(seconds=turn))
        assert isinstance(answer, protocol.Welcome)
    assert not Event.objects.filter(kind="refused").exists()


def test_agents_that_do_not_say_which_process_they_are_are_told_apart_by_address() -> None:
    node, now = actions.make_node(name="one", actor=SYSTEM)[0], timezone.now()
    same = [come(node, "", "10.0.0.1", now + timedelta(seconds=turn)) for turn in range(20)]
    assert all(isinstance(each, protocol.Welcome) for each in same)
    turns = [come(node, "", f"10.0.0.{turn % 2}", now + timedelta(seconds=20 + turn)) for turn in range(8)]
    assert any(isinstance(each, protocol.Refused) for each in turns)


# --- where a node is -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "address", ["0.0.0.0", "::", "169.254.169.254", "::ffff:169.254.169.254", "[fe80::1]", "224.0.0.1"]
)
def test_an_address_of_no_machine_in_particular_is_refused(address: str) -> None:
    with pytest.raises(intake.Unfit, match="nothing is reached at the address"):
        intake.fitted(a_register(address=address))


@pytest.mark.parametrize(
    ("address", "peer", "here", "fits"),
    [
        ("127.0.0.1", "10.0.0.7", "10.0.0.1", False),
        ("localhost", "10.0.0.7", "10.0.0.1", False),
        ("::ffff:127.0.0.1", "10.0.0.7", "10.0.0.1", False),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "10.0.0.1", "10.0.0.1", True),
        ("127.0.0.1", "", "", True),
        ("10.0.0.7", "10.0.0.9", "10.0.0.1", True),
        ("box.example", "10.0.0.9", "10.0.0.1", True),
    ],
)
def test_loopback_is_where_an_agent_is_only_beside_its_control_plane(
    address: str, peer: str, here: str, fits: bool
) -> None:
    assert (intake.misplaced(address, peer=peer, here=here) == "") is fits


async def test_an_agent_elsewhere_that_says_it_is_here_is_refused(token: str) -> None:
    async with connected(token) as link:
        link.scope["client"], link.scope["server"] = ("10.0.0.7", 4711), ("10.0.0.1", 8080)
        await tell(link, a_register())
        assert "the agent comes from 10.0.0.7 and says that it is reached at 127.0.0.1" in await refusal(link)


def test_a_pinned_address_wins_over_what_the_agent_says_until_it_is_unpinned() -> None:
    node, now = actions.make_node(name="one", actor=SYSTEM)[0], timezone.now()
    come(node, "a", "10.0.0.1", now)
    assert keeping.pin_address(node=node, address="10.0.0.9", actor=SYSTEM)
    assert not keeping.pin_address(node=node, address="10.0.0.9", actor=SYSTEM)
    assert Node.objects.get().address == "10.0.0.9"
    come(node, "a", "10.0.0.2", now)
    assert Node.objects.get().address == "10.0.0.9"
    keeping.keep_node(node=node, actor=SYSTEM, pinned_address="")
    assert Node.objects.get().address == "10.0.0.9"
    come(node, "a", "10.0.0.2", now)
    assert Node.objects.get().address == "10.0.0.2"
    assert list(Event.objects.filter(kind="pin address").order_by("pk").values_list("text", flat=True)) == [
        "Node one is reached at 10.0.0.9, whatever its agent says, as llmgw decided",
        "Node one is reached where its agent says, as llmgw decided",
    ]


@pytest.mark.parametrize("address", ["a b", "http://10.0.0.1", "0.0.0.0", "x" * 256])
def test_what_is_no_address_is_not_pinned(address: str) -> None:
    with pytest.raises(keeping.NotKept, match="is no host name and no IP address"):
        keeping.pin_address(node=make_node(), address=address, actor=SYSTEM)
