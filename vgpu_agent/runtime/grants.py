"""The CDI specs of this node's grants, one file each, and the host files behind them: how a late-bound container gets what was decided.

`Allocate` hands kubelet a CDI name that means nothing yet; `allocation` decides at `PreStartContainer` and has this carrier put the spec
of that name into the runtime's directory, before it says yes to the start. `agent` loads the directory at start, restores it
after a reboot, and collects what belongs to pods that are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
from typing import TYPE_CHECKING

from vgpu_agent.errors import CarrierError
from vgpu_agent.isolation.edits import Edits
from vgpu_agent.runtime import cdi, host_files
from vgpu_agent.runtime.mounts import MountTables, Use

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from vgpu_agent.allocation.carrier import GrantRecord, Inlined
    from vgpu_agent.isolation.edits import Provision
    from vgpu_agent.journal import Journal

_SPEC_NAME = re.compile(r"vgpu-agent-([0-9a-f]{32})\.json")
_LOCKS = 64


class GrantDirectory:
    """The grants of this node: a spec file each in ``cdi_directory``, host files where their provisions say.

    State: the files are the state; what is in memory is read from them by `load`. The agent can be killed between any two lines: host
    files come first and the spec is renamed into place last, so a spec that is there has everything it mentions. A directory without a
    spec is found by `sweep`.

    All work is done in threads, and a thread finishes what it has begun even when the caller is cancelled; work on one token is done by
    one thread at a time.
    """

    def __init__(
        self,
        cdi_directory: str,
        journal: Journal,
        *,
        kept_directory: str,
        proc_root: str = "/proc",
        inline: Callable[[Sequence[str]], Awaitable[Inlined]] | None = None,
    ) -> None:
        """Use these directories.

        Args:
            cdi_directory: where the runtime looks for specs.
            journal: where damaged files are told of.
            kept_directory: where the records of grants without a spec are kept, those that were answered in full in Allocate.
            proc_root: where procfs is mounted, for what is mounted by whom.
            inline: finds what stands behind CDI names, which a spec cannot refer to; raises CarrierError where nothing does.
        """
        self._directory = cdi_directory
        self._kept = kept_directory
        self._inline = inline
        self._journal = journal
        self._mounts = MountTables(proc_root)
        # Replaced as a whole by the thread that has changed a file, so that the event loop reads it without a lock.
        self._records: dict[str, GrantRecord] = {}
        self._prepared: dict[str, GrantRecord] = {}
        self._changing = threading.Lock()
        self._locks = tuple(threading.Lock() for _ in range(_LOCKS))
        self._path_locks = tuple(threading.Lock() for _ in range(_LOCKS))
        self._left: set[str] = set()  # directories of grants whose ids somebody else has got; `sweep` knows them after a restart
        self._said: dict[str, dict[str, str]] = {}  # event → what failed the last time → why

    @property
    def records(self) -> Sequence[GrantRecord]:
        """The grants whose specs are there now, and those that were answered in full in Allocate."""
        return self._all()

    async def load(self) -> None:
        """Read what an earlier agent has written. Files of others are left alone; a damaged one of ours is moved out of the runtime's way.

        Raises:
            CarrierError: the directory is there and cannot be read.
        """
        for event, facts in await asyncio.to_thread(self._load):
            self._journal.record(event, level="warning", **facts)

    async def deliver(self, record: GrantRecord, provision: Provision) -> None:
        """Make the host's files, then the spec, each whole or not at all; again with the same content it changes nothing.

        Raises:
            CarrierError: something could not be written; the text names path, reason and remedy.
        """
        await asyncio.to_thread(self._deliver, record, provision, await self._inlined(provision))

    async def prepare(self, record: GrantRecord, provision: Provision) -> None:
        """The same without a spec: for answers that were complete in Allocate.

        Raises:
            CarrierError: as for `deliver`.
        """
        await asyncio.to_thread(self._prepare, record, provision)

    async def stands(self, token: str) -> bool:
        """Whether the spec of that name is where the runtime looks for it."""
        return not await self.missing([token])

    async def missing(self, tokens: Iterable[str]) -> tuple[str, ...]:
        """Those of ``tokens`` that have no spec file now, whatever was delivered before: somebody deleted it, or the node was rebooted."""
        return await asyncio.to_thread(lambda: tuple(token for token in tokens if not os.path.lexists(self._path(token))))

    async def restore(
        self, provisions: Iterable[tuple[GrantRecord, Provision]], still: Callable[[GrantRecord], bool] = lambda _: True
    ) -> int:
        """Deliver each grant whose spec is missing, however many of them fail; returns how many were restored.

        A failure is journaled when it is new: what stands in the way now will mostly stand there at the next look, too.

        Args:
            provisions: all that should be there.
            still: asked just before a grant is delivered, since those before it took their time.
        """
        wanted = {record.token: (record, provision) for record, provision in provisions}
        restored, failed = 0, {}
        for token in await self.missing(wanted):
            record, provision = wanted[token]
            if not still(record):
                continue
            try:
                inlined = await self._inlined(provision)
                restored += await asyncio.to_thread(self._deliver, record, provision, inlined, only_missing=True)
            except CarrierError as err:
                failed[token] = {"pod": record.owner.pod_name, "container": record.owner.container, "error": str(err)}
        self._say("grants.not_restored", "error", failed)
        return restored

    async def collect(self, keep: Callable[[GrantRecord], bool]) -> tuple[GrantRecord, ...]:
        """Remove spec and directory of each grant that ``keep`` does not want any more; what is still mounted waits for the next time.

        Directories go, too, of grants that have lost their ids to others since the last time.

        Returns:
            the grants that were removed.
        """
        removed, failed = [], {}
        if self._left:
            await asyncio.to_thread(self._remove_left)
        for record in self._all():
            if keep(record):
                continue
            try:
                if await asyncio.to_thread(self._collect, record):
                    removed.append(record)
            except CarrierError as err:
                failed[record.token] = {"pod": record.owner.pod_name, "error": str(err)}
        self._say("grants.not_collected", "warning", failed)
        return tuple(removed)

    async def withdraw(self, record: GrantRecord) -> None:
        """Remove the spec of a grant whose ids somebody else has got; its own directory is left to `sweep`.

        Raises:
            CarrierError: the spec cannot be removed.
        """
        await asyncio.to_thread(self._withdraw, record)

    async def sweep(self, parent: str, keep: Callable[[str], bool]) -> tuple[str, ...]:
        """Remove the directories in ``parent`` that no grant owns and whose name ``keep`` does not want: what was left behind by a
        reboot, by an agent that was killed, or by another plugin. What is mounted stays.

        Returns:
            the names that were removed.
        """
        removed, failed = [], {}
        for name in await asyncio.to_thread(_directories, parent):
            path = os.path.join(parent, name)
            if keep(name):
                continue
            try:
                if await asyncio.to_thread(self._sweep, path):
                    removed.append(name)
            except CarrierError as err:
                failed[path] = {"path": path, "error": str(err)}
        self._say("grants.not_swept", "warning", failed)
        return tuple(removed)

    def _say(self, event: str, level: str, failed: Mapping[str, Mapping[str, str]]) -> None:
        """Journal what has failed otherwise than the last time: many pods would push all else out of the journal within minutes."""
        before = self._said.get(event, {})
        for what, facts in failed.items():
            if before.get(what) != facts["error"]:
                self._journal.record(event, level=level, **facts)
        self._said[event] = {what: facts["error"] for what, facts in failed.items()}

    def _path(self, token: str, directory: str = "") -> str:
        return os.path.join(directory or self._directory, f"vgpu-agent-{token}.json")

    def _lock(self, token: str) -> threading.Lock:
        return self._locks[hash(token) % _LOCKS]

    def _lock_of(self, path: str) -> threading.Lock:
        """Who makes the directory of a grant does not meet who removes it."""
        return self._path_locks[hash(path) % _LOCKS]

    def _owned(self) -> set[str]:
        return {record.collected for record in self._all()}

    def _all(self) -> tuple[GrantRecord, ...]:
        return *self._records.values(), *self._prepared.values()

    def _load(self) -> list[tuple[str, dict[str, str]]]:
        notes: list[tuple[str, dict[str, str]]] = []
        records, kept = self._load_from(self._directory, notes), self._load_from(self._kept, notes)
        with self._changing:
            self._records, self._prepared = records, kept
        return notes

    def _load_from(self, directory: str, notes: list[tuple[str, dict[str, str]]]) -> dict[str, GrantRecord]:
        records: dict[str, GrantRecord] = {}
        try:
            names = sorted(os.listdir(directory))
        except (FileNotFoundError, NotADirectoryError):  # what stands in its place is told of by whoever wants to write
            names = []
        except OSError as err:
            raise host_files.trouble("read", directory, err) from err
        for name in names:
            path = os.path.join(directory, name)
            if host_files.is_temporary(name):
                with contextlib.suppress(OSError):
                    os.unlink(path)
            elif matched := _SPEC_NAME.fullmatch(name):
                try:
                    records[matched[1]] = cdi.read_record(_read(path), matched[1])
                except CarrierError as err:
                    notes.append(("grants.unreadable", {"path": path, "error": str(err), "moved": _moved_away(path)}))
        return records

    async def _inlined(self, provision: Provision) -> Inlined | None:
        names = cdi.other_names(provision.edits)
        return await self._inline(names) if names and self._inline is not None else None

    def _deliver(self, record: GrantRecord, provision: Provision, inlined: Inlined | None = None, *, only_missing: bool = False) -> bool:
        """Whether it was delivered; with ``only_missing`` not where a start has put a spec of that name meanwhile."""
        content = cdi.spec_text(record, provision.edits, inlined)
        path = self._path(record.token)
        with self._lock(record.token), self._lock_of(provision.collected):
            before = self._records.get(record.token)
            if only_missing and os.path.lexists(path):
                return False
            host_files.make(provision, self._mounts)
            if not host_files.has(path, content):
                host_files.replace_file(path, content)
            with self._changing:
                self._records = {**self._records, record.token: record}
                if before is not None and before.collected:
                    # The ids have changed hands (an init container has made room, a pod has ended). kubelet waits for this call, and to
                    # look for mounts takes a while on a node with many containers.
                    self._left = {*self._left, before.collected}
            return True

    def _prepare(self, record: GrantRecord, provision: Provision) -> None:
        with self._lock(record.token), self._lock_of(provision.collected):
            host_files.make(provision, self._mounts)
            with self._changing:
                self._prepared = {**self._prepared, record.token: record}
            host_files.replace_file(self._path(record.token, self._kept), cdi.spec_text(record, Edits()))

    def _collect(self, record: GrantRecord) -> bool:
        with self._lock(record.token), self._lock_of(record.collected):
            specced, prepared = self._records.get(record.token) is record, self._prepared.get(record.token) is record
            if not specced and not prepared:
                return False  # somebody else has got these ids meanwhile
            shared = any(other.collected == record.collected for other in self._all() if other is not record)
            if record.collected and not shared and not self._remove_if_free(record.collected):
                return False
            if specced:
                self._unlink(record)
            with self._changing:
                if prepared:
                    self._prepared = {token: kept for token, kept in self._prepared.items() if kept is not record}
            if prepared:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path(record.token, self._kept))
            return True

    def _remove_left(self) -> None:
        """Remove the directories whose grants have lost their ids; what is still mounted stays for the next time, and for `sweep`."""
        for path in self._left:
            with self._lock_of(path):
                if path in self._owned():
                    gone = True  # its container has started again
                else:
                    try:
                        gone = self._remove_if_free(path)
                    except CarrierError:
                        gone = False
            if gone:
                with self._changing:
                    self._left = self._left - {path}

    def _sweep(self, path: str) -> bool:
        with self._lock_of(path):
            return path not in self._owned() and self._remove_if_free(path)

    def _withdraw(self, record: GrantRecord) -> None:
        with self._lock(record.token):
            if self._records.get(record.token) is record:
                self._unlink(record)

    def _unlink(self, record: GrantRecord) -> None:
        path = self._path(record.token)
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as err:
            raise host_files.trouble("remove", path, err) from err
        with self._changing:
            self._records = {token: kept for token, kept in self._records.items() if kept is not record}

    def _remove_if_free(self, path: str) -> bool:
        """Whether the directory is gone now. Where other mount tables cannot be seen, kubelet's word that the pod is gone must do."""
        if self._mounts.mounted_below(path) is Use.MOUNTED:
            return False
        host_files.remove_tree(path)
        return True


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as err:
        raise host_files.trouble("read", path, err) from err


def _moved_away(path: str) -> str:
    """Where a damaged spec went; the runtime reads only what ends in .json or .yaml."""
    try:
        os.rename(path, path + ".broken")
    except OSError as err:
        return f"no: {err.strerror}"
    return path + ".broken"


def _directories(parent: str) -> list[str]:
    try:
        with os.scandir(parent) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
