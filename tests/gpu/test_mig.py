"""Reading MIG instances: their facts, and a GPU that is cut anew meanwhile."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vgpu_agent.errors import NvmlError
from vgpu_agent.gpu import inventory, mig
from vgpu_agent.gpu.capabilities import Capabilities
from vgpu_agent.gpu.inventory import NumaNodes, Reading
from vgpu_agent.gpu.nvml import Nvml
from vgpu_agent.gpu.return_codes import NO_PERMISSION, NOT_FOUND
from vgpu_agent.model import Gpu, MigInstance
from vgpu_agent.sim.state import SimulatedNode

UNKNOWN = 999
LOST = 15
SEVEN, THREE = ["1g.10gb"] * 7, ["3g.40gb", "2g.20gb", "1g.10gb"]


def _capabilities(node: SimulatedNode) -> Capabilities:
    return Capabilities(node.directory / "proc")


def _read(node: SimulatedNode, nvml: Nvml) -> mig.MigReading:
    return mig.read(
        nvml, nvml.handle(0), memory_mib=81920, minor=0, capabilities=_capabilities(node)
    )


def _reading(node: SimulatedNode, nvml: Nvml) -> Reading:
    return inventory.read(nvml, NumaNodes(node.directory / "sys"), _capabilities(node))


class CutDuring(Nvml):
    """A driver that cuts the GPU anew right before one of its calls, as nvidia-smi may."""

    def __init__(self, before: str, cut: Callable[[], None], *, times: int = 1) -> None:
        super().__init__()
        self._before, self._cut, self._times = before, cut, times

    def _call(self, name: str, /, *arguments: Any, **about: Any) -> Any:
        if name == self._before and self._times:
            self._times -= 1
            self._cut()
        return super()._call(name, *arguments, **about)


def test_the_facts_of_instances(node: SimulatedNode, nvml: Nvml) -> None:
    """nvidia §3 and §4: profile, slices of GPU and compute instance, ids,
    and the nodes that open them.
    """
    node.set_mig(0, ["3g.40gb", "1c.2g.20gb", "1g.10gb+me"])

    instances = _read(node, nvml).instances

    assert [
        (one.profile, one.gpu_slices, one.compute_slices, one.gpu_instance_id) for one in instances
    ] == [
        ("3g.40gb", 3, 3, 1),
        ("1c.2g.20gb", 2, 1, 5),
        ("1g.10gb+me", 1, 1, 13),
    ]
    assert instances[0].capability_nodes == (
        "/dev/nvidia-caps/nvidia-cap12",
        "/dev/nvidia-caps/nvidia-cap13",
    )
    assert all((node.directory / one.capability_nodes[1].lstrip("/")).exists() for one in instances)
    assert not any(one.trouble for one in instances)


def test_capability_numbers_go_by_the_minor(node: SimulatedNode, nvml: Nvml) -> None:
    """nvidia §4: NVML's index moves when a card is pulled, the minor and the nodes do not."""
    node.set_mig(2, ["7g.80gb"])
    before = _reading(node, nvml).cards[2].gpu.mig_instances[0].capability_nodes
    node.unplug(0)
    nvml.shutdown()
    nvml.init()

    moved = _reading(node, nvml).cards[1].gpu

    assert (moved.index, moved.minor, moved.mig_instances[0].capability_nodes) == (1, 2, before)


def test_an_instance_without_its_line_is_in_trouble_alone(node: SimulatedNode, nvml: Nvml) -> None:
    """The driver's file is garbage in one line:
    six instances can be opened, and the seventh says why not.
    """
    node.set_mig(0, SEVEN)
    path = _capabilities(node).path
    path.write_text(path.read_text().replace("gpu0/gi9/access 84", "gpu0/gi9/access ?"))

    instances = _read(node, nvml).instances

    assert [one.gpu_instance_id for one in instances if one.trouble] == [9]
    assert "gpu0/gi9/access ?" in instances[2].trouble
    assert instances[2].capability_nodes == ()
    assert all(len(one.capability_nodes) == 2 for one in instances if not one.trouble)


def test_a_card_without_mig_is_asked_for_its_mode_only(node: SimulatedNode, nvml: Nvml) -> None:
    """A T4 says that it does not know MIG, and the light look has nothing to do."""
    node.fault("nvmlDeviceGetMigMode", gpu=0, code=3)

    reading = _read(node, nvml)

    assert reading == mig.MigReading(mig.Layout(capable=False))


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetGpuInstanceId",
        "nvmlDeviceGetAttributes_v2",
        "nvmlDeviceGetName",
    ],
)
@pytest.mark.parametrize("profiles", [SEVEN, THREE[:2], []], ids=["seven", "two", "off"])
def test_a_gpu_that_is_cut_anew_meanwhile_is_read_again(
    node: SimulatedNode, function: str, profiles: list[str]
) -> None:
    """Handles die or mean something else between two calls:
    what comes out is the new layout, whole.
    """
    node.set_mig(0, THREE)
    nvml = CutDuring(function, lambda: node.set_mig(0, profiles))
    nvml.load(Path("/"))

    reading = _read(node, nvml)

    assert reading.settled
    assert [one.profile for one in reading.instances] == profiles
    assert tuple(one.uuid for one in reading.instances) == node.mig_uuids(0)
    assert reading.layout.enabled == bool(profiles)
    nvml.shutdown()


