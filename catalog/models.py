"""The catalog's rows. `Model.objects.snapshot()` is the only bridge from them to the values of catalog.spec."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from django.db import models

from catalog import spec


class ModelQuerySet(models.QuerySet["Model"]):
    def snapshot(self) -> tuple[spec.Model, ...]:
        """The whole catalog in its order of declaration. Two queries."""
        rows = list(self.order_by("position", "pk"))
        profiles: dict[int, list[Profile]] = defaultdict(list)
        for profile in Profile.objects.filter(model__in=rows):
            profiles[profile.model_id].append(profile)
        return tuple(row.spec(profiles[row.pk]) for row in rows)


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

    def spec(self, profiles: Iterable[Profile] | None = None) -> spec.Model:
        """`profiles`: its own, if they have been read already."""
        own = self.profiles.all() if profiles is None else profiles
        return spec.Model(
            name=self.name,
            aliases=tuple(self.aliases),
            source=self.source,
            profiles=tuple(profile.spec() for profile in own),
            scaling=spec.Scaling(min=self.scaling_min, max=self.scaling_max, idle_timeout_s=self.idle_timeout_s),
            fallbacks=tuple(self.fallbacks),
            routing_profile=self.routing_profile,
            slo=spec.Slo(ttft_p99_ms=self.ttft_p99_ms, tpot_p99_ms=self.tpot_p99_ms),
            band=self.band,
            required_memory_gb=self.required_memory_gb,
            external=spec.External(**self.external) if self.external else None,
            adapters=tuple(spec.Adapter(**adapter) for adapter in self.adapters),
            team=self.team,
        )


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

    def spec(self) -> spec.Profile:
        return spec.Profile(
            name=self.name,
            engine=self.engine,
            gpu_class=self.gpu_class or None,
            tp=self.tp,
            pp=self.pp,
            nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            args=tuple(self.args),
            env=tuple(sorted(self.env.items())),
            weight=self.weight,
            priority=self.priority,
            startup_timeout_s=self.startup_timeout_s,
            reserved_cores=self.reserved_cores,
            required_memory_gb=self.required_memory_gb,
            launch_mode=self.launch_mode,
            capacity_class=self.capacity_class,
            max_loaded_adapters=self.max_loaded_adapters,
            min_disk_gb=self.min_disk_gb,
            labels=tuple(sorted(self.labels.items())),
            only_nodes=tuple(self.only_nodes),
            metrics=spec.Metrics(**{key: tuple(names) for key, names in self.metrics.items()}),
        )


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
