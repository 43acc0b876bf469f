"""From kubelet's calls to edits, on the golden node with the nvidia family."""

from __future__ import annotations

import pytest

from tests.allocation.without_pods import without_pods
from tests.families.nvidia.parts import iktos, shared_by
from tests.golden import SLICES, U0, U1, golden_inventory, golden_slices, with_slices
from vgpu_agent.allocation.allocator import Allocator
from vgpu_agent.allocation.context import Families
from vgpu_agent.errors import RequestRefusedError, UnhealthyDeviceError, UnknownDeviceError
from vgpu_agent.families.family import Ownership
from vgpu_agent.families.nvidia.family import NvidiaFamily
from vgpu_agent.families.nvidia.options import NvidiaOptions
from vgpu_agent.families.volcano_vgpu.mig.static import StaticMigOptions, VolcanoStaticMigFamily
from vgpu_agent.journal import Journal
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Health, Holding, Inventory, KubeletRecords, Owner, SharingMode

GPU = "nvidia.com/gpu"


def make(
    options: NvidiaOptions | None = None, inventory: Inventory | None = None
) -> tuple[Allocator, Ledger, Journal]:
    """An allocator over the golden node."""
    ledger, journal = Ledger(), Journal()
    family = NvidiaFamily(options or shared_by(4))
    allocator = Allocator(
        without_pods(
            ledger=ledger,
            families=Families((family,)),
            inventory=lambda: inventory or golden_inventory(),
            journal=journal,
        )
    )
    allocator.refresh_offer()
    return allocator, ledger, journal


async def test_a_repeated_allocate_gets_the_same_answer() -> None:
    """kubelet V15: a pod that is admitted again gets what it got."""
    allocator, ledger, _ = make()
    assert await allocator.allocate(GPU, [f"{U0}::1"]) == await allocator.allocate(
        GPU, [f"{U0}::1"]
    )
    assert len(ledger.grants) == 1


async def test_a24_an_unknown_id_is_refused_in_words_that_users_know() -> None:
    """nvidia:A24 (and kubelet V8): unknown device, with the resource.
    The ledger stays as it was.
    """
    allocator, ledger, journal = make()
    with pytest.raises(
        UnknownDeviceError,
        match=(
            r'^invalid allocation request for "nvidia.com/gpu": invalid request: unknown device: '
            r"GPU-x$"
        ),
    ):
        await allocator.allocate(GPU, ["GPU-x"])
    assert ledger.grants == ()
    assert [entry.event for entry in journal.entries] == ["allocate.refused"]


async def test_a23_two_replicas_are_refused_before_anything_is_booked() -> None:
    """nvidia A23: the text names the maximum and what was found."""
    allocator, ledger, _ = make(shared_by(4, fail_requests_greater_than_one=True))
    with pytest.raises(
        RequestRefusedError,
        match=r'^invalid allocation request for "nvidia.com/gpu": .* is 1; found 2',
    ):
        await allocator.allocate(GPU, [f"{U0}::0", f"{U1}::0"])
    assert ledger.grants == ()


async def test_an_unhealthy_id_is_refused_with_the_gpus_trouble() -> None:
    """nvidia D12: the pod's status tells what is wrong with the card."""
    allocator, _, _ = make(inventory=golden_inventory(U1=Health(ok=False, reason="XID 79")))
    with pytest.raises(UnhealthyDeviceError, match="XID 79"):
        await allocator.allocate(GPU, [f"{U1}::0"])


def test_a_preference_is_never_an_error() -> None:
    """kubelet §6: with too few ids, unknown ids or an unknown resource,
    the answer is a simple pick.
    """
    allocator, _, journal = make()
    assert allocator.preferred(GPU, [f"{U0}::0"], [], 3) == [f"{U0}::0"]
    assert allocator.preferred(GPU, ["GPU-x::0", "GPU-x::1"], ["GPU-x::1"], 1) == ["GPU-x::1"]
    assert allocator.preferred("nvidia.com/other", ["a", "b"], [], 1) == ["a"]
    assert {entry.event for entry in journal.entries} == {"preferred.simple"}


def test_a_preference_spreads_over_the_gpus() -> None:
    """The family's policy reaches kubelet: two replicas come from two GPUs."""
    allocator, _, _ = make()
    every = [f"{uuid}::{n}" for uuid in (U0, U1) for n in range(4)]
    assert allocator.preferred(GPU, every, [], 2) == [f"{U0}::0", f"{U1}::0"]


