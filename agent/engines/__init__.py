"""The engines that this version knows, by name. Pure."""

from __future__ import annotations

from agent.engines.base import Engine
from agent.engines.llamacpp import LlamaCpp
from agent.engines.sglang import SgLang
from agent.engines.vllm import Vllm

_ALL: tuple[Engine, ...] = (LlamaCpp(), Vllm(), SgLang())
ENGINES: dict[str, Engine] = {engine.name: engine for engine in _ALL}
