"""Check that a CDI name still opens its device,
by the device nodes that NVIDIA's tool writes into its specs.
"""

from __future__ import annotations

import pytest

from tests.golden import U0, U1
from vgpu_agent.cdi.named_devices import Place, opens_another, places, present_cards
from vgpu_agent.model import Gpu, Inventory, MigInstance

M3 = "MIG-cccccccc-0000-5000-8000-000000000003"
CAPS = ("/dev/nvidia-caps/nvidia-cap228", "/dev/nvidia-caps/nvidia-cap229")


def place_of(uuid: str, *gpus: Gpu) -> Place:
    """Return the place of the device on a node with these GPUs."""
    return dict(places(present_cards(Inventory(1, gpus))))[uuid]


WHOLE = place_of(U0, Gpu(U0, index=0, minor=4, name="A100", memory_mib=81920))
SLICE = place_of(
    M3,
    Gpu(
        U1,
        index=1,
        minor=1,
        name="A100",
        memory_mib=81920,
        mig_enabled=True,
        mig_instances=(MigInstance(M3, 3, 9, 0, "1g.10gb", 9728, capability_nodes=CAPS),),
    ),
)
WITHOUT_NODE = place_of(U0, Gpu(U0, index=0, minor=-1, name="RTX 4090", memory_mib=24564))


@pytest.mark.parametrize(
    ("paths", "place"),
    [
        (["/dev/nvidia4", "/dev/dri/card1", "/dev/dri/renderD128"], WHOLE),
        (
            [
                "/dev/nvidiactl",
                "/dev/nvidia-uvm",
                "/dev/nvidia-uvm-tools",
                "/dev/nvidia-modeset",
                "/dev/nvidia4",
            ],
            WHOLE,
        ),
        (["/dev/nvidia1", *CAPS], SLICE),
        (["/dev/dxg"], WHOLE),
        ([], WHOLE),
        (["/dev/nvhost-ctrl-gpu", "/dev/nvmap"], WHOLE),
        (["/dev/dxg"], WITHOUT_NODE),
        (["/dev/nvidia0"], WITHOUT_NODE),
    ],
)
def test_what_opens_the_device_or_tells_nothing_is_its_name(paths: list[str], place: Place) -> None:
    """Specs of NVIDIA's tool for a GPU whose minor number is not its index, a slice, WSL and CSV
    mode. Doubt withholds nothing.
    """
    assert not opens_another(paths, place)


@pytest.mark.parametrize(
    ("paths", "place"),
    [
        (["/dev/nvidia0"], WHOLE),
        (["/dev/nvidia4", "/dev/nvidia5"], WHOLE),
        (["/dev/nvidia0", *CAPS], SLICE),
    ],
)
def test_what_opens_another_gpu_is_not_its_name(paths: list[str], place: Place) -> None:
    """The driver has counted anew since the spec was made,
    or a hand-made spec gives more than the one GPU.
    """
    assert opens_another(paths, place)


def test_a_gpu_without_a_device_node_has_none() -> None:
    """Nothing is made up where the driver knows no minor number, as under WSL."""
    assert (WITHOUT_NODE.position, WITHOUT_NODE.nodes) == ("0", ())
