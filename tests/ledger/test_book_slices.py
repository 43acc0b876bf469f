"""MIG instances in the book: what befalls one, its GPU, or all of them,
and one that is cut away under its holder.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.golden import U0, U1, golden_inventory
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.errors import UnhealthyDeviceError
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Health, Inventory, MigInstance, Resource, Share

SLICES = tuple(f"MIG-cccccccc-0000-5000-8000-00000000000{number}" for number in range(7))
HEALTHY = Health()
ILL = Health(ok=False, reason="XID 48")
WHOLE = Resource("nvidia.com/gpu", "nvidia", (DeviceId(U0, U0), DeviceId(U1, U1)))
MIG = Resource(
    "nvidia.com/mig-1g.5gb",
    "nvidia",
    tuple(DeviceId(f"{uuid}::{n}", uuid) for uuid in SLICES for n in range(2)),
    2,
)


def _inventory(gpu: Health = HEALTHY, **instances: dict[str, object]) -> Inventory:
    """Seven slices on GPU 1; ``M3={"health": ILL}`` changes one of them."""
    slices = tuple(
        MigInstance(uuid, number, 7 + number, 0, "1g.5gb", 4864, 1, 1)
        for number, uuid in enumerate(SLICES)
    )
    # keys of MigInstance
    changed = tuple(
        msgspec.structs.replace(one, **instances.get(f"M{one.index}", {})) for one in slices
    )
    whole = golden_inventory(U1=gpu)
    return msgspec.structs.replace(
        whole,
        gpus=(
            whole.gpus[0],
            msgspec.structs.replace(whole.gpus[1], mig_enabled=True, mig_instances=changed),
        ),
    )


def _ledger(resource: Resource = MIG) -> Ledger:
    ledger = Ledger()
    ledger.observe(_inventory())
    ledger.offer([resource])
    return ledger


def _unhealthy(ledger: Ledger, resource: Resource = MIG) -> set[str]:
    return {device.id.id for device in ledger.listing(resource.name) if not device.healthy}


def test_an_ill_slice_takes_its_own_replicas_and_no_others() -> None:
    """nvidia:D1: all replicas of the right MIG slice become Unhealthy, in one step."""
    ledger = _ledger()
    before = ledger.revision.version

    ledger.observe(_inventory(M3={"health": ILL}))

    assert _unhealthy(ledger) == {f"{SLICES[3]}::0", f"{SLICES[3]}::1"}
    assert ledger.revision.version == before + 1


def test_an_ill_gpu_takes_all_slices() -> None:
    """nvidia:D1: what hit the whole GPU hit every slice of it and every replica."""
    ledger = _ledger()

    ledger.observe(_inventory(gpu=ILL))

    assert len(_unhealthy(ledger)) == 14


def test_a_slice_that_recovers_is_given_out_again() -> None:
    """nvidia:D2: Unhealthy is not for ever."""
    ledger = _ledger()
    ledger.observe(_inventory(M3={"health": ILL}))

    ledger.observe(_inventory())

    assert _unhealthy(ledger) == set()


def test_a_slice_whose_nodes_are_not_known_is_not_given_out() -> None:
    """Its trouble is the text of the refusal. The other six and the GPU itself go on."""
    ledger = _ledger()
    ledger.observe(_inventory(M2={"trouble": "mig-minors line 4: 'gpu1/gi9/access ?'"}))

    assert _unhealthy(ledger) == {f"{SLICES[2]}::0", f"{SLICES[2]}::1"}
    with pytest.raises(UnhealthyDeviceError, match=r"mig-minors line 4: 'gpu1/gi9/access \?'"):
        ledger.reserve(MIG.name, (f"{SLICES[2]}::0",), (Share(SLICES[2]),))


def test_a_whole_gpu_is_as_well_as_its_worst_slice() -> None:
    """nvidia §3, strategy none: a GPU in MIG mode is given out whole, so an ill part of it counts.
    A missing node does not.
    """
    ledger = _ledger(WHOLE)

    ledger.observe(_inventory(M3={"health": ILL}, M2={"trouble": "no line"}))

    assert _unhealthy(ledger, WHOLE) == {U1}
    ledger.observe(_inventory(M2={"trouble": "no line"}))
    assert _unhealthy(ledger, WHOLE) == set()


def test_a_slice_that_is_cut_away_stays_as_long_as_it_is_held() -> None:
    """nvidia:D9: its id is listed Unhealthy while its pod runs, and the pod keeps what it has."""
    ledger = _ledger()
    ledger.reserve(MIG.name, (f"{SLICES[0]}::0",), (Share(SLICES[0]),))
    gone = golden_inventory()

    ledger.observe(gone)

    assert f"{SLICES[0]}::0" in _unhealthy(ledger)
    assert [grant.ids for grant in ledger.grants] == [(f"{SLICES[0]}::0",)]


def test_a_cordon_of_a_gpu_reaches_its_slices() -> None:
    """A slice knows its GPU in the book."""
    ledger = _ledger()

    ledger.cordon(U1, "maintenance")

    assert len(_unhealthy(ledger)) == 14
