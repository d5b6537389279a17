"""Two control planes on one PostgreSQL and Redis: one leads, the other takes over, and nobody who uses it notices."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.control_planes import WITHIN_S, ControlPlane, Fleet, fleet
from tests.services import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def running() -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="llmgw-ha-") as folder, fleet(Path(folder)) as one:
        yield one


@pytest.fixture
def two(running: Fleet) -> Fleet:
    """One leads, one stands by, both nodes serve one model."""
    running.restore()
    running.serve("first", count=2)
    wait_until("only the first model runs", lambda: running.replicas() == ["first", "first"], WITHIN_S)
    wait_until("nothing else does", lambda: len(running.engines()) == 2, WITHIN_S)
    return running


def lead_and_place(two: Fleet, standby: ControlPlane) -> None:
    """The standby takes over, and places a second model that is asked of it."""
    wait_until("the standby leads", lambda: two.leader() is standby, WITHIN_S)
    two.serve("first", "second", count=2, plane=standby)
    wait_until("the new leader has placed the new model", lambda: two.answers("second"), WITHIN_S)


def test_a_killed_leader_is_followed_by_the_standby_and_no_request_is_lost(two: Fleet) -> None:
    leader, standby = two.led()
    engines = two.engines()
    with two.traffic():
        leader.end(signal.SIGKILL)
        lead_and_place(two, standby)
    assert set(engines) < set(two.engines()), "an engine was restarted"
    assert two.replicas() == ["first", "first", "second"]
    leader.start()
    wait_until("the old leader stands by", leader.stands_by, WITHIN_S)
    assert two.leader() is standby
    told = " ".join(event["text"] for event in two.api(standby, "GET", "/events")["results"])
    assert told.count(" leads now") >= 2


def test_a_stopped_leader_that_goes_on_later_gives_no_more_orders(two: Fleet) -> None:
    leader, standby = two.led()
    engines = two.engines()
    with two.traffic():
        leader.send(signal.SIGSTOP)
        lead_and_place(two, standby)
        starts = two.starts()
        leader.send(signal.SIGCONT)
        wait_until("the old leader stands by", leader.stands_by, WITHIN_S)
        before = two.rows("SELECT turn FROM core_lease WHERE name = 'leader'")
        two.serve("first", "third", count=2, plane=leader)
        wait_until("a change asked of the old one is made once", lambda: two.answers("third"), WITHIN_S)
        wait_until("and the second is gone", lambda: two.replicas() == ["first", "first", "third"], WITHIN_S)
    assert two.leader() is standby
    assert two.rows("SELECT turn FROM core_lease WHERE name = 'leader'") > before
    placed = two.rows(f"SELECT count(*) FROM nodes_command WHERE id > {starts} AND body->>'type' = 'start_shard'")
    assert placed == [(1,)], "only the third model was to be started"
    assert set(engines) < set(two.engines()), "an engine was restarted"
    assert len(two.engines()) == 3


def test_nodes_whose_control_plane_stands_still_speak_to_the_other_one(two: Fleet) -> None:
    """Nothing is closed: their agents must find out by themselves."""
    engines = two.engines()

    def are_heard_since(then: object) -> bool:
        return two.rows("SELECT min(last_seen_at) > %s + interval '20 s' FROM nodes_node", then) == [(True,)]

    with two.traffic():
        for plane in two.planes:
            web = plane.parts["web"]
            web.send(signal.SIGSTOP)
            try:
                [(stopped_at,)] = two.rows("SELECT now()")
                wait_until("all nodes are heard", lambda then=stopped_at: are_heard_since(then), WITHIN_S)
            finally:
                web.send(signal.SIGCONT)
    assert two.engines() == engines


def test_a_clean_stop_hands_the_lead_over_at_once(two: Fleet) -> None:
    leader, standby = two.led()
    engines = two.engines()
    with two.traffic():
        leader.end(signal.SIGTERM)
        wait_until("the standby leads", lambda: two.leader() is standby, WITHIN_S)
    assert "The lead is handed over" in leader.parts["beat"].said()
    assert two.engines() == engines
    for role in ("worker", "beat"):
        process = leader.parts[role].process
        assert process is not None
        assert process.returncode == 0


def test_one_that_is_stopped_in_the_middle_of_acting_holds_nobody_up_and_writes_nothing(running: Fleet) -> None:
    """Its transaction has the lease's row locked: without PostgreSQL's help nobody could take the lease."""
    environment = {**running.planes[0].environment, "LLMGW_STORE__URL": running.postgres}
    command = [sys.executable, "-m", "tests.e2e.lease_process"]
    with subprocess.Popen(
        [*command, "act", "stopped"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as stopped:
        assert stopped.stdin is not None
        assert stopped.stdout is not None
        try:
            assert stopped.stdout.readline() == "acting\n"
            stopped.send_signal(signal.SIGSTOP)
            taken = subprocess.run(
                [*command, "take", "standby"], env=environment, capture_output=True, text=True, timeout=WITHIN_S
            )
            assert taken.stdout == "2\n", taken.stderr
        finally:
            stopped.send_signal(signal.SIGCONT)
        told, _ = stopped.communicate("go on\n", timeout=WITHIN_S)
    assert told.startswith("refused: ")
    assert running.rows("SELECT count(*) FROM nodes_event WHERE kind = 'acted'") == [(0,)]


def test_one_that_stands_still_in_any_transaction_keeps_rows_locked_for_a_bounded_time(running: Fleet) -> None:
    ask = """
from llmgw.ops.prepare import django_setup
django_setup()
from django.db import connection
with connection.cursor() as cursor:
    cursor.execute("SHOW idle_in_transaction_session_timeout")
    print(cursor.fetchone()[0])
"""
    plane = running.planes[0]
    command, environment = [sys.executable, "-c", ask], {**plane.environment, "LLMGW_CONFIG": str(plane.config)}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WITHIN_S)
    assert told.stdout == "30s\n", told.stderr
