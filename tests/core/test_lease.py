"""One holder at a time, whatever the hosts' clocks say."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import InterfaceError, OperationalError, connection
from django.db.models.functions import Now

from llmgw.core import lease
from llmgw.core.models import Lease

pytestmark = pytest.mark.django_db


def let_it_run_out() -> None:
    Lease.objects.update(expires_at=Now() - timedelta(seconds=1))


def test_the_first_to_ask_holds_it_and_others_do_not() -> None:
    held = lease.acquire("leader", ttl_s=10, holder="a")
    assert held is not None
    assert (held.fence, held.turn) == (1, 0)
    assert lease.acquire("leader", ttl_s=10, holder="b") is None


def test_different_leases_do_not_meet() -> None:
    assert lease.acquire("leader", ttl_s=10, holder="a")
    assert lease.acquire("other", ttl_s=10, holder="b")


def test_asking_again_prolongs_it_without_taking_it_anew() -> None:
    first = lease.acquire("leader", ttl_s=10, holder="a")
    before = Lease.objects.get().expires_at
    again = lease.acquire("leader", ttl_s=60, holder="a")
    assert first is not None
    assert again is not None
    assert (again.fence, again.turn, again.since) == (first.fence, first.turn, first.since)
    assert Lease.objects.get().expires_at > before


def test_one_that_ran_out_goes_to_the_next_with_a_higher_fence() -> None:
    old = lease.acquire("leader", ttl_s=10, holder="a")
    let_it_run_out()
    new = lease.acquire("leader", ttl_s=10, holder="b")
    assert old is not None
    assert new is not None
    assert new.fence == old.fence + 1
    assert not lease.advance(old)
    assert lease.advance(new)


def test_its_own_holder_takes_it_anew_after_it_ran_out() -> None:
    old = lease.acquire("leader", ttl_s=10, holder="a")
    let_it_run_out()
    new = lease.acquire("leader", ttl_s=10, holder="a")
    assert old is not None
    assert new is not None
    assert new.fence == old.fence + 1
    assert new.since >= old.since


def test_nobody_acts_under_a_lease_that_ran_out() -> None:
    held = lease.acquire("leader", ttl_s=10, holder="a")
    let_it_run_out()
    assert held is not None
    assert not lease.advance(held)


def test_two_who_saw_the_same_do_not_both_act() -> None:
    one = lease.acquire("leader", ttl_s=10, holder="a")
    two = lease.acquire("leader", ttl_s=10, holder="a")
    assert one is not None
    assert two is not None
    assert lease.advance(one)
    assert not lease.advance(two)


def test_given_back_it_can_be_taken_at_once() -> None:
    lease.acquire("leader", ttl_s=10, holder="a")
    assert not lease.release("leader", holder="b")
    assert lease.release("leader", holder="a")
    assert lease.acquire("leader", ttl_s=10, holder="b")
    assert not lease.release("leader", holder="a")


def test_prolonging_costs_two_queries_and_asking_in_vain_one(django_assert_num_queries) -> None:  # type: ignore[no-untyped-def]
    lease.acquire("leader", ttl_s=10, holder="a")
    with django_assert_num_queries(2):
        lease.acquire("leader", ttl_s=10, holder="a")
    with django_assert_num_queries(1):
        lease.acquire("leader", ttl_s=10, holder="b")


def test_anybody_may_act_for_its_holder_but_for_one_at_a_time() -> None:
    """Workers run what the leader enqueues, under the leader's lease."""
    assert lease.current("leader") is None
    lease.acquire("leader", ttl_s=10, holder="a")
    here, there = lease.current("leader"), lease.current("leader")
    assert here is not None
    assert there is not None
    assert here.holder == "a"
    assert lease.advance(here)
    assert not lease.advance(there)
    lease.release("leader", holder="a")
    assert lease.current("leader") is None


def test_times_are_the_databases() -> None:
    lease.acquire("leader", ttl_s=10, holder="a")
    with connection.cursor() as cursor:
        cursor.execute("SELECT CURRENT_TIMESTAMP")
        assert cursor.fetchone()
    assert Lease.objects.filter(since__lte=Now(), expires_at__gt=Now() + timedelta(seconds=8)).exists()


def test_a_holder_is_named_by_host_process_and_chance() -> None:
    assert lease.new_holder() != lease.new_holder()
    assert lease.HOLDER.count(":") == 2


class Watch:
    """A monotonic clock that tests turn."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def keeper(watch: Watch, holder: str = "a", ttl_s: float = 10) -> lease.Keeper:
    return lease.Keeper("leader", ttl_s=ttl_s, holder=holder, monotonic=watch)


def test_a_keeper_prolongs_its_lease_and_asks_no_more_often_than_it_must(django_assert_num_queries) -> None:  # type: ignore[no-untyped-def]
    watch = Watch()
    one = keeper(watch)
    first = one.look()
    assert first is not None
    with django_assert_num_queries(0):
        for _ in range(20):
            watch.now += 0.1
            assert one.look() == first
    watch.now += 2
    before = Lease.objects.get().expires_at
    again = one.look()
    assert again is not None
    assert again.fence == first.fence
    assert Lease.objects.get().expires_at > before


def test_what_a_dead_keeper_held_is_anothers_within_the_time_to_live() -> None:
    watch = Watch()
    one, other = keeper(watch), keeper(watch, "b")
    assert one.hold_s + other.ask_s <= 10
    assert one.look()
    assert other.look() is None
    let_it_run_out()
    watch.now += other.ask_s
    taken = other.look()
    assert taken is not None
    assert taken.fence == 2


def test_a_keeper_that_stood_still_believes_nothing_when_it_goes_on() -> None:
    """SIGSTOP for longer than the lease, another takes it, SIGCONT."""
    watch = Watch()
    stopped, other = keeper(watch), keeper(watch, "b")
    assert stopped.look()
    let_it_run_out()
    assert other.look()
    watch.now += 20
    assert stopped.look() is None
    assert Lease.objects.get().holder == "b"


@pytest.mark.django_db(transaction=True)  # its connection is closed
@pytest.mark.parametrize("kind", [OperationalError, InterfaceError])
def test_a_keeper_that_cannot_reach_the_store_holds_on_for_no_longer_than_its_lease(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    watch = Watch()
    one = keeper(watch)
    held = one.look()
    assert held is not None

    def fail(*_: object, **__: object) -> None:
        raise kind("the server is gone")

    with monkeypatch.context() as patch:
        patch.setattr(lease, "acquire", fail)
        watch.now += 3
        assert one.look() == held
        assert isinstance(one.fault, kind)
        watch.now += 6.1
        assert one.look() is None
    watch.now += 0.5
    assert one.look()
    assert one.fault is None


def test_a_keeper_that_gives_back_leaves_the_lease_free_at_once() -> None:
    watch = Watch()
    one = keeper(watch)
    assert not one.give_back()
    assert one.look()
    assert one.give_back()
    assert keeper(watch, "b").look()
    assert one.look() is None
