"""The isolation backend `hami-core`: it makes HAMi's libvgpu.so hold a container to its shares.

The library is preloaded into every process of the container and finds its limits in a region file,
which the agent makes before the first process exists (`hami_region`). Environment and mounts are
those of the replaced plugin (volcano-vgpu §4.1, G4), without its mounts of two directories that
containers can write. A bind mount follows links, so write access to a directory decides what is
mounted from it. Here a container sees no directory of the host: its region is mounted as a file,
and the directory around it belongs to root alone. The library needs no more (hami-core §0.3.3).
Families call it through `Backend`; `runtime` makes the files, and `runtime.hami_library` installs
the library itself.

It is a quota for cooperative programs, not a security boundary: static programs and images without
glibc are not limited.

A container's image and pod may set the library's variables, too. In a CDI spec the agent's value
wins over both, so there each variable by which a program could escape its limit is set (`late`). In
an answer to Allocate it wins over the image's and loses against the pod's. There `DECISIVE` lists
the variables that the pod must not set.
"""

from __future__ import annotations

import hashlib
import uuid
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import RequestRefusedError, UnhealthyDeviceError
from vgpu_agent.isolation.edits import Edits, HostDirectory, HostFile, MemoryMount, Mount, Provision
from vgpu_agent.isolation.hami_region import (
    MAX_DEVICES,
    NO_CORES_LIMIT,
    SIZE,
    DeviceLimit,
    limit_parts,
    region,
)
from vgpu_agent.pods import container_directory

if TYPE_CHECKING:
    from vgpu_agent.isolation.backend import Target
    from vgpu_agent.model import Gpu, Share

# Paths inside the container. The library calls a region file a cache.
LIBRARY = "/usr/local/vgpu/libvgpu.so"
PRELOAD = "/etc/ld.so.preload"
CACHE_DIRECTORY = "/tmp/vgpu"  # noqa: S108 - the path is part of the library's contract
# The path that the library opens in processes without its variables (ssh, su -, cron).
DEFAULT_CACHE = "/tmp/cudevshr.cache"  # noqa: S108
LOCK_DIRECTORY = "/tmp/vgpulock"  # noqa: S108 - likewise

# The file that libraries with a lock open in `LOCK_DIRECTORY`.
_LOCK = f"{LOCK_DIRECTORY}/lock".encode()
# What such a library logs while it waits for that file. Libraries from 2.8.1 on still name the
# file, in functions that nothing calls any more.
_LOCK_AWAITED = b"unified_lock locked"
# How large the file system in memory for that file is, and how many files fit.
_LOCK_KIB, _LOCK_FILES = 64, 16

# A pod sets this variable, to any value, to run without the library. The library itself does not
# know it.
DISABLED_BY = "CUDA_DISABLE_CONTROL"

# A program that sets another path gets another region, with limits that it chooses itself.
REGION_VARIABLE = "CUDA_DEVICE_MEMORY_SHARED_CACHE"
# The file in which the library's dlsym looks for the hooks, its own versions of CUDA's functions. A
# program that names another file gets no hooks.
_HOOKS_VARIABLE = "CUDA_REDIRECT"
_POLICY_VARIABLE = "GPU_CORE_UTILIZATION_POLICY"  # "disable" switches the limit of compute off

# What a pod could set to escape its limits. The limits themselves (CUDA_DEVICE_MEMORY_LIMIT_*,
# CUDA_DEVICE_SM_LIMIT*) are not among it: where there is a region, the library reads them there
# (hami-core §0.3.1).
DECISIVE = frozenset({REGION_VARIABLE, _HOOKS_VARIABLE, _POLICY_VARIABLE})


def uses_lock(library: bytes) -> bool:
    """Tell whether a libvgpu.so makes a lock file in `LOCK_DIRECTORY`,
    as those before 2.8.1 do (hami-core §1.4).
    """
    return _LOCK in library and _LOCK_AWAITED in library


