"""The CDI specs of this node's grants, one file each, and the host files behind them,
through which late binding takes effect.

`Allocate` gives the kubelet a CDI name without a spec. `allocation` decides at `PreStartContainer`
and has this carrier put the spec of that name into the runtime's directory, before it allows the
start. `agent` loads the directory at start, restores it after a reboot, and collects the files of
pods that are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import itertools
import os
import re
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from vgpu_agent.cdi import grant_spec
from vgpu_agent.errors import CarrierError
from vgpu_agent.isolation.edits import Edits
from vgpu_agent.log import ChangeFilter
from vgpu_agent.runtime import host_files, region_slots, removal
from vgpu_agent.runtime.mounts import MountTables, Use
from vgpu_agent.runtime.own_thread import NotReturnedError, OwnThread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from vgpu_agent.allocation.carrier import GrantRecord, Inlined
    from vgpu_agent.isolation.edits import Provision
    from vgpu_agent.journal import Journal
    from vgpu_agent.runtime.region_slots import RegionSlots

T = TypeVar("T")

_SPEC_NAME = re.compile(r"vgpu-agent-([0-9a-f]{32})\.json")
_LOCKS = 64

_MOST_LISTED = 4096  # names that one look at a directory of grants takes
_SLICE_SECONDS = 0.25  # at one tree, before the next has its turn
_ROUND_SECONDS = 5.0  # at all of them, before other work of the loop
_DEADLINE_SECONDS = 30.0  # one piece of work that a disk has not answered by then is left behind
# unfinished files of agents that gave them random names
_EARLIER = (".remembered.json.", ".layout-")
_PATIENCE_SECONDS = 600.0  # between two attempts at what could not be removed


class GrantDirectory:
    """The grants of this node: a spec file each in ``cdi_directory``,
    host files where their provisions place them.

    State: the files; the state in memory is read from them by `load`. The agent can be killed
    between any two lines: host files come first and the spec is renamed into place last, so an
    existing spec has everything it mentions. A directory without a spec is found by `sweep`.

    All work is done in threads, and a thread finishes what it has begun even when the caller is
    cancelled; work on one token is done by one thread at a time. A directory is collected by giving
    it another name, at once. Its content is removed later, in slices and in a thread of its own,
    for which no start waits.
    """

    def __init__(
        self,
        cdi_directory: str,
        journal: Journal,
        *,
        kept_directory: str,
        proc_root: str = "/proc",
        inline: Callable[[Sequence[str]], Awaitable[Inlined]] | None = None,
        swept: Sequence[str] = (),
        make_room: Callable[[], None] = lambda: None,
        made: Callable[[str], None] = lambda _: None,
        earlier: str = "",
        slots: RegionSlots | None = None,
    ) -> None:
        """Use these directories.

        Args:
            cdi_directory: where the runtime looks for specs.
            journal: damaged files are recorded there.
            kept_directory: where the records of grants without a spec are kept, those that were
                answered in full in Allocate.
            proc_root: where procfs is mounted, for the mounts of all processes.
            swept: other directories of the agent's, in which a killed one may have left unfinished
                files.
            make_room: called, in a thread, when the disk is full, before it is tried once more.
            earlier: where earlier agents have made directories that containers could change.
            made: called, in a thread, for each file that containers are about to have.
            slots: where the directories of containers are made, as far as there are any.
            inline: returns the edits of CDI names, which a spec cannot refer to; raises
                CarrierError where there are none.
        """
        self._directory = cdi_directory
        self._kept = kept_directory
        self._inline = inline
        self._journal = journal
        self._mounts = MountTables(proc_root)
        # Replaced as a whole by the thread that has changed a file, so that the event loop reads it
        # without a lock.
        self._records: dict[str, GrantRecord] = {}
        self._prepared: dict[str, GrantRecord] = {}
        self._changing = threading.Lock()
        self._locks = tuple(threading.Lock() for _ in range(_LOCKS))
        self._path_locks = tuple(threading.Lock() for _ in range(_LOCKS))
        # directories of grants whose ids another container has got; `sweep` knows them after a
        # restart
        self._left: set[str] = set()
        self._changes: dict[str, ChangeFilter] = {}  # by event
        self._swept = tuple(swept)
        self._make_room = make_room
        self._made = made
        self._earlier = earlier
        self._slots = slots
        self._own_thread = OwnThread("grant files")
        self._stuck: dict[str, str] = {}  # path → why it cannot be removed
        # path → when it is tried again, by the monotonic clock
        self._again_at: dict[str, float] = {}
        self._hanging = ""  # the path of `_stuck` on which the thread works

    @property
    def records(self) -> Sequence[GrantRecord]:
        """The grants whose specs are there now,
        and those that were answered in full in Allocate.
        """
        return self._all()

    @property
    def outdated(self) -> bool:
        """Tell whether a spec of an earlier agent exists.
        It must be written anew before a container may start from it.
        """
        return any(self._is_outdated(record) for record in self._records.values())

    @property
    def left_over(self) -> Mapping[str, str]:
        """Directories of ended containers that cannot be removed, and why."""
        return self._stuck

    async def load(self) -> None:
        """Read an earlier agent's files. Files of others are left alone. A damaged one of ours is
        moved out of the runtime's way.

        Raises:
            CarrierError: the directory is there and cannot be read.
        """
        for event, facts in await asyncio.to_thread(self._load):
            self._journal.record(event, level="warning", **facts)

    async def deliver(self, record: GrantRecord, provision: Provision) -> None:
        """Make the host's files, then the spec, each whole or not at all.
        The same content again changes nothing.

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
        """Tell whether the runtime finds the spec of that name and may start a container from it.

        A spec of an earlier agent mounts files from a directory that the container could change. It
        must be written anew first.
        """
        record = self._records.get(token)
        return not (record is not None and self._is_outdated(record)) and not await self.missing(
            [token]
        )

    async def missing(self, tokens: Iterable[str]) -> tuple[str, ...]:
        """List those of ``tokens`` that have no spec file now:
        it was never delivered or deleted, or the node was rebooted.
        """
        return await asyncio.to_thread(
            lambda: tuple(token for token in tokens if not os.path.lexists(self._path(token)))
        )

    async def restore(
        self,
        provisions: Iterable[tuple[GrantRecord, Provision]],
        still: Callable[[GrantRecord], bool] = lambda _: True,
    ) -> int:
        """Deliver each grant whose spec is missing, however many of them fail;
        return the number restored.

        A failure is journaled when it is new, because its cause will mostly last until the next
        look. No file is removed, because the container may be running.

        Args:
            provisions: all that should be there.
            still: called just before a grant is delivered, since those before it took their time.
        """
        wanted = {record.token: (record, provision) for record, provision in provisions}
        restored, failed = 0, {}
        for token in await self.missing(wanted):
            record, provision = wanted[token]
            if not still(record):
                continue
            try:
                inlined = await self._inlined(provision)
                kept = dataclasses.replace(provision, removed=())
                restored += await asyncio.to_thread(
                    self._deliver, record, kept, inlined, only_missing=True
                )
            except CarrierError as err:
                failed[token] = {
                    "pod": record.owner.pod_name,
                    "container": record.owner.container,
                    "error": str(err),
                }
        self._say("grants.not_restored", "error", failed)
        return restored

    async def collect(
        self, keep: Callable[[GrantRecord], bool], beat: Callable[[], None] = lambda: None
    ) -> tuple[GrantRecord, ...]:
        """Remove spec and directory of each grant that ``keep`` rejects.
        Mounted directories wait for the next call.

        Directories go, too, of grants that have lost their ids to others since the last time.

        Returns:
            the grants that were removed.
        """
        removed: list[GrantRecord] = []
        failed: dict[str, dict[str, str]] = {}
        trees: list[str] = []
        if self._left:
            with contextlib.suppress(CarrierError):  # `sweep` reports the files that stay
                trees += await self._aside("the directories of ended containers", self._remove_left)
        for record in self._all():
            if keep(record):
                continue
            try:
                freed = await self._aside(
                    record.collected or record.token, functools.partial(self._collect, record)
                )
                if freed is not None:
                    removed.append(record)
                    trees += [freed] if freed else []
            except CarrierError as err:
                failed[record.token] = {"pod": record.owner.pod_name, "error": str(err)}
        self._say("grants.not_collected", "warning", failed)
        await self._remove(trees, beat)
        return tuple(removed)

    async def withdraw(self, record: GrantRecord) -> None:
        """Remove the spec of a grant whose ids another container has got;
        its own directory is left to `sweep`.

        Raises:
            CarrierError: the spec cannot be removed.
        """
        await asyncio.to_thread(self._withdraw, record)

    async def sweep(
        self, parent: str, keep: Callable[[str], bool], beat: Callable[[], None] = lambda: None
    ) -> tuple[str, ...]:
        """Remove the directories in ``parent`` that no grant owns and whose name ``keep`` rejects.
        Mounted ones stay.

        They were collected, or left behind by a reboot, by an agent that was killed, or by another
        plugin. Trees take turns, and one that is not gone when the time is up is continued at the
        next call. Those that cannot be removed are in `left_over`.

        Returns:
            the names that are free again.
        """
        freed: list[str] = []
        failed: dict[str, dict[str, str]] = {}
        trees: list[str] = []
        names: list[str] = []
        try:
            names = await self._aside(parent, functools.partial(_directories, parent))
        except CarrierError as err:
            failed[parent] = {"path": parent, "error": str(err)}
        for name in names:
            path = os.path.join(parent, name)
            if name.startswith(host_files.ASIDE_PREFIX):
                trees.append(path)
            elif not keep(name) and not host_files.is_temporary(name):
                # a start may be about to name it
                try:
                    if aside := await self._aside(path, functools.partial(self._sweep, path)):
                        freed.append(name)
                        trees.append(aside)
                except CarrierError as err:
                    failed[path] = {"path": path, "error": str(err)}
        self._say(f"grants.not_swept {parent}", "warning", failed)
        if parent not in failed:  # it was corrected meanwhile
            self._stuck = {
                path: why
                for path, why in self._stuck.items()
                if os.path.dirname(path) != parent or path in trees
            }
        await self._remove(trees, beat)
        return tuple(freed)

    async def _remove(self, trees: Sequence[str], beat: Callable[[], None]) -> None:
        """Remove the renamed trees: each for a while, then the next,
        until all are gone or the time of a round is up.
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
                    done = await self._aside(
                        path, functools.partial(removal.remove_tree, path, seconds=_SLICE_SECONDS)
                    )
                except NotReturnedError as err:
                    self._hanging = err.what
                    self._leave(err.what, str(err))
                    return  # the others wait for the thread
                except CarrierError as err:
                    waiting.remove(path)
                    self._leave(path, str(err))
                    continue
                if done:
                    waiting.remove(path)
                    self._stuck = {
                        other: why for other, why in self._stuck.items() if other != path
                    }

    def _leave(self, path: str, why: str) -> None:
        """Remember that ``path`` cannot be removed for now; it is logged once."""
        if path not in self._stuck:
            self._journal.record("grants.left_over", level="warning", path=path, error=why)
        self._stuck = {**self._stuck, path: why}
        self._again_at[path] = time.monotonic() + _PATIENCE_SECONDS

    async def _aside(self, what: str, call: Callable[[], T]) -> T:
        result = await self._own_thread.run(what, call, seconds=_DEADLINE_SECONDS)
        if self._hanging:
            self._stuck = {path: why for path, why in self._stuck.items() if path != self._hanging}
            self._hanging = ""
        return result

    def _say(self, event: str, level: str, failed: Mapping[str, Mapping[str, str]]) -> None:
        """Journal what has failed otherwise than the last time: many pods would push all else out
        of the journal within minutes.
        """
        changes = self._changes.setdefault(event, ChangeFilter())
        for what, facts in failed.items():
            if changes.is_new(what, facts["error"]):
                self._journal.record(event.partition(" ")[0], level=level, **facts)
        changes.keep_only(failed)

    def _is_outdated(self, record: GrantRecord) -> bool:
        return bool(self._earlier) and record.collected.startswith(f"{self._earlier}/")

    def _path(self, token: str, directory: str = "") -> str:
        return os.path.join(directory or self._directory, f"vgpu-agent-{token}.json")

    def _lock(self, token: str) -> threading.Lock:
        return self._locks[hash(token) % _LOCKS]

    def _lock_of(self, path: str) -> threading.Lock:
        """Return the lock that keeps the making and the removal of a grant's directory apart."""
        return self._path_locks[hash(path) % _LOCKS]

    def _owned(self) -> set[str]:
        return {record.collected for record in self._all()}

    def _all(self) -> tuple[GrantRecord, ...]:
        return *self._records.values(), *self._prepared.values()

    def _load(self) -> list[tuple[str, dict[str, str]]]:
        notes: list[tuple[str, dict[str, str]]] = []
        records, kept = self._load_from(self._directory, notes), self._load_from(self._kept, notes)
        for directory in self._swept:
            _remove_unfinished(directory)
        if self._slots is not None:
            self._slots.remove_orphans()
        with self._changing:
            self._records, self._prepared = records, kept
        return notes

    def _load_from(
        self, directory: str, notes: list[tuple[str, dict[str, str]]]
    ) -> dict[str, GrantRecord]:
        records: dict[str, GrantRecord] = {}
        try:
            names = sorted(os.listdir(directory))
        except (FileNotFoundError, NotADirectoryError):
            # a wrong file in its place is reported by the writer
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
                    records[matched[1]] = grant_spec.read_record(_read(path), matched[1])
                except CarrierError as err:
                    notes.append(
                        (
                            "grants.unreadable",
                            {"path": path, "error": str(err), "moved": _moved_away(path)},
                        )
                    )
        return records

    async def _inlined(self, provision: Provision) -> Inlined | None:
        names = grant_spec.other_names(provision.edits)
        return await self._inline(names) if names and self._inline is not None else None

    def _deliver(
        self,
        record: GrantRecord,
        provision: Provision,
        inlined: Inlined | None = None,
        *,
        only_missing: bool = False,
    ) -> bool:
        """Deliver a grant; with ``only_missing`` return False where a start has put a spec of
        that name meanwhile.
        """
        content = grant_spec.spec_text(record, provision.edits, inlined)
        path = self._path(record.token)
        with self._lock(record.token), self._lock_of(provision.collected):
            before = self._records.get(record.token)
            if only_missing and os.path.lexists(path):
                return False
            self._make(provision)
            if not host_files.has(path, content):
                host_files.replace_file(path, content)
            with self._changing:
                self._records = {**self._records, record.token: record}
                if before is not None and before.collected:
                    # The ids have a new holder (after an init container or an ended pod). The
                    # kubelet waits for this call, and to look for mounts takes a while on a node
                    # with many containers.
                    self._left = {*self._left, before.collected}
            return True

    def _make(self, provision: Provision) -> None:
        for path in provision.removed:
            host_files.remove_file(region_slots.behind(provision.collected), path)
        try:
            host_files.make(self._placed(provision), self._mounts)
        except CarrierError as err:
            if not isinstance(err.__cause__, OSError) or err.__cause__.errno != errno.ENOSPC:
                raise
            self._make_room()
            host_files.make(self._placed(provision), self._mounts)
        for file in provision.files:
            self._made(file.path)

    def _placed(self, provision: Provision) -> Provision:
        """The provision, for the place that the container's own directory has:
        a slot, or the disk.
        """
        # The mounts of the kubelet's old answer are made of links to the files, which stay on one
        # file system.
        if (
            self._slots is not None
            and provision.collected
            and not provision.remade
            and self._slots.take(provision.collected)
        ):
            return _in_slot(provision)
        return provision

    def _prepare(self, record: GrantRecord, provision: Provision) -> None:
        with self._lock(record.token), self._lock_of(provision.collected):
            self._make(provision)
            with self._changing:
                self._prepared = {**self._prepared, record.token: record}
            host_files.replace_file(
                self._path(record.token, self._kept), grant_spec.spec_text(record, Edits())
            )

    def _collect(self, record: GrantRecord) -> str | None:
        """Free the grant; return the path that is left to remove, "" for none,
        and None when the grant stays.
        """
        with self._lock(record.token), self._lock_of(record.collected):
            specced, prepared = (
                self._records.get(record.token) is record,
                self._prepared.get(record.token) is record,
            )
            if not specced and not prepared:
                return None  # another container has got these ids meanwhile
            shared = any(
                other.collected == record.collected for other in self._all() if other is not record
            )
            freed: str | None = ""
            if record.collected and not shared:
                freed = self._free(record.collected)
                if freed is None:
                    return None
            if specced:
                self._unlink(record)
            with self._changing:
                if prepared:
                    self._prepared = {
                        token: kept for token, kept in self._prepared.items() if kept is not record
                    }
            if prepared:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path(record.token, self._kept))
            return freed

    def _remove_left(self) -> list[str]:
        """Free the directories whose grants have lost their ids; return the paths left to remove.
        Mounted ones stay for later.
        """
        trees = []
        for path in self._left:
            with self._lock_of(path):
                freed: str | None = ""  # its container has started again
                if path not in self._owned():
                    try:
                        freed = self._free(path)
                    except CarrierError:
                        freed = None
            if freed is not None:
                trees += [freed] if freed else []
                with self._changing:
                    self._left = self._left - {path}
        return trees

    def _sweep(self, path: str) -> str:
        with self._lock_of(path):
            return "" if path in self._owned() else self._free(path) or ""

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
            self._records = {
                token: kept for token, kept in self._records.items() if kept is not record
            }

    def _free(self, path: str) -> str | None:
        """Take the name from a directory, and return the one that `sweep` removes it by, "" when it
        is gone; None while it is mounted.

        Where other mount tables cannot be seen, the kubelet's word that the pod is gone must do.
        """
        return (
            None if self._mounts.mounted_below(path) is Use.MOUNTED else host_files.move_aside(path)
        )


