"""A start that cannot work ends in one sentence with the next step, exit code 2, and nothing half-made."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import subprocess
import time
from pathlib import Path

import pytest

from llmgw.config import ConfigError
from llmgw.ops.announce import say
from llmgw.ops.serve import cannot_listen, check_port
from llmgw.ops.up import FREE_BYTES, LOCK_FILE, Bootstrap, need_space
from tests.e2e.product import LLMGW, clean_environment

ROOT = Path(__file__).resolve().parents[2]


def up(*options: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LLMGW, "up", *options],
        capture_output=True, text=True, timeout=110, cwd=cwd, env={**clean_environment(), **environment},
    )  # fmt: skip


def assert_one_sentence(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 5
    for word in words:
        assert word in result.stderr


def test_a_taken_port_is_named_with_another_to_try(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = up("--data", str(tmp_path / "data"), "--port", str(port), cwd=tmp_path)
    assert_one_sentence(result, f"127.0.0.1:{port} is taken", "--port")
    assert not (tmp_path / "data").exists()


def test_a_second_start_on_one_directory_is_told_of_the_first_and_not_of_its_port(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("4711")
    with (tmp_path / LOCK_FILE).open() as held, socket.socket() as taken:
        fcntl.flock(held, fcntl.LOCK_EX)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = up("--data", str(tmp_path), "--port", str(taken.getsockname()[1]), cwd=tmp_path)
    assert_one_sentence(result, "another llmgw up (pid 4711)", str(tmp_path), "--data DIR")


def test_an_address_that_is_not_this_machines_is_named_with_another_host_to_try() -> None:
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1 is no address to listen on: .* --host 127"):
        check_port("203.0.113.1", 8080)


def test_a_port_for_root_alone_is_named_with_one_that_is_not() -> None:
    assert "--port 8080" in cannot_listen("127.0.0.1", 80, PermissionError(errno.EACCES, "Permission denied"))


def test_a_data_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = up("--data", str(tmp_path / "file" / "data"), "--port", str(_free()), cwd=tmp_path)
    assert_one_sentence(result, str(tmp_path / "file" / "data"), "--data DIR")


def test_an_unknown_setting_is_named_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text("listen:\n  prot: 9000\n")
    result = up("--config", "server.yaml", "--data", "data", cwd=tmp_path)
    assert_one_sentence(result, "server.yaml line 2", "listen.prot", "Did you mean port?")
    assert not (tmp_path / "data").exists()


def test_a_wrong_environment_variable_is_named(tmp_path: Path) -> None:
    result = up("--data", "data", cwd=tmp_path, LLMGW_GATEWAY__ATTEMPTS="many")
    assert_one_sentence(result, "LLMGW_GATEWAY__ATTEMPTS")


def test_a_missing_configuration_file_is_named(tmp_path: Path) -> None:
    assert_one_sentence(up("--config", "nowhere.yaml", cwd=tmp_path), "nowhere.yaml does not exist")


def test_a_bootstrap_file_in_a_directory_that_is_not_there_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    options = ["--data", "data", "--port", str(_free()), "--bootstrap-file", str(tmp_path / "no" / "b.json")]
    assert_one_sentence(up(*options, cwd=tmp_path), "--bootstrap-file")


def test_a_store_that_does_not_answer_is_named_without_its_password(tmp_path: Path) -> None:
    url = f"postgresql://llmgw:hunter22@127.0.0.1:{_free()}/llmgw"
    result = up("--data", "data", "--port", str(_free()), cwd=tmp_path, LLMGW_STORE__URL=url)
    assert_one_sentence(result, "the store at", "cannot be used")
    assert "hunter22" not in result.stderr + result.stdout


def test_too_little_space_is_said_with_both_numbers(tmp_path: Path) -> None:
    need_space(tmp_path, FREE_BYTES)
    with pytest.raises(ConfigError, match=r"5 MiB free; a first start needs 1024 MiB"):
        need_space(tmp_path, 5 * 1024**2)


def test_a_disk_that_takes_no_more_is_said_in_one_sentence(tmp_path: Path) -> None:
    result = subprocess.run(
        ["prlimit", "--fsize=1000", *LLMGW, "up", "--data", "data", "--port", str(_free())],
        capture_output=True, text=True, timeout=110, cwd=tmp_path,
        env={**clean_environment(), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert_one_sentence(result, "cannot be written", "--data DIR")


def test_a_python_that_is_too_old_is_refused_by_the_environment_script(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        fake = programs / name
        fake.write_text('#!/bin/sh\ncase "$1" in --version) echo Python 3.9.2;; *) exit 1;; esac\n')
        fake.chmod(0o755)
    result = subprocess.run(
        ["sh", str(ROOT / "llmgw/ops/environment.sh"), "requirements.lock"],
        capture_output=True, text=True, cwd=tmp_path, env={"PATH": f"{programs}:/usr/bin:/bin"}, timeout=110,
    )  # fmt: skip
    assert result.returncode == 2
    assert "Python 3.11 or newer is needed; found: Python 3.9.2" in result.stderr
    assert not (tmp_path / ".venv").exists()


def test_an_activated_environment_is_not_what_a_new_one_is_made_with(tmp_path: Path) -> None:
    """A broken .venv whose python still starts, first in PATH: it is thrown away, and the system's python is asked."""
    own, system = tmp_path / ".venv" / "bin", tmp_path / "bin"
    own.mkdir(parents=True)
    system.mkdir()
    for folder, log in ((own, "own"), (system, "system")):
        python = folder / "python3"
        python.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/{log}.log\n[ "$1" != -m ]\n')
        python.chmod(0o755)
    result = subprocess.run(
        ["sh", str(ROOT / "llmgw/ops/environment.sh"), "requirements.lock"],
        capture_output=True, text=True, cwd=tmp_path, env={"PATH": f"{own}:{system}:/usr/bin:/bin"}, timeout=110,
    )  # fmt: skip
    assert result.returncode == 2
    assert "-m venv .venv" in (tmp_path / "system.log").read_text()
    assert not (tmp_path / "own.log").exists()


