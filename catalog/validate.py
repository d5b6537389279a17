"""Whether a catalog holds together as a whole (CAT-3, CAT-4): every rule, every breach named. Pure.

Models are expected normalised. What is only remarked on is in catalog.notices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice

from agent import flags
from catalog import names, sources, spec
from catalog.document import MAX_PROBLEMS
from catalog.spec import Model, Problem, Profile
from llmgw.core import addresses
from tenants.limits import class_objection

MAX_MODELS = 5000
MAX_LIST = 256
MAX_TEXT = 4096
MAX_COUNT = 100_000
MAX_SECONDS = 30 * 86_400
MAX_PROFILE_NAME = 80
MAX_BAND = 20
MAX_GB = 1_000_000
MAX_LABEL_VALUE = 63
_SLUG = re.compile(r"[A-Za-z0-9_-]{1,80}\Z")
_NODE = re.compile(r"[A-Za-z0-9_-]{1,120}\Z")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}\Z")
_METRIC = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]{0,199}\Z")
MAX_METRICS = 8
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")


def validate(models: Sequence[Model]) -> tuple[Problem, ...]:
    """Everything that refuses this catalog, in the order it is written; empty when it is valid."""
    return tuple(islice(_validate(models), MAX_PROBLEMS))


def _validate(models: Sequence[Model]) -> Iterator[Problem]:
    if len(models) > MAX_MODELS:
        yield Problem("", "", "models", f"There are {len(models)} models; {MAX_MODELS} is the most.")
        return
    owners, targets = _Names(), targets_of(models)
    for model in models:
        yield from owners.add(model)
        yield from _model(model)
        yield from _fallbacks(model, targets)
        yield from _profiles(model)


# --- names -----------------------------------------------------------------------------------------------------------
class _Names:
    """Who holds which name so far."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[str, str, str]] = {}

    def add(self, model: Model) -> Iterator[Problem]:
        mine = [("name", "model", model.name)]
        mine += [("aliases", "alias", alias) for alias in model.aliases]
        mine += [("adapters", "adapter", adapter.name) for adapter in model.adapters]
        for field, kind, name in mine:
            objection = names.objection(name) or names.address_objection(name, model=kind == "model")
            if objection:
                yield Problem(model.name, "", field, f"The {kind} {_shown(name)}{objection}.")
                continue
            key = names.fold(name)
            if key in self.held:
                whose, held_as, written = self.held[key]
                same = "" if written == name else f" (written {written})"
                what = "a model's name" if held_as == "model" else f"{_article(held_as)} of {whose}"
                yield Problem(model.name, "", field, f"{name} is already {what}{same}; choose another.")
            else:
                self.held[key] = (model.name, kind, name)


def _article(kind: str) -> str:
    return f"an {kind}"


def _shown(name: str) -> str:
    return f"{name[:40]!r} " if name else ""


def targets_of(models: Sequence[Model]) -> dict[str, str]:
    """What a fallback may name, folded, and the model it means."""
    found: dict[str, str] = {}
    for model in models:
        for name in (model.name, *model.aliases):
            found.setdefault(names.fold(name), model.name)
    return found


def _fallbacks(model: Model, targets: dict[str, str]) -> Iterator[Problem]:
    if len(model.fallbacks) > MAX_LIST:
        yield Problem(model.name, "", "fallbacks", f"There are {len(model.fallbacks)}; {MAX_LIST} is the most.")
        return
    for name in model.fallbacks:
        if names.fold(name) not in targets:
            text = f"No model or alias is named {name[:80]!r}.{names.nearest(name, targets.values())}"
            yield Problem(model.name, "", "fallbacks", text)


