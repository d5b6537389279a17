"""Commands of every kind are stored, sent until they are answered, and carry what belongs to them (ND-3, ND-47)."""

from __future__ import annotations

import re
from datetime import timedelta

import msgspec
import pytest
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from agent import protocol
from llmgw.core import traces
from llmgw.core.models import Secret
from nodes import commands, passes
from nodes.engine_keys import SECRET_NAME, engine_key
from nodes.models import Command
from tests.factories import make_model, make_node

SPEC = protocol.ShardSpec(
    replica="r", rank=1, model="m", profile="p", profile_digest="d", engine="llamacpp", source="/x"
)
EXAMPLES: dict[type, protocol.Body] = {
    protocol.StartShard: protocol.StartShard(spec=SPEC),
    protocol.StopShard: protocol.StopShard(replica="r", rank=1, grace_s=3),
    protocol.Fetch: protocol.Fetch(source="/x"),
    protocol.InstallEngine: protocol.InstallEngine(engine="vllm"),
    protocol.SetEngineBuild: protocol.SetEngineBuild(engine="vllm", build="none"),
}


def trace_of(traceparent: str) -> str:
    """The trace's id; empty for what W3C's form does not allow."""
    found = re.fullmatch(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}", traceparent)
    return found[1] if found else ""


def test_every_kind_of_command_has_its_example() -> None:
    assert set(EXAMPLES) == set(protocol.Body.__args__)


@pytest.mark.django_db
@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_command_is_stored_sent_until_answered_and_then_no_more(kind: type) -> None:
    make_node("one", connection="c")
    now, body = timezone.now(), EXAMPLES[kind]
    row = commands.store(node="one", body=body, now=now)
    assert commands.nodes_with_due(now) == ("one",)
    [first] = commands.take_due(node="one", connection="c", now=now)
    assert commands.take_due(node="one", connection="c", now=now) == ()
    [again] = commands.take_due(node="one", connection="c", now=now + commands.RESEND_AFTER)
    assert first == again
    assert _as_stored(first.body) == body
    of_a_shard = kind in (protocol.StartShard, protocol.StopShard)
    assert (row.replica, commands.rank_of(row)) == (("r", 1) if of_a_shard else ("", 0))
    answer = protocol.Ack(id=row.pk, ok=False, error="no")
    assert commands.acknowledge(node="one", ack=answer, now=now) == row
    assert commands.acknowledge(node="one", ack=protocol.Ack(id=row.pk), now=now) is None
    assert commands.nodes_with_due(now + timedelta(days=1)) == ()
    assert Command.objects.get().ok is False


def _as_stored(body: protocol.Body) -> protocol.Body:
    if not isinstance(body, protocol.StartShard):
        return body
    return protocol.StartShard(spec=msgspec.structs.replace(body.spec, seal=""))


@pytest.mark.django_db
def test_only_starts_carry_the_engines_key_and_no_row_holds_it() -> None:
    make_node("one", connection="c")
    for body in EXAMPLES.values():
        commands.store(node="one", body=body, now=timezone.now())
    key = engine_key(Secret.named(SECRET_NAME), "r")
    sent = commands.take_due(node="one", connection="c", now=timezone.now())
    with_key = [each.body for each in sent if key in protocol.encode(each).decode()]
    assert [type(body) for body in with_key] == [protocol.StartShard]
    assert key not in str(list(Command.objects.values()))


@pytest.mark.django_db
def test_what_one_pass_decides_is_one_trace_and_another_pass_another() -> None:
    make_node("one", connection="c")
    make_model("a")
    make_model("b")
    for _ in range(2):
        assert passes.run_pass(timezone.now())
    sent = commands.take_due(node="one", connection="c", now=timezone.now())
    found = [each.traceparent for each in sent]
    assert len(found) == 2
    assert len({trace_of(each) for each in found} - {""}) == 2
    assert traces.current() == ""


@pytest.mark.django_db
def test_a_command_belongs_to_the_trace_that_it_was_stored_in() -> None:
    make_node("one")
    with traces.within("00-0123456789abcdef0123456789abcdef-0123456789abcdef-01") as inside:
        rows = [commands.store(node="one", body=EXAMPLES[protocol.Fetch], now=timezone.now()) for _ in range(2)]
    assert {trace_of(row.traceparent) for row in rows} == {trace_of(inside)}
    assert trace_of(inside) == "0123456789abcdef0123456789abcdef"
    assert len({row.traceparent for row in rows} | {inside}) == 3


@given(st.text(max_size=60) | st.from_regex(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", fullmatch=True))
def test_a_new_span_is_well_formed_whatever_came_in(incoming: str) -> None:
    made = traces.child(incoming)
    assert trace_of(made)
    assert trace_of(incoming) in ("", trace_of(made))
    assert made != incoming


def test_traces_inside_each_other_are_one() -> None:
    with traces.within() as outer:
        with traces.within() as inner:
            assert trace_of(inner) == trace_of(outer)
            assert traces.current() == inner != outer
        assert traces.current() == outer
    assert traces.current() == ""
