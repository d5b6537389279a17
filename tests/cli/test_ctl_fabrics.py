"""`llmgw ctl fabrics` against a real server on a real port."""

from __future__ import annotations

import json

from tests.cli.conftest import Ctl
from tests.pages import machines


def test_fabrics_are_listed_with_what_does_not_agree_and_ports_when_asked_for(llmgw: Ctl) -> None:
    assert "No node declares a fabric. Name them in agent.yaml" in llmgw("ctl", "fabrics").output
    machines.make_fleet()
    found = llmgw("ctl", "fabrics")
    assert found.exit_code == 0, found.output
    lines = [line.split() for line in found.output.splitlines()]
    assert ["ib-east", "down", "0", "of", "1", "InfiniBand", "–"] in [line[:7] for line in lines]
    assert ["ib0", "up", "3", "of", "3", "InfiniBand", "400"] in [line[:7] for line in lines]
    assert "  ib0: One name over 2 subnet managers" in found.output
    assert "  ib-east: gpu-04: adapter mlx5_1 has no ACTIVE port: port 1 is INIT" in found.output
    assert "mlx5_9" not in found.output
    spare = llmgw("ctl", "fabrics", "none").output
    assert spare.count("network 10.0.0.0/24 on ens1f0np0") == 4
    assert "No port is in ib9." in llmgw("ctl", "fabrics", "ib9").output
    told = json.loads(llmgw("ctl", "fabrics", "ib0", "--json").output)
    assert {port["fabric"] for port in told["ports"]} == {"ib0"}
