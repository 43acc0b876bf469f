"""The list strategies against the answers of nvidia §17.2, down to the bytes that kubelet reads."""

from __future__ import annotations

import base64
import itertools
import uuid
from typing import Any

import msgspec
import pytest

from tests.golden import U0, U1
from vgpu_agent.families.device_lists import (
    STRATEGIES,
    ListOptions,
    VisibleDevice,
    answer_id,
    cdi_names,
    edits_of,
    visible_device,
)
from vgpu_agent.grpc import wire
from vgpu_agent.isolation.edits import DeviceNode, Edits, Mount
from vgpu_agent.kubelet import codec
from vgpu_agent.model import Gpu, Inventory, MigInstance

M3 = "MIG-cccccccc-0000-5000-8000-000000000003"
M4 = "MIG-cccccccc-0000-5000-8000-000000000004"
CONTROL_NODES = (
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/dev/nvidia-uvm-tools",
    "/dev/nvidia-modeset",
)
A = [VisibleDevice(U0, "0", ("/dev/nvidia0",))]
B = [*A, VisibleDevice(U1, "1", ("/dev/nvidia1",))]
D = [
    VisibleDevice(
        M3,
        "1:3",
        ("/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap228", "/dev/nvidia-caps/nvidia-cap229"),
    )
]
ANSWER_ID = "11111111-2222-4333-8444-555555555555"


def answer(devices: list[VisibleDevice], options: ListOptions) -> Edits:
    """Return the container's edits, after a way through the bytes that the kubelet keeps."""
    edits = edits_of(devices, options, answer_id=ANSWER_ID)
    (container,) = wire.messages(codec.encode_allocate([edits]), 1)
    assert codec.decode_answer(bytes(container)) == edits
    return edits


def by(*strategies: str, **options: Any) -> ListOptions:
    """Options with these strategies."""
    return msgspec.structs.replace(ListOptions(strategies=strategies), **options)


def test_the_variable_names_the_devices_in_request_order() -> None:
    """nvidia:A1, nvidia:A2, nvidia:A3, nvidia:A4:
    UUIDs of GPUs or slices, separated by commas, and nothing else.
    """
    assert answer(A, by("envvar")) == Edits({"NVIDIA_VISIBLE_DEVICES": U0})
    assert answer(B, by("envvar")) == Edits({"NVIDIA_VISIBLE_DEVICES": f"{U0},{U1}"})
    assert answer(B[::-1], by("envvar")) == Edits({"NVIDIA_VISIBLE_DEVICES": f"{U1},{U0}"})
    assert answer(D, by("envvar")) == Edits({"NVIDIA_VISIBLE_DEVICES": M3})


def test_the_variable_names_indices_where_asked_for() -> None:
    """nvidia:A5: ``0`` of a GPU and ``1:3`` of a slice."""
    assert answer(A, by("envvar", id_strategy="index")).environment == {
        "NVIDIA_VISIBLE_DEVICES": "0"
    }
    assert answer(D, by("envvar", id_strategy="index")).environment == {
        "NVIDIA_VISIBLE_DEVICES": "1:3"
    }


def test_mounts_name_the_devices() -> None:
    """nvidia:A6: the variable points to a directory,
    and each device is a mount of /dev/null in it.
    """
    mounts = (Mount(f"/var/run/nvidia-container-devices/{U0}", "/dev/null"),)
    assert answer(A, by("volume-mounts")) == Edits(
        {"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"}, mounts
    )


def test_an_annotation_carries_the_cdi_names() -> None:
    """nvidia:A7: no variable, one annotation whose name ends with a UUID."""
    assert answer(A, by("cdi-annotations")) == Edits(
        annotations={
            f"cdi.k8s.io/nvidia-device-plugin_{ANSWER_ID}": f"k8s.device-plugin.nvidia.com/gpu={U0}"
        }
    )


def test_the_annotation_prefix_can_be_another() -> None:
    """nvidia:A8: ``example.org/``, and two names separated by a comma."""
    kind = "k8s.device-plugin.nvidia.com/gpu"
    assert answer(B, by("cdi-annotations", cdi_annotation_prefix="example.org/")) == Edits(
        annotations={f"example.org/nvidia-device-plugin_{ANSWER_ID}": f"{kind}={U0},{kind}={U1}"}
    )


def test_the_field_of_the_device_plugin_api_carries_the_cdi_names() -> None:
    """nvidia:A9, nvidia:A10: by UUID, or by index where asked for."""
    assert answer(A, by("cdi-cri")) == Edits(cdi_names=(f"k8s.device-plugin.nvidia.com/gpu={U0}",))
    assert answer(D, by("cdi-cri", id_strategy="index")) == Edits(
        cdi_names=("k8s.device-plugin.nvidia.com/gpu=1:3",)
    )


