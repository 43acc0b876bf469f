"""Containers that need a GPU divided: one starts the division, others wait or are refused;
with a real family and ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from tests.allocation.binding_parts import Place
from tests.families.volcano_vgpu.golden import MEMORY, NODE, NUMBER, U0, U1, decided
from tests.families.volcano_vgpu.mig.parts import GEOMETRIES, GROUP2, a_gpu
from vgpu_agent.allocation import identification
from vgpu_agent.allocation.allocator import Allocator
from vgpu_agent.allocation.carrier import grant_token
from vgpu_agent.allocation.context import Context, Families
from vgpu_agent.allocation.division import Division
from vgpu_agent.allocation.mode import BindingMode
from vgpu_agent.config.binding import Binding
from vgpu_agent.errors import CapacityError, LedgerError, MigError, RequestRefusedError
from vgpu_agent.families.family import MigLayout
from vgpu_agent.families.volcano_vgpu.mig.family import VolcanoVgpuMigFamily
from vgpu_agent.families.volcano_vgpu.offer import VolcanoVgpuOptions
from vgpu_agent.families.volcano_vgpu.settings import MIG
from vgpu_agent.ledger.claims import Claim
from vgpu_agent.ledger.reconciliation import InterpretedHolding
from vgpu_agent.model import Holding, Inventory, KubeletRecords, Owner, Share
from vgpu_agent.pods import ContainerKind, Pod, PodContainer

GROUP3 = ("3g.20gb", "3g.20gb")


class MigPlace(Place):
    """A node in the operating mode mig, and a divider that a test lets succeed or fail
    when it likes.
    """

    def __init__(self, *, divider: bool = True, late: bool = True) -> None:
        super().__init__()
        self.inventory = Inventory(version=1, gpus=(a_gpu(U0), a_gpu(U1, index=1)))
        self.asked: list[MigLayout] = []
        self._waiting: dict[str, Callable[[str], None]] = {}
        self.allocator = Allocator(
            Context(
                ledger=self.ledger,
                families=Families(
                    pod_families=(
                        VolcanoVgpuMigFamily(
                            VolcanoVgpuOptions(factor=64, mode=MIG, geometries=GEOMETRIES)
                        ),
                    )
                ),
                inventory=lambda: self.inventory,
                journal=self.journal,
                node=NODE,
                pods=self.book,
                read_records=self.read_evidence,
                fetch_pod=self.fetch,
                carrier=self.carrier,
                refusals=self.refusals,
                settings=Binding(),
                divider=self if divider else None,
            )
        )
        self.allocator.use_mode(BindingMode(late=late, by_annotation=False, reason="a test"))
        self.allocator.refresh_offer()

    def divide(self, layout: MigLayout, done: Callable[[str], None]) -> None:
        """See `Divider`."""
        self.asked.append(layout)
        self._waiting[layout.gpu] = done

    def show(self, gpu: str, *profiles: str) -> None:
        """The driver shows ``gpu`` divided so."""
        index = 0 if gpu == U0 else 1
        gpus = list(self.inventory.gpus)
        gpus[index] = a_gpu(gpu, *profiles, index=index)
        self.inventory = msgspec.structs.replace(
            self.inventory, version=self.inventory.version + 1, gpus=tuple(gpus)
        )
        self.allocator.refresh_offer()

    def finish(self, gpu: str, *profiles: str, reason: str = "") -> None:
        """The change is over, and the driver shows ``profiles``."""
        self.show(gpu, *profiles)
        self.answer(gpu, reason)

    def answer(self, gpu: str, reason: str = "") -> None:
        """The change is over."""
        self._waiting.pop(gpu)(reason)

    async def admitted(
        self, name: str, place: str, *, number: int = 0, containers: tuple[PodContainer, ...] = ()
    ) -> tuple[str, ...]:
        """A pod for which a scheduler has written ``place``; the ids of its container ``main``."""
        ids = (f"{U0}-{number}",)
        text = f"{place},NVIDIA,125,0:"  # 8000 MiB
        self.book.put(pod_of(name, text, *containers))
        await self.allocator.allocate(NUMBER, ids)
        assert self.checkpoint is not None
        assert self.pod_resources is not None
        self.checkpoint.append(Holding(NUMBER, ids, Owner("main", f"uid-{name}")))
        self.pod_resources.append(
            Holding(NUMBER, ids, Owner("main", namespace="default", pod=name))
        )
        return ids

    async def begin(self, ids: tuple[str, ...]) -> asyncio.Task[None]:
        """The kubelet is about to start the container of ``ids``,
        which then waits for something.
        """
        start = asyncio.get_running_loop().create_task(self.allocator.pre_start(NUMBER, ids))
        for _ in range(20):
            await asyncio.sleep(0)
        return start

    def seen(self, ids: tuple[str, ...]) -> str:
        """The devices in the answer to the container of ``ids``."""
        return self.carrier.specs[grant_token(NUMBER, ids)][1].edits.environment[
            "NVIDIA_VISIBLE_DEVICES"
        ]

    @property
    def cordoned(self) -> list[str]:
        """The cards of which nothing is given."""
        return [room.device for room in self.ledger.rooms(NUMBER) if "divided" in room.trouble]


def pod_of(name: str, text: str, *containers: PodContainer) -> Pod:
    """A pod on this node with that pod devices string."""
    asking = PodContainer("main", limits={NUMBER: 1, MEMORY: 125})
    return Pod(
        f"uid-{name}", "default", name, NODE, "Pending", decided(text), (*containers, asking)
    )


async def test_a_gpu_is_divided_for_the_first_pod_of_a_group() -> None:
    """The start waits, no other container gets anything of the GPU meanwhile,
    and then the container has its instance.
    """
    place = MigPlace()
    ids = await place.admitted("p", f"{U1}[group2-1]")
    start = await place.begin(ids)
    assert place.asked == [MigLayout(U1, GROUP2)]
    assert place.cordoned == [U1]
    assert not start.done()
    place.finish(U1, *GROUP2)
    await start
    assert place.seen(ids) == "MIG-2-1"
    assert place.cordoned == []
    assert [fact["pod"] for fact in place.events("mig.dividing") + place.events("mig.divided")] == [
        "default/p",
        "default/p",
    ]


async def test_d15_two_pods_of_one_instance_wait_for_one_change_and_get_two() -> None:
    """volcano-vgpu:D15: both were given the same instance of a GPU still to be divided. It is
    divided once, and each has its own.
    """
    place = MigPlace()
    first = await place.admitted("a", f"{U1}[group2-0]", number=0)
    second = await place.admitted("b", f"{U1}[group2-0]", number=1)
    starts = [await place.begin(first), await place.begin(second)]
    assert len(place.asked) == 1
    place.finish(U1, *GROUP2)
    await asyncio.gather(*starts)
    assert {place.seen(first), place.seen(second)} == {"MIG-2-0", "MIG-2-1"}
    (told,) = place.events("start.second_best")
    assert "is held by default/a" in str(told["reason"])
    assert place.ledger.audit() == []


async def test_d16_a_failure_costs_one_pod_and_the_next_try_may_succeed() -> None:
    """volcano-vgpu:D16: the refusal has the reason, and kubelet's next call begins anew."""
    place = MigPlace()
    ids = await place.admitted("p", f"{U1}[group2-0]")
    start = await place.begin(ids)
    place.finish(U1, reason="the tool is missing")
    with pytest.raises(
        MigError,
        match=r"default/p.*could not be divided into 3 × 2g.10gb, 1 × 1g.5gb: the tool is missing",
    ):
        await start
    assert place.cordoned == []
    (refusal,) = place.refusals.current
    assert (refusal.pod.name, refusal.final) == ("p", False)
    again = await place.begin(ids)
    place.finish(U1, *GROUP2)
    await again
    assert place.seen(ids) == "MIG-2-0"
    assert place.refusals.current == ()


