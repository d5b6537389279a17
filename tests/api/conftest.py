from __future__ import annotations

import pytest

from tests.api.cast import World


@pytest.fixture
def world(db: None) -> World:
    return World()
