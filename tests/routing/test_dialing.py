"""The way to an endpoint outside, over real sockets: names, checks, certificates."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import uvloop

from llmgw.core.addresses import parse
from routing.dialing import Line, Unusable
from routing.failures import ConnectFailed
from tests.routing.gateways import eventually
from tests.routing.providers import Provider, files

CA = str(files()[0])


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    async with Provider() as provider:
        yield provider


class Client(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.got = b""
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.got += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()

    async def ask(self, host: str = "x") -> bytes:
        assert self.transport is not None
        self.transport.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: %b\r\nContent-Length: 2\r\n\r\n{}" % host.encode()
        )
        await eventually(lambda: b"hello" in self.got, 20)
        return self.got

    async def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()
            await self.lost.wait()


async def dial(line: Line) -> Client:
    client = Client()
    await line.connect(client)
    return client


def resolving(*addresses: str, port: int | None = None) -> Callable[..., list[Any]]:
    """A resolver that gives these for any name; each call's answer is the same."""

    def resolve(_: str, asked: int, **__: Any) -> list[Any]:
        return [
            each
            for address in addresses
            for each in socket.getaddrinfo(address, port or asked, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        ]

    return resolve


async def test_the_connection_goes_to_the_checked_address_under_the_hosts_own_name(provider: Provider) -> None:
    line = Line(parse(provider.url("provider.example")), private=True, ca_file=CA, resolve=resolving("127.0.0.1"))
    client = await dial(line)
    assert b"200 OK" in await client.ask()
    assert provider.server_names == ["provider.example"]
    await client.close()


async def test_a_name_is_resolved_once_for_check_and_connection_so_it_cannot_change_between(
    provider: Provider,
) -> None:
    asked: list[str] = []

    def resolve(host: str, port: int, **more: Any) -> list[Any]:
        asked.append(host)
        address = "8.8.8.8" if len(asked) == 1 else "127.0.0.1"
        return resolving(address)(host, port)

    line = Line(parse(provider.url("provider.example")), private=False, ca_file=CA, resolve=resolve)
    looked_up = line._look_up()
    assert [place[0] for *_, place in looked_up] == ["8.8.8.8"]
    with pytest.raises(Unusable, match="a loopback address, which nothing is sent to while "):
        await dial(line)
    assert len(asked) == 2
    assert provider.accepted == 0


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "[::1]", "0.0.0.0", "[::]", "127.1"],
)
async def test_no_spelling_of_this_machine_is_connected_to(provider: Provider, host: str) -> None:
    line = Line(parse(provider.url(host)), private=False, ca_file=CA)
    with pytest.raises(Unusable, match="nothing is sent to"):
        await dial(line)
    assert provider.accepted == 0


async def test_one_refused_address_among_good_ones_refuses_the_name(provider: Provider) -> None:
    resolve = resolving("127.0.0.1", "169.254.169.254")
    line = Line(parse(provider.url("provider.example")), private=True, ca_file=CA, resolve=resolve)
    with pytest.raises(Unusable, match=r"a metadata address, which nothing is sent to$"):
        await dial(line)
    assert provider.accepted == 0


async def test_an_operators_own_endpoint_may_be_anywhere(provider: Provider) -> None:
    client = await dial(Line(parse(provider.url("127.0.0.1")), private=None, ca_file=CA))
    assert b"200 OK" in await client.ask()
    await client.close()


async def test_without_tls_it_is_plain(tmp_path: Any) -> None:
    async with Provider(tls=False) as provider:
        client = await dial(Line(parse(provider.url("127.0.0.1")), private=None, ca_file=None))
        assert b"200 OK" in await client.ask()
        await client.close()


async def test_a_certificate_of_nobody_known_or_for_another_name_is_not_trusted(provider: Provider) -> None:
    with pytest.raises(ConnectFailed, match="certificate is not trusted"):
        await dial(Line(parse(provider.url()), private=True, ca_file=None))
    other = parse(provider.url("other.example"))
    with pytest.raises(ConnectFailed, match=r"certificate is not trusted .*other\.example"):
        await dial(Line(other, private=True, ca_file=CA, resolve=resolving("127.0.0.1")))
    assert provider.raw == b""


