"""The queue of files on a disk that takes no more, and with what such a disk left in it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from kombu.connection import Connection
from kombu.exceptions import ChannelError

from llmgw.core import file_queue


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("messages", "control"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
def channel(folder: Path) -> Iterator[Any]:
    options = {
        "data_folder_in": str(folder / "messages"),
        "data_folder_out": str(folder / "messages"),
        "control_folder": str(folder / "control"),
    }
    make: Any = Connection  # untyped
    with make(f"{file_queue.SCHEME}://localhost/", transport_options=options) as connection:
        yield connection.channel()


def test_jobs_come_out_as_they_went_in_once_and_in_their_order(channel: Any, folder: Path) -> None:
    for number in range(3):
        channel._put("celery", {"body": "ä", "number": number})
    channel._put("other", {"number": 9})
    assert channel._size("celery") == 3
    assert [channel._get("celery")["number"] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(Empty):
        channel._get("celery")
    assert channel._get("other") == {"number": 9}
    assert not os.listdir(folder / "messages")


@pytest.mark.parametrize("left", [b"", b'{"body": "cut off he', b"\xff\xfe"])
def test_a_job_that_a_full_disk_cut_off_is_passed_over_and_does_not_end_the_worker(
    channel: Any, folder: Path, left: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "messages" / "1_x.celery.msg").write_bytes(left)
    (folder / "messages" / "2_x.celery.msg").write_bytes(b'{"number": 1}')
    assert channel._get("celery") == {"number": 1}
    assert "was not stored whole" in caplog.text
    assert not os.listdir(folder / "messages")


def test_a_job_that_does_not_fit_on_the_disk_leaves_nothing_and_is_said(
    channel: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Path.replace

    def full(self: Path, target: Path) -> Path:
        if target.suffix == ".msg":
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(self, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ChannelError, match="takes no file: No space left on device"):
        channel._put("celery", {"number": 1})
    assert not os.listdir(folder / "messages")


def test_a_table_that_a_full_disk_cut_off_is_made_anew(channel: Any, folder: Path) -> None:
    (folder / "control" / "celery.exchange").write_bytes(b"")
    assert channel.get_table("celery") == []
    channel._queue_bind("celery", "celery", None, "celery")
    [bound] = channel.get_table("celery")
    assert bound.queue == "celery"
