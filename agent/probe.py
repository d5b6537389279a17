"""One question to an engine: is it up, does it list the served name, and is it ours that answers? (AG-15)"""

from __future__ import annotations

from collections.abc import Iterable

import httpx

from agent import process
from agent.engines.base import Engine
from agent.shards import Answer

CONNECT_S = 2.0
ANSWER_S = 5.0


def client() -> httpx.AsyncClient:
    # trust_env: a proxy of the environment must never get an engine's key.
    return httpx.AsyncClient(timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S), trust_env=False)


def base_url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


async def ask(
    http: httpx.AsyncClient,
    engine: Engine,
    *,
    address: str,
    port: int,
    served_name: str,
    key: str | None,
    ours: Iterable[int],
    thorough: bool,
) -> Answer:
    """`thorough` asks whose port it is and for the served name, as it takes to become ready; later health is enough."""
    if thorough and process.listens(address, port, ours) is False:
        return Answer.STRANGER
    url = base_url(address, port)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        health = await http.get(url + engine.health_path)
        if health.status_code != 200:
            return Answer.LOADING
        if not thorough:
            return Answer.SERVING
        models = await http.get(url + engine.models_path, headers=headers)
        if models.status_code != 200:
            return Answer.LOADING
        return Answer.SERVING if served_name in _names(models.json()) else Answer.UNNAMED
    except (httpx.ConnectError, httpx.ConnectTimeout):
        return Answer.REFUSED
    except (httpx.TransportError, ValueError):
        return Answer.SILENT


def _names(answer: object) -> set[str]:
    found: set[str] = set()
    listed = answer.get("data") if isinstance(answer, dict) else None
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, dict):
            found.add(str(entry.get("id")))
            aliases = entry.get("aliases")
            found |= set(map(str, aliases)) if isinstance(aliases, list) else set()
    return found
