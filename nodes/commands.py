"""Commands to agents: stored before they are sent, sent again until acknowledged, applied once there (ND-3)."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import assert_never

import msgspec
from django.db.models import Q, QuerySet

from agent import protocol
from llmgw.core import doorbell, traces
from llmgw.core.models import Secret
from nodes.engine_keys import SECRET_NAME, engine_key, seal
from nodes.models import Command

RESEND_AFTER = timedelta(seconds=10)
BATCH = 100
"""Most commands that are sent at once; the rest follow when these are under way."""


def store(*, node: str, body: protocol.Body, now: datetime) -> Command:
    """Keep a command for a node, with the trace of the decision behind it, and ring for its stream on commit."""
    row = Command.objects.create(
        node_id=node,
        replica=_about(body)[0],
        body=msgspec.to_builtins(body),
        traceparent=traces.child(traces.current()),
        made_at=now,
    )
    doorbell.ring_on_commit(doorbell.commands_for(node))
    return row


def take_due(*, node: str, connection: str, now: datetime) -> tuple[protocol.Command, ...]:
    """What the stream `connection` is to send now, marked as sent; nothing once another stream speaks for the node."""
    waiting = Command.objects.filter(node=node, node__connection=connection, acknowledged_at=None)
    due = list(waiting.filter(Q(sent_at=None) | Q(sent_at__lte=now - RESEND_AFTER)).order_by("pk")[:BATCH])
    if due:
        Command.objects.filter(pk__in=[row.pk for row in due]).update(sent_at=now)
    return tuple(
        protocol.Command(id=row.pk, body=_with_secrets(row.body, node), traceparent=row.traceparent) for row in due
    )


def nodes_with_due(now: datetime) -> tuple[str, ...]:
    """The nodes that `take_due` would find something for."""
    waiting = Command.objects.filter(acknowledged_at=None).exclude(node__connection="")
    due = waiting.filter(Q(sent_at=None) | Q(sent_at__lte=now - RESEND_AFTER))
    return tuple(due.order_by("node").values_list("node", flat=True).distinct())


def _with_secrets(stored: object, node: str) -> protocol.Body:
    """The body with the engine's key and the shard's seal in it, which are never stored."""
    body: protocol.Body = msgspec.convert(stored, protocol.Body)  # type: ignore[call-overload]
    match body:
        case protocol.StartShard():
            secret = Secret.named(SECRET_NAME)
            sealed = msgspec.structs.replace(body.spec, seal=seal(secret, node, body.spec))
            return protocol.StartShard(spec=sealed, engine_key=engine_key(secret, body.spec.replica))
        case protocol.StopShard() | protocol.Fetch() | protocol.InstallEngine() | protocol.SetEngineBuild():
            return body
        case _:
            assert_never(body)


def send_again(*, node: str) -> None:
    """A new stream has opened: what an earlier one sent without an answer is due at once."""
    Command.objects.filter(node=node, acknowledged_at=None).exclude(sent_at=None).update(sent_at=None)


def acknowledge(*, node: str, ack: protocol.Ack, now: datetime) -> Command | None:
    """Note the agent's answer. None when it is answered already, withdrawn, or another node's."""
    rows = Command.objects.filter(pk=ack.id, node=node)
    answered = rows.filter(acknowledged_at=None).update(acknowledged_at=now, ok=ack.ok, error=ack.error[:1000])
    return rows.first() if answered else None


def rank_of(row: Command) -> int:
    """Of the shard that a command is about."""
    return _about(msgspec.convert(row.body, protocol.Body))[1]  # type: ignore[call-overload]


def _about(body: protocol.Body) -> tuple[str, int]:
    """The replica and rank that a command is about; no replica for what concerns the node alone."""
    match body:
        case protocol.StartShard():
            return body.spec.replica, body.spec.rank
        case protocol.StopShard():
            return body.replica, body.rank
        case protocol.Fetch() | protocol.InstallEngine() | protocol.SetEngineBuild():
            return "", 0
        case _:
            assert_never(body)


def unanswered(replica: str, kind: str) -> QuerySet[Command]:
    return Command.objects.filter(replica=replica, acknowledged_at=None, body__type=kind)


def unanswered_choices(node: str, engine: str) -> QuerySet[Command]:
    """What a node was told of which build of an engine it uses, and has not answered."""
    mine = Command.objects.filter(node=node, acknowledged_at=None)
    return mine.filter(body__type="set_engine_build", body__engine=engine)


def are_many(node: str) -> bool:
    """So many wait for the node's answer that it is asked for nothing more that it could bring about itself."""
    return Command.objects.filter(node=node, acknowledged_at=None).count() >= protocol.MAX_SHARDS


def withdraw_starts(replica: str) -> bool:
    """A replica is not to start after all. True when no start was ever sent, so that there is nothing to stop."""
    starts = Command.objects.filter(replica=replica, body__type="start_shard")
    never_sent = starts.exists() and not starts.exclude(sent_at=None, acknowledged_at=None).exists()
    starts.filter(acknowledged_at=None).delete()
    return never_sent


def discard(replica: str) -> None:
    """Drop what concerns a replica that is over, but for stops that are still to be heard."""
    rows = Command.objects.filter(replica=replica)
    rows.filter(Q(body__type="start_shard") | ~Q(acknowledged_at=None)).delete()
