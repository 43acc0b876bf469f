"""Placement by the agent of a container without a GPU scheduler:
under the plain kube-scheduler (volcano-vgpu §8).
"""

from __future__ import annotations

import msgspec
import pytest

from tests.families.volcano_vgpu.golden import (
    INVENTORY,
    ROOMS,
    U0,
    U1,
    decided,
    family,
    main,
    pod,
    question,
)
from vgpu_agent.errors import CapacityError, RequestRefusedError
from vgpu_agent.families.family import Decision
from vgpu_agent.model import DeviceRoom, Inventory, Share
from vgpu_agent.pods import ContainerKind, PodContainer

HALF_FULL = (
    msgspec.structs.replace(
        ROOMS[0], memory_free_mib=10000, cores_free_percent=50, holders=1, holders_free=9
    ),
    ROOMS[1],
)


def _placed(
    container: PodContainer,
    *,
    ids: int = 1,
    rooms: tuple[DeviceRoom, ...] = ROOMS,
    annotations: dict[str, str] | None = None,
    **options: object,
) -> tuple[Share, ...]:
    of = family(**options)
    return of.decide(
        question(pod(container, annotations=annotations), ids=ids, rooms=rooms, of=of)
    ).shares


def test_binpack_and_spread() -> None:
    """The GPU that has less left, or the unused one. The decision names its maker."""
    ask = main(number=1, memory=3000, cores=20)
    about = question(pod(ask), rooms=HALF_FULL)
    assert family(policy="binpack").decide(about) == Decision(
        (Share(U0, 3000, 20),), "the agent, binpack"
    )
    assert family(policy="spread").decide(about) == Decision(
        (Share(U1, 3000, 20),), "the agent, spread"
    )


@pytest.mark.parametrize(
    ("ask", "share"),
    [
        (main(number=1), Share(U0, 24576, 0)),
        (main(number=1, memory=0), Share(U0, 24576, 0)),
        (main(number=1, percentage=50), Share(U0, 12288, 0)),
        (main(number=1, memory=3000, percentage=25), Share(U0, 6144, 0)),
        (main(number=1, memory=3000, cores=100), Share(U0, 3000, 100)),
    ],
)
def test_amounts(ask: PodContainer, share: Share) -> None:
    """A whole GPU by default. A percentage wins over a number of units."""
    assert _placed(ask) == (share,)


def test_a_percentage_counts_the_scaled_memory() -> None:
    """``volcano-vgpu:D8``: half of a GPU that is offered twice is all of it."""
    rooms = tuple(
        msgspec.structs.replace(room, memory_mib=49152, memory_free_mib=49152) for room in ROOMS
    )
    assert _placed(main(number=1, percentage=50), rooms=rooms, memory_scaling=2.0, factor=2) == (
        Share(U0, 24576, 0),
    )


def test_whole_units_only() -> None:
    """With 5 MiB a unit the whole GPU is 4915 units, and memory is never a part of one."""
    assert _placed(main(number=1), factor=5) == (Share(U0, 24575, 0),)
    assert _placed(main(number=1, memory=100), factor=5) == (Share(U0, 500, 0),)


def test_two_are_two_cards_in_order_of_preference() -> None:
    """Each with the full amount."""
    assert _placed(main(number=2, memory=3000), ids=2, rooms=HALF_FULL) == (
        Share(U0, 3000, 0),
        Share(U1, 3000, 0),
    )


def test_all_compute_needs_a_card_of_its_own() -> None:
    """A GPU with holders is passed over."""
    assert _placed(main(number=1, memory=3000, cores=100), rooms=HALF_FULL) == (
        Share(U1, 3000, 100),
    )


