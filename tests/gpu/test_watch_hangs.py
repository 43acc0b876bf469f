"""A driver call that does not return: named, survived, and over when it is over."""

from __future__ import annotations

import asyncio
import contextlib
import re
import statistics
import subprocess
import sys
import threading
import time

import pytest

from tests import constants
from tests.gpu.watched import SOON_HUNG, Watched, found, settings, sysfs_of, watching
from tests.patience import FOR_EVER_SECONDS, PATIENCE_SECONDS, eventually
from vgpu_agent.errors import NvmlHungError
from vgpu_agent.gpu import thread
from vgpu_agent.gpu.watch import GpuWatch
from vgpu_agent.journal import Journal
from vgpu_agent.model import Remedy
from vgpu_agent.sim.state import SimulatedNode
from vgpu_agent.status import NvmlState

FOR_EVER_MS = int(FOR_EVER_SECONDS * 1000)


async def test_a_hang_is_named_and_the_gpu_goes_and_comes_back(node: SimulatedNode) -> None:
    """The call and its GPU are named once, only that GPU is Unhealthy,
    and it returns by the normal way.
    """
    async with watching(node, SOON_HUNG) as watched:
        before = time.time()
        node.fault("nvmlDeviceGetTemperature", gpu=1, times=1, delay_ms=FOR_EVER_MS)
        entry = await watched.recorded("nvml.hung")
        status = watched.watch.status
        remedy = Remedy.CHECK_DRIVER.sentence("")
        assert entry.facts == {
            "call": "nvmlDeviceGetTemperature",
            "gpu": node.uuids[1],
            "remedy": remedy,
        }
        assert (status.state, status.call, status.gpu) == (
            NvmlState.HUNG,
            "nvmlDeviceGetTemperature",
            node.uuids[1],
        )
        assert before < status.since < time.time()

        gpu = await watched.unhealthy(node.uuids[1])
        assert (
            gpu.health.reason == "the NVIDIA driver does not return from nvmlDeviceGetTemperature"
        )
        assert [gpu.health.ok for gpu in watched.watch.inventory.value.gpus] == [
            True,
            False,
            True,
            True,
        ]

        node.clear_faults()
        await watched.healthy(node.uuids[1])
        answering = await watched.recorded("nvml.answering")
        assert answering.facts["call"] == "nvmlDeviceGetTemperature"
        assert 0.5 < answering.facts["after_seconds"] < time.time() - before + 0.001
        assert watched.count("nvml.hung") == 1
        assert watched.watch.status.hangs == 1
        assert watched.watch.status.state.value == "answering"


async def test_a_hang_that_is_over_is_no_longer_told_as_one(node: SimulatedNode) -> None:
    """The GPU waits for its quiet time. The call has returned, and the GPU answers."""
    async with watching(node, SOON_HUNG, quiet=60) as watched:
        node.fault("nvmlDeviceGetTemperature", gpu=1, times=1, delay_ms=FOR_EVER_MS)
        gpu = await watched.unhealthy(node.uuids[1])
        assert (gpu.health.answers, gpu.health.offered_at) == (False, 0)

        node.clear_faults()
        inventory = await watched.until(
            lambda inventory: bool(found(inventory, node.uuids[1]).health.answers)
        )
        health = found(inventory, node.uuids[1]).health
        assert re.fullmatch(
            r"the NVIDIA driver did not return from nvmlDeviceGetTemperature for \d+ s",
            health.reason,
        )
        assert 50 < health.offered_at - time.time() < 60.5


async def test_the_loop_stays_responsive_during_a_hang(node: SimulatedNode) -> None:
    """Most that wait on the event loop get their turn within 50 ms.
    The machine itself may be busy now and then.
    """
    async with watching(node, SOON_HUNG) as watched:
        lags = []
        node.fault("nvmlDeviceGetMemoryInfo", gpu=0, times=1, delay_ms=FOR_EVER_MS)
        await watched.recorded("nvml.hung")
        for _ in range(100):
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            lags.append(time.perf_counter() - before - 0.005)

        assert watched.watch.status.state is NvmlState.HUNG
        assert statistics.median(lags) < 0.05
        node.clear_faults()


