"""The kubelet's device manager, from its contract (kubelet §3 to §9,
§13) and from what a real one was seen to do.

Endpoints, the ids in use, the checkpoint and pod-resources. No gRPC: a plugin is an object with
three methods. Nothing in here is shared with `vgpu_agent.sim.kubelet.kubelet`, which speaks to
sockets and is kind.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence
from typing import Protocol

from tests.torture.api_model import LivePod
from tests.torture.plan import Kind, PlannedContainer
from vgpu_agent.isolation.edits import Edits
from vgpu_agent.kubelet.checkpoint import CheckpointEntry
from vgpu_agent.model import Holding, Owner


class AdmissionError(Exception):
    """The pod has failed for good: UnexpectedAdmissionError."""


class StartError(Exception):
    """The container does not start now: CreateContainerConfigError, tried again later."""


class Plugin(Protocol):
    """The device plugin of one resource, as seen through its socket."""

    async def preferred(
        self, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> Sequence[str]:
        """GetPreferredAllocation."""

    async def allocate(self, ids: Sequence[str]) -> Edits:
        """Allocate."""

    async def pre_start(self, ids: Sequence[str]) -> None:
        """PreStartContainer."""


@dataclasses.dataclass
class Endpoint:
    """A registered plugin; ``plugin`` is None for what kubelet only remembers from its checkpoint,
    without options.
    """

    plugin: Plugin | None = None
    pre_start: bool = False
    prefers: bool = False
    stopped: bool = False


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Entry:
    """One line of the checkpoint."""

    pod: LivePod
    container: str
    resource: str
    ids: tuple[str, ...]
    answer: Edits
    in_checkpoint: Holding
    line: CheckpointEntry
    in_pod_resources: Holding | None  # plain init containers are not shown


class DeviceManager:
    """The holders of all ids.

    State: ``entries`` is kubelet's memory, ``written`` the checkpoint file, which lags behind it
    and outlives kubelet.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.endpoints: dict[str, Endpoint] = {}
        self.healthy: dict[str, list[str]] = {}
        self.listed_ids: dict[str, int] = {}  # healthy or not, where the plugin's stream says so
        self.entries: dict[str, list[Entry]] = {}  # by the pod's UID
        self.written: tuple[Entry, ...] = ()
        self.allocated = 0  # containers that were given cards
        self._registered: tuple[str, ...] = ()
        self._used: dict[str, set[str]] = {}

    # -- plugins -----------------------------------------------------------------------------------

    def register(self, resource: str, endpoint: Endpoint, healthy: Iterable[str]) -> None:
        """A plugin has registered and sent its first list."""
        self.endpoints[resource] = endpoint
        self.listed(resource, healthy)

    def listed(self, resource: str, healthy: Iterable[str]) -> None:
        """A list has arrived; each one rewrites the checkpoint."""
        self.healthy[resource] = list(healthy)
        self._write()

    def streams_end(self) -> None:
        """All plugins are gone: nothing is healthy, and pre-start calls fail."""
        for endpoint in self.endpoints.values():
            endpoint.stopped = True
        self.healthy = {resource: [] for resource in self.healthy}

    def restart(self) -> None:
        """The kubelet's memory is lost; the checkpoint knows allocations and resources,
        and no options.
        """
        self.entries = {}
        for entry in self.written:
            self.entries.setdefault(entry.pod.uid, []).append(entry)
        self._used = {}
        for entry in self.written:
            self._used.setdefault(entry.resource, set()).update(entry.ids)
        self.endpoints = {resource: Endpoint(stopped=True) for resource in self._registered}
        self.healthy = {resource: [] for resource in self._registered}

    # -- what others read --------------------------------------------------------------------------

    def checkpoint(self, *resources: str) -> tuple[Holding, ...]:
        """Return the file's entries of these resources, including those left by ended pods."""
        return tuple(entry.in_checkpoint for entry in self.written if entry.resource in resources)

    def checkpoint_entries(self, *resources: str) -> tuple[CheckpointEntry, ...]:
        """The lines of the file about these resources."""
        return tuple(entry.line for entry in self.written if entry.resource in resources)

    def answers(self, *resources: str) -> dict[tuple[str, str, str], Edits]:
        """The answers in the checkpoint about these resources, by UID, container and resource."""
        return {
            (entry.pod.uid, entry.container, entry.resource): entry.answer
            for entry in self.written
            if entry.resource in resources
        }

    def pod_resources(self, *resources: str) -> tuple[Holding, ...]:
        """Return the entries of these resources in a List.

        The kubelet forgets ended pods first, and plain init containers are not shown.
        """
        self.clean_up()
        shown = (
            entry for held in self.entries.values() for entry in held if entry.resource in resources
        )
        return tuple(entry.in_pod_resources for entry in shown if entry.in_pod_resources)

    def entry(self, pod: LivePod, container: str, resource: str) -> Entry | None:
        """Return the container's ids of the resource."""
        for entry in self.entries.get(pod.uid, ()):
            if entry.container == container and entry.resource == resource:
                return entry
        return None

    # -- admission ---------------------------------------------------------------------------------

    def clean_up(self) -> None:
        """Forget pods that are not active any more; only in memory."""
        for uid in [uid for uid, held in self.entries.items() if not held[0].pod.active]:
            for entry in self.entries.pop(uid):
                self._used[entry.resource].difference_update(entry.ids)

    async def allocate(
        self, pod: LivePod, container: PlannedContainer, reusable: dict[str, set[str]]
    ) -> None:
        """Give one container all that its limits name,
        resource by resource in the order of a Go map.

        Raises:
            AdmissionError: as kubelet words it; what was allocated before stays until the next
                clean-up.
        """
        wanted = list(container.request.limits.items()) if container.request else []
        self._rng.shuffle(wanted)
        for resource, number in wanted:
            self.clean_up()
            await self._allocate(
                pod, container, resource, number, reusable.setdefault(resource, set())
            )
        if wanted:
            self._write()

    async def _allocate(
        self,
        pod: LivePod,
        container: PlannedContainer,
        resource: str,
        number: int,
        reusable: set[str],
    ) -> None:
        endpoint = self.endpoints.get(resource)
        if endpoint is None:
            return  # a resource that was never registered is not the device manager's business
        if resource not in self.healthy:
            raise AdmissionError(f"cannot allocate unregistered device {resource}")
        if not self.healthy[resource]:
            raise AdmissionError(
                f"no healthy devices present; cannot allocate unhealthy devices {resource}"
            )
        if held := self.entry(pod, container.name, resource):
            if not set(self.healthy[resource]).issuperset(held.ids):
                raise AdmissionError(
                    "previously allocated devices are no longer healthy; cannot allocate unhealthy "
                    f"devices {resource}"
                )
            return
        ids = await self._choose(endpoint, resource, number, reusable)
        if endpoint.plugin is None or endpoint.stopped:
            raise AdmissionError(f"endpoint of {resource} has been stopped")
        try:
            answer = await endpoint.plugin.allocate(ids)
        except Exception as err:  # kubelet knows only one kind of failure, and it is final
            raise AdmissionError(f"Allocate failed due to {err}, which is unexpected") from err
        self.allocated += container.request is not None and resource == container.request.resource
        self._insert(pod, container, resource, tuple(ids), answer)

    async def _choose(
        self, endpoint: Endpoint, resource: str, number: int, reusable: set[str]
    ) -> list[str]:
        rng, used = self._rng, self._used.setdefault(resource, set())
        taken = rng.sample(sorted(reusable), min(number, len(reusable)))
        if len(taken) == number:
            return taken
        free = [id_ for id_ in self.healthy[resource] if id_ not in used]
        missing = number - len(taken)
        if len(free) < missing:
            raise AdmissionError(
                f"requested number of devices unavailable for {resource}. Requested: {missing}, "
                f"Available: {len(free)}"
            )
        if endpoint.prefers and endpoint.plugin is not None:
            try:
                preferred = await endpoint.plugin.preferred([*free, *taken], taken, number)
            except Exception as err:
                raise AdmissionError(
                    f"device plugin GetPreferredAllocation rpc failed with err: {err}"
                ) from err
            usable = set(free)
            taken += [id_ for id_ in dict.fromkeys(preferred) if id_ in usable][:missing]
        rest = [id_ for id_ in free if id_ not in taken]
        ids = taken + rng.sample(rest, number - len(taken))
        rng.shuffle(ids)
        return ids

    def _insert(
        self,
        pod: LivePod,
        container: PlannedContainer,
        resource: str,
        ids: tuple[str, ...],
        answer: Edits,
    ) -> None:
        shown = Holding(resource, ids, Owner(container.name, namespace=pod.namespace, pod=pod.name))
        entry = Entry(
            pod,
            container.name,
            resource,
            ids,
            answer,
            Holding(resource, ids, Owner(container.name, pod_uid=pod.uid)),
            CheckpointEntry(pod.uid, container.name, resource, {"-1": list(ids)}),
            None if container.kind is Kind.INIT else shown,
        )
        self.entries.setdefault(pod.uid, []).append(entry)
        self._used.setdefault(resource, set()).update(ids)

    def reuse(
        self, pod: LivePod, container: PlannedContainer, reusable: dict[str, set[str]]
    ) -> None:
        """Plain init containers leave their ids to later ones.
        A container that takes others keeps them.
        """
        for entry in self.entries.get(pod.uid, ()):
            if entry.container == container.name:
                of_resource = reusable.setdefault(entry.resource, set())
                if container.kind is Kind.INIT:
                    of_resource.update(entry.ids)
                else:
                    of_resource.difference_update(entry.ids)

    # -- container start ---------------------------------------------------------------------------

    def _write(self) -> None:
        self.written = tuple(entry for held in self.entries.values() for entry in held)
        self._registered = tuple(self.healthy)
