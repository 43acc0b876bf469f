"""Values of a quarter of a megabyte in a pod's annotations, which want to live on in messages, the
journal, the log and the pages.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.families.volcano_vgpu import golden
from vgpu_agent import log
from vgpu_agent.allocation.refusals import Refusals
from vgpu_agent.cluster.quantities import whole_number
from vgpu_agent.errors import CapacityError, RequestRefusedError
from vgpu_agent.families.volcano_vgpu.decisions import DECISION, refused
from vgpu_agent.families.volcano_vgpu.pod_devices import DevicesTextError, parse_pod_devices
from vgpu_agent.families.volcano_vgpu.requests import Names, read_request
from vgpu_agent.journal import Journal
from vgpu_agent.model import DeviceRoom
from vgpu_agent.placement.rooms import BINPACK, DeviceDemand, choose_rooms, type_refusal
from vgpu_agent.pods import Pod, PodContainer

LONG = "A" * 255_000
GPUS = [
    DeviceRoom(f"GPU-{number:08}-aaaa-bbbb-cccc-000000000000", "", 80_000, 80_000, 100, 0, 10)
    for number in range(16)
]


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """The text that the log wrote."""
    stream = io.StringIO()
    log.configure(stream=stream, level="debug")
    yield stream
    log.configure(level="debug", stream=io.StringIO())


def test_a_tenant_cannot_have_its_annotation_quoted_once_for_each_gpu() -> None:
    """A refusal names why each of 16 GPUs is not wanted.
    With the whole annotation each time it had 4 MB, and 25 ended the agent.
    """
    unwanted = {
        room.device: type_refusal("NVIDIA-NVIDIA A10", wanted=LONG, unwanted=None) for room in GPUS
    }
    with pytest.raises(CapacityError) as caught:
        choose_rooms(
            GPUS,
            DeviceDemand(1, lambda _: 1, 0, "1 × volcano.sh/vgpu-number"),
            policy=BINPACK,
            refused=unwanted,
        )
    assert len(str(caught.value)) < 4000
    assert "(255000 characters)" in str(caught.value)


def test_a_tenant_cannot_fill_a_refusal_with_any_of_its_values() -> None:
    """Annotations, entries of them, and limits."""
    pod = Pod(
        "u1",
        "team",
        "train",
        annotations={DECISION: LONG},
        containers=(PodContainer("main", unreadable_limits={Names().memory: LONG}),),
    )
    texts = [str(refused(pod, DECISION, LONG, "nonsense"))]
    with pytest.raises(RequestRefusedError) as caught:
        read_request(pod, pod.containers[0], Names())
    texts.append(str(caught.value))
    for text in (
        LONG,
        f"{LONG},NVIDIA,1,1:",
        f"GPU-1,{LONG},1,1:",
        f"GPU-1,NVIDIA,{'9' * 200_000},1:",
    ):
        try:
            segments = parse_pod_devices(text)
        except DevicesTextError as err:
            texts.append(str(err))
        else:
            assert segments
    for ids in (f"{LONG},NVIDIA,3000,50:", f"{golden.U1}[{LONG},NVIDIA,3000,50:"):
        asking = golden.pod(
            golden.main(number=1, memory=3000, cores=50), annotations=golden.decided(ids)
        )
        with pytest.raises(RequestRefusedError) as caught:
            golden.family().decide(golden.question(asking))
        texts.append(str(caught.value))
    assert max(map(len, texts)) < 1000


@pytest.mark.usefixtures("lines")
def test_a_tenant_cannot_grow_the_journal_beyond_its_bytes() -> None:
    """A thousand entries are few, but not when each keeps a pod's text, in any of its facts."""
    log.configure(level="error", stream=io.StringIO())
    journal = Journal()
    tracemalloc.start()
    try:
        for number in range(600):
            text = f"{number}{LONG}"
            nested = {"pod": {"annotation": text}}
            facts: dict[str, Any] = {
                "reason": text,
                "ids": [text] * 3,
                "nested": nested,
                "pod": Pod("u", "n", text),
                "set": {text},
            }
            journal.record("allocate.refused", **facts)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 12 * 1024 * 1024
    assert len(journal.entries) > 100
    assert "characters)" in journal.entries[-1].facts["reason"]


