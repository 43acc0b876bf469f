"""One send for all parts of a gRPC answer,
because each send wakes the other side up and costs a system call on both.

grpclib writes headers, message and trailers one after the other, and several calls may be answered
in one iteration of the event loop. `connection` replaces the transport of every connection with
this.
"""

from __future__ import annotations

import asyncio
from typing import Any

# More than this is passed on at once: it fills a send anyway, and the flow control does not see the
# data that waits here.
_MAX_BYTES = 32 * 1024


class CoalescingTransport(asyncio.Transport):
    """A transport that joins the writes of one iteration of the event loop into one write to
    ``transport`` at its end.

    State: the data that was not passed on yet; nothing between iterations.
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
