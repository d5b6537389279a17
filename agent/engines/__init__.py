"""The engines that this version knows, by name. Pure."""

from __future__ import annotations

from agent.engines.base import Engine
from agent.engines.llamacpp import LlamaCpp

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (LlamaCpp(),)}
