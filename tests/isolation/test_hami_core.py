"""The backend hami-core, by the golden vectors in volcano-vgpu §10."""

from __future__ import annotations

import struct

import msgspec
import pytest

from vgpu_agent.errors import RequestRefusedError, UnhealthyDeviceError
from vgpu_agent.isolation.backend import Backend, Target
from vgpu_agent.isolation.edits import HostDirectory, Mount
from vgpu_agent.isolation.hami_core import DECISIVE, HamiCore
from vgpu_agent.model import Gpu, Share

U0 = Gpu("GPU-11111111-aaaa-bbbb-cccc-000000000001", 0, 0, "NVIDIA A10", 24576, "0000:07:00.0")
U1 = Gpu("GPU-22222222-aaaa-bbbb-cccc-000000000002", 1, 1, "NVIDIA A10", 24576, "0000:0f:00.0")
LIBRARY = "/usr/local/vgpu/libvgpu.so.0123456789ab"
H = "/usr/local/vgpu"
BACKEND = HamiCore(H, LIBRARY)


def target(
    *shares: tuple[Gpu, int, int], environment: frozenset[str] = frozenset(), **more: bool
) -> Target:
    """The container of volcano-vgpu G4, with (GPU, MiB, percent)."""
    return Target(
        "uid-p1",
        "main",
        "0123456789abcdef",
        environment,
        tuple((gpu, Share(gpu.uuid, memory, cores)) for gpu, memory, cores in shares),
        **more,
    )


def cache(backend_target: Target) -> str:
    """The name of the region's file."""
    return (
        BACKEND.provision(backend_target)
        .edits.environment["CUDA_DEVICE_MEMORY_SHARED_CACHE"]
        .removeprefix("/tmp/vgpu/")
    )


def region_limits(backend_target: Target) -> tuple[list[str], list[int], list[int]]:
    """Return the limits in the region: uuids, MiB, percent."""
    parts = dict(BACKEND.provision(backend_target).files[0].parts)
    (count,) = struct.unpack("<Q", parts[56])
    uuids = [
        parts[64][96 * place : 96 * (place + 1)].rstrip(b"\0").decode() for place in range(count)
    ]
    memory = [value >> 20 for value in struct.unpack("<16Q", parts[1600])[:count]]
    return uuids, memory, list(struct.unpack("<16Q", parts[1728])[:count])


def test_one_card_gets_exactly_the_golden_environment() -> None:
    """volcano-vgpu:G4: limit, cores and cache, and nothing else.
    What names the cards is the family's affair.
    """
    environment = dict(BACKEND.provision(target((U1, 3000, 50))).edits.environment)
    assert environment.pop("CUDA_DEVICE_MEMORY_SHARED_CACHE").startswith("/tmp/vgpu/")
    assert environment == {"CUDA_DEVICE_MEMORY_LIMIT_0": "3000m", "CUDA_DEVICE_SM_LIMIT": "50"}


def test_the_golden_mounts_without_the_directories() -> None:
    """volcano-vgpu:G4, with the library under its own name, and the region where a program without
    its environment looks, too (hami-core §0.3.2). The mounts of /tmp/vgpu and /tmp/vgpulock are
    left out on purpose: what a container can write is never a directory of the host, since it could
    put a link in the place of the region, which is mounted at the next start. Fact 3: the library
    needs no writable directory.
    """
    wanted = target((U1, 3000, 50))
    region = f"{H}/vgpu/regions/uid-p1_main/{cache(wanted)}"
    assert BACKEND.provision(wanted).edits.mounts == (
        Mount("/usr/local/vgpu/libvgpu.so", LIBRARY, read_only=True),
        Mount("/etc/ld.so.preload", f"{H}/ld.so.preload", read_only=True),
        Mount("/tmp/cudevshr.cache", region),
        Mount(f"/tmp/vgpu/{cache(wanted)}", region),
    )


