"""A data directory may be moved: the local node stays the same machine."""

from __future__ import annotations

import shutil
from pathlib import Path

from agent.discovery.machine import Machine


def test_a_moved_work_dir_is_the_same_machine_and_another_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/machine-id").write_text("0123456789abcdef\n")
    first = Machine(tmp_path, work_dir=tmp_path / "first").machine_id()
    shutil.move(tmp_path / "first", tmp_path / "moved")
    assert Machine(tmp_path, work_dir=tmp_path / "moved").machine_id() == first
    assert Machine(tmp_path, work_dir=tmp_path / "second").machine_id() != first


def test_a_work_dir_copied_to_another_machine_is_another_one(tmp_path: Path) -> None:
    for system in ("a", "b"):
        (tmp_path / system / "etc").mkdir(parents=True)
        (tmp_path / system / "etc/machine-id").write_text(f"{system * 32}\n")
    one, other = (Machine(tmp_path / system, work_dir=tmp_path / "work").machine_id() for system in ("a", "b"))
    assert one != other
