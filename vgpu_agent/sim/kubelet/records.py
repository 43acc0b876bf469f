"""The simulated kubelet's records: the devices of each resource, those that each container holds,
and their checkpoint. A *device* is one of the device plugin API here, named by its id, and a *node*
in a name is a NUMA node.

Used by `kubelet` and `pod_resources` in this package. Behaviour and the checkpoint's format follow
the real device manager (kubelet §4, §5, §9): a device is free again not when its pod ends but at
the next clean-up, and the checkpoint is rewritten at each ListAndWatch message and each allocation.
Unchanged parts are encoded once: with 110 pods and 50,000 ids the stand-in would otherwise be
slower than the agent under test.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import json
import os
import threading
import zlib
from typing import TYPE_CHECKING, Any

from vgpu_agent.sim.protocol import podresources_pb2 as pod_resources

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from vgpu_agent.sim.protocol import deviceplugin_pb2 as messages

CHECKPOINT = "kubelet_internal_checkpoint"
_NO_TOPOLOGY = "-1"  # in the place of a NUMA node, as in the real checkpoint
_PIECES_AT_ONCE = 1024  # IOV_MAX of Linux


@dataclasses.dataclass
class ResourceDevices:
    """The devices of one resource by its last list: id to NUMA node (None without topology)."""

    healthy: dict[str, int | None] = dataclasses.field(default_factory=dict)
    unhealthy: dict[str, int | None] = dataclasses.field(default_factory=dict)
    # by resource: the answer of `allocatable_as`
    _described: dict[str, bytes] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def capacity(self) -> int:
        """The capacity in the node status."""
        return len(self.healthy) + len(self.unhealthy)

    @property
    def allocatable(self) -> int:
        """The allocatable number in the node status."""
        return len(self.healthy)

    def replace(self, listed: Iterable[messages.Device]) -> None:
        """Take over a complete list; any health but exactly ``Healthy`` is unhealthy."""
        self.healthy, self.unhealthy = {}, {}
        for device in listed:
            nodes = device.topology.nodes
            node = nodes[0].id if nodes else None
            (self.healthy if device.health == "Healthy" else self.unhealthy)[device.id] = node
        self._changed()

    def mark_all_unhealthy(self) -> None:
        """Mark all as unhealthy, because the stream has ended: capacity stays, allocatable is 0."""
        self.unhealthy.update(self.healthy)
        self.healthy = {}
        self._changed()

    @functools.cached_property
    def encoded(self) -> bytes:
        """The healthy ids as the checkpoint's JSON."""
        return json.dumps(sorted(self.healthy)).encode()

    def allocatable_as(self, resource: str) -> bytes:
        """The healthy ids as an AllocatableResourcesResponse. Concatenated, several of them are the
        response for all their resources.
        """
        if resource not in self._described:
            response = pod_resources.AllocatableResourcesResponse()
            for device in self.healthy:
                response.devices.add(resource_name=resource, device_ids=[device])
            self._described[resource] = bytes(response.SerializeToString())
        return self._described[resource]

    def _changed(self) -> None:
        self.__dict__.pop("encoded", None)
        self._described.clear()


@dataclasses.dataclass
class Allocation:
    """Ids of one resource that one container holds, and the answer that came with them.

    Attributes:
        pod_uid: the UID of the container's pod.
        container: its name.
        resource: the name of the resource.
        ids_by_node: NUMA node → ids; `_NO_TOPOLOGY` for ids without one.
        answer: the plugin's answer for the container (ContainerAllocateResponse), encoded.
    """

    pod_uid: str
    container: str
    resource: str
    ids_by_node: dict[str, list[str]]
    answer: bytes

    @functools.cached_property
    def ids(self) -> list[str]:
        """All ids, by NUMA node."""
        return [device for node in sorted(self.ids_by_node) for device in self.ids_by_node[node]]

    @functools.cached_property
    def encoded(self) -> bytes:
        """The entry as the checkpoint's JSON."""
        entry = {
            "PodUID": self.pod_uid,
            "ContainerName": self.container,
            "ResourceName": self.resource,
            "DeviceIDs": self.ids_by_node,
            "AllocResp": base64.b64encode(self.answer).decode(),
        }
        return json.dumps(entry).encode()

    @functools.cached_property
    def described(self) -> bytes:
        """Encode the devices for pod-resources: a ContainerResources without a name, with one entry
        for each id like the real one's.
        """
        container = pod_resources.ContainerResources()
        for node, ids in self.ids_by_node.items():
            for device in ids:
                devices = container.devices.add(resource_name=self.resource, device_ids=[device])
                if node != _NO_TOPOLOGY:
                    devices.topology.nodes.add(id=int(node))
        return bytes(container.SerializeToString())


