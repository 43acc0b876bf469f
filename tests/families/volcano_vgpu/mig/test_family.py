"""`volcano-vgpu` in the operating mode mig:
annotations that name instances, and what becomes of them.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.families.volcano_vgpu.golden import NODE, NUMBER, U0, U1, decided, main, pod
from tests.families.volcano_vgpu.mig.parts import (
    GEOMETRIES,
    GROUP2,
    a_gpu,
    ask,
    mig_family,
    node,
    taken,
)
from vgpu_agent.errors import CapacityError, ConfigError, RequestRefusedError, UnhealthyDeviceError
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.family import MigLayout, NodeView
from vgpu_agent.families.volcano_vgpu.decisions import DECISION
from vgpu_agent.families.volcano_vgpu.mig.layouts import read_place, slots_of
from vgpu_agent.families.volcano_vgpu.node_state import REGISTER
from vgpu_agent.isolation.edits import Edits
from vgpu_agent.model import DeviceRoom, Grant, Inventory, Share
from vgpu_agent.nodes import Node
from vgpu_agent.pods import ContainerKind, Pod

ASKED = main(number=1, memory=8000)


def a_pod(place: str, memory: int = 8000) -> Pod:
    """Pod ``team/p1`` for which a scheduler has written ``place``."""
    return pod(ASKED, annotations=decided(f"{place},NVIDIA,{memory},0:"))


def held_share(uuid: str, memory_mib: int) -> Share:
    """All of an instance, for one container alone."""
    return Share(uuid, memory_mib, 100, exclusive=True)


# -- what a scheduler has decided ------------------------------------------------------------------


def test_g12_a_place_is_an_instance_whatever_was_asked() -> None:
    """volcano-vgpu:G12: 8000 asked for on ``group2-0`` is a whole 2g.10gb, which a scheduler counts
    with 10240 and the driver with 9856.
    """
    decision = mig_family().decide(ask(a_pod(f"{U1}[group2-0]"), node(of_u1=GROUP2)))
    assert decision.shares == (held_share("MIG-2-0", 9856),)
    assert decision.by == "the scheduler, in volcano.sh/vgpu-ids-new"
    slot = slots_of(U1, GEOMETRIES[0].groups[1])[0]
    assert (slot.text, slot.memory_mib) == (f"{U1}[group2-0]", 10240)


def test_g12_a_gpu_that_is_not_divided_so_is_to_be_divided_first() -> None:
    """volcano-vgpu:G12: on an empty card the decision is how to divide it,
    and no share exists yet.
    """
    decision = mig_family().decide(ask(a_pod(f"{U1}[group2-0]"), node()))
    assert (decision.shares, decision.layouts) == ((), (MigLayout(U1, GROUP2),))


def test_a_position_counts_through_the_geometries_and_not_as_the_driver_does() -> None:
    """The driver lists the small instance first;
    position 3 of group2 is still the 1g.5gb, and position 0 a 2g.10gb.
    """
    inventory = node(of_u1=("1g.5gb", "2g.10gb", "2g.10gb", "2g.10gb"))
    small = mig_family().decide(ask(a_pod(f"{U1}[group2-3]", 5000), inventory))
    assert small.shares == (held_share("MIG-2-0", 4864),)
    assert mig_family().decide(ask(a_pod(f"{U1}[group2-0]"), inventory)).shares == (
        held_share("MIG-2-1", 9856),
    )


def test_a_position_stays_the_same_instance_however_the_driver_lists_them() -> None:
    """NVML's order of instances is its own affair.
    What they are numbered by stays while the card is divided as it is.
    """
    u0, u1 = node(of_u1=GROUP2).gpus
    turned = msgspec.structs.replace(u1, mig_instances=u1.mig_instances[::-1])
    for inventory in (Inventory(version=1, gpus=(u0, u1)), Inventory(version=2, gpus=(u0, turned))):
        assert mig_family().decide(ask(a_pod(f"{U1}[group2-0]"), inventory)).shares == (
            held_share("MIG-2-0", 9856),
        )


def test_d15_an_instance_that_is_taken_is_exchanged_for_another_of_its_size() -> None:
    """volcano-vgpu:D15: two pods of one round get the same instance from the scheduler. The second
    gets another, and this is reported.
    """
    decision = mig_family().decide(
        ask(a_pod(f"{U1}[group2-0]"), node(of_u1=GROUP2), held=taken(MIG_2_0="other"))
    )
    assert decision.shares == (held_share("MIG-2-1", 9856),)
    assert f"{U1}[group2-0] is held by team/other" in decision.why_not_named
    assert f"so it is {U1}[group2-1] (MIG-2-1)" in decision.why_not_named
    assert decision.why_not_named in decision.by


def test_d15_without_another_of_its_size_the_pod_alone_is_refused() -> None:
    """volcano-vgpu:D15: an instance of another size is no answer. The error names the holders."""
    held = taken(MIG_2_0="a", MIG_2_1="b", MIG_2_2="c")
    with pytest.raises(
        CapacityError, match=r"all 3 of GPU GPU-2.* are held, by team/a .*team/b .*team/c"
    ):
        mig_family().decide(ask(a_pod(f"{U1}[group2-1]"), node(of_u1=GROUP2), held=held))


def test_d16_a_whole_gpu_is_refused_in_mig_mode() -> None:
    """volcano-vgpu:D16: a scheduler that knows no geometry falls back to whole cards,
    which are not given out without any limit.
    """
    with pytest.raises(
        RequestRefusedError, match="is a whole GPU, and this node shares MIG instances"
    ):
        mig_family().decide(ask(a_pod(U1), node(of_u1=GROUP2)))


def test_a_gpu_of_which_somebody_has_a_part_is_not_divided_anew() -> None:
    """Once a card has a group in use, only that group.
    The message names the division and the holder.
    """
    with pytest.raises(
        CapacityError, match=r"divided into 2 × 3g.20gb, and team/other .* has a part of it.*group2"
    ):
        mig_family().decide(
            ask(
                a_pod(f"{U1}[group2-0]"),
                node(of_u1=("3g.20gb", "3g.20gb")),
                held=taken(MIG_2_1="other"),
            )
        )


def test_a_gpu_that_somebody_has_as_a_whole_is_not_divided() -> None:
    """A container from before the mode was changed keeps its card."""
    with pytest.raises(CapacityError, match="not divided, and team/old"):
        mig_family().decide(ask(a_pod(f"{U1}[group2-0]"), node(), held=taken(U1="old")))


@pytest.mark.parametrize(
    ("place", "memory", "expected"),
    [
        (
            "[group9-0]",
            8000,
            "no group 'group9' for NVIDIA A100-SXM4-40GB, it has group1, group2, group3, group4",
        ),
        ("[group2-4]", 8000, "group2 has 4 instances, and position 4 is none of them"),
        ("[group2-3]", 8000, "is a 1g.5gb of 5120 MiB, and 8000 MiB were asked for"),
        ("[group2]", 8000, "is not of the form <UUID>"),
        ("[group2--1]", 8000, "is not of the form <UUID>"),
        ("[group2-0", 8000, "is not of the form <UUID>"),
        ("[group2-0]", 9000, "do not fit the request of container main"),
    ],
)
def test_a_place_that_makes_no_sense_costs_its_pod(place: str, memory: int, expected: str) -> None:
    """This holds for every writer: the text names what is wrong, and nothing is given."""
    with pytest.raises(RequestRefusedError, match=expected.replace("[", r"\[")):
        mig_family().decide(ask(a_pod(U1 + place, memory), node(of_u1=GROUP2)))


def test_two_instances_are_of_two_cards() -> None:
    """A number of 2 is one instance of each of two cards.
    When one has to be divided first, nothing is given yet.
    """
    about = pod(
        main(number=2, memory=8000),
        annotations=decided(f"{U1}[group2-1],NVIDIA,8000,0:{U0}[group3-0],NVIDIA,8000,0:"),
    )
    family = mig_family()
    first = family.decide(ask(about, node(of_u1=GROUP2), ids=2))
    assert (first.shares, first.layouts) == ((), (MigLayout(U0, ("3g.20gb", "3g.20gb")),))
    then = family.decide(ask(about, node("3g.20gb", "3g.20gb", of_u1=GROUP2), ids=2))
    assert [share.device for share in then.shares] == ["MIG-2-1", "MIG-1-0"]


def test_an_init_container_works_on_the_instance_of_the_container_after_it() -> None:
    """A scheduler sets nothing aside for init containers."""
    before = main("init", ContainerKind.INIT, number=1, memory=8000)
    about = pod(before, ASKED, annotations=decided(f"{U1}[group2-2],NVIDIA,8000,0:"))
    assert mig_family().decide(ask(about, node(of_u1=GROUP2), container="init")).shares == (
        held_share("MIG-2-2", 9856),
    )


def test_a_running_container_is_remembered_by_its_place() -> None:
    """After a restart its pod alone says what it has, also while others hold the rest; unless the
    card is divided otherwise by now.
    """
    about = a_pod(f"{U1}[group2-1]")
    recalled = mig_family().recall(ask(about, node(of_u1=GROUP2)))
    assert recalled is not None
    assert recalled.shares == (held_share("MIG-2-1", 9856),)
    assert mig_family().recall(ask(about, node(of_u1=("3g.20gb", "3g.20gb")))) is None
    assert mig_family().recall(ask(a_pod(U1), node(of_u1=GROUP2))) is None


# -- where the agent decides -----------------------------------------------------------------------


def test_without_a_scheduler_the_smallest_instance_that_is_large_enough_is_taken() -> None:
    """A card that is already divided is used before any card is divided anew."""
    decision = mig_family().decide(ask(pod(main(number=1, memory=5000)), node(of_u1=GROUP2)))
    assert (decision.shares, decision.by) == ((held_share("MIG-2-3", 4864),), "the agent, MIG")


def test_without_a_scheduler_an_empty_card_is_divided_by_the_first_group_that_fits() -> None:
    """In the order of the geometries, as a scheduler tries them."""
    assert mig_family().decide(ask(pod(main(number=1, memory=5000)), node())).layouts == (
        MigLayout(U0, ("1g.5gb",) * 7),
    )
    assert mig_family().decide(ask(pod(main(number=1, memory=12000)), node())).layouts == (
        MigLayout(U0, ("3g.20gb",) * 2),
    )
    assert mig_family().decide(ask(pod(main(number=1)), node())).layouts == (
        MigLayout(U0, ("7g.40gb",)),
    )


def test_without_a_scheduler_a_card_in_use_is_not_divided_anew() -> None:
    """The error says of each card that it has no room, and which pods are in the way."""
    inventory = node("1g.5gb", "1g.5gb", of_u1=("3g.20gb", "3g.20gb"))
    held = taken(MIG_1_1="small", MIG_2_0="a", MIG_2_1="b")
    with pytest.raises(
        CapacityError, match=r"0 GPUs have a MIG instance.*team/small .*has a part of it.*team/a"
    ):
        mig_family().decide(ask(pod(main(number=1, memory=12000)), inventory, held=held))


def test_a_pod_that_wants_the_other_mode_is_refused() -> None:
    """``volcano.sh/vgpu-mode`` is held against the node's mode."""
    about = pod(ASKED, annotations={"volcano.sh/vgpu-mode": "hami-core"})
    with pytest.raises(RequestRefusedError, match="this node shares GPUs as mig"):
        mig_family().decide(ask(about, node()))
    assert (
        mig_family()
        .decide(ask(pod(ASKED, annotations={"volcano.sh/vgpu-mode": "mig"}), node()))
        .layouts
    )


