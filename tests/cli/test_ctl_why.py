"""The words of `llmgw why` and of the lists, for states that a small test cluster does not reach."""

from __future__ import annotations

from typing import Any

import pytest

from llmgw.cli import ctl_show
from llmgw.cli.why import explain

NOW = "2026-11-29T12:00:00Z"
MODEL: dict[str, Any] = {
    "now": NOW,
    "name": "m",
    "state": "cannot run",
    "ready": 0,
    "wanted": 1,
    "slots": 0,
    "in_flight": None,
    "waiting": None,
    "note": "no node has room",
    "why_not": ["box: needs h100-80g, has none"],
    "next_try_at": "2026-11-29T12:00:40Z",
    "waits": [
        {"profile": "p", "node": "box", "failures": 1, "next_try_at": "2026-11-29T12:00:40Z", "reason": "no room"},
        {"profile": "q", "node": "", "failures": 3, "next_try_at": NOW, "reason": "no driver"},
    ],
}
NODE: dict[str, Any] = {
    "now": NOW,
    "name": "box",
    "state": "lost",
    "last_seen_at": None,
    "cordoned": False,
    "draining": True,
    "replicas": 2,
    "cores": None,
    "cores_used": 1.5,
    "memory_bytes": None,
    "memory_used_bytes": None,
    "cpu_percent": None,
    "disk_free_bytes": None,
    "engines": [],
    "gpus": 8,
    "gpus_used": 5,
    "gpus_free": 2,
    "gpus_faulty": 1,
    "gpus_note": "card 3: ECC",
    "files": 0,
}
REPLICA: dict[str, Any] = {
    "now": NOW,
    "name": "r",
    "model": "m",
    "profile": "p",
    "engine": "vllm",
    "state": "loading",
    "note": "12 s of about 40 s",
    "node": "",
    "made_at": NOW,
    "ready_at": None,
    "in_flight": None,
    "slots": 4,
    "waiting": None,
    "tail": "",
}


def test_a_try_that_is_due_is_not_said_to_be_past() -> None:
    assert "  next try at once" in list(explain("model", {**MODEL, "next_try_at": NOW}, []))


def test_a_model_that_cannot_run_says_what_each_node_lacks_and_when_it_is_tried_again() -> None:
    assert list(explain("model", MODEL, [])) == [
        "Model m: cannot run. 0 of 1 wanted replicas are ready.",
        "  no node has room",
        "  next try in 40 s",
        "Where it is left alone after failures:",
        "  p waits on node box after 1 failure, next try in 40 s, at 12:00:40 UTC: no room",
        "  q waits everywhere after 3 failures in a row, next try at once: no driver",
        "Where it was not placed:",
        "  box: needs h100-80g, has none",
    ]


def test_a_lost_node_says_what_is_known_and_no_more() -> None:
    assert list(explain("node", NODE, [{"at": NOW, "text": "Node box is lost"}])) == [
        "Node box: lost. Last heard never.",
        "  It is being drained: its replicas move. Undo: llmgw ctl uncordon box",
        "  2 replicas, 1.5 of – cores counted",
        "  engines: none usable",
        "  1 of 8 cards are faulty",
        "What happened last:",
        "  just now: Node box is lost",
    ]


def test_a_replica_on_its_way_says_how_far_it_is() -> None:
    assert list(explain("replica", REPLICA, [])) == [
        "Replica r of m (p, vllm): loading.",
        "  12 s of about 40 s",
        "  on no node, made just now, not ready yet",
        "  – of 4 slots in use, – waiting in the engine",
    ]


def test_lists_print_unknown_as_unknown_and_reasons_below(capsys: pytest.CaptureFixture[str]) -> None:
    now = ctl_show.moment(NOW)
    assert now is not None
    ctl_show.nodes([NODE], now)
    ctl_show.models([MODEL], now)
    out = capsys.readouterr().out
    assert "8: 5 used, 2 free, 1 faulty" in out
    assert "1.5 of –" in out
    assert "  m: box: needs h100-80g, has none" in out


def test_external_models_and_notices_have_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    ctl_show.catalog([{"name": "x", "external": {"url": "https://provider.example/v1", "model": "g"}}])
    notice = {"model": "x", "field": "fallbacks", "text": "It falls back on itself."}
    ctl_show.applied({"version": 2, "added": [], "changed": ["x"], "removed": [], "notices": [notice]})
    assert capsys.readouterr().out.splitlines() == [
        "x  min 0  max 0",
        "  external  https://provider.example/v1",
        "changed: x",
        "The catalog is at version 2.",
        "Note: model x: fallbacks: It falls back on itself.",
    ]
