"""A kubelet without a node: it implements the device plugin and pod-resources APIs as the real
device manager does.

The demo runs it beside the agent's process, component tests in the test's process. It is built on
grpcio and Google's protobuf on purpose: an independent stack that cannot share the agent's
mistakes. The imitated behaviour, timing included, is described in kubelet §2 to §9 and §13. It has
the real one's drawbacks, too: an old stream's end takes the new registration down, and ended pods
keep their ids for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import random
import re
import stat
import time
import uuid
from typing import TYPE_CHECKING, Any

import grpc

from vgpu_agent.sim.kubelet.endpoint import CallFailedError, Endpoint, Timing
from vgpu_agent.sim.kubelet.faults import AdmissionError, Call, ContainerStartError, Faults
from vgpu_agent.sim.kubelet.pod_resources import PodResources
from vgpu_agent.sim.kubelet.records import Records, ResourceDevices
from vgpu_agent.sim.protocol import deviceplugin_pb2 as messages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

_VERSION = "v1beta1"
_RESOURCE_NAME = re.compile(
    r"\A(?!([^/]*\.)?kubernetes\.io/)[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,"
    r"61}[A-Za-z0-9])?\Z"
)
_STOP_GRACE_SECONDS = 300.0


@dataclasses.dataclass(frozen=True)
class Container:
    """One container of a pod: its name and its limits, resource to number.

    Attributes:
        init: a plain init container: it ends before the others start, and they take over its ids.
    """

    name: str
    limits: Mapping[str, int]
    init: bool = False


@dataclasses.dataclass
class Pod:
    """A pod that was admitted; ``answers`` are the plugins' answers by container, merged as the
    kubelet merges them.
    """

    name: str
    namespace: str
    uid: str
    containers: tuple[Container, ...]
    ended: bool = False
    answers: dict[str, messages.ContainerAllocateResponse] = dataclasses.field(default_factory=dict)


class SimulatedKubelet:
    """The kubelet of a node whose root directory is ``directory``; `start` makes
    ``device-plugins/`` and ``pod-resources/`` below it. ``seed`` determines what is random: the
    UIDs of pods, and the order in which the resources of a container are allocated.

    State: registrations and admitted pods; allocations are also in the checkpoint, from which
    `restart` begins.
    """

    def __init__(self, directory: Path, *, seed: int = 0) -> None:
        self.directory = directory
        self.plugins = directory / "device-plugins"
        self.faults = Faults()  # switches with which tests make it misbehave
        # what has happened, oldest first: calls, lists received, streams opened and ended
        self.calls: list[Call] = []
        self.pods: dict[str, Pod] = {}
        self._records = Records(self.plugins)
        # resource → the plugin that was registered last; it stays when its stream has ended
        self._endpoints: dict[str, Endpoint] = {}
        # resource → the last registration, until a stream of the resource ends
        self._clients: dict[str, Endpoint] = {}
        self._retired: list[Endpoint] = []  # replaced by a newer registration
        self._servers: list[Any] = []
        self._pod_resources = PodResources(
            self._records, self.pods, self.faults, resource=self.resource, note=self._note
        )
        self._changed = asyncio.Condition()
        self._admission = asyncio.Lock()
        self._random = random.Random(seed)  # noqa: S311 - the order of a Go map, not a secret

    # Start and stop

    async def start(self) -> None:
        """Wipe the plugin directory's sockets and listen, as every start of a kubelet does."""
        await asyncio.to_thread(self._prepare)
        # kubelet.sock is a second name of the server's own socket file, because grpcio deletes the
        # file that it made when it stops, and a real kubelet leaves kubelet.sock behind.
        hidden = self.directory / f"kubelet-{uuid.uuid4().hex[:8]}.sock"
        await self._listen(
            hidden, "v1beta1.Registration", {"Register": (self._register, messages.RegisterRequest)}
        )
        await asyncio.to_thread(os.link, hidden, self.plugins / "kubelet.sock")
        await self._listen(
            self.directory / "pod-resources" / "kubelet.sock",
            "v1.PodResourcesLister",
            self._pod_resources.methods(),
        )

    async def stop(self) -> None:
        """End like a killed kubelet: connections break, sockets and checkpoint stay."""
        # first, so that no plugin that loses its stream can register with a dying kubelet
        for server in self._servers:
            await server.stop(None)
        for endpoint in [*self._endpoints.values(), *self._retired]:
            await endpoint.close()
        self._servers, self._endpoints, self._clients, self._retired = [], {}, {}, []

    async def restart(self, *, away_seconds: float = 0.0) -> None:
        """Stop, stay away, and start again from the content of the checkpoint; pods run on."""
        await self.stop()
        await asyncio.sleep(away_seconds)
        await asyncio.to_thread(self._records.read_checkpoint)
        await self.start()

    # The numbers in the node status

    @property
    def resources(self) -> list[str]:
        """The names of all resources that were ever listed."""
        return sorted(self._records.devices)

    def resource(self, name: str) -> ResourceDevices:
        """Devices of a resource; empty when it was never registered, or its plugin has been gone
        for five minutes.
        """
        return (
            ResourceDevices()
            if self.has_forgotten(name)
            else self._records.devices.get(name, ResourceDevices())
        )

    def has_forgotten(self, name: str) -> bool:
        """Tell whether the resource's plugin has been gone for five minutes. The next status of the
        Node has it at 0, and later ones leave it as it is.
        """
        endpoint = self._endpoints.get(name)
        gone_for = (
            time.monotonic() - endpoint.stopped_at if endpoint and endpoint.stopped_at else 0.0
        )
        return gone_for > _STOP_GRACE_SECONDS

    async def until(self, condition: Callable[[], bool], *, timeout_seconds: float = 30.0) -> None:
        """Return when ``condition`` holds; it is called after every change of this kubelet, and
        twenty times a second.

        Raises:
            TimeoutError: it does not come true in time; the message has the last of `calls`.
        """
        try:
            async with asyncio.timeout(timeout_seconds), self._changed:
                while not condition():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await self._changed.wait()
        except TimeoutError:
            last = [f"{call.what} {call.resource} {call.facts}" for call in self.calls[-8:]]
            raise TimeoutError(
                f"the simulated kubelet waited {timeout_seconds:g} s in vain; last calls: {last}"
            ) from None

    def called(self, what: str, resource: str = "") -> list[Call]:
        """The entries of `calls` of the kind ``what``, oldest first; with ``resource`` only those
        about it.
        """
        return [
            call for call in self.calls if call.what == what and resource in {"", call.resource}
        ]

    def timings(self, method: str, resource: str, *, since: float) -> list[Timing]:
        """The answered calls to the current plugin that began at ``since`` (`time.monotonic`) or
        later, oldest first.
        """
        return [
            timing
            for timing in self._endpoints[resource].timings
            if timing.method == method and timing.began >= since
        ]

    # Pods

    async def admit(
        self,
        name: str,
        containers: Sequence[Container],
        *,
        namespace: str = "default",
        uid: str = "",
    ) -> Pod:
        """Admit a pod to the node: devices for each container, init containers first.

        Raises:
            AdmissionError: the pod fails, with the message that its status would show.
        """
        pod = Pod(
            name,
            namespace,
            uid or str(uuid.UUID(int=self._random.getrandbits(128))),
            tuple(containers),
        )
        async with self._admission:  # pods are admitted one after the other
            self.pods[pod.uid] = pod
            try:
                for container in sorted(containers, key=lambda each: not each.init):
                    await self._allocate_all(pod, container)
            except AdmissionError:
                pod.ended = True  # its devices are cleaned up later, lazily
                raise
        pod.answers = {
            container.name: self._answer(pod.uid, container.name) for container in containers
        }
        return pod

    async def start_container(self, pod: Pod, container: str) -> messages.ContainerAllocateResponse:
        """Start, or restart, a container of an admitted pod; return the plugins' merged answers.

        Raises:
            ContainerStartError: refused for now.
        """
        for allocation in self._records.of_container(pod.uid, container):
            endpoint = self._endpoints.get(allocation.resource)
            if (
                endpoint is None
                or endpoint.options is None
                or not endpoint.options.pre_start_required
            ):
                # PreStartContainer is silently skipped, also after a restart of the kubelet until
                # the plugin is back
                continue
            if endpoint.stopped_at is not None:
                raise ContainerStartError(f"endpoint {endpoint.socket_path} has been stopped")
            try:
                await endpoint.pre_start(allocation.ids)
            except CallFailedError as err:
                await self._note(
                    "PreStartContainer", allocation.resource, ids=allocation.ids, error=str(err)
                )
                raise ContainerStartError(
                    f"device plugin PreStartContainer rpc failed with err: {err}"
                ) from err
            await self._note("PreStartContainer", allocation.resource, ids=allocation.ids)
        return self._answer(pod.uid, container)

    async def delete(self, pod: Pod) -> None:
        """End a pod; its ids become free at the next allocation or List, as in a real kubelet."""
        pod.ended = True
        await self._note("pod deleted", "", pod=f"{pod.namespace}/{pod.name}")

    def ids_of(self, pod: Pod, container: str, resource: str) -> list[str]:
        """The ids that a container holds."""
        return [
            device
            for each in self._records.of_container(pod.uid, container)
            if each.resource == resource
            for device in each.ids
        ]

    @property
    def forgotten_ids(self) -> int:
        """The number of ids that became free while a plugin was asked for them (kubelet §7)."""
        return self._records.forgotten

    async def cancel_stream(self, resource: str) -> None:
        """Cancel the resource's ListAndWatch, leaving sockets as they are (kubelet V3)."""
        await self._endpoints[resource].cancel_stream()

    # Registration and lists

    async def _register(self, request: messages.RegisterRequest, context: Any) -> messages.Empty:
        await self._note(
            "Register",
            request.resource_name,
            endpoint=request.endpoint,
            version=request.version,
            **_shown(request.options),
        )
        await asyncio.sleep(self.faults.register_delay_seconds)
        if self.faults.failing_registrations:
            self.faults.failing_registrations -= 1
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, "the simulated kubelet was told to fail"
            )
        if request.version != _VERSION or self.faults.refuse_version:
            known = "v1beta2" if self.faults.refuse_version else _VERSION
            text = (
                f'requested API version "{request.version}" is not supported by kubelet. Supported '
                f'version is "{known}"'
            )
            await context.abort(grpc.StatusCode.UNKNOWN, text)
        if not _RESOURCE_NAME.match(request.resource_name):
            await context.abort(
                grpc.StatusCode.UNKNOWN, f'the ResourceName "{request.resource_name}" is invalid'
            )
        endpoint = Endpoint(request.resource_name, self.plugins / request.endpoint)
        self._clients[request.resource_name] = endpoint
        try:
            # a kubelet before 1.25 asks for no options
            await endpoint.connect(asks_options=not self.faults.asks_no_options)
        except CallFailedError as err:
            self._clients.pop(request.resource_name, None)
            await endpoint.close()
            await context.abort(
                grpc.StatusCode.UNKNOWN,
                f"failed to dial device plugin with socketPath {endpoint.socket_path}: {err}",
            )
        await self._note(
            "GetDevicePluginOptions",
            request.resource_name,
            endpoint=request.endpoint,
            **_shown(endpoint.options),
        )
        if before := self._endpoints.get(request.resource_name):
            self._retired.append(before)
        self._endpoints[request.resource_name] = endpoint  # the last registration wins
        if not self.faults.open_no_stream:
            await self._note("stream opened", request.resource_name, endpoint=request.endpoint)
            endpoint.watch(self._listed, self._stream_ended)
        return messages.Empty()

    async def _listed(self, endpoint: Endpoint, response: messages.ListAndWatchResponse) -> None:
        devices = self._records.devices.setdefault(endpoint.resource, ResourceDevices())
        devices.replace(response.devices)
        await asyncio.to_thread(self._records.write_checkpoint)
        facts = {
            "healthy": devices.allocatable,
            "ids": devices.capacity,
            "bytes": response.ByteSize(),
        }
        await self._note("list", endpoint.resource, endpoint=endpoint.socket_path.name, **facts)

    async def _stream_ended(self, endpoint: Endpoint, reason: str) -> None:
        # Clients are known by resource only, so the end of an old stream takes down the client of a
        # newer registration, or none (kubelet §3).
        client = self._clients.pop(endpoint.resource, None)
        current = self._endpoints.get(endpoint.resource)
        if self.faults.tells_clients_apart:  # as kubelets do from 1.37 on
            client = endpoint if current is endpoint else None
        if client is not None and current is not None:
            current.stopped_at = current.stopped_at or time.monotonic()
            self._records.devices.setdefault(
                endpoint.resource, ResourceDevices()
            ).mark_all_unhealthy()
            # `close` also ends the stream, which only the client of a newer registration still has
            await (client.hang_up() if client is endpoint else client.close())
        await self._note(
            "stream ended",
            endpoint.resource,
            endpoint=endpoint.socket_path.name,
            reason=reason,
            noticed=client is not None,
        )

    # Allocation

    async def _allocate_all(self, pod: Pod, container: Container) -> None:
        # A limit of 0 is no device, and no plugin is asked about it.
        limits = [(resource, number) for resource, number in container.limits.items() if number]
        self._random.shuffle(limits)  # resources come in random order
        if any(
            resource in self._endpoints or resource in self._records.devices
            for resource, _ in limits
        ):
            self._records.clean_up(self._live())
        allocated = [
            await self._allocate(pod, container, resource, number) for resource, number in limits
        ]
        if any(allocated):  # once for all resources, and not at all when one of them fails
            await asyncio.to_thread(self._records.write_checkpoint)

    async def _allocate(self, pod: Pod, container: Container, resource: str, number: int) -> bool:
        """Allocate from a plugin; return False when no plugin has registered the resource."""
        ids = self._reusable(pod, container, resource)[:number]
        endpoint = self._endpoints.get(resource)
        if endpoint is None and resource not in self._records.devices:
            # the device manager ignores a resource that no plugin has registered
            return False
        devices = self._records.devices.get(resource, ResourceDevices())
        if endpoint is None:
            raise AdmissionError(_rejected(f"cannot allocate unregistered device {resource}"))
        if not devices.healthy:
            raise AdmissionError(
                _rejected(
                    f"no healthy devices present; cannot allocate unhealthy devices {resource}"
                )
            )
        free = self._free(endpoint, resource, number - len(ids))
        if len(ids) + len(free) < number:
            text = (
                f"requested number of devices unavailable for {resource}. Requested: {number}, "
                f"Available: {len(ids) + len(free)}"
            )
            raise AdmissionError(_rejected(text))
        try:
            ids = await self._choose(endpoint, ids, free, number)
            with self._records.asking(resource, ids):
                answer = await endpoint.allocate(ids)
        except CallFailedError as err:
            await self._note("Allocate", resource, ids=ids, error=str(err))
            raise AdmissionError(_rejected(str(err))) from err
        self._records.add(pod.uid, container.name, resource, ids, answer.SerializeToString())
        await self._note("Allocate", resource, ids=ids, pod=pod.uid, container=container.name)
        return True

    def _free(self, endpoint: Endpoint, resource: str, number: int) -> list[str]:
        """Free ids: all of them if the plugin is asked which it prefers, otherwise ``number`` at
        most.
        """
        free = self._records.free(resource)
        prefers = (
            endpoint.options is not None and endpoint.options.get_preferred_allocation_available
        )
        return list(free if prefers else itertools.islice(free, max(0, number)))

    async def _choose(
        self, endpoint: Endpoint, reused: list[str], free: list[str], number: int
    ) -> list[str]:
        """Choose ``number`` ids: first those ``reused`` from init containers, then the ``free``
        ones that the plugin prefers.
        """
        if len(reused) == number:
            return reused
        preferred: list[str] = []
        if endpoint.options is not None and endpoint.options.get_preferred_allocation_available:
            preferred = await endpoint.prefer([*reused, *free], reused, number)
            await self._note("GetPreferredAllocation", endpoint.resource, ids=preferred)
        if not preferred:
            return [*reused, *free][:number]
        usable = {*reused, *free}
        # The plugin's answer is a hint: unusable ids are dropped, missing ones are filled up.
        return list(
            dict.fromkeys([*reused, *(device for device in preferred if device in usable), *free])
        )[:number]

    def _reusable(self, pod: Pod, container: Container, resource: str) -> list[str]:
        """Ids of the pod's plain init containers, which a later container takes over."""
        init = {each.name for each in pod.containers if each.init and each.name != container.name}
        held = [
            each
            for each in self._records.allocations
            if each.pod_uid == pod.uid and each.resource == resource
        ]
        taken = {device for each in held if each.container not in init for device in each.ids}
        return [
            device
            for each in held
            if each.container in init
            for device in each.ids
            if device not in taken
        ]

    def _answer(self, pod_uid: str, container: str) -> messages.ContainerAllocateResponse:
        """The answers for all resources of a container as one; where two disagree, the first one
        wins.
        """
        united = messages.ContainerAllocateResponse()
        for allocation in self._records.of_container(pod_uid, container):
            answer = messages.ContainerAllocateResponse.FromString(allocation.answer)
            united.envs.update(
                {key: value for key, value in answer.envs.items() if key not in united.envs}
            )
            united.annotations.update(
                {
                    key: value
                    for key, value in answer.annotations.items()
                    if key not in united.annotations
                }
            )
            mounted, created = (
                {each.container_path for each in united.mounts},
                {each.container_path for each in united.devices},
            )
            united.mounts.extend(
                each for each in answer.mounts if each.container_path not in mounted
            )
            united.devices.extend(
                each for each in answer.devices if each.container_path not in created
            )
            united.cdi_devices.extend(
                each for each in answer.cdi_devices if each not in united.cdi_devices
            )
        return united

    # Helpers

    def _live(self) -> set[str]:
        return {uid for uid, pod in self.pods.items() if not pod.ended}

    async def _note(self, what: str, resource: str, **facts: Any) -> None:
        self.calls.append(Call(what, resource, facts=facts))
        async with self._changed:
            self._changed.notify_all()

    async def _listen(
        self, path: Path, service: str, methods: Mapping[str, tuple[Any, Any]]
    ) -> None:
        server = grpc.aio.server()
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                method, request_deserializer=request.FromString, response_serializer=_encoded
            )
            for name, (method, request) in methods.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        self._servers.append(server)

    def _prepare(self) -> None:
        for directory in (self.plugins, self.directory / "pod-resources"):
            directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        for path in list(self.plugins.iterdir()):
            # a plugin may remove its own at the same time
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(path.lstat().st_mode):
                    path.unlink()


def _encoded(message: Any) -> bytes:
    """Encode an answer; pod-resources returns bytes, which are encoded already."""
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


def _rejected(text: str) -> str:
    return f"Pod was rejected: Allocate failed due to {text}, which is unexpected"


def _shown(options: messages.DevicePluginOptions | None) -> dict[str, bool]:
    """Return a plugin's options as facts of a `Call`."""
    return {
        "pre_start": options is not None and options.pre_start_required,
        "preferred": options is not None and options.get_preferred_allocation_available,
    }
