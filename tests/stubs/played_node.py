"""The agent as its own program on a machine whose cards and network adapter are played; everything else is real.

Run as `python -m tests.stubs.played_node AGENT_YAML CARDS`: so many H100s, and mlx5_0 on InfiniBand.
"""

from __future__ import annotations

import sys
from pathlib import Path

from agent.config import AgentSettings, load
from agent.discovery.cards import GIB, Card, Cards
from agent.hardware import Hardware
from agent.main import run
from agent.protocol import AdapterPort, RdmaAdapter

GPU_CLASS = "h100-80g"
LINK = AdapterPort(number=1, state="ACTIVE", rate_gbit_s=400.0, link_layer="InfiniBand")


def hardware(settings: AgentSettings, cards: int) -> Hardware:
    found = tuple(
        Card(
            uuid=f"GPU-{settings.node}-{index}",
            index=index,
            name="NVIDIA H100 80GB HBM3",
            memory_bytes=80 * GIB,
            compute_capability="9.0",
        )
        for index in range(cards)
    )
    adapter = RdmaAdapter(name="mlx5_0", ports=(LINK,))
    return Hardware(settings.fabrics, cards=lambda: Cards(found, driver="580.65"), adapters=lambda: (adapter,))


if __name__ == "__main__":
    told = load(Path(sys.argv[1]))
    sys.exit(run(told, hardware(told, int(sys.argv[2]))))
