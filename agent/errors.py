"""The one exception that a person's mistake in settings ends in. Apart, so that nothing heavy is imported for it."""

from __future__ import annotations


class ConfigError(Exception):
    """A configuration that cannot be used. `str()` is the whole sentence: what, where, and what to do."""