async def test_two_pods_that_want_different_divisions_of_one_gpu() -> None:
    """The first one starts the division. The second reads its pod and way, then that it is held,
    and starts after the first's end.
    """
    place = MigPlace()
    first = await place.admitted("a", f"{U1}[group2-0]", number=0)
    second = await place.admitted("b", f"{U1}[group3-0]", number=1)
    start = await place.begin(first)
    with pytest.raises(
        MigError, match=r"is being divided into 3 × 2g.10gb, 1 × 1g.5gb for default/a"
    ):
        await place.allocator.pre_start(NUMBER, second)
    place.finish(U1, *GROUP2)
    await start
    with pytest.raises(
        CapacityError,
        match=r"default/a .*has a part of it, so it cannot be divided as group group3",
    ):
        await place.allocator.pre_start(NUMBER, second)
    assert place.seen(first) == "MIG-2-0"
    ended = place.book.get("uid-a")
    assert ended is not None
    place.book.put(msgspec.structs.replace(ended, phase="Succeeded"))
    place.book.synced.set()
    place.forget(ended)
    third = await place.begin(second)
    place.finish(U1, *GROUP3)
    await third
    assert place.seen(second) == "MIG-2-0"


async def test_a_gpu_that_another_family_has_is_not_divided() -> None:
    """This holds for any holder of a part of it. The ledger is asked, not the family."""
    place = MigPlace()
    ids = await place.admitted("p", f"{U1}[group2-0]")
    holding = Holding("example.com/x", ("x-1",), Owner("main", "uid-x", "default", "x"))
    place.ledger.reconcile(
        KubeletRecords((holding,), entries=(holding,)),
        lambda _: InterpretedHolding("other", (Share(U1),)),
        reservation_seconds=60,
        initial=True,
    )
    with pytest.raises(LedgerError, match="default/x"):
        await place.allocator.pre_start(NUMBER, ids)
    assert place.asked == []


