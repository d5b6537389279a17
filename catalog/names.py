"""The one namespace of models, aliases and adapters: what a name may be, and when two are the same. Pure."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable

MAX_NAME = 200


def fold(name: str) -> str:
    """Equal for names that people would take for the same one: other case, other Unicode form, other width."""
    folded = unicodedata.normalize("NFKC", name).casefold()
    # Case folding can leave a form that normalises further, so that folding twice would differ from once.
    return unicodedata.normalize("NFKC", folded).casefold()


def objection(name: str, limit: int = MAX_NAME) -> str | None:
    """Why `name` cannot be a name, as the end of a sentence about it; None when it can."""
    if not name:
        return "is empty; give it a name"
    if len(name) > limit:
        return f"has {len(name)} characters; {limit} is the most"
    if name != name.strip():
        return "begins or ends with a blank; remove it"
    for character in name:
        # Control and format characters, surrogates, private use, line and paragraph separators.
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
            return f"holds the character U+{ord(character):04X}, which cannot be seen; remove it"
    return None


def address_objection(name: str, *, model: bool) -> str | None:
    """Why a page or a route could not have `name` in its address, as the end of a sentence about it."""
    if any(part in ("", ".", "..") for part in name.split("/")):
        return 'has nothing, "." or ".." before or after a slash, which addresses lose; rename it'
    if model and name.endswith("/adapters"):
        return "ends in /adapters, which is the address of another model's adapters; rename it"
    return None


def nearest(name: str, known: Iterable[str]) -> str:
    """ " Did you mean X?" when something known is close to `name`, else nothing."""
    near = difflib.get_close_matches(name[:MAX_NAME], list(known), 1)
    return f" Did you mean {near[0]}?" if near else ""
