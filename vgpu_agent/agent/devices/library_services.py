"""The services for the libraries that limit containers: the registry of processes, and the samples
of compute usage. Both run only while a family that is on gives its containers such a library.
Samples are taken only of GPUs with a container whose compute is limited.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from vgpu_agent.concurrency import Versions
from vgpu_agent.errors import HostFileError
from vgpu_agent.log import ChangeFilter
from vgpu_agent.runtime.own_thread import OwnThread
from vgpu_agent.runtime.process_registry import ProcessRegistry
from vgpu_agent.runtime.sm_util import SmUtilFile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vgpu_agent.concurrency import Latest, Supervisor
    from vgpu_agent.gpu.source import GpuSource
    from vgpu_agent.isolation.backend import LibraryServices
    from vgpu_agent.journal import Journal
    from vgpu_agent.ledger import Ledger
    from vgpu_agent.pods import PodCache

# A library must know which processes on a GPU are its own container's. The first loop answers
# processes that register with the agent. The second keeps, for each container of theirs, a file
# with the host's ids of its processes, in the container's directory below `containers_directory`.
_REGISTRY, _LISTS = "process registry", "process lists"
# Changes come in bursts; a container takes longer than this to start.
_COALESCING_SECONDS = 0.05
_RETRY_SECONDS = 30.0  # after a failure to create the file of samples
_DEADLINE_SECONDS = 10.0  # for creating that file
_ALL_CORES = 100


class LibraryServicesInForce:
    """The controller that starts and stops these services.

    State: the running registry, the open file of samples, and the sampled GPUs. All of it is built
    again after a restart.

    Args:
        services: family → the services that the library of its containers needs, as directories;
            an empty one stands for a service that it does not need.
        ledger: the grants.
        gpu_watch: the GPUs.
        pods: the pods of this node.
        supervisor: runs the registry.
        journal: receives failures.
        proc_root: the directory with the host's processes.
        sysfs_root: the mount point of sysfs, with the cgroups below it.
    """

    def __init__(
        self,
        services: Latest[Mapping[str, LibraryServices]],
        *,
        ledger: Ledger,
        gpu_watch: GpuSource,
        pods: PodCache,
        supervisor: Supervisor,
        journal: Journal,
        proc_root: str,
        sysfs_root: str,
    ) -> None:
        self._services, self._ledger, self._gpu_watch, self._pods = (
            services,
            ledger,
            gpu_watch,
            pods,
        )
        self._supervisor, self._journal = supervisor, journal
        self._proc_root, self._cgroup_root = proc_root, f"{sysfs_root}/fs/cgroup"
        self._own_thread = OwnThread("samples file")
        self._changes = ChangeFilter()  # of failures, so that each is recorded once
        self._registry_in = ""  # the directory of the running registry; empty if none runs
        self._samples_file: tuple[str, SmUtilFile] | None = None  # the directory and the file in it
        self._sampled: tuple[tuple[int, str], ...] = ()  # index and UUID of each sampled GPU

    async def run(self) -> None:
        """Follow settings, grants and GPUs until cancelled."""
        try:
            while True:
                versions = Versions(
                    self._services, self._ledger.revision, self._gpu_watch.inventory
                )
                await self._serve_registry()
                await self._serve_samples()
                # waits for the next change of one of them
                await versions.passed(timeout_seconds=_RETRY_SECONDS)
                await asyncio.sleep(_COALESCING_SECONDS)
        finally:
            await self._stop()

    async def _serve_registry(self) -> None:
        wanted = next(
            (one for one in self._services.value.values() if one.registry_directory), None
        )
        directory = wanted.registry_directory if wanted is not None else ""
        if directory == self._registry_in:
            return
        self._registry_in = ""
        for name in (_REGISTRY, _LISTS):
            await self._supervisor.stop(name)
        if wanted is None:
            return
        registry = ProcessRegistry(
            Path(wanted.registry_directory),
            Path(wanted.containers_directory),
            self._pods,
            self._journal,
            proc_root=self._proc_root,
            cgroup_root=self._cgroup_root,
        )
        self._supervisor.start(_REGISTRY, registry.run)
        self._supervisor.start(_LISTS, registry.keep_lists)
        self._registry_in = directory

    async def _serve_samples(self) -> None:
        limited = self._limited()
        directories = {
            one.samples_directory
            for family, one in self._services.value.items()
            if family in limited
        }
        directory = next(iter(sorted(directories - {""})), "")
        gpus = set().union(*limited.values()) if directory else set()
        found = tuple(
            (gpu.index, gpu.uuid)
            for gpu in self._gpu_watch.inventory.value.gpus
            if gpu.uuid in gpus and gpu.present and gpu.health.ok and not gpu.mig_enabled
        )
        if found == self._sampled and (not found or self._samples_in == directory):
            return
        file = (
            await self._open_file(directory)
            if found
            else self._samples_file and self._samples_file[1]
        )
        if file is None:
            return
        self._gpu_watch.sample(found, file)  # from now on, until the next call
        self._sampled = found

    def _limited(self) -> Mapping[str, set[str]]:
        """Return family → UUIDs of the devices on which the compute of a container is limited."""
        limited: dict[str, set[str]] = {}
        for grant in self._ledger.grants:
            services = self._services.value.get(grant.family)
            if services is not None and services.samples_directory:
                limited.setdefault(grant.family, set()).update(
                    share.device for share in grant.shares if 0 < share.cores_percent < _ALL_CORES
                )
        return limited

    @property
    def _samples_in(self) -> str:
        """The directory of the open file of samples; empty if there is none."""
        return self._samples_file[0] if self._samples_file is not None else ""

    async def _open_file(self, directory: str) -> SmUtilFile | None:
        """Return the file of samples in ``directory``; None when it cannot be created now."""
        if self._samples_file is not None and self._samples_file[0] == directory:
            return self._samples_file[1]
        loop = asyncio.get_running_loop()

        def on_locked(index: int) -> None:  # that GPU's part of the file; called in a thread
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(self._report_lock, index)

        try:
            opened = await self._own_thread.run(
                directory,  # for error messages
                functools.partial(SmUtilFile, directory, on_locked),
                seconds=_DEADLINE_SECONDS,
            )
        except HostFileError as err:
            if self._changes.is_new("file", str(err)):
                self._journal.record("samples.not_written", level="warning", error=str(err))
            return None
        self._changes.forget("file")
        self._samples_file = directory, opened
        return opened

    def _report_lock(self, index: int) -> None:
        if self._changes.is_new(index):
            self._journal.record(
                "samples.locked",
                level="warning",
                index=index,
                reason="a container keeps a lock on the samples of this GPU; they are written "
                "without it, so readers may see half of one",
            )

    async def _stop(self) -> None:
        if self._samples_file is not None:
            self._gpu_watch.sample((), self._samples_file[1])
        self._sampled, self._registry_in = (), ""
        for name in (_REGISTRY, _LISTS):
            await self._supervisor.stop(name)
