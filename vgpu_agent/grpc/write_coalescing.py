"""One send for what a gRPC answer consists of,
because each send wakes the other side up and costs a system call on both.

grpclib writes headers, message and trailers one after the other, and several calls may be answered
in one turn of the event loop. `grpc` gives every connection this in place of its transport.
"""

from __future__ import annotations

import asyncio
from typing import Any

# More than this is passed on at once: it fills a send anyway, and what waits here is not seen by
# the flow control.
_MAX_BYTES = 32 * 1024


class CoalescingTransport(asyncio.Transport):
    """Coalesces the writes of one turn of the event loop into one write to ``transport`` at the end
    of that turn.

    State: the data that was not passed on yet; nothing between turns.
    """

    def __init__(self, transport: asyncio.Transport, caller: object = None) -> None:
        """Write to ``transport``; ``caller`` is shown as the name of the peer, which a unix socket
        does not have.
        """
        super().__init__()
        self._transport = transport
        self._caller = caller
        self._call_soon = asyncio.get_running_loop().call_soon
        self._pieces: list[Any] = []
        self._bytes = 0

    def write(self, data: Any) -> None:
        """Send ``data``, a bytes-like object, soon."""
        if not self._pieces:
            self._call_soon(self._pass_on)
        self._pieces.append(data)
        self._bytes += len(data)
        if self._bytes > _MAX_BYTES:
            self._pass_on()

    def close(self) -> None:
        """Send the remaining data, then close."""
        self._pass_on()
        self._transport.close()

    def is_closing(self) -> bool:
        """Tell whether nothing more can be sent."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See `asyncio.BaseTransport.get_extra_info`."""
        if name == "peername" and self._caller is not None:
            return self._caller
        return self._transport.get_extra_info(name, default)

    def _pass_on(self) -> None:
        if self._pieces:
            pieces, self._pieces, self._bytes = self._pieces, [], 0
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