class HamiCore(msgspec.Struct):
    """HAMi-core on this node.

    Attributes:
        host_directory: the settings' ``hamiCore.hostDirectory``, the same on the host and in the
            agent.
        library_path: the installed library; the installation of a newer one sets it, and later
            grants mount that.
        library_locks: the library makes a lock file (`uses_lock`). Each container gets a place of
            its own for it. A place that containers share would let one keep the others from
            starting.
        disable_variable: the settings' ``hamiCore.disableVariable``: for which pods `DISABLED_BY`
            counts.
        late: containers get their environment by a CDI spec.
    """

    host_directory: str
    library_path: str
    library_locks: bool = False
    disable_variable: str = "whole-gpus"
    late: bool = False

    name = "hami-core"

    @property
    def containers_directory(self) -> str:
        """The parent of the containers' own directories, ``<pod UID>_<container>``,
        which only root can change.
        """
        return containers_directory(self.host_directory)

    @property
    def preload_path(self) -> str:
        """The file on the host that stands in for the container's ``/etc/ld.so.preload``."""
        return f"{self.host_directory}/ld.so.preload"

    def provision(self, target: Target) -> Provision:
        """Return the edits of the container and the files that must be on the host.

        Raises:
            RequestRefusedError: more devices than the library can count, or names that cannot be
                part of a path.
            UnhealthyDeviceError: a whole GPU was asked for whose memory the driver has not reported
                yet; a limit of 0 would be none.
        """
        limits = _limits(target)
        cache = _cache_name(target.grant)
        name = container_directory(target.pod_uid, target.container)
        directory = f"{self.containers_directory}/{name}"
        region_path = f"{directory}/{cache}"
        mounts = [Mount(LIBRARY, self.library_path, read_only=True)]
        if not self._is_disabled(target):
            mounts.append(Mount(PRELOAD, self.preload_path, read_only=True))
        mounts += [
            # The path that the library opens without its environment (ssh, su -, cron), hami-core
            # §0.3.2.
            Mount(DEFAULT_CACHE, region_path),
            # A mount point cannot be deleted, so a cleanup of /tmp does not delete the limit.
            Mount(f"{CACHE_DIRECTORY}/{cache}", region_path),
        ]
        # only a CDI spec can bring a file system in memory into a container
        locks = (
            (MemoryMount(LOCK_DIRECTORY, size_kib=_LOCK_KIB, files=_LOCK_FILES),)
            if self.library_locks and self.late
            else ()
        )
        parts = region(limits, limit_cores=target.limit_cores)
        return Provision(
            Edits(
                environment=self._environment(target, limits, cache),
                mounts=tuple(mounts),
                memory_mounts=locks,
            ),
            directories=(
                HostDirectory(f"{self.host_directory}/vgpu"),
                HostDirectory(self.containers_directory),
                HostDirectory(directory),
            ),
            # Any user of the container writes to it.
            files=(
                HostFile(
                    region_path,
                    size=SIZE,
                    parts=parts,  # (offset, bytes) of the region; the rest of it is zero
                    mode=0o666,
                    renewed=limit_parts(limits),  # written into a region that is in use
                    # takes its space on the disk at once: later a full disk would kill a process
                    # that touches a new page of it
                    allocated=True,
                ),
            ),
            own_directory=directory,  # removed once the pod is gone
            # what specs and answers of earlier agents mount; while such an answer is still in use,
            # the directory is made anew at each start
            earlier_directory=f"{directory_before(self.host_directory)}/{name}",
        )

    def _environment(self, target: Target, limits: list[DeviceLimit], cache: str) -> dict[str, str]:
        # The variables have a limit of memory for each GPU, and of compute only the first share's.
        # Only whole MiB with "m": every other unit is misread by some version (hami-core §1.2).
        environment = {
            f"CUDA_DEVICE_MEMORY_LIMIT_{place}": f"{limit.memory_mib}m"
            for place, limit in enumerate(limits)
        }
        first = target.shares[0][1].cores_percent if target.shares else 0
        environment["CUDA_DEVICE_SM_LIMIT"] = str(first)
        environment[REGION_VARIABLE] = f"{CACHE_DIRECTORY}/{cache}"
        if target.oversubscribed:
            environment["CUDA_OVERSUBSCRIBE"] = "true"
        if not target.limit_cores:
            environment[_POLICY_VARIABLE] = "disable"
        elif self.late:
            environment[_POLICY_VARIABLE] = (
                "force"  # like utilization_switch in the region: the limiter is on
            )
        if self.late:
            environment[_HOOKS_VARIABLE] = LIBRARY  # the library's own default
        if len(limits) > 1:
            # CUDA's own order is fastest first, which is not the order of the limits
            environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        return environment

    def _is_disabled(self, target: Target) -> bool:
        """Tell whether the container's pod has switched its limit off, and may do so."""
        return DISABLED_BY in target.environment and may_be_disabled(self.disable_variable, target)


