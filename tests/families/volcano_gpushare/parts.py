"""A node with two A10 cards as the volcano-gpushare family sees it,
and what the family is asked and answers there.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.family import NodeView, Question
from vgpu_agent.families.volcano_gpushare.family import (
    VolcanoGpushareFamily,
    VolcanoGpushareOptions,
)
from vgpu_agent.isolation.edits import Edits, Provision
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import DeviceRoom, Gpu, Grant, Inventory, Resource, Share
from vgpu_agent.nodes import Node
from vgpu_agent.pods import ContainerKind, Pod, PodContainer

U0 = "GPU-11111111-aaaa-bbbb-cccc-000000000001"
U1 = "GPU-22222222-aaaa-bbbb-cccc-000000000002"
U2 = "GPU-33333333-aaaa-bbbb-cccc-000000000003"

MEMORY, NUMBER = "volcano.sh/gpu-memory", "volcano.sh/gpu-number"
INDEX, ASSIGNED, UNHEALTHY = (
    "volcano.sh/gpu-index",
    "volcano.sh/gpu-assigned",
    "volcano.sh/gpu-unhealthy-ids",
)
PREDICATE_TIME = "volcano.sh/predicate-time"
SCHEDULED = {INDEX: "0", PREDICATE_TIME: "1795200991257414295"}
BY_INDEX = ListOptions(id_strategy="index", cdi_id_strategy="uuid")
BY_NUMBER = VolcanoGpushareOptions(strategy="number", lists=BY_INDEX)

NODE_0 = Gpu(U0, 0, 0, "NVIDIA A10", 24576, "0000:07:00.0", 0, (8, 6))
NODE_1 = Gpu(U1, 1, 1, "NVIDIA A10", 24576, "0000:0f:00.0", 1, (8, 6))
TWO = Inventory(1, (NODE_0, NODE_1))
THREE = Inventory(
    1, (NODE_0, NODE_1, Gpu(U2, 2, 2, "NVIDIA A10", 24576, "0000:1f:00.0", 1, (8, 6)))
)


def family_of(
    options: VolcanoGpushareOptions | None = None, inventory: Inventory = TWO
) -> VolcanoGpushareFamily:
    """A family with these options that has seen the cards."""
    family = VolcanoGpushareFamily(options or VolcanoGpushareOptions())
    family.resources(inventory)
    return family


def offer_of(options: VolcanoGpushareOptions | None = None, inventory: Inventory = TWO) -> Resource:
    """The one resource that it offers."""
    (resource,) = family_of(options).resources(inventory)
    return resource


def pod_of(
    *limits: int,
    annotations: dict[str, str] | None = None,
    resource: str = MEMORY,
    init: tuple[int, ...] = (),
) -> Pod:
    """A pod ``default/p`` with a container for each limit, ``c0`` and so on; 0 asks for nothing."""
    before = [
        PodContainer(f"i{number}", ContainerKind.INIT, {resource: limit})
        for number, limit in enumerate(init)
    ]
    mains = [
        PodContainer(f"c{number}", limits={resource: limit} if limit else {})
        for number, limit in enumerate(limits)
    ]
    return Pod(
        "uid-1",
        "default",
        "p",
        "node-a",
        annotations=annotations or {},
        containers=(*before, *mains),
    )


def ledger_of(resource: Resource, inventory: Inventory = TWO) -> Ledger:
    """A book in which the resource is offered and nothing is held."""
    ledger = Ledger()
    ledger.observe(inventory)
    ledger.offer([resource])
    return ledger


def question_of(
    pod: Pod,
    container: str = "c0",
    *,
    options: VolcanoGpushareOptions | None = None,
    inventory: Inventory = TWO,
    rooms: tuple[DeviceRoom, ...] | None = None,
    siblings: Mapping[str, tuple[Share, ...]] | None = None,
) -> Question:
    """Return `allocation`'s question about a container that has as many ids as its limit says."""
    resource = offer_of(options, inventory)
    found = pod.container(container)
    ids = tuple(
        f"id-{number}" for number in range(found.limits.get(resource.name, 0) if found else 0)
    )
    rooms = ledger_of(resource, inventory).rooms(resource.name) if rooms is None else rooms
    return Question(resource, pod, container, ids, "node-a", inventory, rooms, siblings or {})


def grant_of(
    *shares: Share, resource: str = MEMORY, number: int = 1, reserved_at: float = 1795200990.25
) -> Grant:
    """Return a container's grant; the time is in Unix seconds."""
    return Grant(number, "volcano-gpushare", resource, ("0-0",), shares, reserved_at=reserved_at)


def environment_of(
    question: Question, options: VolcanoGpushareOptions | None = None
) -> dict[str, str]:
    """The variables that the container gets, which are all that it gets."""
    family = family_of(options, question.inventory)
    provision = family.provision(question, family.decide(question).shares)
    assert provision == Provision(Edits(environment=provision.edits.environment))
    return dict(provision.edits.environment)


def view_of(
    options: VolcanoGpushareOptions | None = None,
    inventory: Inventory = TWO,
    *,
    node: Node | None = None,
    troubles: dict[str, str] | None = None,
    allocated_at: float | None = None,
) -> NodeView:
    """The node as the family is shown it, with what is wrong with cards and, in Unix seconds,
    the last Allocate.
    """
    resource = offer_of(options, inventory)
    rooms = ledger_of(resource, inventory).rooms(resource.name)
    rooms = tuple(
        msgspec.structs.replace(room, trouble=(troubles or {}).get(room.device, room.trouble))
        for room in rooms
    )
    allocated = {} if allocated_at is None else {resource.name: allocated_at}
    return NodeView(
        node or Node("node-a"), inventory, {resource.name: rooms}, allocated, now=1795201000.0
    )


def devices_of(question: Question) -> list[str]:
    """The cards that a container gets by number."""
    return [
        share.device for share in family_of(BY_NUMBER, question.inventory).decide(question).shares
    ]


def recalled(text: str) -> tuple[Share, ...] | None:
    """Return the shares of a container of 3000 MiB by its pod's annotation,
    read after a restart.
    """
    decision = family_of().recall(question_of(pod_of(3000, annotations={INDEX: text})))
    return decision.shares if decision else None
