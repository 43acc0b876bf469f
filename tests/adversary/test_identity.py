"""Attacks on identity: pods that say they are another pod, or a static one,
and what they want from that.

A tenant that may create pods may write any annotation, any ownerReference and ``spec.nodeName``. It
cannot choose a UID, and it cannot write a pod's status. kubelet never runs a pod of the API server
that has the annotation of mirror pods.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.allocation.binding_parts import IDS, NUMBER, Place, a_pod, init, wants
from tests.golden import U0, U1
from vgpu_agent.allocation.carrier import grant_token
from vgpu_agent.allocation.identification import NotProvenError
from vgpu_agent.model import Holding, KubeletRecords, Owner, Share
from vgpu_agent.pods import MIRROR_POD, STATIC_POD_HASH, Pod, PodCache

VICTIM = "5b2f1c5e-8f5f-4f64-9d3b-0d5f5a3c9b11"
STATIC = "9f86d081884c7d659a2feaa0c55ad015"


def imitation(name: str, of: str, *, uid: str = "", **annotations: str) -> Pod:
    """A pod that a tenant made and that says it is the mirror of the pod
    that kubelet knows as ``of``.
    """
    claims = {MIRROR_POD: of, STATIC_POD_HASH: of, **annotations}
    return a_pod(
        name, uid=uid, annotations={**wants(main=f"{U1} 39000", prepare=f"{U1} 39000"), **claims}
    )


def given(place: Place, ids: tuple[str, ...]) -> dict[str, str]:
    """The environment in the spec of these ids."""
    return dict(place.carrier.specs[grant_token(NUMBER, ids)][1].edits.environment)


@pytest.mark.parametrize("imitator_first", [True, False])
async def test_a_tenant_cannot_choose_the_limits_of_another_pods_init_container(
    imitator_first: bool,
) -> None:
    """pod-resources does not list plain init containers,
    so only the UID identifies the owner of these ids.
    """
    place = Place()
    victim = a_pod(
        "victim",
        init("prepare"),
        "main",
        uid=VICTIM,
        annotations=wants(prepare=f"{U0} 1000", main=f"{U0} 1000"),
    )
    liar = msgspec.structs.replace(imitation("liar", VICTIM), containers=victim.containers)
    for pod in (liar, victim) if imitator_first else (victim, liar):
        place.book.put(pod)
    await place.admit(victim, "prepare", IDS[:1], listed=False)
    await place.start(IDS[:1])
    assert given(place, IDS[:1]) == {"GPU": U0, "MIB": "1000"}


async def test_a_tenant_cannot_raise_its_limits_by_a_pod_that_is_never_scheduled() -> None:
    """The scheduler decided for one pod. The other is written with what its owner would like
    to have.
    """
    place = Place()
    own = a_pod("own", init("main"), uid=VICTIM, annotations=wants(main=f"{U0} 1000"))
    place.book.replace([own, imitation("wish", VICTIM)])
    await place.admit(own, "main", IDS[:1], listed=False)
    await place.start(IDS[:1])
    assert given(place, IDS[:1])["MIB"] == "1000"


async def test_a_tenant_cannot_take_over_another_pods_record() -> None:
    """Questions about the victim's UID find the victim:
    releases, refusals, annotations and files go by it.
    """
    place = Place()
    victim = a_pod("victim", uid=VICTIM, annotations=wants(main=f"{U0} 1000"))
    place.book.replace([victim])
    await place.admit(victim, "main", IDS[:1])
    await place.start(IDS[:1])
    liar = msgspec.structs.replace(imitation("liar", VICTIM), phase="Succeeded")
    place.book.put(liar)
    assert place.book.get(VICTIM) == msgspec.structs.replace(victim, bound=1)
    assert [(pod.name, pod.kubelet_uid) for pod in place.book.pods] == [
        ("victim", VICTIM),
        ("liar", "uid-liar"),
    ]
    place.allocator.confirm(KubeletRecords((), entries=()), reservation_seconds=60)
    place.book.remove(liar)
    assert place.book.get(VICTIM) is not None
    assert place.allocator.desired_pods().keys() == {VICTIM}


async def test_a_tenants_pod_that_ends_cannot_free_what_another_pod_holds() -> None:
    """A full node makes room by releasing pods that have ended.
    A liar that says it is the victim has ended at once.
    """
    place = Place()
    victim = a_pod("victim", uid=VICTIM, annotations=wants(main=f"{U0} 40000"))
    place.book.replace([victim])
    await place.admit(victim, "main", IDS[:1])
    await place.start(IDS[:1])
    place.book.put(msgspec.structs.replace(imitation("liar", VICTIM), phase="Failed"))
    place.pod_resources = []  # the kubelet has just come back, and lists no pod yet
    greedy = a_pod("greedy", annotations=wants(main=f"{U0} 40000"))
    place.book.put(greedy)
    await place.admit(greedy, "main", IDS[1:2])
    with pytest.raises(Exception, match="default/greedy"):
        await place.start(IDS[1:2])
    assert {
        grant.owner.pod_uid: grant.shares
        for grant in place.ledger.grants
        if grant.owner and grant.shares
    } == {VICTIM: (Share(U0, 40000),)}


async def test_a_tenant_cannot_pose_as_a_static_pod_that_runs() -> None:
    """The hash of a static pod can be read from its mirror.
    The kubelet writes the status of the one mirror that is its own.
    """
    place = Place()
    claims = {MIRROR_POD: STATIC, STATIC_POD_HASH: STATIC}
    annotations = {**wants(prepare=f"{U0} 1000", main=f"{U0} 1"), **claims}
    mirror = msgspec.structs.replace(
        a_pod("static", init("prepare"), "main", uid="mirror", annotations=annotations),
        reported=True,
    )
    place.book.replace([mirror])
    place.book.put(msgspec.structs.replace(imitation("liar", STATIC), containers=mirror.containers))
    (known,) = [pod for pod in place.book.pods if pod.kubelet_uid == STATIC]
    assert known.name == "static"
    await place.admit(known, "prepare", IDS[:1], listed=False)
    await place.start(IDS[:1])
    assert given(place, IDS[:1]) == {"GPU": U0, "MIB": "1000"}


@pytest.mark.looptime
async def test_a_tenant_cannot_pose_as_a_static_pod_that_has_no_mirror_yet() -> None:
    """The kubelet makes the mirror after it has begun.
    Until then a liar would be the only one with that hash.
    """
    place = Place()
    place.book.replace(
        [msgspec.structs.replace(imitation("liar", STATIC), containers=(init("prepare"),))]
    )
    assert place.checkpoint is not None
    await place.allocator.allocate(NUMBER, IDS[:1])
    place.checkpoint.append(Holding(NUMBER, IDS[:1], Owner("prepare", STATIC)))
    with pytest.raises(NotProvenError, match="the kubelet will retry"):
        await place.start(IDS[:1])
    assert place.carrier.specs == {}


@pytest.mark.looptime
async def test_a_static_pod_is_served_before_kubelet_has_written_its_mirrors_status() -> None:
    """The name in pod-resources is the kubelet's own record, too, and no other pod can have it."""
    place = Place()
    claims = {MIRROR_POD: STATIC, STATIC_POD_HASH: STATIC}
    mirror = a_pod("static", uid="mirror", annotations={**wants(main=f"{U0} 1000"), **claims})
    place.book.replace([imitation("liar", STATIC), mirror])
    assert place.checkpoint is not None
    assert place.pod_resources is not None
    await place.allocator.allocate(NUMBER, IDS[:1])
    place.checkpoint.append(Holding(NUMBER, IDS[:1], Owner("main", STATIC)))
    place.pod_resources.append(
        Holding(NUMBER, IDS[:1], Owner("main", namespace="default", pod="static"))
    )
    await place.start(IDS[:1])
    assert given(place, IDS[:1]) == {"GPU": U0, "MIB": "1000"}
    (grant,) = place.ledger.grants
    assert grant.decided_for == (STATIC, "main")