async def test_a_gpu_that_is_kept_for_another_family_is_not_divided() -> None:
    """It would come to that family's pod in pieces, which it cannot use."""
    place = MigPlace()
    place.ledger.claim([Claim(U1, "volcano-gpushare", "default/first", "uid-first", 0.0, 1)])
    division = Division(place.allocator._context)
    with pytest.raises(MigError, match="kept for a pod to which"):
        await division.bring_about(
            [MigLayout(U1, GROUP3)],
            "volcano-vgpu",
            "default/b",
            asyncio.get_running_loop().time() + 5,
        )
    assert (place.asked, place.cordoned) == ([], [])


async def test_a_gpu_that_somebody_has_is_not_divided_whatever_a_family_says() -> None:
    """The ledger is looked at where the change begins, with all grants of all families in it."""
    place = MigPlace()
    place.show(U1, *GROUP2)
    ids = await place.admitted("a", f"{U1}[group2-0]")
    await place.allocator.pre_start(NUMBER, ids)
    division = Division(place.allocator._context)
    with pytest.raises(MigError, match="default/a has a part of it"):
        await division.bring_about(
            [MigLayout(U1, GROUP3)],
            "volcano-vgpu",
            "default/b",
            asyncio.get_running_loop().time() + 5,
        )
    assert (place.asked, place.cordoned) == ([], [])


