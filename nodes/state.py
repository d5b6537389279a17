"""The frozen values that nodes, the gateway and the pages speak in. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A replica's leader as something a gateway can send to. `slots`: requests it serves at once."""

    replica: str
    node: str
    model: str
    profile: str
    engine: str
    host: str
    port: int | None
    slots: int
    state: str
    draining: bool
    lost: bool

    @property
    def usable(self) -> bool:
        return self.state == "ready" and not self.draining and not self.lost and self.port is not None
