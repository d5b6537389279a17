"""Which process of pytest-xdist runs which test. (`--dist loadgroup` would know, were its marks not lost on pytest 9.)

Tests go one by one to whichever process is free, but a module whose tests share something that is dear to start (a
product, a browser, a server) stays whole, and the modules that start whole products follow one another in two lanes:
side by side they would be more than two cores can carry.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[1]
E2E = "tests/e2e/"
LONGEST = f"{E2E}test_high_availability.py"
SHARES = re.compile(r'scope="module"|mark\.browser\b')


class Spread(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        if module.startswith(E2E):
            return LONGEST if module == LONGEST else E2E
        return module if shares(module) else nodeid


@cache
def shares(module: str) -> bool:
    return SHARES.search((ROOT / module).read_text()) is not None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    config.option.loadscopereorder = False  # the order of the collection, which is random but for what is below
    return Spread(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first. These use no database of this process, whose tests Django has put in order."""
    items.sort(key=lambda item: not item.nodeid.startswith(E2E))
