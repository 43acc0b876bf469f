"""The behaviour of NVML that the agent relies on, tested on the simulated library and, with
``--real-driver`` (``scripts/test hardware``), on the cards of this machine.

The same tests for both: a difference between the simulation and a driver fails here. They change
nothing on a card; one process computes for some seconds.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.gpu import burn
from tests.gpu.test_sampling import PROCESS, SAMPLE
from tests.patience import PATIENCE_SECONDS
from vgpu_agent.errors import NvmlError
from vgpu_agent.gpu import mig, return_codes, topology
from vgpu_agent.gpu.health import RecoveryAction
from vgpu_agent.gpu.nvml import DeviceEvent, Nvml
from vgpu_agent.gpu.sampling import ProcessSampler
from vgpu_agent.gpu.session import Session
from vgpu_agent.sim.processes import ProcessUse
from vgpu_agent.sim.state import SimulatedNode

BURNED_MIB = 512
SIMULATED_PID = 4_000_000  # no process of this machine


class Driver(NamedTuple):
    """A driver under test.

    Attributes:
        nvml: the wrapper, open.
        node: its simulated node; None for a real driver.
    """

    nvml: Nvml
    node: SimulatedNode | None


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """The driver, open; nothing that a test asks of it may count as an error."""
    if request.config.getoption("--real-driver"):
        nvml, node = Nvml(), None
        nvml.load(Path("/"))
        assert not nvml.simulated
    else:
        node = request.getfixturevalue("node")
        nvml = request.getfixturevalue("nvml")
    yield Driver(nvml, node)
    assert (nvml.errors, nvml.last_error) == (0, "")
    if node is None:
        with contextlib.suppress(NvmlError):  # a test may have closed it
            nvml.shutdown()


@contextlib.contextmanager
def burning(driver: Driver) -> Iterator[int]:
    """A process that computes on GPU 0 with `BURNED_MIB` of memory; yields its pid."""
    if driver.node is not None:
        use = ProcessUse(memory_mib=BURNED_MIB, sm_percent=90, memory_percent=1)
        slot = driver.node.add_process(0, SIMULATED_PID, use)
        yield SIMULATED_PID
        driver.node.remove_process(0, slot)
        return
    command = [sys.executable, burn.__file__, str(BURNED_MIB)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid
        process.stdin.close()
        process.wait(PATIENCE_SECONDS)


def soon(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds: a driver shows use only after its own next sample."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_each_gpu_says_who_it_is(driver: Driver) -> None:
    """Forms that ids, device nodes, sysfs and annotations are made of."""
    nvml = driver.nvml
    assert nvml.count() > 0
    uuids = set()
    for index in range(nvml.count()):
        handle = nvml.handle(index)
        uuid = nvml.uuid(handle, index=index)
        assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuid)
        uuids.add(uuid)
        assert nvml.name(handle)
        address = nvml.pci_bus_id(handle)
        assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.0", address)
        minor = nvml.minor(handle)
        if driver.node is None:
            assert Path(f"/sys/bus/pci/devices/{address}/vendor").read_text() == "0x10de\n"
            assert Path(f"/dev/nvidia{minor}").is_char_device()
        assert nvml.compute_capability(handle) >= (5, 0)
    assert len(uuids) == nvml.count()


def test_versions_have_the_forms_that_labels_are_made_of(driver: Driver) -> None:
    """Driver, NVML and CUDA; NVML's begins with CUDA's major and ends with the driver's."""
    nvml = driver.nvml
    assert re.fullmatch(r"\d+\.\d+(\.\d+)?", nvml.driver_version())
    assert re.fullmatch(r"\d+\.\d", nvml.cuda_version())
    assert nvml.nvml_version() == f"{nvml.cuda_version().split('.')[0]}.{nvml.driver_version()}"


def test_a_gpu_without_instances_answers_the_questions_about_mig(driver: Driver) -> None:
    """They are asked at each poll, so their normal answers must not look like errors."""
    nvml = driver.nvml
    handle = nvml.handle(0)
    if nvml.mig_mode(handle):
        pytest.skip("this card is divided, and the question is about one that is not")
    found = mig.look(nvml, handle)
    assert found is not None
    assert (found.slots, found.unread_reason) == ((), "")
    assert nvml.mig_slots(handle) in range(8)
    assert nvml.mig_handle(handle, 0) is None


def test_figures_are_plausible(driver: Driver) -> None:
    """In the units that the metrics name."""
    nvml = driver.nvml
    handle = nvml.handle(0)
    total_mib, used_mib = nvml.memory_mib(handle)
    assert 1024 <= total_mib <= 1 << 20
    assert 0 <= used_mib < total_mib
    assert nvml.temperature_celsius(handle) in range(1, 110)
    assert nvml.utilisation_percent(handle) in range(101)
    watts = nvml.power_watts(handle)
    assert watts is not None
    assert 5 <= watts <= 2000
    assert nvml.ecc_uncorrected_total(handle) in {None, *range(1000)}
    assert nvml.recovery_action(handle) in RecoveryAction
    assert nvml.remap_pending(handle) in {True, False}


def test_memory_used_is_without_the_drivers_reserve(driver: Driver) -> None:
    """Otherwise an idle card would look used: some hundred MiB on a large one."""
    if driver.node is not None or driver.nvml.processes(driver.nvml.handle(0)):
        pytest.skip("only a real card that is idle tells how much the driver keeps for itself")
    assert driver.nvml.memory_mib(driver.nvml.handle(0))[1] < 100


