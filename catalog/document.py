"""Models as plain data (mappings, lists, text, numbers), the one shape of YAML files and of the API. Pure.

Nothing is guessed: an unknown key, a number where text belongs, a key written twice is a Problem with its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from catalog import spec
from catalog.durations import read_ms, write_ms
from catalog.names import nearest
from catalog.spec import Model, Problem, Profile

Place = tuple[str | int, ...]
Document = dict[str, Any]

MODEL_KEYS = (
    "name",
    "aliases",
    "source",
    "external",
    "scaling",
    "profiles",
    "fallbacks",
    "routing_profile",
    "slo",
    "band",
    "required_memory_gb",
    "adapters",
    "team",
)
PROFILE_KEYS = (
    "name",
    "engine",
    "gpu_class",
    "tp",
    "pp",
    "nodes",
    "gpus_per_node",
    "args",
    "env",
    "weight",
    "priority",
    "startup_timeout",
    "reserved_cores",
    "required_memory_gb",
    "launch_mode",
    "capacity_class",
    "max_loaded_adapters",
    "min_disk_gb",
    "labels",
    "only_nodes",
    "metrics",
)
METRICS = ("running", "waiting", "kv_used")
MAX_LIST = 6000
MAX_PROBLEMS = 100
"""More are not reported: nobody reads on, and a hostile document could make millions."""


@dataclass(frozen=True, slots=True)
class Read:
    """What a document says, as far as it could be read; usable when `problems` is empty. Models are normalised."""

    models: tuple[Model, ...]
    problems: tuple[Problem, ...]


def read(data: object, lines: Mapping[Place, int] | None = None) -> Read:
    """A whole catalog: `{"models": [...]}`. `lines` says where each place of `data` was written."""
    reader = _Reader(lines or {})
    top = reader.mapping(data, (), ("models",))
    if "models" not in top and not reader.problems:
        # An empty file would otherwise remove every model.
        reader.refuse(("models",), "The list of models is missing; write models: [] to remove all of them.")
    found = tuple(
        reader.model(entry, ("models", number)) for number, entry in enumerate(reader.list(top, "models", ()))
    )
    return Read(spec.normalise_all(found), tuple(reader.problems))


def read_model(data: object, lines: Mapping[Place, int] | None = None) -> Read:
    """One model."""
    reader = _Reader(lines or {})
    return Read((spec.normalise(reader.model(data, ())),), tuple(reader.problems))


def read_adapter(data: object, *, model: str) -> tuple[spec.Adapter, tuple[Problem, ...]]:
    """One adapter of `model`."""
    reader = _Reader({}, model_name=model)
    return reader.adapter(data, ("adapters",)), tuple(reader.problems)


@dataclass(slots=True)
class _Reader:
    lines: Mapping[Place, int]
    problems: list[Problem] = field(default_factory=list)
    model_name: str = ""
    profile_name: str = ""

    # --- the shapes ---
    def model(self, data: object, at: Place) -> Model:
        self.model_name, self.profile_name = _name(data), ""
        entry = self.mapping(data, at, MODEL_KEYS)
        limits = self.mapping(entry.get("scaling", {}), (*at, "scaling"), ("min", "max", "idle_timeout"))
        slo = self.mapping(entry.get("slo", {}), (*at, "slo"), ("ttft_p99", "tpot_p99"))
        model = Model(
            name=self.text(entry, "name", at),
            aliases=self.texts(entry, "aliases", at),
            source=self.text(entry, "source", at),
            scaling=spec.scaling(
                self.integer(limits, "min", (*at, "scaling"), 0),
                self.maybe_integer(limits, "max", (*at, "scaling")),
                self.seconds(limits, "idle_timeout", (*at, "scaling"), spec.IDLE_TIMEOUT_S),
            ),
            fallbacks=self.texts(entry, "fallbacks", at),
            routing_profile=self.text(entry, "routing_profile", at, spec.LEAST_LOAD),
            slo=spec.Slo(
                ttft_p99_ms=self.length(slo, "ttft_p99", (*at, "slo")),
                tpot_p99_ms=self.length(slo, "tpot_p99", (*at, "slo")),
            ),
            band=self.text(entry, "band", at),
            required_memory_gb=self.maybe_number(entry, "required_memory_gb", at),
            team=self.text(entry, "team", at),
            external=self.external(entry.get("external"), (*at, "external")),
            adapters=tuple(
                self.adapter(each, (*at, "adapters", number))
                for number, each in enumerate(self.list(entry, "adapters", at))
            ),
            profiles=tuple(
                self.profile(each, (*at, "profiles", number))
                for number, each in enumerate(self.list(entry, "profiles", at))
            ),
        )
        self.profile_name = ""
        return model

    def profile(self, data: object, at: Place) -> Profile:
        self.profile_name = _name(data)
        entry = self.mapping(data, at, PROFILE_KEYS)
        return Profile(
            name=self.text(entry, "name", at),
            engine=self.text(entry, "engine", at, "vllm"),
            gpu_class=self.text(entry, "gpu_class", at) or None,
            tp=self.integer(entry, "tp", at, 1),
            pp=self.integer(entry, "pp", at, 1),
            nodes=self.integer(entry, "nodes", at, 1),
            gpus_per_node=self.integer(entry, "gpus_per_node", at, 0),
            args=self.args(entry, at),
            env=self.pairs(entry, "env", at, "variables"),
            weight=self.integer(entry, "weight", at, 1),
            priority=self.integer(entry, "priority", at, 0),
            startup_timeout_s=self.seconds(entry, "startup_timeout", at, spec.STARTUP_TIMEOUT_S),
            reserved_cores=self.number(entry, "reserved_cores", at, 0.0),
            required_memory_gb=self.maybe_number(entry, "required_memory_gb", at),
            launch_mode=self.text(entry, "launch_mode", at, "mp"),
            capacity_class=self.text(entry, "capacity_class", at, "standard"),
            max_loaded_adapters=self.maybe_integer(entry, "max_loaded_adapters", at),
            min_disk_gb=self.maybe_number(entry, "min_disk_gb", at),
            labels=self.pairs(entry, "labels", at, "labels"),
            only_nodes=self.texts(entry, "only_nodes", at),
            metrics=self.metrics(entry.get("metrics", {}), (*at, "metrics")),
        )

    def metrics(self, data: object, at: Place) -> spec.Metrics:
        """One name may stand without a list."""
        entry = self.mapping(data, at, METRICS)
        listed = {key: [value] if isinstance(value, str) else value for key, value in entry.items()}
        return spec.Metrics(**{key: self.texts(listed, key, at) for key in METRICS})

    def adapter(self, data: object, at: Place) -> spec.Adapter:
        entry = self.mapping(data, at, ("name", "source"))
        return spec.Adapter(name=self.text(entry, "name", at), source=self.text(entry, "source", at))

    def external(self, data: object, at: Place) -> spec.External | None:
        if data is None:
            return None
        entry = self.mapping(data, at, ("url", "model", "api_key_file"))
        return spec.External(
            url=self.text(entry, "url", at),
            model=self.text(entry, "model", at),
            api_key_file=self.text(entry, "api_key_file", at) or None,
        )

    def args(self, entry: Document, at: Place) -> tuple[str, ...]:
        """Numbers are taken as they stand: `--ctx-size, 8192` means one thing only."""
        found = []
        for number, value in enumerate(self.list(entry, "args", at)):
            if isinstance(value, int | float) and not isinstance(value, bool):
                value = str(value)
            found.append(self.checked(value, (*at, "args", number), str, "text"))
        return tuple(value for value in found if value is not None)

    def pairs(self, entry: Document, key: str, at: Place, of: str) -> tuple[tuple[str, str], ...]:
        held = entry.get(key)
        if held is None:
            return ()
        if not isinstance(held, Mapping):
            self.refuse((*at, key), f"It must be a mapping of {of} to text, not {_kind(held)}.")
            return ()
        found: list[tuple[str, str]] = []
        for name, value in held.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                value = str(value)
            text = self.checked(value, (*at, key, str(name)), str, "text")
            found.append((str(name), text or ""))
        return tuple(found)

    # --- the pieces ---
    def mapping(self, data: object, at: Place, known: Sequence[str]) -> Document:
        if not isinstance(data, Mapping):
            self.refuse(at, f"It must be a mapping with {', '.join(known)}, not {_kind(data)}.")
            return {}
        for key in data:
            if key not in known:
                hint = nearest(str(key), known) or f" Known here: {', '.join(known)}."
                self.refuse((*at, str(key)), f"The key {str(key)[:60]} is unknown.{hint}")
        return {key: data[key] for key in known if data.get(key) is not None}

    def list(self, entry: Document, key: str, at: Place) -> Sequence[Any]:
        held = entry.get(key)
        if held is None:
            return ()
        if not isinstance(held, list | tuple):
            self.refuse((*at, key), f"It must be a list, not {_kind(held)}.")
            return ()
        if len(held) > MAX_LIST:
            self.refuse((*at, key), f"It holds {len(held)} entries; {MAX_LIST} is the most.")
            return ()
        return held

    def texts(self, entry: Document, key: str, at: Place) -> tuple[str, ...]:
        found = [
            self.checked(value, (*at, key, number), str, "text")
            for number, value in enumerate(self.list(entry, key, at))
        ]
        return tuple(value for value in found if value is not None)

    def text(self, entry: Document, key: str, at: Place, default: str = "") -> str:
        found: str | None = self.checked(entry[key], (*at, key), str, "text") if key in entry else None
        return default if found is None else found

    def integer(self, entry: Document, key: str, at: Place, default: int) -> int:
        found = self.maybe_integer(entry, key, at)
        return default if found is None else found

    def maybe_integer(self, entry: Document, key: str, at: Place) -> int | None:
        found = self.bounded(entry, key, at, int, "a whole number")
        return None if found is None else int(found)

    def number(self, entry: Document, key: str, at: Place, default: float) -> float:
        found = self.maybe_number(entry, key, at)
        return default if found is None else found

    def maybe_number(self, entry: Document, key: str, at: Place) -> float | None:
        found = self.bounded(entry, key, at, (int, float), "a number")
        return None if found is None else float(found)

    def bounded(self, entry: Document, key: str, at: Place, kind: Any, words: str) -> Any:
        """A number that the store can hold, or None when it is left out or refused."""
        if key not in entry:
            return None
        number = self.checked(entry[key], (*at, key), kind, words)
        if number is not None and abs(number) >= 2**31:
            self.refuse((*at, key), "The number is too large.")
            return None
        return number

    def length(self, entry: Document, key: str, at: Place) -> int | None:
        """Milliseconds."""
        if key not in entry:
            return None
        found = read_ms(entry[key])
        if found is None or abs(found) >= 2**31:
            self.refuse((*at, key), "It must be a time such as 500ms, 2s or 20m, or a number of seconds.")
            return None
        return found

    def seconds(self, entry: Document, key: str, at: Place, default: int) -> int:
        found = self.length(entry, key, at)
        # Rounded up: half a second written is not "left out".
        return default if found is None else -(-found // 1000)

    def checked(self, value: object, at: Place, kind: Any, words: str) -> Any:
        """`value` if it is one of `kind`; else None, and a problem."""
        if isinstance(value, kind) and not isinstance(value, bool):
            return value
        quoted = ' Put it in quotes: "..."' if kind is str and isinstance(value, bool | int | float) else ""
        self.refuse(at, f"It must be {words}, not {_kind(value)}.{quoted}")
        return None

    def refuse(self, at: Place, text: str) -> None:
        if len(self.problems) >= MAX_PROBLEMS:
            return
        line = next((self.lines[at[:end]] for end in range(len(at), 0, -1) if at[:end] in self.lines), None)
        name = ".".join(str(part) for part in self.below(at))
        self.problems.append(Problem(self.model_name, self.profile_name, name, text, line))

    def below(self, at: Place) -> Place:
        """The place inside its model or profile, where those have names for a Problem to name them by."""
        if at[:1] == ("models",) and self.model_name:
            at = at[2:]
        return at[2:] if at[:1] == ("profiles",) and len(at) > 2 and self.profile_name else at


def _name(data: object) -> str:
    name = data.get("name") if isinstance(data, Mapping) else None
    return name if isinstance(name, str) else ""


def _kind(value: object) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case str():
            return "text"
        case int() | float():
            return f"the number {str(value)[:40]}"
        case Mapping():
            return "a mapping"
        case _:
            return "a list"


# --- writing ---------------------------------------------------------------------------------------------------------
def write(models: Sequence[Model]) -> Document:
    return {"models": [write_model(model) for model in models]}


def write_model(model: Model) -> Document:
    """What `read_model` reads back; values that are their default are left out."""
    found: Document = {"name": model.name}
    _put(found, "aliases", list(model.aliases))
    _put(found, "source", model.source)
    if model.external:
        found["external"] = {"url": model.external.url, "model": model.external.model}
        _put(found["external"], "api_key_file", model.external.api_key_file)
    limits: Document = {"min": model.scaling.min, "max": model.scaling.max}
    if model.scaling.idle_timeout_s != spec.IDLE_TIMEOUT_S:
        limits["idle_timeout"] = write_ms(model.scaling.idle_timeout_s * 1000)
    found["scaling"] = limits
    _put(found, "fallbacks", list(model.fallbacks))
    if model.routing_profile != spec.LEAST_LOAD:
        found["routing_profile"] = model.routing_profile
    limit = {"ttft_p99": model.slo.ttft_p99_ms, "tpot_p99": model.slo.tpot_p99_ms}
    _put(found, "slo", {key: write_ms(value) for key, value in limit.items() if value is not None})
    _put(found, "band", model.band)
    _put(found, "required_memory_gb", model.required_memory_gb)
    _put(found, "adapters", [{"name": each.name, "source": each.source} for each in model.adapters])
    _put(found, "team", model.team)
    _put(found, "profiles", [write_profile(profile) for profile in model.profiles])
    return found


def write_profile(profile: Profile) -> Document:
    found: Document = {"name": profile.name, "engine": profile.engine}
    _put(found, "gpu_class", profile.gpu_class)
    plain = Profile(name=profile.name)
    for key in ("tp", "pp", "nodes", "weight", "priority", "reserved_cores", "launch_mode", "capacity_class"):
        value = getattr(profile, key)
        if value != getattr(plain, key):
            found[key] = value
    default = spec.normalise_profile(Profile(name="", gpu_class=profile.gpu_class, tp=profile.tp, nodes=profile.nodes))
    if profile.gpus_per_node != default.gpus_per_node:
        found["gpus_per_node"] = profile.gpus_per_node
    _put(found, "args", list(profile.args))
    _put(found, "env", dict(profile.env))
    if profile.startup_timeout_s != spec.STARTUP_TIMEOUT_S:
        found["startup_timeout"] = write_ms(profile.startup_timeout_s * 1000)
    _put(found, "required_memory_gb", profile.required_memory_gb)
    _put(found, "max_loaded_adapters", profile.max_loaded_adapters)
    _put(found, "min_disk_gb", profile.min_disk_gb)
    _put(found, "labels", dict(profile.labels))
    _put(found, "only_nodes", list(profile.only_nodes))
    _put(found, "metrics", {key: _short(held) for key in METRICS if (held := getattr(profile.metrics, key))})
    return found


def _short(names: tuple[str, ...]) -> str | list[str]:
    return names[0] if len(names) == 1 else list(names)


def _put(found: Document, key: str, value: object) -> None:
    if value not in (None, "", [], {}):
        found[key] = value