# -- what a container receives ---------------------------------------------------------------------


def test_a_container_is_told_of_its_instances_and_of_nothing_else() -> None:
    """Only the visible devices and the further devices that are switched on: no limit, no library,
    no mount (volcano-vgpu §4.3.5).
    """
    question = ask(a_pod(f"{U1}[group2-0]"), node(of_u1=GROUP2))
    provision = mig_family().provision(
        question, (held_share("MIG-2-0", 9856), held_share("MIG-2-3", 4864))
    )
    assert provision.edits == Edits(
        {
            "NVIDIA_VISIBLE_DEVICES": "MIG-2-0,MIG-2-3",
            "NVIDIA_GDRCOPY": "enabled",
            "NVIDIA_GDS": "enabled",
            "NVIDIA_MOFED": "enabled",
        }
    )
    assert (provision.directories, provision.files, provision.own_directory) == ((), (), "")


def test_an_instance_that_is_gone_is_not_told_of() -> None:
    """Nothing is started without its device."""
    with pytest.raises(
        UnhealthyDeviceError,
        match="MIG instance MIG-9-9 was decided for the container and is missing",
    ):
        mig_family().provision(
            ask(a_pod(f"{U1}[group2-0]"), node(of_u1=GROUP2)), (held_share("MIG-9-9", 1),)
        )


