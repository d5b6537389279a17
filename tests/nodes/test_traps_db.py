"""Traps of the database: an SQLite store that says `database is locked` where it had only to wait."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.product import clean_environment
from tests.nodes.many_writers import AGENTS


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a scratch SQLite store that is up to date."""
    found = {**clean_environment(), "LLMGW_DATA_DIR": str(tmp_path)}
    migrate = [sys.executable, "manage.py", "migrate", "-v0"]
    subprocess.run(migrate, env=found, check=True, timeout=250)
    return found


@contextlib.contextmanager
def _process(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_processes_that_read_and_write_one_sqlite_store_wait_for_each_other_and_none_is_refused(
    environment: dict[str, str], tmp_path: Path
) -> None:
    names = ("first", "second")
    command = [sys.executable, "-m", "tests.nodes.many_writers"]
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(_process([*command, name], environment)) for name in names]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            told, complaints = process.communicate(timeout=200)
            assert told == "0 refused []\n", complaints
            assert "Traceback" not in complaints
    store = sqlite3.connect(tmp_path / "llmgw.sqlite3")
    assert store.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    [ready] = store.execute("SELECT count(*) FROM nodes_node WHERE state = 'ready'").fetchone()
    assert ready == len(names) * AGENTS
    [long] = store.execute("SELECT count(*) FROM nodes_event WHERE kind = 'long'").fetchone()
    assert long == 2 * len(names)
    assert not store.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0], "somebody still holds the journal"
    store.close()
    for name in names:
        copied = sqlite3.connect(tmp_path / f"{name}.copy")
        assert copied.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        copied.close()