def test_no_hash_that_a_tenant_writes_becomes_a_uid() -> None:
    """Directories are named by kubelet's UID.
    A text with a slash in it would lead out of the folder they lie in.
    """
    book = PodCache()
    for place, text in enumerate(
        ("../../../../etc", "a/b", "..", ".", "", "x" * 300, "a\0b", "a\n", "ü", "a_b")
    ):
        book.put(msgspec.structs.replace(imitation(f"liar-{place}", text), reported=True))
    assert all(pod.kubelet_uid == pod.uid for pod in book.pods)


async def test_a_predecessor_of_the_same_name_keeps_its_share_to_itself() -> None:
    """A pod that is deleted by force and made again at once:
    kubelet may still start the first, and the names are the same.
    """
    place = Place()
    old = a_pod(
        "web", uid="11111111-1111-4111-8111-111111111111", annotations=wants(main=f"{U0} 1000")
    )
    new = a_pod(
        "web", uid="22222222-2222-4222-8222-222222222222", annotations=wants(main=f"{U1} 39000")
    )
    place.book.replace([old])
    await place.admit(old, "main", IDS[:1])
    place.book.remove(old)
    place.book.put(new)
    place.on_server["default", "web"] = new
    with pytest.raises(NotProvenError, match="replaced"):
        await place.start(IDS[:1])
    assert place.carrier.specs == {}
