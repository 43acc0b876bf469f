"""Attacks through the annotations of a scheduler,
which every user with the right to create pods can write.

A scheduler may overcommit compute and places of a GPU, so a pod that passes for one would take its
neighbours'. What the agent cannot tell apart is a pod that names Volcano's scheduler and is bound
by its author (``spec.nodeName``); the harm of that is bounded here: never memory, never more than
kubelet has counted for the node, never a neighbour's share, restart or start.
"""

from __future__ import annotations

import contextlib
import re

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.allocation.binding_parts import NODE, Place
from tests.allocation.later_parts import confirm, running
from tests.allocation.volcano_place import IDS, SLOTS, VolcanoPlace, scheduled, unscheduled
from tests.families.volcano_vgpu.golden import NUMBER
from tests.families.volcano_vgpu.golden import main as container
from tests.golden import U0, U1
from tests.torture import virtual_time
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.errors import (
    AgentError,
    CapacityError,
    OvercommitError,
    RequestRefusedError,
    UnhealthyDeviceError,
)
from vgpu_agent.families.volcano_gpushare.family import (
    VolcanoGpushareFamily,
    VolcanoGpushareOptions,
)
from vgpu_agent.model import Resource, Share
from vgpu_agent.pods import ContainerKind, Pod, PodContainer

UNITS = 40
FORGED = "volcano.sh/vgpu-ids-new"
KEYS = (
    FORGED,
    "volcano.sh/vgpu-node",
    "volcano.sh/devices-to-allocate",
    "volcano.sh/bind-phase",
    "volcano.sh/bind-time",
    "volcano.sh/vgpu-time",
    "volcano.sh/predicate-time",
)


def left(place: Place, gpu: str = U0) -> tuple[int, int, int]:
    """MiB, percent and slots that the book has left of ``gpu``."""
    room = next(room for room in place.ledger.rooms(NUMBER) if room.device == gpu)
    return room.memory_free_mib, room.cores_free_percent, room.holders_free


@pytest.mark.parametrize("scheduler", ["default-scheduler", ""])
async def test_a_tenant_cannot_take_compute_beyond_the_card_with_annotations_of_his_own(
    scheduler: str,
) -> None:
    """Under the plain scheduler only the author writes them.
    The neighbour keeps the compute that it was promised.
    """
    place = VolcanoPlace()
    await place.started(scheduled("neighbour", (U0, 4, 60)))
    with pytest.raises(OvercommitError, match="schedulerName is default-scheduler"):
        await place.started(scheduled("attacker", (U0, 4, 60), scheduler=scheduler))
    assert place.ledger.overcommitted == ()
    assert left(place) == ((UNITS - 4) * 1024, 40, SLOTS - 1)


async def test_a_tenant_cannot_take_places_beyond_the_card_with_annotations_of_his_own() -> None:
    """The slots of a card are the operator's word on how many share it."""
    place = VolcanoPlace()
    for number in range(SLOTS):
        await place.started(scheduled(f"neighbour-{number}", (U0, 1, 0)))
    with pytest.raises(OvercommitError, match=r"4 places booked \+ 1 wanted, of 4"):
        await place.started(scheduled("attacker", (U0, 1, 0), scheduler="default-scheduler"))
    assert place.ledger.overcommitted == ()


@pytest.mark.parametrize("scheduler", ["volcano", "default-scheduler", "no-such-scheduler"])
async def test_no_tenant_gets_memory_beyond_the_card_whatever_he_writes(scheduler: str) -> None:
    """Memory that is not there fails the neighbour's allocation,
    so no scheduler's word counts for it.
    """
    place = VolcanoPlace()
    await place.started(scheduled("neighbour", (U0, UNITS - 1, 10)))
    with pytest.raises(CapacityError, match=r"39936 MiB booked \+ 2048 wanted, of 40960"):
        await place.started(scheduled("attacker", (U0, 2, 10), scheduler=scheduler))
    assert left(place)[0] == 1024


@pytest.mark.parametrize(("units", "cores"), [(40, 10), (4, 100), (4, -1), (0, 10), (-4, 10)])
async def test_a_tenant_cannot_write_himself_more_than_his_limits(units: int, cores: int) -> None:
    """Quotas count the limits of a pod. An annotation that gives more, or no limit at all,
    would go round them.
    """
    place, text = VolcanoPlace(), f"{U0},NVIDIA,{units},{cores}:"
    pod = scheduled(
        "attacker", (U0, 4, 10), more={FORGED: text, "volcano.sh/devices-to-allocate": text}
    )
    with pytest.raises(RequestRefusedError):
        await place.started(pod)
    assert left(place) == (UNITS * 1024, 100, SLOTS)


