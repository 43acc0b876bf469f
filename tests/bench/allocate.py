"""The Allocate client of the benchmark: its own process and a blocking channel, so that only the agent's work and the wire are timed."""

from __future__ import annotations

import json
import sys
import time

import grpc

from vgpu_agent.sim.protocol import deviceplugin_pb2 as messages


def main() -> None:
    """``python -m tests.bench.allocate SOCKET CALLS ID…``: print the seconds of each call as a JSON list."""
    path, calls, *ids = sys.argv[1:]
    requests = [messages.AllocateRequest(container_requests=[messages.ContainerAllocateRequest(device_ids=[id_])]) for id_ in ids]
    with grpc.insecure_channel(f"unix:{path}") as channel:
        call = channel.unary_unary(
            "/v1beta1.DevicePlugin/Allocate",
            request_serializer=messages.AllocateRequest.SerializeToString,
            response_deserializer=messages.AllocateResponse.FromString,
        )
        times = []
        for number in range(int(calls) + 100):
            began = time.perf_counter()
            call(requests[number % len(requests)], timeout=5)
            times.append(time.perf_counter() - began)
    json.dump(times[100:], sys.stdout)  # the first hundred warm both ends up


if __name__ == "__main__":
    main()