def test_a_gpu_that_does_not_settle_keeps_what_was_known(node: SimulatedNode) -> None:
    """It is cut anew at every call: the GPU stays, with the instances of before,
    and nothing half-read goes out.
    """
    node.set_mig(0, THREE)
    layouts = iter([SEVEN, THREE] * 100)
    nvml = CutDuring("nvmlDeviceGetAttributes_v2", lambda: node.set_mig(0, next(layouts)), times=-1)
    nvml.load(Path("/"))
    before = (MigInstance("MIG-before", 0, 0, 0, "7g.80gb", 80384),)
    known = Gpu(
        node.uuids[0],
        0,
        0,
        "A100",
        81920,
        mig_enabled=True,
        pci_bus_id="0000:07:00.0",
        mig_instances=before,
    )

    reading = _reading(node, nvml)

    assert reading.failures == ()
    assert not reading.cards[0].mig.settled
    assert inventory.merge((known,), reading)[0].mig_instances == before
    assert inventory.merge((), reading)[0].mig_enabled
    nvml.shutdown()


def test_readings_under_constant_change_are_consistent_and_lose_no_gpu(
    node: SimulatedNode, nvml: Nvml
) -> None:
    """Another process cuts the GPU without pause:
    every settled reading is one of its layouts, and the GPU is in each.
    """
    node.set_mig(0, SEVEN)
    stop = threading.Event()

    def cut() -> None:
        while not stop.is_set():
            node.set_mig(0, THREE)
            node.set_mig(0, SEVEN)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        cutter = pool.submit(cut)
        try:
            readings = [_reading(node, nvml) for _ in range(60)]
        finally:
            stop.set()
        cutter.result()

    assert all(len(reading.cards) == 4 for reading in readings)
    settled = {
        tuple(one.profile for one in reading.cards[0].gpu.mig_instances)
        for reading in readings
        if reading.cards[0].mig.settled
    }
    # While the simulator fills its table, a GPU has the first instances of a layout already, as a
    # real one has.
    assert settled <= {tuple(profiles[:count]) for profiles in (SEVEN, THREE) for count in range(8)}
    assert settled


def test_an_instance_that_does_not_answer_costs_only_itself(
    node: SimulatedNode, nvml: Nvml
) -> None:
    """An unknown error of one call about one instance:
    the others are read, it is a failure with its reason.
    """
    node.set_mig(0, THREE)
    node.fault("nvmlDeviceGetAttributes_v2", code=UNKNOWN, times=1)

    reading = _read(node, nvml)

    assert [one.index for one in reading.instances] == [1, 2]
    assert reading.settled
    assert [(slot.uuid, problem) for slot, problem in reading.failures] == [
        (node.mig_uuids(0)[0], "nvmlDeviceGetAttributes_v2: Unknown Error (NVML code 999)")
    ]


@pytest.mark.parametrize(
    ("function", "times", "silent"),
    [("nvmlDeviceGetAttributes_v2", 1, 1), ("nvmlDeviceGetGpuInstanceId", -1, 3)],
)
def test_a_known_instance_that_does_not_answer_is_kept(
    node: SimulatedNode, nvml: Nvml, function: str, times: int, silent: int
) -> None:
    """Its facts are those of before, also where its identity is missing.
    The health machine gets the driver's message.
    """
    node.set_mig(0, THREE)
    known = inventory.merge((), _reading(node, nvml))
    node.fault(function, gpu=0, code=UNKNOWN, times=times)

    reading = _reading(node, nvml)

    assert inventory.merge(known, reading) == known
    problems = inventory.silent_instances(known[0], reading.cards[0])
    assert list(problems) == list(node.mig_uuids(0)[:silent])
    assert set(problems.values()) == {f"{function}: Unknown Error (NVML code 999)"}


PERMISSION = (
    "give it NVIDIA_MIG_MONITOR_DEVICES=all and the capability SYS_ADMIN (components/mig-monitor)"
)


@pytest.mark.parametrize(
    ("function", "slots"),
    [
        ("nvmlDeviceGetMaxMigDeviceCount", 0),
        ("nvmlDeviceGetMigDeviceHandleByIndex", 7),
        ("nvmlDeviceGetGpuInstanceId", 2),
    ],
)
def test_instances_that_may_not_be_read_are_told_with_the_remedy(
    node: SimulatedNode, nvml: Nvml, function: str, slots: int
) -> None:
    """A container that was not given NVIDIA's MIG monitor:
    the GPU is there, and says why its instances are not.
    """
    node.set_mig(0, ["3g.40gb", "3g.40gb"])
    node.fault(function, gpu=0, code=NO_PERMISSION)

    reading = _reading(node, nvml)

    assert (reading.failures, len(reading.cards)) == ((), 4)
    gpu = inventory.merge((), reading)[0]
    assert (gpu.mig_enabled, gpu.mig_instances, len(reading.cards[0].mig.failures)) == (
        True,
        (),
        slots,
    )
    assert gpu.mig_trouble == (
        f"{function}: Insufficient Permissions (NVML code 4); the agent's container may not read "
        f"MIG instances: {PERMISSION}"
    )


