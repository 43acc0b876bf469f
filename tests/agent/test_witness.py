"""kubelet's records at the moment of a start: read after the question, shared by those who asked meanwhile, and never stale."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from vgpu_agent.agent.witness import KubeletWitness
from vgpu_agent.errors import KubeletError
from vgpu_agent.isolation.edits import Edits
from vgpu_agent.kubelet import codec
from vgpu_agent.kubelet.pod_resources import PodResources
from vgpu_agent.model import Holding, Owner

RESOURCE = "volcano.sh/vgpu-number"


class Lister(PodResources):
    """pod-resources that answers when it is let."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"), timeout_seconds=1)
        self.readings = 0
        self.holdings: list[Holding] = []
        self.let = asyncio.Event()
        self.error = ""

    async def list(self, wanted: Callable[[str], bool] = lambda _: True) -> tuple[Holding, ...]:
        self.readings += 1
        seen = tuple(holding for holding in self.holdings if wanted(holding.resource))
        await self.let.wait()
        if self.error:
            raise KubeletError(self.error)
        return seen


def entry(uid: str, container: str, *ids: str, resource: str = RESOURCE, answer: Edits | None = None) -> dict[str, object]:
    """An entry of the checkpoint."""
    encoded = codec.encode_allocate([answer or Edits()])
    return {
        "PodUID": uid,
        "ContainerName": container,
        "ResourceName": resource,
        "DeviceIDs": {"-1": list(ids)},
        "AllocResp": base64.b64encode(encoded[2:]).decode(),  # the element without its tag and length
    }


def write(path: Path, *entries: dict[str, object]) -> Path:
    """A checkpoint with these entries."""
    path.write_bytes(msgspec.json.encode({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 0}))
    return path


def make(lister: Lister, checkpoint: Path, *, answers: bool = False) -> KubeletWitness:
    """A witness of one resource."""
    return KubeletWitness(lister, checkpoint, resources=lambda: [RESOURCE], with_answers=lambda: answers)


async def test_both_records_are_given_side_by_side(tmp_path: Path) -> None:
    """Unweighed, and only the resources of interest."""
    lister = Lister()
    lister.holdings = [
        Holding(RESOURCE, ("a",), Owner("main", "", "ns", "p")),
        Holding("nvidia.com/gpu", ("g",), Owner("x", "", "ns", "q")),
    ]
    lister.let.set()
    checkpoint = write(tmp_path / "checkpoint", entry("uid", "main", "a"), entry("uid", "other", "z", resource="nvidia.com/gpu"))
    testimony = await make(lister, checkpoint)(RESOURCE, ["a"])
    assert testimony.pod_resources == (lister.holdings[0],)
    assert testimony.checkpoint == (Holding(RESOURCE, ("a",), Owner("main", "uid")),)
    assert testimony.answers == {}
    assert testimony.trouble == ""


async def test_a_burst_of_questions_costs_two_readings(tmp_path: Path) -> None:
    """Whoever asks during a reading gets the next one, which all of them share; nobody gets one that began before he asked."""
    lister = Lister()
    witness = make(lister, write(tmp_path / "checkpoint"))
    first = asyncio.ensure_future(witness(RESOURCE, ["a"]))
    await asyncio.sleep(0)
    later = [asyncio.ensure_future(witness(RESOURCE, ["a"])) for _ in range(10)]
    await asyncio.sleep(0)
    lister.holdings = [Holding(RESOURCE, ("a",), Owner("main", "", "ns", "p"))]
    lister.let.set()
    assert (await first).pod_resources == ()
    assert [len(testimony.pod_resources or ()) for testimony in await asyncio.gather(*later)] == [1] * 10
    assert lister.readings == 2


async def test_a_reading_that_was_broken_off_counts_for_nobody(tmp_path: Path) -> None:
    """kubelet hung up while its question was being looked into; the next in line reads for himself."""
    lister = Lister()
    witness = make(lister, write(tmp_path / "checkpoint"))
    lister.let.set()
    await witness(RESOURCE, ["a"])
    lister.let.clear()
    broken = asyncio.ensure_future(witness(RESOURCE, ["a"]))
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(witness(RESOURCE, ["a"]))
    await asyncio.sleep(0)
    lister.holdings = [Holding(RESOURCE, ("a",), Owner("main", "", "ns", "p"))]
    broken.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await broken
    lister.let.set()
    assert (await waiting).pod_resources == (lister.holdings[0],)


async def test_a_silent_witness_is_named(tmp_path: Path) -> None:
    """None for the one that says nothing, with its reason; the other one counts."""
    lister = Lister()
    lister.error = "pod-resources: no answer"
    lister.let.set()
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_text("junk")
    testimony = await make(lister, checkpoint)(RESOURCE, ["a"])
    assert (testimony.checkpoint, testimony.pod_resources) == (None, None)
    assert "pod-resources: no answer" in testimony.trouble
    assert "cannot be understood" in testimony.trouble


async def test_stored_answers_are_read_where_they_are_needed(tmp_path: Path) -> None:
    """Early binding compares what kubelet keeps with what the container should get."""
    lister = Lister()
    lister.let.set()
    answer = Edits(environment={"NVIDIA_VISIBLE_DEVICES": "GPU-a"})
    checkpoint = write(tmp_path / "checkpoint", entry("uid", "main", "a", answer=answer))
    testimony = await make(lister, checkpoint, answers=True)(RESOURCE, ["a"])
    assert testimony.answers == {("uid", "main", RESOURCE): answer}
