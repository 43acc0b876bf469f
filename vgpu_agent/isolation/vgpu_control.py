"""The isolation backend `vgpu-control`: it makes vgpu-manager's libvgpu-control.so hold a container
to its shares.

The library is preloaded into every process of the container and finds its limits in
``vgpu.config`` (`vgpu_config`), which the agent makes before the first process exists. Environment
and mounts are those of the replaced plugin (vgpu-manager §7.3, §7.4), with two differences that a
program does not notice. Containers are not shown the host's ``/proc``, unless the operator wants
that. And containers no longer get three directories of the host in which they can write: the agent
makes the files that the library would make there, and mounts each by itself (docs/security.md
says why). Families call it through `ControlBackend`; the package `vgpu_agent.runtime` makes the
files and installs the library itself.

It is a quota for cooperative programs, not a security boundary (vgpu-manager §12.4).
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

import msgspec

from vgpu_agent.errors import RequestRefusedError, UnhealthyDeviceError, quoted
from vgpu_agent.isolation.backend import LibraryServices
from vgpu_agent.isolation.edits import Edits, HostDirectory, HostFile, Mount, Provision
from vgpu_agent.isolation.vgpu_config import (
    MAX_CARDS,
    SIZE,
    Owner,
    SlotLimit,
    config_parts,
    devices_json,
)
from vgpu_agent.isolation.vgpu_tables import SM_NODE_SIZE, VMEM_SIZE, sm_node_head, vmem_head
from vgpu_agent.pods import container_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

# Paths inside the container.
LIBRARY = "/etc/vgpu-manager/driver/libvgpu-control.so"
PRELOAD = "/etc/ld.so.preload"
CONFIG_DIRECTORY = "/etc/vgpu-manager/config"
# the agent's samples of the use of compute
WATCHER_DIRECTORY = "/etc/vgpu-manager/watcher"
# the socket by which processes register with the agent, and the program that calls it
REGISTRY_DIRECTORY = "/etc/vgpu-manager/registry"
HOST_PROC = "/etc/vgpu-manager/.host_proc"
# The paths are part of the library's contract. In the first there is a lock for each card.
LOCK_DIRECTORY = "/tmp/.vgpu_lock"  # noqa: S108
VMEM_DIRECTORY = "/tmp/.vmem_node"  # noqa: S108
SM_NODE_DIRECTORY = "/tmp/.sm_node"  # noqa: S108

# Names of files and directories of a container on the host. The library records spilled memory in
# vmem_node: what was allocated for a card and lies in the host's memory. In sm_node it has its
# samples of the use of compute, and the token bucket by which the container's processes share the
# launches of kernels.
CONFIG_FILE = "config/vgpu.config"
PIDS_FILE = "config/pids.config"
VMEM_FILE = "vmem_node/vmem_node.config"
SM_NODE_FILE = "sm_node/sm_node.config"
_SM_NODE_LOCK = "sm_node/sm_node.lock"
_LOCKS = "vgpu_lock"
# the directories in which a container has files, which `runtime.region_guard` keeps from growing
FOLDERS = ("config", "vmem_node", "sm_node", _LOCKS)
_LOCK_SUFFIX = ".lock"
_LOCK_SIZE = 4096  # a page, for what a library may write there; they are made empty

# A pod sets this variable to run without the library.
DISABLED_BY = "DISABLE_VGPU_CONTROL"
_TRUE = ("1", "true", "enabled")  # as the replaced plugin reads its switches (vgpu-manager §4.1)

# the UUIDs of the container's cards, each in its slot: its place in the library's tables, which is
# its NVML index
SLOTS_VARIABLE = "MANAGER_VISIBLE_DEVICES"
# `VgpuControl.compatibility`; then whether the container's processes share one token bucket,
# whether the library takes its samples of compute from the agent, and whether it records spilled
# memory
_MODE_VARIABLE = "MANAGER_COMPATIBILITY_MODE"
_BUCKET_VARIABLE = "CUDA_SM_SHARED_BUCKET"
_WATCHER_VARIABLE = "EXTERNAL_SM_WATCHER_ENABLED"
_VMEMORY_VARIABLE = "VMEMORY_NODE_ENABLED"
# What a pod could set to evade its limits. The limits themselves are not among it: the library
# reads them from the file (vgpu-manager §8.2).
DECISIVE = frozenset(
    {SLOTS_VARIABLE, _MODE_VARIABLE, _BUCKET_VARIABLE, _WATCHER_VARIABLE, _VMEMORY_VARIABLE}
)
_NO_CARD = "GPU-00000000-0000-0000-0000-000000000000"  # in all other slots

# Processes could register with the agent by a UUID of their pod. No pod has one here: they register
# by the UID of the pod and the name of the container (vgpu-manager §9).
REGISTER_UUID = ""

# of `registry_directory`: its two files are reached by name, and nobody lists it
REGISTRY_MODE = 0o711

# How the library tells the container's processes from others (vgpu-manager §7.6): each process
# registers with the agent, or the library reads the host's /proc.
CLIENT, HOST_PROC_MODE = "client", "host-proc"
# the library's number for `CLIENT`, and the bits that are added for open kernel modules
_COMPATIBILITY_CLIENT = 200
_OPEN_KERNEL_MODULES = 100
_ALL_CORES = 100  # percent


class ComputePolicy(enum.StrEnum):
    """The limit of a container's compute (vgpu-manager §4.1, §7.7)."""

    FIXED = "fixed"  # never more than its share
    BALANCE = "balance"  # more while the card is idle
    NONE = "none"  # not at all


