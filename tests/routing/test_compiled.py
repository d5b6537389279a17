"""Which request path these tests run with: `make test` runs them as source, and some again compiled."""

from __future__ import annotations

import importlib
import os

from llmgw.core import compiled


def test_what_was_asked_for_is_what_is_tested() -> None:
    kinds = {importlib.import_module(name).__file__.rpartition(".")[2] for name in compiled.MODULES}  # type: ignore[union-attr]
    assert kinds == ({"so"} if os.environ[compiled.ASKED] == "1" else {"py"})
