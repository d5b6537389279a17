"""The one tree of settings: `server.yaml` plus `LLMGW_SECTION__FIELD` variables. docs/reference is made from it."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from agent.yaml_settings import ConfigError, load
from llmgw.core import addresses

ENV_PREFIX = "LLMGW_"
_HOST = re.compile(r"[A-Za-z0-9.-]{1,253}\Z")
__all__ = ["ConfigError", "Settings", "current"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)


class Store(Section):
    url: str | None = None
    """PostgreSQL as `postgresql://user@host:5432/name`; without it an SQLite file in the data directory."""
    password_file: Path | None = None
    """File that holds the PostgreSQL password, so that it stands in no URL."""

    @field_validator("url")
    @classmethod
    def _known_scheme(cls, url: str | None) -> str | None:
        if url and not url.startswith(("postgresql://", "postgres://")):
            raise ValueError("must start with postgresql://, or be left out for SQLite")
        return url


class Redis(Section):
    url: str | None = None
    """`redis://host:6379/0`; without it Celery queues in files and processes find changes by polling."""

    @field_validator("url")
    @classmethod
    def _known_scheme(cls, url: str | None) -> str | None:
        if url and not url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("must start with redis://, rediss:// or unix://, or be left out")
        return url


class Listen(Section):
    host: str = "127.0.0.1"
    """Address that clients and browsers reach."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8080
    """Its port."""
    public_url: str | None = None
    """The address people type, when a proxy stands in front, e.g. `https://llm.example.org`."""
    trusted_proxies: list[str] = []
    """Addresses of proxies whose X-Forwarded-For, -Proto and -Host are believed."""


BandName = Annotated[str, Field(min_length=1, max_length=20)]
"""As long as a record of a request can say."""


class Gateway(Section):
    auth: bool = True
    """Whether `/v1/` asks for a project key. Switch it off only on a trusted network."""
    body_limit_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024 * 1024
    """Largest request body, after decompression."""
    connect_timeout_s: float = 3.0
    """How long a connection to an engine may take."""
    first_byte_timeout_s: float = 600.0
    """How long an engine may be silent before its first byte."""
    idle_timeout_s: float = 120.0
    """How long an engine may be silent between two bytes."""
    attempts: Annotated[int, Field(ge=1, le=10)] = 3
    """How many endpoints one request is tried on before its first byte."""
    poll_s: float = 0.5
    """How often changed keys, models and endpoints are looked for, besides being told."""
    stale_for_s: float = 600.0
    """How long requests go on being served with what is known when the store cannot be reached."""
    scrape_s: float = 1.0
    """How often each engine's metrics are read."""
    cors_origins: list[str] = []
    """Origins that browsers may call `/v1/` from; `*` for any. Empty: none."""
    media_urls: Literal["off", "any"] | list[str] = "off"
    """Whether a request may name an image, sound, video or file for an engine to fetch: `off`, `any`, or a list of the
    hosts it may name. Content sent along (data: URLs) always passes. Engines follow redirects: list hosts you trust."""
    external_concurrency: Annotated[int, Field(ge=1, le=100_000)] = 256
    """How many requests each external model of the catalog is sent at once."""
    external_private: bool = False
    """Whether the providers of external models may be at private addresses or on this machine."""
    external_ca_file: Path | None = None
    """Certificates (PEM) of authorities that are trusted besides the system's, for providers and `endpoints`."""
    bands: dict[BandName, Annotated[float, Field(ge=0, lt=1)]] = {"high": 0.0, "normal": 0.3, "low": 0.1}
    """Priority bands, highest first, each with the least part of admissions that it gets while higher ones wait."""
    default_band: str = "normal"
    """The band of requests for which neither key, project, team, organisation nor model names one."""
    queue_limit: Annotated[int, Field(ge=0)] = 1000
    """How many requests may wait for one model."""
    waiting_bytes: Annotated[int, Field(ge=1024)] = 512 * 1024 * 1024
    """How much memory the bodies of all requests that wait, or are on their way in, may take in one gateway."""
    queue_wait_s: float = 60.0
    """How long a request waits for room before it is refused."""
    fallback_after_s: float = 5.0
    """How long it waits for room while the model has a fallback that could serve it."""
    on_demand_wait_s: float = 10.0
    """How long it waits for a model that is loading."""
    assumed_output_tokens: Annotated[int, Field(ge=1)] = 1024
    """What is reserved of limits and budgets for an answer whose length the request does not bound."""

    @field_validator("media_urls", mode="before")
    @classmethod
    def _off_any_or_hosts(cls, written: object) -> object:
        if written is False or written == "off":  # YAML reads off as false
            return "off"
        hosts = written if isinstance(written, list) else []
        if written != "any" and (not hosts or not all(isinstance(each, str) and _HOST.match(each) for each in hosts)):
            raise ValueError("write off, any, or a list of hosts such as images.example.org")
        return written

    @field_validator("bands")
    @classmethod
    def _leave_room(cls, bands: dict[str, float]) -> dict[str, float]:
        if not bands or sum(list(bands.values())[1:]) >= 1:
            raise ValueError("there must be a band, and the shares of all but the first must add up to less than 1")
        return bands

    @model_validator(mode="after")
    def _known_default(self) -> Gateway:
        if self.default_band not in self.bands:
            raise ValueError(f"default_band {self.default_band!r} is none of the bands ({', '.join(self.bands)})")
        return self


