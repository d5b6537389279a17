from __future__ import annotations

import pytest
from pytest_django import Settings

from tests.api.cast import World


@pytest.fixture
def world(db: None, settings: Settings) -> World:
    # Nobody signs in with a password here, and argon2 is slow by design.
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    return World()
