"""An API server that was taken over, or a proxy before it:
each answer wants memory, time, or a loop of the agent.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import time
import tracemalloc
import zlib
from typing import Any

import msgspec
import pytest

from tests.adversary.api_server_parts import (
    CHUNKED,
    HEAD,
    Answer,
    always,
    answer,
    asked,
    send_chunk,
)
from tests.cluster.scripted import IMPATIENT, json_event, json_pod, running, until
from vgpu_agent.cluster import client as client_module
from vgpu_agent.cluster import decode
from vgpu_agent.cluster.client import LONGEST_LINE_BYTES, ApiClient
from vgpu_agent.cluster.watching import NodeWatch, PodWatch
from vgpu_agent.errors import ClusterError
from vgpu_agent.journal import Journal
from vgpu_agent.pods import PodCache

MIB = 1024 * 1024
NODE = "/api/v1/nodes/n1"


async def endless(writer: asyncio.StreamWriter, _: bytes) -> None:
    """A body without an end, as fast as it is read."""
    writer.write(CHUNKED)
    await send_chunk(writer, b'{"metadata":{"name":"')
    while True:
        await send_chunk(writer, b"x" * 65536)


async def _refused(answers: Answer, **settings: Any) -> ClusterError:
    async with asked(answers, **settings) as api:
        with pytest.raises(ClusterError) as caught:
            await api.get(NODE)
    assert len(str(caught.value)) < 2000
    return caught.value


async def test_no_endless_answer_fills_the_memory() -> None:
    """One object of the API has a megabyte and a half.
    What goes on beyond 16 MiB is given up, with one clear line.
    """
    tracemalloc.start()
    try:
        err = await _refused(endless)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "more than 16 MiB; it is given up" in str(err)
    assert peak < 64 * MIB


async def test_no_small_answer_unfolds_into_gigabytes() -> None:
    """A gzip or deflate bomb of 1 MiB: nothing compressed was asked for, so nothing is unpacked,
    of successes and of errors.
    """
    bombs = [
        ("gzip", gzip.compress(b" " * 200 * MIB, 1)),
        ("deflate", zlib.compress(b" " * 200 * MIB, 1)),
    ]
    for (encoding, bomb), status in itertools.product(
        bombs, ("200 OK", "500 Internal Server Error")
    ):
        tracemalloc.start()
        try:
            err = await _refused(
                always(answer(bomb, status=status, headers=f"Content-Encoding: {encoding}\r\n"))
            )
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert f"compressed ('{encoding}')" in str(err)
        assert peak < 16 * MIB


@pytest.mark.parametrize(
    "number",
    [
        "9" * 400,
        "9" * 4000,
        "9" * 5000,
        "1" + "0" * 18,
        "-" + "9" * 400,
        "1e999",
        "0x10",
        "Fri, 31 Dec 99999 23:59:59 GMT",
    ],
)
@pytest.mark.parametrize("place", ["header", "body"])
async def test_no_retry_after_stops_a_loop(number: str, place: str) -> None:
    """Seconds of 400 digits are no float, and a task that meets an OverflowError is restarted
    for ever.
    """
    details: Any = (
        msgspec.Raw(number.encode()) if number.lstrip("-").isdigit() and place == "body" else None
    )
    body = msgspec.json.encode(
        {"kind": "Status", "code": 429, "details": {"retryAfterSeconds": details}}
    )
    headers = f"Retry-After: {number}\r\n" if place == "header" else ""
    err = await _refused(always(answer(body, status="429 Too Many Requests", headers=headers)))
    assert err.status == 429
    assert 0 <= err.retry_after_seconds <= 3600


async def test_retry_after_as_a_date_is_kept_within_an_hour() -> None:
    """The other form of the header, in the past, soon, and in a hundred years."""
    for date, longest in (
        ("Mon, 01 Jan 2001 00:00:00 GMT", 0.0),
        ("Fri, 31 Dec 2199 23:59:59 GMT", 3600.0),
    ):
        err = await _refused(
            always(answer(b"{}", status="503 Unavailable", headers=f"Retry-After: {date}\r\n"))
        )
        assert err.retry_after_seconds == longest


@pytest.mark.parametrize(
    "code", ["301 Moved", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect"]
)
async def test_no_redirect_leads_the_token_elsewhere(code: str) -> None:
    """A host that may answer once must not learn the token by naming another host."""
    seen: list[bytes] = []

    async def elsewhere(writer: asyncio.StreamWriter, request: bytes) -> None:
        seen.append(request)
        writer.write(answer(b"{}"))

    async with asked(elsewhere) as other:
        url = (await other._credentials.access()).server
        headers = f"Location: {url}{NODE}\r\n"
        err = await _refused(
            always(answer(b"", status=code, headers=headers)), token="canary-token"
        )
    assert err.status == int(code[:3])
    assert seen == []


async def test_no_endless_header_fills_the_memory() -> None:
    """Neither one long header nor a million of them."""

    async def one(writer: asyncio.StreamWriter, _: bytes) -> None:
        writer.write(HEAD + b"X: ")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    async def many(writer: asyncio.StreamWriter, _: bytes) -> None:
        writer.write(HEAD)
        for number in itertools.count():
            writer.write(b"".join(b"X-%d-%d: y\r\n" % (number, each) for each in range(1000)))
            await writer.drain()

    for answers in (one, many):
        tracemalloc.start()
        try:
            await _refused(answers, others=IMPATIENT)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 32 * MIB


async def _trouble_of_list(answers: Answer) -> tuple[PodWatch, float]:
    """The watch of pods after its first failure, and the peak of what it took."""
    async with asked(answers) as api:
        watch = PodWatch(api, "n1", PodCache(), journal=Journal())
        tracemalloc.start()
        try:
            async with running(watch.run):
                await until(lambda: watch.status.errors > 0)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    return watch, peak


def _page(token: str, *items: Any) -> bytes:
    return answer(
        msgspec.json.encode(
            {"metadata": {"resourceVersion": "7", "continue": token}, "items": items}
        )
    )


async def test_no_list_goes_on_for_ever_with_the_same_page() -> None:
    """A continue token that leads to itself keeps a list from ever being complete."""
    watch, _ = await _trouble_of_list(always(_page("again", json_pod("a"))))
    assert "the same page again" in watch.status.last_error


async def test_no_list_goes_on_for_ever_with_new_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page brings a pod and another token."""
    monkeypatch.setattr("vgpu_agent.cluster.reflector._MAX_PAGES", 100)
    numbers = itertools.count()

    async def more(writer: asyncio.StreamWriter, _: bytes) -> None:
        number = next(numbers)
        writer.write(_page(f"t{number}", *(json_pod(f"p{number}-{each}") for each in range(50))))

    watch, peak = await _trouble_of_list(more)
    assert "more than 100 pages" in watch.status.last_error
    assert peak < 32 * MIB


