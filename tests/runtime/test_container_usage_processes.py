"""Tell from a made-up /proc whether a process of a container still runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from vgpu_agent.runtime.container_usage import HostProcesses


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """The host's /proc, with kthreadd and one process of a container."""
    write(tmp_path, 2, "kthreadd", nspid="2")
    write(tmp_path, 4711, "python3", nspid="4711\t4690\t7")
    return tmp_path


def write(
    proc: Path, pid: int, name: str, *, state: str = "S (sleeping)", nspid: str | None = None
) -> None:
    """The status file of one process."""
    (proc / str(pid)).mkdir(exist_ok=True)
    last = "" if nspid is None else f"NSpid:\t{nspid}\n"
    (proc / str(pid) / "status").write_text(
        f"Name:\t{name}\nUmask:\t0022\nState:\t{state}\nPid:\t{pid}\n{last}"
    )


def test_the_host_is_known_by_its_kernel_thread(proc: Path) -> None:
    """Only the host has kthreadd, as process 2."""
    assert HostProcesses(str(proc)).visible


@pytest.mark.parametrize("name", ["bash", None])
def test_a_container_is_not_the_host(proc: Path, name: str | None) -> None:
    """Without host PIDs, process 2 may be any or none, and numbers of the host mean nothing."""
    if name is None:
        (proc / "2" / "status").unlink()
    else:
        write(proc, 2, name)
    assert not HostProcesses(str(proc)).visible


def test_a_process_that_runs(proc: Path) -> None:
    """Its number in the innermost namespace is the one that it has entered in the region."""
    assert HostProcesses(str(proc)).is_alive(4711, 7)


def test_a_process_that_is_gone(proc: Path) -> None:
    """Its entry in /proc is missing."""
    assert not HostProcesses(str(proc)).is_alive(4712, 7)


@pytest.mark.parametrize("state", ["Z (zombie)", "X (dead)"])
def test_a_process_that_has_ended_and_was_not_waited_for(proc: Path, state: str) -> None:
    """It holds no memory of a GPU any more."""
    write(proc, 4711, "python3", state=state, nspid="4711\t4690\t7")
    assert not HostProcesses(str(proc)).is_alive(4711, 7)


def test_a_number_that_was_given_to_another_process(proc: Path) -> None:
    """The kernel gives numbers again; inside its container the new one has another."""
    assert not HostProcesses(str(proc)).is_alive(4711, 8)


def test_a_kernel_that_tells_no_namespaces(proc: Path) -> None:
    """Linux before 4.1 has no NSpid. Then the number on the host has to do."""
    write(proc, 4711, "python3")
    assert HostProcesses(str(proc)).is_alive(4711, 7)


@pytest.mark.parametrize("hostpid", [0, -1])
def test_a_process_without_a_number_on_the_host_counts(proc: Path, hostpid: int) -> None:
    """The library does not always find its number (hami-core §2.4);
    memory in use must not be overlooked.
    """
    assert HostProcesses(str(proc)).is_alive(hostpid, 7)
