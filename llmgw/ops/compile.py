"""Compiles the request path to machine code: `python -m llmgw.ops.compile`, which `make fast` runs.

It takes about a minute of CPU, and nothing when what is there was made of the same source. Where it cannot be done it
says why and ends with 0: everything runs without it.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from llmgw.core.compiled import FOLDER, MANIFEST, MODULES, ROOT, SUFFIX, Made, digest, file, lacking

LIMIT_S = 1800
SHOWN_LINES = 15
LEVEL = "1"
"""How much the C compiler optimizes: more takes twice the time to compile and gains nothing that can be measured."""


def main(arguments: list[str]) -> int:
    if arguments:
        build(Path(arguments[0]))
        return 0
    if not lacking():
        return 0
    if missing := _missing():
        print(f"The request path is not compiled: {missing}. It runs as source, at more CPU a request.")
        return 0
    print("Compiling the request path; this is done once and takes a minute")
    made = made_of()
    FOLDER.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as scratch:
        done = subprocess.run(
            [sys.executable, "-m", "llmgw.ops.compile", scratch],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            print("\n".join(done.stdout.splitlines()[-SHOWN_LINES:]), file=sys.stderr)
            print("The request path could not be compiled; the reason is above. It runs as source.", file=sys.stderr)
            return 1
        built = Path(scratch, "lib")
        (built / MANIFEST).write_bytes(msgspec.json.encode(made))
        shutil.rmtree(FOLDER, ignore_errors=True)
        built.rename(FOLDER)
    return 0


def made_of(root: Path = ROOT) -> Made:
    """What a build made now depends on: the modules, all that they import of ours, and the list of packages."""
    found: set[Path] = set()
    left = [file(name, root, ".py") for name in MODULES]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += _imported(path, root)
    found.add(root / "requirements.lock")
    return Made(SUFFIX, {str(path.relative_to(root)): digest(path) for path in sorted(found)})


def _imported(path: Path, root: Path) -> Iterator[Path]:
    """Files of the tree that one of its modules imports, packages on the way included."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            places = [root.joinpath(*parts[:end], "__init__.py") for end in range(1, len(parts) + 1)]
            yield from (place for place in (*places, file(name, root, ".py")) if place.is_file())


def build(into: Path) -> None:
    """Compile into `into`/lib. Says what is wrong on stdout and stderr, and ends the process."""
    from mypyc.build import mypycify
    from setuptools import setup  # type: ignore[import-untyped]

    extensions = mypycify(
        ["--config-file=", *(str(file(name, ROOT, ".py").relative_to(ROOT)) for name in MODULES)],
        opt_level=LEVEL,
        debug_level="0",
        multi_file=True,
        target_dir=str(into / "c"),
    )
    places = ["--build-lib", str(into / "lib"), "--build-temp", str(into / "o")]
    setup(
        name="llmgw-request-path",
        ext_modules=extensions,
        packages=[],
        script_args=["-q", "build_ext", *places, "--parallel", str(os.cpu_count() or 1)],
    )


def _missing() -> str:
    """What there would have to be."""
    compiler = os.environ.get("CC") or str(sysconfig.get_config_var("CC") or "cc")
    if shutil.which(compiler.split()[0]) is None:
        return f"there is no C compiler ({compiler.split()[0]}; on Debian: apt-get install gcc)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's headers are not here (on Debian: apt-get install python3-dev)"
    return ""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
