"""The agent's watch of pods against a node full of the largest pods there are,
in a process of its own; prints how much it grew.

Run by test_large_pods.py: ``python -m tests.adversary.large_pods URL``.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import sys
import threading
import time
from pathlib import Path

from tests.cluster.scripted import QUICK
from vgpu_agent.cluster.client import ApiClient
from vgpu_agent.cluster.credentials import Access, Credentials
from vgpu_agent.cluster.watching import PodWatch
from vgpu_agent.journal import Journal
from vgpu_agent.pods import PodCache
from vgpu_agent.sim import with_constants


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class _Peak(threading.Thread):
    """Looks at the memory often; what is taken for milliseconds counts, too."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0

    def run(self) -> None:
        while True:
            self.bytes = max(self.bytes, _resident_bytes())
            time.sleep(0.002)


async def _measure(url: str, pods: int) -> dict[str, object]:
    api, book, journal = (
        ApiClient(Credentials(lambda: Access(url), "test")),
        PodCache(),
        Journal(),
    )
    watch = PodWatch(api, "n1", book, journal=journal)
    gc.collect()
    before, peak = _resident_bytes(), _Peak()
    peak.start()
    task = asyncio.ensure_future(watch.run(lambda: None))
    async with asyncio.timeout(60):
        await book.synced.wait()
        # the book tells of changes only while it has waiters
        while not any(pod.name == "last" for pod in book.pods):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await api.close()
    return {
        "grown_mib": (peak.bytes - before) >> 20,
        "pods": len(book.pods),
        "as_expected": len(book.pods) == pods + 1,
        "book_bytes": sum(pod.size_bytes for pod in book.pods),
        "unreadable": watch.status.unreadable,
    }


if __name__ == "__main__":
    with_constants.set_constants(QUICK)
    sys.stdout.write(json.dumps(asyncio.run(_measure(sys.argv[1], int(sys.argv[2])))) + "\n")