async def test_a_tenant_cannot_share_a_gpu_that_another_has_for_himself() -> None:
    """A whole card, a MIG instance, or a card of another family stays its holder's,
    overcommitted or not.
    """
    place = VolcanoPlace()
    nvidia = Resource("nvidia.com/gpu", "nvidia", (DeviceId(U0, U0),))
    place.ledger.offer([*place.ledger.resources, nvidia])
    place.ledger.reserve("nvidia.com/gpu", [U0], [Share(U0, 40960, exclusive=True)])
    with pytest.raises(UnhealthyDeviceError, match="the GPU serves nvidia"):
        await place.started(scheduled("attacker", (U0, 1, 0)))


async def test_a_tenant_cannot_pin_a_gpu_by_a_pod_that_never_starts() -> None:
    """Annotations book nothing, admitted ids book nothing of a GPU,
    and neither does a start that was refused.
    """
    place = VolcanoPlace()
    place.book.put(scheduled("never-admitted", (U0, UNITS, 100)))
    await place.admitted(scheduled("never-started", (U0, UNITS, 100)))
    with pytest.raises(RequestRefusedError):
        await place.started(scheduled("refused", (U0, UNITS, 100), node="node-elsewhere"))
    assert left(place) == (UNITS * 1024, 100, SLOTS)
    await place.started(unscheduled("neighbour", (UNITS, 100)))


async def test_a_tenant_cannot_use_the_decision_for_another_node() -> None:
    """Annotations copied from a pod that a scheduler has placed elsewhere are no decision here."""
    place = VolcanoPlace()
    with pytest.raises(RequestRefusedError, match="decided for a node other than"):
        await place.started(scheduled("attacker", (U0, 4, 60), node="node-b"))


async def test_a_tenant_who_changes_his_annotations_later_keeps_what_he_had() -> None:
    """Otherwise a crash would be a way to another card, or to more of one."""
    place = VolcanoPlace()
    pod = scheduled("attacker", (U0, 4, 30))
    await place.started(pod)
    text = f"{U1},NVIDIA,4,100:"
    place.book.put(
        msgspec.structs.replace(
            pod,
            annotations={**pod.annotations, FORGED: text, "volcano.sh/devices-to-allocate": text},
        )
    )
    await place.start(place.ids["uid-attacker", "c0"])
    assert [grant.shares for grant in place.ledger.grants] == [(Share(U0, 4096, 30),)]


async def test_a_tenants_init_container_does_not_multiply_his_share() -> None:
    """It works on what was decided for the containers after it, and no more;
    beyond the card it is nothing of its own.
    """
    place = VolcanoPlace()
    pod = scheduled("attacker", (U0, 4, 30))
    pod = msgspec.structs.replace(
        pod,
        containers=(
            container("warm", ContainerKind.INIT, number=1, memory=UNITS, cores=100),
            *pod.containers,
        ),
    )
    place.book.put(pod)
    await place.admit(pod, "warm", IDS[:1], listed=False)
    await place.admit(pod, "c0", IDS[:1])
    await place.start(IDS[:1])
    assert left(place) == ((UNITS - 4) * 1024, 70, SLOTS - 1)


async def test_a_forger_who_passes_for_a_scheduler_takes_nothing_from_his_neighbours() -> None:
    """The tenant names Volcano's scheduler and binds its own pods,
    which looks like a scheduler's binding.

    It gets turns on a card that is full of promises, as many as kubelet has ids; the operator sees
    it, and the neighbours keep memory, limits and restarts, also under a new agent.
    """
    place = VolcanoPlace()
    neighbours = [scheduled("scheduled", (U0, 10, 50)), unscheduled("placed", (10, 50))]
    for neighbour in neighbours:
        await place.started(neighbour)
        place.book.put(running(neighbour))
    shares = {grant.owner.pod: grant.shares for grant in place.ledger.grants if grant.owner}
    room = len(IDS) - len(neighbours)
    for number in range(room):
        await place.started(scheduled(f"forged-{number}", (U0, 1, 100)))
    assert len(place.ids) == len(IDS)  # the kubelet admits no other pod
    (beyond,) = place.ledger.overcommitted
    assert (beyond.device, beyond.holders) == (U0, len(IDS))
    assert len(place.events("start.overcommitted")) == room
    for now in (place, VolcanoPlace(before=place)):
        if now is not place:
            confirm(now, initial=True)
        for neighbour in neighbours:
            await now.start(now.ids[neighbour.kubelet_uid, "c0"])
        kept = {grant.owner.pod: grant.shares for grant in now.ledger.grants if grant.owner}
        assert {name: kept[name] for name in shares} == shares
        assert now.ledger.audit() == []
        assert now.refusals.current == ()


async def test_a_crash_loop_on_an_overcommitted_card_floods_nobody() -> None:
    """One event and one count for each pod, however often it starts,
    and a bound on what waits to be reported.
    """
    place = VolcanoPlace()
    await place.started(scheduled("neighbour", (U0, 1, 90)))
    attacker = scheduled("attacker", (U0, 1, 90))
    await place.started(attacker)
    for _ in range(1000):
        await place.start(place.ids["uid-attacker", "c0"])
    assert place.overcommits.total == 1
    assert len(place.notices.take()) == 1
    for _ in range(10_000):
        place.overcommits.add(attacker, "c0", place.ledger.overcommitted)
    assert len(place.notices.take()) == 256