async def test_a_short_hang_leaves_the_gpu_alone(node: SimulatedNode) -> None:
    """Shorter than ``HUNG_UNHEALTHY_SECONDS``: reported, and no pod is touched by it."""
    async with watching(node, {constants.NVML_CALL_TIMEOUT: 0.2}) as watched:
        node.fault("nvmlDeviceGetTemperature", gpu=1, times=1, delay_ms=FOR_EVER_MS)
        await watched.recorded("nvml.hung")
        node.clear_faults()
        await watched.recorded("nvml.answering")

        assert watched.watch.inventory.version == 1


async def test_a_hang_while_waiting_for_events_names_the_wait(node: SimulatedNode) -> None:
    """It belongs to no GPU, so none is marked. XIDs are received again afterwards."""
    async with watching(node, SOON_HUNG) as watched:
        node.fault("nvmlEventSetWait", times=1, delay_ms=FOR_EVER_MS)
        entry = await watched.recorded("nvml.hung")
        node.clear_faults()
        remedy = Remedy.CHECK_DRIVER.sentence("")
        assert entry.facts == {"call": "nvmlEventSetWait_v2", "gpu": "", "remedy": remedy}
        await watched.recorded("nvml.answering")
        assert all(gpu.health.ok for gpu in watched.watch.inventory.value.gpus)

        node.xid(0, 79)
        await watched.unhealthy(node.uuids[0])


async def test_nothing_piles_up_during_a_hang(node: SimulatedNode) -> None:
    """Questions while the driver hangs are refused at once,
    with the call and the GPU in the text.
    """
    async with watching(node, SOON_HUNG) as watched:
        node.fault("nvmlDeviceGetTemperature", gpu=2, times=1, delay_ms=FOR_EVER_MS)
        await watched.recorded("nvml.hung")
        ran = []

        with pytest.raises(
            NvmlHungError, match=f"hangs in nvmlDeviceGetTemperature about {node.uuids[2]}"
        ):
            await watched.watch._thread.call("ask something", lambda: ran.append(1))

        assert watched.count("nvml.answering") == 0
        node.clear_faults()
        await watched.recorded("nvml.answering")
        assert ran == []


async def test_a_caller_gets_its_deadline_and_the_thread_goes_on(node: SimulatedNode) -> None:
    """A caller with less patience than ``CALL_TIMEOUT_SECONDS`` leaves alone.
    Its job does not disturb the ones after it.
    """
    async with watching(node) as watched:
        thread, returning = watched.watch._thread, threading.Event()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await thread.call("slow job", lambda: returning.wait(PATIENCE_SECONDS))

        returning.set()
        assert await thread.call("next job", lambda: "done") == "done"


async def test_a_job_that_nobody_waits_for_is_not_begun(node: SimulatedNode) -> None:
    """Its caller gave up while it stood in the queue."""
    async with watching(node) as watched:
        thread, began, returning = watched.watch._thread, threading.Event(), threading.Event()
        ran: list[int] = []

        def block() -> None:
            began.set()
            returning.wait(PATIENCE_SECONDS)

        blocking = asyncio.create_task(thread.call("blocking", block))
        assert await asyncio.to_thread(began.wait, PATIENCE_SECONDS)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await thread.call("given up", lambda: ran.append(1))
        returning.set()
        await blocking
        await thread.call("after both", lambda: None)

        assert ran == []


async def test_an_exception_of_a_job_reaches_its_caller(node: SimulatedNode) -> None:
    """The thread takes the next job."""
    async with watching(node) as watched:
        with pytest.raises(ZeroDivisionError):
            await watched.watch._thread.call("bad job", lambda: 1 / 0)

        assert await watched.watch._thread.call("next job", lambda: 42) == 42


