"""The holder of an id for which the kubelet's checkpoint names several containers."""

from __future__ import annotations

import msgspec
import pytest

from tests.allocation.binding_parts import NUMBER, a_pod, init
from vgpu_agent.allocation.holdings import (
    ended_before,
    is_over,
    ruled_out,
    with_single_holders,
)
from vgpu_agent.model import Grant, Holding, KubeletRecords, Owner
from vgpu_agent.pods import ContainerKind, Pod, PodCache, PodContainer

OTHER = Holding("nvidia.com/gpu", ("g",), Owner("main", "uid-other", "default", "other"))


def line(pod: Pod, container: str, *ids: str) -> Holding:
    """A line of the checkpoint."""
    return Holding(NUMBER, ids, Owner(container, pod.uid))


def listed(pod: Pod, container: str, *ids: str) -> Holding:
    """Return a holding as pod-resources lists it, joined with the UID."""
    return Holding(NUMBER, ids, Owner(container, pod.uid, pod.namespace, pod.name))


def book(*pods: Pod) -> PodCache:
    """A book that has listed these pods."""
    known = PodCache()
    known.replace(pods)
    return known


def held(records: KubeletRecords, known: PodCache) -> dict[tuple[str, str], tuple[str, ...]]:
    """(UID, container) → ids, after they were separated."""
    found = with_single_holders(records, {NUMBER}, known)
    assert [holding for holding in found.holdings if holding.resource != NUMBER] == [OTHER]
    return {
        (holding.owner.pod_uid, holding.owner.container): holding.ids
        for holding in found.holdings
        if holding.resource == NUMBER
    }


def test_ids_are_for_the_container_that_comes_last() -> None:
    """An init container has what no later container has taken."""
    pod = a_pod("train", init("prepare", 2), "main")
    entries = (line(pod, "prepare", "a", "b"), line(pod, "main", "a"))
    records = KubeletRecords((OTHER, listed(pod, "main", "a")), entries=entries)
    assert held(records, book(pod)) == {(pod.uid, "main"): ("a",), (pod.uid, "prepare"): ("b",)}


def test_a_pod_held_by_an_init_container_alone_is_alive_while_the_api_server_says_so() -> None:
    """pod-resources shows nothing of it."""
    pod = a_pod("train", init("prepare"), PodContainer("main"))
    records = KubeletRecords((OTHER,), entries=(line(pod, "prepare", "a"),))
    assert held(records, book(pod)) == {(pod.uid, "prepare"): ("a",)}
    assert held(records, book(msgspec.structs.replace(pod, phase="Succeeded"))) == {}
    assert held(records, book()) == {}


@pytest.mark.parametrize(
    ("complete", "expected"), [(True, {}), (False, {("uid-train", "main"): ("a",)})]
)
def test_an_unseen_pod_counts_only_where_nobody_could_speak_for_it(
    *, complete: bool, expected: dict[tuple[str, str], tuple[str, ...]]
) -> None:
    """Before the first list, and without pod-resources, an entry may be a live pod's;
    otherwise it is what an ended one left.
    """
    records = KubeletRecords(
        (OTHER,), complete=complete, entries=(line(a_pod("train"), "main", "a"),)
    )
    assert held(records, PodCache()) == expected


API_UID = "0d3e3f1c-8f0a-4f6e-9a53-5a1f8a3f9b01"


@pytest.mark.parametrize(
    ("uid", "is_held"), [(API_UID, False), ("9c8a2b4e0f1d4c7a8e6b5d3f2a1c0b9d", True)]
)
def test_the_checkpoint_alone_brings_back_no_pod_that_is_gone(uid: str, *, is_held: bool) -> None:
    """The file keeps the lines of ended pods until the kubelet writes it again, and pod-resources
    does not answer. A static pod may run without a mirror.
    """
    gone = msgspec.structs.replace(a_pod("gone"), uid=uid)
    entries = (line(gone, "main", "a"),)
    records = KubeletRecords((OTHER, *entries), complete=False, entries=entries)
    assert held(records, book()) == ({(uid, "main"): ("a",)} if is_held else {})
    assert held(records, PodCache()) == {(uid, "main"): ("a",)}
    ended = book(msgspec.structs.replace(gone, phase="Succeeded"))
    assert held(records, ended) == {}


def test_the_checkpoint_alone_brings_back_no_pod_whose_ids_name_devices() -> None:
    """The same line in a family whose ids name devices: another container may have the GPU whole
    by now.
    """
    line_of_gone = Holding("nvidia.com/gpu", ("g",), Owner("main", API_UID))
    records = KubeletRecords((line_of_gone,), complete=False, entries=(line_of_gone,))
    assert with_single_holders(records, {NUMBER}, book()).holdings == ()
    complete = msgspec.structs.replace(records, complete=True)
    assert with_single_holders(complete, {NUMBER}, book()).holdings == (line_of_gone,)


