"""A tenant fills a node with the largest pods that the API server takes,
and wants the agent killed for its memory.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from typing import Any

import msgspec
import pytest

from tests.adversary.api_server_parts import CHUNKED, send_chunk, served
from tests.cluster.scripted import json_event, json_pod
from vgpu_agent.cluster import decode
from vgpu_agent.families.pod_annotations import ANNOTATIONS
from vgpu_agent.pods import MAX_BYTES, Pod, PodCache, PodContainer

PODS, ENDED = 110, 200
MAX_GROWN_MIB = 40
MAX_MEMORY_BYTES = 4 << 30


def _large(name: str, kind: int) -> bytes:
    """A pod of about 1.5 MiB; of what, is another thing each time."""
    long = "volcano.sh/vgpu-ids-new"
    thing = json_pod(name, 7)
    thing["metadata"]["annotations"] = {
        long: "é" * 60_000,
        "nvidia.com/use-gputype": "😀" * 30_000,
        "of/others": "x" * 1000,
    }
    thing["metadata"]["labels"] = {f"l{each}": "x" * 63 for each in range(1000)}
    container: dict[str, Any] = {
        "name": "main",
        "resources": {"limits": {"volcano.sh/vgpu-number": "1"}},
    }
    thing["spec"]["containers"] = [container]
    match kind:
        case 0:
            container["env"] = [
                {"name": f"CUDA_{each}", "value": '{}\\"' * 8} for each in range(12_000)
            ]
        case 1:
            thing["metadata"]["managedFields"] = [
                {"fieldsV1": {f"f:{each}": {".": {}, "f:x": {}} for each in range(30_000)}}
            ]
        case 2:
            container["resources"]["limits"] |= {
                f"a{each}.example.com/{'r' * 40}": "1" for each in range(14_000)
            }
        case 3:
            thing["spec"]["containers"] += [
                {
                    "name": f"c{each}",
                    "image": "x" * 30,
                    "resources": {"limits": {"volcano.sh/vgpu-number": "1"}},
                }
                for each in range(8_000)
            ]
        case _:
            thing["metadata"]["annotations"]["filler"] = "y" * 200_000
            thing["status"] = {
                "containerStatuses": [{"name": "main", "restartCount": 1, "image": "z" * 900_000}]
            }
    return json.dumps(thing).encode()


async def test_a_tenant_cannot_kill_the_agent_with_110_pods_of_the_largest_size() -> None:
    """A list from the API server's cache has no pages, so all of it comes at once;
    ended pods come only when they are asked for.
    """
    kinds = [_large("kind", kind) for kind in range(5)]
    asked: list[bytes] = []

    async def serve(writer: asyncio.StreamWriter, request: bytes) -> None:
        asked.append(request.split(b"\r\n")[0])
        writer.write(CHUNKED)
        if b"watch=true" in request:
            for number in range(20):
                line = b'{"type":"MODIFIED","object":%s}\n' % kinds[number % 5].replace(
                    b'"kind"', b'"p%d"' % number, 1
                )
                await send_chunk(writer, line.replace(b"uid-kind", b"uid-%d" % number, 1))
            await send_chunk(writer, json_event("ADDED", json_pod("last", 8)) + b"\n")
            await asyncio.Event().wait()
        await send_chunk(writer, b'{"kind":"PodList","metadata":{"resourceVersion":"7"},"items":[')
        selected = PODS if b"status.phase" in asked[-1] else PODS + ENDED
        for number in range(selected):
            thing = (
                kinds[number % 5]
                .replace(b'"kind"', b'"p%d"' % number, 1)
                .replace(b"uid-kind", b"uid-%d" % number, 1)
            )
            await send_chunk(writer, (b"," if number else b"") + thing)
        await send_chunk(writer, b"]}")
        writer.write(b"0\r\n\r\n")

    async with served(serve) as url:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.adversary.large_pods",
            url,
            str(PODS),
            stdout=asyncio.subprocess.PIPE,
            preexec_fn=lambda: resource.setrlimit(
                resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES)
            ),
        )
        out, _ = await child.communicate()
    assert child.returncode == 0
    found = json.loads(out)
    assert found["as_expected"], found
    assert found["unreadable"] == 0
    assert found["grown_mib"] < MAX_GROWN_MIB, found
    assert b"status.phase!%3DSucceeded" in asked[0] or b"status.phase!=Succeeded" in asked[0]


@pytest.mark.parametrize("kind", range(5))
def test_a_tenant_cannot_make_one_pod_take_more_than_its_share(kind: int) -> None:
    """About a hundred KiB of 1.5 MiB stay, and all that families need of an honest pod is there."""
    pod = decode.pod(_large("p", kind))
    assert pod.size_bytes < 128 * 1024
    assert pod.containers[0].limits["volcano.sh/vgpu-number"] == 1
    assert pod.annotations.keys() <= set(ANNOTATIONS)


def test_the_names_of_variables_count_towards_the_size_of_a_pod() -> None:
    """Each container may set some hundred that concern GPUs, with a number at the end."""

    def size(count: int) -> int:
        thing = json_pod("p")
        env = [{"name": f"CUDA_DEVICE_MEMORY_LIMIT_{number}"} for number in range(count)]
        thing["spec"]["containers"] = [{"name": "main", "env": env}]
        return decode.pod(msgspec.json.encode(thing)).size_bytes

    assert size(100) - size(0) >= 100 * sys.getsizeof("CUDA_DEVICE_MEMORY_LIMIT_00")


def test_a_tenant_cannot_hide_a_variable_behind_many_others() -> None:
    """A container must not hide behind thousands of variables that it switches its limit off."""
    thing = json_pod("p")
    thing["spec"]["containers"] = [
        {
            "name": "main",
            "env": (
                [{"name": f"CUDA_X{number}", "value": ""} for number in range(20_000)]
                + [{"name": "CUDA_DISABLE_CONTROL"}]
            ),
        }
    ]
    assert decode.pod(msgspec.json.encode(thing)).containers[0].environment == {
        "CUDA_DISABLE_CONTROL"
    }


@pytest.mark.parametrize(
    "resource",
    ["volcano.sh/vgpu-number", "volcano.sh/gpu-memory", "k8s.amazonaws.com/vgpu", "nvidia.com/gpu"],
)
def test_a_tenant_cannot_hide_what_it_asks_for_behind_junk(resource: str) -> None:
    """A container that seems to ask for nothing could be taken for another's in early mode."""
    thing = json_pod("p")
    junk = {f"a{number}.example.com/r": "1" for number in range(5000)}
    thing["spec"]["containers"] = [{"name": f"c{number}"} for number in range(500)]
    thing["spec"]["containers"] += [
        {"name": "main", "resources": {"limits": {**junk, resource: "2"}}}
    ]
    container = decode.pod(msgspec.json.encode(thing)).container("main")
    assert container is not None
    assert container.limits[resource] == 2


