"""The ledger's sums: what is booked of each device, what is left, and what must never be.

Pure functions on devices, resources and grants, called by `book` for every change and every audit
(a check of the whole ledger). A grant counts for a resource when both belong to one family. Where
ids name devices, all its ids must also be offered under the present settings; a grant from before
is not subject to the present limits.
"""

from __future__ import annotations

import collections
import enum
import itertools
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from vgpu_agent.model import Decider, DeviceRoom

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vgpu_agent.model import Grant, Resource, Share


class Device(msgspec.Struct, frozen=True):
    """A GPU or a MIG instance in the ledger; ``gpu`` is the UUID of its GPU, ``trouble`` is why it
    must not be granted now (health, or gone), ``divided``: it is a GPU in MIG mode.
    """

    uuid: str
    gpu: str
    memory_mib: int
    trouble: str = ""
    divided: bool = False


class Usage(msgspec.Struct):
    """The amounts booked by the grants that count for one resource, by device.

    Attributes:
        holders: the number of the resource's held ids where ids name devices, else of shares.
        exclusive: the number of exclusive shares.
        firm_cores_percent: the part of ``cores_percent`` of grants that no scheduler decided, and
            that therefore never exceed the device.
        firm_holders: the same part of ``holders``; only counted where the pod decides.
    """

    memory_mib: collections.Counter[str] = msgspec.field(default_factory=collections.Counter)
    cores_percent: collections.Counter[str] = msgspec.field(default_factory=collections.Counter)
    holders: collections.Counter[str] = msgspec.field(default_factory=collections.Counter)
    exclusive: collections.Counter[str] = msgspec.field(default_factory=collections.Counter)
    firm_cores_percent: collections.Counter[str] = msgspec.field(
        default_factory=collections.Counter
    )
    firm_holders: collections.Counter[str] = msgspec.field(default_factory=collections.Counter)


class Measure(enum.StrEnum):
    """A quantity of a device that may be exceeded."""

    MEMORY = "memory"
    COMPANY = "company"  # holders beside an exclusive one
    CORES = "cores"
    HOLDERS = "holders"


class Part(NamedTuple):
    """A part of one device, as one container asks for it; it counts as ``holders`` holders."""

    memory_mib: int = 0
    cores_percent: int = 0
    holders: int = 1
    exclusive: bool = False


class Excess(NamedTuple):
    """More booked of a device than it has: MiB, percent of the compute, or holders."""

    measure: Measure
    booked: int
    limit: int

    @property
    def decidable(self) -> bool:
        """Tell whether a scheduler may exceed this measure."""
        return self.measure in {Measure.CORES, Measure.HOLDERS}

    @property
    def text(self) -> str:
        """Describe the excess, for an audit."""
        return {
            Measure.MEMORY: f"{self.booked} MiB booked of {self.limit}",
            Measure.COMPANY: "an exclusive holder is not alone",
            Measure.CORES: f"{self.booked} % of the cores booked of {self.limit}",
            Measure.HOLDERS: f"{self.booked} holders of {self.limit}",
        }[self.measure]

    def refusal(self, wanted: Part) -> str:
        """The reason to refuse ``wanted``, which is part of what would be booked."""
        if self.measure is Measure.COMPANY:
            return (
                "the request is for the whole device, and other containers have shares of it"
                if wanted.exclusive
                else "a container holds all of it"
            )
        # a place is the room for one holder
        more, unit = {
            Measure.MEMORY: (wanted.memory_mib, "MiB"),
            Measure.CORES: (wanted.cores_percent, "% of the compute"),
            Measure.HOLDERS: (wanted.holders, "places"),
        }[self.measure]
        return f"{max(0, self.booked - more)} {unit} booked + {more} wanted, of {self.limit}"


class Overcommit(msgspec.Struct, frozen=True):
    """A device of which schedulers have assigned more compute, or to more holders, than it has.

    Attributes:
        holders_limit: the number of holders that the device has room for.
    """

    resource: str
    device: str
    cores_percent: int
    cores_limit_percent: int
    holders: int
    holders_limit: int

    @property
    def text(self) -> str:
        """Compute and holders, as the end of a sentence."""
        return (
            f"{self.cores_percent} % of the compute of {self.cores_limit_percent}, {self.holders} "
            f"containers of {self.holders_limit}"
        )


def usage(
    resource: Resource, grants: Iterable[Grant], device_of: Callable[[str, str], str | None]
) -> Usage:
    """Return what ``grants`` have booked of each device, as far as it counts for ``resource``.

    Args:
        resource: the resource whose limits are asked about.
        grants: all of them.
        device_of: (resource, id) → device of an id that is offered now; None for any other. Only
            asked where ids name devices.
    """
    booked = Usage()
    # Device → its sums, in the order of the loop below. They are kept as plain numbers, because
    # every start of a container asks about hundreds of grants.
    of_device: dict[str, list[int]] = {}
    by_ids, family = resource.decided_by is Decider.IDS, resource.family
    for grant in grants:
        if grant.family != family:
            continue
        if by_ids:
            devices = [device_of(grant.resource, id_) for id_ in grant.ids]
            if None in devices:
                continue
            if grant.resource == resource.name:
                booked.holders.update(device for device in devices if device)
        for share in grant.shares:
            if (sums := of_device.get(share.device)) is None:
                sums = of_device[share.device] = [0, 0, 0, 0, 0, 0]
            sums[0] += share.memory_mib
            sums[1] += share.cores_percent
            sums[2] += share.exclusive
            sums[3] += 1
            firm = not grant.may_overcommit  # no scheduler has decided it
            sums[4] += firm * share.cores_percent
            sums[5] += firm
    for device, (
        memory_mib,
        cores_percent,
        exclusive,
        holders,
        firm_cores_percent,
        firm_holders,
    ) in of_device.items():
        booked.memory_mib[device], booked.cores_percent[device], booked.exclusive[device] = (
            memory_mib,
            cores_percent,
            exclusive,
        )
        booked.firm_cores_percent[device] = firm_cores_percent
        if not by_ids:
            booked.holders[device], booked.firm_holders[device] = holders, firm_holders
    return booked