def test_the_smaller_entry_of_an_unknown_pod_is_the_later_one() -> None:
    """Without the pod the init container is unknown.
    One that asks for more is likelier to be it.
    """
    pod = a_pod("train")
    entries = (line(pod, "a-large", "a", "b"), line(pod, "small", "a"))
    assert held(KubeletRecords((OTHER,), complete=False, entries=entries), PodCache()) == {
        (pod.uid, "small"): ("a",),
        (pod.uid, "a-large"): ("b",),
    }


def test_without_a_checkpoint_the_records_stay_as_they_are() -> None:
    """There is nothing to sort out."""
    pod = a_pod("train")
    records = KubeletRecords((OTHER, listed(pod, "main", "a")))
    assert with_single_holders(records, {NUMBER}, book(pod)) is records


def test_an_init_container_is_over_once_a_later_one_has_started() -> None:
    """Sidecars and main containers are never over before their pod is."""
    pod = a_pod("train", init("first"), init("second"), "main")
    assert [is_over(pod, name) for name in ("first", "second", "main", "unknown")] == [False] * 4
    containers = (*pod.containers[:2], msgspec.structs.replace(pod.containers[2], started=True))
    started = msgspec.structs.replace(pod, containers=containers)
    assert [is_over(started, name) for name in ("first", "second", "main")] == [True, True, False]


ALL_KINDS = a_pod(
    "train",
    init("first"),
    PodContainer("side", ContainerKind.SIDECAR, {NUMBER: 1}),
    init("second"),
    "main",
    "other",
)


def ended_when(starting: str, *, uid: str = "uid-train", unknown: str = "") -> list[str]:
    """Return the containers whose shares are free when this one of `ALL_KINDS` starts and all
    of the pod ``uid`` have some.
    """
    names = [
        *(container.name for container in ALL_KINDS.containers),
        *([unknown] if unknown else []),
    ]
    grants = [
        Grant(number, "number", NUMBER, (name,), (), decided_for=(uid, name))
        for number, name in enumerate(names)
    ]
    undecided = Grant(len(names), "number", NUMBER, ("undecided",), ())
    return [
        names[number]
        for number in ended_before((*grants, undecided), ALL_KINDS, Owner(starting, ALL_KINDS.uid))
    ]


@pytest.mark.parametrize(
    ("starting", "ended"),
    [
        ("main", ["first", "second"]),
        ("other", ["first", "second"]),
        ("side", ["first"]),
        ("second", ["first", "main", "other"]),
        ("first", ["second", "main", "other"]),
    ],
)
def test_what_cannot_run_beside_a_starting_container_has_ended(
    starting: str, ended: list[str]
) -> None:
    """Init containers before it; and all but sidecars when it is an init container,
    for then the sandbox was made anew.
    """
    assert ended_when(starting) == ended


def test_other_pods_are_not_ended_by_a_start() -> None:
    """Their containers may have the same names."""
    assert ended_when("main", uid="uid-serve") == []


def test_a_container_that_the_pod_does_not_name_is_taken_for_one_that_stays() -> None:
    """An ephemeral container, or one that a later version of Kubernetes allows to be added:
    nothing says that it has ended.
    """
    assert ended_when("first", unknown="added") == ["second", "main", "other"]


def test_a_container_that_its_pod_does_not_have_rules_nothing_out() -> None:
    """A mirror pod may differ from its static pod. A loop over all grants must not end with it."""
    assert ruled_out(ALL_KINDS, "unknown") == ()


def test_a_holding_without_a_uid_is_of_the_pod_that_has_its_ids() -> None:
    """Two pods have the ids in containers of one name, so the kubelet's records name no UID."""
    train, serve = a_pod("train"), a_pod("serve")
    nameless = Holding(NUMBER, ("a",), Owner("main", "", train.namespace, train.name))
    records = KubeletRecords(
        (OTHER, nameless), entries=(line(serve, "main", "a"), line(train, "main", "a"))
    )
    found = with_single_holders(
        records, {NUMBER}, book(train, serve), (), {(train.uid, "main", NUMBER)}
    )
    assert Holding(NUMBER, ("a",), Owner("main", train.uid, train.namespace, train.name)) in (
        found.holdings
    )


def test_a_holding_without_a_uid_is_not_of_a_namesake_with_other_ids() -> None:
    """A pod that was deleted by force still has its ids; its successor has others."""
    new, other = a_pod("web-0", uid="new"), a_pod("train")
    nameless = Holding(NUMBER, ("a",), Owner("main", "", new.namespace, new.name))
    records = KubeletRecords(
        (OTHER, nameless),
        entries=(
            Holding(NUMBER, ("a",), Owner("main", "old")),
            line(other, "main", "a"),
            line(new, "main", "b"),
        ),
    )
    found = with_single_holders(records, {NUMBER}, book(new, other))
    assert nameless in found.holdings