def test_a_preference_avoids_what_allocate_would_refuse() -> None:
    """Between an XID and the list that tells kubelet, an unhealthy id is still available to it.
    It is not recommended.
    """
    allocator, _, _ = make(inventory=golden_inventory(U0=Health(ok=False, reason="XID 79")))
    assert allocator.preferred(GPU, [f"{U0}::0", f"{U1}::0"], [], 1) == [f"{U1}::0"]
    assert allocator.preferred(GPU, [f"{U0}::0", f"{U1}::0"], [], 2) == [f"{U1}::0", f"{U0}::0"]


@pytest.mark.parametrize("required", ["GPU-x::0", f"{U0}::1"])
@pytest.mark.parametrize(
    "options",
    [
        NvidiaOptions(),
        shared_by(4),
        shared_by(4, policy="packed"),
        iktos(("gpu", "gpu", 4)),
        iktos(("gpu", "gpu", -1)),
    ],
)
def test_a_simple_pick_avoids_it_too(options: NvidiaOptions, required: str) -> None:
    """An id that the kubelet requires, of an init container, may be unknown or Unhealthy.
    The rest is Allocate's choice.
    """
    allocator, ledger, _ = make(options, golden_inventory(U0=Health(ok=False, reason="XID 79")))
    first_of = {entry.id.device: entry.id.id for entry in reversed(ledger.listing(GPU))}
    assert allocator.preferred(GPU, [first_of[U0], first_of[U1]], [required], 2) == [
        required,
        first_of[U1],
    ]


def test_the_list_of_a_resource_that_went_away_is_empty() -> None:
    """A stream that is still open for a withdrawn resource tells kubelet that nothing is left."""
    allocator, _, _ = make()
    assert allocator.listing("nvidia.com/gone") == []


async def test_a_start_needs_booked_ids() -> None:
    """PreStartContainer passes for ids that are booked and refuses others with a text
    for the pod's status.
    """
    allocator, _, _ = make()
    await allocator.allocate(GPU, [f"{U0}::0"])
    await allocator.pre_start(GPU, [f"{U0}::0"])
    with pytest.raises(UnknownDeviceError, match="not booked for any container"):
        await allocator.pre_start(GPU, [f"{U0}::1"])


async def test_confirming_names_the_container_in_the_journal() -> None:
    """The grant's number ties Allocate to the container it turned out to be for."""
    allocator, _, journal = make()
    await allocator.allocate(GPU, [f"{U0}::0"])
    assert allocator.unconfirmed()
    holding = Holding(GPU, (f"{U0}::0",), Owner("main", "uid", "default", "train"))
    assert allocator.confirm(KubeletRecords((holding,)), reservation_seconds=60) == []
    booked, named = journal.entries
    assert booked.facts["grant"] == named.facts["grant"]
    assert (named.event, named.facts["pod"], named.facts["container"]) == (
        "ledger.named",
        "default/train",
        "main",
    )
    assert not allocator.unconfirmed()


def test_confirming_counts_drift() -> None:
    """A holder that the ledger did not know is adopted and counted once."""
    allocator, _, _ = make()
    allocator.confirm(KubeletRecords(entries=()), reservation_seconds=60, initial=True)
    records = KubeletRecords(
        (Holding(GPU, (f"{U0}::0",), Owner("main", "uid", "default", "train")),)
    )
    assert [drift.event for drift in allocator.confirm(records, reservation_seconds=60)] == [
        "ledger.adopted"
    ]
    assert allocator.confirm(records, reservation_seconds=60) == []


async def test_new_options_change_the_offer_and_keep_the_grants() -> None:
    """A reload from 4 replicas to 2: known ids stay held, the rest of the offer follows."""
    allocator, ledger, _ = make()
    await allocator.allocate(GPU, [f"{U0}::1"])
    allocator.use_families(Families((NvidiaFamily(shared_by(2)),)))
    allocator.refresh_offer()
    assert len(ledger.listing(GPU)) == 4
    assert [grant.ids for grant in ledger.grants] == [(f"{U0}::1",)]


async def test_more_replicas_by_mps_find_room_beside_containers_of_before() -> None:
    """A reload from 4 replicas to 8: four containers have a half of the GPU now and not all of it,
    as a restart would find, too.
    """
    allocator, ledger, _ = make(shared_by(4, sharing=SharingMode.MPS))
    for number in range(4):
        await allocator.allocate(GPU, [f"{U0}::{number}"])
    allocator.use_families(Families((NvidiaFamily(shared_by(8, sharing=SharingMode.MPS)),)))
    allocator.refresh_offer()
    for number in range(4, 8):
        await allocator.allocate(GPU, [f"{U0}::{number}"])
    assert {
        (share.memory_mib, share.cores_percent) for grant in ledger.grants for share in grant.shares
    } == {(5120, 12)}
    assert ledger.audit() == []


