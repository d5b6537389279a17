"""A gateway's limiter and share in a process of its own: `python -m tests.routing.sharing_process URL KEY REQUESTS`.

Says `ready`, waits for a line, makes its requests at once, says how many passed, and holds them until it is ended.
"""

from __future__ import annotations

import asyncio
import sys

from routing.limits import Limiter
from routing.over import Over
from routing.sharing import Share
from tests.routing.shared_limits import GRANTS, adopt, reserve


async def main(url: str, key: str, requests: int) -> None:
    limiter = Limiter()
    adopt(limiter)
    share = Share(url)
    await share.start(limiter)
    grant = next(grant for grant in GRANTS if grant.digest == key)
    loop = asyncio.get_running_loop()
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    found = await asyncio.gather(*(reserve(limiter, share, grant) for _ in range(requests)), return_exceptions=True)
    refused = [each for each in found if isinstance(each, Over)]
    print(len(found) - len(refused), flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