# -- what is in the cluster ------------------------------------------------------------------------


def desired_for(place: str, device: str, *, instead: str = "") -> dict[str, str | None]:
    """Return the desired state of the pod for which ``place`` was written and
    that holds ``device``.
    """
    family = mig_family()
    family.resources(node(of_u1=GROUP2))
    written = decided(instead) if instead else decided(f"{place},NVIDIA,8000,0:")
    about = pod(ASKED, annotations=written if place else None)
    grant = Grant(
        1,
        "volcano-vgpu",
        NUMBER,
        (f"{U0}-0",),
        (held_share(device, 9856),),
        decided_for=("uid-p1", "main"),
    )
    return dict(family.desired_pod(about, {"main": grant}, failed=False).annotations)


def test_what_is_held_stands_on_the_pod() -> None:
    """volcano-vgpu:D15: a scheduler counts by the annotation, so the place is put right and the
    amounts stay; requested, not charged.
    """
    desired_state = desired_for(f"{U1}[group2-0]", "MIG-2-1")
    assert desired_state[DECISION] == f"{U1}[group2-1],NVIDIA,8000,0:"
    assert desired_state["volcano.sh/devices-to-allocate"] == ""
    assert desired_state["volcano.sh/bind-phase"] == "success"


def test_what_a_scheduler_has_named_rightly_stays() -> None:
    """volcano-vgpu:G12: the amount in the annotation is what was asked for,
    not what the instance has.
    """
    assert DECISION not in desired_for(f"{U1}[group2-0]", "MIG-2-0")


