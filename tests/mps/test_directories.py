"""Directories, marks, labels and the shared memory of MPS daemons."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from vgpu_agent.errors import MpsError
from vgpu_agent.isolation.mps import DaemonPlan, MpsOptions
from vgpu_agent.mps import directories


def _plan(root: Path) -> DaemonPlan:
    return DaemonPlan(
        "nvidia.com/gpu", f"{root}/nvidia.com/gpu", f"{root}/nvidia.com/gpu/pipe", (), 25
    )


def test_the_pipe_directory_is_open_to_all_and_what_is_in_it_stays(tmp_path: Path) -> None:
    """Mode 0755 whatever the umask. An earlier daemon's socket is not touched,
    since that daemon may be alive.
    """
    pipe = Path(_plan(tmp_path).pipe)
    pipe.mkdir(parents=True, mode=0o700)
    (pipe / "control").touch()
    directories.prepare(_plan(tmp_path), sysfs_root=str(tmp_path))
    assert pipe.stat().st_mode & 0o777 == 0o755
    assert (pipe / "control").exists()
    assert Path(_plan(tmp_path).log).is_dir()


def test_with_selinux_containers_may_use_the_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With selinuxfs mounted, the pipe directory and its content get the type of container files.
    Elsewhere none is set.
    """
    labelled: list[tuple[str, bytes]] = []
    monkeypatch.setattr(
        os, "setxattr", lambda path, name, value, **_: labelled.append((f"{path} {name}", value))
    )
    directories.prepare(_plan(tmp_path), sysfs_root=str(tmp_path))
    assert labelled == []
    (tmp_path / "fs/selinux").mkdir(parents=True)
    (tmp_path / "fs/selinux/enforce").touch()
    (Path(_plan(tmp_path).pipe) / "control").touch()
    directories.prepare(_plan(tmp_path), sysfs_root=str(tmp_path))
    label = b"system_u:object_r:container_file_t:s0\0"
    pipe = _plan(tmp_path).pipe
    assert labelled == [
        (f"{pipe} security.selinux", label),
        (f"{pipe}/control security.selinux", label),
    ]


def test_a_directory_that_cannot_be_made_is_named_with_the_remedy(tmp_path: Path) -> None:
    """The message has path, reason and remedy, since it is why the resource is withheld."""
    (tmp_path / "nvidia.com").touch()
    with pytest.raises(
        MpsError,
        match=(
            r"cannot prepare .*/nvidia.com.* for an MPS control daemon: Not a directory; move away "
            r"the file"
        ),
    ):
        directories.prepare(_plan(tmp_path))


def test_a_plan_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    """A directory in its place, or a full disk: neither is mended by another mps.root."""
    (Path(_plan(tmp_path).directory) / ".plan.json").mkdir(parents=True)
    with pytest.raises(
        MpsError, match=r"cannot write .*/\.plan\.json: Is a directory; move away the directory"
    ):
        directories.remember(_plan(tmp_path))


def test_a_pipe_whose_socket_no_daemon_could_open_is_refused(tmp_path: Path) -> None:
    """Too long a path makes the real daemon start and never listen.
    The reason names the length and the keys.
    """
    with pytest.raises(
        MpsError,
        match=(r"has a name of \d{3} bytes, and the kernel allows 107; choose a shorter name"),
    ):
        directories.prepare(_plan(tmp_path / ("x" * 100)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "stranger's"])
def test_a_directory_that_somebody_else_has_put_there_is_left_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user may make /tmp/nvidia-mps: root would change the mode of what a link leads to, and an
    owner is between daemon and clients.
    """
    victim, pipe = tmp_path / "victim", tmp_path / "tmp/nvidia-mps"
    victim.mkdir(mode=0o700)
    pipe.parent.mkdir()
    if kind == "link":
        pipe.symlink_to(victim)
    else:
        pipe.mkdir(mode=0o700)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    plan = msgspec.structs.replace(_plan(tmp_path), pipe=str(pipe))
    with pytest.raises(
        MpsError, match=r"nvidia-mps .*remove it, so that the agent creates its own"
    ):
        directories.prepare(plan, sysfs_root=str(tmp_path))
    assert victim.stat().st_mode & 0o777 == 0o700
    assert pipe.stat().st_mode & 0o777 == 0o700


def test_shared_memory_is_half_of_the_nodes(tmp_path: Path) -> None:
    """A tmpfs of half of MemTotal, or of the size that is set,
    and of NVIDIA's fallback where the memory is not known.
    """
    (tmp_path / "meminfo").write_text("MemTotal:       16384000 kB\nMemFree: 1 kB\n")
    mounted: list[tuple[str, str]] = []

    def mount(target: str, options: str) -> None:
        mounted.append((target, options))

    directories.share_memory(str(tmp_path), size_mib=0, proc_root=str(tmp_path), mount=mount)
    directories.share_memory(str(tmp_path), size_mib=64, proc_root=str(tmp_path), mount=mount)
    directories.share_memory(str(tmp_path), size_mib=0, proc_root=str(tmp_path / "no"), mount=mount)
    assert mounted == [
        (f"{tmp_path}/shm", f"mode=1777,size={kib}k") for kib in (8192000, 65536, 65536)
    ]


def test_shared_memory_that_is_mounted_already_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers have it mounted. A second tmpfs on top would part them from their daemon."""
    monkeypatch.setattr(os.path, "ismount", lambda _: True)
    directories.share_memory(
        str(tmp_path), size_mib=1, mount=lambda *_: pytest.fail("it was mounted again")
    )


