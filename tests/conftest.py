"""Fixtures that every room's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from django.db import connection

# Its import sets Django up anew, logging included: inside a test, that would take caplog's handler away.
import llmgw.celery  # noqa: F401

# No bound on time: how long an example takes says more of what else the machine does than of the code.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _quick_passwords(settings: Any) -> None:
    """Argon2 takes a tenth of a second a password on purpose; its own test asks for it by name."""
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher", *settings.PASSWORD_HASHERS]


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """On PostgreSQL, ends what threads of the event loop still hold open, or the test database could not be dropped."""
    yield
    with django_db_blocker.unblock():
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