@pytest.mark.parametrize(
    ("strategy", "golden"),
    [
        (
            "envvar",
            "CkIKFk5WSURJQV9WSVNJQkxFX0RFVklDRVMSKEdQVS1hYWFhYWFhYS0wMDAwLTQwMDAtODAwMC0wMDAwMDAwMDAwMDA=",
        ),
        (
            "cdi-cri",
            "KksKSWs4cy5kZXZpY2UtcGx1Z2luLm52aWRpYS5jb20vZ3B1PUdQVS1hYWFhYWFhYS0wMDAwLTQwMDAtODAwMC0wMDAwMDAwMDAwMDA=",
        ),
    ],
)
def test_the_bytes_are_those_of_the_replaced_plugin(strategy: str, golden: str) -> None:
    """nvidia:A1 and nvidia:A9 as one container's deterministic protobuf."""
    (container,) = wire.messages(
        codec.encode_allocate([edits_of(A, by(strategy), answer_id=ANSWER_ID)]), 1
    )
    assert base64.b64encode(container).decode() == golden


def test_names_come_in_order_gpus_channels_modes() -> None:
    """nvidia:A11: GPU, IMEX channel, GDS; GDS is also asked for by its variable."""
    options = by("cdi-cri", imex_channels=(0,), enabled=("gds",), cdi_modes=("gds",))
    vendor = "k8s.device-plugin.nvidia.com"
    assert answer(A, options) == Edits(
        {"NVIDIA_GDS": "enabled"},
        cdi_names=(f"{vendor}/gpu={U0}", f"{vendor}/imex-channel=0", f"{vendor}/gds=all"),
    )
    modes = ("mofed", "gds", "gdrcopy")
    names = cdi_names(A, msgspec.structs.replace(options, enabled=modes, cdi_modes=modes))
    assert names[2:] == (f"{vendor}/gdrcopy=all", f"{vendor}/gds=all", f"{vendor}/mofed=all")


def test_a_mode_without_a_spec_has_no_name() -> None:
    """A node without GDS has nothing to inject,
    and a name that cannot be resolved would keep every container from starting.
    """
    assert answer(A, by("cdi-cri", enabled=("gds",))).cdi_names == (
        f"k8s.device-plugin.nvidia.com/gpu={U0}",
    )


def test_names_of_the_toolkits_spec_have_its_vendor() -> None:
    """With ``cdi.source: toolkit`` all classes are nvidia.com's."""
    options = by("cdi-cri", cdi_kind="nvidia.com/gpu", imex_channels=(0,))
    assert answer(A, options).cdi_names == (f"nvidia.com/gpu={U0}", "nvidia.com/imex-channel=0")


def test_imex_channels_by_variable() -> None:
    """nvidia:A12: one variable more."""
    assert answer(A, by("envvar", imex_channels=(0,))) == Edits(
        {"NVIDIA_VISIBLE_DEVICES": U0, "NVIDIA_IMEX_CHANNELS": "0"}
    )


def test_imex_channels_by_mount() -> None:
    """nvidia:A13: one mount more, below ``imex``."""
    directory = "/var/run/nvidia-container-devices"
    assert answer(A, by("volume-mounts", imex_channels=(0,))) == Edits(
        {"NVIDIA_VISIBLE_DEVICES": directory},
        (Mount(f"{directory}/{U0}", "/dev/null"), Mount(f"{directory}/imex/0", "/dev/null")),
    )


def test_two_strategies_together_give_both_answers() -> None:
    """nvidia:A14: the variable of A1 and the name of A9."""
    assert answer(A, by("envvar", "cdi-cri")) == answer(A, by("envvar")).joined(
        answer(A, by("cdi-cri"))
    )


def test_the_variable_of_the_mounts_wins() -> None:
    """nvidia:A15: with envvar and volume-mounts together, whichever of them is named first,
    the answer is that of the mounts.
    """
    assert (
        answer(A, by("envvar", "volume-mounts"))
        == answer(A, by("volume-mounts", "envvar"))
        == answer(A, by("volume-mounts"))
    )


def test_device_nodes_go_with_the_variable() -> None:
    """nvidia:A16: the control nodes that exist, then the GPU's, read and write."""
    paths = [
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
        "/dev/nvidia-modeset",
        "/dev/nvidia0",
    ]
    assert answer(A, by("envvar", pass_device_specs=True, control_nodes=CONTROL_NODES)) == Edits(
        {"NVIDIA_VISIBLE_DEVICES": U0},
        device_nodes=tuple(DeviceNode(path, path, "rw") for path in paths),
    )