@pytest.mark.looptime
async def test_a_change_that_takes_longer_than_a_start_may_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kubelet is answered in time and asks again.
    The GPU is divided once, and is held by no pod meanwhile.
    """
    monkeypatch.setattr(identification, "START_SECONDS", 5.0)
    place = MigPlace()
    ids = await place.admitted("p", f"{U1}[group2-0]")
    with pytest.raises(MigError, match="is still being divided into"):
        await place.allocator.pre_start(NUMBER, ids)
    assert place.cordoned == [U1]
    again = await place.begin(ids)
    place.finish(U1, *GROUP2)
    await again
    assert len(place.asked) == 1
    assert place.seen(ids) == "MIG-2-0"


async def test_instances_that_nobody_may_have_yet_are_waited_for() -> None:
    """The ledger gets them a moment after the driver shows them,
    and a CDI name may take a little longer.
    """
    place = MigPlace()
    ids = await place.admitted("p", f"{U1}[group2-0]")
    start = await place.begin(ids)
    place.inventory = msgspec.structs.replace(
        place.inventory, gpus=(place.inventory.gpus[0], a_gpu(U1, *GROUP2, index=1))
    )
    place.answer(U1)
    for _ in range(20):
        await asyncio.sleep(0)
    place.ledger.cordon("MIG-2-2", "no CDI spec has its name yet")
    place.allocator.refresh_offer()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not start.done()
    place.ledger.uncordon("MIG-2-2")
    await start
    assert place.seen(ids) == "MIG-2-0"


@pytest.mark.looptime
async def test_instances_that_stay_kept_back_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start is refused in time, with the reason of the part that keeps them."""
    monkeypatch.setattr(identification, "START_SECONDS", 5.0)
    place = MigPlace()
    ids = await place.admitted("p", f"{U1}[group2-0]")
    start = await place.begin(ids)
    place.ledger.cordon("MIG-2-0", "no CDI spec has its name yet")
    place.finish(U1, *GROUP2)
    with pytest.raises(LedgerError, match="no CDI spec has its name yet"):
        await start


async def test_a_call_that_is_cut_off_changes_nothing_about_the_change() -> None:
    """The kubelet gives up after 30 seconds.
    The GPU stays cordoned until it is divided, and the next call finds it so.
    """
    place = MigPlace()
    ids = await place.admitted("p", f"{U1}[group2-0]")
    start = await place.begin(ids)
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    assert place.cordoned == [U1]
    place.finish(U1, *GROUP2)
    assert place.cordoned == []
    await place.allocator.pre_start(NUMBER, ids)
    assert place.seen(ids) == "MIG-2-0"


async def test_a_gpu_that_is_divided_otherwise_than_asked_serves_nobody_by_it() -> None:
    """A divider that says yes to another division is not believed."""
    place = MigPlace()
    ids = await place.admitted("p", f"{U1}[group2-0]")
    start = await place.begin(ids)
    place.finish(U1, *GROUP3)
    with pytest.raises(MigError, match="but by now it is divided differently"):
        await start
    assert place.carrier.specs == {}


async def test_a_container_keeps_its_instance_over_its_restarts() -> None:
    """It does so even when the scheduler's own instance has become free by then."""
    place = MigPlace()
    place.show(U1, *GROUP2)
    first = await place.admitted("a", f"{U1}[group2-0]", number=0)
    second = await place.admitted("b", f"{U1}[group2-0]", number=1)
    await place.allocator.pre_start(NUMBER, first)
    await place.allocator.pre_start(NUMBER, second)
    grant = place.ledger.find(NUMBER, first)
    assert grant is not None
    place.ledger.release(grant.number)
    await place.allocator.pre_start(NUMBER, second)
    assert place.seen(second) == "MIG-2-1"
    assert place.asked == []


async def test_an_instance_that_is_gone_is_decided_for_anew() -> None:
    """A reboot takes the instances along. No process uses them,
    so the container's next start has the GPU divided again.
    """
    place = MigPlace()
    place.show(U1, *GROUP2)
    ids = await place.admitted("p", f"{U1}[group2-1]")
    await place.allocator.pre_start(NUMBER, ids)
    place.show(U1)
    start = await place.begin(ids)
    assert place.asked == [MigLayout(U1, GROUP2)]
    place.finish(U1, *GROUP2)
    await start
    assert place.seen(ids) == "MIG-2-1"


