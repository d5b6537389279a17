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

from llmgw.core import compiled
from llmgw.core.compiled import MANIFEST, MODULES, ROOT, file, lacking, made_of

WHERE = "import routing.heads; from llmgw.core import compiled; print(routing.heads.__file__); print(compiled.state)"


def build(folder: Path, made: compiled.Made) -> Path:
    folder.mkdir()
    (folder / MANIFEST).write_bytes(msgspec.json.encode(made))
    return folder


def copied(root: Path) -> Path:
    for name in MODULES:
        place = file(name, root, ".py")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file(name, ROOT, ".py").read_bytes())
    return root


def test_a_build_of_the_very_source_is_used(tmp_path: Path) -> None:
    assert lacking(build(tmp_path / "built", made_of())) == ""


def test_without_a_build_the_source_is_used(tmp_path: Path) -> None:
    assert lacking(tmp_path) == "it is not compiled"


@pytest.mark.parametrize("name", MODULES)
def test_one_changed_source_is_named_and_nothing_compiled_is_used(tmp_path: Path, name: str) -> None:
    built = build(tmp_path / "built", made_of())
    root = copied(tmp_path / "root")
    assert lacking(built, root) == ""
    with file(name, root, ".py").open("a") as source:
        source.write("\n")
    assert lacking(built, root) == f"{name} has changed since it was compiled"


def test_a_build_for_another_python_is_not_used(tmp_path: Path) -> None:
    other = msgspec.structs.replace(made_of(), suffix=".cpython-399-other.so")
    assert lacking(build(tmp_path / "built", other)) == "it was compiled for another Python"


def test_a_build_that_lacks_a_module_is_not_used(tmp_path: Path) -> None:
    made = made_of()
    fewer = msgspec.structs.replace(made, sources={MODULES[0]: made.sources[MODULES[0]]})
    assert lacking(build(tmp_path / "built", fewer)) == f"{MODULES[1]} has changed since it was compiled"


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


def test_modules_are_compiled_that_are_there() -> None:
    assert [name for name in MODULES if not file(name, ROOT, ".py").exists()] == []
