"""The ids that kubelet is advised to give where the pod decides: those of the named GPUs.

A family wants it by offering a resource with ``offers_preference``; the others are not asked at
all.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.allocation.binding_parts import (
    IDS,
    NODE,
    NUMBER,
    NumberFamily,
    Place,
    a_pod,
    init,
    wants,
)
from tests.allocation.later_parts import confirm
from tests.families.slot.family import GPU, SlotFamily
from tests.families.slot.ids import Packed
from tests.families.slot.settings import RESOURCE
from tests.golden import U0, U1
from vgpu_agent.model import Inventory, Resource
from vgpu_agent.pods import Pod, PodContainer

BOTH = f"{U1} 10,{U0} 10"


class AskedFamily(NumberFamily):
    """The family, which wants to be asked."""

    def resources(self, inventory: Inventory) -> tuple[Resource, ...]:
        return tuple(
            msgspec.structs.replace(resource, offers_preference=resource.name == NUMBER)
            for resource in super().resources(inventory)
        )


@pytest.fixture(params=[True, False], ids=["late", "early"])
def place(request: pytest.FixtureRequest) -> Place:
    """A node whose kubelet asks, in both modes."""
    return Place(family=AskedFamily(), late=request.param)


def bound(place: Place, *pods: Pod) -> None:
    """Let schedulers bind these pods, one after the other."""
    for pod in pods:
        place.book.put(pod)


def preferred(place: Place, size: int = 1, must: tuple[str, ...] = ()) -> list[str]:
    """Ask as the kubelet does, which knows what is free."""
    held = {id_ for grant in place.ledger.grants for id_ in grant.ids}
    free = [id_ for id_ in IDS if id_ not in held or id_ in must]
    return place.allocator.preferred(NUMBER, free, must, size)


def test_the_named_gpus_are_preferred(place: Place) -> None:
    """One id of each, whatever order the annotation has."""
    bound(place, a_pod("one", annotations=wants(main=BOTH), number=2))
    assert preferred(place, 2) == [f"{U0}-0", f"{U1}-0"]
    assert preferred(place, 2, (f"{U1}-7",)) == [f"{U1}-7", f"{U0}-0"]


@pytest.mark.parametrize(
    "pods",
    [
        (),
        (a_pod("unnamed"),),
        (a_pod("three", annotations=wants(main=f"{U1} 10"), number=3),),
        (a_pod("runs", annotations=wants(main=f"{U1} 10"), phase="Running"),),
        (a_pod("init", init("first"), annotations=wants(main=f"{U1} 10")),),
    ],
)
def test_without_a_named_gpu_the_first_ids_are_as_good_as_any(
    place: Place, pods: tuple[Pod, ...]
) -> None:
    """An error would fail the pod."""
    bound(place, *pods)
    assert preferred(place) == [IDS[0]]
    assert preferred(place, 2, (IDS[3],)) == [IDS[3], IDS[0]]


def test_a_gpu_without_ids_left_is_not_insisted_on(place: Place) -> None:
    """The decision is made at the start, and does not need the id."""
    bound(place, a_pod("one", annotations=wants(main=f"{U1} 10")))
    assert place.allocator.preferred(NUMBER, [f"{U0}-4", f"{U0}-5"], [], 1) == [f"{U0}-4"]


async def test_pods_of_a_storm_are_asked_for_in_the_order_of_their_binding(place: Place) -> None:
    """Before the kubelet's records name the first one, it has got its ids already."""
    pods = [
        a_pod(name, annotations=wants(main=f"{gpu} 10"))
        for name, gpu in (("a", U1), ("b", U0), ("c", U1), ("d", U1))
    ]
    bound(place, *pods)
    given = []
    for number, pod in enumerate(pods):
        (id_,) = preferred(place)
        given.append(id_)
        await place.admit(pod, "main", [id_])
        if number == 1:
            confirm(place)
    assert given == [f"{U1}-0", f"{U0}-0", f"{U1}-1", f"{U1}-2"]


async def test_containers_of_a_pod_are_asked_for_one_after_the_other(place: Place) -> None:
    """Also with other sizes."""
    second = PodContainer("second", limits={NUMBER: 2})
    pod = a_pod("one", "main", second, annotations=wants(main=f"{U1} 10", second=BOTH))
    bound(place, pod)
    first = preferred(place)
    assert first == [f"{U1}-0"]
    await place.admit(pod, "main", first)
    confirm(place)
    assert preferred(place, 2) == [f"{U0}-0", f"{U1}-1"]


def test_a_family_with_numbered_ids_of_its_own_form_is_served() -> None:
    """The toy family, with ten thousand ids a GPU."""
    place = Place(family=SlotFamily(10_000), resource=RESOURCE)
    container = PodContainer("main", limits={RESOURCE: 1})
    place.book.put(
        Pod("uid", "default", "one", NODE, "Pending", {GPU: U1}, (container,), scheduled=True)
    )
    free = [Packed(gpu).text(number) for gpu in (0, 1) for number in range(7, 10_000)]
    assert place.allocator.preferred(RESOURCE, free, [], 1) == [Packed(1).text(7)]
