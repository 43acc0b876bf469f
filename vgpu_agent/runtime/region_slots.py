"""Slots for the region files of containers: small file systems in memory, one for each container.

A container can write its region file. On the node's disk, it could enlarge the file until the disk
is full. In a slot, the kernel limits the size, and the agent has nothing to check.

Mounting needs a privilege that the agent does not have. So a privileged init container mounts the
slots before the agent starts (`mount_slots`, the command ``mount-regions``). Slots stay mounted
when the agent ends. If there are no slots, or none is free, region files are on the disk, and
`region_guard` truncates those that a container has enlarged.

The path of a container's directory is always ``regions/<pod UID>_<container>``. If the container
has a slot, that path is a symbolic link to ``slots/<number>/<pod UID>_<container>``. `grants` calls
`RegionSlots.take` before it makes such a directory. `removal` and the readers of regions resolve
the link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import threading
from typing import TYPE_CHECKING

from vgpu_agent import log
from vgpu_agent.errors import HostFileError
from vgpu_agent.runtime import host_files

if TYPE_CHECKING:
    from collections.abc import Callable

_logger = log.get(__name__)

# Enough for two regions of 2 MB, because the old region exists until the new one has replaced it.
# Memory cgroups charge each page to its first writer, which is the container.
SLOT_KIB = 4096
# The number of inodes of a slot: enough for its directories and a file for each of 16 cards.
_SLOT_INODES = 64
MAX_SLOTS = 999

# The name of the parent of all slots. A slot has a number of three digits as its name.
_SLOTS = "slots"
_LINK = re.compile(r"\.\./slots/[0-9]{3}/([^/]+)")
_NUMBER = re.compile(r"[0-9]{3}")


def slots_directory(regions: str) -> str:
    """Return the parent of the slots: a sibling of ``regions``, the containers' directories."""
    return os.path.join(os.path.dirname(regions.rstrip("/")), _SLOTS)


def resolve_slot(path: str) -> str:
    """Return the directory in a slot to which the container's directory ``path`` links, or ``path``
    itself if it is no link.

    Only links in the form that this module writes are followed, so none leads outside the slots.
    """
    try:
        found = _LINK.fullmatch(target := os.readlink(path))
    except OSError:
        return path
    parent = os.path.dirname(path)
    return os.path.join(os.path.dirname(parent), target.removeprefix("../")) if found else path


def mount_slots(regions: str, count: int, mount: Callable[[str, str], None]) -> int:
    """Mount the first ``count`` slots. Slots that are already mounted are not changed.

    Args:
        regions: the parent of the containers' directories.
        count: the number of slots, `MAX_SLOTS` at most.
        mount: mounts a tmpfs, given the path and the mount options.

    Returns:
        the number of slots that this call has mounted.

    Raises:
        HostFileError: a slot cannot be mounted. The slots before it stay mounted.
    """
    parent, mounted = slots_directory(regions), 0
    host_files.make_directory(parent)
    for number in range(count):
        path = f"{parent}/{number:03}"
        if os.path.ismount(path):
            continue
        host_files.make_directory(path)
        try:
            mount(path, f"mode=0755,size={SLOT_KIB}k,nr_inodes={_SLOT_INODES}")
        except OSError as err:
            raise HostFileError(
                f"cannot mount a slot for a region at {path}: {err.strerror}; let the container "
                f"that does this be privileged, and mount {parent} into it with mountPropagation: "
                "Bidirectional"
            ) from err
        mounted += 1
    return mounted