class Records:
    """Allocations and devices of the node, in memory. `write_checkpoint` writes them to the
    checkpoint in ``directory``.

    State: in addition to `devices` and `allocations`, the ids of the call of Allocate that is under
    way, and cached results of frequent calls.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / CHECKPOINT
        self.devices: dict[str, ResourceDevices] = {}
        self.allocations: list[Allocation] = []
        # how many ids `clean_up` has set free while an Allocate of them was under way, so that two
        # containers may get them
        self.forgotten = 0
        # by resource: ids that no other container gets, because a plugin has been asked for them
        self._asked_for: dict[str, set[str]] = {}
        # by resource: the healthy ids, and the free ones among them; outdated when the resource has
        # another dict of healthy ids
        self._free: dict[str, tuple[dict[str, int | None], dict[str, None]]] = {}
        self._held: dict[tuple[str, str], list[Allocation]] | None = None  # by UID and container
        # ListAndWatch messages and allocations come at the same time; the file is written for one
        # after the other
        self._writing = threading.Lock()

    def in_use(self, resource: str) -> set[str]:
        """Return the ids that containers hold, also those of ended pods that were not cleaned up
        yet.
        """
        return set().union(*(each.ids for each in self.allocations if each.resource == resource))

    def free(self, resource: str) -> Collection[str]:
        """Return the healthy ids that are free, in the order of the list."""
        healthy = self.devices[resource].healthy
        known = self._free.get(resource)
        if known is None or known[0] is not healthy:
            taken = self.in_use(resource) | self._asked_for.get(resource, set())
            known = self._free[resource] = (
                healthy,
                {device: None for device in healthy if device not in taken},
            )
        return known[1].keys()

    def of_container(self, pod_uid: str, container: str) -> list[Allocation]:
        """List the allocations of one container."""
        if self._held is None:
            self._held = {}
            for each in self.allocations:
                self._held.setdefault((each.pod_uid, each.container), []).append(each)
        return self._held.get((pod_uid, container), [])

    @contextlib.contextmanager
    def asking(self, resource: str, ids: Collection[str]) -> Iterator[None]:
        """Give ``ids`` to no other container while their plugin is asked for them; they are free
        again if it refuses. `add` follows.
        """
        self._asked_for.setdefault(resource, set()).update(ids)
        if resource in self._free:
            for device in ids:
                self._free[resource][1].pop(device, None)
        try:
            yield
        except BaseException:
            self._asked_for.pop(resource, None)
            self._free.pop(resource, None)
            raise

    def add(
        self, pod_uid: str, container: str, resource: str, ids: Collection[str], answer: bytes
    ) -> Allocation:
        """Book ids for a container, after `asking`."""
        # Compute the free ids before the allocation is there: if `clean_up` has forgotten these ids
        # meanwhile, they stay free for the next container, as in a real kubelet (kubelet §7).
        self.free(resource)
        known = self.devices[resource]
        by_node: dict[str, list[str]] = {}
        for device in ids:
            node = known.healthy.get(device)
            by_node.setdefault(_NO_TOPOLOGY if node is None else str(node), []).append(device)
        allocation = Allocation(pod_uid, container, resource, by_node, answer)
        self.allocations.append(allocation)
        if self._held is not None:
            self._held.setdefault((pod_uid, container), []).append(allocation)
        self._asked_for.pop(resource, None)
        return allocation

    def clean_up(self, live_pod_uids: Collection[str]) -> None:
        """Forget what ended pods held. The kubelet does this before an allocation and at each List
        of pod-resources, and does not rewrite the file for it. Like the real one, it also forgets
        the ids of an Allocate under way, if a pod has ended since that call began (kubelet §7).
        """
        left = [each for each in self.allocations if each.pod_uid in live_pod_uids]
        if len(left) < len(self.allocations):
            self.allocations = left
            self.forgotten += sum(
                len(ids - self.in_use(resource)) for resource, ids in self._asked_for.items()
            )
            self._asked_for.clear()
            self._forget()

    def write_checkpoint(self) -> None:
        """Put everything into the file, atomically, mode 0600."""
        with self._writing:
            self._write_checkpoint()

    def _write_checkpoint(self) -> None:
        # Pieces, never one text: joining megabytes would keep the other threads of this process
        # from running, which does not happen in a real kubelet.
        entries = list(_between(b",", [each.encoded for each in self.allocations]))
        entries = [b"[", *entries, b"]"] if entries else [b"null"]
        registered = _between(
            b",",
            [
                json.dumps(resource).encode() + b":" + devices.encoded
                for resource, devices in self.devices.items()
            ],
        )
        content = [b'{"PodDeviceEntries":', *entries, b',"RegisteredDevices":{', *registered, b"}}"]
        # Not the kubelet's checksum, which is that of a text that only Go can make of the data. The
        # agent does not check it.
        checksum = zlib.crc32(b"".join(b"%d," % len(piece) for piece in content))
        temporary = self._path.with_name(f".{self._path.name}.new")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _write(descriptor, [b'{"Data":', *content, b',"Checksum":%d}' % checksum])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(self._path)

    def read_checkpoint(self) -> None:
        """Begin as a restarted kubelet does: allocations are known, each resource has no devices
        until its plugin has registered again and sent them.

        After an unreadable file nothing is known, as in a real kubelet.
        """
        devices: dict[str, ResourceDevices] = {}
        allocations: list[Allocation] = []
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))["Data"]
            allocations = [
                Allocation(
                    entry["PodUID"],
                    entry["ContainerName"],
                    entry["ResourceName"],
                    entry["DeviceIDs"],
                    base64.b64decode(entry["AllocResp"]),
                )
                for entry in content["PodDeviceEntries"] or []
            ]
            devices = {resource: ResourceDevices() for resource in content["RegisteredDevices"]}
        self.devices, self.allocations = devices, allocations
        self._asked_for.clear()
        self._forget()

    def _forget(self) -> None:
        self._free.clear()
        self._held = None


def _write(descriptor: int, pieces: Sequence[bytes]) -> None:
    """Write ``pieces`` with few calls, which let the other threads of this process run."""
    for begin in range(0, len(pieces), _PIECES_AT_ONCE):
        some = pieces[begin : begin + _PIECES_AT_ONCE]
        written, whole = os.writev(descriptor, some), sum(map(len, some))
        if written < whole:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(b"".join(some)[written:])


def _between(separator: bytes, pieces: Sequence[bytes]) -> Iterator[bytes]:
    """Yield ``pieces`` with ``separator`` between them."""
    for place, piece in enumerate(pieces):
        if place:
            yield separator
        yield piece