def test_who_may_not_mount_is_told_how_somebody_else_can(tmp_path: Path) -> None:
    """Without root the reason has the command that an administrator may run instead."""

    def refuse(target: str, _: str) -> None:
        raise PermissionError(1, "Operation not permitted", target)

    with pytest.raises(
        MpsError,
        match=(
            r"Operation not permitted; run the agent as root .* mount -t tmpfs -o "
            r"mode=1777,size=65536k shm "
        ),
    ):
        directories.share_memory(str(tmp_path), size_mib=64, mount=refuse)


def test_the_shared_memory_is_really_mounted_and_only_once(tmp_path: Path) -> None:
    """In a mount namespace of its own, where any user may mount: a tmpfs of the size, open to all.
    The second call leaves it alone.
    """
    script = (
        "import os; from vgpu_agent.mps.directories import share_memory\n"
        f"share_memory({str(tmp_path)!r}, size_mib=4); open({str(tmp_path / 'shm/kept')!r}, "
        f"'w').close()\nshare_memory({str(tmp_path)!r}, size_mib=4); "
        f"print(os.listdir({str(tmp_path / 'shm')!r}))\nstatus = "
        f"os.statvfs({str(tmp_path / 'shm')!r}); print(status.f_blocks * status.f_frsize >> 20)\n"
        f"print(oct(os.stat({str(tmp_path / 'shm')!r}).st_mode & 0o7777))\n"
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare" in done.stderr:
        pytest.skip(
            f"this machine gives nobody a mount namespace of his own: {done.stderr.strip()}"
        )
    assert done.stdout.splitlines() == ["['kept']", "4", "0o1777"], done.stderr
    assert not (tmp_path / "shm/kept").exists()


def test_the_kernels_refusal_to_mount_is_an_error_with_its_number(tmp_path: Path) -> None:
    """mount(2) through the C library: a target that is not there gives ENOENT,
    or EPERM without the right to mount.
    """
    with pytest.raises(OSError, match=r"No such file|not permitted"):
        directories.mount_tmpfs(str(tmp_path / "no"), "size=4k")


@pytest.mark.parametrize(
    ("simulated", "in_pod", "mounted", "directory", "host_memory"),
    [
        (False, True, True, "/mps", False),
        (False, True, False, "/mps", False),  # fails there: no client would see another directory
        (False, False, True, "/mps", False),
        (False, False, False, "/run/nvidia/mps", True),
        (True, True, True, "/run/nvidia/mps", False),
    ],
)
def test_daemons_have_their_files_where_clients_mount_them(
    monkeypatch: pytest.MonkeyPatch,
    *,
    simulated: bool,
    in_pod: bool,
    mounted: bool,
    directory: str,
    host_memory: bool,
) -> None:
    """An agent that runs on the node itself has nothing mounted at /mps. Its daemons use the node's
    /dev/shm, so clients mount that one.
    """
    monkeypatch.setattr(os.path, "ismount", lambda path: mounted and path == "/mps")
    view = directories.view("/run/nvidia/mps", simulated=simulated, in_pod=in_pod)
    assert (view.directory, view.has_host_memory) == (directory, host_memory)
    options = MpsOptions("/run/nvidia/mps", view=view)
    assert options.pipe("a/b") == f"{directory}/a/b/pipe"
    assert options.host_pipe("a/b") == "/run/nvidia/mps/a/b/pipe"
    assert options.host_shared_memory == ("/dev/shm" if host_memory else "/run/nvidia/mps/shm")