class RegionSlots:
    """The slots of this node.

    State: only the files. A slot without files is free. The methods may be called in any thread.
    """

    def __init__(self, regions: str) -> None:
        """Use the slots for ``regions``, the parent of the containers' directories."""
        self._regions = regions
        self._parent = slots_directory(regions)
        self._lock = threading.Lock()
        self._next = 0  # the position at which the next search for a free slot begins
        self._changes = log.ChangeFilter()  # lets a lack of slots be logged only once

    def take(self, path: str) -> bool:
        """Give a container a slot: make its directory ``path`` a link into a free slot, unless it
        exists already or is not below the parent that these slots are for.

        Returns:
            True if ``path`` is a link into a slot. If False, ``path`` is missing or a directory on
            the disk.

        Raises:
            HostFileError: the link cannot be made.
        """
        if os.path.dirname(path) != self._regions:
            return False
        try:
            with self._lock:
                return self._take(path)
        except OSError as err:
            raise host_files.file_error("make", path, err) from err

    def remove_orphans(self) -> None:
        """Empty the slots without a link to them, and remove links without a target. An agent that
        was killed between two steps leaves such slots and links.

        Call this before the first `take`, which could otherwise make another container's directory
        at the target of an old link.
        """
        with self._lock, contextlib.suppress(OSError):
            paths = [os.path.join(self._regions, name) for name in _names(self._regions)]
            linked = {target for path in paths if (target := resolve_slot(path)) != path}
            for path in paths:
                if (target := resolve_slot(path)) != path and not os.path.lexists(target):
                    os.unlink(path)
            for slot in self._slots():
                for name in os.listdir(slot):
                    if (path := os.path.join(slot, name)) not in linked:
                        _remove(path)

    def _take(self, path: str) -> bool:
        target = resolve_slot(path)
        if target == path and os.path.lexists(path):
            return False  # a directory that was made while no slot was free or mounted
        if target != path:
            slot = os.path.dirname(target)
            # After a reboot the slots are empty. This one may have another container by now, or may
            # not be mounted any more.
            if _is_mounted(slot) and not set(os.listdir(slot)) - {os.path.basename(target)}:
                host_files.make_directory(target)
                return True
            os.unlink(path)
        if (free := self._find_free()) is None:
            return False
        host_files.make_directory(self._regions)
        name = os.path.basename(path)
        host_files.make_directory(target := os.path.join(free, name))
        try:
            os.symlink(f"../{_SLOTS}/{os.path.basename(free)}/{name}", path)
        except OSError:
            # e.g. the disk is full; without the removal, each retry would occupy another slot
            _remove(target)
            raise
        return True

    def _find_free(self) -> str | None:
        slots = self._slots()
        for offset in range(len(slots)):
            slot = slots[(self._next + offset) % len(slots)]
            with contextlib.suppress(OSError):
                if _is_mounted(slot) and _is_unused(slot):
                    self._next = (self._next + offset + 1) % len(slots)
                    return slot
        if slots and self._changes.is_new("no slot"):
            _logger.warning(
                "regions.no_slot",
                slots=len(slots),
                directory=self._parent,
                meaning=(
                    "further regions are on the disk, where the agent truncates those that grow"
                ),
                remedy="mount more slots: raise --count of vgpu-agent mount-regions",
            )
        return None

    def _slots(self) -> list[str]:
        try:
            names = os.listdir(self._parent)
        except OSError as err:
            if err.errno != errno.ENOENT:
                _logger.warning(
                    "regions.slots_unreadable", directory=self._parent, error=err.strerror
                )
            return []
        return [f"{self._parent}/{name}" for name in sorted(names) if _NUMBER.fullmatch(name)]


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def _remove(directory: str) -> None:
    """Remove a directory in a slot, which no container has mounted, and its few files. The agent
    has made all of them: containers can write the files, but cannot create any.
    """
    shutil.rmtree(directory, ignore_errors=True)


def _is_unused(slot: str) -> bool:
    """Tell whether the slot has no used blocks, and no inode but that of its root directory.

    A removed region uses blocks as long as a process has it open. Such a process could still
    enlarge it, at the expense of the next container.
    """
    usage = os.statvfs(slot)
    return usage.f_bfree == usage.f_blocks and usage.f_files - usage.f_ffree <= 1


def _is_mounted(slot: str) -> bool:
    """Tell whether a file system is mounted at ``slot`` in the agent's mount namespace.

    If only the runtime saw it, the container would not see the files that the agent writes.
    """
    return os.path.ismount(slot)
