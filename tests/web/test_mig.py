"""MIG instances in metrics, debug JSON and the list of problems."""

from __future__ import annotations

import msgspec
import pytest

from tests.web.conftest import NOW, a_gpu, a_grant
from tests.web.test_metrics import scrape
from vgpu_agent.model import Gpu, GrantState, Health, Inventory, MigInstance
from vgpu_agent.status import AgentStatus, Problem, ProblemKind
from vgpu_agent.web import mig, problems, views

ILL = Health(ok=False, reason="XID 48")
NODES = ("/dev/nvidia-caps/nvidia-cap66", "/dev/nvidia-caps/nvidia-cap67")
INSTANCE = MigInstance("MIG-1", 0, 7, 0, "1g.10gb", 9856, 1, 1, NODES)


def _gpu(instance: MigInstance = INSTANCE, **changes: object) -> Gpu:
    # fields of Gpu
    return msgspec.structs.replace(a_gpu(0), mig_enabled=True, mig_instances=(instance,), **changes)


def _with(node: AgentStatus, *gpus: Gpu) -> AgentStatus:
    return msgspec.structs.replace(
        node, inventory=msgspec.structs.replace(node.inventory, gpus=gpus)
    )


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        (_gpu(), ""),
        (_gpu(msgspec.structs.replace(INSTANCE, health=ILL)), "XID 48"),
        (_gpu(msgspec.structs.replace(INSTANCE, trouble="mig-minors line 4")), "mig-minors line 4"),
        (_gpu(health=ILL), "XID 48"),
        (_gpu(present=False), "its GPU no longer answers"),
    ],
)
def test_an_instance_says_whether_it_may_be_given_away(
    node: AgentStatus, gpu: Gpu, reason: str
) -> None:
    """Metric and debug JSON agree. Its own health counts, its GPU's, and its device nodes."""
    view = mig.instance_view(gpu, gpu.mig_instances[0], NOW)

    assert (view.health, view.health_reason) == ("Unhealthy" if reason else "Healthy", reason)
    assert view.device_nodes == NODES
    series = (
        "vgpu_agent_mig_instance_healthy",
        f"gpu={gpu.uuid}",
        "instance=MIG-1",
        "profile=1g.10gb",
    )
    assert scrape(_with(node, gpu))[series] == (0 if reason else 1)


def test_an_instance_that_is_withheld_is_a_problem_of_the_node(node: AgentStatus) -> None:
    """`vgpu-agent status` and the overview name instance and reason.
    What befell the whole GPU is shown once.
    """
    withheld = _gpu(msgspec.structs.replace(INSTANCE, trouble="mig-minors line 4"))

    said = [problem.reason for problem in problems.known(_with(node, withheld), NOW)]

    assert "MIG instance MIG-1 (1g.10gb) is not offered: mig-minors line 4" in said
    assert not any(
        "MIG-1 (1g.10gb) is not offered" in problem.reason
        for problem in problems.known(_with(node, _gpu(health=ILL)), NOW)
    )


def test_grants_on_devices_that_are_gone_are_counted_by_resource(node: AgentStatus) -> None:
    """nvidia:D9: also for a resource that has no plugin server any more.
    What is released is no grant.
    """
    gone = [a_grant(number, "MIG-gone", resource="nvidia.com/mig-1g.5gb") for number in (7, 8)]
    over = a_grant(9, "MIG-gone", resource="nvidia.com/mig-1g.5gb", state=GrantState.RELEASED)
    node.ledger.grants = (*node.ledger.grants, *gone, over)

    series = scrape(node)

    assert series["vgpu_agent_grants_on_missing_devices", "resource=nvidia.com/mig-1g.5gb"] == 2
    assert series["vgpu_agent_grants_on_missing_devices", "resource=nvidia.com/gpu"] == 0
    said = [problem.reason for problem in problems.known(node, NOW)]
    assert "ml/train-0 runs on MIG-gone, which this node no longer has" in said


def test_before_the_driver_has_answered_no_device_is_gone(node: AgentStatus) -> None:
    """An agent that waits for its driver would count every held device."""
    waiting = msgspec.structs.replace(node, inventory=Inventory())

    assert list(mig.on_missing_devices(waiting)) == []


def test_a_resource_without_a_plugin_server_says_why(node: AgentStatus) -> None:
    """/debug/resources names what is withheld, with the reason of /readyz.
    What is offered and not ready is in the list already.
    """
    node.not_ready = (
        Problem(
            ProblemKind.RESOURCE,
            "nvidia.com/mig-1g.5gb",
            "the device nodes of no MIG instance are known",
        ),
        Problem(ProblemKind.RESOURCE, "nvidia.com/gpu", "serving, not registered"),
        Problem(ProblemKind.NVML, "", "the driver is missing"),
    )

    assert views.withheld(node) == {
        "nvidia.com/mig-1g.5gb": "the device nodes of no MIG instance are known"
    }
