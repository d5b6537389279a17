"""The catalog's rows. `Model.objects.snapshot()` is the only bridge from them to the values of catalog.spec."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

import msgspec
from django.db import models

from catalog import spec
from llmgw.core import raw

# The catalog is read on every pass and by most pages: columns without models, and JSON straight into shape.
_texts = msgspec.json.Decoder(tuple[str, ...]).decode
_pairs = msgspec.json.Decoder(dict[str, str]).decode
_external = msgspec.json.Decoder(spec.External | None).decode
_adapters = msgspec.json.Decoder(tuple[spec.Adapter, ...]).decode
_metrics = msgspec.json.Decoder(spec.Metrics).decode


class ModelQuerySet(models.QuerySet["Model"]):
    def snapshot(self) -> tuple[spec.Model, ...]:
        """The whole catalog, or these of it, in its order of declaration. Two queries, and one where there is none."""
        columns = (
            "pk",
            "name",
            raw.text("aliases"),
            "source",
            "scaling_min",
            "scaling_max",
            "idle_timeout_s",
            raw.text("fallbacks"),
            "routing_profile",
            "ttft_p99_ms",
            "tpot_p99_ms",
            "band",
            "required_memory_gb",
            raw.text("external"),
            raw.text("adapters"),
            "team",
        )
        rows = raw.rows(self.order_by("position", "pk").values_list(*columns))
        # Profiles come second: else a model that is added in between would have none.
        profiles = _profiles(Profile.objects.filter(model__in=self.values("pk"))) if rows else {}
        found = []
        for row in rows:
            pk, name, aliases, source, least, most, idle_timeout_s, fallbacks, routing_profile, *rest = row
            ttft_p99_ms, tpot_p99_ms, band, required_memory_gb, external, adapters, team = rest
            found.append(
                spec.Model(
                    name=name,
                    aliases=_texts(aliases),
                    source=source,
                    profiles=tuple(profiles.get(pk, ())),
                    scaling=spec.Scaling(least, most, idle_timeout_s),
                    fallbacks=_texts(fallbacks),
                    routing_profile=routing_profile,
                    slo=spec.Slo(ttft_p99_ms, tpot_p99_ms),
                    band=band,
                    required_memory_gb=required_memory_gb,
                    external=_external(external) if external else None,
                    adapters=_adapters(adapters),
                    team=team,
                )
            )
        return tuple(found)

    def named(self, name: str) -> spec.Model | None:
        """One model. Two queries."""
        return next(iter(self.filter(name=name).snapshot()), None)


def _profiles(rows: models.QuerySet[Profile]) -> Mapping[int, Sequence[spec.Profile]]:
    """By the key of their model. One query."""
    names = [field.name for field in fields(spec.Profile)]
    columns = [raw.text(name) if name in _READ_PROFILE else name for name in names]
    read = [(place, _READ_PROFILE[name]) for place, name in enumerate(names) if name in _READ_PROFILE]
    found: dict[int, list[spec.Profile]] = defaultdict(list)
    for model, *values in raw.rows(rows.values_list("model", *columns)):
        for place, of in read:
            values[place] = of(values[place])
        found[model].append(spec.Profile(*values))
    return found


_READ_PROFILE: Mapping[str, Callable[[str], object]] = {
    "gpu_class": lambda text: text or None,
    "args": _texts,
    "env": lambda text: tuple(sorted(_pairs(text).items())),
    "labels": lambda text: tuple(sorted(_pairs(text).items())),
    "only_nodes": _texts,
    "metrics": _metrics,
}
"""Of the text that is stored, the value; other columns are as they are wanted."""


class Model(models.Model):
    """A model as clients see it (CAT-1). Written by catalog.actions alone, after the whole catalog was validated."""

    name = models.CharField(max_length=200, unique=True)
    position = models.IntegerField(default=0)
    aliases = models.JSONField(default=list, blank=True)
    source = models.CharField(max_length=1000, blank=True)
    fallbacks = models.JSONField(default=list, blank=True)
    scaling_min = models.IntegerField(default=0)
    scaling_max = models.IntegerField(default=0)
    idle_timeout_s = models.IntegerField(default=900)
    routing_profile = models.CharField(max_length=20, default=spec.LEAST_LOAD)
    ttft_p99_ms = models.IntegerField(null=True, blank=True)
    tpot_p99_ms = models.IntegerField(null=True, blank=True)
    band = models.CharField(max_length=20, blank=True)
    required_memory_gb = models.FloatField(null=True, blank=True)
    external = models.JSONField(null=True, blank=True)
    adapters = models.JSONField(default=list, blank=True)
    team = models.CharField(
        max_length=80, blank=True, help_text="Slug of the team whose capacity quota it counts against."
    )
    made_at = models.DateTimeField(auto_now_add=True)
    changed_at = models.DateTimeField(auto_now=True)

    objects = ModelQuerySet.as_manager()

    class Meta:
        ordering = ["position", "pk"]

    def __str__(self) -> str:
        return self.name


class Profile(models.Model):
    """One way to run a model (CAT-2)."""

    model = models.ForeignKey(Model, on_delete=models.CASCADE, related_name="profiles")
    name = models.CharField(max_length=80)
    position = models.IntegerField(default=0)
    engine = models.CharField(max_length=20, default="vllm")
    gpu_class = models.CharField(max_length=40, blank=True, help_text="Empty: runs on CPUs.")
    tp = models.IntegerField(default=1)
    pp = models.IntegerField(default=1)
    nodes = models.IntegerField(default=1)
    gpus_per_node = models.IntegerField(default=0)
    args = models.JSONField(default=list, blank=True)
    env = models.JSONField(default=dict, blank=True)
    weight = models.IntegerField(default=1, help_text="How many requests one replica serves at once.")
    priority = models.IntegerField(default=0)
    startup_timeout_s = models.IntegerField(default=1200)
    reserved_cores = models.FloatField(default=0)
    required_memory_gb = models.FloatField(null=True, blank=True)
    launch_mode = models.CharField(max_length=5, default="mp")
    capacity_class = models.CharField(max_length=12, default="standard")
    max_loaded_adapters = models.IntegerField(
        null=True, blank=True, help_text="Adapters held at once, loaded when asked for. Empty: all, from the start."
    )
    min_disk_gb = models.FloatField(null=True, blank=True, help_text="Free disk that a node needs to get a replica.")
    labels = models.JSONField(default=dict, blank=True, help_text="Labels that its nodes must have.")
    only_nodes = models.JSONField(default=list, blank=True, help_text="Nodes that it may run on. Empty: any.")
    metrics = models.JSONField(
        default=dict, blank=True, help_text="Names of the engine's metrics. Empty: those known for the engine."
    )

    class Meta:
        ordering = ["position", "pk"]
        constraints = [models.UniqueConstraint(fields=["model", "name"], name="profile_name_once_per_model")]

    def __str__(self) -> str:
        return self.name


class CatalogVersion(models.Model):
    """The whole catalog as YAML after a change: who, when, and the text to roll back to (CAT-5)."""

    number = models.IntegerField(unique=True)
    text = models.TextField()
    made_at = models.DateTimeField(auto_now_add=True)
    made_by = models.CharField(max_length=150)
    note = models.CharField(max_length=200, blank=True)

    class Meta:
        ordering = ["-number"]

    def __str__(self) -> str:
        return f"version {self.number}"
