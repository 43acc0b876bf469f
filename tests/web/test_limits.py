"""Words for limits: no grant is called limited unless that was seen from the host."""

from __future__ import annotations

import msgspec
import pytest

from tests.web.conftest import NOW, VGPU
from vgpu_agent.isolation.backend import LibraryLimits
from vgpu_agent.model import (
    ContainerUsage,
    ControlledUse,
    Grant,
    Share,
    SharingMode,
    WrittenLimit,
)
from vgpu_agent.pods import Pod, PodContainer
from vgpu_agent.status import AgentStatus, MpsState, MpsStatus
from vgpu_agent.web import allocations
from vgpu_agent.web.limits import Limit, Limits, LimitState

GIB = 1 << 30


@pytest.fixture
def volcano_node(volcano_node: AgentStatus) -> AgentStatus:
    """The node, whose shares are limited by HAMi-core."""
    volcano_node.binding.limits = {"volcano-vgpu": LibraryLimits()}
    return volcano_node


def limit_of(status: AgentStatus, share: Share | None = None, *, resource: str = VGPU) -> Limit:
    """The limit of the one grant of ``resource``, with another share if one is given."""
    grant: Grant = next(
        grant
        for grant in status.ledger.grants
        if grant.resource == resource and grant.owner is not None
    )
    found = Limits(status).of(msgspec.structs.replace(grant, shares=(share,)) if share else grant)
    assert found is not None
    return found


def region(status: AgentStatus, **changes: object) -> AgentStatus:
    """The node, whose container says something else in its region."""
    (usage,) = status.containers
    # names of fields
    return msgspec.structs.replace(status, containers=(msgspec.structs.replace(usage, **changes),))


def test_a_limit_counts_as_in_force_only_while_the_library_is_seen(
    volcano_node: AgentStatus,
) -> None:
    """A live slot in a region that holds what was configured.
    Before that it is written and no more.
    """
    assert limit_of(volcano_node).state == "in force"
    assert limit_of(region(volcano_node, processes=0)).state == "configured"
    assert limit_of(msgspec.structs.replace(volcano_node, containers=())).state == "configured"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"limit_bytes": 5 * GIB}, "the region allows 5120 MiB of GPU-0 instead of 4096 MiB"),
        ({"limit_bytes": 0}, "the region allows all memory of GPU-0 instead of 4096 MiB"),
        ({"limit_bytes": 1 << 63}, "instead of 4096 MiB"),
        ({"cores_limit_percent": 100}, "the region allows 100 % of GPU-0 instead of 30 %"),
        ({"cores_limit_percent": 0}, "the region allows 100 % of GPU-0 instead of 30 %"),
        ({"limits_cores": False}, "the region's limit of compute is switched off"),
        ({"uuid": "GPU-1"}, "the region does not name GPU-0"),
    ],
)
def test_a_region_that_allows_more_is_not_in_force(
    volcano_node: AgentStatus, changes: dict[str, object], reason: str
) -> None:
    """The container can write there."""
    found = limit_of(region(volcano_node, **changes))
    assert found.state == "not in force"
    assert reason in found.reason


def test_a_region_that_allows_less_holds_the_limit(volcano_node: AgentStatus) -> None:
    """This does no harm, and an operator may have lowered it."""
    assert (
        limit_of(region(volcano_node, limit_bytes=GIB, cores_limit_percent=5)).state == "in force"
    )


def test_compute_that_the_operator_does_not_limit_is_not_missed(volcano_node: AgentStatus) -> None:
    """disableCoreLimit: booked, and not limited."""
    volcano_node.binding.limits = {"volcano-vgpu": LibraryLimits(cores=False)}
    assert (
        limit_of(region(volcano_node, cores_limit_percent=100, limits_cores=False)).state
        == "in force"
    )


def test_a_pod_that_may_switch_its_limit_off_has_none(volcano_node: AgentStatus) -> None:
    """It is shown at the pod, and not taken for a limit that has not been used yet."""
    container = PodContainer(
        "main", limits={VGPU: 1}, environment=frozenset({"CUDA_DISABLE_CONTROL"})
    )
    uid = next(
        grant.owner.pod_uid
        for grant in volcano_node.ledger.grants
        if grant.resource == VGPU and grant.owner
    )
    volcano_node.cluster.pods = (Pod(uid, "ml", "served", containers=(container,)),)
    idle = region(volcano_node, processes=0)
    assert limit_of(idle).state == "configured"
    idle.config = {"hamiCore.disableVariable": ("honor", "a file")}
    assert (limit_of(idle).state, "CUDA_DISABLE_CONTROL" in limit_of(idle).reason) == (
        "no limit",
        True,
    )