def test_a_process_shows_with_its_memory(driver: Driver) -> None:
    """The source of who uses how much; a real process has the memory of its context as well."""
    nvml = driver.nvml
    handle = nvml.handle(0)
    before_mib = nvml.memory_mib(handle)[1]
    with burning(driver) as pid:
        soon(lambda: nvml.memory_mib(handle)[1] >= before_mib + BURNED_MIB)
        soon(lambda: (nvml.utilisation_percent(handle) or 0) > 50)
        listed = dict(nvml.processes(handle))
    if driver.node is None and pid not in listed and not listed:
        pytest.skip("this machine's driver lists no processes, as in some containers")
    assert BURNED_MIB <= listed[pid] < BURNED_MIB + 2048
    soon(lambda: pid not in dict(nvml.processes(handle)))


@pytest.mark.parametrize("by_newer_call", [False, True])
def test_samples_show_who_computes(driver: Driver, *, by_newer_call: bool) -> None:
    """vgpu-manager §7.7, §8.6: the driver's rows reach the libraries unread, so their layout must
    be this one; by the call of all drivers, and by the one that follows it.
    """
    nvml = driver.nvml
    handle = nvml.handle(0)
    rows: list[tuple[int, ...]] = []
    listed: list[tuple[int, ...]] = []

    class Kept:
        def write(
            self,
            index: int,
            since: int,
            samples: memoryview | None,
            compute: memoryview,
            graphics: memoryview,
        ) -> None:
            rows.extend(SAMPLE.iter_unpack(samples or b""))
            listed[:] = PROCESS.iter_unpack(compute)

    sampler = ProcessSampler(nvml, {"gpu": handle}.get)
    sampler._by_extended = by_newer_call
    sampler.aim([(0, "gpu")], Kept())
    with burning(driver) as pid:

        def sampled() -> bool:
            sampler.sample()
            return any(sm_percent > 50 for _, _, sm_percent, *_ in rows)

        before_us = time.time_ns() // 1000
        soon(sampled)
        assert nvml.errors == 0
    row = next(row for row in rows if row[2] > 50)
    assert abs(row[1] - before_us) < PATIENCE_SECONDS * 1e6  # unix microseconds
    assert all(percent <= 100 for percent in row[2:])
    assert all(used >= BURNED_MIB << 20 for process, used, *_ in listed if process == pid)
    if listed:
        assert pid in {process for process, *_ in listed}
        assert row[0] in {process for process, *_ in listed}


def test_errors_of_a_gpu_can_be_listened_to(driver: Driver) -> None:
    """Without an event the wait takes its time and ends without an error."""
    nvml = driver.nvml
    events = nvml.create_event_set()
    assert nvml.register(nvml.handle(0), events)
    began = time.monotonic()
    assert nvml.wait(events, 0.2) is None
    assert 0.15 < time.monotonic() - began < PATIENCE_SECONDS
    nvml.free_event_set(events)


def test_a_gpu_that_is_not_there_is_an_invalid_argument(driver: Driver) -> None:
    """The health check tells a card that has left from one that is broken."""
    nvml = driver.nvml
    with pytest.raises(NvmlError) as caught:
        nvml.handle(nvml.count())
    assert caught.value.code == return_codes.INVALID_ARGUMENT
    nvml.errors, nvml.last_error = 0, ""


def test_links_can_be_read(driver: Driver) -> None:
    """A link that a card does not have is no error; all cards' ends are read."""
    nvml = driver.nvml
    addresses = {nvml.pci_bus_id(nvml.handle(index)) for index in range(nvml.count())}
    for index in range(nvml.count()):
        found = nvml.nvlinks(nvml.handle(index), addresses)
        assert set(found.peers) <= addresses
        assert found.switch_links in range(19)
    assert topology.read_links(nvml, []) == ({}, [])


def test_a_session_reads_everything_and_can_be_reopened(driver: Driver) -> None:
    """The agent's own way to the driver: nothing of it warns on a sound card, and the handles of
    the reading after a reopening are as good as the first ones.
    """
    root = Path("/")
    nvml = driver.nvml
    nvml.shutdown()
    nvml = Nvml()
    heard: list[DeviceEvent] = []
    sysfs = root / "sys" if driver.node is None else driver.node.directory / "sys"
    session = Session(
        nvml, driver_root=root, sysfs_root=sysfs, proc_root=root / "proc", report=heard.append
    )
    first = session.read()
    assert first.warnings == ()
    assert first.simulated == (driver.node is not None)
    # the simulated sysfs does not say which cards the kernel module drives
    if first.driven_cards or driver.node is None:
        assert {card.gpu.pci_bus_id for card in first.reading.cards} <= first.driven_cards
    assert session.listening
    for _ in range(3):
        again = session.read(reopen=True)
        assert [card.gpu for card in again.reading.cards] == [
            card.gpu for card in first.reading.cards
        ]
        assert again.warnings == ()
    assert session.read_if_divided_anew() is None
    (usage, *_) = session.usage()
    assert usage.memory_total_mib == first.reading.cards[0].gpu.memory_mib
    session.close()
    assert heard == []
    assert (nvml.errors, nvml.last_error) == (0, "")
    if driver.node is not None:
        nvml.init()  # for the fixture, which shuts it down