class CardLimit(msgspec.Struct, frozen=True):
    """The part of one card that a container has.

    Attributes:
        index: the card's NVML index, its place in the library's tables.
        uuid: of the card.
        cores_percent: of its compute; 0 and 100 limit nothing.
        memory_mib: of its memory as it is offered, which may be more than it has.
        card_cores_percent: the compute that the card offers, with scaling.
        card_memory_mib: the memory that the card offers, with scaling.
    """

    index: int
    uuid: str
    cores_percent: int
    memory_mib: int
    card_cores_percent: int = 100
    card_memory_mib: int = 0


class ControlTarget(msgspec.Struct, frozen=True):
    """The container that is to keep to its shares.

    Attributes:
        pod_uid: the kubelet's UID of the pod.
        pod: its name.
        namespace: its namespace.
        container: the container's name.
        ids: the kubelet's device ids, in its order.
        cards: in the order of the container's claims.
        policy: how compute is limited.
        memory_ratio: how many times a card's memory is offered.
        oversold: the container itself asks for more memory than the card has (CUDA_MEM_OVERSOLD).
        disabled: the container asks to run without the library (DISABLE_VGPU_CONTROL); whether that
            counts is the backend's setting.
        driver_version: e.g. ``570.86.10``.
        cuda_version: e.g. ``12.8``.
    """

    pod_uid: str
    pod: str
    namespace: str
    container: str
    ids: tuple[str, ...]
    cards: tuple[CardLimit, ...]
    policy: ComputePolicy = ComputePolicy.FIXED
    memory_ratio: float = 1.0
    oversold: bool = False
    disabled: bool = False
    driver_version: str = ""
    cuda_version: str = ""


class ControlBackend(Protocol):
    """The interface by which the family puts limits in force: `VgpuControl`, or one that limits
    nothing.
    """

    @property
    def name(self) -> str:
        """The glossary's name: ``vgpu-control`` or ``none``."""
        ...

    def provision(self, target: ControlTarget) -> Provision:
        """Return the edits of the container and the files that must be on the host.

        Raises:
            RequestRefusedError: the container cannot be limited; with the reason and the remedy.
        """
        ...


