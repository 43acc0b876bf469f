"""Slots for the region files of containers: small file systems in memory, one for each container.

A container has its region mounted writable. On the node's disk it could make the file grow until
the disk is full. In a slot it can fill its own slot and nothing else, because the kernel gives the
slot no more: the bound needs no watching. To mount takes a privilege that the agent does without,
so a container that is privileged for a moment mounts the slots before the agent starts
(`mount_slots`, the command ``mount-regions``). They outlive every agent.
Where there are none, or all are taken, regions lie on the disk, and `region_guard` cuts back what
has grown.

A container's directory keeps its one name, ``regions/<pod UID>_<container>``. For a container with
a slot it is a link to ``slots/<number>/<pod UID>_<container>``. `grants` asks here before it makes
such a directory; `removal` and the readers of regions resolve it.
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
from vgpu_agent.errors import CarrierError
from vgpu_agent.runtime import host_files

if TYPE_CHECKING:
    from collections.abc import Callable

_logger = log.get(__name__)

# Room for two regions of 2 MB: the old one stays until the new one has taken its place. Pages count
# for their first writer, which is the container.
SLOT_KIB = 4096
# directories, and a file for each of 16 cards
_SLOT_FILES = 64
MAX_SLOTS = 999

# Beside the directory of the containers' directories; see `directory_beside`.
_NAME = "slots"
_LINK = re.compile(r"\.\./slots/[0-9]{3}/([^/]+)")
_NUMBER = re.compile(r"[0-9]{3}")


def directory_beside(regions: str) -> str:
    """The parent of the slots, beside the directory ``regions``
    that has the containers' directories.
    """
    return os.path.join(os.path.dirname(regions.rstrip("/")), _NAME)


def behind(path: str) -> str:
    """Return the directory in a slot that ``path``, a container's directory, links to;
    ``path`` itself when it is no link.

    Only a link as this module makes them is followed. Its text names the target, so it leads
    nowhere else.
    """
    try:
        found = _LINK.fullmatch(target := os.readlink(path))
    except OSError:
        return path
    parent = os.path.dirname(path)
    return os.path.join(os.path.dirname(parent), target.removeprefix("../")) if found else path


def mount_slots(regions: str, count: int, mount: Callable[[str, str], None]) -> int:
    """Mount the slots that are missing of ``count``; existing ones stay as they are, used or not.

    Args:
        regions: the directory of the containers' directories.
        count: how many there shall be; `MAX_SLOTS` at most.
        mount: mounts a tmpfs at a path with options.

    Returns:
        how many were mounted.

    Raises:
        CarrierError: one cannot be mounted; those before it are.
    """
    parent, mounted = directory_beside(regions), 0
    host_files.make_directory(parent)
    for number in range(count):
        path = f"{parent}/{number:03}"
        if os.path.ismount(path):
            continue
        host_files.make_directory(path)
        try:
            mount(path, f"mode=0755,size={SLOT_KIB}k,nr_inodes={_SLOT_FILES}")
        except OSError as err:
            raise CarrierError(
                f"cannot mount a slot for a region at {path}: {err.strerror}; let the container "
                f"that does this be privileged, and mount {parent} into it with mountPropagation: "
                "Bidirectional"
            ) from err
        mounted += 1
    return mounted


class RegionSlots:
    """The slots of this node.

    State: none but the files: a slot that nothing takes up is free. Called in threads.
    """

    def __init__(self, regions: str) -> None:
        """Use the slots beside ``regions``, the directory of the containers' directories."""
        self._regions = regions
        self._parent = directory_beside(regions)
        self._taking = threading.Lock()
        self._next = 0
        self._changes = log.ChangeFilter()

    def take(self, path: str) -> bool:
        """Make ``path``, a container's directory that is not there yet, a link into a free slot,
        or keep it so.

        Returns:
            whether it has a slot. Without one, ``path`` is missing or the directory that was there.

        Raises:
            CarrierError: the link cannot be made.
        """
        if os.path.dirname(path) != self._regions:
            return False
        try:
            with self._taking:
                return self._take(path)
        except OSError as err:
            raise host_files.trouble("make", path, err) from err

    def remove_orphans(self) -> None:
        """Empty the slots that no link leads into, and remove links that lead nowhere:
        an agent was killed between the two.

        To be called before the first `take`: such a link may lead to where another container's
        directory is made.
        """
        with self._taking, contextlib.suppress(OSError):
            links = [os.path.join(self._regions, name) for name in _names(self._regions)]
            linked = {inside for path in links if (inside := behind(path)) != path}
            for path in links:
                if (inside := behind(path)) != path and not os.path.lexists(inside):
                    os.unlink(path)
            for slot in self._slots():
                for name in os.listdir(slot):
                    if (path := os.path.join(slot, name)) not in linked:
                        _remove(path)

    def _take(self, path: str) -> bool:
        inside = behind(path)
        if inside == path and os.path.lexists(path):
            return False  # from before there were slots, or when there was none left
        if inside != path:
            slot = os.path.dirname(inside)
            # After a reboot the slots are empty, and this one may be another container's by now, or
            # none any more.
            if _is_mounted(slot) and not set(os.listdir(slot)) - {os.path.basename(inside)}:
                host_files.make_directory(inside)
                return True
            os.unlink(path)
        if (free := self._free()) is None:
            return False
        host_files.make_directory(self._regions)
        name = os.path.basename(path)
        host_files.make_directory(inside := os.path.join(free, name))
        try:
            os.symlink(f"../{_NAME}/{os.path.basename(free)}/{name}", path)
        except OSError:
            _remove(inside)  # e.g. the disk is full; each further try would take another slot
            raise
        return True

    def _free(self) -> str | None:
        slots = self._slots()
        for place in range(len(slots)):
            slot = slots[(self._next + place) % len(slots)]
            with contextlib.suppress(OSError):
                if _is_mounted(slot) and _is_unused(slot):
                    self._next = (self._next + place + 1) % len(slots)
                    return slot
        if slots and self._changes.is_new("no slot"):
            _logger.warning(
                "regions.no_slot",
                slots=len(slots),
                directory=self._parent,
                meaning=(
                    "further regions lie on the disk, where the agent cuts back those that grow"
                ),
                remedy="mount more: --count of vgpu-agent mount-regions",
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
    """Remove a directory in a slot with its few files, which no container has mounted. What is in
    it was made by the agent: containers write to files, and to no directory.
    """
    shutil.rmtree(directory, ignore_errors=True)


def _is_unused(slot: str) -> bool:
    """Tell whether the slot takes up no room and holds only its own directory.

    A removed region takes up room as long as a process has it open. It could still grow into the
    room of the next container.
    """
    taken = os.statvfs(slot)
    return taken.f_bfree == taken.f_blocks and taken.f_files - taken.f_ffree <= 1


def _is_mounted(slot: str) -> bool:
    """Tell whether the agent sees a file system at ``slot``.
    One that only the runtime sees would hide the agent's writes.
    """
    return os.path.ismount(slot)
