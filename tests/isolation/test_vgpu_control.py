"""The backend vgpu-control, by the golden vectors in vgpu-manager §13.4 and §13.5."""

from __future__ import annotations

import hashlib
import re

import msgspec
import pytest

from vgpu_agent.errors import RequestRefusedError, UnhealthyDeviceError
from vgpu_agent.isolation.edits import HostDirectory, HostFile, Mount, Provision
from vgpu_agent.isolation.vgpu_control import (
    LIBRARY,
    CardLimit,
    ComputePolicy,
    ControlBackend,
    ControlTarget,
    VgpuControl,
    slot_limit,
)

H = "/etc/vgpu-manager"
INSTALLED = f"{H}/libvgpu-control.so.0123456789ab"
UUID = "GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28"
NO_CARD = "GPU-00000000-0000-0000-0000-000000000000"
POD_UID = "6d0f1c3e-52a4-4c0b-9f2c-1f6f2b3a4d5e"
C = f"{H}/containers/{POD_UID}_default"
CARD = CardLimit(0, UUID, 10, 1024, card_memory_mib=24576)
TARGET = ControlTarget(
    POD_UID,
    "gpu-pod",
    "default",
    "default",
    (f"{UUID}::3",),
    (CARD,),
    driver_version="570.86.10",
    cuda_version="12.8",
)
# as the vectors have it, with the host's /proc
AS_REPLACED = VgpuControl(
    H, INSTALLED, processes="host-proc", sm_watcher=True, tracks_virtual_memory=True
)
BACKEND: ControlBackend = msgspec.structs.replace(AS_REPLACED, processes="client")


def content(provision: Provision, path: str) -> bytes:
    """The whole content of a file of the container."""
    (file,) = [file for file in provision.files if file.path == f"{C}/{path}"]
    whole = bytearray(file.size)
    for offset, part in file.parts:
        whole[offset : offset + len(part)] = part
    return bytes(whole)


def test_the_golden_environment() -> None:
    """vgpu-manager:§13.4: every variable, those that are empty included, because they override an
    image's own. What names the cards to the runtime is the family's affair.
    """
    assert AS_REPLACED.provision(TARGET).edits.environment == {
        "VGPU_POD_NAME": "gpu-pod",
        "VGPU_POD_NAMESPACE": "default",
        "VGPU_POD_UID": POD_UID,
        "VGPU_CONTAINER_NAME": "default",
        "CUDA_MEM_RATIO": "1.00",
        "CUDA_MEM_LIMIT_0": "1024m",
        "CUDA_CORE_LIMIT": "",
        "CUDA_CORE_SOFT_LIMIT": "",
        "CUDA_CORE_LIMIT_0": "10",
        "CUDA_CORE_SOFT_LIMIT_0": "10",
        "MANAGER_COMPATIBILITY_MODE": "2",
        "MANAGER_CLIENT_REGISTER_UUID": "",
        "CUDA_SM_SHARED_BUCKET": "true",
        "EXTERNAL_SM_WATCHER_ENABLED": "true",
        "VMEMORY_NODE_ENABLED": "true",
        "MANAGER_VISIBLE_DEVICES": ",".join([UUID, *[NO_CARD] * 15]),
    }


@pytest.mark.parametrize(
    ("policy", "hard", "soft"),
    [("fixed", "10", "10"), ("balance", "10", "100"), ("none", "", "")],
)
def test_the_policy_decides_about_both_values_of_compute(policy: str, hard: str, soft: str) -> None:
    """vgpu-manager:§13.4, below the mounts."""
    target = msgspec.structs.replace(TARGET, policy=ComputePolicy(policy))
    environment = AS_REPLACED.provision(target).edits.environment
    assert (environment["CUDA_CORE_LIMIT_0"], environment["CUDA_CORE_SOFT_LIMIT_0"]) == (hard, soft)


@pytest.mark.parametrize("cores", [0, 100])
def test_compute_that_limits_nothing_is_an_empty_value(cores: int) -> None:
    """vgpu-manager §7.3: only 0 < cores < 100 is a limit."""
    target = msgspec.structs.replace(
        TARGET, cards=(msgspec.structs.replace(CARD, cores_percent=cores),)
    )
    assert AS_REPLACED.provision(target).edits.environment["CUDA_CORE_LIMIT_0"] == ""


