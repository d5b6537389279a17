"""What is made from the store's secret: the key of a replica's engine, known to the gateway and that engine alone
(AG-34), and the seal of a shard, which proves who was told to run it (ND-45). Pure.
"""

from __future__ import annotations

import hashlib
import hmac
import json

from agent.protocol import ShardSpec

SECRET_NAME = "engine-keys"  # noqa: S105
"""Name of the llmgw.core.models.Secret that all engine keys and seals are made from."""


def engine_key(secret: bytes, replica: str) -> str:
    """HMAC-SHA256 of the replica's name under the store's secret, in hex."""
    return hmac.new(secret, replica.encode(), hashlib.sha256).hexdigest()


def seal(secret: bytes, node: str, spec: ShardSpec) -> str:
    """HMAC-SHA256 of what a control plane must believe of a shard that it has no row of, in hex."""
    made_at = spec.made_at.isoformat() if spec.made_at else None
    facts = ["shard", node, spec.replica, spec.rank, spec.model, spec.profile, spec.profile_digest, made_at]
    return hmac.new(secret, json.dumps(facts).encode(), hashlib.sha256).hexdigest()


def is_sealed(secret: bytes, node: str, spec: ShardSpec) -> bool:
    return hmac.compare_digest(seal(secret, node, spec), spec.seal)
