"""A device plugin that does nothing: it offers ids, agrees to every Allocate with an empty answer,
and asks for no pre-start.

Run as a process by test_volcano_speed: ``python -m tests.real_node.idle_plugin KUBELET_DIR
OFFERS``; OFFERS is JSON, resource → prefix → number of ids. What pods cost with it is what so many
ids cost kubelet and the API server; no plugin can be quicker. It writes a line ``listed`` when the
kubelet has read the ids of a resource. It shares no code with the agent, and it ends by any signal.
`former_plugin` answers with more.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from vgpu_agent.sim.protocol import deviceplugin_pb2 as messages

_SERVICE = "v1beta1.DevicePlugin"
_KUBELET_SECONDS = 10.0
Answer = Callable[[Sequence[str]], messages.ContainerAllocateResponse]


def _list_and_watch(offers: Mapping[str, int]) -> Iterator[messages.ListAndWatchResponse]:
    """All ids, once; then the stream stays open for ever."""
    ids = (f"{prefix}{number}" for prefix, count in offers.items() for number in range(count))
    yield messages.ListAndWatchResponse(
        devices=[messages.Device(id=id_, health="Healthy") for id_ in ids]
    )
    print("listed", flush=True)  # noqa: T201 - for the program that waits for it
    threading.Event().wait()


def _allocate(request: messages.AllocateRequest, answer: Answer) -> messages.AllocateResponse:
    return messages.AllocateResponse(
        container_responses=[answer(each.device_ids) for each in request.container_requests]
    )


def _nothing(_ids: Sequence[str]) -> messages.ContainerAllocateResponse:
    return messages.ContainerAllocateResponse()


def _server(socket: Path, offers: Mapping[str, int], answer: Answer) -> grpc.Server:
    """Serves one resource."""
    handlers = {
        "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(
            lambda _request, _context: messages.DevicePluginOptions(),
            request_deserializer=messages.Empty.FromString,
            response_serializer=messages.DevicePluginOptions.SerializeToString,
        ),
        "ListAndWatch": grpc.unary_stream_rpc_method_handler(
            lambda _request, _context: _list_and_watch(offers),
            request_deserializer=messages.Empty.FromString,
            response_serializer=messages.ListAndWatchResponse.SerializeToString,
        ),
        "Allocate": grpc.unary_unary_rpc_method_handler(
            lambda request, _context: _allocate(request, answer),
            request_deserializer=messages.AllocateRequest.FromString,
            response_serializer=messages.AllocateResponse.SerializeToString,
        ),
    }
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    socket.unlink(missing_ok=True)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    return server


def _register(kubelet: Path, endpoint: str, resource: str) -> None:
    with grpc.insecure_channel(
        f"unix:{kubelet}", options=[("grpc.default_authority", "localhost")]
    ) as channel:
        call = channel.unary_unary(
            "/v1beta1.Registration/Register",
            request_serializer=messages.RegisterRequest.SerializeToString,
            response_deserializer=messages.Empty.FromString,
        )
        asked = messages.RegisterRequest(
            version="v1beta1",
            endpoint=endpoint,
            resource_name=resource,
            options=messages.DevicePluginOptions(),
        )
        call(asked, timeout=_KUBELET_SECONDS)


def serve(
    kubelet_directory: str, offers: str, *, answer: Answer = _nothing, sockets: str = "idle"
) -> None:
    """Serve until the process is ended; ``sockets`` is how their names begin."""
    directory = Path(kubelet_directory, "device-plugins")
    servers = []
    for resource, ids in json.loads(offers).items():
        endpoint = f"{sockets}-{resource.rpartition('/')[2]}.sock"
        servers.append(_server(directory / endpoint, ids, answer))
        _register(directory / "kubelet.sock", endpoint, resource)
    threading.Event().wait()


if __name__ == "__main__":
    serve(*sys.argv[1:])