# --- one model -------------------------------------------------------------------------------------------------------
def _model(model: Model) -> Iterator[Problem]:
    def problem(field: str, text: str) -> Problem:
        return Problem(model.name, "", field, text)

    for field, held in (("aliases", model.aliases), ("adapters", model.adapters)):
        if len(held) > MAX_LIST:
            yield problem(field, f"There are {len(held)}; {MAX_LIST} is the most.")
    if model.external:
        yield from _external(model, model.external)
    elif not model.source:
        yield problem("source", "A source is missing: a path, an address, or an id such as org/name.")
    if model.source:
        objection = sources.objection(model.source)
        if objection:
            yield problem("source", objection)
    for adapter in model.adapters:
        objection = sources.objection(adapter.source) if adapter.source else "It has no source."
        objection = objection or _engines_objection(model, adapter.source)
        if objection:
            yield problem("adapters", f"Adapter {adapter.name[:80]!r}: {objection}")
    if model.adapters and model.external:
        yield problem("adapters", "An external model has none here; publish what the provider calls one as a model.")
    yield from _scaling(model)
    if model.routing_profile not in spec.ROUTING_PROFILES:
        yield problem("routing_profile", _unknown(model.routing_profile, spec.ROUTING_PROFILES))
    for field, limit in (("slo.ttft_p99", model.slo.ttft_p99_ms), ("slo.tpot_p99", model.slo.tpot_p99_ms)):
        if limit is not None and not 0 < limit <= MAX_SECONDS * 1000:
            yield problem(field, f"{limit} ms is not a time to answer in; write more than 0, or leave it out.")
    if model.band:
        objection = names.objection(model.band, MAX_BAND)
        if objection:
            yield problem("band", f"The band {_shown(model.band)}{objection}.")
    yield from (problem(*breach) for breach in _memory(model.required_memory_gb))
    if model.team and not _SLUG.match(model.team):
        yield problem("team", f"{model.team[:40]!r} is not a team's short name; it stands in the team's address.")


def _engines_objection(model: Model, source: str) -> str | None:
    """Why no profile's engine could be given this adapter."""
    at_run_time = any(profile.max_loaded_adapters is not None for profile in model.profiles)
    if at_run_time and sources.is_relative(source):
        return "With max_loaded_adapters engines read it by themselves; write its absolute path on nodes."
    fetched, engines = sources.is_fetched(source), {profile.engine for profile in model.profiles}
    for engine in sorted(engines & set(spec.ENGINES)):
        if fetched and engine != "llamacpp":
            return f"{engine} takes a PEFT directory, and nodes fetch single files; write its path on nodes."
        if not fetched and engine == "llamacpp" and not sources.is_path(source):
            return "llama.cpp takes a file; write its path on nodes, or its address."
    return None


def _scaling(model: Model) -> Iterator[Problem]:
    low, high, idle = model.scaling.min, model.scaling.max, model.scaling.idle_timeout_s
    if high < low:
        yield Problem(model.name, "", "scaling.max", f"max {high} is below min {low}; raise max or lower min.")
    elif high > MAX_COUNT:
        yield Problem(model.name, "", "scaling.max", f"max {high} is more than {MAX_COUNT}.")
    if not 0 < idle <= MAX_SECONDS:
        text = f"{idle} s is not a time to wait; write 1 s to {MAX_SECONDS // 86_400} days, or leave it out."
        yield Problem(model.name, "", "scaling.idle_timeout", text)


def _external(model: Model, external: spec.External) -> Iterator[Problem]:
    objection = _url(external.url)
    if objection:
        yield Problem(model.name, "", "external.url", objection)
    if not external.model or len(external.model) > names.MAX_NAME or not external.model.isprintable():
        yield Problem(model.name, "", "external.model", "Write the name that the provider knows the model by.")
    if external.api_key_file is not None and (
        not external.api_key_file.startswith("/") or not external.api_key_file.isprintable()
    ):
        yield Problem(
            model.name,
            "",
            "external.api_key_file",
            "Write the absolute path of a file that holds the key, not the key.",
        )
    if model.profiles:
        yield Problem(model.name, "", "profiles", "An external model is not placed; remove its profiles, or external.")


def _url(url: str) -> str | None:
    try:
        addresses.parse(url)
    except addresses.AddressError as error:
        return str(error)
    return None