async def test_no_list_goes_on_for_ever_with_empty_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a pod, so that no number of pods ends it."""
    monkeypatch.setattr("vgpu_agent.cluster.reflector._MAX_PAGES", 20)
    numbers = itertools.count()

    async def more(writer: asyncio.StreamWriter, _: bytes) -> None:
        writer.write(_page(f"t{next(numbers)}"))

    watch, _ = await _trouble_of_list(more)
    assert "more than 20 pages" in watch.status.last_error


@pytest.mark.parametrize(
    ("begin", "again", "said"),
    [
        (
            b'{"metadata":{"resourceVersion":"1"},"items":[',
            b'{"metadata":{"name":"a","uid":"u"}},' * 2000,
            "more than 2000 objects",
        ),
        (
            b'{"metadata":{"resourceVersion":"1"},"items":[{"metadata":{"name":"',
            b"x" * 65536,
            "an object of more than 16 MiB",
        ),
        (b'{"metadata":{"resourceVersion":"', b"x" * 65536, "is given up"),
        (
            b'{"metadata":{"resourceVersion":"1"},"items":[]' + b" " * 10,
            b" " * 65536,
            "beside its items",
        ),
        (b"", b'{"a":' * 10_000, "more than 500 levels"),
        (b'{"items":[', b"[" * 65536, "beside its items"),
        (b'{"items":[', b",\n" * 30_000, "beside its items"),
    ],
    ids=["items", "one item", "version", "spaces", "depth", "brackets", "commas"],
)
async def test_no_endless_list_fills_the_memory(
    begin: bytes, again: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server ignores ``limit`` when it answers from its cache, so a page may be as long as
    it likes. It is read piece by piece.
    """
    monkeypatch.setattr("vgpu_agent.cluster.reflector._MAX_ITEMS", 2000)

    async def write(writer: asyncio.StreamWriter, _: bytes) -> None:
        writer.write(CHUNKED)
        if begin:
            await send_chunk(writer, begin)
        while True:
            await send_chunk(writer, again)

    watch, peak = await _trouble_of_list(write)
    assert said in watch.status.last_error
    assert peak < 64 * MIB


