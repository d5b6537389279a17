"""What a node may be called. Pure."""

from __future__ import annotations

import re

NODE_NAME = re.compile(r"\A[A-Za-z0-9](?:[A-Za-z0-9._-]{0,118}[A-Za-z0-9])?\Z")
"""A certificate and an address can carry it."""
