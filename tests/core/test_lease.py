"""One holder at a time, whatever the hosts' clocks say."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
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
    assert again == first
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


def test_prolonging_costs_two_queries(django_assert_num_queries) -> None:  # type: ignore[no-untyped-def]
    lease.acquire("leader", ttl_s=10, holder="a")
    with django_assert_num_queries(2):
        lease.acquire("leader", ttl_s=10, holder="a")


def test_times_are_the_databases() -> None:
    lease.acquire("leader", ttl_s=10, holder="a")
    with connection.cursor() as cursor:
        cursor.execute("SELECT CURRENT_TIMESTAMP")
        assert cursor.fetchone()
    assert Lease.objects.filter(since__lte=Now(), expires_at__gt=Now() + timedelta(seconds=8)).exists()


def test_a_holder_is_named_by_host_process_and_chance() -> None:
    assert lease.new_holder() != lease.new_holder()
    assert lease.HOLDER.count(":") == 2
