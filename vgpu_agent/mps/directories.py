"""Directories, marks and shared memory of MPS control daemons,
and the label that lets containers use them under SELinux.

A *pipe* here is a directory, as in NVIDIA's variable CUDA_MPS_PIPE_DIRECTORY; a *mark* is an empty
file by which other programs see the state of a daemon.
Called by `daemon` and `supervision`, in threads, because every call may block on a disk. Paths:
nvidia §11.1 and §11.2.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import MpsError
from vgpu_agent.isolation.mps import CONTAINER_ROOT, IN_CONTAINER, DaemonPlan, MpsView

if TYPE_CHECKING:
    from collections.abc import Callable

STARTED = ".started"  # mark in the directory of a daemon: it runs, with its limits
# A daemon's settings (`DaemonPlan`: directories, GPUs and limits) as JSON. The file is beside the
# pipe, not in it: containers do not see it.
_PLAN = ".plan.json"
READY = ".ready"  # mark in ``mps.root``: all desired daemons run
# The SELinux label of files that containers may read and write; as an attribute it ends in a zero
# byte.
_LABEL = b"system_u:object_r:container_file_t:s0\0"
_LONGEST_SOCKET = 107  # bytes of a socket's path: sun_path of unix(7) without the zero at its end
# size of the shared memory where the node's memory is not known; NVIDIA's plugin has the same
_FALLBACK_KIB = 65536
_MAX_LABELLED = 256  # files of a pipe that get the label
# What a daemon makes in its pipe.
_PIPE_FILES = (
    "control",
    "control_lock",
    "control_privileged",
    "log",
    "nvidia-cuda-mps-control.pid",
)
_LARGEST_PLAN = 1 << 20  # bytes
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8  # mount(2)


def view(root: str, *, simulated: bool, in_pod: bool) -> MpsView:
    """Find out where this process sees ``root`` (``mps.root``). Blocks.

    With ``simulated`` GPUs that is ``root`` itself. A pod is to have it mounted at `CONTAINER_ROOT`
    (``/mps``). A pod without that mount must not make ``root`` in its own file system instead,
    because no client would see it.
    """
    if simulated:
        return MpsView(root, simulated=True)
    if in_pod or os.path.ismount(CONTAINER_ROOT):
        return IN_CONTAINER  # the view of an agent that sees it at `CONTAINER_ROOT`
    return MpsView(root)


def prepare(plan: DaemonPlan, *, sysfs_root: str = "/sys") -> None:
    """Make the daemon's directories, with the label where the node has SELinux;
    what an earlier daemon has left there stays.

    Raises:
        MpsError: they cannot be made.
    """
    pipe, log = Path(plan.pipe), Path(plan.log)
    # with a longer path, the daemon would start, not listen, and report nothing
    if (length := len(os.fsencode(f"{plan.pipe}/control"))) > _LONGEST_SOCKET:
        raise MpsError(
            f"the socket {plan.pipe}/control of an MPS control daemon has a name of {length} "
            f"bytes, and the kernel allows {_LONGEST_SOCKET}; choose a shorter "
            "name for the resource"
        )
    try:
        pipe.mkdir(mode=0o755, parents=True, exist_ok=True)
        _require_own(pipe)
        pipe.chmod(0o755)
        if _has_selinux(sysfs_root):
            os.setxattr(pipe, "security.selinux", _LABEL)
            with os.scandir(pipe) as entries:
                # The daemon's files lie here, side by side. Clients may write here, too, so only a
                # limited number of entries is read.
                for entry in itertools.islice(entries, _MAX_LABELLED):
                    with contextlib.suppress(FileNotFoundError):
                        os.setxattr(entry.path, "security.selinux", _LABEL, follow_symlinks=False)
        log.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as err:
        raise MpsError(
            f"cannot prepare {err.filename or plan.directory} for an MPS control daemon: "
            f"{err.strerror}; {_remedy(err)}"
        ) from err


def _require_own(directory: Path) -> None:
    """Raise `MpsError` for a directory of another user, which any user can make in /tmp."""
    found = directory.lstat()
    if stat.S_ISLNK(found.st_mode):
        what = "is a link"
    elif found.st_uid != os.geteuid():
        what = f"belongs to the user {found.st_uid}"
    else:
        return
    raise MpsError(
        f"{directory} {what}, and its owner could intercept the clients of an MPS control "
        "daemon; remove it, so that the agent creates its own"
    )


def mark(directory: str, name: str) -> None:
    """Make the mark `STARTED` or `READY` in a directory. Only other programs may wait for it, so a
    failure is no error.
    """
    with contextlib.suppress(OSError):
        (Path(directory) / name).touch()


def unmark(directory: str, name: str) -> None:
    """Remove the file ``name``, such as a mark, from a directory; a failure is no error."""
    with contextlib.suppress(OSError):
        (Path(directory) / name).unlink()


def remember(plan: DaemonPlan) -> None:
    """Write down the GPUs that a daemon is about to have, for a restarted agent whose settings no
    longer have this daemon: it has to set the GPUs' compute mode back.

    Raises:
        MpsError: it cannot be written.
    """
    path = Path(plan.directory) / _PLAN
    unfinished = path.with_suffix(".new")
    try:
        unfinished.write_bytes(msgspec.json.encode(plan))
        unfinished.replace(path)
    except OSError as err:
        raise MpsError(f"cannot write {path}: {err.strerror}; {_remedy(err)}") from err


def remembered(root: str) -> list[DaemonPlan]:
    """Return the plans that `remember` has written below ``root``, the agent's view of
    ``mps.root``, and `forget` has not removed: a daemon may still run, or its GPUs still have its
    compute mode. A file that is not a complete plan is removed: no daemon was started by it.
    """
    plans = []
    # a daemon's directory has the name of its resource, which contains a slash
    for path in sorted(Path(root).glob(f"*/*/{_PLAN}")):
        with contextlib.suppress(OSError):
            path.with_suffix(".new").unlink(missing_ok=True)
            with path.open("rb") as file:
                content = file.read(_LARGEST_PLAN)
            try:
                plan = msgspec.json.decode(content, type=DaemonPlan)
            except (msgspec.MsgspecError, UnicodeError, RecursionError):
                path.unlink()
                continue
            if plan.directory == str(path.parent):  # not a file that was copied elsewhere
                plans.append(plan)
    return plans


def forget(plan: DaemonPlan) -> None:
    """Take away what `remember` has written: its daemon has ended, and its GPUs have their default
    compute mode again.
    """
    unmark(plan.directory, _PLAN)


def clear(plan: DaemonPlan) -> None:
    """Take away what belongs to a daemon that has ended: its mark and its logs. The pipe stays,
    since containers may have it mounted.
    """
    unmark(plan.directory, STARTED)
    shutil.rmtree(plan.log, ignore_errors=True)


def remove_pipe(plan: DaemonPlan) -> None:
    """Remove the pipe of a daemon that has ended for good, and the daemon's directory.
    A directory that is mounted or has other files stays.
    """
    for name in _PIPE_FILES:
        unmark(plan.pipe, name)
    with contextlib.suppress(OSError):
        Path(plan.pipe).rmdir()
    with contextlib.suppress(OSError):
        Path(plan.directory).rmdir()


def mount_tmpfs(target: str, options: str) -> None:
    """Mount a tmpfs at ``target``, with the mount ``options`` of mount(2).

    Raises:
        OSError: the kernel refuses.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.mount(
        b"shm", target.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, options.encode()
    ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def share_memory(
    root: str,
    *,
    size_mib: int,
    proc_root: str = "/proc",
    mount: Callable[[str, str], None] = mount_tmpfs,
) -> None:
    """Make ``<root>/shm`` a tmpfs that all daemons and containers see as /dev/shm;
    an existing mount stays.

    Args:
        root: the agent's view of ``mps.root``.
        size_mib: 0 for half of the node's memory.
        proc_root: the directory whose file ``meminfo`` says how much memory the node has.
        mount: replaced by tests that may not mount.

    Raises:
        MpsError: it cannot be mounted; the message says how to do it by hand.
    """
    path = Path(root) / "shm"
    size = f"{size_mib << 10}k" if size_mib else f"{_half_of_memory_kib(proc_root)}k"
    try:
        path.mkdir(mode=0o1777, parents=True, exist_ok=True)
        if os.path.ismount(path):
            return
        mount(str(path), f"mode=1777,size={size}")
    except OSError as err:
        raise MpsError(
            f"cannot mount the shared memory of MPS at {path}: {err.strerror}; {_remedy(err)}, or "
            f"mount it yourself: mount -t tmpfs -o mode=1777,size={size} shm {path}"
        ) from err


def _half_of_memory_kib(proc_root: str) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(proc_root, "meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) // 2
    return _FALLBACK_KIB


def _has_selinux(sysfs_root: str) -> bool:
    return Path(sysfs_root, "fs/selinux/enforce").exists()


def _remedy(err: OSError) -> str:
    if err.errno == errno.EROFS:
        return f"mount mps.root writable into the agent at {CONTAINER_ROOT}"
    if err.errno in (errno.EPERM, errno.EACCES):
        return "run the agent as root with the capability SYS_ADMIN"
    if err.errno in (errno.EEXIST, errno.ENOTDIR):
        return "move away the file that is in the place of a directory"
    if err.errno == errno.EISDIR:
        return "move away the directory that stands in the place of the file"
    if err.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space on that file system"
    return f"check that file system, or set mps.root and mount it at {CONTAINER_ROOT}"