def overbooked(
    resource: Resource, booked: Usage, devices: Mapping[str, Device], *, firm: bool = False
) -> dict[str, Excess]:
    """Map each device of which more is booked than ``resource`` allows to its excess.

    Args:
        resource: the resource whose limits count.
        booked: the amounts that its grants have booked.
        devices: by UUID.
        firm: of the compute and the holders, count only those that no scheduler decided.
    """
    cores_limit = _cores_limit_percent(resource)
    firm = firm and resource.decided_by is Decider.POD
    cores, holders = (
        (booked.firm_cores_percent, booked.firm_holders)
        if firm
        else (booked.cores_percent, booked.holders)
    )
    excess = {}
    for uuid in booked.memory_mib.keys() | booked.holders.keys():
        known = devices.get(uuid)
        # a resource may offer a device's memory several times
        memory_mib = known.memory_mib * resource.memory_scaling if known else 0.0
        if known and booked.memory_mib[uuid] > memory_mib:
            excess[uuid] = Excess(Measure.MEMORY, booked.memory_mib[uuid], round(memory_mib))
        elif booked.exclusive[uuid] and booked.holders[uuid] > 1:
            excess[uuid] = Excess(Measure.COMPANY, booked.holders[uuid], 1)
        elif cores[uuid] > cores_limit:
            excess[uuid] = Excess(Measure.CORES, cores[uuid], round(cores_limit))
        elif holders[uuid] > resource.holders_of(uuid):  # how many it may have
            excess[uuid] = Excess(Measure.HOLDERS, holders[uuid], resource.holders_of(uuid))
    return excess


def overcommitted(resource: Resource, booked: Usage) -> list[Overcommit]:
    """List the devices with more compute or holders booked than they have, by UUID."""
    cores_limit = _cores_limit_percent(resource)
    return [
        Overcommit(
            resource.name,
            uuid,
            booked.cores_percent[uuid],
            int(cores_limit),
            booked.holders[uuid],
            resource.holders_of(uuid),
        )
        for uuid in sorted(booked.holders)
        if booked.cores_percent[uuid] > cores_limit
        or booked.holders[uuid] > resource.holders_of(uuid)
    ]


def room(resource: Resource, booked: Usage, device: Device, trouble: str) -> DeviceRoom:
    """Return what ``device`` has left for one more container of ``resource``; ``trouble`` is why
    this resource may grant nothing of it now, e.g. a claim; empty where it may.
    """
    uuid = device.uuid
    memory_mib = int(device.memory_mib * resource.memory_scaling)
    return DeviceRoom(
        device=uuid,
        trouble=trouble,
        memory_mib=memory_mib,
        memory_free_mib=max(0, memory_mib - booked.memory_mib[uuid]),
        cores_free_percent=max(0, int(_cores_limit_percent(resource)) - booked.cores_percent[uuid]),
        holders=booked.holders[uuid],
        holders_free=max(0, resource.holders_of(uuid) - booked.holders[uuid]),
        exclusive=booked.exclusive[uuid] > 0,
    )


def unsound(
    grants: Iterable[Grant], holders: Mapping[str, Mapping[str, int]], devices: Mapping[str, Device]
) -> list[str]:
    """List what must never be, whatever is offered:
    a shared exclusive device, two families on one GPU, an id with two holders.

    A MIG instance shares with the holder of its whole GPU. Two MIG instances of a GPU do not share.
    ``holders`` is the index of the ids: resource → id → number of its grant.
    """
    grants = tuple(grants)
    problems = []
    by_device: dict[str, list[Share]] = collections.defaultdict(list)
    families: dict[str, set[str]] = collections.defaultdict(set)
    for grant in grants:
        for share in grant.shares:
            gpu = devices[share.device].gpu if share.device in devices else share.device
            by_device[share.device].append(share)
            families[gpu].add(grant.family)
    for uuid, shares in sorted(by_device.items()):
        if not any(share.exclusive for share in shares):
            continue
        mig_instances = (
            each
            for each in by_device
            if each != uuid and each in devices and devices[each].gpu == uuid
        )
        if company := len(shares) - 1 + sum(len(by_device[each]) for each in mig_instances):
            problems.append(f"{uuid} has an exclusive holder and {company} more")
    problems += [
        f"{uuid} serves several families at once"
        for uuid, serving in sorted(families.items())
        if len(serving) > 1
    ]
    for name in {grant.resource for grant in grants} | holders.keys():
        counted = collections.Counter(
            itertools.chain.from_iterable(grant.ids for grant in grants if grant.resource == name)
        )
        index = holders.get(name, {})
        if len(counted) < counted.total():
            problems += [
                f"id {id_} of {name} has {count} holders"
                for id_, count in counted.items()
                if count > 1
            ]
        if counted.keys() != index.keys():
            problems.append("the index of holders does not match the grants")
    return problems


def _cores_limit_percent(resource: Resource) -> float:
    return 100 * resource.cores_scaling
