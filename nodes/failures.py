"""What failures teach: which profiles are left alone for how long and where, and when that is forgotten. Pure (ND-42).

1. A start that failed is held against the node that it failed on, so that another one is tried.
2. Starts that failed on two nodes while none serves, and an engine that broke once it had served, are held against the
   profile everywhere.
3. Health, a change of the profile, the node's removal and a long time without a try end it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from nodes import backoff
from nodes.outlook import View
from nodes.plans import BackOff, Recover
from nodes.state import Backoff, Replica

FORGOTTEN = timedelta(hours=1)
"""How long after its next try was due a failure still tells something about the next one."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A replica that failed, which its profile is to be left alone for."""

    replica: Replica
    reason: str


Key = tuple[str, str, str]
"""Model, profile, and the node, which is empty for everywhere."""


def back_off(view: View, failed: Iterable[Failed]) -> tuple[BackOff, ...]:
    """One more failure for every profile under which a replica failed; a replaced profile's failures do not count."""
    before = {(held.model, held.profile, held.node): held for held in view.cluster.backoffs}
    found: dict[Key, Failed] = {}
    for each in failed:
        model, profile = each.replica.model, each.replica.profile
        if view.digests.get((model, profile)) == each.replica.profile_digest:
            found.setdefault((model, profile, _blamed(each.replica)), each)
    for (model, profile, node), each in list(found.items()):
        if node and _fails_elsewhere(model, profile, node, found, view):
            found.setdefault((model, profile, ""), each)
    return tuple(_step(key, each, before.get(key), view) for key, each in sorted(found.items(), key=lambda one: one[0]))


def _blamed(replica: Replica) -> str:
    """The node that a start failed on: the one whose shard did, else the leader's. Empty once the replica served."""
    if replica.ready_at is not None:
        return ""
    return next((shard.node for shard in replica.shards if shard.state == "failed"), replica.shards[0].node)


def _fails_elsewhere(model: str, profile: str, node: str, found: Iterable[Key], view: View) -> bool:
    digest = view.digests[model, profile]
    if any(r.state == "ready" and (r.model, r.profile_digest) == (model, digest) for r in view.cluster.replicas):
        return False
    known = {(h.model, h.profile, h.node) for h in view.cluster.backoffs if h.profile_digest == digest}
    return any(key[:2] == (model, profile) and key[2] not in ("", node) for key in (*known, *found))


def _step(key: Key, failed: Failed, held: Backoff | None, view: View) -> BackOff:
    model, profile, node = key
    digest = failed.replica.profile_digest
    failures = held.failures + 1 if held and held.profile_digest == digest else 1
    next_try_at = view.now + backoff.delay(failures, backoff.jitter_of(*key, str(failures)))
    again = f"is tried again at {next_try_at:%H:%M:%S} UTC" + (f" on node {node}" if node else "")
    why = f"model {model} ({profile}) {again}, failure {failures}: {failed.reason}"
    return BackOff(
        Backoff(model, profile, digest, failures, next_try_at, failed.reason, failed.replica.tail, node), why
    )


def recoveries(view: View, failed: Sequence[BackOff]) -> tuple[Recover, ...]:
    failing = {(each.backoff.model, each.backoff.profile, each.backoff.node) for each in failed}
    healthy = {
        (replica.model, replica.profile, node)
        for replica in view.cluster.replicas
        if replica.state == "ready" and replica.ready_at and view.now - replica.ready_at >= backoff.HEALTHY
        for node in ("", *(shard.node for shard in replica.shards))
    }
    found = []
    for held in view.cluster.backoffs:
        key = held.model, held.profile, held.node
        because = _over(held, view) or ("is healthy again" if key in healthy else "")
        if because and key not in failing:
            where = f" on node {held.node}" if held.node else ""
            found.append(Recover(held.model, held.profile, f"model {key[0]} ({key[1]}) {because}{where}", held.node))
    return tuple(found)


def _over(held: Backoff, view: View) -> str:
    """Why earlier failures say nothing any more, whether or not it works now."""
    if view.digests.get((held.model, held.profile)) != held.profile_digest:
        return "is tried afresh, as it changed,"
    if held.node and held.node not in view.nodes:
        return "is tried afresh, as the node was removed,"
    if view.now - held.next_try_at >= FORGOTTEN:
        return "has not been tried for long, and is tried afresh"
    return ""
