"""An extender that decides nothing: it picks a Node by the pod's hash, and binds with one request.

The comparison of the benchmark's part `scheduler`, on the same HTTP libraries. It runs on asyncio's
own event loop, as it did when the limits were set; the real one runs on uvloop's.
usage: python -m tests.bench.empty_extender KUBECONFIG PORT
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from typing import Any

import msgspec
from aiohttp import web

from vgpu_agent.cluster.api import pod_path
from vgpu_agent.cluster.client import ApiClient
from vgpu_agent.cluster.credentials import from_place
from vgpu_agent.errors import AgentError

_MAX_BODY_BYTES = 7 * 1024 * 1024


class _Metadata(msgspec.Struct):
    uid: str = ""


class _Pod(msgspec.Struct):
    metadata: _Metadata


class _Filter(msgspec.Struct, rename="pascal"):
    pod: _Pod
    node_names: list[str]


class _Binding(msgspec.Struct):
    name: str = msgspec.field(name="PodName")
    namespace: str = msgspec.field(name="PodNamespace")
    node: str = msgspec.field(name="Node")
    uid: str = msgspec.field(name="PodUID")


async def main(kubeconfig: str, port: str) -> None:
    """Serve until killed."""
    credentials = from_place(kubeconfig=kubeconfig)
    assert credentials is not None
    client = ApiClient(credentials)

    async def pick(request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=_Filter)
        number = zlib.crc32(asked.pod.metadata.uid.encode()) % len(asked.node_names)
        return _answer({"NodeNames": [asked.node_names[number]], "FailedNodes": {}, "Error": ""})

    async def bind(request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=_Binding)
        try:
            await client.post(
                pod_path(asked.namespace, asked.name) + "/binding",
                {
                    "apiVersion": "v1",
                    "kind": "Binding",
                    "metadata": {
                        "name": asked.name,
                        "namespace": asked.namespace,
                        "uid": asked.uid,
                    },
                    "target": {"apiVersion": "v1", "kind": "Node", "name": asked.node},
                },
            )
        except AgentError as err:
            return _answer({"Error": str(err)})
        return _answer({"Error": ""})

    application = web.Application(client_max_size=_MAX_BODY_BYTES)
    application.router.add_post("/scheduler/filter", pick)
    application.router.add_post("/scheduler/bind", bind)
    application.router.add_get("/readyz", _ready)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(port)).start()
    await asyncio.Event().wait()


async def _ready(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")


def _answer(body: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
