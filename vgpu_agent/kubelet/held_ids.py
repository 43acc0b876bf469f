"""The reader of the kubelet's pod-resources API, in which each id may have an entry of its own.

A node that counts memory in ids has fifty thousand entries, 4 MB, in each answer, and nearly all of
them are of resources that only schedulers count. Those are passed over: no objects are made, and
each is only checked to have the beginning, with the resource, and the length of an earlier one.
Called by `pod_resources`, in a thread. Message layout: kubelet §13.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vgpu_agent.device_ids import NumberedIds
from vgpu_agent.errors import KubeletError
from vgpu_agent.grpc import wire
from vgpu_agent.kubelet.names import is_allowed_in_pod_resources
from vgpu_agent.model import Holding, Owner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from vgpu_agent.device_ids import DeviceId, IdBlock

# A kind of entries has one resource and one length: ids of a resource differ in length by the
# number of their digits. Entries of kinds beyond this number are decoded one by one.
_MAX_KINDS = 64
_MAX_UNKNOWN = 1000
# Entries in one match. Without a bound the regex engine would keep tens of thousands of positions
# to backtrack to. A possessive quantifier would keep none, but Python before 3.11.5 matches too
# little with it (CPython issue 106052), and Debian 12 has 3.11.2.
_MAX_AT_ONCE = b"{1,1000}"


class SeenNumbers:
    """The ids of a resource that the kubelet has. Numbered ids (`NumberedIds`) differ in their
    numbers only, with one block of them for each device. Each id has one byte here, 1 if the
    kubelet has it.

    Attributes:
        unknown: the kubelet's other ids, at most a thousand of them.
    """

    def __init__(self, resource: str, ids: NumberedIds) -> None:
        self.unknown: set[str] = set()
        self._seen = [(block, bytearray(block.count)) for block in ids.blocks]
        # pattern → the function that reads the number in an id, and the block's bytes
        kinds: dict[bytes, tuple[Callable[[str], int | None], bytearray]] = {}
        for block, seen in self._seen:
            for kind in _kinds_of_ids(resource, block):
                kinds.setdefault(kind, (block.codec.number, seen))
        self._by_kind = list(kinds.values())  # in the order of the groups in the patterns
        pattern = b"|".join(kinds) or rb"(?!)"
        # one entry, and a run of them
        self._one = re.compile(pattern)
        self._run = re.compile(b"(?:" + pattern + b")" + _MAX_AT_ONCE)

    def note_run(self, message: bytes, position: int) -> int:
        """Note the ids of the uninterrupted run of entries from ``position`` that have one numbered
        id each; return the position after them.
        """
        end = _end_of_run(self._run, message, position)
        for entry in self._one.finditer(message, position, end):
            kind = entry.lastindex or 1
            number_of, seen = self._by_kind[kind - 1]
            number = number_of(entry[kind].decode("ascii"))
            if number is not None and number < len(seen):
                seen[number] = 1
            else:  # ids of several blocks may look alike
                _, _, devices, _ = wire.read_field(entry[0], 0)
                self.note(wire.string(wire.to_bytes(devices), 2))
        return end

    def note(self, id_: str) -> None:
        """Note that the kubelet has this id."""
        for block, seen in self._seen:
            if (number := block.number(id_)) is not None:
                seen[number] = 1
                return
        self._note_unknown(id_)

    def count_missing(self, block: IdBlock) -> int:
        """Count the ids of ``block`` that the kubelet does not have."""
        return block.count - next(
            (seen.count(1) for known, seen in self._seen if known == block), 0
        )

    def _note_unknown(self, id_: str) -> None:
        if len(self.unknown) < _MAX_UNKNOWN:
            self.unknown.add(id_)


def decode_pod_resources(
    response: bytes, is_wanted: Callable[[str], bool] = lambda _: True
) -> tuple[Holding, ...]:
    """Decode one answer: what each container holds of the resources that ``is_wanted`` accepts."""
    return PodResourcesReader(is_wanted).read(response)


class PodResourcesReader:
    """A reader of ListPodResourcesResponse, and of GetPodResourcesResponse,
    which has its one pod in the same field.

    State: the kinds of entries read so far, so that the answers about one pod after the other
    are read quickly from the second on. It is dropped when it is full, and after an answer that
    makes no sense.

    Attributes:
        is_wanted: tells whether the ids of the resource of that name are of interest; the others
            are left out.
    """

    def __init__(self, is_wanted: Callable[[str], bool]) -> None:
        self.is_wanted = is_wanted
        self._entries = _Entries(field=2, is_wanted=is_wanted)

    def read(self, response: bytes) -> tuple[Holding, ...]:
        """List the holdings. Several entries of one container
        and resource are united (kubelet V11).

        Raises:
            KubeletError: the bytes are no such message.
        """
        united: dict[tuple[Owner, str], dict[str, None]] = {}
        try:
            for pod in wire.messages(response, 1):
                name, namespace = wire.string(pod, 1), wire.string(pod, 2)
                for container in wire.messages(pod, 3):
                    found, rest = self._entries.walk(container)
                    owner = Owner(wire.to_text(rest.get(1, b"")), namespace=namespace, pod=name)
                    # an entry with names that Kubernetes does not allow is skipped
                    if not found or not is_allowed_in_pod_resources(
                        namespace, name, owner.container
                    ):
                        continue
                    for resource, ids in found:
                        united.setdefault((owner, resource), {}).update(dict.fromkeys(ids))
        except wire.MalformedError as err:
            self._entries = _Entries(field=2, is_wanted=self.is_wanted)
            raise KubeletError(f"pod-resources: the answer cannot be understood: {err}") from err
        if self._entries.full:
            self._entries = _Entries(field=2, is_wanted=self.is_wanted)
        return tuple(
            Holding(resource, tuple(ids), owner) for (owner, resource), ids in united.items() if ids
        )


def decode_allocatable(
    response: bytes, offered: Mapping[str, Sequence[DeviceId]]
) -> dict[str, frozenset[str] | SeenNumbers]:
    """The healthy ids of each resource in ``offered``, from AllocatableResourcesResponse
    (kubelet §13); as `SeenNumbers` where the offered ones are numbered. They show whether the
    kubelet has the ids that it was sent.

    Raises:
        KubeletError: the bytes are no such message.
    """
    united: dict[str, set[str]] = {}
    numbered = {
        name: SeenNumbers(name, ids)
        for name, ids in offered.items()
        if isinstance(ids, NumberedIds)
    }
    entries = _Entries(
        field=1,
        is_wanted=offered.__contains__,
        readers=[seen.note_run for seen in numbered.values()],
    )
    try:
        for resource, ids in entries.walk(response)[0]:
            if seen := numbered.get(resource):
                for id_ in ids:
                    seen.note(id_)
            else:
                united.setdefault(resource, set()).update(ids)
    except wire.MalformedError as err:
        raise KubeletError(
            f"pod-resources: the answer to GetAllocatableResources cannot be understood: {err}"
        ) from err
    return {resource: frozenset(ids) for resource, ids in united.items()} | numbered


class _Entries:
    """A walk over the ContainerDevices in field ``field`` of messages,
    past those whose resource is not wanted.

    State: the kinds of entries to pass over, a kind being tag, length and resource; runs of them
    are matched at once.
    """

    def __init__(
        self,
        field: int,
        is_wanted: Callable[[str], bool],
        readers: Sequence[Callable[[bytes, int], int]] = (),
    ) -> None:
        """Build it; ``readers`` are offered each position first,
        and return the position after what they have read.
        """
        self._field = field
        self._is_wanted = is_wanted
        self._readers = readers
        # encoded name of a resource → the name if it is wanted, else ""
        self._names: dict[bytes, str] = {}
        self._kinds: set[tuple[bytes, int]] = set()
        self._run: re.Pattern[bytes] | None = None  # a run of entries to pass over
        self._singles: dict[bytes, str] = {}  # pattern of a wanted entry with one id → its resource
        # one entry of these patterns, and a run of them
        self._single: re.Pattern[bytes] | None = None
        self._single_run: re.Pattern[bytes] | None = None

    @property
    def full(self) -> bool:
        """Tell whether it has no place for further kinds of entries."""
        return max(len(self._kinds), len(self._singles), len(self._names)) >= _MAX_KINDS

    def walk(
        self, message: bytes
    ) -> tuple[list[tuple[str, Sequence[str]]], dict[int, int | bytes]]:
        """Return resource and ids of the wanted entries that no reader has read,
        and field number → last value of the other fields.

        Raises:
            MalformedError: the bytes are no protobuf message.
        """
        found: list[tuple[str, Sequence[str]]] = []
        rest: dict[int, int | bytes] = {}
        position, end = 0, len(message)
        while (position := self._pass_known(message, position, found)) < end:
            number, _, value, following = wire.read_field(message, position)
            if number != self._field:
                rest[number] = value
            elif resource := self._wanted_name(entry := wire.to_bytes(value)):
                ids = wire.strings(entry, 2)
                found.append((resource, ids))
                self._learn_single(message[position:following], resource, ids)
            else:
                self._learn(message[position:following], entry)
            position = following
        return found, rest

    def _pass_known(
        self, message: bytes, position: int, found: list[tuple[str, Sequence[str]]]
    ) -> int:
        """Return the position after the entries that readers have read, and after those of known
        kinds; add the wanted ones of the latter to ``found``.
        """
        for read in self._readers:
            position = read(message, position)
        if (
            self._single is not None
            and (end := _end_of_run(self._single_run, message, position)) > position
        ):
            resources = list(self._singles.values())
            ids: dict[str, list[str]] = {}
            for entry in self._single.finditer(message, position, end):
                kind = entry.lastindex or 1
                ids.setdefault(resources[kind - 1], []).append(wire.to_text(entry[kind]))
            found.extend(ids.items())
            position = end
        return _end_of_run(self._run, message, position)

    def _wanted_name(self, entry: bytes) -> str:
        """Return the resource name in ``entry``; empty when it is not wanted."""
        names = [value for number, _, value in wire.fields(entry) if number == 1]
        encoded = wire.to_bytes(names[-1]) if names else b""
        if encoded not in self._names:
            name = wire.to_text(encoded)
            self._names[encoded] = name if self._is_wanted(name) else ""
        return self._names[encoded]

    def _learn(self, element: bytes, entry: bytes) -> None:
        """Pass over entries from now on that begin like ``element``, and are as long. ``entry`` is
        its content, without the field's tag and length.
        """
        number, _, name, following = wire.read_field(entry, 0) if entry else (0, 0, 0, 0)
        if number != 1 or isinstance(name, int) or len(self._kinds) >= _MAX_KINDS:
            return
        head = element[: len(element) - len(entry) + following]
        self._kinds.add((head, len(element) - len(head)))
        kinds = b"|".join(re.escape(head) + b".{%d}" % rest for head, rest in sorted(self._kinds))
        self._run = re.compile(b"(?:" + kinds + b")" + _MAX_AT_ONCE, re.DOTALL)

    def _learn_single(self, element: bytes, resource: str, ids: Sequence[str]) -> None:
        """Read, from now on in runs, entries with one id of the same length and nothing else."""
        if len(ids) != 1 or len(self._singles) >= _MAX_KINDS:
            return
        id_ = ids[0].encode()
        content = wire.encode_field(1, resource.encode()) + b"\x12" + wire.encode_varint(len(id_))
        head = (
            bytes([self._field << 3 | wire.LENGTH_DELIMITED])
            + wire.encode_varint(len(content) + len(id_))
            + content
        )
        if head + id_ != element:
            return
        self._singles[re.escape(head) + b"(.{%d})" % len(id_)] = resource
        pattern = b"|".join(self._singles)
        self._single = re.compile(pattern, re.DOTALL)
        self._single_run = re.compile(b"(?:" + pattern + b")" + _MAX_AT_ONCE, re.DOTALL)


def _end_of_run(run: re.Pattern[bytes] | None, message: bytes, position: int) -> int:
    """Return the position after all entries of the kinds of ``run`` in a row from ``position``."""
    while run is not None and (found := run.match(message, position)):
        position = found.end()
    return position


def _kinds_of_ids(resource: str, block: IdBlock) -> Iterator[bytes]:
    """Yield a pattern for each length of ids in ``block``: an entry with one such id. Its group is
    the text of the number.
    """
    prefix, name = block.prefix.encode(), wire.encode_field(1, resource.encode())
    for start, _ in block.equally_long():
        digits = len(block.codec.text(start))
        id_head = b"\x12" + wire.encode_varint(len(prefix) + digits) + prefix
        length = len(name) + len(id_head) + digits
        head = b"\x0a" + wire.encode_varint(length) + name + id_head
        yield re.escape(head) + b"([!-~]{%d})" % digits
