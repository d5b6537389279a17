"""Everything that changes the catalog: the whole is checked, stored, versioned and audited, or nothing is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from django.db import transaction

from catalog import document, spec, yaml_io
from catalog.models import CatalogVersion, Model, Profile
from catalog.names import nearest
from catalog.spec import Problem
from catalog.validate import notices, validate
from llmgw.core import doorbell
from llmgw.core.models import Revision
from tenants import audit
from tenants.audit import Actor

MAX_NAMED = 50


class CatalogRefused(Exception):
    """A change that would break a rule; the old catalog stays. `problems` says which rules and where."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(" ".join(str(problem) for problem in self.problems[:3]))


@dataclass(frozen=True, slots=True)
class Applied:
    """What a change did. `version` is the catalog's now; all three lists are empty when nothing changed."""

    version: int
    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    notices: tuple[Problem, ...] = ()


@transaction.atomic
def apply_catalog(*, models: Sequence[spec.Model], actor: Actor, note: str = "") -> Applied:
    """Make `models` the whole catalog. Raises CatalogRefused. A catalog that is the same already is left alone."""
    _one_at_a_time()
    return _store(spec.normalise_all(models), Model.objects.snapshot(), actor, note)


@transaction.atomic
def put_model(*, model: spec.Model, actor: Actor, replaces: str | None = None, note: str = "") -> Applied:
    """Add `model`, or put it in the place of the one named `replaces` (by default: the one of its own name)."""
    _one_at_a_time()
    old = Model.objects.snapshot()
    place = replaces or model.name
    if replaces and all(each.name != replaces for each in old):
        raise CatalogRefused([_no_such(replaces, old)])
    model = spec.normalise(model)
    new = tuple(model if each.name == place else each for each in old)
    if model not in new:
        new = (*new, model)
    return _store(new, old, actor, note)


@transaction.atomic
def remove_model(*, name: str, actor: Actor, note: str = "") -> Applied:
    """Take a model out. Refused while another one names it as its fallback."""
    _one_at_a_time()
    old = Model.objects.snapshot()
    new = tuple(each for each in old if each.name != name)
    if len(new) == len(old):
        raise CatalogRefused([_no_such(name, old)])
    return _store(new, old, actor, note)


@transaction.atomic
def roll_back(*, version: int, actor: Actor) -> Applied:
    """Make an earlier version the catalog again, as a new version. Raises CatalogRefused."""
    _one_at_a_time()
    earlier = CatalogVersion.objects.filter(number=version).first()
    if earlier is None:
        raise CatalogRefused([Problem("", "", "version", f"There is no version {version} of the catalog.")])
    read = yaml_io.parse(earlier.text)
    if read.problems:  # an older version may break a rule that was added since
        raise CatalogRefused(read.problems)
    return _store(read.models, Model.objects.snapshot(), actor, f"roll back to version {version}")


def current_version() -> int:
    """0 before the first change."""
    return CatalogVersion.objects.order_by("-number").values_list("number", flat=True).first() or 0


def _one_at_a_time() -> None:
    """Let the next change wait for this one, so that it validates what is then there. Held until the commit."""
    Revision.objects.get_or_create(pk=1)
    Revision.objects.select_for_update().get(pk=1)


def _no_such(name: str, models: Sequence[spec.Model]) -> Problem:
    known = nearest(name, [model.name for model in models])
    return Problem(name, "", "name", f"There is no model of that name.{known}")


def _store(new: tuple[spec.Model, ...], old: tuple[spec.Model, ...], actor: Actor, note: str) -> Applied:
    problems = validate(new)
    if problems:
        raise CatalogRefused(problems)
    version = current_version()
    if new == old and version:
        return Applied(version=version, notices=notices(new))
    before, after = {each.name: each for each in old}, {each.name: each for each in new}
    applied = Applied(
        version=version + 1,
        added=tuple(name for name in after if name not in before),
        changed=tuple(name for name in after if name in before and before[name] != after[name]),
        removed=tuple(name for name in before if name not in after),
        notices=notices(new),
    )
    Model.objects.filter(name__in=applied.removed).delete()
    _write_rows(new, applied)
    text = yaml_io.dump(new)
    CatalogVersion.objects.create(number=applied.version, text=text, made_by=actor.name, note=note[:200])
    touched = (*applied.added, *applied.changed, *applied.removed)
    audit.record(
        actor,
        "change catalog",
        f"version {applied.version}: {', '.join(touched) or 'order of models'}",
        before={"version": version, "models": _documents(before, touched)},
        after={"version": applied.version, "models": _documents(after, touched)},
    )
    doorbell.table_changed()
    return applied


def _documents(models: dict[str, spec.Model], touched: Sequence[str]) -> list[document.Document]:
    """Bounded: the whole texts stand in the versions."""
    return [document.write_model(models[name]) for name in touched[:MAX_NAMED] if name in models]


def _write_rows(models: Sequence[spec.Model], applied: Applied) -> None:
    rows = {row.name: row for row in Model.objects.all()}
    for position, model in enumerate(models):
        row = rows.get(model.name) or Model(name=model.name)
        if model.name in applied.added or model.name in applied.changed:
            row.position = position
            _fill(row, model)
            row.save()
            row.profiles.all().delete()
            Profile.objects.bulk_create(_profile_row(row, place, each) for place, each in enumerate(model.profiles))
        elif row.position != position:
            Model.objects.filter(pk=row.pk).update(position=position)


def _fill(row: Model, model: spec.Model) -> None:
    row.aliases = list(model.aliases)
    row.source = model.source
    row.fallbacks = list(model.fallbacks)
    row.scaling_min = model.scaling.min
    row.scaling_max = model.scaling.max
    row.idle_timeout_s = model.scaling.idle_timeout_s
    row.routing_profile = model.routing_profile
    row.ttft_p99_ms = model.slo.ttft_p99_ms
    row.tpot_p99_ms = model.slo.tpot_p99_ms
    row.band = model.band
    row.required_memory_gb = model.required_memory_gb
    row.external = asdict(model.external) if model.external else None
    row.adapters = [asdict(adapter) for adapter in model.adapters]
    row.team = model.team


def _profile_row(row: Model, position: int, profile: spec.Profile) -> Profile:
    return Profile(
        model=row,
        position=position,
        name=profile.name,
        engine=profile.engine,
        gpu_class=profile.gpu_class or "",
        tp=profile.tp,
        pp=profile.pp,
        nodes=profile.nodes,
        gpus_per_node=profile.gpus_per_node,
        args=list(profile.args),
        env=dict(profile.env),
        weight=profile.weight,
        priority=profile.priority,
        startup_timeout_s=profile.startup_timeout_s,
        reserved_cores=profile.reserved_cores,
        required_memory_gb=profile.required_memory_gb,
        launch_mode=profile.launch_mode,
        capacity_class=profile.capacity_class,
        max_loaded_adapters=profile.max_loaded_adapters,
        min_disk_gb=profile.min_disk_gb,
        labels=dict(profile.labels),
        only_nodes=list(profile.only_nodes),
    )
