"""Devices behind a resource while some GPUs do not answer:
a lost card must not change what the others are.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.families.nvidia.parts import cautions, offered, refused
from tests.golden import U0, U1, golden_inventory, golden_slices, with_slices
from vgpu_agent.families.nvidia.options import NvidiaOptions, SharedEntry
from vgpu_agent.model import Gpu, Health, Inventory

GPU = "nvidia.com/gpu"
SINGLE = NvidiaOptions(mig_strategy="single")
FIRST_TWO, LAST_TWO = (
    SharedEntry(GPU, 2, "nvidia.com/front", ("0", "1")),
    SharedEntry(GPU, 3, "nvidia.com/back", ("2", "3")),
)
HALVES = NvidiaOptions(shared=(FIRST_TWO, LAST_TWO))
LARGE = golden_slices("3g.20gb", 20096, 1, letter="e")


def lost(gpu: Gpu) -> Gpu:
    """It answered before."""
    return msgspec.structs.replace(
        gpu, present=False, health=Health(ok=False, reason="GPU is lost")
    )


def four(*, indices: tuple[int | None, ...]) -> Inventory:
    """Four GPUs with NVML's indices of now; None for one that the driver does not list any more."""
    known = golden_inventory().gpus[0]
    gpus = [
        msgspec.structs.replace(
            known,
            uuid=U0.replace("a" * 8, str(place) * 8),
            index=place,
            pci_bus_id=f"0000:{place:02x}:00.0",
        )
        for place in range(len(indices))
    ]
    now = [
        lost(gpu) if index is None else msgspec.structs.replace(gpu, index=index)
        for gpu, index in zip(gpus, indices, strict=True)
    ]
    return Inventory(gpus=tuple(now))


@pytest.mark.parametrize(
    "indices",
    [
        (None, 0, 1, 2),
        (0, None, 1, 2),
        (0, 1, 2, None),
        (None, None, 0, 1),
        (None, 0, None, 1),
        (None, 1, 2, 3),
        (None, None, None, None),
    ],
)
def test_a_lost_gpu_moves_no_other_from_entry_to_entry(indices: tuple[int | None, ...]) -> None:
    """nvidia:D15: the driver moves the indices of the cards behind it up. The entries of
    ``devices`` mean the same cards as before.
    """
    assert offered(HALVES, four(indices=indices)) == offered(HALVES, four(indices=(0, 1, 2, 3)))
    assert cautions(HALVES, four(indices=indices)) == ()


def test_an_index_means_the_card_that_the_driver_gives_it_to_at_start() -> None:
    """The first card does not answer when the agent starts and is unknown.
    The others have their indices.
    """
    inventory = four(indices=(0, 1, 2, 3))
    without_first = msgspec.structs.replace(
        inventory, gpus=inventory.gpus[1:], failures=("0: GPU is lost",)
    )
    ids = offered(HALVES, without_first)
    assert {name: len(of_name) for name, of_name in ids.items()} == {
        "nvidia.com/front": 2,
        "nvidia.com/back": 6,
    }


def test_the_slices_of_a_lost_gpu_do_not_speak_against_those_of_now() -> None:
    """The other GPU was cut anew meanwhile:
    ``single`` withholds nothing for the sake of a card that cannot be given out.
    """
    inventory = with_slices(golden_inventory(), U0=golden_slices(letter="d"), U1=LARGE)
    gone, here = inventory.gpus
    ids = offered(SINGLE, msgspec.structs.replace(inventory, gpus=(lost(gone), here)))
    assert ids == {GPU: [*(slice_.uuid for slice_ in golden_slices(letter="d")), LARGE[0].uuid]}
    assert offered(SINGLE, inventory) == {}


def test_a_lost_gpu_without_slices_does_not_withhold_those_of_others() -> None:
    """Neither does one whose MIG mode is off beside others whose mode is on."""
    inventory = with_slices(golden_inventory(), U0=(), U1=LARGE)
    gone, here = inventory.gpus
    assert offered(SINGLE, msgspec.structs.replace(inventory, gpus=(lost(gone), here))) == {
        GPU: [LARGE[0].uuid]
    }
    whole = msgspec.structs.replace(gone, mig_enabled=False)
    assert offered(SINGLE, msgspec.structs.replace(inventory, gpus=(lost(whole), here))) == {
        GPU: [U0, LARGE[0].uuid]
    }


def test_while_no_gpu_answers_they_are_judged_as_they_were() -> None:
    """The driver is away: what was withheld is not offered because of that."""
    inventory = with_slices(golden_inventory(), U0=golden_slices(letter="d"), U1=LARGE)
    assert (
        offered(SINGLE, msgspec.structs.replace(inventory, gpus=tuple(map(lost, inventory.gpus))))
        == {}
    )


def test_a_name_for_some_devices_is_withheld_by_name_with_the_resource_that_they_are_of() -> None:
    """Users who wait for the new name read why it is not there."""
    inventory = with_slices(golden_inventory(), U1=LARGE)
    options = msgspec.structs.replace(
        SINGLE, shared=(SharedEntry(GPU, 2, "nvidia.com/front", (U1, U0)),)
    )
    assert [problem.partition(":")[0] for problem in refused(options, inventory)] == [
        GPU,
        "nvidia.com/front",
    ]
