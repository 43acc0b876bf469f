"""The transport that gathers what is written in one turn of the loop,
so that an answer wakes the other side up once.
"""

from __future__ import annotations

import asyncio
from typing import Any

from vgpu_agent.grpc.connection import CoalescingTransport


async def test_what_is_written_in_one_turn_is_sent_at_once() -> None:
    """Headers, message and trailers of an answer wake the other side up once;
    long answers do not pile up.
    """
    sent: list[int] = []

    class Recording(asyncio.Transport):
        def write(self, data: Any) -> None:
            sent.append(len(data))

        def is_closing(self) -> bool:
            return False

        def close(self) -> None:
            sent.append(-1)

    gathering = CoalescingTransport(Recording())
    for piece in (b"ab", b"c", b"def"):
        gathering.write(piece)
    assert sent == []
    await asyncio.sleep(0)
    assert sent == [6]
    for _ in range(3):
        gathering.write(bytes(20_000))
    assert sent == [6, 40_000]
    gathering.close()
    assert sent == [6, 40_000, 20_000, -1]
