"""Samples of processes from the simulated driver, in the bytes that libraries expect
(vgpu-manager §8.6).
"""

from __future__ import annotations

import asyncio
import math
import struct
import time
from pathlib import Path

import pytest

from tests.gpu.watched import SOON_HUNG, watching
from tests.patience import FOR_EVER_SECONDS, PATIENCE_SECONDS, eventually, quickest_call
from tests.simulated import simulated_node
from vgpu_agent.gpu import return_codes, sampling
from vgpu_agent.gpu.nvml import Handle, Nvml
from vgpu_agent.gpu.sampling import MAX_ROWS, ProcessSampler, batches
from vgpu_agent.runtime.sm_util import SmUtilFile
from vgpu_agent.sim.preload import preload
from vgpu_agent.sim.processes import ProcessUse
from vgpu_agent.sim.state import SimulatedNode

# vgpu-manager §7.7
SAMPLE, PROCESS = struct.Struct("<I4xQ4I"), struct.Struct("<I4xQ2I")
NONE = 0xFFFFFFFF


class Kept:
    """A place for samples that keeps the last ones of each GPU."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[list[tuple[int, ...]] | None, list[tuple[int, ...]]]] = {}
        self.graphics: dict[int, list[tuple[int, ...]]] = {}
        self.since: dict[int, list[int]] = {}
        self.failure: Exception | None = None

    def write(
        self,
        index: int,
        since: int,
        samples: memoryview | None,
        compute: memoryview,
        graphics: memoryview,
    ) -> None:
        if self.failure is not None:
            raise self.failure
        used = None if samples is None else list(SAMPLE.iter_unpack(samples))
        self.rows[index] = used, list(PROCESS.iter_unpack(compute))
        self.graphics[index] = list(PROCESS.iter_unpack(graphics))
        self.since.setdefault(index, []).append(since)


def _sampler(node: SimulatedNode, nvml: Nvml) -> ProcessSampler:
    handles = {nvml.uuid(handle, index=index): handle for index, handle in _handles(nvml)}
    assert set(handles) == set(node.uuids)
    return ProcessSampler(nvml, handles.get)


def _handles(nvml: Nvml) -> list[tuple[int, Handle]]:
    return [(index, nvml.handle(index)) for index in range(nvml.count())]


def _sampled(sampler: ProcessSampler, node: SimulatedNode, *indices: int) -> Kept:
    kept = Kept()
    sampler.aim([(index, node.uuids[index]) for index in indices], kept)
    sampler._due = 0.0
    sampler.sample()
    return kept


def test_each_process_has_a_row_of_use_and_one_in_its_list(node: SimulatedNode, nvml: Nvml) -> None:
    """The driver's own rows, which are those of the file. An idle process has no row of use."""
    node.add_process(0, 100, ProcessUse(memory_mib=1, sm_percent=30, memory_percent=10))
    node.add_process(0, 101, ProcessUse(memory_mib=2))
    node.add_process(0, 102, ProcessUse(memory_mib=3, sm_percent=5, type="graphics"))
    before = time.time_ns() // 1000
    kept = _sampled(_sampler(node, nvml), node, 0)
    used, compute = kept.rows[0]
    assert used is not None
    assert {(pid, sm, memory) for pid, _, sm, memory, *_ in used} == {(100, 30, 10), (102, 5, 0)}
    assert all(at >= before for _, at, *_ in used)
    assert sorted(compute) == [(100, 1 << 20, NONE, NONE), (101, 2 << 20, NONE, NONE)]
    assert kept.graphics[0] == [(102, 3 << 20, NONE, NONE)]
    (since,) = kept.since[0]
    # readers leave out samples from before it (vgpu-manager §8.6)
    assert 0 <= since - (before - 1_000_000) < PATIENCE_SECONDS * 1_000_000


def test_an_idle_gpu_has_nothing_newer(node: SimulatedNode, nvml: Nvml) -> None:
    """The driver says "not found" between its own samples, too, so what was known stays."""
    kept = _sampled(_sampler(node, nvml), node, 1)
    assert kept.rows[1] == (None, [])