def _in_slot(provision: Provision) -> Provision:
    """Return the provision of a container whose own directory is in a slot.

    Nothing is taken in advance there: pages count for their first writer, and no other container
    can use up the slot.
    """
    return dataclasses.replace(
        provision,
        directories=tuple(
            directory
            for directory in provision.directories
            if directory.path != provision.collected
        ),
        files=tuple(dataclasses.replace(file, allocated=False) for file in provision.files),
    )


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as err:
        raise host_files.trouble("read", path, err) from err


def _moved_away(path: str) -> str:
    """Rename a damaged spec and return its new path;
    the runtime reads only names that end in .json or .yaml.
    """
    try:
        os.rename(path, path + ".broken")
    except OSError as err:
        return f"no: {err.strerror}"
    return path + ".broken"


def _directories(parent: str) -> list[str]:
    """Names of directories in ``parent``, `_MOST_LISTED` at most;
    the next round sees the others.
    """
    try:
        with os.scandir(parent) as entries:
            found = (entry.name for entry in entries if entry.is_symlink() or entry.is_dir())
            return sorted(itertools.islice(found, _MOST_LISTED))
    except FileNotFoundError:
        return []
    except OSError as err:
        raise host_files.trouble("read", parent, err) from err


def _remove_unfinished(directory: str) -> None:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        unfinished = [
            entry.name
            for entry in entries
            if host_files.is_temporary(entry.name) or entry.name.startswith(_EARLIER)
        ]
        for name in unfinished:
            path = os.path.join(directory, name)
            with contextlib.suppress(OSError):
                os.rmdir(path) if os.path.isdir(path) else os.unlink(path)
