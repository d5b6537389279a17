"""What a key is and what it allows."""

from __future__ import annotations

import hashlib
import re

from hypothesis import given
from hypothesis import strategies as st

from tenants.keys import PREFIX_LENGTH, Grant, digest, new_secret

NAMES = st.text(max_size=12)


def grant(models: frozenset[str] | None = None, expires_at: float | None = None) -> Grant:
    return Grant("d", key_id=1, prefix="sk-7Qf2", project_id=1, user_id=None, models=models, expires_at=expires_at)


@given(NAMES, st.none() | st.frozensets(NAMES, max_size=5))
def test_a_key_without_a_list_allows_every_model_and_one_with_a_list_only_those(
    model: str, models: frozenset[str] | None
) -> None:
    assert grant(models).allows(model) == (models is None or model in models)


@given(st.floats(0, 1e10), st.none() | st.floats(0, 1e10))
def test_a_key_has_expired_from_its_last_moment_on(now: float, expires_at: float | None) -> None:
    assert grant(expires_at=expires_at).expired(now) == (expires_at is not None and now >= expires_at)


def test_secrets_are_256_bits_each_their_own_and_known_by_digest_and_prefix() -> None:
    made = [new_secret() for _ in range(100)]
    assert len({secret.text for secret in made}) == 100
    for secret in made:
        assert re.fullmatch(r"sk-[A-Za-z0-9_-]{43}", secret.text)
        assert secret.digest == hashlib.sha256(secret.text.encode()).hexdigest()
        assert secret.prefix == secret.text[:PREFIX_LENGTH]
    assert new_secret("nt").text.startswith("nt-")


@given(st.text(max_size=300))
def test_any_text_has_a_digest(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    assert len(digest(text + "\udc80")) == 64
