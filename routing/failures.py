"""How an endpoint can fail a request. Pure.

Apart from the code that raises them: attributes of a class and derived exceptions are what compiled modules lack.
"""

from __future__ import annotations


class UpstreamError(Exception):
    """The engine did not do its part. `counts`: whether it says something of the endpoint's health; `soft`: whether the
    endpoint answered all the same, so that it is better than none."""

    counts = True
    soft = False


class ConnectFailed(UpstreamError):
    """Nothing listens there, or it does not answer in time."""


class Broken(UpstreamError):
    """The connection was lost, or what came is not HTTP, before the answer was whole."""


class Silent(UpstreamError):
    """Nothing came within the limit."""


class Full(UpstreamError):
    """Every connection that an endpoint may have is in use."""

    counts = False


class Failed(UpstreamError):
    """The engine answered, with a status that says it could not."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"it answered {status}{': ' + said if said else ''}")
        self.status, self.soft = status, status not in (401, 403)