async def test_a_restatement_leaves_what_is_no_longer_offered() -> None:
    """Two of four replicas by MPS are left.
    The holder of one of them has its part, that of another keeps its earlier one.
    """
    allocator, ledger, _ = make(shared_by(4, sharing=SharingMode.MPS))
    for number in (1, 3):
        await allocator.allocate(GPU, [f"{U0}::{number}"])
    allocator.use_families(Families((NvidiaFamily(shared_by(2, sharing=SharingMode.MPS)),)))
    allocator.refresh_offer()
    assert [share.memory_mib for grant in ledger.grants for share in grant.shares] == [20480, 10240]


def test_ids_of_another_plugin_in_nvidias_domain_are_none_of_ours() -> None:
    """A plugin for virtual machines names its cards there, too.
    Nothing of the ledger is about them.
    """
    allocator, ledger, _ = make()
    records = KubeletRecords(
        (
            Holding(
                "nvidia.com/GA100_A100_PCIE_40GB",
                ("7",),
                Owner("compute", "uid-vm", "default", "vm"),
            ),
        )
    )
    allocator.confirm(records, reservation_seconds=60, initial=True)
    assert ledger.grants == ()


def test_ids_of_vgpu_manager_are_no_replicas() -> None:
    """vgpu-manager's plugin may run beside the agent. Its ids `<UUID>::<n>` under a name in
    NVIDIA's domain must not be booked as replicas.
    """
    allocator, ledger, _ = make(shared_by(4))
    records = KubeletRecords(
        (
            Holding(
                "nvidia.com/vgpu-number", (f"{U0}::1",), Owner("main", "uid-1", "default", "train")
            ),
        )
    )
    allocator.confirm(records, reservation_seconds=60, initial=True)
    assert ledger.grants == ()


class OtherFamily(NvidiaFamily):
    """A family whose only name lies in NVIDIA's domain, with the same ids."""

    name = "other"

    def owns(self, resource: str) -> Ownership:
        return Ownership.CERTAIN if resource == "nvidia.com/other" else Ownership.NONE


@pytest.mark.parametrize("nvidia_first", [True, False])
def test_a_familys_own_name_beats_one_that_another_may_have_had(nvidia_first: bool) -> None:
    """Both read the ids, and neither offers the name today.
    The order of the families decides nothing.
    """
    idle = (NvidiaFamily(NvidiaOptions()), OtherFamily(NvidiaOptions()))
    families, ledger = Families(idle=idle if nvidia_first else idle[::-1]), Ledger()
    allocator = Allocator(
        without_pods(
            ledger=ledger, families=families, inventory=golden_inventory, journal=Journal()
        )
    )
    held = [
        Holding(name, (id_,), Owner("main", name, "default", name[-5:]))
        for name, id_ in (("nvidia.com/other", U0), ("nvidia.com/past", U1))
    ]
    allocator.confirm(KubeletRecords(tuple(held)), reservation_seconds=60, initial=True)
    assert {grant.ids: grant.family for grant in ledger.grants} == {(U0,): "other", (U1,): "nvidia"}


def test_a_name_that_another_family_offers_today_is_that_familys() -> None:
    """Volcano's names were in NVIDIA's domain up to 1.11, and can be again.
    The family that offers one knows what its ids mean.
    """
    inventory = with_slices(golden_inventory(), U1=golden_slices())
    families = Families(
        (
            NvidiaFamily(NvidiaOptions()),
            VolcanoStaticMigFamily(StaticMigOptions("mixed", prefix="nvidia.com")),
        )
    )
    ledger = Ledger()
    allocator = Allocator(
        without_pods(
            ledger=ledger, families=families, inventory=lambda: inventory, journal=Journal()
        )
    )
    allocator.refresh_offer()
    held = Holding(
        "nvidia.com/mig-1g.5gb", (SLICES[0],), Owner("main", "uid-1", "default", "train")
    )
    allocator.confirm(KubeletRecords((held,)), reservation_seconds=60, initial=True)
    assert [grant.family for grant in ledger.grants] == ["volcano-vgpu-mig"]
