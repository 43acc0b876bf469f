"""The question to a family about one container: the shares of all others."""

from __future__ import annotations

from tests.allocation.binding_parts import IDS, NUMBER, NumberFamily
from tests.allocation.without_pods import without_pods
from tests.golden import U0, U1, golden_inventory
from vgpu_agent.allocation.questions import question
from vgpu_agent.families.family import Question
from vgpu_agent.journal import Journal
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Grant, Owner, Share
from vgpu_agent.pods import ContainerKind, Pod, PodContainer

POD = Pod(
    "uid-p",
    "ns",
    "p",
    containers=(
        PodContainer("setup", kind=ContainerKind.INIT),
        PodContainer("a"),
        PodContainer("b"),
    ),
)


def _node(*held: tuple[str, str, int, Share]) -> tuple[Ledger, list[Grant]]:
    """A ledger, and the grants of ``held``: UID, container, place among the ids, share."""
    ledger = Ledger()
    ledger.observe(golden_inventory())
    ledger.offer(NumberFamily().resources(golden_inventory()))
    return ledger, [
        ledger.decide(NUMBER, [IDS[place]], [share], Owner(container, uid))
        for uid, container, place, share in held
    ]


def _ask(ledger: Ledger, container: str, place: int) -> Question:
    context = without_pods(ledger=ledger, inventory=golden_inventory, journal=Journal())
    return question(context, ledger.resource(NUMBER), POD, container, [IDS[place]])


def _used(asked: Question) -> dict[str, int]:
    return {room.device: room.memory_mib - room.memory_free_mib for room in asked.rooms}


def test_what_the_container_has_is_not_counted_against_it() -> None:
    """The question has the shares of its pod's other container,
    and the room that another pod takes.
    """
    ledger, (_, other, stranger) = _node(
        ("uid-p", "a", 0, Share(U0, 1000)),
        ("uid-p", "b", 1, Share(U1, 200)),
        ("uid-q", "b", 2, Share(U1, 30)),
    )
    asked = _ask(ledger, "a", 0)
    assert (asked.siblings, asked.taken) == ({"b": other.shares}, {U1: stranger})
    assert _used(asked) == {U0: 0, U1: 230}
    assert _used(_ask(ledger, "a", 5)) == {U0: 0, U1: 230}  # also with other ids than before


def test_whoever_had_these_ids_before_is_not_counted() -> None:
    """The kubelet has given them to this container, so that one is gone."""
    ledger, _ = _node(("uid-q", "main", 0, Share(U0, 1000)))
    asked = _ask(ledger, "a", 0)
    assert (_used(asked)[U0], asked.taken, asked.siblings) == (0, {}, {})


def test_an_init_container_that_has_ended_is_not_in_the_way() -> None:
    """It counts in the sums until its ids are taken over,
    and the GPU is attributed to no container.
    """
    ledger, (setup,) = _node(("uid-p", "setup", 0, Share(U0, 1000)))
    asked = _ask(ledger, "a", 1)
    assert (asked.taken, asked.siblings) == ({}, {"setup": setup.shares})
    assert _used(asked)[U0] == 1000


def test_a_question_has_the_nodes_annotations_of_now() -> None:
    """Operators set defaults for the pods of a node there (vgpu-manager §3), and may change them at
    any time.
    """
    ledger, _ = _node()
    annotations: dict[str, str] = {}
    context = without_pods(
        ledger=ledger,
        inventory=golden_inventory,
        journal=Journal(),
        node_annotations=lambda: annotations,
    )
    resource = ledger.resource(NUMBER)
    assert question(context, resource, POD, "a", [IDS[0]]).node_annotations == {}
    annotations = {"example.com/policy": "balance"}
    assert question(context, resource, POD, "a", [IDS[0]]).node_annotations == annotations
    assert _ask(ledger, "a", 0).node_annotations == {}  # where nobody reads the Node
