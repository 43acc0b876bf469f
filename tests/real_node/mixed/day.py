"""One mixed day on a real node: jobs are created, finished, deleted,
and a `Checker` is shown the node all the while.

Kubelet, containerd, API server and default scheduler are real; Volcano's schedulers and
vgpu-manager's are the stand-ins of `vgpu_agent.sim`. Kubelet and agent have their defaults: a day
with shortened pauses would say nothing about a node that people have.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from tests.real_node.agents import NodeAgent, wait_allocatable
from tests.real_node.mixed import tools
from tests.real_node.mixed.checker import Checker, Report
from tests.real_node.mixed.jobs import (
    GPUSHARE,
    SCHEDULERS,
    UNIT_MIB,
    VGPU_FAMILY,
    VGPU_MANAGER,
    Job,
)
from tests.real_node.mixed.tools import Sizes
from tests.real_node.rig import ApiError, Options, Rig
from tests.real_node.vgpu_manager_node import Extender
from tests.real_node.volcano import VolcanoScheduler
from tests.real_node.volcano_node import MEMORY_MIB, MODEL
from vgpu_agent.sim.protocol import podresources_pb2 as pod_resources
from vgpu_agent.sim.stand_in_library import (
    deliver_stand_in_control_library,
    deliver_stand_in_library,
)

GPUS, REPLICAS = 4, 4
_LOOK_SECONDS = 0.25
_HANDOVER_LOOK_SECONDS = 0.05
_PODS_SECONDS = 1.0
_LONGEST_AFTER_ARRIVALS_SECONDS = 300.0
# A last round of all families, the kubelet's status, and marks that were held back.
_LONGEST_REST_SECONDS = 30.0
_PODS = "/api/v1/namespaces/default/pods"
_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# an id of volcano-gpushare: the GPU's number, and one of its units (volcano-gpushare S1)
_NUMBERED = re.compile(r"([0-9]+)-[0-9]+\Z")

# Family → its key in the configuration, where that is spelt otherwise.
_KEYS = {
    VGPU_FAMILY: "volcanoVgpu",
    GPUSHARE: "volcanoGpushare",
    VGPU_MANAGER: "vgpuManager",
}
_CONFIG = """\
version: v1
families: {{{families}}}
sharing: {{timeSlicing: {{resources: [{{name: nvidia.com/gpu, replicas: {replicas}}}]}}}}
aws: {{vgpus: {replicas}}}
plugin: {{passDeviceSpecs: true}}
volcanoVgpu: {{gpuMemoryFactor: {unit_mib}}}
volcanoGpushare: {{gpuMemoryFactor: {unit_mib}}}
stateDirectory: FOLDER/state
hamiCore: {{hostDirectory: FOLDER/hook}}
vgpuControl: {{hostDirectory: FOLDER/control}}
binding: {{mode: late, cdiDirectory: {cdi}}}
"""


def node_options(topology_manager_policy: str) -> Options:
    """A node whose kubelet writes its status as rarely as kubelets do."""
    return Options(
        numa_nodes=2,
        topology_manager_policy=topology_manager_policy,
        kubelet={"nodeStatusUpdateFrequency": "10s"},
    )


@contextlib.contextmanager
def mixed_agent(rig: Rig, families: Sequence[str]) -> Iterator[NodeAgent]:
    """An agent with its defaults that offers these families on four GPUs;
    it is closed at the end.
    """
    switches = ", ".join(f"{_KEYS.get(family, family)}: true" for family in families)
    config = _CONFIG.format(
        families=switches, replicas=REPLICAS, unit_mib=UNIT_MIB, cdi=rig.cdi_dir()
    )
    agent = NodeAgent(
        rig,
        config,
        gpus=GPUS,
        model=MODEL,
        numa=[0, 0, 1, 1],
        in_cluster=True,
        constants={},
    )
    with contextlib.closing(agent):
        hook = agent.folder / "hook"
        hook.mkdir()
        deliver_stand_in_library(hook)
        deliver_stand_in_control_library(agent.folder / "control")
        agent.start()
        sizes = _sizes(agent, families)
        for resource, count in sizes.counts.items():
            wait_allocatable(rig, GPUS * count, 40, resource=resource)
        rig.wait_for(
            lambda: tools.idle_problems(rig.node(), sizes) == [] or None,
            what="a Node that shows every family all GPUs",
        )
        yield agent


def _sizes(agent: NodeAgent, families: Sequence[str]) -> Sizes:
    return Sizes(tuple(agent.simulated.uuids), MEMORY_MIB, tuple(families), REPLICAS)


@contextlib.contextmanager
def _schedulers(rig: Rig, families: Collection[str]) -> Iterator[None]:
    """The stand-ins for those of the families that need more than the default scheduler."""
    with contextlib.ExitStack() as started:
        for family in (VGPU_FAMILY, GPUSHARE):
            if family in families:
                started.enter_context(
                    VolcanoScheduler(
                        rig,
                        gpushare="share" if family == GPUSHARE else "off",
                        policy="binpack",
                        scheduler_name=SCHEDULERS[family],
                    )
                )
        if VGPU_MANAGER in families:
            started.enter_context(Extender(rig))
        yield


def play(rig: Rig, agent: NodeAgent, jobs: Sequence[Job], families: Sequence[str]) -> Report:
    """Live through one day and return what it came to."""
    folder = agent.folder / "found"
    folder.mkdir()
    checker = Checker(jobs, folder, _sizes(agent, families))
    with _schedulers(rig, families):
        _Day(rig, jobs, checker, folder, agent.simulated.uuids).live()
    checker.judge()
    return checker.report


class _Day:
    """State: which jobs have been created and deleted."""

    def __init__(
        self, rig: Rig, jobs: Sequence[Job], checker: Checker, folder: Path, uuids: Sequence[str]
    ) -> None:
        self._rig, self._checker, self._folder, self._uuids = rig, checker, folder, uuids
        self._coming = sorted(jobs, key=lambda job: job.arrives_seconds)
        self._deleted: set[str] = set()
        self._admitted: dict[str, float] = {}  # pod → unix seconds, by kubelet
        self._began = _uptime()

    def live(self) -> None:
        """Create, delete and look until all have ended, or for too long."""
        until = self._began + self._coming[-1].arrives_seconds + _LONGEST_AFTER_ARRIVALS_SECONDS
        looked_at, left = 0.0, True
        while (self._coming or left) and _uptime() < until:
            self._create_due()
            self._checker.read_views()
            if self._checker.handing_over:
                healthy = _healthy(self._rig, self._uuids)
                listed = _holdings(self._rig)
                shown = [pod["metadata"]["name"] for pod in self._living_pods()]
                self._checker.see_healthy(healthy, listed, _uptime(), shown=shown)
            if _uptime() - looked_at >= _PODS_SECONDS:
                looked_at = _uptime()
                left = self._look_at_pods()
            self._delete_due()
            time.sleep(_HANDOVER_LOOK_SECONDS if self._checker.handing_over else _LOOK_SECONDS)
        self._checker.report.seconds = _uptime() - self._began
        self._rest()
        failed = dict[str, str]()
        for pod in self._rig.pods():
            name, status = pod["metadata"]["name"], pod["status"]
            self._note_admitted(pod)
            if status.get("phase") == "Failed" and name not in self._deleted:
                failed[name] = f"{status.get('reason')}: {status.get('message')}"
            elif status.get("phase") in ("Pending", "Running"):
                self._checker.report.unfinished[name] = str(
                    status.get("containerStatuses", status)
                )[:300]
        self._checker.see_failed(failed, self._admitted)

    def _rest(self) -> None:
        """Wait until the families' tools show that all of the node is free and all pods were
        served; note what is missing in the end.
        """
        until = _uptime() + _LONGEST_REST_SECONDS
        while missing := self._checker.at_rest(self._rig.pods(), self._rig.node(), _uptime()):
            if _uptime() > until:
                self._checker.report.tools += [f"in the end {problem}" for problem in missing]
                break
            time.sleep(_PODS_SECONDS)

    def _create_due(self) -> None:
        while self._coming and self._began + self._coming[0].arrives_seconds <= _uptime():
            self._rig.create_pod(self._coming.pop(0).manifest(str(self._folder)))

    def _delete_due(self) -> None:
        for name, view in self._checker.views.items():
            if (
                view.job.deleted
                and name not in self._deleted
                and _uptime() > view.at + view.job.run_seconds
            ):
                self._deleted.add(name)
                with contextlib.suppress(ApiError):  # it has ended meanwhile
                    self._rig.api.delete(f"{_PODS}/{name}")

    def _look_at_pods(self) -> bool:
        """Look at the pods, and tell whether any has not ended."""
        pods = self._living_pods()
        for pod in pods:
            self._note_admitted(pod)
        self._checker.see_pods(pods, _holdings(self._rig), _uptime())
        now = _uptime()
        self._checker.see_node(self._rig.node(), now)
        return bool(pods)

    def _living_pods(self) -> list[Mapping[str, Any]]:
        """Return the pods whose end the API server does not show."""
        phases = "status.phase!=Succeeded,status.phase!=Failed"
        return list(self._rig.api.get(f"{_PODS}?fieldSelector={phases}")["items"])

    def _note_admitted(self, pod: Mapping[str, Any]) -> None:
        if at := pod["status"].get("startTime"):
            self._admitted[pod["metadata"]["name"]] = dt.datetime.fromisoformat(at).timestamp()


def _uptime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _holdings(rig: Rig) -> Mapping[str, Mapping[str, Sequence[str]]]:
    """Pod → resource → ids from pod-resources."""
    with grpc.insecure_channel(f"unix:{rig.kubelet_dir()}/pod-resources/kubelet.sock") as channel:
        answer = channel.unary_unary(
            "/v1.PodResourcesLister/List",
            request_serializer=pod_resources.ListPodResourcesRequest.SerializeToString,
            response_deserializer=pod_resources.ListPodResourcesResponse.FromString,
        )(pod_resources.ListPodResourcesRequest(), timeout=10)
    found: dict[str, dict[str, list[str]]] = {}
    for pod in answer.pod_resources:
        for devices in (devices for container in pod.containers for devices in container.devices):
            found.setdefault(pod.name, {}).setdefault(devices.resource_name, []).extend(
                devices.device_ids
            )
    return found


def _healthy(rig: Rig, uuids: Sequence[str]) -> dict[str, frozenset[str]]:
    """Resource → GPUs with healthy ids, as kubelet has them;
    ``uuids`` are those of the node in the order of their numbers.
    """
    with grpc.insecure_channel(f"unix:{rig.kubelet_dir()}/pod-resources/kubelet.sock") as channel:
        answer = channel.unary_unary(
            "/v1.PodResourcesLister/GetAllocatableResources",
            request_serializer=pod_resources.AllocatableResourcesRequest.SerializeToString,
            response_deserializer=pod_resources.AllocatableResourcesResponse.FromString,
        )(pod_resources.AllocatableResourcesRequest(), timeout=10)
    found: dict[str, set[str]] = {}
    for devices in answer.devices:
        named = (matched[0] for id_ in devices.device_ids if (matched := _UUID.match(id_)))
        numbered = (
            uuids[int(matched[1])]
            for id_ in devices.device_ids
            if (matched := _NUMBERED.match(id_))
        )
        found.setdefault(devices.resource_name, set()).update(named, numbered)
    return {resource: frozenset(gpus) for resource, gpus in found.items()}
