"""The wrapper's edge: errors, counters, the call in flight, and a missing driver."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vgpu_agent.errors import NvmlError
from vgpu_agent.gpu import library
from vgpu_agent.gpu.nvml import Nvml
from vgpu_agent.gpu.return_codes import GPU_IS_LOST
from vgpu_agent.sim.state import SimulatedNode

# A process of its own, as this one has the simulated library loaded already.
_WITHOUT_DRIVER = """
import sys
from pathlib import Path
from vgpu_agent.errors import DriverMissingError
from vgpu_agent.gpu.nvml import Nvml
try:
    Nvml().load(Path(sys.argv[1]))
except DriverMissingError as err:
    print(err)
"""


def _load_in_fresh_process(driver_root: Path) -> str:
    command = [sys.executable, "-W", "error", "-c", _WITHOUT_DRIVER, str(driver_root)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_missing_library_is_said_in_three_lines_at_most(tmp_path: Path) -> None:
    """The operator reads what is missing, what NVML answered, and what to do."""
    text = _load_in_fresh_process(tmp_path)

    assert text.startswith("no usable NVIDIA driver: there is no libnvidia-ml.so.1; ")
    assert len(text.splitlines()) <= 3
    assert "NVML Shared Library Not Found" in text
    assert f"set driverRoot (now {tmp_path})" in text


def test_a_library_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    """A truncated file below the driver root is not passed over in silence."""
    broken = tmp_path / "usr/lib64/libnvidia-ml.so.1"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"\x7fELF")

    assert f"{broken} (cannot be loaded: " in _load_in_fresh_process(tmp_path)


@pytest.mark.parametrize(
    "directory", ["usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu"]
)
def test_a_library_below_the_driver_root_is_found(
    node: SimulatedNode, tmp_path: Path, directory: str
) -> None:
    """nvidia §9: the usual directories. Here the library finds no driver behind it,
    which proves that it was loaded.
    """
    from vgpu_agent.sim.build import build

    assert node
    place = tmp_path / "driver" / directory
    place.mkdir(parents=True)
    (place / library.SONAME).symlink_to(build())
    command = [sys.executable, "-c", _WITHOUT_DRIVER, str(tmp_path / "driver")]

    text = subprocess.run(
        command, check=True, capture_output=True, text=True, env={"PYTHONPATH": str(Path.cwd())}
    ).stdout

    assert text.startswith(f"no usable NVIDIA driver: loaded {place / library.SONAME}; nvmlInit: ")
    assert "Driver Not Loaded" in text


def test_the_library_says_whether_it_is_simulated(nvml: Nvml) -> None:
    """No driver exports the simulation's symbol."""
    assert nvml.simulated


def test_an_error_has_call_code_and_text(node: SimulatedNode, nvml: Nvml) -> None:
    """It is counted, as it is no normal answer."""
    handle = nvml.handle(1)
    node.lose(1)

    with pytest.raises(
        NvmlError, match=r"nvmlDeviceGetTemperature: GPU is lost \(NVML code 15\)"
    ) as caught:
        nvml.temperature_celsius(handle)

    assert (caught.value.call, caught.value.code) == ("nvmlDeviceGetTemperature", GPU_IS_LOST)
    assert nvml.errors == 1
    assert nvml.last_error == str(caught.value)
    assert nvml.calls > 2


def test_an_unknown_code_is_an_error_like_any_other(node: SimulatedNode, nvml: Nvml) -> None:
    """A newer driver's code has no class and no text in the binding."""
    handle = nvml.handle(0)
    node.fault("nvmlDeviceGetTemperature", code=777)

    with pytest.raises(NvmlError) as caught:
        nvml.temperature_celsius(handle)

    assert caught.value.code == 777


def test_a_name_that_is_no_text_is_an_error_and_not_a_crash(
    node: SimulatedNode, nvml: Nvml
) -> None:
    """Memory corruption on a dying card has been seen to end here."""
    handle = nvml.handle(0)
    node.state.gpus[0].name = b"\xff\xfe"

    with pytest.raises(NvmlError, match="not UTF-8"):
        nvml.name(handle)


def test_the_call_in_flight_is_named_from_outside(node: SimulatedNode, nvml: Nvml) -> None:
    """Another thread sees function and GPU while the call runs, and nothing afterwards."""
    handle = nvml.handle(2)
    nvml.uuid(handle, index=2)
    node.fault("nvmlDeviceGetPowerUsage", times=1, delay_ms=300)
    caller = threading.Thread(target=nvml.power_watts, args=(handle,))

    caller.start()
    caller.join(0.1)
    running = nvml.in_flight
    caller.join()

    assert running is not None
    assert (running.name, running.gpu) == ("nvmlDeviceGetPowerUsage", node.uuids[2])
    assert nvml.in_flight is None


def test_a_look_up_that_hangs_is_named_by_the_gpu_last_seen_there(
    node: SimulatedNode, nvml: Nvml
) -> None:
    """There is no handle yet, but its place is known."""
    nvml.uuid(nvml.handle(3), index=3)
    node.fault("nvmlDeviceGetHandleByIndex", times=1, delay_ms=300)
    caller = threading.Thread(target=nvml.handle, args=(3,))

    caller.start()
    caller.join(0.1)
    running = nvml.in_flight
    caller.join()

    assert running is not None
    assert running.gpu == node.uuids[3]


def test_an_event_of_a_lost_gpu_is_attributed_by_its_handle(
    node: SimulatedNode, nvml: Nvml
) -> None:
    """The card answers nothing any more, not even its UUID."""
    handle = nvml.handle(1)
    nvml.uuid(handle, index=1)
    events = nvml.create_event_set()
    assert nvml.register(handle, events)
    node.xid(1, 79)
    node.lose(1, entirely=True)

    event = nvml.wait(events, 0.5)

    assert event is not None
    assert (event.gpu, event.xid, event.gpu_instance, event.compute_instance) == (
        node.uuids[1],
        79,
        None,
        None,
    )
    assert nvml.wait(events, 0.01) is None
    nvml.free_event_set(events)


def test_an_event_that_nobody_can_place_has_no_gpu(node: SimulatedNode, nvml: Nvml) -> None:
    """nvidia §10.6, not copied: it does not mean every GPU."""
    handle = nvml.handle(1)
    events = nvml.create_event_set()
    nvml.register(handle, events)
    node.xid(1, 79)
    node.lose(1, entirely=True)

    event = nvml.wait(events, 0.5)

    assert event is not None
    assert event.gpu == ""
    nvml.free_event_set(events)


def test_implausible_pids_are_left_out(node: SimulatedNode, nvml: Nvml) -> None:
    """Drivers whose struct differs from the binding's have reported memory sizes as pids."""
    from vgpu_agent.sim.state import ProcessUse

    node.add_process(0, 4321, ProcessUse(memory_mib=100))
    node.add_process(0, 2**31 - 1, ProcessUse(memory_mib=100))

    assert nvml.processes(nvml.handle(0)) == ((4321, 100),)


def test_the_binding_is_the_vendors_own_and_of_today() -> None:
    """iktos:D15: no unmaintained binding; NVIDIA's own,
    of the driver branch that knows today's GPUs.
    """
    required = [
        name
        for name in importlib.metadata.requires("vgpu-agent") or ()
        if name.startswith("nvidia-ml-py")
    ]
    assert len(required) == 1
    assert int(importlib.metadata.version("nvidia-ml-py").partition(".")[0]) >= 13