class Endpoint(Section):
    """An engine that llmgw does not run: scraped, scheduled and retried like a replica, never placed."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] | None = None
    """How records and metrics call it; left out: its host and port."""
    url: str
    """Where it listens, e.g. `http://10.0.0.5:8000`. Its API is under `/v1` there, its metrics at `/metrics`."""
    models: Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(min_length=1, max_length=256)]
    """The names it serves models by. One that the catalog has too is served by both; any other is published."""
    engine: Literal["vllm", "sglang", "llamacpp"] = "vllm"
    """Whose metrics it shows."""
    weight: Annotated[int, Field(ge=1, le=100_000)] = 16
    """How many requests it serves at once."""
    key_file: Path | None = None
    """File that holds the key it asks for, read for each request."""

    @field_validator("url")
    @classmethod
    def _an_address(cls, url: str) -> str:
        try:
            addresses.parse(url)
        except addresses.AddressError as error:
            raise ValueError(str(error).rstrip(".")) from None
        return url

    @field_validator("models")
    @classmethod
    def _plain_names(cls, models: list[str]) -> list[str]:
        for name in models:
            if name != name.strip() or not name.isprintable():
                raise ValueError(f"{name[:40]!r} cannot be a model's name")
            if models.count(name) > 1:
                raise ValueError(f"{name[:40]} stands there twice")
        return models

    @property
    def label(self) -> str:
        """What it is called."""
        address = addresses.parse(self.url)
        return self.name or f"{address.host}:{address.port}"


class Nodes(Section):
    heartbeat_s: float = 5.0
    """How often agents report."""
    unreachable_after_s: float = 15.0
    """Silence after which a node gets nothing new."""
    lost_after_s: float = 300.0
    """Silence after which its replicas are rebuilt elsewhere."""
    reconcile_s: float = 3.0
    """How often a pass runs, besides being poked."""
    settle_s: float = 5.0
    """How long after a start nodes may register before anything is placed."""
    lease_ttl_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    """How long a control plane that died keeps the lead."""
    drain_s: float = 60.0
    """How long requests in flight may finish when a replica is taken down."""
    keep_events_days: Annotated[float, Field(gt=0)] = 30.0
    """How long the timeline reaches back."""


class Agents(Section):
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port where agents come with certificates (mutual TLS), served by `llmgw server run agents`."""
    host: str = "0.0.0.0"  # noqa: S104 - nothing is heard there without a certificate
    """Its address."""
    names: list[str] = []
    """Names and addresses that agents dial, for the server's certificate, besides those that this machine has."""
    authority_dir: Path | None = None
    """Where the authority's key and certificates live; left out: `authority` in the data directory."""
    join_tokens: bool = True
    """Whether agents may also come with join tokens, to `listen.port`. Only for trusted networks."""


class Usage(Section):
    flush_s: float = 1.0
    """How often finished requests move from the journal to the store."""
    currency: Annotated[str, Field(pattern="^[A-Z]{3}$")] = "EUR"
    """What prices and budgets are in, as three letters. It is only shown: nothing is converted."""
    keep_days: Annotated[float, Field(gt=0)] = 90.0
    """How long the record of each request is kept."""
    keep_explained_days: Annotated[float, Field(gt=0)] = 7.0
    """How long a record says why the request went where it went; the rest of it stays."""


class Logging(Section):
    format: Literal["console", "json"] = "console"
    """`console` for people, `json` for collectors."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important line that is written."""


class Settings(Section):
    data_dir: Path = Path("data")
    """Where the database, journals, queues and secrets live."""
    debug: bool = False
    """Django's debug pages; never on a reachable address."""
    store: Store = Store()
    redis: Redis = Redis()
    listen: Listen = Listen()
    gateway: Gateway = Gateway()
    endpoints: list[Endpoint] = []
    """Engines that llmgw does not run. With these and `gateway.auth` off a gateway serves without any store."""
    nodes: Nodes = Nodes()
    agents: Agents = Agents()
    usage: Usage = Usage()
    logging: Logging = Logging()

    @field_validator("endpoints")
    @classmethod
    def _told_apart(cls, endpoints: list[Endpoint]) -> list[Endpoint]:
        labels = [endpoint.label for endpoint in endpoints]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"two endpoints are called {label}; give each a name of its own")
        return endpoints

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return path.expanduser().absolute()

    @property
    def base_url(self) -> str:
        """The address to show people, without a trailing slash."""
        if self.listen.public_url:
            return self.listen.public_url.rstrip("/")
        host = self.listen.host
        host = "127.0.0.1" if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host  # noqa: S104
        return f"http://{host}:{self.listen.port}"

    @property
    def base_url_here(self) -> str:
        """The address for programs on this machine, whatever proxy stands in front."""
        return self.model_copy(update={"listen": self.listen.model_copy(update={"public_url": None})}).base_url

    @property
    def authority_dir(self) -> Path:
        return self.agents.authority_dir or self.data_dir / "authority"

    @property
    def secrets_dir(self) -> Path:
        return self.data_dir / "secrets"


@lru_cache(maxsize=1)
def current() -> Settings:
    """This process's settings: the file that LLMGW_CONFIG names, if any, plus the environment. Raises ConfigError."""
    named = os.environ.get("LLMGW_CONFIG")
    return load(Settings, Path(named) if named else None, env_prefix=ENV_PREFIX)
