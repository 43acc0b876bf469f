"""The translation between the model and the protobuf messages of the kubelet.

The plugin servers work with ids, `ListedDevice` (an id with its health) and `Edits`; `grpc` moves
bytes. Only this module uses the generated classes of messages, so another protobuf library means a
change of one file. It reads input with `grpc.wire`, our own strict decoder, because the generated
one accepts malformed bytes.

Field numbers: kubelet §1 and §13.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent import device_ids
from vgpu_agent.device_ids import (
    NumberedIds,
    NumberedList,
    element_size_bytes,
    list_size_bytes,
    why_too_long,
)
from vgpu_agent.errors import CheckpointError, OfferError, RequestRefusedError
from vgpu_agent.grpc import wire
from vgpu_agent.isolation.edits import DeviceNode, Edits, Mount
from vgpu_agent.model import HEALTHY, UNHEALTHY
from vgpu_agent.protocol import v1beta1

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vgpu_agent.device_ids import IdBlock, ListedDevice
    from vgpu_agent.model import Resource

API_VERSION = "v1beta1"
EMPTY = b""  # a message without any field
IDS_IN_A_PART = 4096  # of a list that is encoded in parts, between which other calls are answered


class PreferenceRequest(msgspec.Struct, frozen=True):
    """The request for one container in GetPreferredAllocation: the ids to choose from, those that
    must be among the chosen ones, and the number of ids to choose (``size``).
    """

    available: tuple[str, ...]
    must_include: tuple[str, ...]
    size: int


class DeviceListEncoder:
    """The encoder of ListAndWatch messages for one resource.

    A message is the concatenation of its encoded devices. So after a health change only that device
    is encoded again, and the message takes 1 ms for 10,000 ids. Encoding all objects again would
    take 350 ms, and every Allocate would wait for it.

    There may be far more numbered ids, which differ in their numbers only. A block of them, those
    of one device, is encoded by joining its numbers (8 ms for 50,000).

    State: a cache of the encoded devices, at most two for each id: healthy and unhealthy. Numbered
    ids are not cached.
    """

    def __init__(self) -> None:
        # by id, NUMA node and health
        self._encoded: dict[tuple[str, int | None, bool], bytes] = {}
        # the bytes after the id, by NUMA node and health
        self._suffixes: dict[tuple[int | None, bool], bytes] = {}

    def encode(self, devices: Iterable[ListedDevice]) -> bytes:
        """Return the complete ListAndWatchResponse."""
        return b"".join(self.parts(devices))

    def parts(self, devices: Iterable[ListedDevice]) -> Iterator[bytes]:
        """Yield the ListAndWatchResponse in parts of at most `IDS_IN_A_PART` ids,
        so that other calls can be answered in between.
        """
        if isinstance(devices, NumberedList):
            for block, healthy in devices.blocks:
                yield from self._block(block, healthy=healthy)
            # ids that containers still hold, of devices that are not offered any more
            devices = devices.others
        part: list[bytes] = []
        for device in devices:
            key = (device.id.id, device.id.numa_node, device.healthy)
            encoded = self._encoded.get(key)
            if encoded is None:
                encoded = self._encoded[key] = self._device(*key)
            part.append(encoded)
            if len(part) == IDS_IN_A_PART:
                yield b"".join(part)
                part = []
        yield b"".join(part)

    def _block(self, block: IdBlock, *, healthy: bool) -> Iterator[bytes]:
        """Encode a block. Ids of equal length differ only in the digits of their numbers,
        so the bytes between two numbers are constant.
        """
        number_text = block.codec.text  # makes the text of a number
        # ranges of numbers whose ids have one length
        for smallest, end in block.equally_long():
            encoded = self._device(block.text(smallest), block.numa_node, healthy)
            suffix = self._suffix(block.numa_node, healthy=healthy)
            # Joining the numbers as text is the fastest way. Latin-1 maps each byte to one
            # character, so the constant bytes survive it.
            before = encoded[: -len(suffix) - len(number_text(smallest))].decode("latin-1")
            between = suffix.decode("latin-1") + before
            for start in range(smallest, end, IDS_IN_A_PART):
                part = range(start, min(start + IDS_IN_A_PART, end))
                numbers = between.join(map(number_text, part))
                yield before.encode("latin-1") + numbers.encode("latin-1") + suffix

    def _device(self, device_id: str, numa_node: int | None, healthy: bool) -> bytes:
        """Encode one element of ListAndWatchResponse.devices, with its tag and length."""
        encoded_id = device_id.encode()
        device = (
            b"\x0a"
            + wire.encode_varint(len(encoded_id))
            + encoded_id
            + self._suffix(numa_node, healthy=healthy)
        )
        return b"\x0a" + wire.encode_varint(len(device)) + device

    def _suffix(self, numa_node: int | None, *, healthy: bool) -> bytes:
        """Return the bytes that follow the id, the same for many ids."""
        suffix = self._suffixes.get((numa_node, healthy))
        if suffix is None:
            suffix = self._suffixes[numa_node, healthy] = _after_the_id(numa_node, healthy=healthy)
        return suffix


def check_budget(resource: Resource) -> None:
    """Check that the resource's list fits into one message.

    The kubelet drops the connection for a message that is too long, so this is checked before
    anything is registered (kubelet §10, V13).

    Raises:
        OfferError: it does not fit; the error names the number of replicas that would, or the
            setting that reduces the ids.
    """
    size = list_size_bytes(resource.ids)
    problem = why_too_long(size)
    if not problem:
        return
    if resource.ids_setting:  # the setting that decides on the number of ids
        fewer = -(-size // device_ids.MESSAGE_BUDGET_BYTES)
        remedy = f"{resource.ids_setting}: change it so that there are {fewer} times fewer ids"
        raise OfferError({resource.name: f"{len(resource.ids)} ids {problem}; {remedy}"})
    # The last id of a block of numbered ids is its longest. There may be too many to measure each.
    ids = (
        [block.at(block.count - 1) for block in resource.ids.blocks if block.count]
        if isinstance(resource.ids, NumberedIds)
        else resource.ids
    )
    largest = max(element_size_bytes(id_) for id_ in ids)
    devices = len({id_.device for id_ in ids})
    fitting = device_ids.MESSAGE_BUDGET_BYTES // (largest * devices)
    remedy = (
        f"replicas: at most {fitting} for each of the {devices} devices would fit, "
        f"{len(resource.ids) // devices} are configured"
    )
    raise OfferError(
        {resource.name: f"{len(resource.ids)} ids of up to {largest} bytes {problem}; {remedy}"}
    )


def encode_options(*, pre_start_required: bool, offers_preference: bool = True) -> bytes:
    """Encode DevicePluginOptions; ``offers_preference`` offers GetPreferredAllocation."""
    return bytes(
        _options(pre_start_required=pre_start_required, offers_preference=offers_preference)
    )


def encode_register(
    *, endpoint: str, resource: str, pre_start_required: bool, offers_preference: bool = True
) -> bytes:
    """Encode a RegisterRequest for the socket ``endpoint``, a base name."""
    return bytes(
        v1beta1.RegisterRequest(
            version=API_VERSION,
            endpoint=endpoint,
            resource_name=resource,
            options=_options(
                pre_start_required=pre_start_required, offers_preference=offers_preference
            ),
        )
    )


def encode_get(namespace: str, name: str) -> bytes:
    """Encode a GetPodResourcesRequest (kubelet §13).
    Neither name is ever empty, so both fields are always written.
    """
    return wire.encode_field(1, name.encode()) + wire.encode_field(2, namespace.encode())


def decode_allocate(request: bytes) -> list[tuple[str, ...]]:
    """Decode an AllocateRequest to the ids of each container.

    Raises:
        RequestRefusedError: the bytes are malformed, or name no container or one without ids.
    """
    with _refusing_malformed("Allocate"):
        containers = [wire.strings(container, 1) for container in wire.messages(request, 1)]
    if not containers:
        raise RequestRefusedError("the Allocate request names no container")
    for ids in containers:
        _require_ids(ids, "Allocate")
    return containers


def encode_allocate(answers: Iterable[Edits]) -> bytes:
    """Encode an AllocateResponse with one element for each container.
    A container without edits has an element, too, because the kubelet always reads the first one.
    """
    edits = list(answers)
    if all(each == Edits(cdi_names=each.cdi_names) for each in edits):
        # Late binding answers with CDI names only. The kubelet admits no other pod until it has the
        # answer, so these bytes are written by hand. The generated code is slow: it makes an object
        # for each level, and sets up Python's warning filters again for each field.
        return b"".join(
            wire.encode_field(
                1,
                b"".join(
                    [
                        wire.encode_field(5, wire.encode_field(1, name.encode()))
                        for name in each.cdi_names
                    ]
                ),
            )
            for each in edits
        )
    return bytes(
        v1beta1.AllocateResponse(container_responses=[_container_response(each) for each in edits])
    )


def decode_preference(request: bytes) -> list[PreferenceRequest]:
    """Decode a PreferredAllocationRequest to the request for each container.

    Raises:
        RequestRefusedError: the bytes are malformed.
    """
    with _refusing_malformed("GetPreferredAllocation"):
        return [_preference(container) for container in wire.messages(request, 1)]


def encode_preference(choices: Iterable[Sequence[str]]) -> bytes:
    """Encode a PreferredAllocationResponse with the chosen ids of each container."""
    return bytes(
        v1beta1.PreferredAllocationResponse(
            container_responses=[
                v1beta1.ContainerPreferredAllocationResponse(device_ids=list(ids))
                for ids in choices
            ]
        )
    )


def decode_answer(encoded: bytes) -> Edits:
    """Decode the agent's own ContainerAllocateResponse, which the kubelet keeps in its checkpoint.
    A field that a later version of the agent has added is ignored.

    Raises:
        CheckpointError: it cannot be read.
    """
    environment: dict[str, str] = {}
    annotations: dict[str, str] = {}
    mounts, nodes, names = [], [], []
    try:
        for number, _, value in wire.fields(encoded):
            if number == 1:
                environment[wire.string(wire.to_bytes(value), 1)] = wire.string(
                    wire.to_bytes(value), 2
                )
            elif number == 2:
                mount = wire.to_bytes(value)
                read_only = any(
                    wire.to_integer(each) for field, _, each in wire.fields(mount) if field == 3
                )
                mounts.append(
                    Mount(
                        container_path=wire.string(mount, 1),
                        host_path=wire.string(mount, 2),
                        read_only=read_only,
                    )
                )
            elif number == 3:
                node = wire.to_bytes(value)
                nodes.append(
                    DeviceNode(
                        container_path=wire.string(node, 1),
                        host_path=wire.string(node, 2),
                        permissions=wire.string(node, 3),
                    )
                )
            elif number == 4:
                annotations[wire.string(wire.to_bytes(value), 1)] = wire.string(
                    wire.to_bytes(value), 2
                )
            elif number == 5:
                names.append(wire.string(wire.to_bytes(value), 1))
    except wire.MalformedError as err:
        raise CheckpointError(f"the stored answer to an Allocate cannot be read: {err}") from err
    return Edits(environment, tuple(mounts), tuple(nodes), annotations, tuple(names))


def decode_pre_start(request: bytes) -> tuple[str, ...]:
    """Decode a PreStartContainerRequest to the ids of the container that is about to start.

    Raises:
        RequestRefusedError: the bytes are malformed, or there are no ids.
    """
    with _refusing_malformed("PreStartContainer"):
        ids = wire.strings(request, 1)
    _require_ids(ids, "PreStartContainer")
    return ids


def _options(*, pre_start_required: bool, offers_preference: bool) -> v1beta1.DevicePluginOptions:
    return v1beta1.DevicePluginOptions(
        pre_start_required=pre_start_required, get_preferred_allocation_available=offers_preference
    )


def _after_the_id(numa_node: int | None, *, healthy: bool) -> bytes:
    """Encode a Device without its id, which is field 1 and so comes first."""
    message = v1beta1.Device(health=HEALTHY if healthy else UNHEALTHY)
    # An *empty* NumaNode element is NUMA node 0. A negative number means that the kernel does not
    # know the node, so the device gets no topology.
    if numa_node is not None and numa_node >= 0:
        message.topology = v1beta1.TopologyInfo(nodes=[v1beta1.NumaNode(id=numa_node)])
    return bytes(message)


def _container_response(edits: Edits) -> v1beta1.ContainerAllocateResponse:
    return v1beta1.ContainerAllocateResponse(
        envs=dict(edits.environment),
        mounts=[
            v1beta1.Mount(
                container_path=mount.container_path,
                host_path=mount.host_path,
                read_only=mount.read_only,
            )
            for mount in edits.mounts
        ],
        devices=[
            v1beta1.DeviceSpec(
                container_path=each.container_path,
                host_path=each.host_path,
                permissions=each.permissions,
            )
            for each in edits.device_nodes
        ],
        annotations=dict(edits.annotations),
        cdi_devices=[v1beta1.CdiDevice(name=name) for name in edits.cdi_names],
    )


def _preference(encoded: bytes) -> PreferenceRequest:
    available: list[str] = []
    must_include: list[str] = []
    size = 0
    for number, _, value in wire.fields(encoded):
        if number == 1:
            available.append(wire.to_text(value))
        elif number == 2:
            must_include.append(wire.to_text(value))
        elif number == 3:
            size = wire.to_integer(value)
    return PreferenceRequest(tuple(available), tuple(must_include), size)


@contextlib.contextmanager
def _refusing_malformed(call: str) -> Iterator[None]:
    try:
        yield
    except wire.MalformedError as err:
        raise RequestRefusedError(f"malformed {call} request: {err}") from err


def _require_ids(ids: tuple[str, ...], call: str) -> None:
    if not ids:
        raise RequestRefusedError(f"the {call} request names a container without any device id")
    if "" in ids:
        raise RequestRefusedError(f"the {call} request names an empty device id")
