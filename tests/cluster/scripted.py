"""Shared parts of the tests of lists and watches:
objects as JSON, and a source that answers by a script.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from typing import Any

import msgspec

from tests import constants
from tests.patience import PATIENCE_SECONDS
from vgpu_agent.errors import ClusterError

QUICK = {
    constants.API_CONNECT_TIMEOUT: PATIENCE_SECONDS,
    constants.API_REQUEST_TIMEOUT: PATIENCE_SECONDS,
    constants.API_WATCH: 60.0,
    constants.API_WATCH_SILENCE: PATIENCE_SECONDS,
    constants.API_BACKOFF_MIN: 0.01,
    constants.API_BACKOFF_MAX: 0.05,
}


# Does not wait for an answer; only for tests in which none comes.
IMPATIENT = QUICK | {constants.API_REQUEST_TIMEOUT: 0.2, constants.API_WATCH_SILENCE: 0.1}


def json_pod(name: str, version: int = 1, **more: Any) -> dict[str, Any]:
    """A pod of node n1, as JSON."""
    metadata = {
        "name": name,
        "namespace": "default",
        "uid": f"uid-{name}",
        "resourceVersion": str(version),
    }
    return {
        "metadata": metadata,
        "spec": {"nodeName": "n1", "containers": [{"name": "main"}]},
        **more,
    }


def json_list(*items: Mapping[str, Any], version: int = 100, token: str = "") -> bytes:
    """One page of a list."""
    return msgspec.json.encode(
        {"metadata": {"resourceVersion": str(version), "continue": token}, "items": list(items)}
    )


def json_event(kind: str, thing: Mapping[str, Any]) -> bytes:
    """One line of a watch."""
    return msgspec.json.encode({"type": kind, "object": thing})


class Script:
    """A source that follows a script, one step for each list and each watch;
    then watches are silent.

    A step of ``lists`` is an answer or an error. A step of ``watches`` is a list of lines, an error
    among them raised in its place, and None at the end for a watch that stays open.
    """

    def __init__(self) -> None:
        self.lists: list[bytes | ClusterError] = []
        self.watches: list[Iterable[bytes | ClusterError | None]] = []
        self.lasting_seconds = 0.0  # how long a watch stays open after its last line
        self.asked: list[tuple[float, dict[str, str]]] = []

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> bytes:
        """The next list."""
        self.asked.append((asyncio.get_running_loop().time(), dict(params or {})))
        answer = self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]
        if isinstance(answer, ClusterError):
            raise answer
        return answer

    async def chunks(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """The next list, in two pieces."""
        body = await self.get(path, params)
        yield body[: len(body) // 2]
        yield body[len(body) // 2 :]

    async def lines(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """The next watch."""
        self.asked.append((asyncio.get_running_loop().time(), dict(params)))
        for step in self.watches.pop(0) if self.watches else [None]:
            if step is None:
                await asyncio.Event().wait()
            elif isinstance(step, ClusterError):
                raise step
            else:
                yield step
        await asyncio.sleep(self.lasting_seconds)

    @property
    def watched_from(self) -> list[str]:
        """The versions from which watches were begun."""
        return [params["resourceVersion"] for _, params in self.asked if "watch" in params]

    @property
    def pauses(self) -> list[float]:
        """Seconds between one request and the next."""
        times = [at for at, _ in self.asked]
        return [round(later - earlier, 3) for earlier, later in itertools.pairwise(times)]


@contextlib.asynccontextmanager
async def running(loop: Callable[[Callable[[], None]], Any]) -> AsyncIterator[None]:
    """Run a loop beside the test."""
    task = asyncio.ensure_future(loop(lambda: None))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], object], *, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(seconds):
        # what is waited for happens in a server that knows nothing of this test
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