class VgpuControl(msgspec.Struct, frozen=True):
    """libvgpu-control.so on this node.

    Attributes:
        host_directory: the settings' ``vgpuControl.hostDirectory``, the same on the host and in the
            agent.
        library_path: the installed library.
        processes: the settings' ``vgpuControl.processes``: `CLIENT` or `HOST_PROC_MODE`, the
            library's way to tell the container's processes from others.
        cgroup_version: of the node, 1 or 2; a hybrid one is 2.
        open_kernel_modules: the driver's kernel modules are the open ones.
        disable_variable: the settings' ``vgpuControl.disableVariable``: for which pods
            `DISABLED_BY` counts.
        sm_watcher: the agent samples the use of compute for all containers (of the
            multiprocessors, SMs), in place of the library.
        tracks_virtual_memory: containers keep account of spilled memory (`VMEM_FILE`).
    """

    host_directory: str
    library_path: str
    processes: str = CLIENT
    cgroup_version: int = 2
    open_kernel_modules: bool = False
    disable_variable: str = "whole-gpus"
    sm_watcher: bool = False
    tracks_virtual_memory: bool = False

    @property
    def name(self) -> str:
        """The glossary's name."""
        return "vgpu-control"

    @property
    def compatibility(self) -> int:
        """The library's number for its way to tell the container's processes from others, and for
        the kind of kernel modules (vgpu-manager §7.6).
        """
        mode = _COMPATIBILITY_CLIENT if self.processes == CLIENT else self.cgroup_version
        return mode | _OPEN_KERNEL_MODULES if self.open_kernel_modules else mode

    @property
    def services(self) -> LibraryServices:
        """The services that the library needs of the agent."""
        return LibraryServices(
            containers_directory=containers_directory(self.host_directory),
            registry_directory=(
                registry_directory(self.host_directory) if self.processes == CLIENT else ""
            ),
            samples_directory=watcher_directory(self.host_directory) if self.sm_watcher else "",
        )

    def provision(self, target: ControlTarget) -> Provision:
        """Return the edits of the container and the files that must be on the host.

        Raises:
            RequestRefusedError: a card that the library has no place for or that is claimed twice,
                or names that cannot be part of a path.
            UnhealthyDeviceError: the memory of a claimed card is not known yet; a limit of 0 would
                let nothing run.
        """
        _require_places(target)
        name = container_directory(target.pod_uid, target.container)
        directory = f"{containers_directory(self.host_directory)}/{name}"
        limits = {card.index: _slot(card, target) for card in target.cards}
        written = tuple(self._written(target))
        return Provision(
            Edits(
                environment=self._environment(target),
                mounts=(
                    *self._read_only_mounts(target, directory),
                    *_file_mounts(written, directory),
                ),
            ),
            directories=(
                *self._shared_directories(),
                HostDirectory(directory),
                *(
                    HostDirectory(f"{directory}/{folder}")
                    for folder in dict.fromkeys(["config", *map(_folder, written)])
                ),
            ),
            files=(
                HostFile(
                    f"{directory}/devices.json",
                    size=len(ids := devices_json(target.ids)),
                    parts=((0, ids),),  # offset and content
                ),
                HostFile(
                    f"{directory}/{CONFIG_FILE}",
                    size=SIZE,
                    parts=config_parts(self._owner(target), limits),
                ),
                *(_writable(directory, path) for path in written),
            ),
            own_directory=directory,  # removed once the pod is gone
            # Files of the container's previous run, which go before `files` are made, but not when
            # only lost files are restored: the container may run then. VMEM_FILE too: one may be
            # left from before tracks_virtual_memory was switched off.
            removed=tuple(dict.fromkeys([PIDS_FILE, VMEM_FILE, *written])),
        )

    def _written(self, target: ControlTarget) -> Iterator[str]:
        """Yield the files that the container writes, as paths within its directory."""
        for card in sorted(target.cards, key=lambda card: card.index):
            yield f"{_LOCKS}/vgpu_{card.index}{_LOCK_SUFFIX}"
        if self.tracks_virtual_memory:
            yield VMEM_FILE
        yield SM_NODE_FILE
        yield _SM_NODE_LOCK

    def _environment(self, target: ControlTarget) -> dict[str, str]:
        environment = {
            "VGPU_POD_NAME": target.pod,
            "VGPU_POD_NAMESPACE": target.namespace,
            "VGPU_POD_UID": target.pod_uid,
            "VGPU_CONTAINER_NAME": target.container,
            "CUDA_MEM_RATIO": f"{target.memory_ratio:.2f}",
            # empty, so that an image's own values do not count
            "CUDA_CORE_LIMIT": "",
            "CUDA_CORE_SOFT_LIMIT": "",
            "MANAGER_CLIENT_REGISTER_UUID": REGISTER_UUID,
            _MODE_VARIABLE: str(self.compatibility),
            _BUCKET_VARIABLE: "true",
            _WATCHER_VARIABLE: str(self.sm_watcher).lower(),
            _VMEMORY_VARIABLE: str(self.tracks_virtual_memory).lower(),
        }
        slots = [_NO_CARD] * MAX_CARDS
        for card in target.cards:
            slots[card.index] = card.uuid
            environment[f"CUDA_MEM_LIMIT_{card.index}"] = f"{card.memory_mib}m"
            hard = soft = ""
            if _limits_cores(card, target):
                hard = str(card.cores_percent)
                soft = hard if target.policy is ComputePolicy.FIXED else str(_ALL_CORES)
            environment[f"CUDA_CORE_LIMIT_{card.index}"] = hard
            environment[f"CUDA_CORE_SOFT_LIMIT_{card.index}"] = soft
        environment[SLOTS_VARIABLE] = ",".join(slots)
        return environment

    def _read_only_mounts(self, target: ControlTarget, directory: str) -> Iterator[Mount]:
        """Yield the mounts that a container only reads."""
        if self.processes == CLIENT:
            yield Mount(REGISTRY_DIRECTORY, registry_directory(self.host_directory), read_only=True)
        else:
            yield Mount(HOST_PROC, "/proc", read_only=True)
        if self.sm_watcher:
            yield Mount(WATCHER_DIRECTORY, watcher_directory(self.host_directory), read_only=True)
        yield Mount(LIBRARY, self.library_path, read_only=True)
        yield Mount(CONFIG_DIRECTORY, f"{directory}/config", read_only=True)
        if not (target.disabled and may_be_disabled(self.disable_variable, target)):
            yield Mount(PRELOAD, f"{self.host_directory}/ld.so.preload", read_only=True)

    def _shared_directories(self) -> Iterator[HostDirectory]:
        yield HostDirectory(containers_directory(self.host_directory))
        if self.processes == CLIENT:
            yield HostDirectory(registry_directory(self.host_directory), REGISTRY_MODE)
        if self.sm_watcher:
            yield HostDirectory(watcher_directory(self.host_directory))

    def _owner(self, target: ControlTarget) -> Owner:
        """Return the facts in ``vgpu.config`` about the container that it is for."""
        return Owner(
            pod_uid=target.pod_uid,
            pod=target.pod,
            namespace=target.namespace,
            container=target.container,
            register_uuid=REGISTER_UUID,
            compatibility=self.compatibility,
            sm_watcher=self.sm_watcher,
            tracks_virtual_memory=self.tracks_virtual_memory,
            driver_version=target.driver_version,
            cuda_version=target.cuda_version,
        )