def test_a_tenant_cannot_push_others_out_of_the_book() -> None:
    """A full pod cache leaves out the largest pods, whatever the order in which they came."""

    def pod(name: str, text: str = "") -> Pod:
        return Pod(
            f"uid-{name}",
            "team",
            name,
            annotations={"volcano.sh/vgpu-ids-new": text},
            containers=(PodContainer("main"),),
        )

    large, small = (
        [pod(f"a{number}", "x" * 100_000) for number in range(500)],
        [pod(f"z{number}") for number in range(110)],
    )
    book = PodCache()
    book.replace([*large, *small])
    assert all(book.get(each.uid) for each in small)
    assert sum(each.size_bytes for each in book.pods) <= MAX_BYTES
    assert book.left_out > 0
    book.replace(small)
    for each in large:
        book.put(each)
    assert sum(each.size_bytes for each in book.pods) <= MAX_BYTES
    for each in [*small, *large]:
        book.end(each)
    assert len(book.pods) <= 256


def test_a_tenant_cannot_grow_the_memory_of_names() -> None:
    """A pod that is deleted and created anew under its name for ever.
    That there was another is all that is remembered.
    """
    book = PodCache()
    for number in range(5000):
        pod = Pod(f"uid-{number}", "team", "again")
        book.put(pod)
        book.remove(pod)
    assert max(map(len, book._uids.values())) <= 4
    assert not book.is_only_one_of_its_name(Pod("uid-new", "team", "again"))
