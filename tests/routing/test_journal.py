from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing import journal as module
from routing.journal import Batch, Journal
from routing.shapes import Record


def record(number: int, **changes: object) -> Record:
    fields = {"request_id": f"req-{number}", "at": 1.5, "route": "/v1/x", "status": 200, "total_ms": 2.0, **changes}
    return Record(**fields)  # type: ignore[arg-type]


def taken(batches: list[Batch]) -> list[str]:
    """The ids of everything in `batches`, which are then done."""
    ids = []
    for batch in batches:
        ids += [each.request_id for each in batch.records()]
        batch.done()
    return ids


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@given(
    st.builds(
        record,
        number=st.integers(),
        prompt_tokens=st.none() | st.integers(0, 10**9),
        model=st.text(max_size=20),
        estimated=st.booleans(),
        first_token_ms=st.none() | st.floats(0, 1e6),
    )
)
def test_a_record_survives_the_disk_unchanged(made: Record) -> None:
    assert module._decode(module._encode(made)) == made
    assert b"\n" not in module._encode(made)


def test_records_are_handed_over_once_and_their_file_goes(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    assert journal.batches() == []
    for number in range(3):
        journal.append(record(number))
    assert journal.pending_bytes() > 0
    batches = journal.batches()
    journal.append(record(9))
    assert taken(batches) == ["req-0", "req-1", "req-2"]
    assert taken(journal.batches()) == ["req-9"]
    assert journal.batches() == []
    journal.close()
    assert files(tmp_path / "journal") == []


def test_a_full_disk_is_not_said_again_as_often_as_the_store_empties_the_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    journal = Journal(tmp_path / "file")
    for number in range(5):
        journal.append(record(number))
        assert taken(journal.batches()) == [f"req-{number}"]
    assert caplog.text.count("cannot be written") == 1


def test_a_disk_that_lets_files_begin_and_no_more_is_left_none_of_them(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(1, 30):  # nothing can be renamed to what is a folder
        (tmp_path / f"{journal._mark}-{number:08d}.jsonl").mkdir()
    begun, there = len(os.listdir("/proc/self/fd")), len(files(tmp_path))
    for number in range(20):
        journal.append(record(number))
    assert journal.in_memory == 20
    assert (len(os.listdir("/proc/self/fd")), len(files(tmp_path))) == (begun, there)
    assert len(taken(journal.batches())) == 20


def test_what_the_store_did_not_take_is_offered_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(record(1))
    for batch in journal.batches():
        batch.give_up()
    journal.append(record(2))
    assert taken(journal.batches()) == ["req-1", "req-2"]
    journal.close()


def test_files_are_private_and_roll_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 100)
    journal = Journal(tmp_path / "journal")
    for number in range(5):
        journal.append(record(number))
    assert len(files(tmp_path / "journal")) > 1
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "journal").iterdir()} == {0o600}
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o700
    assert taken(journal.batches()) == [f"req-{number}" for number in range(5)]
    journal.close()


def test_a_living_process_keeps_its_segments_and_a_dead_ones_are_replayed_once(tmp_path: Path) -> None:
    alive, other = Journal(tmp_path), Journal(tmp_path)
    alive.append(record(1))
    assert list(other.orphans()) == []
    alive.close()  # as when it dies: the lock goes, the file stays
    assert taken(list(other.orphans())) == ["req-1"]
    assert list(other.orphans()) == []
    assert files(tmp_path) == []


def test_an_orphan_that_the_store_refused_stays_for_the_next(tmp_path: Path) -> None:
    dead = Journal(tmp_path)
    dead.append(record(1))
    dead.close()
    for batch in Journal(tmp_path).orphans():
        batch.give_up()
    assert taken(list(Journal(tmp_path).orphans())) == ["req-1"]


def test_two_processes_do_not_replay_the_same_segment(tmp_path: Path) -> None:
    dead = Journal(tmp_path)
    dead.append(record(1))
    dead.close()
    (path,) = tmp_path.iterdir()
    handle = os.open(path, os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert list(Journal(tmp_path).orphans()) == []
    os.close(handle)
    path.with_name("gone.jsonl").symlink_to(tmp_path / "nowhere")
    assert taken(list(Journal(tmp_path).orphans())) == ["req-1"]


def test_a_torn_last_line_and_a_spoiled_one_cost_only_themselves(tmp_path: Path) -> None:
    lines = [module._encode(record(1)), b"\x00garbage", module._encode(record(2)), module._encode(record(3))[:20]]
    (tmp_path / "9-dead-1.jsonl").write_bytes(b"\n".join(lines))
    assert taken(list(Journal(tmp_path).orphans())) == ["req-1", "req-2"]


KILLED = """
import sys
from pathlib import Path
from routing.journal import Journal
from routing.shapes import Record
journal = Journal(Path(sys.argv[1]))
for number in range(10**9):
    journal.append(Record(request_id=f"req-{number}", at=1.0, route="/v1/x", status=200, total_ms=1.0))
    print(number, flush=True)
"""


def test_after_kill_9_every_record_that_was_appended_is_there_once(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(500):
        child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    said = 500 + len(child.stdout.read().splitlines())
    child.stdout.close()
    child.wait()
    ids = taken(list(Journal(tmp_path).orphans()))
    assert len(set(ids)) == len(ids)
    assert len(ids) >= said - 1


def test_a_folder_that_cannot_be_written_keeps_records_in_memory_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MEMORY_RECORDS", 2)
    blocked = tmp_path / "file"
    blocked.write_text("")
    journal = Journal(blocked / "journal")
    for number in range(3):
        journal.append(record(number))
    assert (journal.in_memory, journal.lost) == (2, 1)
    assert [each.levelname for each in caplog.records] == ["ERROR"]
    assert "free space" in caplog.text
    assert taken(journal.batches()) == ["req-0", "req-1"]
    assert journal.in_memory == 0
    assert journal.pending_bytes() == 0
    journal.close()


FULL = """
import resource, signal, sys
from pathlib import Path
from routing.journal import Journal
from routing.shapes import Record
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
journal = Journal(Path(sys.argv[1]))
for number in range(30):
    journal.append(Record(request_id=f"req-{number}", at=1.0, route="/v1/x", status=200, total_ms=1.0))
ids = [each.request_id for batch in journal.batches() for each in batch.records()]
assert sorted(ids) == sorted(f"req-{number}" for number in range(30)), ids
assert journal.in_memory > 0 and journal.lost == 0
print("ok")
"""


def test_a_disk_that_fills_up_inside_a_line_loses_and_spoils_nothing(tmp_path: Path) -> None:
    assert resource.RLIMIT_FSIZE is not None
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=False, timeout=110
    )
    assert done.stdout == "ok\n", done.stderr
    assert done.stderr.count("cannot be written") == 1