def test_variables_are_numbered_by_the_host_s_index() -> None:
    """vgpu-manager §7.3: a slot is a host index, whatever the order of the claim."""
    cards = (
        msgspec.structs.replace(CARD, index=15, uuid="GPU-b"),
        msgspec.structs.replace(CARD, index=2),
    )
    environment = AS_REPLACED.provision(
        msgspec.structs.replace(TARGET, cards=cards)
    ).edits.environment
    slots = environment["MANAGER_VISIBLE_DEVICES"].split(",")
    assert (len(slots), slots[2], slots[15], slots.count(NO_CARD)) == (16, UUID, "GPU-b", 14)
    assert {"CUDA_MEM_LIMIT_2", "CUDA_MEM_LIMIT_15"} < environment.keys()
    assert "CUDA_MEM_LIMIT_0" not in environment


def test_the_golden_mounts_with_each_file_mounted_by_itself() -> None:
    """vgpu-manager:§13.4, except that what a container can write is never a directory of the host:
    the files that the library makes in the three directories below /tmp are there already, and each
    is mounted. Containers' directories are below one that only root can change.
    """
    assert set(AS_REPLACED.provision(TARGET).edits.mounts) == {
        Mount("/etc/vgpu-manager/.host_proc", "/proc", read_only=True),
        Mount("/etc/vgpu-manager/watcher", f"{H}/watcher", read_only=True),
        Mount("/etc/vgpu-manager/driver/libvgpu-control.so", INSTALLED, read_only=True),
        Mount("/etc/vgpu-manager/config", f"{C}/config", read_only=True),
        Mount("/tmp/.vgpu_lock/vgpu_0.lock", f"{C}/vgpu_lock/vgpu_0.lock"),
        Mount("/tmp/.vmem_node/vmem_node.config", f"{C}/vmem_node/vmem_node.config"),
        Mount("/tmp/.sm_node/sm_node.config", f"{C}/sm_node/sm_node.config"),
        Mount("/tmp/.sm_node/sm_node.lock", f"{C}/sm_node/sm_node.lock"),
        Mount("/etc/ld.so.preload", f"{H}/ld.so.preload", read_only=True),
    }


def test_the_host_s_processes_are_not_shown_unless_the_operator_asks() -> None:
    """vgpu-manager:D18: the replaced plugin shows every tenant the host's whole /proc. By default
    a container registers its processes instead, by which the library is told the mode 200.
    """
    provision = VgpuControl(H, INSTALLED).provision(TARGET)
    assert "/proc" not in {mount.host_path for mount in provision.edits.mounts}
    assert (
        Mount("/etc/vgpu-manager/registry", f"{H}/registry", read_only=True)
        in provision.edits.mounts
    )
    assert provision.edits.environment["MANAGER_COMPATIBILITY_MODE"] == "200"
    # the program in it is reached by name; nobody lists it
    assert HostDirectory(f"{H}/registry", 0o711) in provision.directories


@pytest.mark.parametrize(
    ("processes", "cgroup", "open_modules", "mode"),
    [
        ("host-proc", 1, False, 1),
        ("host-proc", 2, False, 2),
        ("host-proc", 1, True, 101),
        ("host-proc", 2, True, 102),
        ("client", 1, False, 200),
        ("client", 2, True, 236),
    ],
)
def test_the_compatibility_mode(processes: str, cgroup: int, open_modules: bool, mode: int) -> None:
    """vgpu-manager §7.6: the sums are those of bits, hence 236."""
    backend = VgpuControl(H, INSTALLED, processes, cgroup, open_modules)
    assert backend.compatibility == mode


def test_what_is_off_is_not_mounted() -> None:
    """Neither the agent's samples nor a ledger exists without its gate."""
    provision = VgpuControl(H, INSTALLED).provision(TARGET)
    assert provision.edits.environment["EXTERNAL_SM_WATCHER_ENABLED"] == "false"
    assert provision.edits.environment["VMEMORY_NODE_ENABLED"] == "false"
    assert not [
        mount
        for mount in provision.edits.mounts
        if "watcher" in mount.host_path or "vmem" in mount.host_path
    ]


