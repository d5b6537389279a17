"""The key of a replica's engine, known to the gateway and that engine alone (AG-34). Pure."""

from __future__ import annotations

import hashlib
import hmac

SECRET_NAME = "engine-keys"  # noqa: S105
"""Name of the llmgw.core.models.Secret that all engine keys are made from."""


def engine_key(secret: bytes, replica: str) -> str:
    """HMAC-SHA256 of the replica's name under the store's secret, in hex."""
    return hmac.new(secret, replica.encode(), hashlib.sha256).hexdigest()