@pytest.mark.parametrize(
    ("annotations", "device"),
    [
        ({"volcano.sh/vgpu-use-gpuuuid": U1}, U1),
        ({"volcano.sh/vgpu-nouse-gpuuuid": U0}, U1),
        ({"nvidia.com/use-gputype": "a10"}, U0),
        ({"nvidia.com/nouse-gputype": "V100"}, U0),
        ({"volcano.sh/vgpu-mode": "hami-core"}, U0),
    ],
)
def test_what_the_pod_wants_is_heeded(annotations: dict[str, str], device: str) -> None:
    """Types and UUIDs as under Volcano's scheduler."""
    assert _placed(main(number=1, memory=3000), annotations=annotations) == (
        Share(device, 3000, 0),
    )


def test_a_type_that_the_node_does_not_have() -> None:
    """The text names the GPUs' type and the pod's request."""
    with pytest.raises(
        CapacityError, match=f"{U0}, {U1}: its type NVIDIA-NVIDIA A10 is none of 'H100'"
    ):
        _placed(main(number=1, memory=3000), annotations={"nvidia.com/use-gputype": "H100"})


@pytest.mark.parametrize("mode", ["mig", "", "\x00" * 5000])
def test_another_mode_is_refused(mode: str) -> None:
    """A pod that wants a MIG instance does not get a share of a GPU instead."""
    with pytest.raises(
        RequestRefusedError,
        match=(
            r"pod team/p1: annotation volcano.sh/vgpu-mode=.*: this node shares GPUs as hami-core"
        ),
    ):
        _placed(main(number=1, memory=3000), annotations={"volcano.sh/vgpu-mode": mode})


def test_too_little_room_says_what_was_asked_and_what_there_is() -> None:
    """Enough in sum and not on one card: the user reads both numbers."""
    rooms = (HALF_FULL[0], msgspec.structs.replace(ROOMS[1], memory_free_mib=11000, holders=1))
    with pytest.raises(CapacityError) as caught:
        _placed(main(number=1, memory=12000, cores=60), rooms=rooms)
    assert str(caught.value) == (
        "1 × volcano.sh/vgpu-number (volcano.sh/vgpu-memory: 12000, volcano.sh/vgpu-cores: 60) "
        f"cannot be placed on this node: {U0}: 10000 MiB free of 24576, 12000 wanted; {U1}: 11000 "
        "MiB free of 24576, 12000 wanted"
    )


def test_an_ill_card_is_passed_over() -> None:
    """Its trouble is why."""
    assert _placed(
        main(number=1), rooms=(msgspec.structs.replace(ROOMS[0], trouble="XID 79"), ROOMS[1])
    ) == (Share(U1, 24576, 0),)


def test_hidden_and_mig_cards_are_never_placed_on() -> None:
    """A card that is not offered is not given, even if the ledger knows it."""
    assert _placed(main(number=1), hidden_indices=frozenset({0})) == (Share(U1, 24576, 0),)
    split = Inventory(
        1, (msgspec.structs.replace(INVENTORY.gpus[0], mig_enabled=True), INVENTORY.gpus[1])
    )
    assert family().decide(question(pod(main(number=1)), inventory=split)).shares == (
        Share(U1, 24576, 0),
    )


def test_an_init_container_of_an_undecided_pod_is_placed_as_any_other() -> None:
    """Without a scheduler nothing is set aside for the containers after it."""
    about = pod(main("init", ContainerKind.INIT, number=2, memory=500), main(number=1, memory=3000))
    assert family().decide(question(about, "init", ids=2)).shares == (
        Share(U0, 500, 0),
        Share(U1, 500, 0),
    )


def test_the_second_container_of_a_pod_that_the_agent_placed() -> None:
    """The agent's text for the first container has an empty segment for the second,
    which the agent places too.
    """
    mains = (main("a", number=1, memory=3000), main(number=1, memory=2000))
    about = pod(*mains, annotations=decided(f"{U1},NVIDIA,3000,0:;"))
    assert family().decide(question(about)) == Decision((Share(U0, 2000, 0),), "the agent, binpack")
    assert family().decide(question(about, "a")).shares == (Share(U1, 3000, 0),)
