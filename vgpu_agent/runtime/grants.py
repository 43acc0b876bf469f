"""The files of this node's grants: a CDI spec for each, and the host files that it mounts.

With late binding, the answer to `Allocate` is a CDI name without a spec. At `PreStartContainer`
`allocation` decides the grant. Before it allows the start, it has this module write the spec of
that name into the container runtime's directory (the `Carrier` protocol). With early binding the
answer to `Allocate` is complete, so there is no spec: only the host files and a record of the
grant.

`agent` loads the files at start, restores missing ones after a reboot, and removes those of pods
that are gone. Removing the files of a grant is called *collecting* it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import os
import re
import threading
import time
from typing import TYPE_CHECKING, TypeVar

import msgspec

from vgpu_agent import log
from vgpu_agent.cdi import grant_spec
from vgpu_agent.errors import HostFileError
from vgpu_agent.isolation.edits import Edits
from vgpu_agent.runtime import host_files, region_slots, removal
from vgpu_agent.runtime.mounts import MountTables, Use
from vgpu_agent.runtime.own_thread import NotReturnedError, OwnThread
from vgpu_agent.status import MAKE_ROOM, WriteFailure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

    from vgpu_agent.allocation.carrier import GrantRecord, InlinedEdits
    from vgpu_agent.isolation.edits import Provision
    from vgpu_agent.journal import Journal
    from vgpu_agent.runtime.region_slots import RegionSlots

_logger = log.get(__name__)

T = TypeVar("T")

_SPEC_NAME = re.compile(r"vgpu-agent-([0-9a-f]{32})\.json")
_LOCK_COUNT = 64  # for all tokens, chosen by hash, and as many for all paths

_MAX_LISTED = 4096  # the most names that `sweep` reads from a directory at once
_SLICE_SECONDS = 0.25  # spent on removing one tree, before the next one
_ROUND_SECONDS = 5.0  # spent on removing trees in one call, so that the agent's loop can go on
_DEADLINE_SECONDS = 30.0  # for one job in the own thread; then the disk counts as hung
_RETRY_SECONDS = 600.0  # between two attempts to remove the same tree
# the reasons for which a file system takes no file at all
_OF_THE_FILE_SYSTEM = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
)
# written and removed again, to see whether a file system takes files once more
_TRIAL_NAME = f"{host_files.TEMPORARY_PREFIX}trial{host_files.TEMPORARY_SUFFIX}"
_TRIAL_BYTES = 4096  # as much as the spec of a grant
# unfinished files of earlier versions, which gave them random names
_OLD_TEMPORARY_PREFIXES = (".remembered.json.", ".layout-")


class GrantDirectory:
    """The files of the grants: a spec in ``cdi_directory`` for each,
    and host files in the places that its `Provision` names.

    State: the files; `load` reads the state in memory from them. The agent can be killed between
    any two lines. Host files are made first and the spec is renamed into place last, so all files
    that an existing spec mentions are there. `sweep` finds directories without a spec.

    All work is done in threads. A thread finishes its work even when the caller is cancelled, and
    one thread at a time works on a token. Most grants have a directory of their own on the host
    (`Provision.own_directory`). It is collected in two steps. At once it is renamed, so that its
    name is free for a new grant. Later its content is removed, in slices and in a thread of its
    own, so that no start waits for it.
    """

    def __init__(
        self,
        cdi_directory: str,
        journal: Journal,
        *,
        kept_directory: str,
        proc_root: str = "/proc",
        inline: Callable[[Sequence[str]], Awaitable[InlinedEdits]] | None = None,
        other_directories: Sequence[str] = (),
        free_disk_space: Callable[[], None] = lambda: None,
        on_file_made: Callable[[str], None] = lambda _: None,
        old_directory: str = "",
        slots: Sequence[RegionSlots] = (),
    ) -> None:
        """Use these directories.

        Args:
            cdi_directory: the directory in which the runtime looks for specs.
            journal: gets an entry for each damaged file and each failure.
            kept_directory: the directory for the records of grants without a spec, which were
                answered in full in Allocate.
            proc_root: the mount point of procfs, for the mounts of all processes.
            inline: returns the edits behind CDI names, because a spec cannot refer to another one;
                raises HostFileError for a name without a spec. None: a grant with such names is
                refused.
            other_directories: directories of the agent, in which a killed agent may have left
                unfinished files.
            free_disk_space: called in a thread when the disk is full, before one more attempt.
            on_file_made: called in a thread with the path of each host file that was made for a
                container, so that those who guard or read such files know it.
            old_directory: the directory in which earlier versions made directories that containers
                could change.
            slots: for each isolation backend, the small file systems in memory for its containers'
                directories. A directory that gets none is on the disk.
        """
        self._directory = cdi_directory
        self._kept = kept_directory
        self._inline = inline
        self._journal = journal
        self._mounts = MountTables(proc_root)
        # Replaced as a whole by the thread that has changed a file, so that the event loop reads it
        # without a lock.
        self._records: dict[str, GrantRecord] = {}
        # those without a spec, which were answered in full in Allocate
        self._prepared: dict[str, GrantRecord] = {}
        self._changing = threading.Lock()  # held while a thread replaces such a value
        self._locks = tuple(threading.Lock() for _ in range(_LOCK_COUNT))
        self._path_locks = tuple(threading.Lock() for _ in range(_LOCK_COUNT))
        # directories of grants whose ids went to another container; after a restart `sweep` finds
        # them
        self._unowned: set[str] = set()
        self._failures: dict[str, log.ChangeFilter] = {}  # event → what was journalled
        self._write_failures: dict[str, WriteFailure] = {}  # by directory
        self._other_directories = tuple(other_directories)
        self._free_disk_space = free_disk_space
        self._on_file_made = on_file_made
        self._old_directory = old_directory
        self._slots = tuple(slots)
        self._own_thread = OwnThread("grant files")
        self._keeps_all = False
        self._stuck: dict[str, str] = {}  # path → why it cannot be removed
        # path → when it is tried again, by the monotonic clock
        self._again_at: dict[str, float] = {}
        self._hanging = ""  # the path of `_stuck` on which the thread hangs; empty for none

    @property
    def records(self) -> Sequence[GrantRecord]:
        """The grants with a spec, and those that were answered in full in Allocate."""
        return self._all()

    @property
    def has_outdated_spec(self) -> bool:
        """Tell whether a spec of an earlier version exists.
        It must be written again before a container may start from it.
        """
        return any(self._is_outdated(record) for record in self._records.values())

    @property
    def left_over(self) -> Mapping[str, str]:
        """Directories of ended containers that cannot be removed, and why."""
        return self._stuck

    @property
    def write_failures(self) -> Sequence[WriteFailure]:
        """The directories in which the files of a start could not be written, until they can."""
        return tuple(self._write_failures.values())

    async def load(self) -> None:
        """Read the files of the agent's last run. Other programs' files are left alone.
        A damaged spec of the agent's is renamed, so that the runtime does not read it.

        Raises:
            HostFileError: the directory is there and cannot be read.
        """
        for event, facts in await asyncio.to_thread(self._load):
            self._journal.record(event, level="warning", **facts)

    async def tidy(self) -> None:
        """Remove the unfinished files and half-made directories that a killed agent has left.

        Call this while no other agent serves the node, because what it is just making looks the
        same; and before the first file is made.
        """
        await asyncio.to_thread(self._tidy)

    def keep_all(self) -> None:
        """Remove nothing any more, also in a thread that goes on for a cancelled caller: another
        agent is taking over this node, and a file of the same name may be one of its containers'.
        """
        self._keeps_all = True

    async def deliver(self, record: GrantRecord, provision: Provision) -> None:
        """Make the host files, then the spec, each atomically.
        A second call with the same content changes nothing.

        Raises:
            HostFileError: something could not be written; the text names path, reason and remedy.
        """
        await asyncio.to_thread(self._deliver, record, provision, await self._inlined(provision))

    async def write_host_files(self, record: GrantRecord, provision: Provision) -> None:
        """Make the host files and keep the record, without a spec:
        for a container whose answer in Allocate was complete.

        Raises:
            HostFileError: as for `deliver`.
        """
        await asyncio.to_thread(self._prepare, record, provision)

    async def has_usable_spec(self, token: str) -> bool:
        """Tell whether the spec of ``token`` exists and a container may start from it.

        A spec of an earlier version mounts files from a directory that the container could change.
        It must be written again first.
        """
        record = self._records.get(token)
        return not (record is not None and self._is_outdated(record)) and not await self.missing(
            [token]
        )

    async def missing(self, tokens: Iterable[str]) -> tuple[str, ...]:
        """List those of ``tokens`` without a spec file.
        It was never written, was deleted, or was lost in a reboot.
        """
        return await asyncio.to_thread(
            lambda: tuple(token for token in tokens if not os.path.lexists(self._path(token)))
        )

    async def restore(
        self,
        provisions: Iterable[tuple[GrantRecord, Provision]],
        still: Callable[[GrantRecord], bool] = lambda _: True,
    ) -> int:
        """Deliver each grant whose spec is missing, even after one has failed;
        return the number of restored specs.

        Only a new failure is journalled, because its cause usually lasts until the next call. No
        file is removed, because the container may be running.

        Args:
            provisions: the grants that should have a spec, with their files.
            still: tells whether a grant is still held; called just before it is delivered, because
                those before it take time.
        """
        if self._write_failures:
            await asyncio.to_thread(self._retry_failed)
        wanted = {record.token: (record, provision) for record, provision in provisions}
        restored, failed = 0, {}
        for token in await self.missing(wanted):
            record, provision = wanted[token]
            if not still(record):
                continue
            try:
                inlined = await self._inlined(provision)
                kept = msgspec.structs.replace(provision, removed=())
                restored += await asyncio.to_thread(
                    self._deliver, record, kept, inlined, only_missing=True
                )
            except HostFileError as err:
                failed[token] = {
                    "pod": record.owner.pod_name,
                    "container": record.owner.container,
                    "error": str(err),
                }
        self._journal_new("grants.not_restored", "error", failed)
        return restored

    async def collect(
        self, keep: Callable[[GrantRecord], bool], beat: Callable[[], None] = lambda: None
    ) -> tuple[GrantRecord, ...]:
        """Remove spec and directory of each grant that ``keep`` rejects.
        A grant whose directory is still mounted waits for the next call.

        This also removes the directories of grants whose ids went to another container since the
        last call.

        Args:
            keep: tells whether a grant stays.
            beat: called between two steps, as the heartbeat of the caller's loop.

        Returns:
            the grants that were removed.
        """
        removed: list[GrantRecord] = []
        failed: dict[str, dict[str, str]] = {}
        trees: list[str] = []
        if self._unowned:
            with contextlib.suppress(HostFileError):  # `sweep` reports the files that stay
                trees += await self._in_own_thread(
                    "the directories of ended containers", self._free_unowned
                )
        for record in self._all():
            if keep(record):
                continue
            try:
                renamed = await self._in_own_thread(
                    record.own_directory or record.token, functools.partial(self._collect, record)
                )
                if renamed is not None:
                    removed.append(record)
                    trees += [renamed] if renamed else []
            except HostFileError as err:
                failed[record.token] = {"pod": record.owner.pod_name, "error": str(err)}
        self._journal_new("grants.not_collected", "warning", failed)
        await self._remove(trees, beat)
        return tuple(removed)

    async def withdraw(self, record: GrantRecord) -> None:
        """Remove the spec of a grant whose ids went to another container;
        `sweep` removes its directory.

        Raises:
            HostFileError: the spec cannot be removed.
        """
        await asyncio.to_thread(self._withdraw, record)

    async def sweep(
        self, parent: str, keep: Callable[[str], bool], beat: Callable[[], None] = lambda: None
    ) -> tuple[str, ...]:
        """Remove the directories in ``parent`` that no grant owns and whose name ``keep`` rejects.
        Mounted ones stay.

        They were collected, or left behind by a reboot, by an agent that was killed, or by another
        plugin. Several large trees are removed a slice at a time in turn. The next call continues
        with those that are not gone after `_ROUND_SECONDS`. `left_over` has those that cannot be
        removed.

        Args:
            parent: the directory that has the directories of grants.
            keep: called with the name of a directory; tells whether it stays.
            beat: called between two steps, as the heartbeat of the caller's loop.

        Returns:
            the names that are free for new grants.
        """
        freed: list[str] = []
        failed: dict[str, dict[str, str]] = {}
        trees: list[str] = []
        names: list[str] = []
        try:
            names = await self._in_own_thread(parent, functools.partial(_directories, parent))
        except HostFileError as err:
            failed[parent] = {"path": parent, "error": str(err)}
        for name in names:
            path = os.path.join(parent, name)
            if name.startswith(host_files.ASIDE_PREFIX):  # renamed earlier, to be removed
                trees.append(path)
            elif not keep(name) and not host_files.is_temporary(name):
                # A temporary name belongs to a start that is about to make its directory.
                try:
                    if renamed := await self._in_own_thread(
                        path, functools.partial(self._sweep, path)
                    ):
                        freed.append(name)
                        trees.append(renamed)
                except HostFileError as err:
                    failed[path] = {"path": path, "error": str(err)}
        self._journal_new(f"grants.not_swept {parent}", "warning", failed)
        if parent not in failed:  # forget the trees that were removed by hand
            self._stuck = {
                path: why
                for path, why in self._stuck.items()
                if os.path.dirname(path) != parent or path in trees
            }
        await self._remove(trees, beat)
        return tuple(freed)

    async def _remove(self, trees: Sequence[str], beat: Callable[[], None]) -> None:
        """Remove the renamed trees, a slice of each in turn,
        until all are gone or `_ROUND_SECONDS` are over.
        """
        now = time.monotonic()
        waiting = [
            path
            for path in trees
            if path not in self._stuck or now >= self._again_at.get(path, now)
        ]
        self._again_at = {path: at for path, at in self._again_at.items() if path in self._stuck}
        until = time.monotonic() + _ROUND_SECONDS
        while waiting and time.monotonic() < until:
            for path in tuple(waiting):
                beat()
                try:
                    done = await self._in_own_thread(
                        path, functools.partial(removal.remove_tree, path, seconds=_SLICE_SECONDS)
                    )
                except NotReturnedError as err:
                    self._hanging = err.what
                    self._note_stuck(err.what, str(err))
                    return  # the thread hangs on this tree, so the others wait for a later call
                except HostFileError as err:
                    waiting.remove(path)
                    self._note_stuck(path, str(err))
                    continue
                if done:
                    waiting.remove(path)
                    self._stuck = {
                        other: why for other, why in self._stuck.items() if other != path
                    }

    def _note_stuck(self, path: str, why: str) -> None:
        """Remember that ``path`` cannot be removed now, and journal it once."""
        if path not in self._stuck:
            self._journal.record("grants.left_over", level="warning", path=path, error=why)
        self._stuck = {**self._stuck, path: why}
        self._again_at[path] = time.monotonic() + _RETRY_SECONDS

    async def _in_own_thread(self, what: str, call: Callable[[], T]) -> T:
        """Return the result of ``call`` from the own thread; ``what`` names its path or
        its work, for errors.
        """
        result = await self._own_thread.run(what, call, seconds=_DEADLINE_SECONDS)
        if self._hanging:
            self._stuck = {path: why for path, why in self._stuck.items() if path != self._hanging}
            self._hanging = ""
        return result

    def _journal_new(self, event: str, level: str, failed: Mapping[str, Mapping[str, str]]) -> None:
        """Journal the failures that are new or whose error is not that of last time.
        On a node with many pods, repetitions would fill the journal within minutes.

        Text after a space in ``event`` keeps its failures apart from others of that event. It is
        not journalled.

        Args:
            event: the event's name.
            level: its log level.
            failed: all that fails now: a token or a path → the fields of its event.
        """
        changes = self._failures.setdefault(event, log.ChangeFilter())
        for what, facts in failed.items():
            if changes.is_new(what, facts["error"]):
                self._journal.record(event.partition(" ")[0], level=level, **facts)
        changes.keep_only(failed)

    def _is_outdated(self, record: GrantRecord) -> bool:
        return bool(self._old_directory) and record.own_directory.startswith(
            f"{self._old_directory}/"
        )

    def _path(self, token: str, directory: str = "") -> str:
        return os.path.join(directory or self._directory, f"vgpu-agent-{token}.json")

    def _lock(self, token: str) -> threading.Lock:
        return self._locks[hash(token) % _LOCK_COUNT]

    def _lock_of(self, path: str) -> threading.Lock:
        """Return the lock under which the directory ``path`` of a grant is made or removed."""
        return self._path_locks[hash(path) % _LOCK_COUNT]

    def _owned(self) -> set[str]:
        return {record.own_directory for record in self._all()}

    def _all(self) -> tuple[GrantRecord, ...]:
        return *self._records.values(), *self._prepared.values()

    def _load(self) -> list[tuple[str, dict[str, str]]]:
        notes: list[tuple[str, dict[str, str]]] = []
        records, kept = self._load_from(self._directory, notes), self._load_from(self._kept, notes)
        with self._changing:
            self._records, self._prepared = records, kept
        return notes

    def _tidy(self) -> None:
        for directory in (self._directory, self._kept, *self._other_directories):
            _remove_unfinished(directory)
        for slots in self._slots:
            slots.remove_orphans()

    def _load_from(
        self, directory: str, notes: list[tuple[str, dict[str, str]]]
    ) -> dict[str, GrantRecord]:
        """Read the records in ``directory``, by token; add an event with its fields to ``notes``
        for each damaged file.
        """
        records: dict[str, GrantRecord] = {}
        try:
            names = sorted(os.listdir(directory))
        except (FileNotFoundError, NotADirectoryError):
            # The first write reports a file in the place of the directory.
            names = []
        except OSError as err:
            raise host_files.file_error("read", directory, err) from err
        for name in names:
            path = os.path.join(directory, name)
            if matched := _SPEC_NAME.fullmatch(name):
                try:
                    records[matched[1]] = grant_spec.read_record(_read(path), matched[1])
                except HostFileError as err:
                    notes.append(
                        (
                            "grants.unreadable",
                            {"path": path, "error": str(err), "moved": _moved_away(path)},
                        )
                    )
        return records

    async def _inlined(self, provision: Provision) -> InlinedEdits | None:
        names = grant_spec.other_names(provision.edits)  # CDI names
        return await self._inline(names) if names and self._inline is not None else None

    def _deliver(
        self,
        record: GrantRecord,
        provision: Provision,
        inlined: InlinedEdits | None = None,
        *,
        only_missing: bool = False,
    ) -> bool:
        """Deliver a grant and return True.
        With ``only_missing``, return False if a start has written the spec meanwhile.
        """
        content = grant_spec.spec_text(record, provision.edits, inlined)
        path = self._path(record.token)
        with self._lock(record.token), self._lock_of(provision.own_directory):
            before = self._records.get(record.token)
            if only_missing and os.path.lexists(path):
                return False
            self._make(provision)
            if not host_files.has(path, content):
                self._write(path, content, self._directory)
            with self._changing:
                self._records = {**self._records, record.token: record}
                if before is not None and before.own_directory:
                    # The ids went to a new container, after an init container or an ended pod. Its
                    # predecessor's directory is removed later: the kubelet waits for this call, and
                    # the search for mounts takes a while on a node with many containers.
                    self._unowned = {*self._unowned, before.own_directory}
            return True

    def _make(self, provision: Provision) -> None:
        # e.g. files of the container's previous run; the directory may be a link to one in a slot
        for path in provision.removed:
            host_files.remove_file(region_slots.resolve_slot(provision.own_directory), path)
        with self._noting(os.path.dirname(provision.own_directory), "the files of containers"):
            try:
                # the mount tables tell it which existing files containers still use
                host_files.make(self._placed(provision), self._mounts)
            except HostFileError as err:
                if not isinstance(err.__cause__, OSError) or err.__cause__.errno != errno.ENOSPC:
                    raise
                self._free_disk_space()
                host_files.make(self._placed(provision), self._mounts)
        for file in provision.files:
            self._on_file_made(file.path)

    def _write(self, path: str, content: bytes, directory: str) -> None:
        with self._noting(directory, "the records of containers"):
            host_files.replace_file(path, content)

    @contextlib.contextmanager
    def _noting(self, directory: str, files: str) -> Iterator[None]:
        """Remember for `write_failures` that the file system of ``directory`` takes no file.
        ``files`` says in words what is written there.
        """
        try:
            yield
        except HostFileError as err:
            cause = err.__cause__
            if directory and isinstance(cause, OSError) and cause.errno in _OF_THE_FILE_SYSTEM:
                failure = WriteFailure(
                    directory=directory,
                    files=files,
                    error=cause.strerror or str(cause),
                    meanwhile="no new container starts",
                )
                self._note_failure(failure)
            raise
        self._forget_failure(directory)

    def _note_failure(self, failure: WriteFailure) -> None:
        before = self._write_failures.get(failure.directory)
        with self._changing:
            self._write_failures = {**self._write_failures, failure.directory: failure}
        if before != failure:
            _logger.warning(
                "grants.not_written",
                directory=failure.directory,
                files=failure.files,
                error=failure.error,
                remedy=f"{MAKE_ROOM}; until then {failure.meanwhile}",
            )

    def _forget_failure(self, directory: str) -> None:
        if directory in self._write_failures:
            with self._changing:
                self._write_failures = {
                    failed: failure
                    for failed, failure in self._write_failures.items()
                    if failed != directory
                }

    def _retry_failed(self) -> None:
        """Try the directories of `write_failures` again, since there may be no further start."""
        for directory in tuple(self._write_failures):
            path = os.path.join(directory, _TRIAL_NAME)
            try:
                host_files.replace_file(path, bytes(_TRIAL_BYTES))
                os.unlink(path)
            except (HostFileError, OSError):
                continue
            self._forget_failure(directory)

    def _placed(self, provision: Provision) -> Provision:
        """Return the provision for a slot if the container's directory gets one,
        and unchanged if the directory is on the disk.
        """
        # If the container still mounts the directory of an earlier version of the agent, that has
        # hard links to the files, so these must be on the same file system.
        if (
            provision.own_directory
            and not provision.replaces_earlier
            and any(slots.take(provision.own_directory) for slots in self._slots)
        ):
            return _in_slot(provision)
        return provision

    def _prepare(self, record: GrantRecord, provision: Provision) -> None:
        with self._lock(record.token), self._lock_of(provision.own_directory):
            self._make(provision)
            with self._changing:
                self._prepared = {**self._prepared, record.token: record}
            self._write(
                self._path(record.token, self._kept),
                grant_spec.spec_text(record, Edits()),  # a spec only in form, for its record
                # the state directory: failures of all files in it are shown as one problem
                os.path.dirname(self._kept),
            )

    def _collect(self, record: GrantRecord) -> str | None:
        """Remove the grant's spec and rename its directory.

        Returns:
            the new path of the directory, which is still to be removed; empty when there is none;
            None when the grant stays.
        """
        with self._lock(record.token), self._lock_of(record.own_directory):
            self._require_removals()
            has_spec, prepared = (
                self._records.get(record.token) is record,
                self._prepared.get(record.token) is record,
            )
            if not has_spec and not prepared:
                return None  # the ids went to another container meanwhile
            shared = any(
                other.own_directory == record.own_directory
                for other in self._all()
                if other is not record
            )
            renamed: str | None = ""
            if record.own_directory and not shared:
                renamed = self._free(record.own_directory)
                if renamed is None:
                    return None
            if has_spec:
                self._unlink(record)
            with self._changing:
                if prepared:
                    self._prepared = {
                        token: kept for token, kept in self._prepared.items() if kept is not record
                    }
            if prepared:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path(record.token, self._kept))
            return renamed

    def _free_unowned(self) -> list[str]:
        """Rename the directories of grants whose ids went to another container;
        return the new paths, which are still to be removed. Mounted ones wait for the next call.
        """
        trees = []
        for path in self._unowned:
            with self._lock_of(path):
                renamed: str | None = ""  # for a container that has started again and owns it
                if path not in self._owned():
                    try:
                        renamed = self._free(path)
                    except HostFileError:
                        renamed = None
            if renamed is not None:
                trees += [renamed] if renamed else []
                with self._changing:
                    self._unowned = self._unowned - {path}
        return trees

    def _sweep(self, path: str) -> str:
        """Rename a directory that no grant owns; return the new path, empty if it stays or is
        gone.
        """
        with self._lock_of(path):
            return "" if path in self._owned() else self._free(path) or ""

    def _withdraw(self, record: GrantRecord) -> None:
        with self._lock(record.token):
            if self._records.get(record.token) is record:
                self._unlink(record)

    def _require_removals(self) -> None:
        if self._keeps_all:
            raise HostFileError("another agent is taking over this node, and nothing is removed")

    def _unlink(self, record: GrantRecord) -> None:
        self._require_removals()
        path = self._path(record.token)
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as err:
            raise host_files.file_error("remove", path, err) from err
        with self._changing:
            self._records = {
                token: kept for token, kept in self._records.items() if kept is not record
            }

    def _free(self, path: str) -> str | None:
        """Free the name of a directory by renaming it.

        Where the mount tables of other processes cannot be read, the kubelet's record that the pod
        is gone must suffice.

        Returns:
            the new path, which is still to be removed; empty when there is no directory; None while
            it is mounted.
        """
        if self._mounts.mounted_below(path) is Use.MOUNTED:
            return None
        self._require_removals()  # the search may have taken long
        return host_files.move_aside(path)


def _in_slot(provision: Provision) -> Provision:
    """Return the provision of a container whose own directory is in a slot.

    Its files are not allocated in advance. The kernel charges a page of memory to its first
    writer, which should be the container, and no other container can use up the slot.
    """
    return msgspec.structs.replace(
        provision,
        directories=tuple(
            directory
            for directory in provision.directories
            if directory.path != provision.own_directory
        ),
        files=tuple(msgspec.structs.replace(file, allocated=False) for file in provision.files),
    )


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as err:
        raise host_files.file_error("read", path, err) from err


def _moved_away(path: str) -> str:
    """Rename a damaged spec and return its new path, or the reason why that failed.
    The runtime reads only names that end in .json or .yaml.
    """
    try:
        os.rename(path, path + ".broken")
    except OSError as err:
        return f"no: {err.strerror}"
    return path + ".broken"


def _directories(parent: str) -> list[str]:
    """List the names of directories in ``parent``, `_MAX_LISTED` at most.
    The next `sweep` sees the others.
    """
    try:
        with os.scandir(parent) as entries:
            found = (entry.name for entry in entries if entry.is_symlink() or entry.is_dir())
            return sorted(itertools.islice(found, _MAX_LISTED))
    except FileNotFoundError:
        return []
    except OSError as err:
        raise host_files.file_error("read", parent, err) from err


def _remove_unfinished(directory: str) -> None:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        unfinished = [
            entry.name
            for entry in entries
            if host_files.is_temporary(entry.name) or entry.name.startswith(_OLD_TEMPORARY_PREFIXES)
        ]
        for name in unfinished:
            path = os.path.join(directory, name)
            with contextlib.suppress(OSError):
                os.rmdir(path) if os.path.isdir(path) else os.unlink(path)
