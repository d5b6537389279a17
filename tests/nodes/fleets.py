"""Generated clusters, and what carrying a plan out makes of one: for properties that must hold of any."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import assert_never

from hypothesis import strategies as st

from agent.protocol import Build, Gpu, State
from catalog import spec
from nodes.expiry import Expired
from nodes.plans import BackOff, Drain, Forget, Join, Plan, Recover, Start, Stop
from nodes.state import At, Backoff, Cluster, Load, Node, Replica, Rules, Shard, Status, profile_digest

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
NODES = ("alpha", "bravo", "charlie", "delta")
STATES: tuple[State, ...] = ("fetching", "starting", "loading", "ready", "stopping", "stopped", "failed")

ages = st.integers(0, 900).map(lambda seconds: timedelta(seconds=seconds))
past = ages.map(lambda age: NOW - age)


def builds() -> st.SearchStrategy[tuple[Build, ...]]:
    good = Build(engine="llamacpp", name="xllamacpp", version="1")
    bad = Build(engine="llamacpp", name="cuda", version="1", usable=False, reason="no driver")
    return st.sampled_from([(good,), (good,), (good, bad), (bad,), ()])


@st.composite
def some_node(draw: st.DrawFn, name: str) -> Node:
    return Node(
        name=name,
        state=draw(st.sampled_from(["ready", "ready", "ready", "joining", "unreachable", "lost"])),
        cordoned=draw(st.sampled_from([False, False, True])),
        draining=draw(st.sampled_from([False, False, False, True])),
        disabled_engines=draw(st.sampled_from([frozenset[str](), frozenset({"llamacpp"})])),
        reserved_cores=draw(st.sampled_from([0, 1.5])),
        cores=draw(st.sampled_from([None, 1, 2, 8, 64])),
        memory_bytes=draw(st.sampled_from([None, 2 * 10**9, 64 * 10**9])),
        disk_bytes=draw(st.sampled_from([None, 10**10, 10**12])),
        disk_free_bytes=draw(st.sampled_from([None, 10**6, 10**11])),
        gpus=draw(st.sampled_from([(), (Gpu(uuid=f"GPU-{name}", index=0, name="L4", gpu_class="l4-22g"),)])),
        builds=draw(builds()),
        registered_at=draw(st.none() | past),
        last_seen_at=draw(st.none() | past),
    )


@st.composite
def some_model(draw: st.DrawFn, name: str) -> spec.Model:
    least = draw(st.integers(0, 3))
    profiles = tuple(
        spec.Profile(
            name=profile,
            engine="llamacpp",
            gpu_class=draw(st.sampled_from([None, None, None, "l4-22g"])),
            priority=draw(st.integers(0, 1)),
            reserved_cores=draw(st.sampled_from([0, 1, 3])),
            required_memory_gb=draw(st.sampled_from([None, 1, 40])),
            startup_timeout_s=draw(st.sampled_from([60, 1200])),
            args=draw(st.sampled_from([(), ("--flag",)])),
        )
        for profile in draw(st.sampled_from([(), ("cpu",), ("cpu", "other")]))
    )
    return spec.Model(
        name=name,
        source="/models/x.gguf",
        profiles=profiles,
        scaling=spec.Scaling(min=least, max=least + draw(st.integers(0, 2))),
        required_memory_gb=draw(st.sampled_from([None, 1])),
    )


@st.composite
def some_replica(draw: st.DrawFn, number: int, models: tuple[spec.Model, ...]) -> Replica:
    model = draw(st.sampled_from((*models, spec.Model("gone"))))
    profile = draw(st.sampled_from((*model.profiles, spec.Profile("gone", engine="llamacpp"))))
    state = draw(st.sampled_from(STATES))
    homes = draw(st.sampled_from([(name,) for name in NODES] + [()]))
    return Replica(
        name=f"replica{number}",
        model=model.name,
        profile=profile.name,
        profile_digest=draw(st.sampled_from([profile_digest(model, profile)] * 3 + ["old"])),
        made_at=draw(past),
        wanted=draw(st.sampled_from(["run", "run", "run", "drain", "stop"])),
        wanted_at=draw(st.none() | past),
        state=state,
        state_at=draw(st.none() | past),
        ready_at=draw(past) if state == "ready" else None,
        reason=draw(st.sampled_from(["", "out of memory"])),
        shards=tuple(Shard(node=home, state=state, cores=draw(st.sampled_from([1, 4]))) for home in homes),
        load=draw(st.none() | st.builds(Load, at=past, in_flight=st.sampled_from([None, 0, 3]))),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    models = tuple(draw(some_model(name)) for name in draw(st.sampled_from([("m",), ("m", "n"), ("m", "n", "o")])))
    named = [(model, profile) for model in models for profile in model.profiles]
    backoffs = draw(st.lists(st.sampled_from(named), unique_by=lambda p: (p[0].name, p[1].name))) if named else []
    return Cluster(
        nodes=tuple(draw(some_node(name)) for name in NODES[: draw(st.integers(0, len(NODES)))]),
        models=models,
        replicas=tuple(draw(some_replica(number, models)) for number in range(draw(st.integers(0, 6)))),
        backoffs=tuple(
            Backoff(
                model.name,
                profile.name,
                draw(st.sampled_from([profile_digest(model, profile), "old"])),
                failures=draw(st.integers(1, 9)),
                next_try_at=NOW + timedelta(seconds=draw(st.integers(-60, 60))),
                reason="out of memory",
            )
            for model, profile in backoffs
        ),
        statuses=tuple(Status(model.name, demand_at=draw(st.none() | past)) for model in models),
        rules=Rules(),
        since=draw(st.none() | past),
    )


def carried_out(cluster: Cluster, plan: Plan, now: datetime) -> Cluster:
    """The cluster after its plan, before any agent has reacted."""
    for action in plan.actions:
        match action:
            case Expired():
                cluster = replace(
                    cluster,
                    nodes=tuple(replace(n, state=action.state) if n.name == action.node else n for n in cluster.nodes),
                )
            case Start():
                started = Replica(
                    name=action.replica,
                    model=action.model.name,
                    profile=action.profile.name,
                    profile_digest=profile_digest(action.model, action.profile),
                    made_at=now,
                    wanted_at=now,
                    state_at=now,
                    shards=tuple(
                        Shard(part.node, part.rank, "waiting" if part.rank else "starting", part.cores, part.gpus)
                        for part in action.parts
                    ),
                )
                cluster = replace(cluster, replicas=(*cluster.replicas, started))
            case Join():
                cluster = _with_shards(cluster, action.replica, "starting")
            case Drain() | Stop():
                wanted = "drain" if isinstance(action, Drain) else "stop"
                cluster = _changed(cluster, action.replica, wanted=wanted, wanted_at=now)
                if wanted == "stop":
                    cluster = _with_shards(cluster, action.replica, "stopped")
            case Forget():
                kept = tuple(replica for replica in cluster.replicas if replica.name != action.replica)
                cluster = replace(cluster, replicas=kept)
            case BackOff():
                cluster = _without(cluster, action.backoff.model, action.backoff.profile, action.backoff.node)
                cluster = replace(cluster, backoffs=(*cluster.backoffs, action.backoff))
            case Recover():
                cluster = _without(cluster, action.model, action.profile, action.node)
            case _:
                assert_never(action)
    return cluster


def _changed(cluster: Cluster, name: str, **fields: object) -> Cluster:
    replicas = tuple(
        replace(replica, **fields) if replica.name == name else replica  # type: ignore[arg-type]
        for replica in cluster.replicas
    )
    return replace(cluster, replicas=replicas)


def _with_shards(cluster: Cluster, name: str, state: At) -> Cluster:
    """The shards that waited to be told have been told to start, or that they need not."""
    [replica] = [replica for replica in cluster.replicas if replica.name == name]
    shards = (replace(shard, state=state) if shard.state == "waiting" else shard for shard in replica.shards)
    return _changed(cluster, name, shards=tuple(shards))


def _without(cluster: Cluster, model: str, profile: str, node: str) -> Cluster:
    key = model, profile, node
    kept = tuple(held for held in cluster.backoffs if (held.model, held.profile, held.node) != key)
    return replace(cluster, backoffs=kept)