def is_client(compatibility: int) -> bool:
    """Tell whether a library with this number (`VgpuControl.compatibility`) registers every process
    with the agent.
    """
    return compatibility in {_COMPATIBILITY_CLIENT, _COMPATIBILITY_CLIENT | _OPEN_KERNEL_MODULES}


def containers_directory(host_directory: str) -> str:
    """The parent of the containers' own directories, ``<pod UID>_<container>``,
    which only root can change.
    """
    return f"{host_directory}/containers"


def registry_directory(host_directory: str) -> str:
    """The directory of the registry's socket and of the program by which containers speak to it."""
    return f"{host_directory}/registry"


def watcher_directory(host_directory: str) -> str:
    """The directory of the agent's samples of the use of compute."""
    return f"{host_directory}/watcher"


def allowed_size(name: str) -> int | None:
    """Return how large the file of that name in a container's directory may be, in bytes; None for
    a name that is not limited.
    """
    if name.endswith(_LOCK_SUFFIX):
        return _LOCK_SIZE
    return {"vgpu.config": SIZE, "vmem_node.config": VMEM_SIZE, "sm_node.config": SM_NODE_SIZE}.get(
        name
    )


def is_switched_on(value: str) -> bool:
    """Tell whether a variable of a container has a value that means yes."""
    return value.lower() in _TRUE


