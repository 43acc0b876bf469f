"""The agent beside a real kubelet, for tests that block: simulated GPUs on the host, the agent's
own process, and kubelet's records.

The agent runs on the host, outside the rig's namespaces, and reaches kubelet through the rig's
folder; containers get the simulated device nodes from the same folder.
"""

from __future__ import annotations

import asyncio
import http.client
import shutil
import tempfile
import urllib.request
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc

from tests import constants
from tests.real_node.rig import Rig
from tests.real_node.rig.manifests import quantity
from tests.replacing import replace_text
from vgpu_agent.sim.agent_process import AgentProcess
from vgpu_agent.sim.protocol import podresources_pb2 as pod_resources
from vgpu_agent.sim.state import SimulatedNode

T = TypeVar("T")
GPU = "nvidia.com/gpu"

# Pauses as short as a test wants them; everything else as on a node.
QUICK = """\
version: v1
gpu: {recovery: {quietSeconds: 1}}
"""
QUICK_CONSTANTS = {
    constants.RELOAD: 0.2,
    constants.VERIFY: 2,
    constants.GPU_POLL: 0.5,
    constants.SPEC_LOOK: 0.5,
}


def shared(replicas: int) -> str:
    """A configuration with so many replicas of each GPU."""
    return (
        QUICK
        + f"sharing: {{timeSlicing: {{resources: [{{name: {GPU}, replicas: {replicas}}}]}}}}\n"
    )


class NodeAgent:
    """One agent on one node of a rig.

    State: the simulated GPUs and the agent's files below a folder of its own, and an event loop
    that runs only while it is asked something.
    """

    def __init__(
        self,
        rig: Rig,
        config: str,
        *,
        gpus: int,
        numa: Sequence[int] | None = None,
        node: int = 1,
        model: str = "A100-SXM4-40GB",
        uuids: Sequence[str] | None = None,
        in_cluster: bool = False,
        constants: Mapping[str, float | str] = QUICK_CONSTANTS,
    ) -> None:
        """Make the GPUs; ``in_cluster`` lets the agent live in the rig's network
        and reach the API server as cluster admin; ``constants`` are those of the agent that have
        other values, see `AgentProcess`.

        In ``config`` and ``constants``, ``FOLDER`` stands for the agent's own folder, which has the
        same path on the node.
        """
        self.rig = rig
        self.folder = Path(tempfile.mkdtemp(prefix="vga", dir="/tmp"))
        self.folder.chmod(0o755)
        self.simulated = SimulatedNode.create(
            self.folder / "gpus", model=model, gpus=gpus, numa=numa, uuids=uuids
        )
        self.config = self.folder / "config.yaml"
        replace_text(self.config, config.replace("FOLDER", str(self.folder)))
        self._node = node
        self._runner = asyncio.Runner()
        self.process = AgentProcess(
            self.folder / "agent.log",
            kubelet=rig.kubelet_dir(node),
            simulate=self.simulated.directory,
            config=self.config,
            flags=[
                "--node-name",
                rig.node_name(node),
                *(["--kubeconfig", str(rig.layout.kubeconfig())] if in_cluster else []),
            ],
            through=rig.in_network() if in_cluster else (),
            opener=_opener_into(rig) if in_cluster else None,
            constants={
                name: value.replace("FOLDER", str(self.folder)) if isinstance(value, str) else value
                for name, value in constants.items()
            },
        )

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something asynchronous to the process and wait for it."""
        return self._runner.run(work)

    def start(self) -> None:
        """Start the process and wait until it is ready."""
        self.run(self.process.start())
        self.run(self.process.until_ready())

    def close(self) -> None:
        """End the process and remove what it leaves."""
        try:
            self.run(self.process.terminate())
        finally:
            self._runner.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def get(self, path: str) -> Any:
        """The JSON behind a debug path."""
        return self.run(self.process.get(path))

    def until(
        self, path: str, condition: Callable[[Any], bool], *, timeout_seconds: float = 20
    ) -> Any:
        """The JSON behind a debug path, as soon as it satisfies ``condition``."""
        return self.run(self.process.until(path, condition, timeout_seconds=timeout_seconds))

    def events(self) -> list[str]:
        """The names of this run's log lines, in order."""
        return [line["msg"] for line in self.process.log_lines()]

    def holders(self) -> dict[str, list[str]]:
        """Pod name → ids, as the agent's ledger has them;
        grants whose pod is not known yet are left out.
        """
        return {
            grant["pod"]: sorted(grant["ids"])
            for grant in self.get("/debug/ledger")["grants"]
            if grant["pod"]
        }

    def knows(self, number: int) -> dict[str, list[str]]:
        """`holders`, as soon as there are so many grants and all are proven."""
        self.until(
            "/debug/ledger",
            lambda ledger: (
                len(ledger["grants"]) == number
                and all(grant["state"] == "identified" for grant in ledger["grants"])
            ),
        )
        return self.holders()


def _opener_into(rig: Rig) -> urllib.request.OpenerDirector:
    """Opens URLs as a process in the rig's network would."""

    class Connection(http.client.HTTPConnection):
        def connect(self) -> None:
            self.sock = rig.connect(self.host, self.port)

    class Handler(urllib.request.HTTPHandler):
        def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(Connection, req)

    return urllib.request.build_opener(urllib.request.ProxyHandler({}), Handler())


def allocatable(rig: Rig, resource: str = GPU, node: int = 1) -> int:
    """Return the allocatable number in the node's status."""
    return quantity(rig.node(node)["status"].get("allocatable", {}).get(resource))


def wait_allocatable(rig: Rig, number: int, timeout: float = 20, *, resource: str = GPU) -> None:
    """Wait until the node's status says this number."""
    rig.wait_for(
        lambda: allocatable(rig, resource) == number or None,
        timeout,
        what=f"allocatable {resource} = {number}",
    )


def wait_annotated(rig: Rig, key: str) -> None:
    """Wait until the Node has this annotation."""
    rig.wait_for(
        lambda: key in rig.node()["metadata"].get("annotations", {}) or None,
        what=f"the Node's annotation {key}",
    )


def kubelets_view(rig: Rig, resource: str = GPU, node: int = 1) -> dict[str, list[str]]:
    """Pod name → ids from pod-resources, asked by a client of our own."""
    with grpc.insecure_channel(
        f"unix:{rig.kubelet_dir(node)}/pod-resources/kubelet.sock"
    ) as channel:
        call = channel.unary_unary(
            "/v1.PodResourcesLister/List",
            request_serializer=pod_resources.ListPodResourcesRequest.SerializeToString,
            response_deserializer=pod_resources.ListPodResourcesResponse.FromString,
        )
        answer = call(pod_resources.ListPodResourcesRequest(), timeout=10)
    view: dict[str, list[str]] = {}
    for pod in answer.pod_resources:
        ids = [
            id_
            for container in pod.containers
            for devices in container.devices
            if devices.resource_name == resource
            for id_ in devices.device_ids
        ]
        if ids:
            view[pod.name] = sorted(ids)
    return view


def visible(rig: Rig, pod: str) -> str:
    """Return the devices in a container's printed environment, once it has printed it."""

    def found() -> str | None:
        lines = [
            line
            for line in rig.logs(pod).splitlines()
            if line.startswith("NVIDIA_VISIBLE_DEVICES=")
        ]
        return lines[0].partition("=")[2] if lines else None

    return rig.wait_for(found, 20, what=f"the output of {pod}")


def environment_of(entries: Mapping[str, str]) -> str:
    """A shell command that prints the variables whose names are given, as NAME=value lines."""
    return "; ".join(f'echo "{name}=${name}"' for name in entries)