def test_two_cards_get_a_limit_each() -> None:
    """volcano-vgpu:G6, plus the order that makes CUDA count as the limits do."""
    environment = dict(BACKEND.provision(target((U1, 3000, 50), (U0, 3000, 50))).edits.environment)
    del environment["CUDA_DEVICE_MEMORY_SHARED_CACHE"]
    assert environment == {
        "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
        "CUDA_DEVICE_MEMORY_LIMIT_1": "3000m",
        "CUDA_DEVICE_SM_LIMIT": "50",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def test_limits_are_numbered_as_the_container_counts_its_cards() -> None:
    """volcano-vgpu:D22: by PCI bus id, whatever order the annotation has. The compute limit is that
    of the first in the annotation.
    """
    wanted = target((U1, 8000, 20), (U0, 2000, 70))
    environment = BACKEND.provision(wanted).edits.environment
    assert [environment[f"CUDA_DEVICE_MEMORY_LIMIT_{place}"] for place in range(2)] == [
        "2000m",
        "8000m",
    ]
    assert environment["CUDA_DEVICE_SM_LIMIT"] == "20"
    assert region_limits(wanted) == ([U0.uuid, U1.uuid], [2000, 8000], [70, 20])


def test_bus_ids_are_compared_as_numbers() -> None:
    """A domain of five digits comes after one of four, capitals or not.
    Without bus ids the minor number decides.
    """
    far = msgspec.structs.replace(U0, uuid="GPU-far", pci_bus_id="10000:01:00.0")
    middle = msgspec.structs.replace(U0, uuid="GPU-middle", pci_bus_id="0000:0A:00.0")
    assert region_limits(target((far, 1, 0), (U1, 2, 0), (middle, 3, 0)))[0] == [
        "GPU-middle",
        U1.uuid,
        "GPU-far",
    ]
    first, second = (
        msgspec.structs.replace(U0, pci_bus_id="", minor=4),
        msgspec.structs.replace(U1, pci_bus_id="", minor=3),
    )
    assert region_limits(target((first, 1, 0), (second, 2, 0)))[0] == [U1.uuid, U0.uuid]


def test_a_pod_that_turns_the_library_off_is_not_preloaded() -> None:
    """volcano-vgpu §4.1: the variable's name is enough, whatever its value,
    where the operator lets it count.
    """
    wanted = target((U1, 3000, 50), environment=frozenset({"CUDA_DISABLE_CONTROL"}))
    honoring = msgspec.structs.replace(BACKEND, disable_variable="honor").provision(wanted)
    without = [
        mount
        for mount in BACKEND.provision(wanted).edits.mounts
        if mount.container_path != "/etc/ld.so.preload"
    ]
    assert list(honoring.edits.mounts) == without
    assert len(without) == 3


def test_a_spec_sets_all_that_a_limit_depends_on() -> None:
    """There the agent's value beats the image's and the pod's. In an answer to Allocate it is the
    replaced plugin's, to the letter.
    """
    late = msgspec.structs.replace(BACKEND, late=True)
    more = {"GPU_CORE_UTILIZATION_POLICY": "force", "CUDA_REDIRECT": "/usr/local/vgpu/libvgpu.so"}
    wanted = target((U1, 3000, 50))
    assert late.provision(wanted).edits.environment == {
        **BACKEND.provision(wanted).edits.environment,
        **more,
    }
    assert late.provision(wanted).edits.environment.keys() >= DECISIVE
    off = late.provision(target((U1, 3000, 50), limit_cores=False)).edits.environment
    assert off["GPU_CORE_UTILIZATION_POLICY"] == "disable"


def test_a_whole_card_is_limited_to_its_memory() -> None:
    """A limit of 0 would be none, and the program would see a card
    without memory (hami-core §0.3.5).
    """
    wanted = target((U1, 0, 0))
    assert BACKEND.provision(wanted).edits.environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == "24576m"
    assert BACKEND.provision(wanted).edits.environment["CUDA_DEVICE_SM_LIMIT"] == "0"
    assert region_limits(wanted) == ([U1.uuid], [24576], [100])


def test_a_card_of_unknown_memory_is_refused() -> None:
    """It is better that the container starts later than without a limit."""
    with pytest.raises(UnhealthyDeviceError, match=f"memory of {U1.uuid} is not known yet"):
        BACKEND.provision(target((msgspec.structs.replace(U1, memory_mib=0), 0, 0)))


def test_more_cards_than_the_library_counts_are_refused() -> None:
    """The seventeenth would have no limit."""
    many = [(msgspec.structs.replace(U0, uuid=f"GPU-{number}"), 1000, 0) for number in range(17)]
    with pytest.raises(RequestRefusedError, match="17 GPUs, and hami-core limits at most 16"):
        BACKEND.provision(target(*many))


def test_two_shares_of_one_card_are_one_limit() -> None:
    """The container counts the card once. A second number would be another card's."""
    assert region_limits(target((U1, 3000, 30), (U1, 2000, 40))) == ([U1.uuid], [5000], [70])


def test_oversubscription_is_told() -> None:
    """volcano-vgpu §4.1; the library does not read it, programs may."""
    assert (
        BACKEND.provision(target((U1, 3000, 50), oversubscribed=True)).edits.environment[
            "CUDA_OVERSUBSCRIBE"
        ]
        == "true"
    )


def test_cores_are_not_limited_where_the_operator_says_so() -> None:
    """By the variable, and in the region for shells that do not have it.
    What was booked is still passed.
    """
    wanted = target((U1, 3000, 50), limit_cores=False)
    provision = BACKEND.provision(wanted)
    assert provision.edits.environment["GPU_CORE_UTILIZATION_POLICY"] == "disable"
    assert provision.edits.environment["CUDA_DEVICE_SM_LIMIT"] == "50"
    assert region_limits(wanted)[2] == [100]
    assert dict(provision.files[0].parts)[2_008_900][:4] == b"\0\0\0\0"


def test_the_region_is_a_file_for_everybody_in_the_grants_own_directory() -> None:
    """2,008,953 bytes, 0666, its space taken on the disk, in a directory that only root may write
    to and that goes with the grant.
    """
    provision = BACKEND.provision(target((U1, 3000, 50)))
    directory = f"{H}/vgpu/regions/uid-p1_main"
    assert provision.directories == (
        HostDirectory(f"{H}/vgpu"),
        HostDirectory(f"{H}/vgpu/regions"),
        HostDirectory(directory),
    )
    assert {each.mode for each in provision.directories} == {0o755}
    assert provision.earlier_directory == f"{H}/vgpu/containers/uid-p1_main"
    assert provision.files[0].allocated
    assert [
        (file.size, file.mode, file.path.startswith(f"{directory}/")) for file in provision.files
    ] == [(2_008_953, 0o666, True)]
    assert [offset for offset, _ in provision.files[0].renewed] == [1_600, 1_728]
    assert provision.own_directory == directory


def test_a_restarted_container_finds_the_same_name_and_another_grant_another() -> None:
    """The name has the form of a random UUID and is made from the grant."""
    mine = target((U1, 3000, 50))
    assert cache(mine) == cache(
        msgspec.structs.replace(mine, shares=((U1, Share(U1.uuid, 4000, 50)),))
    )
    assert cache(mine) != cache(msgspec.structs.replace(mine, grant="another"))
    assert [len(part) for part in cache(mine).removesuffix(".cache").split("-")] == [8, 4, 4, 4, 12]
    assert cache(mine)[14] == "4"


def test_a_newer_library_is_mounted_by_grants_made_from_then_on() -> None:
    """The installer sets the new path, and running containers keep theirs (volcano-vgpu:D21)."""
    changing = HamiCore(H, LIBRARY)
    backend: Backend = changing
    changing.library_path = "/usr/local/vgpu/libvgpu.so.newer"
    assert (
        backend.provision(target((U1, 3000, 50))).edits.mounts[0].host_path
        == "/usr/local/vgpu/libvgpu.so.newer"
    )
    assert (backend.name, changing.preload_path) == ("hami-core", f"{H}/ld.so.preload")