def test_device_nodes_of_a_driver_in_a_container() -> None:
    """nvidia:A17: on the host they lie below the driver's root,
    in the container where they always are.
    """
    edits = answer(
        A,
        by("envvar", pass_device_specs=True, device_root="/run/nvidia/driver", imex_channels=(0,)),
    )
    channel = "/dev/nvidia-caps-imex-channels/channel0"
    assert edits.device_nodes == (
        DeviceNode("/dev/nvidia0", "/run/nvidia/driver/dev/nvidia0"),
        DeviceNode(channel, f"/run/nvidia/driver{channel}"),
    )


def test_device_nodes_of_a_slice() -> None:
    """nvidia:A18: the node of its GPU, and the two capabilities that open GPU instance
    and compute instance.
    """
    edits = answer(D, by("envvar", pass_device_specs=True, control_nodes=CONTROL_NODES[:1]))
    assert [node.container_path for node in edits.device_nodes] == [
        "/dev/nvidiactl",
        "/dev/nvidia1",
        "/dev/nvidia-caps/nvidia-cap228",
        "/dev/nvidia-caps/nvidia-cap229",
    ]


def test_a_device_node_is_listed_once() -> None:
    """nvidia:D13: two slices of one GPU need its node once."""
    other = VisibleDevice(
        M4,
        "1:4",
        ("/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap237", "/dev/nvidia-caps/nvidia-cap238"),
    )
    paths = [
        node.container_path
        for node in answer([*D, other], by("envvar", pass_device_specs=True)).device_nodes
    ]
    assert paths.count("/dev/nvidia1") == 1
    assert len(paths) == 5


def test_device_nodes_are_left_to_cdi_where_all_strategies_are_cdi() -> None:
    """The spec has them; next to another strategy they are listed."""
    assert not answer(A, by("cdi-cri", "cdi-annotations", pass_device_specs=True)).device_nodes
    assert answer(A, by("cdi-cri", "envvar", pass_device_specs=True)).device_nodes


def test_modes_are_asked_for_by_variables() -> None:
    """nvidia:A25: GDRCopy, GDS and Mellanox devices, in every strategy."""
    modes = {"NVIDIA_GDRCOPY": "enabled", "NVIDIA_GDS": "enabled", "NVIDIA_MOFED": "enabled"}
    for strategy in STRATEGIES:
        options = by(strategy, enabled=("gdrcopy", "gds", "mofed"))
        plain = answer(A, msgspec.structs.replace(options, enabled=()))
        assert answer(A, options) == msgspec.structs.replace(
            plain, environment={**modes, **plain.environment}
        )


@pytest.mark.parametrize(
    "chosen", [each for size in range(1, 5) for each in itertools.combinations(STRATEGIES, size)]
)
def test_any_combination_is_the_sum_of_its_strategies(chosen: tuple[str, ...]) -> None:
    """Nothing is lost when strategies are combined,
    but the variable that one of them sets over the other.
    """
    edits = answer(B, by(*chosen))
    for strategy in chosen:
        alone = answer(B, by(strategy))
        assert set(alone.mounts) <= set(edits.mounts)
        assert set(alone.cdi_names) <= set(edits.cdi_names)
        assert alone.annotations.items() <= edits.annotations.items()
        assert alone.environment.keys() <= edits.environment.keys()


def test_the_id_of_an_answer_is_a_uuid_that_only_its_ids_make() -> None:
    """A repeated Allocate, in any order of the ids, gets the same.
    Other ids or another resource get another.
    """
    found = answer_id("nvidia.com/gpu", [U0, U1])
    assert uuid.UUID(found).version == 4
    assert found == answer_id("nvidia.com/gpu", [U1, U0])
    assert (
        len(
            {
                found,
                answer_id("nvidia.com/gpu", [U0]),
                answer_id("nvidia.com/gpu.shared", [U0, U1]),
            }
        )
        == 3
    )


def test_a_device_is_found_by_its_uuid() -> None:
    """A GPU with its minor number, which is not its index,
    and a slice with the nodes that open it.
    """
    slice_ = MigInstance(
        M3,
        3,
        10,
        0,
        "1g.5gb",
        4864,
        1,
        1,
        ("/dev/nvidia-caps/nvidia-cap228", "/dev/nvidia-caps/nvidia-cap229"),
    )
    inventory = Inventory(
        gpus=(Gpu(U0, 0, 4, "A100", 40960), Gpu(U1, 1, 1, "A100", 40960, mig_instances=(slice_,)))
    )
    assert visible_device(U0, inventory) == VisibleDevice(U0, "0", ("/dev/nvidia4",))
    assert visible_device(M3, inventory) == D[0]
    assert visible_device("GPU-unknown", inventory) is None


def test_a_gpu_without_a_device_node_has_none() -> None:
    """Under WSL its minor number is not known,
    and there is nothing of that kind to name to kubelet.
    """
    assert visible_device(U0, Inventory(1, (Gpu(U0, 0, -1, "A100", 81920),))) == VisibleDevice(
        U0, "0", ()
    )