async def test_a_driver_that_hangs_at_the_start_is_an_error(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """failOnInitError true: start gives up after ``CALL_TIMEOUT_SECONDS``,
    though the thread is still inside nvmlInit.
    """
    constants.use(monkeypatch, SOON_HUNG)
    node.fault("nvmlInit", times=1, delay_ms=FOR_EVER_MS)
    watch = GpuWatch(settings(node), Journal(), sysfs_root=sysfs_of(node))

    with pytest.raises(NvmlHungError, match="hangs in nvmlInit"):
        await watch.start()

    assert not await watch.stop(0.01)
    node.clear_faults()
    assert await watch.stop(PATIENCE_SECONDS)


async def test_a_driver_that_hangs_at_the_start_can_be_waited_for(node: SimulatedNode) -> None:
    """failOnInitError false: the GPUs are there when nvmlInit comes back."""
    node.fault("nvmlInit", times=1, delay_ms=FOR_EVER_MS)

    async with watching(node, SOON_HUNG, fail_on_init_error=False) as watched:
        assert watched.watch.status.state is NvmlState.HUNG
        node.clear_faults()
        await watched.until(lambda inventory: len(inventory.gpus) == 4)
        await eventually(lambda: watched.watch.status.state is NvmlState.ANSWERING)


async def test_calls_to_a_stopped_watch_are_refused(node: SimulatedNode) -> None:
    """No caller waits for ever on a thread that has ended."""
    async with watching(node) as watched:
        await watched.watch.stop(PATIENCE_SECONDS)

        with pytest.raises(NvmlHungError, match="not running"):
            await watched.watch._thread.call("too late", lambda: None)


async def test_an_xid_does_not_wait_for_the_end_of_a_slow_reading(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that takes long for each GPU answers all the same; events come through between two
    GPUs, and the loop shows life.
    """
    monkeypatch.setattr(thread, "CALL_TIMEOUT_SECONDS", 1.5)
    beats: list[int] = []
    journal = Journal()
    watch = GpuWatch(
        settings(node), journal, sysfs_root=sysfs_of(node), beat=lambda: beats.append(1)
    )
    await watch.start()
    watched, slow = Watched(watch, journal), node.state.faults
    for gpu in (0, 1):
        node.fault("nvmlDeviceGetMemoryInfo", gpu=gpu, times=1, delay_ms=FOR_EVER_MS)
    reading = asyncio.ensure_future(watch._poll())
    await eventually(lambda: slow[0].times_left == 0)  # in the first GPU's call
    node.xid(3, 79)
    slow[0].function = b""

    try:
        await watched.unhealthy(node.uuids[3])
        await eventually(lambda: bool(beats))
        # in the second GPU's
        assert (slow[1].function, slow[2].function) == (b"nvmlDeviceGetMemoryInfo", b"")
    finally:
        node.clear_faults()
        with contextlib.suppress(NvmlHungError):
            await reading
        assert await watch.stop(PATIENCE_SECONDS)


_GIVES_UP_ON_A_HUNG_DRIVER = """
import asyncio, sys
from pathlib import Path
from vgpu_agent.config.settings import Gpu
from vgpu_agent.errors import NvmlHungError
from vgpu_agent.gpu import thread
from vgpu_agent.gpu.watch import GpuWatch
from vgpu_agent.journal import Journal
from vgpu_agent.sim.preload import preload
preload(Path(sys.argv[1]))
thread.CALL_TIMEOUT_SECONDS = 0.1
try:
    asyncio.run(GpuWatch(Gpu(), Journal(), sysfs_root="/sys").start())
except NvmlHungError:
    sys.exit(7)
"""


def test_a_hung_driver_does_not_keep_the_process_from_exiting(node: SimulatedNode) -> None:
    """The thread is still inside a call that would take minutes."""
    node.fault("nvmlInit", times=1, delay_ms=FOR_EVER_MS)

    process = subprocess.run(
        [sys.executable, "-c", _GIVES_UP_ON_A_HUNG_DRIVER, str(node.directory)],
        check=False,
        timeout=2 * PATIENCE_SECONDS,
    )

    assert process.returncode == 7
