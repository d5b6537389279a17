"""Which build of each engine the control plane chose for this node, kept over restarts (AG-32)."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from agent import files
from agent.protocol import AUTO

log = logging.getLogger(__name__)
MAX_BYTES = 64 * 1024


class Choices:
    """In one file. A file that is lost or spoilt chooses nothing: the control plane says its choices anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._chosen = _read(path)

    def of(self, engine: str) -> str:
        return self._chosen.get(engine, AUTO)

    def told(self) -> dict[str, str]:
        """By engine, where it is not AUTO."""
        return dict(self._chosen)

    def keep(self, engine: str, build: str) -> None:
        """Raises OSError, and then nothing has changed."""
        chosen = {**self._chosen, engine: build}
        if build == AUTO:
            del chosen[engine]
        files.write_private(self._path, json.dumps(chosen).encode())
        self._chosen = chosen


def _read(path: Path) -> dict[str, str]:
    try:
        found = files.read_json(path, MAX_BYTES)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("Which builds of engines were chosen cannot be read from %s (%s): the best are used", path, error)
        return {}
    if isinstance(found, dict) and all(isinstance(build, str) for build in found.values()):
        return found
    log.warning("%s does not hold which builds of engines were chosen: the best are used", path)
    return {}
