"""Fixtures for the host: a grant with a region, a made-up /proc,
and the schema of what a runtime accepts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from vgpu_agent.allocation.carrier import GrantRecord, grant_token
from vgpu_agent.isolation.edits import Edits, HostDirectory, HostFile, Mount, Provision
from vgpu_agent.journal import Journal
from vgpu_agent.model import Owner, Share
from vgpu_agent.runtime.grants import GrantDirectory

MakeGrant = Callable[..., tuple[GrantRecord, Provision]]


class HostProc:
    """A /proc of our own: the agent's mount table, and those of other processes."""

    def __init__(self, root: Path, host: Path) -> None:
        self.root = root
        self.host = host
        self.write("self", [])

    def write(
        self, pid: str, mounts: list[tuple[str, str]], *, root: str = "", device: str = "8:1"
    ) -> None:
        """The table of one process: the file system of the host at ``/``, and (source on the host,
        path in the container).
        """
        lines = [f"1 0 {device} {root or '/'} / rw - ext4 /dev/sda1 rw"]
        lines += [
            f"{number} 1 {device} {source} {point} rw,relatime shared:1 - ext4 /dev/sda1 rw"
            for number, (source, point) in enumerate(mounts, 2)
        ]
        (self.root / pid).mkdir(parents=True, exist_ok=True)
        (self.root / pid / "mountinfo").write_text("\n".join(lines) + "\n")

    def someone_else(self, *mounts: tuple[str, str], pid: str = "4711") -> None:
        """A process in another mount namespace, which has these mounts."""
        self.write(pid, [("/containers/rootfs", "/"), *mounts])


@pytest.fixture
def proc(tmp_path: Path) -> HostProc:
    """A host on which one other container runs, which mounts nothing of ours."""
    made = HostProc(tmp_path / "proc", tmp_path)
    made.someone_else(pid="1")
    return made


@pytest.fixture
def journal() -> Journal:
    """An empty journal."""
    return Journal()


@pytest.fixture
def cdi_directory(tmp_path: Path) -> Path:
    """Return the runtime's folder of specs; missing, as after a reboot."""
    return tmp_path / "run" / "cdi"


@pytest.fixture
def grants(cdi_directory: Path, journal: Journal, proc: HostProc) -> GrantDirectory:
    """The carrier under test."""
    return GrantDirectory(
        str(cdi_directory),
        journal,
        proc_root=str(proc.root),
        kept_directory=str(cdi_directory.parent / "kept"),
    )


@pytest.fixture
def grant(tmp_path: Path) -> MakeGrant:
    """Makes (record, provision) number n, with a directory, a region and a mount of its own."""

    def make(number: int = 1, **changed: object) -> tuple[GrantRecord, Provision]:
        directory = str(tmp_path / "vgpu" / "containers" / f"uid-{number}_main")
        record = GrantRecord(
            token=grant_token("volcano.sh/vgpu-number", [f"GPU-a-{number}"]),
            family="volcano-vgpu",
            resource="volcano.sh/vgpu-number",
            id_count=1,
            owner=Owner("main", f"uid-{number}", "default", f"pod-{number}"),
            shares=(Share("GPU-a", 3000, 50),),
            decider="the scheduler, in volcano.sh/vgpu-ids-new",
            decided_at=1795200692.5,
            own_directory=directory,
        )
        provision = Provision(
            Edits({"CUDA_DEVICE_MEMORY_LIMIT_0": "3000m"}, (Mount("/tmp/vgpu", directory),)),
            (HostDirectory(directory, 0o777),),
            (
                HostFile(
                    f"{directory}/region.cache",
                    8192,
                    ((0, b"magic"), (8000, b"limit")),
                    0o666,
                    ((8000, b"LIMIT"),),
                ),
            ),
            own_directory=directory,
        )
        # fields by name
        return msgspec.structs.replace(record, **changed), provision

    return make


def names(directory: Path) -> list[str]:
    """Return the names in the directory, hidden files too."""
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []
