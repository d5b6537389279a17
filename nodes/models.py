"""Nodes and what runs on them. Replica rows are a cache of what agents report; `wanted` fields are ours to write."""

from __future__ import annotations

from django.db import models
from django.utils import timezone

from nodes.state import Endpoint


class NodeState(models.TextChoices):
    JOINING = "joining"
    READY = "ready"
    UNREACHABLE = "unreachable"
    LOST = "lost"


class Node(models.Model):
    """A machine with an agent. All times are the control plane's."""

    name = models.SlugField(max_length=120, primary_key=True, help_text="The node id.")
    token_digest = models.CharField(max_length=64, unique=True, null=True, help_text="SHA-256 of its join token.")
    machine_id = models.CharField(max_length=64, blank=True)
    state = models.CharField(max_length=12, choices=NodeState.choices, default=NodeState.JOINING)
    cordoned_at = models.DateTimeField(null=True, blank=True)
    draining_at = models.DateTimeField(null=True, blank=True)
    address = models.CharField(max_length=255, blank=True, help_text="Where gateways reach its engines.")
    pinned_address = models.CharField(max_length=255, blank=True, help_text="By operators; it wins over its agent's.")
    labels = models.JSONField(default=dict, blank=True, help_text="What placement goes by: told by its agent, or set.")
    told_labels = models.JSONField(default=dict, blank=True, help_text="As its agent.yaml says.")
    set_labels = models.JSONField(default=dict, blank=True, help_text="By operators; they win.")
    disabled_engines = models.JSONField(default=list, blank=True)
    engine_builds = models.JSONField(
        default=dict, blank=True, help_text="By engine, the build that was chosen: auto, none, or its name."
    )
    reserved_cores = models.FloatField(default=0)
    agent_version = models.CharField(max_length=40, blank=True)
    inventory = models.JSONField(default=dict, help_text="agent.protocol.Inventory as registered.")
    load = models.JSONField(default=dict, help_text="agent.protocol.NodeLoad of the last stored heartbeat.")
    errands = models.JSONField(default=list, help_text="agent.protocol.Errand of the last stored heartbeat.")
    connection = models.CharField(max_length=64, blank=True, help_text="The stream that speaks for it now.")
    turns = models.JSONField(default=list, help_text="nodes.contest.Turn of the agents that spoke for it lately.")
    contested = models.CharField(max_length=400, blank=True, help_text="Who else came as it and was refused, in words.")
    contested_at = models.DateTimeField(null=True, blank=True)
    registered_at = models.DateTimeField(null=True, blank=True)
    last_seen_at = models.DateTimeField(null=True, blank=True)
    made_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class Certificate(models.Model):
    """One that the authority issued for a node and that still proves it. Revoked is what has no row."""

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="certificates")
    serial = models.CharField(max_length=40, primary_key=True, help_text="In hexadecimal.")
    made_at = models.DateTimeField(default=timezone.now)
    made_by = models.CharField(max_length=150)
    expires_at = models.DateTimeField()
    proved_at = models.DateTimeField(null=True, help_text="When a stream first came with it.")

    class Meta:
        ordering = ["-made_at"]

    def __str__(self) -> str:
        return f"{self.serial} of {self.node_id}"


class Wanted(models.TextChoices):
    RUN = "run"
    DRAIN = "drain"
    STOP = "stop"


class ReplicaQuerySet(models.QuerySet["Replica"]):
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Everything the gateway can send to now, plus replicas still on their way (state tells). One query."""
        shards = Shard.objects.filter(rank=0, replica__in=self).select_related("replica", "node")
        return tuple(
            Endpoint(
                replica=shard.replica_id,
                node=shard.node_id,
                model=shard.replica.model,
                profile=shard.replica.profile,
                engine=shard.replica.engine,
                host=shard.node.address,
                port=shard.port,
                slots=shard.replica.weight,
                state=shard.replica.state,
                draining=shard.replica.wanted != Wanted.RUN,
                lost=shard.node.state == NodeState.LOST,
                adapters=tuple(adapter["name"] for adapter in shard.replica.adapters),
                adapter_sources=tuple(adapter["source"] for adapter in shard.replica.adapters),
                max_loaded_adapters=shard.replica.max_loaded_adapters,
            )
            for shard in shards
        )


class Replica(models.Model):
    """One copy of a model. `wanted` is written by the reconcile pass, `state` by what agents report; never both."""

    name = models.CharField(max_length=120, primary_key=True)
    model = models.CharField(max_length=200, db_index=True)
    profile = models.CharField(max_length=80)
    profile_digest = models.CharField(max_length=64, help_text="Of model source and profile: a change rolls it.")
    engine = models.CharField(max_length=20)
    weight = models.IntegerField(default=1)
    adapters = models.JSONField(default=list, help_text="[{name, source}] that it was started with, in order.")
    max_loaded_adapters = models.IntegerField(null=True)
    wanted = models.CharField(max_length=6, choices=Wanted.choices, default=Wanted.RUN)
    wanted_at = models.DateTimeField(default=timezone.now)
    wanted_why = models.CharField(max_length=400, blank=True)
    state = models.CharField(max_length=12, default="starting", help_text="agent.protocol.State of the whole replica.")
    state_at = models.DateTimeField(default=timezone.now)
    reason = models.CharField(max_length=1000, blank=True)
    tail = models.TextField(blank=True, help_text="The engine's last lines when it failed.")
    made_at = models.DateTimeField(default=timezone.now)
    ready_at = models.DateTimeField(null=True, blank=True)

    objects = ReplicaQuerySet.as_manager()

    class Meta:
        ordering = ["made_at", "name"]

    def __str__(self) -> str:
        return self.name


class Shard(models.Model):
    """The part of a replica on one node, as its agent last reported it."""

    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="shards")
    rank = models.IntegerField(default=0)
    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="shards")
    gpus = models.JSONField(default=list, help_text="UUIDs of its cards.")
    cores = models.FloatField(default=0, help_text="CPU cores it is counted with.")
    state = models.CharField(max_length=12, default="starting")
    port = models.IntegerField(null=True)
    rendezvous = models.IntegerField(null=True, help_text="Where a leader awaits the other ranks, once it listens.")
    fabric = models.CharField(max_length=120, blank=True, help_text="What it reaches the other shards over.")
    pid = models.IntegerField(null=True)
    progress = models.JSONField(default=dict, help_text="Stage, bytes done and total, as reported.")
    reason = models.CharField(max_length=1000, blank=True)
    changed_at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["replica", "rank"], name="one_shard_per_rank")]

    def __str__(self) -> str:
        return f"{self.replica_id} rank {self.rank}"


class Command(models.Model):
    """Something an agent is to do: stored, sent until acknowledged, applied once (ND-3)."""

    id = models.BigAutoField(primary_key=True)
    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="commands")
    replica = models.CharField(max_length=120, blank=True, db_index=True, help_text="The one it is about, if any.")
    body = models.JSONField(help_text="agent.protocol command body, tagged, without engine keys.")
    traceparent = models.CharField(max_length=55, blank=True, help_text="Of the decision that it comes from.")
    made_at = models.DateTimeField(default=timezone.now)
    sent_at = models.DateTimeField(null=True)
    acknowledged_at = models.DateTimeField(null=True)
    ok = models.BooleanField(null=True)
    error = models.CharField(max_length=1000, blank=True)

    class Meta:
        indexes = [models.Index(fields=["node", "acknowledged_at"])]

    def __str__(self) -> str:
        return f"{self.pk} to {self.node_id}"


class Event(models.Model):
    """One line of the timeline, in words an operator understands (ND-48)."""

    at = models.DateTimeField(default=timezone.now, db_index=True)
    kind = models.CharField(max_length=40)
    model = models.CharField(max_length=200, blank=True, db_index=True)
    replica = models.CharField(max_length=120, blank=True, db_index=True)
    node = models.CharField(max_length=120, blank=True, db_index=True)
    text = models.CharField(max_length=1000)

    class Meta:
        ordering = ["-at", "-pk"]

    def __str__(self) -> str:
        return self.text


class Backoff(models.Model):
    """How often a profile of a model failed in a row, and when it is tried again (ND-42)."""

    model = models.CharField(max_length=200)
    profile = models.CharField(max_length=80)
    node = models.CharField(max_length=120, blank=True, help_text="Where its starts failed; empty: anywhere.")
    profile_digest = models.CharField(max_length=64, help_text="Of what failed: a changed profile is tried at once.")
    failures = models.IntegerField(default=0)
    next_try_at = models.DateTimeField()
    reason = models.CharField(max_length=1000, blank=True)
    tail = models.TextField(blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["model", "profile", "node"], name="one_backoff_per_profile_and_node")
        ]

    def __str__(self) -> str:
        where = f" on {self.node}" if self.node else ""
        return f"{self.model}/{self.profile}{where} after {self.failures}"


class ModelStatus(models.Model):
    """What the last pass could not do for a model and why; when it was last asked for and last used."""

    model = models.CharField(max_length=200, primary_key=True)
    reasons = models.JSONField(default=list, help_text="Of the last failed placement, line by line.")
    reasons_at = models.DateTimeField(null=True)
    demand_at = models.DateTimeField(null=True)
    used_at = models.DateTimeField(null=True)

    class Meta:
        verbose_name_plural = "model statuses"

    def __str__(self) -> str:
        return self.model


class ReplicaLoad(models.Model):
    """What one gateway sees of a replica's load. `None` is unknown, never idle. Written every few seconds."""

    gateway = models.CharField(max_length=120)
    replica = models.CharField(max_length=120, db_index=True)
    in_flight = models.IntegerField(default=0)
    running = models.IntegerField(null=True)
    waiting = models.IntegerField(null=True)
    kv_used = models.FloatField(null=True)
    at = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["gateway", "replica"], name="one_load_per_gateway_and_replica")]

    def __str__(self) -> str:
        return f"{self.replica} seen by {self.gateway}"
