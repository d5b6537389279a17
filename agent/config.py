"""The agent's settings: `agent.yaml` plus `LLMGW_AGENT_…` variables; every wrong key is named (AG-50)."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from agent import protocol
from agent.yaml_settings import ConfigError
from agent.yaml_settings import load as load_tree

ENV_PREFIX = "LLMGW_AGENT_"
__all__ = ["AgentSettings", "ConfigError", "load"]
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}\Z")
_FABRIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
MAX_LABEL_VALUE = 63


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)


class Ports(Section):
    first: Annotated[int, Field(ge=1024, le=65535)] = 21000
    """First port that an engine may get."""
    last: Annotated[int, Field(ge=1024, le=65535)] = 21999
    """Last one."""

    @model_validator(mode="after")
    def _in_order(self) -> Ports:
        if self.last < self.first:
            raise ValueError(f"last ({self.last}) must not be below first ({self.first})")
        return self


class LlamaCppSection(Section):
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Threads of one engine; without it half the CPUs."""
    binary: Path | None = None
    """A llama-server of your own; without it the agent installs a build. It is never replaced."""


class VllmSection(Section):
    binary: Path | None = None
    """The `vllm` program of an environment of your own, such as /opt/vllm/bin/vllm; `launch_mode: ray` takes the `ray`
    beside it."""


class SgLangSection(Section):
    python: Path | None = None
    """The Python of an environment of your own that holds SGLang, such as /opt/sglang/bin/python."""


class Logging(Section):
    format: Literal["console", "json"] = "console"
    """Lines for people, or one JSON object a line."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important messages shown."""


class AgentSettings(Section):
    control_plane: list[str] = ["http://127.0.0.1:8080"]
    """Addresses of control planes, tried in turn."""
    node: str = Field(default_factory=lambda: re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()) or "node")
    """This node's id; without it the host name."""
    token_file: Path | None = None
    """File that holds the node's join token."""
    certificate_file: Path | None = None
    """The node's certificate (PEM), which it proves itself with instead of a token; see `llmgw node add`."""
    key_file: Path | None = None
    """The key of that certificate, readable by the agent's user only."""
    ca_file: Path | None = None
    """Certificate of the authority that control planes' certificates come from; without it those of the system."""
    address: str | None = None
    """Where engines listen, which gateways must reach; without it the address that faces the control plane."""
    labels: dict[str, str] = {}
    """Labels that profiles can ask for."""
    fabrics: dict[str, list[str]] = {}
    """Fabrics that this node is on, each with its adapters as in /sys/class/infiniband: {ib0: [mlx5_0, mlx5_1]}."""
    work_dir: Path = Path("/var/lib/llmgw-agent")
    """Builds, weights, records of running shards, output of engines."""
    ports: Ports = Ports()
    llamacpp: LlamaCppSection = LlamaCppSection()
    vllm: VllmSection = VllmSection()
    sglang: SgLangSection = SgLangSection()
    stop_engines_on_exit: bool = False
    """Whether a stopped agent stops its engines too. A killed one never does."""
    logging: Logging = Logging()

    @property
    def programs(self) -> dict[str, Path]:
        """By engine, the program that the operator named."""
        named = {"llamacpp": self.llamacpp.binary, "vllm": self.vllm.binary, "sglang": self.sglang.python}
        return {engine: path for engine, path in named.items() if path is not None}

    @field_validator("control_plane")
    @classmethod
    def _addresses(cls, addresses: list[str]) -> list[str]:
        if not addresses:
            raise ValueError("must name at least one control plane, such as http://127.0.0.1:8080")
        for address in addresses:
            stream_url(address)
        return addresses

    @model_validator(mode="after")
    def _certificate_with_key(self) -> AgentSettings:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file belong together; write both or neither")
        plain = [each for each in self.control_plane if stream_url(each).startswith("ws:")]
        if self.certificate_file is not None and plain:
            raise ValueError(f"{plain[0]} takes no certificate; write https:// and the port for agents")
        return self

    @field_validator("node")
    @classmethod
    def _node_id(cls, node: str) -> str:
        if not _NODE.match(node):
            raise ValueError(f"{node!r} must be letters, digits, dots, hyphens and underscores, at most 128")
        return node

    @field_validator("labels")
    @classmethod
    def _label_lines(cls, labels: dict[str, str]) -> dict[str, str]:
        if len(labels) > protocol.MAX_LABELS:
            raise ValueError(f"there are {len(labels)}; {protocol.MAX_LABELS} is the most")
        for name, value in labels.items():
            if not _LABEL.match(name):
                raise ValueError(f"{name!r} is not a label's name: at most 63 letters, digits, dots, hyphens, / and _")
            if len(value) > MAX_LABEL_VALUE or not value.isprintable():
                raise ValueError(f"the value of {name} is not one line of at most {MAX_LABEL_VALUE} characters")
        return labels

    @field_validator("fabrics")
    @classmethod
    def _each_adapter_once(cls, fabrics: dict[str, list[str]]) -> dict[str, list[str]]:
        if len(fabrics) > protocol.MAX_FABRICS:
            raise ValueError(f"there are {len(fabrics)}; {protocol.MAX_FABRICS} is the most")
        held: dict[str, str] = {}
        for name, adapters in fabrics.items():
            if not _FABRIC.match(name):
                raise ValueError(f"{name!r} is not a fabric's name: at most 63 letters, digits, dots, hyphens and _")
            if not adapters:
                raise ValueError(f"fabric {name} names no adapter")
            for adapter in adapters:
                if adapter in held:
                    raise ValueError(f"adapter {adapter} is in {held[adapter]} and in {name}; it is on one of them")
                held[adapter] = name
        return fabrics

    @field_validator("work_dir")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return path.expanduser().absolute()


def stream_url(address: str) -> str:
    """The websocket behind a control plane's address. Raises ValueError naming what is wrong with it."""
    parts = urlsplit(address)
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if parts.scheme not in schemes or not parts.hostname:
        raise ValueError(f"{address!r} must be http://HOST:PORT or https://HOST:PORT")
    if parts.username or parts.password:
        raise ValueError("a control plane's address must not hold a password; use token_file")
    if parts.port == 0:
        raise ValueError(f"{address!r} has port 0")
    path = parts.path.rstrip("/")
    return f"{schemes[parts.scheme]}://{parts.netloc}{path if path.endswith(protocol.PATH) else path + protocol.PATH}"


def load(path: Path | None) -> AgentSettings:
    """Raises ConfigError, whose text is the whole sentence."""
    return load_tree(AgentSettings, path, env_prefix=ENV_PREFIX)
