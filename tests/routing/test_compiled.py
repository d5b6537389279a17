"""Which request path these tests run with: `make test` runs them as source, and some again compiled."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

from llmgw.core import compiled


def test_what_was_asked_for_is_what_is_tested() -> None:
    kinds = {importlib.import_module(name).__file__.rpartition(".")[2] for name in compiled.MODULES}  # type: ignore[union-attr]
    assert kinds == ({"so"} if os.environ[compiled.ASKED] == "1" else {"py"})


def test_the_command_line_imports_no_part_of_the_request_path_before_it_is_known_which_runs() -> None:
    """Every process begins as a command. A price of a class that was imported as source fits no compiled table."""
    code = """
import sys, llmgw.cli.main
from llmgw.core import compiled
early = [name for name in compiled.MODULES if name in sys.modules]
assert compiled.state != compiled.UNDECIDED, early
import django
django.setup()
from routing import table
from tenants import limit_models
assert limit_models.money.Price is table.Price
print(*sorted({sys.modules[name].__file__.rpartition(".")[2] for name in compiled.MODULES if name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["so" if os.environ[compiled.ASKED] == "1" else "py"], done.stderr


def test_metrics_by_themselves_count_in_the_cells_that_the_request_path_counts_in() -> None:
    code = "import sys, llmgw.core.metrics; print(sys.modules['llmgw.core.cells'].__file__.rpartition('.')[2])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["so" if os.environ[compiled.ASKED] == "1" else "py"], done.stderr
