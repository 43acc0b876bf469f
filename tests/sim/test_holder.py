"""Live processes: listed under the pid that the asker knows them by,
and gone when they are gone.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pynvml
import pytest

from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.processes import ProcessUse
from vgpu_agent.sim.state import SimulatedNode

USE = ProcessUse(memory_mib=100, sm_percent=20)
LIST = (
    "import sys, pathlib; from vgpu_agent.sim.preload import preload; "
    "preload(pathlib.Path(sys.argv[1]))\nimport pynvml; pynvml.nvmlInit(); gpu = "
    "pynvml.nvmlDeviceGetHandleByIndex(0)\nprint([row.pid for row in "
    "pynvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu)])\n"
    "print(pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2).used >> 20)"
)
NEW_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child"]


def _pids(gpu: int = 0) -> list[int]:
    return [
        row.pid
        for row in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(
            pynvml.nvmlDeviceGetHandleByIndex(gpu)
        )
    ]


@contextmanager
def _running(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def _pid_namespaces() -> None:
    """A process here may make a pid namespace, as a container runtime does; that takes root."""
    try:
        probe = subprocess.run(
            [*NEW_NAMESPACE, "true"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("unshare (util-linux) is not installed, so no pid namespace can be made here")
    if probe.returncode != 0:
        pytest.skip(f"no pid namespace can be made here: {probe.stderr.strip()}")


def test_a_live_process_is_listed_with_what_it_uses(node: SimulatedNode) -> None:
    """Under its own pid, as long as it runs."""
    with _running(node.start_process(0, USE)) as process:
        assert _pids() == [process.pid]
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert (
            pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used == 100 << 20
        )
        assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu == 20
        assert _pids(1) == []


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_ended_process_leaves_no_ghost(node: SimulatedNode, end: signal.Signals) -> None:
    """However it ends: not in the list, not in memory, not in utilisation."""
    with _running(node.start_process(0, USE)) as process:
        process.send_signal(end)
        process.wait()

    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert _pids() == []
    assert pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used == 0
    assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu == 0
    assert node.describe()[0].processes == 0


def test_the_slot_of_a_killed_process_is_used_again(node: SimulatedNode) -> None:
    """Tests need not tidy up after it."""
    with _running(node.start_process(0, USE)) as killed:
        killed.kill()
        killed.wait()

    with _running(node.start_process(0, USE)) as process:
        assert _pids() == [process.pid]
        assert node.state.gpus[0].processes[0].pid == process.pid


def test_two_processes_share_a_gpu(node: SimulatedNode) -> None:
    """Each has a slot of its own."""
    with (
        _running(node.start_process(0, USE)) as first,
        _running(node.start_process(0, USE)) as second,
    ):
        assert sorted(_pids()) == sorted([first.pid, second.pid])
        assert node.describe()[0].processes == 2


def test_a_holder_ends_after_its_time(node: SimulatedNode) -> None:
    """``sim process --seconds``."""
    program = (
        "import sys, pathlib; from vgpu_agent.sim.holder import hold; from "
        "vgpu_agent.sim.processes import ProcessUse\nhold(pathlib.Path(sys.argv[1]), 0, "
        "ProcessUse(memory_mib=1), seconds=0.05)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, str(node.directory)],
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.startswith("holding 1 MiB on GPU 0 as pid ")
    assert _pids() == []


def test_a_process_on_a_gpu_that_is_not_there(node: SimulatedNode) -> None:
    """The holder's own sentence comes back."""
    with pytest.raises(
        SimulationError, match=r"the process on GPU 9 did not start: .* has no GPU 9; it has 0 to 3"
    ):
        node.start_process(9, USE)


@pytest.mark.usefixtures("_pid_namespaces")
def test_a_process_in_a_container_has_its_host_pid_on_the_host(node: SimulatedNode) -> None:
    """It believes to be pid 1. The host's NVML names it as the host's kernel does."""
    command = [
        *NEW_NAMESPACE,
        sys.executable,
        "-m",
        "vgpu_agent.sim.holder",
        str(node.directory),
        "--gpu",
        "0",
        "--use",
        USE.to_json(),
    ]
    with _running(
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ) as process:
        assert process.stdout is not None
        announced = process.stdout.readline().strip()

        pids = _pids()

        assert announced.endswith("as pid 1")
        assert len(pids) == 1
        assert b"vgpu_agent.sim.holder" in Path(f"/proc/{pids[0]}/cmdline").read_bytes()


@pytest.mark.usefixtures("_pid_namespaces")
def test_a_process_outside_a_container_is_not_listed_inside(node: SimulatedNode) -> None:
    """Its memory is in use there all the same."""
    with _running(node.start_process(0, USE)):
        command = [*NEW_NAMESPACE, sys.executable, "-c", LIST, str(node.directory)]

        inside = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert inside.splitlines() == ["[]", "100"]
