"""Everything that changes the catalog: the whole is checked, stored, versioned and audited, or nothing is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from django.db import transaction

from catalog import adapter_files, document, owners, spec, yaml_io
from catalog.models import CatalogVersion, Model, Profile
from catalog.names import nearest
from catalog.notices import notices
from catalog.spec import Problem
from catalog.validate import validate
from llmgw.core import doorbell
from llmgw.core.models import Revision
from tenants import audit
from tenants.audit import Actor

MAX_NAMED = 50
Models = tuple[spec.Model, ...]


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


def check_catalog(*, models: Sequence[spec.Model]) -> Applied:
    """What would be said of `models` as the whole catalog; changes nothing. Raises CatalogRefused."""
    new = spec.normalise_all(models)
    remarks = _look(new, Model.objects.snapshot())
    return Applied(version=current_version(), notices=(*notices(new), *remarks))


def apply_catalog(
    *, models: Sequence[spec.Model], actor: Actor, note: str = "", expected: int | None = None
) -> Applied:
    """Make `models` the whole catalog. Raises CatalogRefused. A catalog that is the same already is left alone.

    `expected`: the version that the change was made from; another one refuses it.
    """
    new = spec.normalise_all(models)
    # Files are read before the store is locked: a slow disk or server must not keep others waiting.
    remarks = _look(new, Model.objects.snapshot())
    return _change(lambda _: new, actor, note, remarks, expected)


def put_model(
    *,
    model: spec.Model,
    actor: Actor,
    replaces: str | None = None,
    note: str = "",
    expected: int | None = None,
) -> Applied:
    """Add `model`, or put it in the place of the one named `replaces` (by default: the one of its own name)."""
    model = spec.normalise(model)
    place = replaces or model.name

    def put(old: Models) -> Models:
        if replaces and all(each.name != replaces for each in old):
            raise CatalogRefused([_no_such(replaces, old)])
        new = tuple(model if each.name == place else each for each in old)
        return new if model in new else (*new, model)

    old = Model.objects.snapshot()
    return _change(put, actor, note, _look(put(old), old), expected)


def remove_model(*, name: str, actor: Actor, note: str = "") -> Applied:
    """Take a model out. Refused while another one names it as its fallback."""

    def remove(old: Models) -> Models:
        new = tuple(each for each in old if each.name != name)
        if len(new) == len(old):
            raise CatalogRefused([_no_such(name, old)])
        return new

    return _change(remove, actor, note)


def add_adapter(*, model: str, adapter: spec.Adapter, actor: Actor) -> Applied:
    """Give a model another adapter, whose file is read first where it can be. Raises CatalogRefused."""

    def add(old: Models) -> Models:
        return _with(old, model, lambda each: replace(each, adapters=(*each.adapters, adapter)))

    old = Model.objects.snapshot()
    return _change(add, actor, f"add adapter {adapter.name} to {model}", _look(add(old), old))


def remove_adapter(*, model: str, name: str, actor: Actor) -> Applied:
    """Take an adapter from a model. Raises CatalogRefused."""

    def remove(each: spec.Model) -> spec.Model:
        left = tuple(adapter for adapter in each.adapters if adapter.name != name)
        if len(left) == len(each.adapters):
            known = nearest(name, [adapter.name for adapter in each.adapters])
            raise CatalogRefused([Problem(model, "", "adapters", f"There is no adapter {name[:80]!r}.{known}")])
        return replace(each, adapters=left)

    return _change(lambda old: _with(old, model, remove), actor, f"remove adapter {name} from {model}")


def roll_back(*, version: int, actor: Actor) -> Applied:
    """Make an earlier version the catalog again, as a new version. Raises CatalogRefused."""
    earlier = CatalogVersion.objects.filter(number=version).first()
    if earlier is None:
        raise CatalogRefused([Problem("", "", "version", f"There is no version {version} of the catalog.")])
    read = yaml_io.parse(earlier.text)
    if read.problems:  # an older version may break a rule that was added since
        raise CatalogRefused(read.problems)
    return apply_catalog(models=read.models, actor=actor, note=f"roll back to version {version}")


def current_version() -> int:
    """0 before the first change."""
    return CatalogVersion.objects.order_by("-number").values_list("number", flat=True).first() or 0


@transaction.atomic
def _change(
    edit: Callable[[Models], Models],
    actor: Actor,
    note: str,
    remarks: Sequence[Problem] = (),
    expected: int | None = None,
) -> Applied:
    """Each change waits for the one before it, until that is committed, so that it validates what is then there."""
    Revision.objects.get_or_create(pk=1)
    Revision.objects.select_for_update().get(pk=1)
    if expected is not None and (newest := CatalogVersion.objects.first()) and newest.number != expected:
        text = f"{newest.made_by} changed the catalog since, to version {newest.number}. Look at it, then save again."
        raise CatalogRefused([Problem("", "", "version", text)])
    old = Model.objects.snapshot()
    return _store(edit(old), old, actor, note, tuple(remarks))


def _look(new: Models, old: Models) -> list[Problem]:
    """The rules, then the files of adapters that are new; what is only remarked on. Raises CatalogRefused."""
    problems = [*validate(new), *owners.objections(new, old)]
    looked = adapter_files.look(new, old) if not problems else adapter_files.Looked()
    if problems or looked.problems:
        raise CatalogRefused([*problems, *looked.problems])
    return looked.notices


def _with(models: Models, name: str, change: Callable[[spec.Model], spec.Model]) -> Models:
    if all(each.name != name for each in models):
        raise CatalogRefused([_no_such(name, models)])
    return tuple(change(each) if each.name == name else each for each in models)


def _no_such(name: str, models: Sequence[spec.Model]) -> Problem:
    known = nearest(name, [model.name for model in models])
    return Problem(name, "", "name", f"There is no model of that name.{known}")


def _store(new: Models, old: Models, actor: Actor, note: str, remarks: tuple[Problem, ...]) -> Applied:
    problems = validate(new)
    if problems:
        raise CatalogRefused(problems)
    version = current_version()
    if new == old and version:
        return Applied(version=version, notices=(*notices(new), *remarks))
    before, after = {each.name: each for each in old}, {each.name: each for each in new}
    applied = Applied(
        version=version + 1,
        added=tuple(name for name in after if name not in before),
        changed=tuple(name for name in after if name in before and before[name] != after[name]),
        removed=tuple(name for name in before if name not in after),
        notices=(*notices(new), *remarks),
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
        metrics={key: list(names) for key, names in asdict(profile.metrics).items() if names},
    )