def test_a_driver_without_the_older_call_is_asked_by_the_newer(
    node: SimulatedNode, nvml: Nvml
) -> None:
    """Its rows are turned into those of the older."""
    node.add_process(0, 100, ProcessUse(memory_mib=1, sm_percent=30, memory_percent=10))
    node.fault("nvmlDeviceGetProcessUtilization", code=return_codes.NOT_SUPPORTED)
    sampler = _sampler(node, nvml)
    before = time.time_ns() // 1000
    used, _ = _sampled(sampler, node, 0).rows[0]
    assert used is not None
    ((pid, at, *use),) = used
    assert (pid, use) == (100, [30, 10, 0, 0])
    assert at >= before
    assert _sampled(sampler, node, 1).rows[1] == (None, [])


def test_a_driver_with_older_lists_is_asked_for_those(
    node: SimulatedNode, nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 2 has the same rows."""
    node.add_process(0, 100, ProcessUse(memory_mib=1))
    raw = nvml.raw

    def without_v3(name: str, *arguments: object) -> int:
        if name.endswith("_v3"):
            raise nvml._failed(name, return_codes.FUNCTION_NOT_FOUND, "Function Not Found")
        return raw(name, *arguments)  # type: ignore[arg-type]  # the arguments of any function

    monkeypatch.setattr(nvml, "raw", without_v3)
    assert _sampled(_sampler(node, nvml), node, 0).rows[0][1] == [(100, 1 << 20, NONE, NONE)]


def test_more_processes_than_a_slot_has_rows_are_cut(
    node: SimulatedNode, nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vgpu-manager §8.6. The driver itself refuses a buffer that is too small."""
    monkeypatch.setattr(sampling, "MAX_ROWS", 4)
    for pid in range(100, 110):
        node.add_process(0, pid, ProcessUse(memory_mib=1, sm_percent=1))
    used, compute = _sampled(_sampler(node, nvml), node, 0).rows[0]
    assert used is not None
    assert (len(used), len(compute)) == (4, 4)


def test_a_gpu_that_fails_costs_only_itself(node: SimulatedNode, nvml: Nvml) -> None:
    """The others of its batch are sampled, and nothing is raised."""
    node.add_process(1, 100, ProcessUse(memory_mib=1))
    sampler = _sampler(node, nvml)
    node.lose(0)
    kept = _sampled(sampler, node, 0, 1)
    assert list(kept.rows) == [1]


def test_gpus_take_turns_in_even_batches() -> None:
    """vgpu-manager §8.6: at most four at a time."""
    gpus = [(index, f"GPU-{index}") for index in range(10)]
    groups = batches(gpus)
    assert sorted(map(len, groups)) == [3, 3, 4]
    assert sorted(gpu for group in groups for gpu in group) == gpus
    assert batches([]) == ()
    assert len(batches(gpus[:4])) == 1


def test_nothing_is_due_while_nobody_needs_it(node: SimulatedNode, nvml: Nvml) -> None:
    """An idle node costs no call."""
    sampler = _sampler(node, nvml)
    calls = nvml.calls
    assert sampler.wait_seconds() == math.inf
    sampler.sample()
    assert nvml.calls == calls
    _sampled(sampler, node, 0)
    sampler.aim([], Kept())
    calls = nvml.calls
    sampler.sample()
    assert (nvml.calls, sampler.wait_seconds()) == (calls, math.inf)


async def test_samples_come_many_times_a_second_and_end(node: SimulatedNode) -> None:
    """Every 80 ms for each GPU, beside polls and measurements, and not once more when nobody needs
    them.
    """
    node.add_process(3, 100, ProcessUse(memory_mib=1, sm_percent=30))
    async with watching(node) as watched:
        kept = Kept()
        watched.watch.sample([(index, node.uuids[index]) for index in range(4)], kept)
        # the first batch is written one GPU after another
        await eventually(lambda: len(kept.since) == 4)
        before = {index: len(since) for index, since in kept.since.items()}
        started = time.monotonic()
        await asyncio.sleep(1.0)
        taken = [len(since) - before[index] for index, since in kept.since.items()]
        waited = time.monotonic() - started
        # 12 a second on an idle machine
        assert all(3 <= number <= 14 * waited for number in taken), (taken, waited)
        assert kept.rows[3][0] is not None
        watched.watch.sample([], kept)
        await watched.polls(2)
        before = {index: len(since) for index, since in kept.since.items()}
        await watched.polls(2)
        assert {index: len(since) for index, since in kept.since.items()} == before


async def test_a_hang_of_a_sample_is_a_hang_like_any_other(node: SimulatedNode) -> None:
    """Its GPU is named and becomes Unhealthy; the loop lives, and samples come again afterwards."""
    async with watching(node, SOON_HUNG) as watched:
        kept = Kept()
        forever = int(FOR_EVER_SECONDS * 1000)
        node.fault("nvmlDeviceGetProcessUtilization", gpu=1, times=1, delay_ms=forever)
        watched.watch.sample([(index, node.uuids[index]) for index in range(4)], kept)
        entry = await watched.recorded("nvml.hung")
        assert entry.facts["gpu"] == node.uuids[1]
        await watched.unhealthy(node.uuids[1])
        node.clear_faults()
        await watched.healthy(node.uuids[1])
        number = len(kept.since[0])
        await eventually(lambda: len(kept.since[0]) > number)


async def test_a_place_that_fails_does_not_end_the_watch_over_health(node: SimulatedNode) -> None:
    """One line says it; GPUs are polled on."""
    async with watching(node) as watched:
        kept = Kept()
        kept.failure = OSError(28, "No space left on device")
        watched.watch.sample([(0, node.uuids[0])], kept)
        entry = await watched.recorded("gpu.not_sampled")
        assert "No space left" in entry.facts["problem"]
        await watched.polls(2)
        assert watched.count("gpu.not_sampled") == 1


async def test_events_and_polls_are_as_quick_beside_samples(node: SimulatedNode) -> None:
    """A batch of four is all that another job waits for."""
    async with watching(node) as watched:
        watched.watch.sample([(index, node.uuids[index]) for index in range(4)], Kept())
        waits: list[float] = []
        for _ in range(20):
            began = time.monotonic()
            await watched.watch._thread.call("nothing", lambda: None)
            waits.append(time.monotonic() - began)
        assert sorted(waits)[10] < 0.2


def test_a_slot_has_as_many_rows_as_the_contract_says() -> None:
    """vgpu-manager §7.7: 1,024 each."""
    assert MAX_ROWS == 1024
    assert (SAMPLE.size, PROCESS.size) == (sampling.SAMPLE_BYTES, sampling.PROCESS_BYTES)


def test_eight_gpus_with_forty_processes_take_two_percent_of_a_core(tmp_path: Path) -> None:
    """The budget of the watcher, with the file that it writes: a second's samples in 20 ms."""
    node = simulated_node(tmp_path, gpus=8)
    preload(node.directory)
    nvml = Nvml()
    nvml.load(Path("/"))
    try:
        for process in range(40):
            use = ProcessUse(memory_mib=1, sm_percent=2)
            node.add_process(process % 8, 1000 + process, use)
        sampler = _sampler(node, nvml)
        file = SmUtilFile(str(tmp_path / "watcher"), lambda _: None)
        sampler.aim(list(enumerate(node.uuids)), file)

        def a_second() -> None:
            for _ in range(round(2 / sampling.INTERVAL_SECONDS)):
                sampler._due = 0.0
                sampler.sample()

        taken = sampler.taken
        assert quickest_call(a_second, within_seconds=0.02) < 0.02
        assert (sampler.taken - taken) % 100 == 0
        file.close()
    finally:
        nvml.shutdown()