def test_a_pod_that_the_agent_has_placed_gets_its_place_written() -> None:
    """With what it asked for, so that schedulers count the instance as taken."""
    desired_state = desired_for("", "MIG-2-2")
    assert (desired_state[DECISION], desired_state["volcano.sh/vgpu-node"]) == (
        f"{U1}[group2-2],NVIDIA,8000,0:",
        NODE,
    )


def test_a_place_that_cannot_be_told_any_more_stays_as_it_is() -> None:
    """A card that was divided otherwise since, or an annotation that makes no sense:
    nothing is guessed.
    """
    assert DECISION not in desired_for(f"{U1}[group2-0]", "MIG-9-9")
    assert DECISION not in desired_for(f"{U1}[group2-0]", "MIG-2-0", instead="nonsense")


def view(inventory: Inventory, **room: Any) -> NodeView:
    """The Node as it is, with nothing on it."""
    rooms = tuple(
        msgspec.structs.replace(DeviceRoom(gpu.uuid, "", 40960), **room) for gpu in inventory.gpus
    )
    return NodeView(Node(NODE), inventory, {NUMBER: rooms}, {}, 0.0)


def test_the_register_annotation_names_the_mode() -> None:
    """In each entry, because a scheduler uses the last one.
    The memory is the card's, whether it is divided or not.
    """
    desired_state = mig_family().desired_node(view(node(of_u1=GROUP2)))
    entry = "10,40960,NVIDIA-NVIDIA A100-SXM4-40GB,true,mig:"
    assert desired_state.annotations[REGISTER] == f"{U0},{entry}{U1},{entry}"
    assert desired_state.labels["vgpu-agent.internal/volcano-vgpu-isolation"] == "mig"


def test_a_card_that_somebody_has_as_a_whole_is_announced_as_full() -> None:
    """Until the last container from before the mode was changed has ended."""
    desired_state = mig_family().desired_node(view(node(), holders=1))
    assert (desired_state.annotations[REGISTER] or "").startswith(
        f"{U0},0,40960,NVIDIA-NVIDIA A100-SXM4-40GB,false,mig:"
    )


