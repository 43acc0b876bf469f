"""The bodies of reviews, as they arrive.

A review that is too large to be kept must be answered all the same: the API server takes any status
but 200 for a failed call, and then lets the pod pass unchecked where the failure policy is
``Ignore``. Its first bytes are enough for a refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.webhook.messages import START_BYTES
from vgpu_agent.webhook.slots import Slots

if TYPE_CHECKING:
    from aiohttp import web

# Larger bodies are read a few at a time, so that clients cannot fill the memory.
_LARGE_BYTES, LARGE_AT_ONCE = 256 * 1024, 4


class Body(msgspec.Struct, frozen=True):
    """The result of reading a body.

    Attributes:
        content: all of it, or its first `START_BYTES`.
        whole: it was not too large.
        ended: nothing of it is still to come.
    """

    content: bytes
    whole: bool = True
    ended: bool = True


class Bodies:
    """Reads bodies of at most ``most_bytes``, each within ``seconds``.

    State: the places of the large ones that are being read.
    """

    def __init__(self, *, most_bytes: int, seconds: float) -> None:
        self._most_bytes, self._seconds = most_bytes, seconds
        self._places = Slots(LARGE_AT_ONCE)

    async def read(self, request: web.Request) -> Body:
        """Return the body of ``request``. What is too much of it is read and dropped, since a
        client may not look at the answer before it has sent everything.

        Raises:
            TimeoutError: it did not arrive in time. One of which too much has arrived is returned.
        """
        body = bytearray()
        whole = True
        try:
            async with asyncio.timeout(self._seconds) as limit:
                whole = await self._kept(request, body, limit)
                if not whole:
                    del body[START_BYTES:]
                    async for _ in request.content.iter_any():
                        pass
        except TimeoutError:
            if whole:
                raise
            return Body(bytes(body), whole=False, ended=False)
        return Body(bytes(body), whole)

    async def _kept(self, request: web.Request, body: bytearray, limit: asyncio.Timeout) -> bool:
        """Append to ``body`` until there is too much; tell whether that is the whole of it."""
        # of one that is going to be too large, only the start is of use
        declared = request.content_length or 0
        most = START_BYTES if declared > self._most_bytes else self._most_bytes
        async with contextlib.AsyncExitStack() as place:
            is_large = False
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > most:
                    return False
                # What is only declared takes no memory, and so no place.
                if len(body) > _LARGE_BYTES and not is_large:
                    await place.enter_async_context(self._places.held(request.remote or "", limit))
                    is_large = True
        return True
