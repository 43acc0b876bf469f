"""A decision put in force: the family with its isolation backend and the ledger (volcano-vgpu §4.1,
§9).
"""

from __future__ import annotations

import re

import msgspec
import pytest

from tests.families.volcano_vgpu.golden import (
    G3,
    INVENTORY,
    NUMBER,
    U0,
    U1,
    decided,
    family,
    main,
    pod,
    question,
)
from vgpu_agent.errors import CapacityError, UnhealthyDeviceError
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.volcano_vgpu.family import VolcanoVgpuFamily, VolcanoVgpuOptions
from vgpu_agent.isolation.backend import Target
from vgpu_agent.isolation.edits import DeviceNode, Edits, Mount, Provision
from vgpu_agent.isolation.hami_core import HamiCore
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import Inventory, Owner, Share

H = "/usr/local/vgpu"
CACHE = re.compile(
    r"/tmp/vgpu/[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\.cache"
)
ONE = pod(main(number=1, memory=3000, cores=50), annotations=decided(G3))
ENABLED = {"NVIDIA_GDRCOPY": "enabled", "NVIDIA_GDS": "enabled", "NVIDIA_MOFED": "enabled"}


class _Recorder:
    """A backend that keeps what it was asked."""

    name = "recorder"

    def __init__(self) -> None:
        self.targets: list[Target] = []

    def provision(self, target: Target) -> Provision:
        self.targets.append(target)
        return Provision(
            Edits(environment={"ASKED": str(len(self.targets))}), own_directory="/a/directory"
        )


def _limited(**options: object) -> VolcanoVgpuFamily:
    return VolcanoVgpuFamily(
        msgspec.structs.replace(VolcanoVgpuOptions(factor=1), **options),
        HamiCore(H, f"{H}/libvgpu.so"),
    )


def test_g4_what_the_container_is_told() -> None:
    """``volcano-vgpu:G4``: every variable of the golden answer, and its mounts of files,
    from the pod's annotation alone.

    Its mounts of directories are left out: `tests/isolation/test_hami_core.py` says why.
    """
    of = _limited()
    asked = question(ONE, of=of)
    provision = of.provision(asked, of.decide(asked).shares)
    environment = dict(provision.edits.environment)
    cache = environment.pop("CUDA_DEVICE_MEMORY_SHARED_CACHE")
    assert CACHE.fullmatch(cache)
    assert environment == {
        "NVIDIA_VISIBLE_DEVICES": U1,
        **ENABLED,
        "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
        "CUDA_DEVICE_SM_LIMIT": "50",
    }
    assert provision.edits.mounts[:2] == (
        Mount("/usr/local/vgpu/libvgpu.so", f"{H}/libvgpu.so", read_only=True),
        Mount("/etc/ld.so.preload", f"{H}/ld.so.preload", read_only=True),
    )
    assert not provision.edits.annotations
    assert not provision.edits.device_nodes
    assert not provision.edits.cdi_names


def test_g6_two_cards() -> None:
    """``volcano-vgpu:G6``: both are visible in the order of the annotation,
    and each has its limit.
    """
    of = _limited()
    annotations = decided(f"{U1},NVIDIA,3000,50:{U0},NVIDIA,3000,50:")
    asked = question(
        pod(main(number=2, memory=3000, cores=50), annotations=annotations), ids=2, of=of
    )
    environment = of.provision(asked, of.decide(asked).shares).edits.environment
    assert environment["NVIDIA_VISIBLE_DEVICES"] == f"{U1},{U0}"
    assert (
        environment["CUDA_DEVICE_MEMORY_LIMIT_0"],
        environment["CUDA_DEVICE_MEMORY_LIMIT_1"],
    ) == ("3000m", "3000m")
    assert environment["CUDA_DEVICE_SM_LIMIT"] == "50"


def test_unequal_limits_meet_their_cards() -> None:
    """``volcano-vgpu:D22``: CUDA counts cards by PCI bus, so limit 0 is that of U0,
    though the annotation names U1 first.
    """
    of = _limited()
    environment = of.provision(
        question(ONE, of=of), (Share(U1, 4000, 0), Share(U0, 2000, 0))
    ).edits.environment
    assert (
        environment["CUDA_DEVICE_MEMORY_LIMIT_0"],
        environment["CUDA_DEVICE_MEMORY_LIMIT_1"],
    ) == ("2000m", "4000m")
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_more_than_there_is_says_so() -> None:
    """``volcano-vgpu:D8``: scaling of memory tells the library,
    and a compute limit that is switched off is off.
    """
    of = _limited(memory_scaling=1.5)
    assert (
        of.provision(question(ONE), (Share(U1, 3000, 50),)).edits.environment["CUDA_OVERSUBSCRIBE"]
        == "true"
    )
    off = (
        _limited(limit_cores=False)
        .provision(question(ONE), (Share(U1, 3000, 50),))
        .edits.environment
    )
    assert off["GPU_CORE_UTILIZATION_POLICY"] == "disable"
    assert "CUDA_OVERSUBSCRIBE" not in off


def test_the_backend_is_told_whose_limits_these_are() -> None:
    """The grant's name is the same after any restart, and no other container has it."""
    recorder = _Recorder()
    of = VolcanoVgpuFamily(VolcanoVgpuOptions(), recorder)
    container = msgspec.structs.replace(
        main(number=1, memory=3000, cores=50), environment=frozenset({"CUDA_DISABLE_CONTROL"})
    )
    asked = question(pod(container, annotations=decided(G3)))
    provision = of.provision(asked, (Share(U1, 3000, 50),))
    assert recorder.targets == [
        Target(
            "uid-p1",
            "main",
            f"uid-p1/main/{NUMBER}",
            frozenset({"CUDA_DISABLE_CONTROL"}),
            ((INVENTORY.gpus[1], Share(U1, 3000, 50)),),
        )
    ]
    assert provision.edits.environment["ASKED"] == "1"
    assert provision.own_directory == "/a/directory"