async def test_what_speaks_no_tls_fails_in_words() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectFailed, match="does not speak TLS"):
            await dial(Line(parse(f"https://localhost:{port}"), private=True, ca_file=CA))


async def test_authorities_that_cannot_be_read_are_the_gateways_own_fault(provider: Provider, tmp_path: Any) -> None:
    with pytest.raises(Unusable, match=r"gateway\.external_ca_file cannot be read"):
        await dial(Line(parse(provider.url()), private=True, ca_file=str(tmp_path / "none.pem")))
    empty = tmp_path / "empty.pem"
    empty.write_text("no certificate")
    with pytest.raises(Unusable, match=r"gateway\.external_ca_file cannot be read"):
        await dial(Line(parse(provider.url()), private=True, ca_file=str(empty)))


async def test_the_next_address_is_tried_when_one_does_not_answer(provider: Provider) -> None:
    def resolve(host: str, port: int, **more: Any) -> list[Any]:
        return resolving("127.0.0.1", port=1)(host, port) + resolving("127.0.0.1")(host, port)

    client = await dial(Line(parse(provider.url()), private=True, ca_file=CA, resolve=resolve))
    assert b"200 OK" in await client.ask()
    await client.close()


async def test_nothing_listening_no_such_name_and_no_address_are_said_apart(provider: Provider) -> None:
    address = parse(provider.url("provider.example"))

    def unknown(*_: Any, **__: Any) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(ConnectFailed, match="Name or service not known"):
        await dial(Line(address, private=True, ca_file=CA, resolve=unknown))
    with pytest.raises(ConnectFailed, match="its name has no address"):
        await dial(Line(address, private=True, ca_file=CA, resolve=resolving()))
    with pytest.raises(ConnectFailed, match="its host's name is none"):
        await dial(Line(parse(f"https://{'a' * 80}.example"), private=True, ca_file=CA))
    with pytest.raises(ConnectFailed, match="refused"):
        await dial(Line(address, private=True, ca_file=CA, resolve=resolving("127.0.0.1", port=1)))


async def test_a_resolver_that_hangs_holds_one_thread_and_is_asked_again_when_it_failed(provider: Provider) -> None:
    go_on = threading.Event()
    asked: list[str] = []

    def resolve(host: str, port: int, **more: Any) -> list[Any]:
        asked.append(host)
        if len(asked) == 1:
            go_on.wait(20)
            raise OSError("the resolver gave up")
        return resolving("127.0.0.1")(host, port)

    # Without TLS, whose certificates are read in a thread before: so all wait for the resolver at once.
    line = Line(replace(parse(provider.url()), tls=False), private=True, ca_file=None, resolve=resolve)
    waiting = [asyncio.create_task(dial(line)) for _ in range(20)]
    given_up = asyncio.create_task(dial(line))
    await eventually(lambda: asked, 20)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    assert len(asked) == 1
    go_on.set()
    assert {str(each) for each in await asyncio.gather(*waiting, return_exceptions=True)} == {"the resolver gave up"}
    clients = await asyncio.gather(*(dial(line) for _ in range(5)))
    assert len(asked) == 2
    for client in clients:
        await client.close()


def test_it_works_on_the_loop_that_serves() -> None:
    async def there_and_back() -> None:
        async with Provider() as provider:
            line = Line(
                parse(provider.url("provider.example")), private=True, ca_file=CA, resolve=resolving("127.0.0.1")
            )
            client = await dial(line)
            assert b"200 OK" in await client.ask()
            await client.close()
            with pytest.raises(ConnectFailed, match="certificate is not trusted"):
                await dial(Line(parse(provider.url()), private=True, ca_file=None))

    uvloop.run(there_and_back())
