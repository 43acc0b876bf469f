"""The libraries of the isolation backends on this node, each installed while a family uses it.

Called by `agent` whenever it builds the families.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.errors import HostFileError
from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.isolation.backend import InstalledLibrary
from vgpu_agent.runtime import control_library, hami_library
from vgpu_agent.runtime.delivered_library import DeliveredLibrary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vgpu_agent.config.settings import Settings
    from vgpu_agent.journal import Journal

# The facts by which each library is recognised among the files that an operator may deliver.
RECOGNITIONS = (hami_library.RECOGNITION, control_library.RECOGNITION)


class Libraries:
    """The libraries that families use.

    State: those that were installed; the files are on the node.

    Args:
        settings: those of the agent's start; the directories of the libraries are not changed while
            it runs.
        journal: where installations are recorded.
    """

    def __init__(self, settings: Settings, journal: Journal) -> None:
        # name of the backend → the library that the operator delivers for it
        self._delivered = {
            recognition.backend.name: DeliveredLibrary(
                recognition,
                settings,
                journal,
                instead=next(  # what else can be done without it, for errors
                    (
                        family.library.instead
                        for family in FAMILIES
                        if family.library and family.library.backend == recognition.backend.name
                    ),
                    "",
                ),
            )
            for recognition in RECOGNITIONS
        }

    async def install(self, settings: Settings) -> Mapping[str, InstalledLibrary]:
        """Install each library that these settings call for, and return them by backend. One that
        cannot be installed has the reason in ``trouble``.
        """
        installed = {}
        for name in used_backends(settings):
            library, trouble = self._delivered[name], ""
            try:
                await library.install()
            except HostFileError as err:
                trouble = str(err)
            # locks: the library makes a lock file that containers would share
            installed[name] = InstalledLibrary(library.path, trouble, locks=library.locks)
        return installed

    def check(self, settings: Settings) -> Mapping[str, InstalledLibrary]:
        """Check each library that these settings call for, without installing it. Blocks."""
        checked = {}
        for name in used_backends(settings):
            path = trouble = ""
            try:
                path = self._delivered[name].check()
            except HostFileError as err:
                trouble = str(err)
            checked[name] = InstalledLibrary(path, trouble)
        return checked


def used_backends(settings: Settings) -> tuple[str, ...]:
    """Return the backends whose library a family that is on needs, in `RECOGNITIONS`' order."""
    wanted = {
        family.library.backend
        for family in FAMILIES
        if family.library and family.is_on(settings) and family.library.is_wanted(settings)
    }
    return tuple(
        recognition.backend.name
        for recognition in RECOGNITIONS
        if recognition.backend.name in wanted
    )