def test_what_the_runtime_is_asked_for_can_be_switched_off() -> None:
    """One variable a setting."""
    edits = (
        family(lists=ListOptions(enabled=("gds",)))
        .provision(question(ONE), (Share(U1, 3000, 50),))
        .edits
    )
    assert edits.environment == {"NVIDIA_VISIBLE_DEVICES": U1, "NVIDIA_GDS": "enabled"}


def test_device_nodes_and_indices_where_asked_for() -> None:
    """NVIDIA's plugin does the same: control nodes first, paths below the driver root,
    NVML's index instead of the UUID.
    """
    lists = ListOptions(
        pass_device_specs=True,
        device_root="/run/driver",
        control_nodes=("/dev/nvidiactl",),
        id_strategy="index",
    )
    of = family(lists=lists)
    edits = of.provision(question(ONE), (Share(U1, 3000, 50), Share(U0, 3000, 50))).edits
    assert edits.environment == {"NVIDIA_VISIBLE_DEVICES": "1,0"}
    assert edits.device_nodes == tuple(
        DeviceNode(f"/dev/{name}", f"/run/driver/dev/{name}")
        for name in ("nvidiactl", "nvidia1", "nvidia0")
    )


def test_cards_are_told_by_cdi_annotation_where_asked_for() -> None:
    """volcano-vgpu:G10: as G4 without the variable that names the cards, and one annotation with
    their CDI names and those of modes.
    """
    lists = ListOptions(
        strategies=("cdi-annotations",), enabled=("gdrcopy", "gds", "mofed"), cdi_modes=("gdrcopy",)
    )
    edits = family(lists=lists).provision(question(ONE), (Share(U1, 3000, 50),)).edits
    assert edits.environment == {
        "NVIDIA_GDRCOPY": "enabled",
        "NVIDIA_GDS": "enabled",
        "NVIDIA_MOFED": "enabled",
    }
    ((key, names),) = edits.annotations.items()
    assert re.fullmatch(r"cdi\.k8s\.io/nvidia-device-plugin_[0-9a-f-]{36}", key)
    assert (
        names == f"k8s.device-plugin.nvidia.com/gpu={U1},k8s.device-plugin.nvidia.com/gdrcopy=all"
    )
    assert edits == family(lists=lists).provision(question(ONE), (Share(U1, 3000, 50),)).edits, (
        "kubelet's copy is compared with ours"
    )


def test_cards_are_told_by_mounts_where_asked_for() -> None:
    """volcano-vgpu:G10: the variable points to a directory,
    and the mount that names the card comes before those of the library.
    """
    of = VolcanoVgpuFamily(
        VolcanoVgpuOptions(lists=ListOptions(strategies=("volume-mounts",))),
        HamiCore("/h", "/h/libvgpu.so.1"),
    )
    edits = of.provision(question(ONE), (Share(U1, 3000, 50),)).edits
    assert edits.environment["NVIDIA_VISIBLE_DEVICES"] == "/var/run/nvidia-container-devices"
    assert edits.mounts[0] == Mount(f"/var/run/nvidia-container-devices/{U1}", "/dev/null")
    assert edits.mounts[1].container_path == "/usr/local/vgpu/libvgpu.so"


def test_a_card_that_is_gone_starts_nobody() -> None:
    """A container without one of its GPUs would run with the wrong limits.
    The refusal names the card, and kubelet asks again.
    """
    without = Inventory(2, INVENTORY.gpus[:1])
    with pytest.raises(
        UnhealthyDeviceError, match=f"GPU {U1} was decided for the container and is missing"
    ):
        family().provision(question(ONE, inventory=without), (Share(U1, 3000, 50),))


def test_the_ledger_refuses_what_a_scheduler_gave_twice() -> None:
    """``volcano-vgpu:D17``: a scheduler that has forgotten a pod places another on its memory. The
    second one is refused, not both.
    """
    of, ledger = family(), Ledger()
    ledger.observe(INVENTORY)
    ledger.offer(of.resources(INVENTORY))
    about = pod(main(number=1, memory=20000), annotations=decided(f"{U1},NVIDIA,20000,0:"))
    shares = of.decide(question(about)).shares
    ledger.decide(NUMBER, [f"{U0}-1"], shares, Owner("main", "uid-p1", "team", "p1"))
    with pytest.raises(CapacityError, match=r"20000 MiB booked \+ 20000 wanted, of 24576"):
        ledger.decide(NUMBER, [f"{U0}-2"], shares, Owner("main", "uid-p2", "team", "p2"))


def test_what_the_agent_places_the_ledger_takes() -> None:
    """The rooms that placement sees are those that the ledger books in, with scaling. The node
    fills up to the last MiB and no further.
    """
    of, ledger = family(memory_scaling=1.5, factor=2, policy="spread"), Ledger()
    ledger.observe(INVENTORY)
    ledger.offer(of.resources(INVENTORY))
    about = pod(main(number=1, memory=6144))
    for number in range(6):
        asked = question(about, rooms=ledger.rooms(NUMBER), of=of)
        ledger.decide(
            NUMBER,
            [f"{U0}-{number}"],
            of.decide(asked).shares,
            Owner("main", f"uid-{number}", "team", f"p{number}"),
        )
    assert ledger.audit() == []
    with pytest.raises(CapacityError, match="0 MiB free of 36864, 12288 wanted"):
        of.decide(question(about, rooms=ledger.rooms(NUMBER), of=of))
