"""What a profile's own arguments say, where the catalog has to know. Pure."""

from __future__ import annotations

from catalog.spec import Profile

DEFAULT_LORA_RANK = 16
"""vLLM's; SGLang takes it from the adapters it starts with."""


def lora_rank(profile: Profile) -> int | None:
    """The largest rank of adapters that it takes; None where nothing bounds it."""
    if profile.engine == "llamacpp":
        return None
    written = value_of(profile.args, "--max-lora-rank")
    if written is not None and written.isascii() and written.isdecimal() and len(written) < 10:
        return int(written)
    return DEFAULT_LORA_RANK if profile.engine == "vllm" else None


def value_of(args: tuple[str, ...], flag: str) -> str | None:
    """What stands behind `flag`, the last time it is written, as `--flag 8` or `--flag=8`."""
    found = None
    for number, arg in enumerate(args):
        name, sign, value = arg.partition("=")
        if name == flag:
            found = value if sign else (args[number + 1] if number + 1 < len(args) else None)
    return found
