"""Before Django reads its settings: a data directory for this run alone, and (where asked) real servers.

Loaded as a plugin (`-p tests.environment`), since pytest-django reads the settings before any conftest.
LLMGW_TEST_STORE=postgresql: on a PostgreSQL and a Redis started for the run, and only what uses one of them; otherwise
all, on SQLite and no Redis.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile

import pytest

STORE_FIXTURES = {"db", "transactional_db", "live_server"}
_on_servers = os.environ.get("LLMGW_TEST_STORE") == "postgresql"
_services = contextlib.ExitStack()

os.environ["LLMGW_DATA_DIR"] = tempfile.mkdtemp(prefix="llmgw-test-")
_services.callback(shutil.rmtree, os.environ["LLMGW_DATA_DIR"], ignore_errors=True)

# The request path as source, unless asked: what tests replace in a module is not seen by compiled ones.
os.environ.setdefault("LLMGW_COMPILED", "0")

if _on_servers and "PYTEST_XDIST_WORKER" not in os.environ:
    from tests.services import postgres_server, redis_server

    # The workers of xdist inherit these and share the servers; each makes a database of its own.
    os.environ["LLMGW_STORE__URL"] = _services.enter_context(postgres_server())
    os.environ["LLMGW_REDIS__URL"] = _services.enter_context(redis_server())


def pytest_unconfigure(config: pytest.Config) -> None:
    _services.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _on_servers:
        unconcerned = [item for item in items if not _uses_a_server(item)]
        config.hook.pytest_deselected(items=unconcerned)
        items[:] = [item for item in items if _uses_a_server(item)]


def _uses_a_server(item: pytest.Item) -> bool:
    from django.test import TestCase

    assert isinstance(item, pytest.Function)
    return bool(
        item.get_closest_marker("django_db")
        or STORE_FIXTURES & set(item.fixturenames)
        or (item.cls and issubclass(item.cls, TestCase))
        or hasattr(item.module, "redis")
    )