def containers_directory(host_directory: str) -> str:
    """The parent of the containers' directories, below the settings' ``hamiCore.hostDirectory``."""
    return f"{host_directory}/vgpu/regions"


def directory_before(host_directory: str) -> str:
    """The parent of the containers' directories in the replaced plugin and earlier agents; these
    directories have mode 0777 and are mounted into containers.
    """
    return f"{host_directory}/vgpu/containers"


def may_be_disabled(setting: str, target: Target) -> bool:
    """Tell whether a container may run without the library: always with the ``setting`` ``honor``,
    with ``whole-gpus`` when no other container can share its GPUs, otherwise never.
    """
    if setting != "whole-gpus":
        return setting == "honor"
    return not target.oversubscribed and all(
        share.exclusive
        or share.memory_mib <= 0
        # less is left of the GPU's memory than the smallest share
        or 0 < gpu.memory_mib < share.memory_mib + target.unit_mib
        for gpu, share in target.shares
    )


def _limits(target: Target) -> list[DeviceLimit]:
    """Return one limit per GPU, in the order in which CUDA and NVML count them in the container: by
    PCI bus id (volcano-vgpu D22).
    """
    by_uuid: dict[str, tuple[Gpu, list[Share]]] = {}
    for gpu, share in target.shares:
        by_uuid.setdefault(gpu.uuid, (gpu, []))[1].append(share)
    if len(by_uuid) > MAX_DEVICES:
        raise RequestRefusedError(
            f"container {target.container} is to have {len(by_uuid)} GPUs, and hami-core limits at "
            f"most {MAX_DEVICES}; ask for fewer"
        )
    return [
        _limit(gpu, shares, target)
        for gpu, shares in sorted(by_uuid.values(), key=lambda pair: _pci_order(pair[0]))
    ]


def _limit(gpu: Gpu, shares: list[Share], target: Target) -> DeviceLimit:
    # 0 means "not limited" in a `Share`. The library has no such value: its limit is then the
    # GPU's whole memory.
    whole = any(share.memory_mib <= 0 for share in shares)
    memory = gpu.memory_mib if whole else sum(share.memory_mib for share in shares)
    if memory <= 0:
        raise UnhealthyDeviceError(
            f"the memory of {gpu.uuid} is not known yet, and without a limit container "
            f"{target.container} could take all of it; it is tried again, and the agent's log says "
            "why the driver does not answer"
        )
    cores = sum(share.cores_percent for share in shares)
    limited = target.limit_cores and 0 < cores < NO_CORES_LIMIT
    return DeviceLimit(
        gpu.uuid, memory_mib=memory, cores_percent=cores if limited else NO_CORES_LIMIT
    )


def _pci_order(gpu: Gpu) -> tuple[int, str, int]:
    # Bus ids of equal length sort as text in the order of their numbers; a longer one has a larger
    # domain.
    return len(gpu.pci_bus_id), gpu.pci_bus_id.lower(), gpu.minor


def _cache_name(grant: str) -> str:
    """Return ``<uuid4>.cache``, always the same for ``grant``, the grant's unique name,
    so that a restarted container finds the same file.
    """
    return f"{uuid.UUID(bytes=hashlib.sha256(grant.encode()).digest()[:16], version=4)}.cache"
