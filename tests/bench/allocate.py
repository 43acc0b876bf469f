"""The Allocate client of the benchmark: its own process and a blocking channel, so that only the
agent's work and the wire are timed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc

from vgpu_agent.sim.protocol import deviceplugin_pb2 as messages

_SERVICE = "/v1beta1.DevicePlugin"


@dataclasses.dataclass(frozen=True)
class Timed:
    """One call; ``began`` is in `time.monotonic` seconds,
    which all processes of a machine share.
    """

    began: float
    seconds: float


async def timed_calls(
    socket: Path, asked: Sequence[Sequence[str]], *, warm: int = 0
) -> list[Timed]:
    """Run this program against the plugin on ``socket``:
    one call after the other, each for the next ids.

    Args:
        socket: the agent's.
        asked: the ids of each call.
        warm: how many of them are not counted, because they warm both ends up;
            GetDevicePluginOptions has opened the connection before.
    """
    program = [sys.executable, "-m", "tests.bench.allocate", str(socket)]
    text = json.dumps([list(ids) for ids in asked])
    answer = await asyncio.to_thread(
        subprocess.run, program, check=True, input=text, stdout=subprocess.PIPE, text=True
    )
    return [Timed(*each) for each in json.loads(answer.stdout)][warm:]


def main() -> None:
    """``python -m tests.bench.allocate SOCKET``: reads a JSON list of lists of ids, and prints
    [began, seconds] of each call.
    """
    requests = [
        messages.AllocateRequest(
            container_requests=[messages.ContainerAllocateRequest(device_ids=ids)]
        )
        for ids in json.load(sys.stdin)
    ]
    times = []
    with grpc.insecure_channel(f"unix:{sys.argv[1]}") as channel:
        options = channel.unary_unary(
            f"{_SERVICE}/GetDevicePluginOptions",
            request_serializer=messages.Empty.SerializeToString,
            response_deserializer=messages.DevicePluginOptions.FromString,
        )
        for _ in range(20):
            options(messages.Empty(), timeout=5)
        call = channel.unary_unary(
            f"{_SERVICE}/Allocate",
            request_serializer=messages.AllocateRequest.SerializeToString,
            response_deserializer=messages.AllocateResponse.FromString,
        )
        for request in requests:
            began = time.monotonic()
            call(request, timeout=5)
            times.append((began, time.monotonic() - began))
    json.dump(times, sys.stdout)


if __name__ == "__main__":
    main()
