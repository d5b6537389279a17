"""The compiled request path is used only where it is what the source says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.compiled import MANIFEST, MODULES, ROOT, Made, file, lacking
from llmgw.ops.compile import made_of

WHERE = "import routing.heads; from llmgw.core import compiled; print(routing.heads.__file__); print(compiled.state)"


@pytest.fixture(scope="module")
def made() -> Made:
    return made_of()


def build(folder: Path, made: Made) -> Path:
    folder.mkdir()
    (folder / MANIFEST).write_bytes(msgspec.json.encode(made))
    return folder


def copied(root: Path, made: Made) -> Path:
    for name in made.sources:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes((ROOT / name).read_bytes())
    return root


def test_a_build_of_the_very_source_is_used(tmp_path: Path, made: Made) -> None:
    assert lacking(build(tmp_path / "built", made)) == ""


def test_without_a_build_the_source_is_used(tmp_path: Path) -> None:
    assert lacking(tmp_path) == "it is not compiled"


@pytest.mark.parametrize(
    "name",
    [
        "routing/heads.py",  # a compiled module
        "routing/shapes.py",  # one whose types they hold others to
        "tenants/keys.py",
        "tenants/periods.py",  # which only tenants/limits.py imports
        "routing/__init__.py",
        "requirements.lock",
    ],
)
def test_one_changed_file_is_named_and_nothing_compiled_is_used(tmp_path: Path, made: Made, name: str) -> None:
    built = build(tmp_path / "built", made)
    root = copied(tmp_path / "root", made)
    assert lacking(built, root) == ""
    with (root / name).open("a") as source:
        source.write("\n")
    assert lacking(built, root) == f"{name} has changed since it was compiled"
    (root / name).unlink()
    assert lacking(built, root) == f"{name} has changed since it was compiled"


def test_every_module_and_nothing_of_the_pages_is_looked_at(made: Made) -> None:
    assert {f"{name.replace('.', '/')}.py" for name in MODULES} <= set(made.sources)
    assert not [name for name in made.sources if "views" in name or "models" in name]


def test_a_build_for_another_python_is_not_used(tmp_path: Path, made: Made) -> None:
    other = msgspec.structs.replace(made, suffix=".cpython-399-other.so")
    assert lacking(build(tmp_path / "built", other)) == "it was compiled for another Python"


@given(st.binary(max_size=200))
def test_whatever_stands_in_its_place_the_source_runs(tmp_path_factory: pytest.TempPathFactory, said: bytes) -> None:
    folder = tmp_path_factory.mktemp("built")
    (folder / MANIFEST).write_bytes(said)
    assert lacking(folder)


def told(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, check=False)


def test_who_asks_for_the_source_gets_it() -> None:
    where, state = told(WHERE, LLMGW_COMPILED="0").stdout.splitlines()
    assert (where, state) == (str(file("routing.heads", ROOT, ".py")), "as source: LLMGW_COMPILED=0 asks for it")


def test_who_asks_for_nothing_but_the_compiled_one_is_told_why_there_is_none(tmp_path: Path) -> None:
    program = f"from pathlib import Path; from llmgw.core import compiled; compiled.use(Path({str(tmp_path)!r}))"
    done = told(program, LLMGW_COMPILED="1")
    assert done.returncode == 1
    assert done.stderr.strip().endswith(
        "ImportError: LLMGW_COMPILED=1 asks for the compiled request path, and it is not compiled; run `make fast`"
    )