def test_help_comes_without_loading_the_product() -> None:
    command = [
        *LLMGW[:1], "-X", "importtime", "-m", "llmgw", "--help",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=110, env=clean_environment())
    assert result.returncode == 0
    for heavy in ("django", "celery", "pydantic", "httpx", "uvicorn"):
        assert f"| {heavy}\n" not in result.stderr.replace("  ", ""), f"{heavy} is imported for help"


def _free() -> int:
    from tests.services import free_port

    return free_port()


def test_secret_files_are_private_from_their_first_byte_and_kept(tmp_path: Path) -> None:
    from llmgw.core import secret_file

    path = tmp_path / "secrets" / "one"
    first = secret_file.read_or_make(path)
    assert secret_file.read_or_make(path) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    secret_file.write(path, "other")
    assert path.read_text() == "other"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["one"]
    assert time.time() - path.stat().st_mtime < 600


# --- while it runs ---------------------------------------------------------------------------------------------------
def test_a_bootstrap_file_that_cannot_be_written_now_is_written_later_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = iter("123")
    blocked = tmp_path / "blocked"
    blocked.touch()
    bootstrap = Bootstrap(blocked / "bootstrap.json", lambda: next(contents))
    bootstrap.write()
    bootstrap.write()
    assert capsys.readouterr().err.count("bootstrap.json cannot be written") == 1
    blocked.unlink()
    bootstrap.write()
    bootstrap.write()  # nothing has changed since
    assert (blocked / "bootstrap.json").read_text() == "3"


def test_words_that_no_log_takes_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115 - closing it fails
    monkeypatch.setattr("sys.stderr", full)
    say("worker ended (exit code 1); starting it again in 0.25 s")
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space left"):
        full.close()
