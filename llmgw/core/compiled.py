"""The request path as machine code, where `make fast` has made it (docs/adr/0008-a-compiled-request-path.md).

What is imported is the compiled module only while it was made of the very source that is there, by this Python. That
takes in what the modules import of ours, since a compiled module holds others to the types that they had, and the
packages that are installed. Else it is the source itself, which does the same at more cost. `LLMGW_COMPILED=0` asks for
the source, `1` for nothing else than the compiled modules.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import msgspec

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "compiled"
MANIFEST = "made-of.json"
SUFFIX = EXTENSION_SUFFIXES[0]
SHARED = "__mypyc"
"""How the module that the others share is called, after a hash."""
ASKED = "LLMGW_COMPILED"
UNDECIDED = "as source"
state = UNDECIDED
"""How the request path runs, in words."""
MODULES = (
    "llmgw.core.cells",
    "routing.accounting",
    "routing.admission",
    "routing.answers",
    "routing.attempts",
    "routing.bounds",
    "routing.client",
    "routing.direct",
    "routing.exchange",
    "routing.heads",
    "routing.journal",
    "routing.ledger",
    "routing.limits",
    "routing.measures",
    "routing.media",
    "routing.now",
    "routing.openai",
    "routing.plane",
    "routing.pools",
    "routing.relay",
    "routing.run",
    "routing.scheduling",
    "routing.serving",
    "routing.settling",
    "routing.sse",
    "routing.table",
    "routing.upstream",
    "tenants.money",
)
"""What runs for each request, but for what other libraries subclass or read annotations of."""


class Made(msgspec.Struct, frozen=True):
    """What a compiled build says of itself. `suffix`: of files for the Python it was made with; `sources`: the SHA-256
    of each file that it depends on, by its path in the tree."""

    suffix: str
    sources: dict[str, str]


class _Finder(MetaPathFinder):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES and not fullname.endswith(SHARED):
            return None
        place = file(fullname, self._folder, SUFFIX)
        return spec_from_file_location(fullname, place) if place.exists() else None


def file(module: str, folder: Path, suffix: str) -> Path:
    return folder.joinpath(*module.split(".")).with_suffix(suffix)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def lacking(folder: Path = FOLDER, root: Path = ROOT) -> str:
    """Why the build in `folder` cannot be used; empty when it can."""
    try:
        made = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Made)
    except FileNotFoundError:
        return "it is not compiled"
    except (OSError, msgspec.DecodeError) as error:
        return f"{folder / MANIFEST} cannot be read: {error}"
    if made.suffix != SUFFIX:
        return "it was compiled for another Python"
    for name, was in made.sources.items():
        path = root / name
        if not path.is_file() or digest(path) != was:
            return f"{name} has changed since it was compiled"
    return ""


def use(folder: Path = FOLDER, root: Path = ROOT) -> None:
    """From now on import what `folder` has, where that is of use; `state` says how it stands. Raises ImportError.

    Each package that holds such modules calls this as it is imported, and the first call decides: compiled modules
    refuse objects of a class that was imported as source before.
    """
    global state
    if state != UNDECIDED:
        return
    asked = os.environ.get(ASKED)
    if asked == "0":
        state = f"as source: {ASKED}=0 asks for it"
    elif why := lacking(folder, root):
        if asked == "1":
            raise ImportError(f"{ASKED}=1 asks for the compiled request path, and {why}; run `make fast`")
        state = f"as source: {why}; `make fast` compiles it, for less CPU a request"
    else:
        sys.meta_path.insert(0, _Finder(folder))
        state = "compiled"
