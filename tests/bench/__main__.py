"""`python -m tests.bench NAME…` runs benches by name; without a name it lists them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def names() -> list[str]:
    """Every module beside this one that has a `main`."""
    beside = Path(__file__).parent.glob("[a-z]*.py")
    return sorted(path.stem for path in beside if "\ndef main() -> None:" in path.read_text())


def main(wanted: list[str]) -> int:
    known = names()
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        print(f"make bench BENCH=NAME, with NAME one of: {', '.join(known)}", file=sys.stderr)
        return 2
    for name in wanted:
        importlib.import_module(f"tests.bench.{name}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
