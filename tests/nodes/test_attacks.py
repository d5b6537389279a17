"""Agents that lie and reports that race: what may be told, by whom, and what becomes of rows when two speak at once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from agent import protocol
from nodes import intake
from tests.factories import inventory
from tests.nodes.test_intake import running
from tests.nodes.test_stream import a_register

EAST = timezone(timedelta(hours=14))


@pytest.mark.parametrize(
    ("shard", "fault"),
    [
        ({"rendezvous": 65536}, "port 65536 of replica r is none"),
        ({"rendezvous": 0}, "port 0 of replica r is none"),
        ({"fabric": "x" * 121}, "the name of the fabric of replica r is longer than 120 characters"),
        ({"gpus": tuple(map(str, range(129)))}, "129 cards of replica r are more than 128"),
        ({"cores": -1.0}, "rank, slots or cores of replica r is out of range"),
        ({"cores": 1e300}, "a number has more than 63 bits"),
        ({"made_at": datetime(2026, 1, 1)}, "made_at of replica r has no time zone, or is not of our time"),
        ({"made_at": datetime(1, 1, 1, tzinfo=EAST)}, "made_at of replica r has no time zone, or is not of our time"),
        ({"made_at": datetime(9999, 12, 31, tzinfo=UTC)}, "made_at of replica r has no time zone"),
    ],
)
def test_a_shard_that_no_row_could_hold_is_refused_by_name(shard: dict[str, Any], fault: str) -> None:
    with pytest.raises(intake.Unfit, match=fault):
        intake.fitted(a_register(shards=(running(**shard),)))


@pytest.mark.parametrize(
    "told",
    [
        {"cpu": protocol.Cpu(cores=-1)},
        {"memory_bytes": -1},
        {"disks": (protocol.Disk(path="/", free_bytes=-1),)},
    ],
)
def test_a_machine_has_no_less_than_nothing(told: dict[str, Any]) -> None:
    with pytest.raises(intake.Unfit, match="less than nothing"):
        intake.fitted(a_register(inventory=inventory(**told)))


@pytest.mark.parametrize("age_s", [-1.0, 2.0**31])
def test_readings_are_no_older_than_pages_can_say(age_s: float) -> None:
    with pytest.raises(intake.Unfit, match="the age of the cards' readings is out of range"):
        intake.fitted(protocol.Heartbeat(load=protocol.NodeLoad(gpus_age_s=age_s)))


def test_one_message_is_about_no_more_shards_than_one_transaction_should_hold() -> None:
    too_many = protocol.MAX_SHARDS + 1
    states = tuple(protocol.ShardState(replica=str(each), state="ready") for each in range(too_many))
    for message in (
        a_register(shards=(running(),) * too_many),
        protocol.Heartbeat(load=protocol.NodeLoad(), shards=states),
    ):
        with pytest.raises(intake.Unfit, match="1025 shards are more than 1024"):
            intake.fitted(message)