def test_without_isolation_there_is_no_limit(volcano_node: AgentStatus) -> None:
    """This holds also where the shares say how many MiB were booked."""
    volcano_node.binding.limits = {"volcano-vgpu": LibraryLimits("volcanoVgpu.isolation is none")}
    assert limit_of(msgspec.structs.replace(volcano_node, containers=())).state == "no limit"


@pytest.mark.parametrize(
    ("value", "setting", "memory", "state"),
    [
        ("", "whole-gpus", 4096, "configured"),
        ("true", "whole-gpus", 4096, "configured"),
        ("true", "honor", 4096, "no limit"),
        ("0", "honor", 4096, "configured"),
        ("true", "ignore", 1 << 30, "configured"),
        ("true", "whole-gpus", 1 << 30, "no limit"),
    ],
)
def test_a_pod_that_runs_without_vgpu_control_has_no_limit(
    volcano_node: AgentStatus, value: str, setting: str, memory: int, state: str
) -> None:
    """vgpu-manager:D13 a pod that switches the library off is shown as what it is, where the
    operator lets it.
    """
    status = volcano_node
    status.binding.limits = {"volcano-vgpu": LibraryLimits(backend="vgpu-control")}
    status = msgspec.structs.replace(
        status, config={"vgpuControl.disableVariable": (setting, "file")}
    )
    (pod,) = [
        pod
        for pod in status.cluster.pods
        if any(
            grant.owner and grant.owner.pod_uid == pod.kubelet_uid
            for grant in status.ledger.grants
            if grant.resource == VGPU
        )
    ]
    containers = tuple(
        msgspec.structs.replace(one, values={"DISABLE_VGPU_CONTROL": value})
        for one in pod.containers
    )
    status.cluster.pods = (msgspec.structs.replace(pod, containers=containers),)
    assert limit_of(status, Share("GPU-0", memory, 30)).state == state
    status.binding.limits = {"volcano-vgpu": LibraryLimits("it is off", backend="vgpu-control")}
    assert limit_of(status) == Limit(LimitState.NONE, "it is off")


REGISTERED = ControlledUse(
    "ml",
    "served",
    "main",
    pids=(4711,),
    limits=(WrittenLimit("GPU-0", 4 * GIB, 30),),
    registers_processes=True,
    on_cards=(("GPU-0", 4711, 1000),),
)


def controlled(status: AgentStatus, **changes: object) -> AgentStatus:
    """The node, whose container vgpu-control limits."""
    status.binding.limits = {"volcano-vgpu": LibraryLimits(backend="vgpu-control")}
    use = msgspec.structs.replace(REGISTERED, **changes)
    return msgspec.structs.replace(status, controlled=(use,))


def test_a_limit_of_vgpu_control_is_in_force_once_a_process_has_registered(
    volcano_node: AgentStatus,
) -> None:
    """The registry asks the kernel which container calls, and its list is a file that only the
    agent writes. Before that the limit is written and no more.
    """
    assert limit_of(controlled(volcano_node)).state == "in force"
    waits = limit_of(controlled(volcano_node, pids=None, on_cards=()))
    assert waits.state == "configured"
    assert "no registered process of the container is known" in waits.reason
    unread = limit_of(msgspec.structs.replace(controlled(volcano_node), controlled=()))
    assert (unread.state, unread.reason) == (
        "configured",
        "its vgpu.config has not been read yet",
    )


