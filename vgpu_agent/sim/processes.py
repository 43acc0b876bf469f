"""A process on a simulated GPU: its use, and the slot (a row of the node's state file) and the lock
by which NVML shows it.

`SimulatedNode` shows processes that need not exist. The program `holder` runs as a real one. A live
process holds a POSIX lock on one byte of the state file; the library asks the kernel who holds it
(native/usage.c).
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, Self

from vgpu_agent.errors import SimulationError
from vgpu_agent.sim import layout

if TYPE_CHECKING:
    from pathlib import Path

# In the state file a type is its place here.
PROCESS_TYPES: Final = ("compute", "graphics", "mps")
_FLOCK: Final = "hhqqi4x"  # struct flock on 64-bit Linux: type, whence, start, length, pid
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """The use of a GPU by a process; ``type`` is one of `PROCESS_TYPES`, ``gpu_instance``
    and ``compute_instance`` are NVML's ids of the MIG instance that it runs in.
    """

    memory_mib: int
    sm_percent: int = 0
    memory_percent: int = 0
    type: str = "compute"
    gpu_instance: int | None = None
    compute_instance: int | None = None

    def __post_init__(self) -> None:
        if (
            self.memory_mib < 0
            or not 0 <= self.sm_percent <= 100
            or not 0 <= self.memory_percent <= 100
        ):
            raise SimulationError(f"a process uses 0 or more MiB and 0 to 100 percent, not {self}")
        if self.type not in PROCESS_TYPES:
            raise SimulationError(
                f"unknown type of process {self.type!r}; there are {', '.join(PROCESS_TYPES)}"
            )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return it as one line of JSON, for a command line."""
        return json.dumps(asdict(self))

    def fill(self, row: layout.Process, *, pid: int) -> None:
        """Write this use into ``row``, a slot; the caller sets ``row.kind`` (`layout.Process`)
        afterwards, which makes it visible. A live process also sets ``row.pid_namespace``, by which
        it knows the slot as its own; others need none.
        """
        row.pid, row.pid_namespace, row.type = pid, 0, PROCESS_TYPES.index(self.type)
        row.memory_bytes = self.memory_mib * _MIB
        row.sm_percent, row.memory_percent = self.sm_percent, self.memory_percent
        row.gpu_instance = layout.NONE if self.gpu_instance is None else self.gpu_instance
        row.compute_instance = (
            layout.NONE if self.compute_instance is None else self.compute_instance
        )


def try_lock(descriptor: int, gpu: int, slot: int) -> bool:
    """Take the slot's lock for this process; return False when another live process holds it.

    ``descriptor`` is that of the open state file.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLK, _request(gpu, slot))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, both mean that it is taken
        return False
    return True


def is_locked(state_path: Path, gpu: int, slot: int) -> bool:
    """Tell whether another process holds the slot's lock. Never call it in a process that holds
    one: closing the file releases all locks of the process on it.
    """
    with state_path.open("r+b") as file:
        answer = fcntl.fcntl(file.fileno(), fcntl.F_GETLK, _request(gpu, slot))
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def _request(gpu: int, slot: int) -> bytes:
    """Return the ``struct flock`` of a slot's lock."""
    return struct.pack(
        _FLOCK, fcntl.F_WRLCK, os.SEEK_SET, layout.LOCK_BASE + gpu * layout.PROCESSES + slot, 1, 0
    )