@pytest.mark.parametrize(
    ("gates", "sha256"),
    [
        (True, "d2301d4304982ff442dffafa7df5b5b77a6659babec5f2d2dcfa4f461e2ee676"),
        (False, "8123a7a36320a75137efad43d40932060919c94d3cd686dafaf69418a84b717d"),
    ],
)
def test_the_golden_file_of_limits(gates: bool, sha256: str) -> None:
    """vgpu-manager:§13.5: byte for byte."""
    backend = msgspec.structs.replace(AS_REPLACED, sm_watcher=gates, tracks_virtual_memory=gates)
    whole = content(backend.provision(TARGET), "config/vgpu.config")
    assert len(whole) == 8192
    assert whole[:33].hex(" ") == (
        "46 43 47 56 01 00 00 00 00 0a 00 00 10 00 00 00 0c 00 00 00 08 00 00 00 35 37 30 2e 38 36 "
        "2e 31 30"
    )
    assert hashlib.sha256(whole).hexdigest() == sha256


def test_the_golden_files_beside_it() -> None:
    """vgpu-manager:§13.5: the ids without a newline; directories that only root can change."""
    provision = BACKEND.provision(TARGET)
    assert content(provision, "devices.json") == f'["{UUID}::3"]'.encode()
    assert {directory.mode for directory in provision.directories} == {0o755, 0o711}
    assert LIBRARY == "/etc/vgpu-manager/driver/libvgpu-control.so"


def test_a_container_finds_tables_that_are_initialised_and_have_their_space() -> None:
    """A mount point cannot be replaced by rename, as a library may do that finds no table; and a
    page that a full disk refuses would kill who has it mapped. vgpu-manager §7.7 has the layouts.
    """
    provision = BACKEND.provision(TARGET)
    written = [file for file in provision.files if file.mode == 0o666]
    assert [(file.path.removeprefix(f"{C}/"), file.size, file.allocated) for file in written] == [
        ("vgpu_lock/vgpu_0.lock", 0, False),
        ("vmem_node/vmem_node.config", 327_680, True),
        ("sm_node/sm_node.config", 8192, True),
        ("sm_node/sm_node.lock", 0, False),
    ]
    assert content(provision, "vmem_node/vmem_node.config")[:16].hex(" ", 4) == (
        "444e4d56 01000000 00010400 10000000"
    )
    assert content(provision, "sm_node/sm_node.config")[:16].hex(" ", 4) == (
        "444e4d53 03000000 80080000 10000000"
    )


def test_a_start_begins_without_what_the_life_before_has_left() -> None:
    """vgpu-manager §7.5; a restored spec, whose container may run, removes nothing
    (`GrantDirectory.restore`). Nothing of another container is named.
    """
    provision = BACKEND.provision(TARGET)
    assert provision.own_directory == C
    assert set(provision.removed) == {
        "config/pids.config",
        "vmem_node/vmem_node.config",
        "sm_node/sm_node.config",
        "sm_node/sm_node.lock",
        "vgpu_lock/vgpu_0.lock",
    }


@pytest.mark.parametrize(
    ("setting", "memory", "runs_free"),
    [
        ("whole-gpus", 24576, True),
        ("whole-gpus", 24575, False),
        ("ignore", 24576, False),
        ("honor", 1024, True),
    ],
)
def test_a_container_leaves_the_library_only_where_the_operator_lets_it(
    setting: str, memory: int, runs_free: bool
) -> None:
    """vgpu-manager:D13: the variable is the tenant's; whether it counts is the operator's."""
    target = msgspec.structs.replace(
        TARGET, cards=(msgspec.structs.replace(CARD, memory_mib=memory),), disabled=True
    )
    mounts = msgspec.structs.replace(AS_REPLACED, disable_variable=setting).provision(target)
    preloaded = "/etc/ld.so.preload" in {mount.container_path for mount in mounts.edits.mounts}
    assert preloaded is not runs_free