async def test_no_list_is_longer_than_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few objects that are large, each within its bounds."""
    monkeypatch.setattr(client_module, "LONGEST_LIST_BYTES", 4 * MIB)

    async def write(writer: asyncio.StreamWriter, _: bytes) -> None:
        writer.write(CHUNKED)
        await send_chunk(writer, b'{"metadata":{"resourceVersion":"1"},"items":[')
        while True:
            await send_chunk(
                writer,
                b'{"metadata":{"name":"a","uid":"u","annotations":{"a":"' + b"x" * MIB + b'"}}},',
            )

    watch, _ = await _trouble_of_list(write)
    assert "the answer has more than 4 MiB" in watch.status.last_error


def _watched(stream: Answer) -> Answer:
    """An empty list, then this for watches."""

    async def write(writer: asyncio.StreamWriter, request: bytes) -> None:
        if b"watch=true" in request:
            writer.write(CHUNKED)
            await stream(writer, request)
        else:
            writer.write(_page(""))

    return write


async def test_no_endless_line_of_a_watch_fills_the_memory() -> None:
    """A line is an object; beyond 16 MiB it is given up."""

    async def stream(writer: asyncio.StreamWriter, _: bytes) -> None:
        while True:
            await send_chunk(writer, b"x" * 65536)

    watch, peak = await _trouble_of_list(_watched(stream))
    assert f"more than {LONGEST_LINE_BYTES >> 20} MiB" in watch.status.last_error
    assert peak < 64 * MIB


async def test_no_flood_of_tiny_events_starves_the_agent() -> None:
    """Bookmarks at full speed: the loop answers others within moments,
    and most of its time is theirs.
    """
    line = json_event("BOOKMARK", {"metadata": {"resourceVersion": "8"}}) + b"\n"

    async def stream(writer: asyncio.StreamWriter, _: bytes) -> None:
        while True:
            await send_chunk(writer, line * 1000)

    async with asked(_watched(stream)) as api:
        watch = PodWatch(api, "n1", PodCache(), journal=Journal())
        beats: list[float] = []
        task = asyncio.ensure_future(watch.run(lambda: beats.append(time.monotonic())))
        await until(lambda: len(beats) > 200)
        taken, since = len(beats), time.monotonic()
        longest = 0.0
        while time.monotonic() - since < 1.0:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            longest = max(longest, time.monotonic() - before)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert len(beats) - taken < 2500
    assert longest < 0.5


@pytest.mark.parametrize(
    "spoiled",
    [
        {
            "status": {
                "containerStatuses": [{"name": "main", "restartCount": msgspec.Raw(b"9" * 400)}]
            }
        },
        {
            "status": {
                "containerStatuses": [{"name": "main", "restartCount": msgspec.Raw(b"9" * 5000)}]
            }
        },
        {
            "spec": {
                "containers": [
                    {"name": "main", "resources": {"limits": {"a/b": msgspec.Raw(b"9" * 4299)}}}
                ]
            }
        },
        {
            "spec": {
                "containers": [
                    {"name": "main", "resources": {"limits": {"a/b": msgspec.Raw(b"1e308")}}}
                ]
            }
        },
        {
            "spec": {
                "containers": [{"name": "main", "resources": {"limits": {"a/b": "1e999999999"}}}]
            }
        },
        {"metadata": {"creationTimestamp": "99999-01-01T00:00:00Z"}},
        {"metadata": {"creationTimestamp": "9999-12-31T23:59:59-23:59"}},
        {"metadata": {"generation": msgspec.Raw(b"9" * 5000)}},
        {"metadata": {"name": "n" * 10_000}},
        {"metadata": {"namespace": "n" * 10_000}},
        {"metadata": {"uid": "u" * 10_000}},
    ],
    ids=[
        "restarts-400",
        "restarts-5000",
        "limit-4299",
        "limit-1e308",
        "limit-text",
        "year-99999",
        "year-9999",
        "generation",
        "name",
        "namespace",
        "uid",
    ],
)
def test_no_number_or_name_of_a_pod_breaks_the_reader(spoiled: dict[str, Any]) -> None:
    """A pod, or one clear and short error."""
    thing = json_pod("a")
    for part, values in spoiled.items():
        thing[part] = {**thing.get(part, {}), **values}
    try:
        pod = decode.pod(msgspec.json.encode(thing))
    except ClusterError as err:
        assert len(str(err)) < 1500  # noqa: PT017 - either outcome is right
    else:
        assert pod.size_bytes < 10_000


@pytest.mark.parametrize("which", ["continue", "resourceVersion"])
async def test_no_token_of_a_megabyte_is_sent_back(which: str) -> None:
    """The next request repeats the token in its URL, so the token is bounded."""
    body = json.dumps(
        {"metadata": {"resourceVersion": "7", which: "x" * MIB}, "items": []}
    ).encode()
    watch, _ = await _trouble_of_list(always(answer(body)))
    assert watch.status.last_error
    assert len(watch.status.last_error) <= 1100


async def test_no_node_of_megabytes_is_kept() -> None:
    """Our own Node is kept whole, so one that is larger than etcd takes is not read."""
    labels = {f"label-{number}": "x" * 63 for number in range(100_000)}
    node = {"metadata": {"name": "n1", "uid": "u", "resourceVersion": "7", "labels": labels}}
    body = {"metadata": {"resourceVersion": "7"}, "items": [node]}
    async with asked(always(answer(msgspec.json.encode(body)))) as api:
        watch = NodeWatch(api, "n1", journal=Journal())
        async with running(watch.run):
            await until(lambda: watch.status.unreadable > 0)
    assert watch.node.value is None


async def test_no_answer_to_a_write_fills_the_memory() -> None:
    """The answer to a patch is not used, but it comes."""
    async with asked(endless) as api:
        with pytest.raises(ClusterError, match="more than 16 MiB"):
            await api.patch(NODE, {})
    assert isinstance(api, ApiClient)