_HOSTILE = st.one_of(
    st.text(max_size=60),
    st.text("GPU-a,:;[]NVIDI0123456789\x00٣", max_size=80),
    st.sampled_from(
        [
            f"{U0},NVIDIA,4,60:",
            f"{U0},NVIDIA,{'9' * 18},60:",
            f"{U0},NVIDIA,4,60:;",
            NODE,
            "success",
            "9" * 5000,
            "\ud800",
        ]
    ),
    st.integers(1, 6).map(lambda count: f"{U0},NVIDIA,4,60:" * count),
)


@given(
    annotations=st.dictionaries(st.sampled_from(KEYS), _HOSTILE),
    scheduler=st.sampled_from(["volcano", "default-scheduler", "\x00"]),
)
@example(
    annotations={FORGED: f"{U0},NVIDIA,4,60:" * 5000, "volcano.sh/vgpu-node": NODE},
    scheduler="volcano",
)
@example(annotations={FORGED: ";" * 200_000, "volcano.sh/vgpu-node": NODE}, scheduler="volcano")
@settings(max_examples=150, deadline=None)
def test_no_annotation_breaks_the_family_or_the_neighbours_start(
    annotations: dict[str, str], scheduler: str
) -> None:
    """With any annotation the pod gets at most its limits or one refusal of bounded length,
    and the next pod starts.
    """

    async def play() -> None:
        place = VolcanoPlace()
        refusal = ""
        try:
            await place.started(
                msgspec.structs.replace(
                    unscheduled("attacker", (4, 60), scheduler=scheduler), annotations=annotations
                )
            )
        except AgentError as err:
            refusal = str(err)
        if refusal:
            assert len(refusal) < 4000
            assert left(place) == (UNITS * 1024, 100, SLOTS)
        else:
            assert [
                (share.memory_mib, share.cores_percent)
                for grant in place.ledger.grants
                for share in grant.shares
            ] == [(4096, 60)]
        assert place.ledger.audit() == []
        await place.started(unscheduled("neighbour", (UNITS - 4, 40)))

    virtual_time.run(play())


class GpusharePlace(Place):
    """A node with ``volcano.sh/gpu-memory``, 1024 MiB an id, or with whole cards."""

    def __init__(self, strategy: str) -> None:
        self.name = "volcano.sh/gpu-memory" if strategy == "share" else "volcano.sh/gpu-number"
        family = VolcanoGpushareFamily(VolcanoGpushareOptions(strategy=strategy, factor=1024))
        super().__init__(family=family, resource=self.name)
        self.book.replace([])
        self.free = [entry.id for entry in self.ledger.resource(self.name).ids]

    async def started(self, name: str, count: int, index: str) -> None:
        """A pod with one container starts that asks for ``count`` ids and says
        that a scheduler gave it the cards ``index``.
        """
        pod = Pod(
            f"uid-{name}",
            "team",
            name,
            NODE,
            annotations={
                "volcano.sh/gpu-index": index,
                "volcano.sh/predicate-time": "9" * 30,
                "volcano.sh/gpu-assigned": "false",
            },
            containers=(PodContainer("main", limits={self.name: count}),),
            scheduler="volcano",
        )
        self.book.put(pod)
        ids, self.free = self.free[:count], self.free[count:]
        await self.admit(pod, "main", ids)
        await self.start(ids)


async def test_no_tenant_gets_memory_of_a_full_card_by_its_index() -> None:
    """GPU share has no limit inside the container,
    so what the book says of memory is all that there is.
    """
    place = GpusharePlace("share")
    await place.started("neighbour", 38, "0")
    with pytest.raises(CapacityError, match=r"38912 MiB booked \+ 3072 wanted, of 40960"):
        await place.started("attacker", 3, "0")
    await place.started("honest", 2, "0")
    assert place.ledger.overcommitted == ()


async def test_no_tenant_gets_a_card_that_another_has_whole_by_its_index() -> None:
    """Whole cards are exclusive, whatever an annotation claims."""
    place = GpusharePlace("number")
    await place.started("neighbour", 1, "0")
    with pytest.raises(CapacityError):
        await place.started("attacker", 1, "0")
    assert len([grant for grant in place.ledger.grants if grant.shares]) == 1


@pytest.mark.parametrize(
    "index",
    [
        "-1",
        "99999999999999999999",
        "0" * 200_000,
        "٠",
        "0,0",
        " 0",
        "0x0",
        "1e0",
        "\x00",
        ",",
        "nan",
    ],
)
async def test_no_index_breaks_the_family(index: str) -> None:
    """One refusal of bounded length, or the card that exists; nothing else stops."""
    place = GpusharePlace("number")
    with contextlib.suppress(AgentError):
        await place.started("attacker", 1, index)
    for refusal in place.refusals.current:
        assert len(refusal.reason) < 2000
        assert re.search("volcano.sh/gpu-index", refusal.reason)
    await place.started("neighbour", 1, "1")
