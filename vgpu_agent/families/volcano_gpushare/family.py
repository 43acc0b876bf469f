"""The `volcano-gpushare` family: ``volcano.sh/gpu-memory`` or ``volcano.sh/gpu-number``, as
Volcano's own device plugin offers them.

Names, ids and environment are those of volcano-gpushare S1 to S7. The sharing is advisory: a
container gets its card and an amount of memory, and nothing enforces them. The ids are only
counted. A limit counts *units*: a unit is `gpuMemoryFactor` MiB of memory, or a card. The pod's
card is in its annotation ``volcano.sh/gpu-index``, written by a scheduler, or by this agent for
pods that no GPU scheduler has placed.

The number of a card is the index that NVML gave it when all cards answered. A card that is lost
keeps its number as long as this agent runs, so ids and annotations of running pods keep their
meaning; after a restart of the agent NVML's numbers of that moment count, for the scheduler as
well. The ledger has the shares of running containers by UUID, so a new numbering never changes
them.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.device_ids import DeviceId, IdBlock, NumberedIds, list_size_bytes, why_too_long
from vgpu_agent.errors import CapacityError, OfferError, RequestRefusedError, listed, quoted
from vgpu_agent.families.device_lists import ListOptions, answer_id, edits_of, visible_device
from vgpu_agent.families.family import Decision, Ownership, Question
from vgpu_agent.families.memory_units import LARGEST_FACTOR, smallest_fitting_factor
from vgpu_agent.families.volcano_gpushare.settings import (
    FAMILY,
    MEMORY_RESOURCE,
    NUMBER,
    NUMBER_RESOURCE,
    SHARE,
    VolcanoGpushare,
)
from vgpu_agent.families.volcano_gpushare.whole_pod import (
    first_idle,
    first_units,
    first_with_room,
    parse_indices,
    units,
)
from vgpu_agent.isolation.edits import Edits, Provision
from vgpu_agent.model import Decider, Resource, Share
from vgpu_agent.nodes import DesiredNode
from vgpu_agent.pods import ContainerKind, DesiredPod

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vgpu_agent.config.settings import Settings
    from vgpu_agent.families.family import NodeView
    from vgpu_agent.model import DeviceRoom, Gpu, Grant, Inventory
    from vgpu_agent.pods import Pod

GPU_INDEX = "volcano.sh/gpu-index"
PREDICATE_TIME = "volcano.sh/predicate-time"  # when the card was chosen, in unix nanoseconds
# "true" once all containers that ask for GPUs have started, init containers apart
GPU_ASSIGNED = "volcano.sh/gpu-assigned"
# of the Node: the numbers of the cards that schedulers must not use
UNHEALTHY_IDS = "volcano.sh/gpu-unhealthy-ids"
# of the Node: the time of a scheduler's lock; while it is there, schedulers bind no other pod to it
NODE_LOCK = "gpu"

# what the pod's owner can do, for messages
_ANEW = "delete the pod so that it is scheduled anew"
_SHOWN_CHARACTERS = 60  # of an annotation in an error


# containers get their cards by index, in a variable
BY_INDEX = ListOptions(id_strategy="index")


class VolcanoGpushareOptions(msgspec.Struct, frozen=True):
    """The settings by which this node offers its GPUs.

    Attributes:
        strategy: `SHARE` offers memory, `NUMBER` whole cards.
        factor: MiB in one id; 0 for the smallest power of two with which the list of all ids fits
            into a message to the kubelet.
        unequal_gpus: ``refuse`` or ``minimum``: what to do with cards of different size, which the
            scheduler takes for equal.
        lists: how the container gets its card (NVIDIA's ``deviceListStrategy``); by index, as the
            replaced plugin does, unless the operator wants UUIDs.
    """

    strategy: str = SHARE
    factor: int = 1
    unequal_gpus: str = "refuse"
    lists: ListOptions = BY_INDEX

    @classmethod
    def from_settings(cls, settings: Settings, *, lists: ListOptions) -> VolcanoGpushareOptions:
        """Return the configured options. Only the fields of ``lists`` that give and name a card are
        used; containers get nothing else, such as device nodes of GDRCopy.
        """
        gpushare = settings.section(VolcanoGpushare)
        return cls(
            strategy=gpushare.strategy,
            factor=gpushare.gpu_memory_factor,
            unequal_gpus=gpushare.unequal_gpus,
            lists=ListOptions(
                strategies=lists.strategies,
                id_strategy=gpushare.visible_devices,
                # the CDI specs are the node's, so they keep the node-wide naming
                cdi_id_strategy=lists.id_strategy,
                cdi_annotation_prefix=lists.cdi_annotation_prefix,
                cdi_kind=lists.cdi_kind,
            ),
        )


class VolcanoGpushareFamily:
    """GPU memory without a limit, or whole GPUs, under Volcano's older names.

    State: the numbers of the cards that were offered last, because a pod's annotation names a card
    by its number; the same inventory always gives the same numbers.
    """

    name = FAMILY

    def __init__(self, options: VolcanoGpushareOptions) -> None:
        self._options = options
        self._resource_name = MEMORY_RESOURCE if options.strategy == SHARE else NUMBER_RESOURCE
        self._numbers: dict[str, int] = {}

    # -- offers ------------------------------------------------------------------------------------

    def owns(self, resource: str) -> Ownership:
        """Own both names for certain, whatever the ids are: the other may be in the kubelet's
        records after a change of strategy.
        """
        return (
            Ownership.CERTAIN if resource in (MEMORY_RESOURCE, NUMBER_RESOURCE) else Ownership.NONE
        )

    def resources(self, inventory: Inventory) -> tuple[Resource, ...]:
        """Return one resource. Its ids are ``<card>-<unit>``, two numbers, for each unit of a
        card's memory, or the cards' UUIDs (volcano-gpushare S1, S4, S5).

        Raises:
            OfferError: the cards differ in size, or the list of ids would not fit into a message to
                the kubelet, or a unit into a card.
        """
        numbered = inventory.numbered  # number → card
        self._numbers = {gpu.uuid: number for number, gpu in numbered.items()}
        if not numbered:
            return ()
        if self._options.strategy == NUMBER:
            cards = tuple(DeviceId(gpu.uuid, gpu.uuid, gpu.numa_node) for gpu in numbered.values())
            return (self._resource(cards, holders_per_device=1),)
        self._refuse_unequal(numbered)
        factor = self._factor(inventory)
        ids = _memory_ids(numbered, factor)
        self._refuse_unfitting(numbered, ids, factor)
        # Memory is the limit: no container asks for less than one unit, so there are never more
        # holders than units. A block has the ids of one card, and all cards have equally many.
        return (
            self._resource(
                ids,
                holders_per_device=ids.blocks[0].count,
                ids_setting="volcanoGpushare.gpuMemoryFactor",
            ),
        )

    def cautions(self, inventory: Inventory) -> tuple[str, ...]:
        """Return no warnings: all that can be offered is offered."""
        del inventory
        return ()

    def check(self, resource: Resource, ids: Sequence[str]) -> None:
        """Accept any ids: any number of units makes sense until the pod is known."""

    # -- decisions ---------------------------------------------------------------------------------

    def decide(self, question: Question) -> Decision:
        """Choose the cards that ``volcano.sh/gpu-index`` names,
        or without it the first that have room for the whole pod.

        ``question`` has the container, its pod and ids, and what each device has left.

        Raises:
            RequestRefusedError: limits or annotation cannot be followed.
            CapacityError: the pod has no annotation and does not fit.
        """
        self._refuse_other_amount(question)
        text = question.pod.annotations.get(GPU_INDEX)
        if text is not None:
            return Decision(
                self._shares(question, self._named(question, text)),
                f"the scheduler, in {GPU_INDEX}",
                by_scheduler=True,
            )
        whole = self._options.strategy == NUMBER
        gpus = self._idle_gpus(question) if whole else (self._roomy_gpu(question),)
        return Decision(
            self._shares(question, gpus),
            f"the agent, the first {'idle GPUs' if whole else 'GPU with room'} (no {GPU_INDEX})",
        )

    def named_gpus(self, pod: Pod, inventory: Inventory) -> Mapping[str, tuple[str, ...]]:
        """Return container → the UUIDs of its cards, which ``volcano.sh/gpu-index`` names: they are
        claimed for the pod. Empty where the pod needs more memory than one card has, or more cards
        than the node has. Left out are init containers, containers with a card in MIG mode, and
        those whose part of the annotation cannot be followed.
        """
        text, name = pod.annotations.get(GPU_INDEX), self._resource_name
        if text is None or not 0 < (needed := units(pod, name)) <= self._most_units(inventory):
            return {}
        named: dict[str, tuple[str, ...]] = {}
        for container in pod.containers:
            count = container.limits.get(name, 0)
            if (
                container.kind is ContainerKind.INIT
                or name in container.unreadable_limits  # those that are not whole numbers
                or not 0 < count <= needed
            ):
                continue
            # only the number of ids matters to `_named`, not their texts
            ids = ("",) * count if self._options.strategy == NUMBER else ("",)
            asked = Question(
                Resource(name, FAMILY, ids=()),
                pod,
                container.name,
                ids,
                node=pod.node,
                inventory=inventory,
                rooms=(),
            )
            with contextlib.suppress(RequestRefusedError):
                gpus = self._named(asked, text)
                if not any(gpu.mig_enabled for gpu in gpus):
                    named[container.name] = tuple(gpu.uuid for gpu in gpus)
        return named

    def recall(self, question: Question) -> Decision | None:
        """Return the decision that the annotation shows, for a container that runs already. None
        where it cannot be followed, or where there is none: then this agent has placed the pod and
        has not written the annotation yet.
        """
        text = question.pod.annotations.get(GPU_INDEX)
        if text is None:
            return None
        try:
            self._refuse_other_amount(question)
            return Decision(
                self._shares(question, self._named(question, text)),
                f"the pod, in {GPU_INDEX}",
                by_scheduler=True,
            )
        except RequestRefusedError:
            return None

    def provision(self, question: Question, shares: tuple[Share, ...]) -> Provision:
        """Return the edits. With the list strategy ``envvar`` they are three variables and nothing
        else: ``NVIDIA_VISIBLE_DEVICES`` with the container's cards, ``VOLCANO_GPU_ALLOCATED`` and
        ``VOLCANO_GPU_MEMORY_TOTAL`` (volcano-gpushare S3, S4, S5).

        ``VOLCANO_GPU_MEMORY_TOTAL`` is the size of the container's own (first) card: programs
        divide ``VOLCANO_GPU_ALLOCATED`` by it to learn which part of the card is theirs.
        """
        gpus = [gpu for share in shares if (gpu := question.inventory.gpu(share.device))]
        devices = [
            device for gpu in gpus if (device := visible_device(gpu.uuid, question.inventory))
        ]
        # `answer_id`: a UUID that keeps CDI annotations of several resources of a container apart
        edits = edits_of(
            devices, self._options.lists, answer_id=answer_id(question.resource.name, question.ids)
        )
        environment = {
            "VOLCANO_GPU_ALLOCATED": str(len(question.ids) * self._factor(question.inventory)),
            "VOLCANO_GPU_MEMORY_TOTAL": str(gpus[0].memory_mib if gpus else 0),
        }
        return Provision(edits.joined(Edits(environment=environment)))

    # -- state of pod and node ---------------------------------------------------------------------

    def desired_pod(self, pod: Pod, grants: Mapping[str, Grant], *, failed: bool) -> DesiredPod:
        """Return the annotations of the pod. If this agent has placed it, its cards are among them
        as soon as all are known, so that the scheduler counts them. ``gpu-assigned`` follows when
        all containers that ask for GPUs have started; init containers do not count for it, because
        the others are still to come. Nothing where the pod has ``failed``: it will never start
        here.
        """
        served = {
            name: grant
            for name, grant in grants.items()
            if self.owns(grant.resource) and grant.shares
        }
        if failed or not served:
            return DesiredPod()
        desired_state: dict[str, str | None] = {}
        if GPU_INDEX not in pod.annotations and (indices := self._indices(pod, served)):
            desired_state[GPU_INDEX] = indices
            if PREDICATE_TIME not in pod.annotations:
                # `reserved_at`: unix seconds, here written in nanoseconds
                desired_state[PREDICATE_TIME] = (
                    f"{int(min(grant.reserved_at for grant in served.values()) * 1e6)}000"
                )
        lasting = [
            container.name
            for container in pod.containers
            if container.kind is not ContainerKind.INIT
            and container.limits.get(self._resource_name, 0) > 0
        ]
        if lasting and all(name in served for name in lasting):
            desired_state[GPU_ASSIGNED] = "true"
        return DesiredPod(desired_state)

    def cleanup(self, now: float) -> DesiredNode:
        """Leave no card for a scheduler to choose when the agent leaves the node for good. The
        kubelet itself sets the offered resource to 0 when the plugin is gone.
        """
        del now
        capacity = (
            {NUMBER_RESOURCE: "0"} if self._options.strategy == SHARE else {MEMORY_RESOURCE: "0"}
        )
        return DesiredNode(annotations={UNHEALTHY_IDS: None}, capacity=capacity)

    def desired_node(self, view: NodeView) -> DesiredNode:
        """Return the counts from which the scheduler computes number and size of the cards, the
        cards that it must not use, and the removal of its lock if that is stale.
        """
        rooms = view.rooms.get(self._resource_name)
        # stale: the last Allocate, at `allocated_at`, came after the lock, or the lock is too old
        lock = view.locks.desired_state(
            view.node,
            NODE_LOCK,
            allocated_at=view.allocated_at.get(self._resource_name),
            now=view.now,
        )
        if rooms is None:
            # Nothing is offered (any more), so an earlier count must not attract pods.
            stale = self._options.strategy == SHARE and NUMBER_RESOURCE in view.node.capacity
            return DesiredNode(
                annotations={UNHEALTHY_IDS: None}, capacity={NUMBER_RESOURCE: "0"} if stale else {}
            ).joined(lock)
        numbers = {gpu.uuid: number for number, gpu in view.inventory.numbered.items()}
        # `trouble`: why no container may get anything of the card
        usable = {
            numbers[room.device] for room in rooms if not room.trouble and room.device in numbers
        }
        # A card that has not answered since the agent's start has no id. The scheduler counts from
        # 0 without a gap, so such a card is counted where one with a higher number is known.
        count = max(numbers.values(), default=-1) + 1
        unusable = [str(number) for number in range(count) if number not in usable]
        return DesiredNode(
            annotations={UNHEALTHY_IDS: ",".join(unusable) or None},
            # The scheduler ignores the cards of a Node without gpu-memory; a value of 0 is enough.
            capacity=(
                {NUMBER_RESOURCE: str(count)}
                if self._options.strategy == SHARE
                else {MEMORY_RESOURCE: "0"}
            ),
        ).joined(lock)

    # -- how it is done ----------------------------------------------------------------------------

    def _resource(
        self, ids: Sequence[DeviceId], *, holders_per_device: int, ids_setting: str = ""
    ) -> Resource:
        return Resource(
            self._resource_name,
            FAMILY,
            ids,
            holders_per_device=holders_per_device,
            pre_start_required=True,  # the kubelet is to call PreStartContainer
            decided_by=Decider.POD,
            offers_preference=False,  # the kubelet need not ask which ids suit best
            ids_setting=ids_setting,  # named where there are too many ids
            requires_mig_off=True,
        )

    def _refuse_unequal(self, numbered: Mapping[int, Gpu]) -> None:
        if (
            self._options.unequal_gpus == "minimum"
            or len({gpu.memory_mib for gpu in numbered.values()}) == 1
        ):
            return
        cards = ", ".join(
            f"GPU {number} ({gpu.name}) has {gpu.memory_mib} MiB"
            for number, gpu in numbered.items()
        )
        problem = (
            f"the GPUs differ in size and the scheduler treats them as equal: {cards}; set "
            "volcanoGpushare.unequalGpus: minimum to offer each with the size of the smallest, or "
            "volcanoGpushare.strategy: number to offer whole GPUs"
        )
        raise OfferError({MEMORY_RESOURCE: problem})

    def _refuse_unfitting(self, numbered: Mapping[int, Gpu], ids: NumberedIds, factor: int) -> None:
        if not ids.blocks[0].count:
            size = _size_mib(numbered)
            problem = f"a unit of {factor} MiB is more than a GPU has, {size} MiB"
            raise OfferError(
                {
                    MEMORY_RESOURCE: (
                        f"{problem}; set volcanoGpushare.gpuMemoryFactor to {size} or less"
                    )
                }
            )
        if problem := why_too_long(list_size_bytes(ids)):
            fitting = self._fitting_factor(numbered)
            remedy = (
                f"volcanoGpushare.gpuMemoryFactor: {fitting} would fit (0: chosen by the agent)"
                if fitting
                else "volcanoGpushare.strategy: number offers whole GPUs"
            )
            ids_made = f"{len(ids)} ids of {factor} MiB"
            raise OfferError({MEMORY_RESOURCE: f"{ids_made} {problem}; {remedy}"})

    def _factor(self, inventory: Inventory) -> int:
        """Return the MiB in one id. For whole cards it is the number by which the count of cards is
        multiplied in ``VOLCANO_GPU_ALLOCATED``, as the replaced plugin does; 1 unless it is set.
        """
        if self._options.factor:
            return self._options.factor
        return (
            1
            if self._options.strategy == NUMBER
            else self._fitting_factor(inventory.numbered) or LARGEST_FACTOR
        )

    def _fitting_factor(self, numbered: Mapping[int, Gpu]) -> int | None:
        """Return the smallest factor with which the list of ids fits into a message; None where
        none does.
        """
        return smallest_fitting_factor(
            lambda factor: list_size_bytes(_memory_ids(numbered, factor))
        )

    def _most_units(self, inventory: Inventory) -> int:
        """Return the most units that a pod can have: the cards, or the units of one card."""
        if self._options.strategy == NUMBER:
            return len(inventory.gpus)
        return _size_mib(inventory.numbered) // self._factor(inventory)

    def _refuse_other_amount(self, question: Question) -> None:
        """Refuse a container that the pod lacks, or whose limit is not the number of ids from the
        kubelet or cannot be read: the pod is then not the one that was admitted.
        """
        pod, name = question.pod, question.resource.name
        container = pod.container(question.container)
        if container is None:
            raise RequestRefusedError(
                f"pod {pod.full_name} has no container {question.container}, to which the "
                f"kubelet has given {name}"
            )
        if name in container.unreadable_limits:
            shown = _shown(container.unreadable_limits[name])
            raise RequestRefusedError(
                f"pod {pod.full_name}, container {container.name}: limit {name}: {shown} is not "
                "a whole number"
            )
        if (limit := container.limits.get(name, 0)) != len(question.ids):
            raise RequestRefusedError(
                f"pod {pod.full_name}, container {container.name}: limit {name} is {limit} and "
                f"the kubelet has counted {len(question.ids)}; {_ANEW}"
            )

    def _named(self, question: Question, text: str) -> tuple[Gpu, ...]:
        """Return the cards that the annotation names for this container.

        A pod that asks for memory has one card, even if the annotation names more: old schedulers
        wrote every card that would do.
        """
        where = f"pod {question.pod.full_name}: {GPU_INDEX} is {_shown(text)}"
        if (indices := parse_indices(text)) is None:
            raise RequestRefusedError(
                f"{where}; expected numbers of GPUs, joined by commas, as in 0 or 0,2; {_ANEW}"
            )
        if self._options.strategy == SHARE:
            chosen = indices[:1]
        else:
            if len(set(indices)) < len(indices):
                raise RequestRefusedError(f"{where}, which names a GPU twice; {_ANEW}")
            # the place of the container's first card among those of the pod
            first = first_units(question.pod, self._resource_name)[question.container]
            chosen = indices[first : first + len(question.ids)]
            if len(chosen) < len(question.ids):
                needed = first + len(question.ids)
                raise RequestRefusedError(
                    f"{where}, and with container {question.container} the pod needs {needed} "
                    f"GPUs; {_ANEW}"
                )
        numbered = question.inventory.numbered
        if unknown := [str(index) for index in chosen if index not in numbered]:
            known = ", ".join(map(str, numbered)) or "none"
            raise RequestRefusedError(
                f"{where}, and node {question.node} has no GPU {listed(unknown)}; it has "
                f"{known}; {_ANEW}"
            )
        return tuple(numbered[index] for index in chosen)

    def _roomy_gpu(self, question: Question) -> Gpu:
        """Return the card that another container of the pod has, otherwise the first with room."""
        gpus = {gpu.uuid: gpu for gpu in question.inventory.numbered.values()}
        here = [
            share.device
            for shares in question.siblings.values()  # of the pod's other containers
            for share in shares
            if share.device in gpus
        ]
        if here:
            return gpus[here[0]]
        needed_mib = units(question.pod, self._resource_name) * self._factor(question.inventory)
        offered_mib = _size_mib(question.inventory.numbered)  # what each card is offered with
        rooms = [
            msgspec.structs.replace(room, memory_free_mib=_free_mib(room, offered_mib))
            for room in _ordered(question, gpus)
        ]
        try:
            return gpus[first_with_room(rooms, needed_mib).device]
        except CapacityError as err:
            raise _unplaced(question, err, "deviceshare.GPUSharingEnable") from err

    def _idle_gpus(self, question: Question) -> tuple[Gpu, ...]:
        """Return the cards of one container. The pod's cards are those that its containers have
        already, filled up with the first idle ones; the container's are those at its places.
        """
        gpus = {gpu.uuid: gpu for gpu in question.inventory.numbered.values()}
        taken = self._by_place(question.pod, question.siblings)
        missing = [
            place for place in range(units(question.pod, self._resource_name)) if place not in taken
        ]
        try:
            rooms = [room for room in _ordered(question, gpus) if room.device not in taken.values()]
            idle = first_idle(rooms, len(missing))
        except CapacityError as err:
            raise _unplaced(question, err, "deviceshare.GPUNumberEnable") from err
        places = taken | {place: room.device for place, room in zip(missing, idle, strict=True)}
        first = first_units(question.pod, self._resource_name)[question.container]
        return tuple(gpus[places[place]] for place in range(first, first + len(question.ids)))

    def _shares(self, question: Question, gpus: Sequence[Gpu]) -> tuple[Share, ...]:
        if self._options.strategy == NUMBER:
            return tuple(
                Share(gpu.uuid, gpu.memory_mib, cores_percent=100, exclusive=True) for gpu in gpus
            )
        return tuple(
            Share(gpu.uuid, len(question.ids) * self._factor(question.inventory)) for gpu in gpus
        )

    def _by_place(self, pod: Pod, shares: Mapping[str, Sequence[Share]]) -> dict[int, str]:
        """Map each *place*, a position among the pod's cards from 0, to the UUID of the card that a
        container has there.
        """
        first = first_units(pod, self._resource_name)
        return {
            first[name] + offset: share.device
            for name, each in shares.items()
            if name in first
            for offset, share in enumerate(each)
        }

    def _indices(self, pod: Pod, served: Mapping[str, Grant]) -> str:
        """Return what to write into the pod for the scheduler; empty until all of it is known."""
        if self._options.strategy == SHARE:
            devices = [share.device for grant in served.values() for share in grant.shares][:1]
        else:
            places = self._by_place(pod, {name: grant.shares for name, grant in served.items()})
            devices = [places.get(place, "") for place in range(units(pod, self._resource_name))]
        numbers = [self._numbers.get(device) for device in devices]
        return "" if None in numbers else ",".join(map(str, numbers))


def _size_mib(numbered: Mapping[int, Gpu]) -> int:
    """Return the size with which every card is offered: that of the smallest."""
    return min((gpu.memory_mib for gpu in numbered.values()), default=0)


def _memory_ids(numbered: Mapping[int, Gpu], factor: int) -> NumberedIds:
    count = _size_mib(numbered) // factor
    return NumberedIds(
        tuple(IdBlock(f"{number}-", count, device=gpu.uuid) for number, gpu in numbered.items())
    )


def _ordered(question: Question, gpus: Mapping[str, Gpu]) -> list[DeviceRoom]:
    """Return the rooms of the known cards, by rank (those that another family has or waits for come
    last) and then in the order of the numbers.
    """
    rooms = {room.device: room for room in question.rooms}
    return sorted(
        (rooms[uuid] for uuid in gpus if uuid in rooms),
        key=lambda room: question.gpu_uses.rank(room.device),
    )


def _free_mib(room: DeviceRoom, size_mib: int) -> int:
    """Return the free memory of a card that is offered with ``size_mib``, not with all it has."""
    return max(0, min(room.memory_mib, size_mib) - (room.memory_mib - room.memory_free_mib))


def _unplaced(question: Question, reason: CapacityError, switch: str) -> CapacityError:
    """Return the refusal of a pod that this agent has to place and cannot; ``switch`` is the option
    with which Volcano's scheduler would place it.
    """
    return CapacityError(
        f"pod {question.pod.full_name} has no {GPU_INDEX}, so this agent places it, and cannot: "
        f"{reason}. A Volcano scheduler with {switch}: true in its deviceshare plugin would choose "
        "a node with room"
    )


def _shown(text: str) -> str:
    return quoted(text, _SHOWN_CHARACTERS)
