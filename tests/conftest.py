"""Fixtures that every room's tests share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _quick_passwords(settings: Any) -> None:
    """Argon2 takes a tenth of a second a password on purpose; its own test asks for it by name."""
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher", *settings.PASSWORD_HASHERS]
