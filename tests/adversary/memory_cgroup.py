"""A memory cgroup as the kubelet makes one for a container: a process that takes more than its
limit is killed by the kernel.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


class MemoryCgroup:
    """One cgroup with a memory limit, below the one of the tests.

    Args:
        directory: of the cgroup; it exists.
        version: 1 or 2, of the cgroup interface.
    """

    def __init__(self, directory: Path, version: int) -> None:
        self._directory, self._version = directory, version

    @property
    def command(self) -> tuple[str, ...]:
        """The beginning of a command line that enters the cgroup
        and then becomes the command behind it.
        """
        return ("/bin/sh", "-c", f'echo $$ > {self._directory}/cgroup.procs && exec "$@"', "sh")

    @property
    def kills(self) -> int:
        """Processes in it that the kernel has killed for want of memory."""
        name = "memory.oom_control" if self._version == 1 else "memory.events"
        facts = dict(line.split() for line in (self._directory / name).read_text().splitlines())
        return int(facts["oom_kill"])


@contextlib.contextmanager
def memory_cgroup(limit_mib: int) -> Iterator[MemoryCgroup]:
    """Make a cgroup with this limit, and remove it when its processes have ended.

    Raises:
        OSError: this machine allows none; it takes root, and the memory controller of cgroup v1 or
            v2.
    """
    version = 1 if (_V1 / "memory.limit_in_bytes").exists() else 2
    root = _V1 if version == 1 else _V2
    directory = root / f"vgpu-agent-test-{os.getpid()}"
    if version == 2:
        (root / "cgroup.subtree_control").write_text("+memory")
    directory.mkdir()
    try:
        limit = str(limit_mib << 20)
        (directory / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text(limit)
        yield MemoryCgroup(directory, version)
    finally:
        for _ in range(500):  # until the kernel has let go of the last process
            with contextlib.suppress(OSError):
                directory.rmdir()
                break
            time.sleep(0.02)
