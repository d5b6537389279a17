"""The edge that loads and unloads LoRA adapters in engines that take them as they run, over the gateway's own client.

A cold adapter is loaded once an engine, whoever waits for it; one engine loads one at a time. What an engine holds is
asked of it before each load: it may have been started anew, and other gateways load too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from llmgw.core.ending import end
from routing import lora, openai
from routing.failures import Broken, Full, Silent, UpstreamError
from routing.lora import Adapter, Attached, Cooling, Holdings, Room, Use
from routing.pools import Pool
from routing.upstream import Connection

log = logging.getLogger(__name__)

ASK_S = 5.0
LOAD_S = 120.0
ROOM_S = 10.0
"""How long an adapter waits for another one's last request to end."""
MAX_BYTES = 4 * 1024 * 1024
SAID_CHARACTERS = 300


class NotLoaded(UpstreamError):
    """The engine cannot serve the adapter now, through no fault of the requests that its replica serves."""

    counts = False


class NoRoom(Full):
    """Every adapter that the engine may hold is in use."""


class Lost(UpstreamError):
    """The engine no longer has an adapter that it had: it was started anew, or another gateway unloaded it."""

    counts = False


class Place(Protocol):
    """An engine's address and key, and what it makes of adapters: routing.table.Target."""

    @property
    def replica(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def request_head(self) -> bytes: ...
    @property
    def attached(self) -> Attached | None: ...


P_contra = TypeVar("P_contra", bound=Place, contravariant=True)
P = TypeVar("P", bound=Place)


class Pools(Protocol[P_contra]):
    def of(self, target: P_contra, /) -> Pool: ...


class _Engine:
    """What is under way at one engine."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.freed = asyncio.Event()
        self.waiting: dict[str, list[asyncio.Future[Use]]] = {}
        """By the adapter that is being loaded. Everyone has a future of their own, to give up alone."""


class Adapters(Generic[P]):
    """One a gateway process."""

    def __init__(self, pools: Pools[P]) -> None:
        self._pools = pools
        self._engines: WeakKeyDictionary[Holdings, _Engine] = WeakKeyDictionary()
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(self, place: P, wanted: Adapter) -> Use:
        """Return with the adapter loaded and in use there; `give_back` ends that. Raises NotLoaded, NoRoom, and what
        else befalls a request to the engine.

        To be called where the endpoint loads adapters (`place.attached.holdings`). Bounded by its own limits.
        """
        holdings = _holdings(place)
        use = holdings.use(wanted.engine_name)
        if use is not None:
            return use
        engine = self._engines.get(holdings)
        if engine is None:
            engine = self._engines[holdings] = _Engine()
        waiting = engine.waiting.get(wanted.engine_name)
        if waiting is None:
            cooling = holdings.begin(wanted.engine_name, time.monotonic())
            if isinstance(cooling, Cooling):
                raise NotLoaded(f"{cooling.reason}; it is tried again in {cooling.wait_s:.0f} s")
            waiting = engine.waiting[wanted.engine_name] = []
            self._spawn(self._load(place, holdings, engine, wanted))
        mine: asyncio.Future[Use] = asyncio.get_running_loop().create_future()
        waiting.append(mine)
        try:
            return await mine
        except BaseException:
            if mine.done() and not mine.cancelled() and mine.exception() is None:
                self.give_back(place, mine.result())  # it was given to somebody who has left by now
            raise

    def give_back(self, place: P, use: Use) -> None:
        """One request that used it is over."""
        holdings = _holdings(place)
        holdings.release(use)
        engine = self._engines.get(holdings)
        if engine is not None:
            engine.freed.set()

    async def still_there(self, place: P, wanted: Adapter) -> bool:
        """Whether the engine has the adapter, when it answered as if it had not. Forgets what is gone."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def look() -> None:
            there = True
            with contextlib.suppress(UpstreamError):
                there = wanted.engine_name in await self._find(place, _holdings(place))
            if not answer.done():
                answer.set_result(there)

        self._spawn(look())
        return await answer

    async def close(self) -> None:
        await end(self._tasks)

    # --- one load ----------------------------------------------------------------------------------------------------
    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, place: P, holdings: Holdings, engine: _Engine, wanted: Adapter) -> None:
        failure: UpstreamError | None = NotLoaded("the gateway stops")
        try:
            await self._bring(place, holdings, engine, wanted)
            failure = None
        except UpstreamError as error:
            failure = error
        finally:
            self._tell(place, holdings, engine, wanted, failure)

    def _tell(
        self, place: P, holdings: Holdings, engine: _Engine, wanted: Adapter, failure: UpstreamError | None
    ) -> None:
        """Everyone who waits for it, how it went."""
        name = wanted.engine_name
        left = [each for each in engine.waiting.pop(name) if not each.done()]
        if failure is None:
            log.info("Adapter %s is loaded in replica %s (as %s)", wanted.name, place.replica, name)
            holdings.loaded(name)
            for each in left:  # before anyone goes on: what is idle may be unloaded
                use = holdings.use(name)
                assert use is not None
                each.set_result(use)
            engine.freed.set()
            return
        log.warning("Adapter %s is not loaded in replica %s: %s", wanted.name, place.replica, failure)
        holdings.failed(name, str(failure) if isinstance(failure, NotLoaded) else None, time.monotonic())
        for each in left:
            each.set_exception(type(failure)(*failure.args))

    async def _bring(self, place: P, holdings: Holdings, engine: _Engine, wanted: Adapter) -> None:
        end = time.monotonic() + ROOM_S
        while True:
            async with engine.turn:
                engine.freed.clear()
                if wanted.engine_name in await self._find(place, holdings):
                    return
                if await self._make_room(place, holdings):
                    await self._put(place, holdings, wanted)
                    return
            try:
                async with asyncio.timeout(end - time.monotonic()):
                    await engine.freed.wait()
            except TimeoutError:
                raise NoRoom(
                    f"all {holdings.limit} adapters that replica {place.replica} may hold are in use"
                ) from None

    async def _find(self, place: P, holdings: Holdings) -> frozenset[str]:
        status, body = await self._ask(place, b"GET", b"/v1/models", None, ASK_S)
        if status != 200:
            raise NotLoaded(f"the engine answered {status} when asked what it holds")
        try:
            there = lora.listed(body)
        except msgspec.DecodeError:
            raise NotLoaded("what the engine says that it holds cannot be understood") from None
        holdings.found(there)
        return there

    async def _make_room(self, place: P, holdings: Holdings) -> bool:
        """Unload what has not been used for longest; False when all that it may hold is in use."""
        if not holdings.full:
            return True
        busy = await self._busy(place)
        while (first := holdings.room(busy)) is not Room.FREE:
            if first is Room.NONE:
                return False
            status, said = await self._ask(place, b"POST", _route(place, b"unload"), {"lora_name": first}, LOAD_S)
            if status not in (200, 404):  # 404: it has none of that name
                raise NotLoaded(f"the engine does not unload {first}: {_text(status, said)}")
            log.info("Adapter %s is unloaded from replica %s to make room", first, place.replica)
        return True

    async def _busy(self, place: P) -> frozenset[str]:
        status, page = await self._ask(place, b"GET", b"/metrics", None, ASK_S)
        return lora.running(page.decode("utf-8", "replace")) if status == 200 else frozenset()

    async def _put(self, place: P, holdings: Holdings, wanted: Adapter) -> None:
        content = {"lora_name": wanted.engine_name, "lora_path": wanted.source}
        status, said = await self._ask(place, b"POST", _route(place, b"load"), content, LOAD_S)
        # Another gateway may have been faster.
        if status != 200 and wanted.engine_name not in await self._find(place, holdings):
            raise NotLoaded(f"the engine does not load it: {_text(status, said)}")

    async def _ask(
        self, place: P, method: bytes, path: bytes, content: object | None, limit_s: float
    ) -> tuple[int, bytes]:
        """Status and body of an answer. Raises UpstreamError."""
        body = b"" if content is None else msgspec.json.encode(content)
        head = b"%b %b%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (
            method,
            path,
            place.request_head,
            len(body),
        )
        pool = self._pools.of(place)
        try:
            async with asyncio.timeout(limit_s):
                connection = pool.idle()
                if connection is not None:
                    try:
                        return await _answer(connection, head, body)
                    except Broken:  # it had been closed: once more on a fresh one
                        if connection.fed:
                            raise
                connection = pool.open()
                try:
                    await connection.connected()
                except BaseException:
                    connection.release()
                    raise
                return await _answer(connection, head, body)
        except TimeoutError:
            raise Silent(f"it did not answer {path.decode()} within {limit_s:g} s") from None


async def _answer(connection: Connection, head: bytes, body: bytes) -> tuple[int, bytes]:
    try:
        connection.send(head, body)
        await connection.head()
        parts, size = [], 0
        while await connection.more():
            parts.append(connection.take())
            size += len(parts[-1])
            if size > MAX_BYTES:
                raise Broken(f"what it answered is longer than {MAX_BYTES:,} bytes")
        return connection.status, b"".join(parts)
    finally:
        connection.release()


def _route(place: Place, verb: bytes) -> bytes:
    return (b"/" if place.engine == lora.SGLANG else b"/v1/") + verb + b"_lora_adapter"


def _text(status: int, said: bytes) -> str:
    text = " ".join(openai.error_text(said[:4096]).split())[:SAID_CHARACTERS]
    return f"{text} ({status})" if text else f"it answered {status}"


def _holdings(place: Place) -> Holdings:
    assert place.attached is not None
    assert place.attached.holdings is not None, "an endpoint that loads adapters as it runs"
    return place.attached.holdings
