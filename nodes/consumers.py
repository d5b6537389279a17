"""The control plane's end of an agent's stream: who is it, what does it tell, what is it to do (ND-1 to ND-6)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from typing import Any, TypeVar, assert_never

import msgspec
from channels.db import database_sync_to_async
from channels.exceptions import StopConsumer
from channels.generic.websocket import AsyncWebsocketConsumer
from django.db import Error as StoreError

from agent import protocol
from llmgw.core import doorbell
from llmgw.core.clock import Clock
from llmgw.core.outages import Outage
from llmgw.core.store_clock import STORE_CLOCK
from nodes import actions, commands, identity, intake, polling
from nodes.flow import A_SECOND, MOST, Flow
from nodes.gauges import forget_cards, tell_cards
from nodes.models import Node
from nodes.signing import NotSigned, Sign, Signed

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")

REGISTER_WITHIN_S = 15.0
LOOK_S = 60.0
"""How often a stream looks for commands by itself, besides being rung for; `polling` looks for all of them."""
WRITE_EVERY_S = 4.5
"""Heartbeats that tell nothing new are written down no more often than this."""
# Close codes; a Refused message says the reason before them.
REFUSED, REGISTER_AGAIN, BROKEN = 4001, 4002, 1011

_store = Outage(
    log,
    "%s: the store cannot be used (%s); streams of agents end, and they connect again",
    "Streams of agents can use the store again",
)

UNPROVEN_LINES = 20
"""Refusals of strangers that are written to the log a minute: anybody can be refused, as often as they like."""


class _Seldom:
    """Says yes UNPROVEN_LINES times a minute."""

    def __init__(self) -> None:
        self.since, self.count = 0.0, 0

    def again(self, now: float) -> bool:
        if now - self.since >= 60:
            self.since, self.count = now, 0
        self.count += 1
        return self.count <= UNPROVEN_LINES


class _Greeting(msgspec.Struct):
    """As much of a first message as every version of the protocol has."""

    type: str
    protocol: int = protocol.VERSION


class AgentStream(AsyncWebsocketConsumer):  # type: ignore[misc]
    """One connection. States: refused, or proven (a token), then registered (one Register), then told and telling."""

    clock: Clock = STORE_CLOCK
    strangers = _Seldom()
    flow = Flow()

    def __init__(self, *args: Any, sign: Sign | None = None, **kwargs: Any) -> None:
        """`sign`: for agents that came with certificates; where there is none nobody else comes."""
        super().__init__(*args, **kwargs)
        self.sign = sign
        self.proof: identity.Proof | None = None
        self.connection = secrets.token_hex(16)
        self.registered = False
        self.sender: asyncio.Task[None] | None = None
        self.deadline: asyncio.Task[None] | None = None
        self.told: dict[tuple[str, int], protocol.ShardState] = {}
        self.errands: tuple[protocol.Errand, ...] = ()
        self.stops: dict[tuple[str, int], int] = {}
        """Shards that were told to stop and not called ended yet, each with the command; 0 once that is answered."""
        self.written_at = 0.0
        self.ended = False
        """Whether either side has closed it."""

    async def close(self, code: int | None = None, reason: str | None = None) -> None:
        """Once: servers take a second close, or one after the agent's, for a fault of ours."""
        if not self.ended:
            self.ended = True
            await super().close(code, reason)

    async def dispatch(self, message: dict[str, Any]) -> None:
        async with self._boundary():
            await super().dispatch(message)

    @contextlib.asynccontextmanager
    async def _boundary(self) -> AsyncIterator[None]:
        """Around all that a stream does: what goes wrong ends this one alone, and is said."""
        try:
            yield
        except StopConsumer:
            raise
        except StoreError as error:
            _store.fails(self.name, error)
            await self.close(BROKEN)
        except OSError as gone:  # which ASGI servers raise when it is sent something meanwhile
            log.info("The connection of %s ended while it was spoken to (%s)", self.name, type(gone).__name__)
        except Exception:
            log.exception("%s: its stream failed; the agent connects again", self.name)
            await self.close(BROKEN)

    @property
    def name(self) -> str:
        return f"node {self.node.name}" if self.node else "an agent"

    @property
    def node(self) -> Node | None:
        return self.proof.node if self.proof else None

    async def connect(self) -> None:
        await self.accept()  # so that a refusal can say why
        proof = await database_sync_to_async(identity.prove)(self.scope)
        if isinstance(proof, identity.Unproven):
            await self._refuse(proof.reason)
            return
        self.proof = proof
        self.deadline = asyncio.create_task(self._register_late())

    async def disconnect(self, code: int) -> None:
        self.ended = True
        if self.deadline:
            self.deadline.cancel()
        if self.sender:
            self.sender.cancel()
        if self.node and self.registered:
            log.info("Node %s: its stream ended (%s)", self.node.name, code)
            forget_cards(self.node.name, self.connection)
            async with self._boundary():  # its caller ends the consumer after this
                await database_sync_to_async(actions.leave)(node=self.node.name, connection=self.connection)

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        if self.node is None:
            return  # refused, or not yet proven; what it says does not matter
        raw = text_data.encode() if text_data is not None else bytes_data or b""
        if not self.flow.take(self.node.name, len(raw), self.clock.monotonic()):
            await self._refuse(
                f"node {self.node.name} says more than {MOST:.0f} messages at once and {A_SECOND:.0f} a second from "
                "then on; see in its log what it tells again and again",
                retry_after_s=60,
            )
            return
        if len(raw) > protocol.MAX_MESSAGE_BYTES:
            await self._refuse(f"a message of {len(raw)} bytes is over the limit of {protocol.MAX_MESSAGE_BYTES}")
            return
        try:
            if not self.registered and (other := _other_version(raw)):
                await self._refuse(other)
                return
            message = intake.fitted(protocol.decode_up(raw))
        except (msgspec.DecodeError, RecursionError, intake.Unfit) as error:
            await self._refuse(f"a message could not be read: {intake.shown(str(error))[:400]}")
            return
        await self._hear(self.node, message)

    async def _hear(self, node: Node, message: protocol.Up) -> None:
        match message:
            case protocol.Register():
                await self._register(node, message)
            case _ if not self.registered:
                await self._refuse("the first message of a stream must be a register")
            case protocol.Heartbeat():
                await self._heartbeat(node, message)
            case protocol.ShardStatus():
                self._remember(message.status)
                if message.status.state in protocol.ENDED:
                    self.stops.pop((message.status.replica, message.status.rank), None)
                await self._go_on(
                    await self._act(
                        lambda now: actions.shard_status(
                            node=node.name, connection=self.connection, report=message, now=now
                        )
                    )
                )
            case protocol.Ack():
                self.stops |= {key: 0 for key, command in self.stops.items() if command == message.id}
                await self._act(lambda now: actions.acknowledge(node=node.name, ack=message, now=now))
            case protocol.CertificateRequest():
                await self._renew(message.request)
            case _:
                assert_never(message)

    async def _register(self, node: Node, message: protocol.Register) -> None:
        if self.deadline:
            self.deadline.cancel()  # it has spoken; that a whole fleet speaks at once is not its fault
        assert self.proof
        proof, peer, here = self.proof, self._end("client"), self._end("server")
        if misplaced := intake.misplaced(message.address, peer=peer, here=here):
            await self._refuse(misplaced, retry_after_s=60)
            return
        answer = await self._act(
            lambda now: actions.register_node(
                node=node, register=message, connection=self.connection, now=now, proof=proof.kind, peer=peer
            )
        )
        if isinstance(answer, protocol.Refused):
            await self._refuse(answer.reason, answer.retry_after_s)
            return
        if proof.is_new:
            await self._act(lambda now: identity.mark_proved(proof, now))
        _store.works()  # not where something is only read, as it is from a full disk
        self.registered = True
        self.told = {(each.status.replica, each.status.rank): each.status for each in message.shards}
        self.written_at = self.clock.monotonic()
        tell_cards(node.name, self.connection, message.inventory.gpus)
        log.info("Node %s registered from %s with %d shards", node.name, message.address, len(message.shards))
        await self._say(msgspec.structs.replace(answer, renews=self._renews))
        if self.sender is None:
            self.sender = asyncio.create_task(self._send_commands(node))

    def _end(self, which: str) -> str:
        """The address of that end of the connection; empty when the server does not tell."""
        return str((self.scope.get(which) or ("",))[0])

    async def _heartbeat(self, node: Node, message: protocol.Heartbeat) -> None:
        changed = [state for state in message.shards if self.told.get((state.replica, state.rank)) != state]
        errands = message.errands if message.errands != self.errands else ()
        listed = {(state.replica, state.rank) for state in message.shards}
        ended = [key for key, command in self.stops.items() if not command and key not in listed]
        news = changed or errands or ended or message.inventory is not None
        if not news and self.clock.monotonic() - self.written_at < WRITE_EVERY_S:
            return
        self.errands = message.errands
        self.told = {(state.replica, state.rank): state for state in message.shards}
        self.written_at = self.clock.monotonic()
        heard = await self._act(
            lambda now: actions.heartbeat(
                node=node.name,
                connection=self.connection,
                load=message.load,
                changed=changed,
                now=now,
                inventory=message.inventory,
                errands=errands,
                ended=ended,
            )
        )
        self.stops = {key: command for key, command in self.stops.items() if key not in ended}
        _store.works()
        if heard == "ok" and message.inventory is not None:
            tell_cards(node.name, self.connection, message.inventory.gpus)
        await self._go_on(heard)

    async def _act(self, act: Callable[[datetime], Answer]) -> Answer:
        """What an action of the store answers that is given the store's time, off the event loop."""
        at_its_time: Callable[[], Awaitable[Answer]] = database_sync_to_async(lambda: act(self.clock.now()))
        return await at_its_time()

    def _remember(self, state: protocol.ShardState) -> None:
        """So that a heartbeat with nothing else is no news. What is told of more and more shards is not kept."""
        if len(self.told) >= protocol.MAX_SHARDS:
            self.told.clear()
        self.told[state.replica, state.rank] = state

    def _await_end(self, command: protocol.Command) -> None:
        body = command.body
        if isinstance(body, protocol.StopShard) and len(self.stops) < protocol.MAX_SHARDS:
            self.stops[body.replica, body.rank] = command.id

    @property
    def _renews(self) -> bool:
        return self.sign is not None and self.proof is not None and self.proof.kind == "certificate"

    async def _renew(self, request: str) -> None:
        if not self._renews:
            await self._say(protocol.NotRenewed(reason="this stream came without a certificate of ours"))
            return
        proof, sign = self.proof, self.sign
        assert proof
        assert sign
        answer = await self._act(
            lambda now: identity.renew_certificate(proof=proof, request=request, sign=sign, now=now)
        )
        match answer:
            case Signed(certificate=certificate):
                await self._say(protocol.Certificate(certificate=certificate))
            case NotSigned(reason=reason):
                log.warning("The certificate of node %s is not renewed: %s", proof.node.name, reason)
                await self._say(protocol.NotRenewed(reason=reason))

    async def _go_on(self, heard: actions.Heard) -> None:
        match heard:
            case "ok":
                return
            case "replaced":
                await self._refuse(await self._over() or "another stream speaks for this node now")
            case "register again":
                await self.close(REGISTER_AGAIN)

    async def _send_commands(self, node: Node) -> None:
        """Pass on what is stored for the node, now and whenever there is more, until the stream ends."""
        listener = doorbell.Listener([doorbell.commands_for(node.name)])
        poll = polling.here()
        poll.join(self.clock.now)
        try:
            async with self._boundary():
                await self._pass_on(node, listener)
        finally:
            listener.close()
            poll.leave()

    async def _pass_on(self, node: Node, listener: doorbell.Listener) -> None:
        while True:
            due = await self._act(lambda now: commands.take_due(node=node.name, connection=self.connection, now=now))
            for command in due:
                self._await_end(command)
                await self._say(command)
            if await listener.wait(LOOK_S) and (over := await self._over()):
                await self._refuse(over)
                return

    async def _over(self) -> str:
        """Why this stream no longer speaks for its node; empty while it does."""
        assert self.proof
        node = self.proof.node
        row = await Node.objects.filter(pk=node.pk).values_list("connection", flat=True).afirst()
        if row is None:
            return f"node {node.name} was removed; make it anew before its agent joins again"
        if not await database_sync_to_async(identity.still_proven)(self.proof):
            return f"the certificate of node {node.name} was revoked; make another with `llmgw node add {node.name}`"
        if row == "":
            return f"who speaks for node {node.name} must be proven anew"
        return "" if row == self.connection else "another stream speaks for this node now"

    async def _register_late(self) -> None:
        await asyncio.sleep(REGISTER_WITHIN_S)
        async with self._boundary():
            await self._refuse(f"nothing was registered within {REGISTER_WITHIN_S:g} s")

    async def _refuse(self, reason: str, retry_after_s: float | None = None) -> None:
        if self.node or self.strangers.again(self.clock.monotonic()):
            log.warning("Refused %s: %s", self.name, reason)
        await self._say(protocol.Refused(reason=reason, retry_after_s=retry_after_s))
        await self.close(REFUSED)

    async def _say(self, message: protocol.Down) -> None:
        await self.send(text_data=protocol.encode(message).decode())


def _other_version(raw: bytes) -> str:
    """Why an agent of another protocol version is refused; empty for one of ours."""
    greeting = msgspec.json.decode(raw, type=_Greeting)
    if greeting.type != "register" or greeting.protocol == protocol.VERSION:
        return ""
    older = "agent" if greeting.protocol < protocol.VERSION else "control plane"
    return (
        f"the agent speaks protocol version {greeting.protocol} and the control plane version {protocol.VERSION}; "
        f"upgrade the {older}"
    )
