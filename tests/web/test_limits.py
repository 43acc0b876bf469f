"""Words for limits: no grant is called limited unless that was seen from the host."""

from __future__ import annotations

import dataclasses

import pytest

from tests.web.conftest import NOW, VGPU
from vgpu_agent.isolation.backend import LibraryLimits
from vgpu_agent.model import ContainerUsage, Grant, Share, SharingMode
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
    found = Limits(status).of(dataclasses.replace(grant, shares=(share,)) if share else grant)
    assert found is not None
    return found


def region(status: AgentStatus, **changes: object) -> AgentStatus:
    """The node, whose container says something else in its region."""
    (usage,) = status.containers
    # names of fields
    return dataclasses.replace(status, containers=(dataclasses.replace(usage, **changes),))  # type: ignore[arg-type]


def test_a_limit_counts_as_in_force_only_while_the_library_is_seen(
    volcano_node: AgentStatus,
) -> None:
    """A live slot in a region that holds what was configured.
    Before that it is written and no more.
    """
    assert limit_of(volcano_node).state == "in force"
    assert limit_of(region(volcano_node, processes=0)).state == "configured"
    assert limit_of(dataclasses.replace(volcano_node, containers=())).state == "configured"


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
    assert limit_of(dataclasses.replace(volcano_node, containers=())).state == "no limit"


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
def test_a_limit_of_vgpu_control_is_configured_and_no_more(
    volcano_node: AgentStatus, value: str, setting: str, memory: int, state: str
) -> None:
    """No process reports that it has the library. vgpu-manager:D13 a pod that switches it off is
    shown as what it is, where the operator lets it.
    """
    status = volcano_node
    status.binding.limits = {"volcano-vgpu": LibraryLimits(backend="vgpu-control")}
    status = dataclasses.replace(status, config={"vgpuControl.disableVariable": (setting, "file")})
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
        dataclasses.replace(one, values={"DISABLE_VGPU_CONTROL": value}) for one in pod.containers
    )
    status.cluster.pods = (dataclasses.replace(pod, containers=containers),)
    assert limit_of(status, Share("GPU-0", memory, 30)).state == state
    status.binding.limits = {"volcano-vgpu": LibraryLimits("it is off", backend="vgpu-control")}
    assert limit_of(status) == Limit(LimitState.NONE, "it is off")


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
    assert Limits(volcano_node).of(dataclasses.replace(grant, shares=())) is None


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
