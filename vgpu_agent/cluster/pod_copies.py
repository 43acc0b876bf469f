"""The file with the pods that are on their way: deleted, or about to be, and not yet recreated.

Unlike the caches in ``stateDirectory`` this is the only place where such a pod still is, so each
change is on the disk before anything is deleted, and a file that is damaged is kept for a person.
Used by `rescue`, which replaces pods that have failed on this node.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from vgpu_agent import log

_logger = log.get(__name__)

_NAME = "rescued-pods.json"
# Enough for as many copies as `rescue` keeps at once, each of the largest size.
_LONGEST_BYTES = 64 * 1024 * 1024


class Copy(msgspec.Struct):
    """One pod that will be recreated.

    Attributes:
        uid: of the pod that is deleted and recreated.
        namespace: of both pods, the deleted one and the new one.
        name: of both pods.
        since: unix seconds of the first deletion; long after it, the pod is given up.
        body: the pod to be created, as it is sent to the API server.
        reason: why the pod is recreated, for its owner.
    """

    uid: str
    namespace: str
    name: str
    since: float
    body: dict[str, Any]
    reason: str = ""


class Tries(msgspec.Struct):
    """The chances that the pods of one owner, or of one name, were given to run after a failure:
    each is an eviction, or a deletion and recreation.

    Attributes:
        number: how many in a row.
        last: unix seconds of the last chance.
        created: unix seconds of the creation of the pod that got the last chance. Pods of the same
            owner that were created together with it, or before, have failed together with it and
            are not counted again.
    """

    number: int
    last: float
    created: float = 0.0


class State(msgspec.Struct):
    """The content of the file.

    Attributes:
        copies: by the UID of the deleted pod.
        tries: by namespace and the controller's UID, or by the namespace and name of a pod without
            one.
    """

    copies: dict[str, Copy] = msgspec.field(default_factory=dict)
    tries: dict[str, Tries] = msgspec.field(default_factory=dict)


class PodCopies:
    """The file: a checksum in the first line, then JSON, replaced as a whole."""

    def __init__(self, directory: str) -> None:
        """Choose the file in ``directory`` (``stateDirectory``), which `write` makes if missing.
        `path` is the path of the file.
        """
        self.path = Path(directory) / _NAME

    async def read(self) -> State:
        """Read what was written last; empty where there is no file, or a damaged one, which is
        moved aside.
        """
        return await asyncio.to_thread(self._read)

    async def write(self, state: State) -> None:
        """Write ``state``; it is on the disk when this returns.

        Raises:
            OSError: it could not be written; the file has what it had.
        """
        await asyncio.to_thread(self._write, msgspec.json.encode(state))

    def _read(self) -> State:
        try:
            with self.path.open("rb") as file:
                checksum, _, content = file.read(_LONGEST_BYTES).partition(b"\n")
            if checksum.decode() != _checksum(content):
                return self._damaged("its checksum does not fit")
            return msgspec.json.decode(content, type=State)
        except FileNotFoundError:
            return State()
        except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as err:
            return self._damaged(str(err))

    def _damaged(self, why: str) -> State:
        aside = self.path.with_suffix(".damaged")
        try:
            os.replace(self.path, aside)
        except OSError as err:
            why = f"{why}; it could not be moved to {aside}: {err}"
        _logger.error(
            "rescue.copies_unreadable",
            path=str(self.path),
            error=why,
            remedy=f"if pods are missing, create them from what is left in {aside}",
        )
        return State()

    def _write(self, content: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".new")
        # Pods' variables may hold secrets.
        with open(unfinished, "wb", opener=_private) as file:
            file.write(_checksum(content).encode() + b"\n" + content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