def may_be_disabled(setting: str, target: ControlTarget) -> bool:
    """Tell whether a container may run without the library: always with the ``setting`` ``honor``,
    with ``whole-gpus`` when it has all memory of its cards, so that nobody else has a share,
    otherwise never.
    """
    if setting != "whole-gpus":
        return setting == "honor"
    return all(0 < card.card_memory_mib <= card.memory_mib for card in target.cards)


def slot_limit(
    card: CardLimit, policy: ComputePolicy, *, memory_ratio: float = 1.0, oversold: bool = False
) -> SlotLimit:
    """Return the limits of one card of a container, as the library obeys them (vgpu-manager §7.7).

    The card's memory is offered ``memory_ratio`` times. With ``oversold`` the container may
    allocate more than the card has; the rest lies in the host's memory.
    """
    total = card.memory_mib << 20
    limited = policy is not ComputePolicy.NONE and 0 < card.cores_percent < _ALL_CORES
    balanced = limited and policy is ComputePolicy.BALANCE
    return SlotLimit(
        card.uuid,
        total_bytes=total,
        # as much as may lie in the card itself; the rest is spilled to the host's memory
        real_bytes=int(total / memory_ratio) if memory_ratio > 1 else total,
        # percent of compute that the container always has, and that it may reach on an idle card
        hard_core=card.cores_percent,
        soft_core=card.card_cores_percent if balanced else card.cores_percent,
        core_limit=limited,
        # `hard_core` is the limit even on an idle card
        hard_limit=limited and (not balanced or card.cores_percent >= card.card_cores_percent),
        memory_limit=not (memory_ratio == 1 and card.memory_mib == card.card_memory_mib),
        oversold=oversold or memory_ratio > 1,
    )


def _slot(card: CardLimit, target: ControlTarget) -> SlotLimit:
    return slot_limit(
        card, target.policy, memory_ratio=target.memory_ratio, oversold=target.oversold
    )


def _limits_cores(card: CardLimit, target: ControlTarget) -> bool:
    return target.policy is not ComputePolicy.NONE and 0 < card.cores_percent < _ALL_CORES


def _require_places(target: ControlTarget) -> None:
    seen: set[int] = set()
    for card in target.cards:
        if not 0 <= card.index < MAX_CARDS:
            raise RequestRefusedError(
                f"container {target.container} is to have {quoted(card.uuid)}, the GPU with index "
                f"{card.index}, and vgpu-control has places for the indices 0 to {MAX_CARDS - 1}; "
                "claim another GPU, or exclude this one on the node"
            )
        if card.index in seen:
            raise RequestRefusedError(
                f"container {target.container} is to have the GPU with index {card.index} twice, "
                "and vgpu-control has one place for each; claim it once, with the sum"
            )
        if card.memory_mib <= 0:
            raise UnhealthyDeviceError(
                f"the memory of {quoted(card.uuid)} is not known yet, so container "
                f"{target.container} has no limit of memory; it is tried again, and the agent's "
                "log says why the driver does not answer"
            )
        seen.add(card.index)


def _folder(path: str) -> str:
    return path.partition("/")[0]


def _writable(directory: str, path: str) -> HostFile:
    """Return a file as the container's first process would have made it, writable for any user.

    Its space is taken beforehand, and its beginning is that of an initialised table, so that the
    library takes it as it is.
    """
    sizes = {VMEM_FILE: (VMEM_SIZE, vmem_head()), SM_NODE_FILE: (SM_NODE_SIZE, sm_node_head())}
    size, head = sizes.get(path, (0, b""))
    parts = ((0, head),) if head else ()
    # renewed: what is written into a file that was not removed first, because its container may
    # run; in place, since containers have it mapped
    return HostFile(
        f"{directory}/{path}", size, parts, mode=0o666, renewed=parts, allocated=size > 0
    )


def _file_mounts(paths: tuple[str, ...], directory: str) -> Iterator[Mount]:
    places = {"vmem_node": VMEM_DIRECTORY, "sm_node": SM_NODE_DIRECTORY, _LOCKS: LOCK_DIRECTORY}
    for path in paths:
        folder, _, name = path.partition("/")
        yield Mount(container_path=f"{places[folder]}/{name}", host_path=f"{directory}/{path}")
