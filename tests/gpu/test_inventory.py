"""Reading the GPUs, and joining a reading with what was known before."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from vgpu_agent.errors import NvmlError
from vgpu_agent.gpu import inventory
from vgpu_agent.gpu.capabilities import Capabilities
from vgpu_agent.gpu.health import Probe, RecoveryAction
from vgpu_agent.gpu.inventory import Card, NumaNodes, Reading
from vgpu_agent.gpu.nvml import Handle, Nvml, sysfs_address
from vgpu_agent.model import Gpu, Health
from vgpu_agent.sim.state import SimulatedNode

ADDRESS = "0000:07:00.0"


def _gpu(number: int, index: int | None = None) -> Gpu:
    return Gpu(
        f"GPU-{number}",
        number if index is None else index,
        number,
        "A100",
        81920,
        pci_bus_id=f"0000:{number:02x}:00.0",
    )


def _reading(*gpus: Gpu) -> Reading:
    return Reading(tuple(Card(gpu, Handle(None), Probe()) for gpu in gpus))


def _numa_file(root: Path, text: str | bytes) -> NumaNodes:
    path = root / "bus" / "pci" / "devices" / ADDRESS / "numa_node"
    path.parent.mkdir(parents=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return NumaNodes(root)


def test_every_fact_of_a_gpu_is_read(node: SimulatedNode, nvml: Nvml) -> None:
    """Identity, memory, place, capability and state, each as the model wants it."""
    card = inventory.read(
        nvml, NumaNodes(node.directory / "sys"), Capabilities(node.directory / "proc")
    ).cards[2]

    assert card.gpu == Gpu(
        uuid=node.uuids[2],
        index=2,
        minor=2,
        name="NVIDIA A100-SXM4-80GB",
        memory_mib=81920,
        pci_bus_id="0000:17:00.0",
        numa_node=1,
        compute_capability=(8, 0),
        mig_capable=True,
    )
    assert card.probe == Probe()


def test_mig_instances_are_read_with_their_ids_and_profiles(
    node: SimulatedNode, nvml: Nvml
) -> None:
    """nvidia §4: index j of ``i:j``, the MIG UUID, GI and CI ids,
    and NVML's name of the profile.
    """
    node.set_mig(0, ["3g.40gb", "1g.10gb"])

    gpu = (
        inventory.read(
            nvml, NumaNodes(node.directory / "sys"), Capabilities(node.directory / "proc")
        )
        .cards[0]
        .gpu
    )

    assert gpu.mig_enabled
    assert [
        (instance.index, instance.uuid, instance.profile) for instance in gpu.mig_instances
    ] == [
        (0, node.mig_uuids(0)[0], "3g.40gb"),
        (1, node.mig_uuids(0)[1], "1g.10gb"),
    ]
    assert gpu.mig_instances[0].gpu_instance_id != gpu.mig_instances[1].gpu_instance_id
    assert 9000 < gpu.mig_instances[1].memory_mib < 11000


def test_probe_facts_are_read(node: SimulatedNode, nvml: Nvml) -> None:
    """The facts are the recovery action that the driver wants,
    and a row that waits for its replacement.
    """
    node.recovery_action(0, "drain-and-reset")
    node.remap(1, uncorrected=1, pending=True)

    cards = inventory.read(
        nvml, NumaNodes(node.directory / "sys"), Capabilities(node.directory / "proc")
    ).cards

    assert cards[0].probe == Probe(recovery_action=RecoveryAction.DRAIN_AND_RESET)
    assert cards[1].probe == Probe(remap_pending=True)


def test_a_driver_that_does_not_know_recovery_actions_asks_for_none(
    node: SimulatedNode, nvml: Nvml
) -> None:
    """Older than the field: its GPUs recover without it."""
    node.recovery_action(0, "unsupported")

    assert (
        inventory.read(
            nvml, NumaNodes(node.directory / "sys"), Capabilities(node.directory / "proc")
        )
        .cards[0]
        .probe
        == Probe()
    )


def test_optional_facts_that_the_driver_refuses_are_left_out(
    node: SimulatedNode, nvml: Nvml
) -> None:
    """NotSupported, FunctionNotFound and NoPermission are normal answers:
    no failure, no error counted.
    """
    node.fault("nvmlDeviceGetMigMode", code=3)
    node.fault("nvmlDeviceGetRemappedRows", code=13)
    node.fault("nvmlDeviceGetTemperature", code=4)
    node.fault("nvmlDeviceGetMemoryInfo_v2", code=13, times=4)

    reading = inventory.read(
        nvml, NumaNodes(node.directory / "sys"), Capabilities(node.directory / "proc")
    )

    assert len(reading.cards) == 4
    assert reading.failures == ()
    assert nvml.errors == 0


def test_a_gpu_without_a_device_node_is_read_all_the_same(node: SimulatedNode, nvml: Nvml) -> None:
    """Under WSL the driver has no minor numbers (k8s-device-plugin issue 332): containers get
    ``/dev/dxg`` there, and all GPUs.
    """
    node.fault("nvmlDeviceGetMinorNumber", code=3)

    reading = inventory.read(
        nvml, NumaNodes(node.directory / "sys"), Capabilities(node.directory / "proc")
    )

    assert [card.gpu.minor for card in reading.cards] == [-1, -1, -1, -1]
    assert reading.failures == ()


def test_a_display_card_is_skipped(node: SimulatedNode, nvml: Nvml) -> None:
    """nvidia §3: the graphics card of a DGX Station is not for work, and not a failure."""
    node.state.gpus[1].name = b"NVIDIA DGX Display"

    reading = inventory.read(
        nvml, NumaNodes(node.directory / "sys"), Capabilities(node.directory / "proc")
    )

    assert [card.gpu.uuid for card in reading.cards] == [
        node.uuids[0],
        node.uuids[2],
        node.uuids[3],
    ]
    assert reading.failures == ()


@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetPciInfo", "nvmlDeviceGetMinorNumber"],
)
def test_a_gpu_without_identity_is_a_failure_of_its_own(
    node: SimulatedNode, nvml: Nvml, function: str
) -> None:
    """A card that cannot be named cannot be offered. The others can (iktos:D11)."""
    node.fault(function, gpu=1, code=999)

    reading = inventory.read(
        nvml, NumaNodes(node.directory / "sys"), Capabilities(node.directory / "proc")
    )

    assert [card.gpu.index for card in reading.cards] == [0, 2, 3]
    assert len(reading.failures) == 1
    assert reading.failures[0].startswith("1: nvmlDevice")


def test_without_a_count_there_is_no_reading(node: SimulatedNode, nvml: Nvml) -> None:
    """Then it is the driver that fails, and the caller says so."""
    node.fault("nvmlDeviceGetCount", code=999)

    with pytest.raises(NvmlError, match="nvmlDeviceGetCount: Unknown Error"):
        inventory.read(
            nvml, NumaNodes(node.directory / "sys"), Capabilities(node.directory / "proc")
        )


def test_numa_nodes_come_from_sysfs(tmp_path: Path) -> None:
    """nvidia §4: the number in ``numa_node``."""
    assert _numa_file(tmp_path, "1\n").node(ADDRESS) == (1, "")


def test_a_machine_without_numa_nodes_is_no_trouble(tmp_path: Path) -> None:
    """Most virtual machines say -1; an H100 in one made a warning at each start of the agent."""
    assert _numa_file(tmp_path, "-1\n").node(ADDRESS) == (None, "")


@pytest.mark.parametrize(
    "text", ["-2\n", "", "banana", "1 2", "٣", b"\xff\xfe", "9" * 100_000, "-"]
)
def test_a_useless_numa_file_costs_the_node_and_is_said_once(
    tmp_path: Path, text: str | bytes
) -> None:
    """Negative, empty, junk or far too long: no NUMA node, one warning that names the file."""
    numa = _numa_file(tmp_path, text)

    node, warning = numa.node(ADDRESS)

    assert node is None
    assert ADDRESS in warning
    assert numa.node(ADDRESS) == (node, "")


def test_a_change_of_what_is_wrong_is_said_again(tmp_path: Path) -> None:
    """Unreadable, then readable, then unreadable: two warnings, as two things happened."""
    numa = _numa_file(tmp_path, "0")
    path = tmp_path / "bus" / "pci" / "devices" / ADDRESS / "numa_node"
    path.unlink()

    first = numa.node(ADDRESS)
    path.write_text("0")
    second = numa.node(ADDRESS)
    path.unlink()
    third = numa.node(ADDRESS)

    assert first[0] is None
    assert "No such file" in first[1]
    assert second == (0, "")
    assert third == first


@pytest.mark.parametrize(
    ("bus_id", "address"),
    [
        ("00000000:07:00.0", ADDRESS),
        ("00000001:AF:00.0", "0001:af:00.0"),
        ("0000:07:00.0", ADDRESS),
        (b"00000000:07:00.0", ADDRESS),
        ("", ""),
    ],
)
def test_bus_ids_are_written_as_sysfs_writes_them(bus_id: str | bytes, address: str) -> None:
    """nvidia §4: lower case, and a domain cut from eight digits to four."""
    assert sysfs_address(bus_id) == address


def test_a_missing_gpu_keeps_its_place_on_the_bus() -> None:
    """The card in the middle was pulled and NVML renumbered the last one."""
    known = (_gpu(1, 0), _gpu(2, 1), _gpu(3, 2))

    merged = inventory.merge(known, _reading(_gpu(1, 0), _gpu(3, 1)))

    assert [(gpu.uuid, gpu.present) for gpu in merged] == [
        ("GPU-1", True),
        ("GPU-2", False),
        ("GPU-3", True),
    ]


def test_a_reading_leaves_health_alone() -> None:
    """Health is judged elsewhere: the facts are new, the verdict stays."""
    ill = Health(ok=False, reason="XID 79")

    merged = inventory.merge(
        (msgspec.structs.replace(_gpu(1), health=ill, memory_mib=1),), _reading(_gpu(1))
    )

    assert merged == (msgspec.structs.replace(_gpu(1), health=ill),)


def test_all_gpus_can_be_missing() -> None:
    """No GPU is forgotten."""
    known = (_gpu(1), _gpu(2))

    merged = inventory.merge(known, Reading())

    assert [gpu.uuid for gpu in merged] == ["GPU-1", "GPU-2"]
    assert not any(gpu.present for gpu in merged)
