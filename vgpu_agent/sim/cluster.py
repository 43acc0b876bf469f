"""A simulated cluster of one node:
the simulated API server, kubelet, container runtime and kube-scheduler together.

The demo and the component tests put the agent's real process beside it. It imitates this: the
kubelet keeps capacity and allocatable of the Node equal to the plugins' lists, admits the pods that
are bound to it one after the other, and starts their containers in order, each with
PreStartContainer, as often as it takes. The runtime resolves CDI names when a container is created.
The simulated kubelet and schedulers write into the object store directly, so the API server counts
only the requests of others.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from vgpu_agent.concurrency import Supervisor
from vgpu_agent.errors import SimulationError
from vgpu_agent.pods import MIRROR_POD
from vgpu_agent.sim.api.objects import ApiRefusalError
from vgpu_agent.sim.api.server import ApiServer
from vgpu_agent.sim.cdi_reader import Received, received
from vgpu_agent.sim.kubelet.faults import AdmissionError, ContainerStartError
from vgpu_agent.sim.kubelet.kubelet import Container, SimulatedKubelet
from vgpu_agent.sim.kubelet.pod_status import PodStatus
from vgpu_agent.sim.plain_scheduler import run_plain_scheduler
from vgpu_agent.sim.vgpu_manager.extender import ExtenderSettings, VgpuExtender
from vgpu_agent.sim.volcano.api import ApiAccess
from vgpu_agent.sim.volcano.scheduler import VolcanoScheduler, VolcanoSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from vgpu_agent.sim.api.objects import Object
    from vgpu_agent.sim.kubelet.kubelet import Pod

_PUBLISH_SECONDS = 0.05  # between two writes of the Node's status, if it has changed


@dataclasses.dataclass(frozen=True)
class Started:
    """One start of one container; ``received`` is the environment, mounts and device nodes that it
    got.
    """

    pod: str
    pod_uid: str
    container: str
    received: Received


class SimulatedCluster:
    """Everything that the agent meets on its node and in its cluster; an async context.

    State: that of its parts, the pods that the kubelet has admitted, and `started`, which only
    grows.

    Args:
        directory: kubelet's root, the CDI directory and the kubeconfig file lie below it; short,
            because of socket names.
        node: the Node's name.
        kubelet_version: as in the Node.
        runtime_version: as in the Node; containerd before 2.0 takes no CDI names.
        retry_seconds: after which kubelet tries again to start a container (the real one takes
            about a quarter of a minute).
        status_seconds: how often kubelet writes the Node's status (the real one: every ten
            seconds).

    Attributes:
        started: every start of a container, oldest first.
        refusals: (pod, container, text) of every start that was refused.
        hold_admission: the kubelet admits no pod while it is set.
    """

    def __init__(
        self,
        directory: Path,
        *,
        node: str = "node-a",
        kubelet_version: str = "v1.36.3",
        runtime_version: str = "containerd://2.4.2",
        retry_seconds: float = 0.2,
        status_seconds: float = _PUBLISH_SECONDS,
    ) -> None:
        self.directory, self.node = directory, node
        self.kubelet_directory, self.cdi_directory = directory / "kubelet", directory / "cdi"
        self.kubeconfig = directory / "kubeconfig"
        self.versions = {
            "kubeletVersion": kubelet_version,
            "containerRuntimeVersion": runtime_version,
        }
        self.api = ApiServer()
        self.kubelet = SimulatedKubelet(self.kubelet_directory)
        self.started: list[Started] = []
        self.refusals: list[tuple[str, str, str]] = []
        # name of a container → set when its image is there
        self._pulling: dict[str, asyncio.Event] = {}
        self.hold_admission = False
        self._resolves_cdi = _resolves_cdi(runtime_version)
        self._retry_seconds = retry_seconds
        self._status_seconds = status_seconds
        self._supervisor = Supervisor(
            backoff_min_seconds=retry_seconds, backoff_max_seconds=retry_seconds
        )
        self._pods: dict[str, Pod] = {}  # admitted, by UID
        self._seen: set[str] = set()  # UIDs of the pods that kubelet has admitted or rejected
        # by UID: the task that starts the containers of an admitted pod
        self._pod_tasks: dict[str, asyncio.Task[None]] = {}
        self._exit = contextlib.AsyncExitStack()

    # Start and stop

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.directory.mkdir, parents=True, exist_ok=True)
        await self._exit.enter_async_context(self.api)
        self.kubeconfig = await asyncio.to_thread(self.api.kubeconfig, self.kubeconfig)
        self.create_node()
        await self.kubelet.start()
        self._exit.push_async_callback(self.kubelet.stop)
        await self._exit.enter_async_context(self._supervisor)
        self._supervisor.start("node status", self._publish)
        self._supervisor.start("pods", self._follow_pods)
        # the stand-in for kube-scheduler
        self._supervisor.start("plain scheduler", lambda: run_plain_scheduler(self.objects))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit.aclose()

    async def start_volcano(self, settings: VolcanoSettings | None = None) -> None:
        """Run the stand-in for Volcano's scheduler, in place of an earlier stand-in for it."""
        await self.stop_volcano()
        scheduler = VolcanoScheduler(
            ApiAccess(self.api.url), settings or VolcanoSettings(retry_seconds=0.2)
        )
        self._supervisor.start("volcano", scheduler.run)

    async def stop_volcano(self) -> None:
        """Stop the stand-in for Volcano's scheduler; it has no state to lose."""
        await self._supervisor.stop("volcano")

    async def start_extender(self, settings: ExtenderSettings | None = None) -> None:
        """Run the stand-in for vgpu-manager's scheduler, in place of an earlier stand-in for it."""
        await self.stop_extender()
        extender = VgpuExtender(
            ApiAccess(self.api.url), settings or ExtenderSettings(retry_seconds=0.2)
        )
        self._supervisor.start("extender", extender.run)

    async def stop_extender(self) -> None:
        """Stop the stand-in for vgpu-manager's scheduler; it has no state to lose."""
        await self._supervisor.stop("extender")

    async def reboot(self) -> None:
        """Lose what a reboot loses: processes, kubelet's connections and all CDI specs.
        Containers start again when they can.
        """
        for task in self._pod_tasks.values():
            task.cancel()
        await asyncio.gather(*self._pod_tasks.values(), return_exceptions=True)
        self._pod_tasks = {}
        await self.kubelet.stop()
        await asyncio.to_thread(shutil.rmtree, self.cdi_directory, ignore_errors=True)
        await self.kubelet.restart()
        for uid, pod in self._pods.items():
            self._begin_pod(uid, pod)

    # The cluster's objects

    @property
    def objects(self) -> Any:
        """The API server's object store, to read and change objects without a request."""
        return self.api.objects

    def create_node(self, **metadata: Any) -> Object:
        """Create our Node, as kubelet does when it starts; ``metadata`` is labels and the like."""
        created: Object = self.objects.create(
            "nodes", {"metadata": {"name": self.node, **metadata}}
        )
        conditions = [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}]
        self.objects.set_status(
            "nodes", self.node, {"nodeInfo": self.versions, "conditions": conditions}
        )
        return created

    def delete_node(self) -> None:
        """Delete our Node; the agent and kubelet go on."""
        self.objects.delete("nodes", self.node)

    def node_object(self) -> Object:
        """Return our Node as it is now."""
        found: Object = self.objects.get("nodes", self.node)
        return found

    def create_pod(
        self,
        name: str,
        limits: Mapping[str, int] | Sequence[Mapping[str, int]],
        *,
        init: Sequence[tuple[Mapping[str, int], bool]] = (),
        scheduler: str = "volcano",
        annotations: Mapping[str, str] | None = None,
        node: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> Object:
        """Create a pod, as a user would.

        Args:
            name: of the pod.
            limits: of its container ``main``, or of several, which are called ``c0``, ``c1``…
            init: limits of each init container (``init0``…), and whether it is restartable (a
                sidecar).
            scheduler: its ``schedulerName``.
            annotations: of the pod.
            node: its ``nodeName``, to bind it without a scheduler; empty to let one bind it.
            environment: variables that the specification sets for each of its containers.
        """
        many = [limits] if isinstance(limits, Mapping) else list(limits)
        names = ["main"] if len(many) == 1 else [f"c{number}" for number in range(len(many))]
        variables = [{"name": name, "value": value} for name, value in (environment or {}).items()]
        containers = [
            _container(each, wanted) | {"env": variables}
            for each, wanted in zip(names, many, strict=True)
        ]
        spec: Object = {"schedulerName": scheduler, "containers": containers}
        if init:
            spec["initContainers"] = [
                _container(f"init{number}", wanted)
                | ({"restartPolicy": "Always"} if restartable else {})
                for number, (wanted, restartable) in enumerate(init)
            ]
        if node:
            spec["nodeName"] = node
        created: Object = self.objects.create(
            "pods",
            {"metadata": {"name": name, "annotations": dict(annotations or {})}, "spec": spec},
        )
        return created

    def pod(self, name: str) -> Object:
        """Return the pod as it is now."""
        found: Object = self.objects.get("pods", name, "default")
        return found

    def annotations(self, name: str) -> dict[str, str]:
        """The pod's annotations."""
        return dict(self.pod(name)["metadata"].get("annotations") or {})

    def exists(self, name: str) -> bool:
        """Tell whether there is a pod of that name."""
        return any(pod["metadata"]["name"] == name for pod in self.objects.list("pods"))

    def phase(self, name: str) -> str:
        """The pod's phase."""
        return str(self.pod(name)["status"].get("phase", ""))

    def starts(self, name: str, container: str = "main") -> list[Received]:
        """List what that container received at each start, for the pod that has the name now."""
        uid = self.pod(name)["metadata"]["uid"]
        return [
            each.received
            for each in self.started
            if (each.pod_uid, each.container) == (uid, container)
        ]

    def delete_pod(self, name: str) -> None:
        """Delete a pod, as a user would; kubelet ends it a moment later."""
        self.objects.delete("pods", name, "default")

    async def until(
        self, condition: Callable[[], bool], what: str = "", *, timeout_seconds: float = 30.0
    ) -> None:
        """Return when ``condition`` holds; ``what`` names it in the error.

        Raises:
            TimeoutError: not in time; the message has the state of the pods.
        """
        try:
            await self.kubelet.until(condition, timeout_seconds=timeout_seconds)
        except TimeoutError:
            pods = {
                pod["metadata"]["name"]: _short_status(pod) for pod in self.objects.list("pods")
            }
            raise TimeoutError(
                f"waited {timeout_seconds:g} s for {what or condition}; pods: {pods}"
            ) from None

    async def running(self, *names: str, timeout_seconds: float = 30.0) -> None:
        """Wait until all those pods run."""
        await self.until(
            lambda: all(self.phase(name) == "Running" for name in names),
            f"{', '.join(names)} to run",
            timeout_seconds=timeout_seconds,
        )

    # The kubelet's part

    def pull(self, container: str) -> Callable[[], None]:
        """Let containers of that name wait for their image,
        until the returned function is called.
        """
        done = self._pulling[container] = asyncio.Event()
        return done.set

    async def crash(
        self, name: str, container: str = "main", *, timeout_seconds: float = 30.0
    ) -> None:
        """Let a container end, and start it again as kubelet does with restartPolicy Always.

        Raises:
            TimeoutError: it does not start again in time; the message has the last refusal.
        """
        uid = self.pod(name)["metadata"]["uid"]
        pod, statuses = self._pods[uid], PodStatus(self.objects, self.pod(name))
        statuses.set_crashed(container)
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._start(pod, container, statuses)
        except TimeoutError:
            raise TimeoutError(
                f"container {container} of {name} did not start again: {self.refusals[-1:]}"
            ) from None

    def finish(self, name: str, phase: str = "Succeeded") -> None:
        """Let all containers of a pod end for good."""
        uid = self.pod(name)["metadata"]["uid"]
        self._end_pod(uid)
        PodStatus(self.objects, self.pod(name)).set_phase(phase)

    async def admit_in_order(self, names: Iterable[str]) -> None:
        """End `hold_admission`, and admit these first, in this order."""
        for name in names:
            item = self.pod(name)
            self._seen.add(item["metadata"]["uid"])
            await self._admit(item)
        self.hold_admission = False

    async def _publish(self) -> None:
        """Keep capacity and allocatable of the Node equal to the plugins' lists.

        A resource that the kubelet has forgotten, because its plugin has been gone for five
        minutes, is written once more, as 0. Then the Node's value stays as it is.
        """
        forgotten: set[str] = set()
        while True:
            with contextlib.suppress(ApiRefusalError):  # the Node was deleted
                status = self.node_object().get("status") or {}
                wanted: dict[str, dict[str, str]] = {"capacity": {}, "allocatable": {}}
                for name in self.kubelet.resources:
                    if not self.kubelet.has_forgotten(name):
                        forgotten.discard(name)
                    elif name in forgotten:
                        continue
                    else:
                        forgotten.add(name)
                    devices = self.kubelet.resource(name)
                    wanted["capacity"][name], wanted["allocatable"][name] = (
                        str(devices.capacity),
                        str(devices.allocatable),
                    )
                if any(
                    status.get(section, {}).get(name) != text
                    for section, texts in wanted.items()
                    for name, text in texts.items()
                ):
                    self.objects.set_status("nodes", self.node, wanted)
            await asyncio.sleep(self._status_seconds)

    async def _follow_pods(self) -> None:
        async for _ in self.objects.revision.changes():
            present = set()
            for item in sorted(
                self.objects.list("pods"), key=lambda item: int(item["metadata"]["resourceVersion"])
            ):
                metadata = item["metadata"]
                if item["spec"].get("nodeName") != self.node:
                    continue
                present.add(metadata["uid"])
                if metadata.get("deletionTimestamp"):
                    self._end_pod(metadata["uid"])
                    self.objects.delete(
                        "pods",
                        metadata["name"],
                        metadata["namespace"],
                        uid=metadata["uid"],
                        grace_seconds=0,
                    )
                elif MIRROR_POD in (metadata.get("annotations") or {}):
                    continue  # the kubelet runs none of the API server's pods with this annotation
                elif metadata["uid"] not in self._seen and not self.hold_admission:
                    self._seen.add(metadata["uid"])
                    await self._admit(item)
            for uid in [uid for uid in self._pods if uid not in present]:
                self._end_pod(uid)

    async def _admit(self, item: Object) -> None:
        metadata, spec = item["metadata"], item["spec"]
        containers = [
            Container(one["name"], _devices(one), init=one.get("restartPolicy") != "Always")
            for one in spec.get("initContainers") or ()
        ]
        containers += [Container(one["name"], _devices(one)) for one in spec["containers"]]
        statuses = PodStatus(self.objects, item)
        try:
            pod = await self.kubelet.admit(
                metadata["name"], containers, namespace=metadata["namespace"], uid=metadata["uid"]
            )
        except AdmissionError as err:
            statuses.set_phase("Failed", reason=err.reason, message=str(err))
            return
        self._pods[metadata["uid"]] = pod
        self._begin_pod(metadata["uid"], pod)

    def _begin_pod(self, uid: str, pod: Pod) -> None:
        task = asyncio.get_running_loop().create_task(
            self._run_containers(uid, pod), name=f"pod {pod.name}"
        )
        self._pod_tasks[uid] = task  # ended by `_end_pod`, or with the cluster
        self._exit.callback(task.cancel)

    def _end_pod(self, uid: str) -> None:
        if (task := self._pod_tasks.pop(uid, None)) is not None:
            task.cancel()
        if (pod := self._pods.pop(uid, None)) is not None:
            pod.ended = True

    async def _run_containers(self, uid: str, pod: Pod) -> None:
        """Start the containers in order: init containers first,
        and each of them that is no sidecar ends before the next.
        """
        item = next(one for one in self.objects.list("pods") if one["metadata"]["uid"] == uid)
        statuses = PodStatus(self.objects, item)
        for container in [*(item["spec"].get("initContainers") or ()), *item["spec"]["containers"]]:
            await self._start(pod, container["name"], statuses)
            if (
                container in (item["spec"].get("initContainers") or ())
                and container.get("restartPolicy") != "Always"
            ):
                statuses.set_terminated(container["name"])
        statuses.set_phase("Running")

    async def _start(self, pod: Pod, container: str, statuses: PodStatus) -> None:
        """Start a container, as often as it takes."""
        while True:
            if container in self._pulling:
                await self._pulling[container].wait()
            try:
                answer = await self.kubelet.start_container(pod, container)
                variables = _variables(self.pod(pod.name), container)
                content = await asyncio.to_thread(
                    received, answer, self.cdi_directory if self._resolves_cdi else None, variables
                )
            except (ContainerStartError, SimulationError) as err:
                self.refusals.append((pod.name, container, str(err)))
                statuses.set_waiting(container, "CreateContainerConfigError", str(err))
                await asyncio.sleep(self._retry_seconds)
                continue
            self.started.append(Started(pod.name, pod.uid, container, content))
            statuses.set_running(container)
            return


def _resolves_cdi(runtime: str) -> bool:
    """Tell whether that runtime and version resolves CDI names without further settings."""
    name, _, version = runtime.partition("://")
    return name == "cri-o" or (name == "containerd" and int(version.partition(".")[0]) >= 2)


def _container(name: str, limits: Mapping[str, int]) -> Object:
    return {
        "name": name,
        "image": "example",
        "resources": {"limits": {resource: str(number) for resource, number in limits.items()}},
    }


def _variables(pod: Object, container: str) -> dict[str, str]:
    matching = (one for one in pod["spec"]["containers"] if one["name"] == container)
    return {
        variable["name"]: variable["value"] for one in matching for variable in one.get("env") or ()
    }


def _devices(container: Object) -> dict[str, int]:
    return {
        name: int(text) for name, text in container["resources"]["limits"].items() if "/" in name
    }


def _short_status(pod: Object) -> str:
    status = pod.get("status") or {}
    waiting = [
        one["state"]["waiting"].get("message", "")
        for kind in ("initContainerStatuses", "containerStatuses")
        for one in status.get(kind) or ()
        if "waiting" in one.get("state", {})
    ]
    bound = (
        pod["spec"].get("nodeName")
        or f"not bound: {[one.get('message') for one in status.get('conditions') or ()]}"
    )
    return f"{status.get('phase')} {status.get('message', '')} {bound} {waiting or ''}".strip()