# --- profiles --------------------------------------------------------------------------------------------------------
def _profiles(model: Model) -> Iterator[Problem]:
    if not model.profiles and not model.external:
        yield Problem(model.name, "", "profiles", "It has no profile; say how it can run, with at least one.")
    if len(model.profiles) > MAX_LIST:
        yield Problem(model.name, "", "profiles", f"There are {len(model.profiles)}; {MAX_LIST} is the most.")
        return
    seen: set[str] = set()
    for number, profile in enumerate(model.profiles, start=1):
        if not profile.name:
            yield Problem(model.name, "", "profiles", f"Profile {number} has no name; give it one.")
            continue
        objection = names.objection(profile.name, MAX_PROFILE_NAME)
        if objection:
            yield Problem(model.name, profile.name[:40], "name", f"The name {_shown(profile.name)}{objection}.")
        elif names.fold(profile.name) in seen:
            yield Problem(model.name, profile.name, "name", "Another profile of this model has that name; rename one.")
        seen.add(names.fold(profile.name))
        for rules in (_engine, _numbers, _homes, _command, _metrics):
            for field, text in rules(profile):
                yield Problem(model.name, profile.name, field, text)
        objection = flags.cache_objection(profile.engine, profile.args) if model.adapters else None
        if objection:
            yield Problem(model.name, profile.name, "args", objection)


def _engine(profile: Profile) -> Iterator[tuple[str, str]]:
    if profile.engine not in spec.ENGINES:
        yield "engine", _unknown(profile.engine, spec.ENGINES)
        return
    if profile.gpu_class is None:
        if profile.engine not in spec.CPU_ENGINES:
            yield "gpu_class", f"{profile.engine} needs cards; name their class, for example h100-80g."
        if profile.nodes > 1:
            yield "nodes", f"A profile on CPUs runs on one node, not {profile.nodes}; set nodes to 1."
    elif objection := class_objection(profile.gpu_class):
        yield "gpu_class", f"{objection} For CPUs leave it out."
    elif profile.nodes * profile.gpus_per_node != profile.tp * profile.pp:
        yield (
            "gpus_per_node",
            (
                f"nodes x gpus_per_node is {profile.nodes} x {profile.gpus_per_node} = "
                f"{profile.nodes * profile.gpus_per_node}, but tp x pp is {profile.tp} x {profile.pp} = "
                f"{profile.tp * profile.pp}; make them equal."
            ),
        )
    if profile.engine == "llamacpp":
        if profile.nodes > 1 and profile.gpu_class is not None:
            yield "nodes", f"llama.cpp runs on one node, not {profile.nodes}; set nodes to 1."
        for field, value in (("tp", profile.tp), ("pp", profile.pp)):
            if value > 1:
                yield field, f"llama.cpp has no parallel ranks; set {field} to 1, not {value}."


def _numbers(profile: Profile) -> Iterator[tuple[str, str]]:
    counts = {
        "tp": profile.tp,
        "pp": profile.pp,
        "nodes": profile.nodes,
        "gpus_per_node": profile.gpus_per_node,
        "weight": profile.weight,
        "priority": abs(profile.priority),
    }
    for field, value in counts.items():
        if value > MAX_COUNT:
            yield field, f"{value} is more than {MAX_COUNT}."
    if profile.startup_timeout_s > MAX_SECONDS:
        yield "startup_timeout", f"{profile.startup_timeout_s} s is more than {MAX_SECONDS // 86_400} days."
    if not (math.isfinite(profile.reserved_cores) and 0 <= profile.reserved_cores <= MAX_COUNT):
        yield "reserved_cores", f"{profile.reserved_cores} is not a number of cores; write 0 or more."
    yield from _memory(profile.required_memory_gb)
    yield from _memory(profile.min_disk_gb, "min_disk_gb")
    if profile.launch_mode not in spec.LAUNCH_MODES:
        yield "launch_mode", _unknown(profile.launch_mode, spec.LAUNCH_MODES)
    if profile.capacity_class not in spec.CAPACITY_CLASSES:
        yield "capacity_class", _unknown(profile.capacity_class, spec.CAPACITY_CLASSES)
    held = profile.max_loaded_adapters
    if held is not None and profile.engine == "llamacpp":
        yield "max_loaded_adapters", "llama.cpp holds all adapters from its start; leave it out."
    elif held is not None and held > MAX_LIST:
        yield "max_loaded_adapters", f"{held} is more than {MAX_LIST}."


