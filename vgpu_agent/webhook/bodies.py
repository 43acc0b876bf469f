"""The bodies of reviews (``AdmissionReview`` requests), as they arrive.

A review that is too large must still be answered with status 200. To the API server any other
status is a failed call, and it then admits the pod unchecked if the failure policy is ``Ignore``.
The first bytes of the review are enough to refuse it.
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
        content: all of it. Of one that is too large, only the first `START_BYTES`, which are
            enough for a refusal.
        whole: the body was not too large.
        ended: the client has sent all of it.
    """

    content: bytes
    whole: bool = True
    ended: bool = True


class Bodies:
    """The reader of bodies of at most ``most_bytes``, each within ``seconds``.

    State: the slots. Each large body has one of them while it is read, so that only a few are read
    at once. They are shared fairly between the addresses of clients.
    """

    def __init__(self, *, most_bytes: int, seconds: float) -> None:
        self._most_bytes, self._seconds = most_bytes, seconds
        self._slots = Slots(LARGE_AT_ONCE)

    async def read(self, request: web.Request) -> Body:
        """Return the body of ``request``. The rest of a body that is too large is read and dropped,
        because a client may not read the answer before it has sent everything.

        Raises:
            TimeoutError: the body did not arrive in time. One that is known to be too large is
                returned instead.
        """
        body = bytearray()
        whole = True
        try:
            async with asyncio.timeout(self._seconds) as deadline:
                whole = await self._read_until_too_large(request, body, deadline)
                if not whole:
                    del body[START_BYTES:]
                    async for _ in request.content.iter_any():
                        pass
        except TimeoutError:
            if whole:
                raise
            return Body(bytes(body), whole=False, ended=False)
        return Body(bytes(body), whole=whole)

    async def _read_until_too_large(
        self, request: web.Request, body: bytearray, deadline: asyncio.Timeout
    ) -> bool:
        """Append to ``body`` until it is too large; tell whether it is complete. ``deadline`` is
        that of the caller, which ends at once if the slot is taken away for another client.
        """
        # only the start of a body that is declared too large is needed
        declared = request.content_length or 0
        most = START_BYTES if declared > self._most_bytes else self._most_bytes
        async with contextlib.AsyncExitStack() as slot:
            is_large = False
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > most:
                    return False
                # A declared size takes no memory, so only received bytes need a slot.
                if len(body) > _LARGE_BYTES and not is_large:
                    await slot.enter_async_context(self._slots.held(request.remote or "", deadline))
                    is_large = True
        return True
