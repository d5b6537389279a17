"""Whatever one side says arrives at the other with every field (ND-2, ND-3), within the bound (ND-6)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent import protocol
from agent.bounds import within_bounds
from tests.agent.wire import any_of

UP = (protocol.Register, protocol.Heartbeat, protocol.ShardStatus, protocol.Ack)
DOWN = (protocol.Welcome, protocol.Refused, protocol.Command)
BODIES = protocol.Body.__args__


@pytest.mark.parametrize("kind", UP)
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_what_an_agent_says_is_found_again_whole(kind: Any, data: st.DataObject) -> None:
    sent = data.draw(any_of(kind))
    assert protocol.decode_up(protocol.encode(sent)) == sent


@pytest.mark.parametrize("kind", DOWN)
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_what_a_control_plane_says_is_found_again_whole(kind: Any, data: st.DataObject) -> None:
    sent = data.draw(any_of(kind))
    assert protocol.decode_down(protocol.encode(sent)) == sent


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_stored_message_is_the_one_that_was_said(data: st.DataObject) -> None:
    for kind in (protocol.Inventory, protocol.NodeLoad, protocol.Errand, *BODIES):
        sent = data.draw(any_of(kind))
        assert msgspec.convert(msgspec.to_builtins(sent), kind) == sent


@pytest.mark.parametrize("kind", [*UP, *DOWN, *BODIES])
def test_every_message_says_its_kind_and_an_unknown_field_does_no_harm(kind: Any) -> None:
    assert kind.__struct_config__.tag, kind
    assert not kind.__struct_config__.forbid_unknown_fields


def test_the_largest_inventory_stays_below_the_bound_and_says_what_was_cut() -> None:
    long = "x" * 5000
    gids = tuple(protocol.Gid(index=i, gid="f" * 40, kind="RoCE v2") for i in range(64))
    ports = tuple(protocol.AdapterPort(number=i, state="ACTIVE", gids=gids, fault=long) for i in range(16))
    told = within_bounds(
        protocol.Inventory(
            hostname="h",
            gpus_fault=long,
            gpus=tuple(
                protocol.Gpu(
                    uuid=f"GPU-{i:036d}",
                    index=i,
                    name=long,
                    gpu_class="h200-141g",
                    fault=long,
                    peers=tuple(f"GPU-{other:036d}" for other in range(128)),
                )
                for i in range(200)
            ),
            adapters=tuple(protocol.RdmaAdapter(name=f"mlx5_{i}", ports=ports, fault=long) for i in range(100)),
            fabrics=tuple(protocol.Fabric(name=f"ib{i}", reason=long) for i in range(32)),
            files=tuple(protocol.File(path=f"/models/{'y' * 980}{i}", size_bytes=i) for i in range(5000)),
        )
    )
    assert told.cut == ("adapters", "fabrics", "files", "gpus")
    message = protocol.Register(node="n", agent_version="1", machine_id="m", address="a", inventory=told)
    assert len(protocol.encode(message)) < protocol.MAX_MESSAGE_BYTES