def _homes(profile: Profile) -> Iterator[tuple[str, str]]:
    """Which nodes it may run on."""
    for field, size in (("labels", len(profile.labels)), ("only_nodes", len(profile.only_nodes))):
        if size > MAX_LIST:
            yield field, f"There are {size}; {MAX_LIST} is the most."
            return
    for name, value in profile.labels:
        if not _LABEL.match(name):
            yield "labels", f"{name[:40]!r} is not a label's name: at most 63 letters, digits, dots, hyphens, / and _."
        elif len(value) > MAX_LABEL_VALUE or not value.isprintable():
            yield "labels", f"The value of {name} is not one line of at most {MAX_LABEL_VALUE} characters."
    pinned = profile.only_nodes
    for name in pinned:
        if not _NODE.match(name):
            yield "only_nodes", f"{name[:40]!r} is not a node's name: letters, digits, hyphens and underscores."
    if len(set(pinned)) < len(pinned):
        yield "only_nodes", "A node is named more than once; once is enough."
    elif pinned and len(pinned) < profile.nodes:
        yield "only_nodes", f"{len(pinned)} are named, and nodes asks for {profile.nodes}; name more, or lower nodes."


def _command(profile: Profile) -> Iterator[tuple[str, str]]:
    for field, size in (("args", len(profile.args)), ("env", len(profile.env))):
        if size > MAX_LIST:
            yield field, f"There are {size}; {MAX_LIST} is the most."
    for arg in profile.args:
        if objection := flags.objection(profile.engine, arg):
            yield "args", objection
        elif not _storable(arg):
            yield "args", f"{arg[:40]!r} has more than {MAX_TEXT} characters, or one that is not text."
    for name, value in profile.env:
        if not _VARIABLE.match(name):
            yield "env", f"{name[:40]!r} is not a variable's name: letters, digits and _ only."
        elif not _storable(value):
            yield "env", f"The value of {name} has more than {MAX_TEXT} characters, or one that is not text."
    repeated = sorted({name for name, _ in profile.env if sum(name == other for other, _ in profile.env) > 1})
    for name in repeated:
        yield "env", f"{name[:40]} is set more than once; keep one."


def _metrics(profile: Profile) -> Iterator[tuple[str, str]]:
    held = profile.metrics
    for key, found in (("running", held.running), ("waiting", held.waiting), ("kv_used", held.kv_used)):
        if len(found) > MAX_METRICS:
            yield f"metrics.{key}", f"There are {len(found)} names; {MAX_METRICS} is the most."
        for name in found[:MAX_METRICS]:
            if not _METRIC.match(name):
                yield f"metrics.{key}", f"{name[:40]!r} is not a metric's name: letters, digits, _ and : only."
    if (held.waiting or held.kv_used) and not held.running:
        yield "metrics.running", "Name what counts running requests too; without it the engine's own names are read."


def _storable(text: str) -> bool:
    """Neither NUL nor half a surrogate pair: no command line, file or store takes those."""
    return len(text) <= MAX_TEXT and "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def _memory(required_gb: float | None, field: str = "required_memory_gb") -> Iterator[tuple[str, str]]:
    if required_gb is not None and not (math.isfinite(required_gb) and 0 < required_gb <= MAX_GB):
        yield field, f"{required_gb} GB is not a size; write more than 0, or leave it out."


def _unknown(value: str, known: Sequence[str]) -> str:
    return f"{value[:40]!r} is unknown.{names.nearest(value, known)} Known: {', '.join(known)}."