def test_a_library_that_does_not_register_is_never_seen(volcano_node: AgentStatus) -> None:
    """vgpuControl.processes host-proc. What its tables say is in files that the tenant writes."""
    found = limit_of(
        controlled(volcano_node, registers_processes=False, pids=None, cores_percent=((0, 5),))
    )
    assert found.state == "configured"
    assert "vgpuControl.processes client" in found.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"trouble": "its vgpu.config is missing", "limits": ()}, "its vgpu.config is missing"),
        ({"limits": ()}, "its vgpu.config does not name GPU-0"),
        (
            {"limits": (WrittenLimit("GPU-0", 5 * GIB, 30),)},
            "its vgpu.config allows 5120 MiB of GPU-0 instead of 4096 MiB",
        ),
        (
            {"limits": (WrittenLimit("GPU-0", 0, 30),)},
            "its vgpu.config allows all memory of GPU-0 instead of 4096 MiB",
        ),
        (
            {"limits": (WrittenLimit("GPU-0", 4 * GIB, 60),)},
            "its vgpu.config allows 60 % of GPU-0 instead of 30 %",
        ),
        (
            {"pids": None},
            "process 4711 of the container uses GPU-0 and has not registered, so it runs without",
        ),
        (
            {"on_cards": (("GPU-0", 4711, 3000), ("GPU-0", 4712, 3200))},
            "processes of the container have 6200 MiB of GPU-0, and its limit is 4096 MiB",
        ),
    ],
)
def test_a_limit_of_vgpu_control_that_does_not_hold(
    volcano_node: AgentStatus, changes: dict[str, object], reason: str
) -> None:
    """Its file, the driver and the kernel say so, and no file that the tenant writes."""
    found = limit_of(controlled(volcano_node, **changes))
    assert found.state == "not in force"
    assert reason in found.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"limits": (WrittenLimit("GPU-0", GIB, 5),)},
        {"limits": (WrittenLimit("GPU-0", 4 * GIB, 100),)},  # its compute policy is none
        {"on_cards": (("GPU-0", 4711, 4096 + 1024),)},  # its context is no allocation
        {"on_cards": (("GPU-1", 4711, 9000),)},  # no part of this grant
    ],
)
def test_a_limit_of_vgpu_control_that_holds(
    volcano_node: AgentStatus, changes: dict[str, object]
) -> None:
    """A lower limit does no harm; neither does anything that the library does not count."""
    assert limit_of(controlled(volcano_node, **changes)).state == "in force"


def test_a_whole_card_needs_no_limit_of_memory(volcano_node: AgentStatus) -> None:
    """vgpu-manager §7.7: memory_limit is 0 then."""
    status = controlled(volcano_node, limits=(WrittenLimit("GPU-0", 0, 100),))
    assert limit_of(status, Share("GPU-0", 81920, 100)).state == "in force"


def test_a_container_of_before_keeps_its_limit_when_isolation_is_switched_off(
    volcano_node: AgentStatus,
) -> None:
    """Its library still obeys its file."""
    status = controlled(volcano_node)
    off = LibraryLimits("vgpuManager.isolation is none", backend="vgpu-control")
    status.binding.limits = {"volcano-vgpu": off}
    assert limit_of(status).state == "in force"


@pytest.mark.parametrize(
    ("sharing", "share", "state"),
    [
        (SharingMode.TIME_SLICING, Share("GPU-0"), "no limit"),
        (SharingMode.MPS_OF_HOST, Share("GPU-0"), "no limit"),
        (SharingMode.NONE, Share("GPU-0", exclusive=True), "whole device"),
        (SharingMode.NONE, Share("MIG-1", 5000), "in force"),
        (SharingMode.MPS, Share("GPU-0", 5000), "in force"),
    ],
)
def test_families_whose_ids_name_devices(
    node: AgentStatus, sharing: SharingMode, share: Share, state: str
) -> None:
    """By how the holders of a device share it."""
    node.ledger.sharing = {"nvidia.com/gpu": sharing.value}
    node.mps = (MpsStatus("nvidia.com/gpu", MpsState.RUNNING),)
    assert limit_of(node, share, resource="nvidia.com/gpu").state == state


def test_a_daemon_in_trouble_limits_nobody(node: AgentStatus) -> None:
    """Its reason is the limit's."""
    node.ledger.sharing = {"nvidia.com/gpu": "mps"}
    node.mps = (MpsStatus("nvidia.com/gpu", MpsState.RUNNING, trouble="limits differ"),)
    found = limit_of(node, Share("GPU-0", 5000), resource="nvidia.com/gpu")
    assert (found.state, found.reason) == ("not in force", "limits differ")
    node.mps = ()
    assert limit_of(node, Share("GPU-0", 5000), resource="nvidia.com/gpu").state == "not in force"


def test_what_is_not_decided_has_no_limit_to_speak_of(volcano_node: AgentStatus) -> None:
    """Allocate has booked ids, and the pod decides later."""
    grant = next(grant for grant in volcano_node.ledger.grants if grant.resource == VGPU)
    assert Limits(volcano_node).of(msgspec.structs.replace(grant, shares=())) is None


def test_allocations_show_the_limit_and_why(volcano_node: AgentStatus) -> None:
    """/debug/allocations."""
    (view,) = allocations.of_pod(volcano_node, NOW, "ml/served")
    assert (view.limit, view.state) == ("in force", "identified")
    assert "library" in view.limit_reason


def test_usage_of_another_pod_says_nothing(volcano_node: AgentStatus) -> None:
    """Regions are found by pod and container."""
    volcano_node.containers = (
        ContainerUsage("ml", "other", "main", 0, "GPU-0", 0, 80 * GIB, 0, 0, 100, 1),
    )
    assert limit_of(volcano_node).state == "configured"
