"""The clocks as requests read them. A name that is Final is reached by compiled code without a look-up; a module's
attribute takes two."""

from __future__ import annotations

import time
from typing import Final

monotonic: Final = time.monotonic
epoch: Final = time.time
"""Seconds since 1970."""