def test_a_tenant_cannot_keep_the_journal_from_recording() -> None:
    """A page or a line that cannot be encoded is no page:
    numbers beyond JSON's, bytes that are no UTF-8, mappings without end.
    """
    deep: dict[str, object] = {}
    for _ in range(3000):
        deep = {"in": deep}
    journal = Journal()
    journal.record(
        "grants.unreadable", number=10**400, path="/run/\udcff", deep=deep, many=list(range(10**6))
    )
    facts = journal.entries[0].facts
    assert json.loads(json.dumps(facts))["path"] == "/run/\\udcff"
    assert len(json.dumps(facts)) < 5000


def test_a_tenant_cannot_write_megabytes_into_the_log_with_one_line(lines: io.StringIO) -> None:
    """Lines of the agent, lines of libraries, and tracebacks of exceptions with a text of 255 kB,
    whose causes have it, too.
    """

    def fail(depth: int) -> None:
        try:
            if depth:
                fail(depth - 1)
            float(LONG)
        except (ValueError, RuntimeError) as err:
            raise RuntimeError(LONG * 4) from err

    log.get("x").warning("region.unreadable", reason=LONG, names=[LONG] * 100)
    logging.getLogger("aiohttp").warning("bad request %s", LONG)
    try:
        fail(12)
    except RuntimeError:
        log.get("x").exception("task.restarting")
    written = lines.getvalue().splitlines()
    assert len(written) == 3
    assert max(map(len, written)) < 200_000
    assert all(json.loads(line)["msg"] for line in written)


def test_a_tenant_cannot_put_its_secret_variables_into_a_traceback(lines: io.StringIO) -> None:
    """A frame's variables are a request's headers, a file's text or a whole pod."""
    canary = "canary-of-a-local-variable"

    def fail(headers: dict[str, str]) -> None:
        raise RuntimeError(f"boom with {len(headers)} headers")

    for log_format in ("json", "console"):
        log.configure(stream=lines, log_format=log_format)
        try:
            fail({"X-Key": canary})
        except RuntimeError:
            log.get("x").exception("task.restarting")
    assert "boom" in lines.getvalue()
    assert canary not in lines.getvalue()


def test_a_tenant_cannot_grow_the_list_of_refusals() -> None:
    """A thousand containers, each refused with the longest reason there is."""
    refusals = Refusals()
    for number in range(3000):
        refusals.refuse(
            Pod(f"u{number}", "team", f"p{number}"), "main", "volcano.sh/vgpu-number", LONG
        )
    assert sum(sys.getsizeof(refusal.reason) for refusal in refusals.current) < 5 * 1024 * 1024
    assert refusals.current[-1].pod.uid == "u2999"


@pytest.mark.parametrize(
    "text",
    [
        "9" * 10_000,
        "1e999999999",
        "1e-999999999",
        "0." + "0" * 10_000 + "1",
        "9" * 63 + "E",
        "-" * 100,
    ],
)
def test_no_quantity_stops_the_reader(text: str) -> None:
    """Python refuses to read numbers of more than 4,300 digits,
    and takes its time to make one of a billion.
    """
    assert whole_number(text) is None


def test_refusals_of_a_pod_that_is_asked_again_keep_their_time() -> None:
    """The store is bounded by age, and must not lose the first time when kubelet asks again."""
    now = iter([1.0, 2.0, 3.0])
    refusals = Refusals(clock=lambda: next(now))
    for _ in range(2):
        refusals.refuse(Pod("u", "team", "p"), "main", "volcano.sh/vgpu-number", "no room")
    (refusal,) = refusals.current
    assert (refusal.since, refusal.count) == (1.0, 2)
    assert msgspec.structs.replace(refusal, count=1).reason == "no room"