def test_only_cards_that_somebody_knows_how_to_divide_are_offered() -> None:
    """Cards in MIG mode and others. A card of another model is left out,
    and a node without any says what is missing.
    """
    a10 = msgspec.structs.replace(a_gpu(U1, index=1), name="NVIDIA A10")
    offered = mig_family().resources(Inventory(version=1, gpus=(a_gpu(U0, *GROUP2), a10)))
    assert {entry.device for resource in offered for entry in resource.ids} == {U0}
    with pytest.raises(
        ConfigError,
        match=(
            r"volcanoVgpu.operatingMode is mig, and knownMigGeometries .* has no entry for NVIDIA "
            r"A10"
        ),
    ):
        mig_family().resources(Inventory(version=1, gpus=(a10,)))


def test_a_card_that_is_hidden_needs_no_geometries() -> None:
    """Neither is it offered, nor does the message about missing geometries name it."""
    known, a10 = a_gpu(U0, *GROUP2), msgspec.structs.replace(a_gpu(U1, index=1), name="NVIDIA A10")
    both = Inventory(version=1, gpus=(known, a10))
    assert mig_family(hidden_uuids=frozenset({U0, U1})).resources(both) == ()
    with pytest.raises(ConfigError, match=r"has no entry for NVIDIA A10;"):
        mig_family(hidden_uuids=frozenset({U0})).resources(both)


def test_a_card_that_is_left_out_is_told_with_its_model() -> None:
    """Volcano would only see fewer cards. Those that the node configuration hides are left out on
    purpose, and none at all is an error.
    """
    known, a10 = a_gpu(U0, *GROUP2), msgspec.structs.replace(a_gpu(U1, index=1), name="NVIDIA A10")
    mixed = Inventory(version=1, gpus=(known, a10))
    (caution,) = mig_family().cautions(mixed)
    assert caution == (
        f"GPU 1 ({U1}): nothing of it is offered, because volcanoVgpu.operatingMode is mig, and "
        "knownMigGeometries of the ConfigMap volcano-vgpu-device-config has no entry for NVIDIA "
        "A10; add one, or leave such GPUs out by filterdevices in the node configuration"
    )
    assert mig_family(hidden_uuids=frozenset({U1})).cautions(mixed) == ()
    assert mig_family().cautions(Inventory(version=1, gpus=(known,))) == ()
    assert mig_family().cautions(Inventory(version=1, gpus=(a10,))) == ()
    (named,) = mig_family(set_in=(("operatingMode", "config.json"),)).cautions(mixed)
    assert "operatingMode in config.json is mig" in named


def test_scaling_does_not_make_instances_larger() -> None:
    """An instance has what it has, so memory is announced unscaled and a share
    of all compute always fits.
    """
    family = mig_family(memory_scaling=1.8, cores_scaling=0.5)
    number = next(resource for resource in family.resources(node()) if resource.name == NUMBER)
    assert (number.memory_scaling, number.cores_scaling) == (1.0, 1.0)
    assert ",40960," in (family.desired_node(view(node())).annotations[REGISTER] or "")


def test_a_place_is_read_or_it_is_none() -> None:
    """Group names have no ``-``, so the last one is the separator."""
    assert read_place("GPU-1[group2-0]") == ("GPU-1", "group2", 0)
    assert [
        read_place(text)
        for text in ("GPU-1", "GPU-1[a-b-0]", "GPU-1[g-0]x", "[g-0]", "GPU-1[g-99999]", "")
    ] == [None] * 6


def test_lists_of_the_node_apply_to_instances() -> None:
    """volcano-vgpu:G10: by CDI annotation an instance is named like a card,
    and without the variable.
    """
    family = mig_family(lists=ListOptions(strategies=("cdi-annotations",)))
    edits = family.provision(
        ask(a_pod(f"{U1}[group2-0]"), node(of_u1=GROUP2)), (held_share("MIG-2-0", 9856),)
    ).edits
    ((key, value),) = edits.annotations.items()
    assert key.startswith("cdi.k8s.io/nvidia-device-plugin_")
    assert value == "k8s.device-plugin.nvidia.com/gpu=MIG-2-0"
    assert edits.environment == {}
