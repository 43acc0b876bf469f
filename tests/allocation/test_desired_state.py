"""A family is asked once for a pod's desired state,
and again when something about that pod has changed.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tests.allocation.binding_parts import (
    IDS,
    MEMORY,
    NODE,
    NUMBER,
    NumberFamily,
    Place,
    a_pod,
    wants,
)
from tests.golden import U0, U1
from vgpu_agent.allocation.context import Families
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.families.family import NodeView
from vgpu_agent.model import Grant, Resource
from vgpu_agent.nodes import DesiredNode, Node
from vgpu_agent.pods import DesiredPod, Pod

TRAIN, SERVE = (
    a_pod(name, annotations=wants(main=f"{gpu} 100"))
    for name, gpu in (("train", U0), ("serve", U1))
)


class AskedFamily(NumberFamily):
    """Remembers which pods it was asked about."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def desired_pod(self, pod: Pod, grants: Mapping[str, Grant], *, failed: bool) -> DesiredPod:
        self.asked.append(pod.name)
        return super().desired_pod(pod, grants, failed=failed)

    @property
    def news(self) -> list[str]:
        """Return the pods it was asked about since the last call."""
        asked, self.asked = sorted(self.asked), []
        return asked


async def two_started() -> tuple[Place, AskedFamily]:
    """Two running pods, whose desired state was read once."""
    place, family = Place(), AskedFamily()
    place.allocator.use_families(Families(pod_families=(family,)))
    place.book.replace([TRAIN, SERVE])
    for pod, ids in ((TRAIN, IDS[:1]), (SERVE, IDS[1:2])):
        await place.admit(pod, "main", ids)
        await place.start(ids)
    assert place.allocator.desired_pods().keys() == {"uid-train", "uid-serve"}
    assert family.news == ["serve", "train"]
    return place, family


async def test_the_desired_state_is_remembered_while_nothing_changes() -> None:
    """A hundred pods, and a publisher that looks after each change of one of them."""
    place, family = await two_started()
    first = place.allocator.desired_pods()
    assert (
        place.allocator.desired_pods()
        == first
        == {uid: DesiredPod({"example.com/done": "main"}) for uid in ("uid-train", "uid-serve")}
    )
    assert family.news == []


async def test_only_the_pod_that_changed_is_asked_about() -> None:
    """The watch shows its next state. The other pod's desired state stays."""
    place, family = await two_started()
    place.book.put(msgspec.structs.replace(TRAIN, phase="Running"))
    assert place.allocator.desired_pods().keys() == {"uid-train", "uid-serve"}
    assert family.news == ["train"]


async def test_a_refusal_for_good_is_a_change() -> None:
    """A scheduler has to learn that the pod will never start,
    although pod and grant are what they were.
    """
    place, family = await two_started()
    place.refusals.refuse(
        SERVE, "main", "example.com/number", "the answer is another pod's", final=True
    )
    place.allocator.desired_pods()
    assert family.news == ["serve"]


async def test_a_new_grant_is_a_change() -> None:
    """A pod's grants decide its desired state."""
    place, family = await two_started()
    (number,) = (
        grant.number for grant in place.ledger.grants if grant.decided_for == ("uid-train", "main")
    )
    place.ledger.release(number)
    await place.start(IDS[:1])
    assert place.allocator.desired_pods()["uid-train"] == DesiredPod({"example.com/done": "main"})
    assert family.news == ["train"]


async def test_other_families_are_asked_anew_about_everybody() -> None:
    """Changed settings may word the same grant in another way."""
    place, family = await two_started()
    other = AskedFamily()
    place.allocator.use_families(Families(pod_families=(other,)))
    place.allocator.desired_pods()
    assert (family.news, other.news) == ([], ["serve", "train"])


async def test_a_pod_that_is_gone_has_no_desired_state() -> None:
    """Its grant stays until kubelet has forgotten it.
    The other pod is not asked about again for that.
    """
    place, family = await two_started()
    place.book.remove(TRAIN)
    assert place.allocator.desired_pods().keys() == {"uid-serve"}
    assert family.news == []


class Counted(NumberFamily):
    """Remembers which resources it was told that the node offers."""

    offered: frozenset[str] = frozenset()

    def desired_node(self, view: NodeView) -> DesiredNode:
        self.offered = view.offered
        return DesiredNode()


def test_a_family_knows_the_resources_of_all_families() -> None:
    """It may take a resource off the Node that nobody offers, and none of another family's."""
    family = Counted()
    place = Place(family=family)
    place.ledger.offer(
        [*place.ledger.resources, Resource("example.org/other", "other", (DeviceId("a", U0),))]
    )
    place.allocator.desired_node(Node(NODE), 0.0)
    assert family.offered == {NUMBER, MEMORY, "example.org/other"}