async def test_an_instance_of_a_pod_that_has_ended_is_taken_from_it_first() -> None:
    """The scheduler gives the instance of an ended pod away before kubelet's records forget it.
    Then it is no second best.
    """
    place = MigPlace()
    place.show(U1, *GROUP2)
    first = await place.admitted("a", f"{U1}[group2-0]", number=0)
    await place.allocator.pre_start(NUMBER, first)
    ended = place.book.get("uid-a")
    assert ended is not None
    place.book.put(msgspec.structs.replace(ended, phase="Failed"))
    place.book.synced.set()
    place.forget(ended)
    second = await place.admitted("b", f"{U1}[group2-0]", number=1)
    await place.allocator.pre_start(NUMBER, second)
    assert place.seen(second) == "MIG-2-0"
    assert place.events("start.second_best") == []


async def test_an_init_container_hands_its_instance_on() -> None:
    """It has ended when the next one starts, so the instance is free for it, and not exchanged."""
    place = MigPlace()
    place.show(U1, *GROUP2)
    init = PodContainer("init", ContainerKind.INIT, {NUMBER: 1, MEMORY: 125})
    ids = (f"{U0}-0",)
    about = pod_of("p", f"{U1}[group2-2],NVIDIA,125,0:", init)
    place.book.put(about)
    await place.allocator.allocate(NUMBER, ids)
    place.checkpoint = [Holding(NUMBER, ids, Owner("init", "uid-p"))]
    place.pod_resources = [Holding(NUMBER, ids, Owner("init", namespace="default", pod="p"))]
    await place.allocator.pre_start(NUMBER, ids)
    other = (f"{U0}-1",)
    await place.allocator.allocate(NUMBER, other)
    place.checkpoint.append(Holding(NUMBER, other, Owner("main", "uid-p")))
    place.pod_resources.append(Holding(NUMBER, other, Owner("main", namespace="default", pod="p")))
    await place.allocator.pre_start(NUMBER, other)
    assert place.seen(other) == "MIG-2-2"
    assert place.events("start.second_best") == []


async def test_a_restart_in_the_middle_begins_where_the_gpu_stands() -> None:
    """Nothing is remembered of a change: an agent that finds half of it repeats it,
    for the same pod.
    """
    place = MigPlace()
    ids = await place.admitted("p", f"{U1}[group2-0]")
    start = await place.begin(ids)
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    after = MigPlace()
    after.show(U1, "2g.10gb")
    assert await after.admitted("p", f"{U1}[group2-0]") == ids
    again = await after.begin(ids)
    assert after.asked == [MigLayout(U1, GROUP2)]
    after.finish(U1, *GROUP2)
    await again
    assert after.seen(ids) == "MIG-2-0"


async def test_early_an_answer_that_needs_a_gpu_divided_is_refused() -> None:
    """An early answer is complete in Allocate, where nothing can be waited for.
    The remedy is named.
    """
    place = MigPlace(late=False)
    with pytest.raises(RequestRefusedError, match=r"needs binding\.mode late"):
        await place.admitted("p", f"{U1}[group2-0]")


async def test_without_a_divider_nothing_is_divided() -> None:
    """An agent without a way to divide says so."""
    place = MigPlace(divider=False)
    ids = await place.admitted("p", f"{U1}[group2-0]")
    with pytest.raises(MigError, match="only the operating mode mig does"):
        await place.allocator.pre_start(NUMBER, ids)


async def test_a_gpu_that_does_not_answer_is_left_alone() -> None:
    """A lost GPU is never divided."""
    place = MigPlace()
    ids = await place.admitted("p", f"{U1}[group2-0]")
    gpus = (
        place.inventory.gpus[0],
        msgspec.structs.replace(place.inventory.gpus[1], present=False),
    )
    place.inventory = msgspec.structs.replace(place.inventory, gpus=gpus)
    with pytest.raises((MigError, LedgerError), match="it does not answer"):
        await place.allocator.pre_start(NUMBER, ids)
    assert place.asked == []