def test_a_card_that_may_not_be_opened_is_told_with_the_remedy(
    node: SimulatedNode, nvml: Nvml
) -> None:
    """Some drivers do not even let a container without the right open a card in MIG mode."""
    node.fault("nvmlDeviceGetHandleByIndex", gpu=1, code=NO_PERMISSION)

    (failure,) = _reading(node, nvml).failures

    assert failure.startswith(
        "1: nvmlDeviceGetHandleByIndex: Insufficient Permissions (NVML code 4); the agent's "
        "container may not open"
    )
    assert failure.endswith(PERMISSION)


def test_known_instances_are_kept_when_the_right_to_read_them_is_lost(
    node: SimulatedNode, nvml: Nvml
) -> None:
    """A container can lose its devices while it runs:
    its instances are Unhealthy with that reason, and not gone.
    """
    node.set_mig(0, THREE)
    known = inventory.merge((), _reading(node, nvml))
    node.fault("nvmlDeviceGetMaxMigDeviceCount", gpu=0, code=NO_PERMISSION)

    reading = _reading(node, nvml)

    assert inventory.merge(known, reading)[0].mig_instances == known[0].mig_instances
    problems = inventory.silent_instances(known[0], reading.cards[0])
    assert list(problems) == list(node.mig_uuids(0))
    assert all(problem.endswith(PERMISSION) for problem in problems.values())


def test_a_driver_that_cannot_count_instances_has_none(node: SimulatedNode, nvml: Nvml) -> None:
    """An old one does not know the function. That is no want of permission."""
    node.set_mig(0, THREE)
    node.fault("nvmlDeviceGetMaxMigDeviceCount", code=13)

    assert (_read(node, nvml).layout.slots, _read(node, nvml).trouble) == ((), "")


def test_a_lost_card_is_lost_with_its_instances(node: SimulatedNode, nvml: Nvml) -> None:
    """NVML's word for the whole card is not taken for an instance's."""
    node.set_mig(0, THREE)
    node.fault("nvmlDeviceGetAttributes_v2", code=LOST, times=1)

    with pytest.raises(NvmlError, match="GPU is lost"):
        _read(node, nvml)


def test_the_light_look_sees_what_a_reading_would(node: SimulatedNode, nvml: Nvml) -> None:
    """Same layout, same value. Another layout, another value.
    Nothing when an instance goes away during the look.
    """
    node.set_mig(0, THREE)
    layout = mig.look(nvml, nvml.handle(0))

    assert layout == _read(node, nvml).layout
    node.set_mig(0, SEVEN)
    assert mig.look(nvml, nvml.handle(0)) != layout
    node.fault("nvmlDeviceGetGpuInstanceId", code=NOT_FOUND, times=1)
    assert mig.look(nvml, nvml.handle(0)) is None


def test_reading_and_looking_take_few_calls(node: SimulatedNode, nvml: Nvml) -> None:
    """A GPU with seven instances: some hundred calls a poll, some thirty a second in between. Both
    are counted, as clocks differ.
    """
    node.set_mig(0, SEVEN)
    handle = nvml.handle(0)
    before = nvml.calls
    _read(node, nvml)
    between = nvml.calls
    mig.look(nvml, handle)

    assert between - before <= 105
    assert nvml.calls - between <= 30


def test_profile_names_are_nvmls_where_it_has_one() -> None:
    """Suffixes such as +me are part of the name."""
    assert (
        mig.profile_name("NVIDIA A100-SXM4-80GB MIG 1g.10gb+me", 1, 1, 9728, 81920) == "1g.10gb+me"
    )


@pytest.mark.parametrize(
    ("slices", "compute", "memory_mib", "gpu_memory_mib", "profile"),
    [
        (1, 1, 4864, 40960, "1g.5gb"),
        (3, 3, 19968, 40960, "3g.20gb"),
        (7, 7, 40192, 40960, "7g.40gb"),
        (3, 1, 40192, 81920, "1c.3g.40gb"),
    ],
)
def test_profile_names_follow_nvidias_formula_elsewhere(
    slices: int, compute: int, memory_mib: int, gpu_memory_mib: int, profile: str
) -> None:
    """nvidia §3: round(ceil(8·MIG/total)/8 · total GiB);
    A100-40GB 1g with 4864 of 40960 MiB is 1g.5gb.
    """
    assert (
        mig.profile_name("Old driver's name", slices, compute, memory_mib, gpu_memory_mib)
        == profile
    )