def test_a_card_whose_memory_nobody_knows_is_not_taken_for_a_whole_one() -> None:
    """Its neighbours' memory would be free to take."""
    target = msgspec.structs.replace(
        TARGET, cards=(msgspec.structs.replace(CARD, card_memory_mib=0),), disabled=True
    )
    mounts = AS_REPLACED.provision(target).edits.mounts
    assert "/etc/ld.so.preload" in {mount.container_path for mount in mounts}


@pytest.mark.parametrize("index", [-1, 16, 4096])
def test_a_card_without_a_place_is_refused_with_the_reason(index: int) -> None:
    """vgpu-manager:D32: the replaced plugin panics."""
    target = msgspec.structs.replace(TARGET, cards=(msgspec.structs.replace(CARD, index=index),))
    with pytest.raises(RequestRefusedError, match=rf"index {index}, .* indices 0 to 15; claim ano"):
        AS_REPLACED.provision(target)


def test_a_card_is_claimed_once() -> None:
    """It has one slot: the later claim would replace the earlier one's limit."""
    with pytest.raises(RequestRefusedError, match=r"index 0 twice.*claim it once"):
        AS_REPLACED.provision(msgspec.structs.replace(TARGET, cards=(CARD, CARD)))


def test_a_card_of_unknown_memory_waits() -> None:
    """With a limit of 0 nothing would run."""
    target = msgspec.structs.replace(TARGET, cards=(msgspec.structs.replace(CARD, memory_mib=0),))
    with pytest.raises(UnhealthyDeviceError, match=re.escape(UUID)):
        AS_REPLACED.provision(target)


def test_names_lead_nowhere_else() -> None:
    """A path is built from them."""
    with pytest.raises(RequestRefusedError):
        AS_REPLACED.provision(msgspec.structs.replace(TARGET, container="../x"))


def limits(card: CardLimit, policy: str = "fixed", **more: float | bool) -> tuple[int, ...]:
    """hard, soft, core_limit, hard_limit, memory_limit, oversold, real MiB."""
    slot = slot_limit(card, ComputePolicy(policy), **more)  # type: ignore[arg-type]  # the test's own keywords
    return (
        slot.hard_core,
        slot.soft_core,
        slot.core_limit,
        slot.hard_limit,
        slot.memory_limit,
        slot.oversold,
        slot.real_bytes >> 20,
    )


def test_the_slot_follows_policy_and_memory() -> None:
    """vgpu-manager §7.7, "Filling"."""
    assert limits(CARD) == (10, 10, 1, 1, 1, 0, 1024)
    assert limits(CARD, "balance") == (10, 100, 1, 0, 1, 0, 1024)
    assert limits(CARD, "none") == (10, 10, 0, 0, 1, 0, 1024)
    scaled = msgspec.structs.replace(CARD, card_cores_percent=10)
    assert limits(scaled, "balance") == (10, 10, 1, 1, 1, 0, 1024)
    whole = msgspec.structs.replace(CARD, memory_mib=24576, cores_percent=100)
    assert limits(whole) == (100, 100, 0, 0, 0, 0, 24576)
    # what the card offers beyond its own memory spills
    assert limits(CARD, memory_ratio=2.0) == (10, 10, 1, 1, 1, 1, 512)
    # the container's own wish: it spills when the card itself is full
    assert limits(CARD, oversold=True) == (10, 10, 1, 1, 1, 1, 1024)
    # fewer MiB than the card has are a limit, also when all that is offered was claimed
    assert limits(whole, memory_ratio=0.5)[4] == 1


def test_long_names_are_cut() -> None:
    """vgpu-manager §7.7: a pod's name may be four times as long as its field."""
    target = msgspec.structs.replace(
        TARGET, pod="p" * 253, driver_version="5" * 99, cuda_version="x.y"
    )
    whole = content(AS_REPLACED.provision(target), "config/vgpu.config")
    assert whole[176:240] == b"p" * 63 + b"\0"
    assert whole[240:248] == b"default\0"
    assert whole[16:24] == bytes(8)


def test_what_a_container_writes_to_is_never_a_directory_of_the_host() -> None:
    """A bind mount follows links: who can write to a directory decides what is mounted from it."""
    provision = BACKEND.provision(TARGET)
    files = {file.path for file in provision.files if isinstance(file, HostFile)}
    assert {m.host_path for m in provision.edits.mounts if not m.read_only} <= files
