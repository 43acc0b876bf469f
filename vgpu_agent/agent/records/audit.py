"""The audit log of grants: which container held which devices, from when to when, and by whose
decision.

One JSON object per line, in a file that other software may collect (setting ``audit.file``). A file
that has grown to ``audit.maxMib`` is renamed, and the oldest of its predecessors is removed.
The log says what the ledger knew: a reservation that was dropped before its pod was known has no
line.

`composition` runs the loop.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import datetime as dt
import os
import time
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent import __version__, log
from vgpu_agent.concurrency import Versions
from vgpu_agent.errors import HostFileError
from vgpu_agent.model import GrantState
from vgpu_agent.runtime.host_files import file_error
from vgpu_agent.runtime.own_thread import OwnThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from vgpu_agent.config.audit import Audit
    from vgpu_agent.journal import Journal
    from vgpu_agent.ledger import Ledger
    from vgpu_agent.model import Grant, Inventory

# Predecessors of the file: FILE.1 is the youngest.
_KEPT_FILES = 4
# Lines that wait for a disk. A container needs two: for the beginning and the end of its grant.
_MAX_WAITING = 10_000
_WRITE_SECONDS = 10.0  # the time limit of one access to the file
_RETRY_SECONDS = 10.0  # the longest pause after a failed write
# A previous process that stopped longer ago was not followed by this one at once.
_AT_ONCE_SECONDS = 300.0
# The size of the end of the file that is searched for lines of the previous process.
_READ_BACK_BYTES = 4 * 1024 * 1024
# The events of lines that say that a container has devices.
_HOLDS = frozenset({"granted", "found", "changed"})
# The beginning of the sentence in `Grant.evidence` about who has decided on the devices.
_DECIDED = "decided by "
_BY_KUBELET = "the kubelet, which chose the device ids"
_MIB = 1024 * 1024


# UID of the pod, container, resource
_Holder = tuple[str, str, str]


class AuditLog:
    """The comparison of the ledger's grants with those of the last call of `look`, and the file.

    State: the grants that have a line, and the lines that could not be written yet. Lines that
    still wait when the process ends are lost. The next process writes ``started``, and then a line
    for each grant that it finds; a grant without one has ended in between. The line has the event
    ``found``, or ``granted`` where the previous process has just ended in an orderly way, as when
    one agent hands over to the next, and has written no line about the grant.
    """

    def __init__(
        self,
        settings: Audit,
        ledger: Ledger,
        *,
        inventory: Callable[[], Inventory],
        journal: Journal,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Build it.

        Args:
            settings: the file and its greatest size.
            ledger: the grants.
            inventory: the GPUs, for the GPU of a MIG instance.
            journal: receives failures to write.
            clock: unix seconds.
        """
        self._path, self._max_bytes = settings.file, settings.max_mib * _MIB
        self._ledger, self._inventory, self._journal = ledger, inventory, journal
        self._clock = clock
        self._thread = OwnThread("audit log")
        self._known: dict[int, Grant] = {}  # the grants that have a line, by number
        self._looked = False  # `look` was called before
        # the containers that have a line of the previous process; None where that is not certain
        self._before: frozenset[_Holder] | None = None
        self._waiting: collections.deque[bytes] = collections.deque()
        self._writing: asyncio.Task[bool] | None = None  # the last write
        self._lost = 0  # lines that were dropped since the last write, because too many waited
        self._changes = log.ChangeFilter()  # so that a failure is logged once, not at each try

    async def run(self) -> None:
        """Write a line for each change of a grant, until cancelled."""
        with contextlib.suppress(HostFileError):  # `write` reports a disk that does not answer
            self._before = await self._thread.run(
                self._path, self._previous_holders, seconds=_WRITE_SECONDS
            )
        self._add("started", version=__version__)
        while True:
            versions = Versions(self._ledger.revision)
            self.look()
            written = await self.write()
            # waits for the next change of the ledger
            await versions.passed(timeout_seconds=None if written else _RETRY_SECONDS)

    async def close(self) -> None:
        """Write the last lines. The loop may have been cancelled during a write: then it is not
        known yet which lines are in the file, so this waits for the end of that write.
        """
        if self._writing is not None:
            await asyncio.wait((self._writing,))
        self.look()
        self._add("stopped")
        await self.write()

    def look(self) -> None:
        """Add a line for each grant that has begun, changed or ended since the last call."""
        grants = {
            grant.number: grant
            for grant in self._ledger.grants
            if grant.owner is not None and grant.shares and grant.state is not GrantState.RELEASED
        }
        for number, grant in self._known.items():
            if number not in grants:
                until = self._clock()
                self._add(
                    "released",
                    **self._facts(grant),
                    until=_time(until),
                    seconds=round(max(0.0, until - grant.reserved_at), 3),
                )
        for number, grant in grants.items():
            before = self._known.get(number)
            if before is None:
                # At the first call, the ledger has what it found in the kubelet's records. A grant
                # that it found there later is marked as `found`.
                new = self._looked and not grant.found
                facts = self._facts(grant)
                if self._before is not None:
                    new = new or _holder(facts) not in self._before
                self._add("granted" if new else "found", **facts)
            elif (before.owner, before.shares) != (grant.owner, grant.shares):
                self._add("changed", **self._facts(grant))
        self._known, self._looked = grants, True

    async def write(self) -> bool:
        """Append the waiting lines to the file; return whether none waits any more. A failure is
        logged once, and the lines wait for the next call. A cancellation does not cut this short.
        """
        if not self._waiting:
            return True
        self._writing = asyncio.ensure_future(self._write())
        return await asyncio.shield(self._writing)

    async def _write(self) -> bool:
        if self._lost:
            self._waiting.appendleft(_line(self._clock(), "lost", {"lines": self._lost}))
        lines = tuple(self._waiting)
        try:
            await self._thread.run(
                self._path, lambda: self._append(b"".join(lines)), seconds=_WRITE_SECONDS
            )
        except HostFileError as err:
            if self._lost:
                self._waiting.popleft()
            if self._changes.is_new("write", str(err)):
                self._journal.record("audit.not_written", level="error", error=str(err))
            return False
        self._lost = 0
        for _ in lines:
            self._waiting.popleft()
        if self._changes.forget("write"):
            self._journal.record("audit.written_again", path=self._path)
        return not self._waiting

    def _add(self, event: str, **facts: Any) -> None:
        self._waiting.append(_line(self._clock(), event, facts))
        if len(self._waiting) > _MAX_WAITING:
            self._waiting.popleft()
            self._lost += 1

    def _facts(self, grant: Grant) -> dict[str, Any]:
        """Return the fields of a line about ``grant``."""
        owner, inventory = grant.owner, self._inventory()
        assert owner is not None  # noqa: S101 - `look` takes no others
        devices = []
        for share in grant.shares:
            known = inventory.device(share.device)
            devices.append(
                {
                    "device": share.device,
                    "gpu": known[0].uuid if known is not None else share.device,
                    "memoryMiB": share.memory_mib,
                    "coresPercent": share.cores_percent,
                    "exclusive": share.exclusive,
                }
            )
        return {
            "grant": grant.number,
            "namespace": owner.namespace,
            "pod": owner.pod,
            "podUID": owner.pod_uid,
            "container": owner.container,
            "family": grant.family,
            "resource": grant.resource,
            "amount": len(grant.ids),
            "devices": devices,
            "decidedBy": _decider(grant),
            "since": _time(grant.reserved_at),
        }

    # -- in the thread -----------------------------------------------------------------------------

    def _previous_holders(self) -> frozenset[_Holder] | None:
        """Return the containers of which the previous process has written a line; None unless all
        its lines are in the file and it has ended just now.
        """
        try:
            with open(self._path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _READ_BACK_BYTES))
                lines = file.read().splitlines()
            if not lines or not self._just_stopped(msgspec.json.decode(lines[-1])):
                return None
            holders: set[_Holder] = set()
            for line in reversed(lines):
                facts = msgspec.json.decode(line)
                if facts["event"] == "started":
                    return frozenset(holders)
                if facts["event"] in _HOLDS:
                    holders.add(_holder(facts))
        except (OSError, msgspec.DecodeError, KeyError, TypeError):
            return None
        return None

    def _just_stopped(self, facts: dict[str, Any]) -> bool:
        """Tell whether ``facts``, the last line of the file, says that the previous process has
        ended in an orderly way a short time ago.
        """
        stopped_at: str = facts["at"]
        since = _time(self._clock() - _AT_ONCE_SECONDS)
        return facts["event"] == "stopped" and stopped_at >= since

    def _append(self, content: bytes) -> None:
        """Append to the file, after a rotation where it would become too large.

        Raises:
            HostFileError: it cannot be written.
        """
        try:
            os.makedirs(os.path.dirname(self._path), mode=0o755, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                size = os.lstat(self._path).st_size
                if size and size + len(content) > self._max_bytes:
                    self._rotate()
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(self._path, flags, 0o600)
            try:
                size = os.fstat(file).st_size
                if size and os.pread(file, 1, size - 1) != b"\n":
                    content = b"\n" + content  # after a crash in the middle of a line
                _write_all(file, content)
            finally:
                os.close(file)
        except OSError as err:
            raise file_error("write the audit log", self._path, err) from err

    def _rotate(self) -> None:
        for number in range(_KEPT_FILES, 0, -1):
            source = f"{self._path}.{number - 1}" if number > 1 else self._path
            with contextlib.suppress(FileNotFoundError):
                os.replace(source, f"{self._path}.{number}")


def _write_all(file: int, content: bytes) -> None:
    """Write all of ``content``, or nothing that stays: a part would be written once more.

    Raises:
        OSError: not all of it could be written.
    """
    size = os.fstat(file).st_size
    left = memoryview(content)
    try:
        while left:
            left = left[os.write(file, left) :]
    except OSError:
        os.ftruncate(file, size)
        raise


def _holder(facts: dict[str, Any]) -> _Holder:
    return facts["podUID"], facts["container"], facts["resource"]


def _decider(grant: Grant) -> str:
    """Return who has decided on the devices; empty where that was not found again after a restart
    of the agent. A grant with ``decided_for``, the container that a decision was made for, is of a
    family whose pods decide.
    """
    # `evidence`: sentences on how the owner was proven and on what decided the shares
    by = (text for text in grant.evidence if text.startswith(_DECIDED))
    return next(by, "" if grant.decided_for else _BY_KUBELET).removeprefix(_DECIDED)


def _line(at: float, event: str, facts: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"at": _time(at), "event": event, **facts}) + b"\n"


def _time(unix_seconds: float) -> str:
    """Return RFC 3339 with milliseconds, in UTC."""
    moment = dt.datetime.fromtimestamp(unix_seconds, dt.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
