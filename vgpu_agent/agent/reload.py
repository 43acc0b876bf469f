"""Put a changed configuration file in force while pods run;
a wrong one changes nothing and is reported.

Run by `composition` as a supervised loop. Settings that can take effect at once do
(`reloadable_difference`); those that need a restart are named in the log and in ``/debug/config``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent import log
from vgpu_agent.config.difference import in_force, reloadable_difference
from vgpu_agent.config.watch import changes
from vgpu_agent.errors import ConfigError
from vgpu_agent.status import CORRECT_CONFIGURATION

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from vgpu_agent.agent.named_configuration import NamedConfiguration
    from vgpu_agent.config.load import Loaded
    from vgpu_agent.config.settings import Settings
    from vgpu_agent.journal import Journal

# How often the files are looked at for new content.
RELOAD_SECONDS = 2.0

_logger = log.get(__name__)


class Reload:
    """The configuration in force, and the reasons why a newer one is not.

    State: ``loaded`` is the newest valid one. It is in force, except for those of its settings that
    are in ``needs_restart``. `problems` are about the newest of all, valid or not.
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        apply: Callable[[Settings], Awaitable[None]],
        journal: Journal,
        named_configuration: NamedConfiguration | None = None,
    ) -> None:
        """Watch the files of ``loaded``, or those that ``named_configuration`` chooses; ``apply``
        puts new settings in force or raises ConfigError.
        """
        self.loaded = loaded
        self.named_configuration = named_configuration
        self._refused: tuple[str, ...] = ()
        self.needs_restart: tuple[str, ...] = ()
        self._at_start = loaded.settings  # what needs a restart stays as it is here
        self._apply = apply
        self._journal = journal

    @property
    def problems(self) -> tuple[str, ...]:
        """The faults in the newest files, and in the choice of a named one;
        empty when there are none.
        """
        named = self.named_configuration
        return (*self._refused, *([named.problem] if named and named.problem else []))

    async def run(self) -> None:
        """Watch until cancelled; return at once when there is no file and none can be chosen."""
        sources = self.named_configuration.sources if self.named_configuration else None
        async for outcome in changes(
            self.loaded,
            interval_seconds=RELOAD_SECONDS,
            sources=sources,
        ):
            await self.take(outcome)

    async def take(self, outcome: Loaded | ConfigError) -> None:
        """Put the new content of the files in force, or report why that is not possible."""
        if isinstance(outcome, ConfigError):
            self._refuse(outcome)
            return
        at_once, _ = reloadable_difference(self.loaded.settings, outcome.settings)
        _, later = reloadable_difference(self._at_start, outcome.settings)
        try:
            # the new values of settings that can change at once, the values of the start elsewhere
            await self._apply(in_force(running=self._at_start, new=outcome.settings))
        except ConfigError as err:
            self._refuse(err)
            return
        for warning in outcome.warnings:
            if warning not in self.loaded.warnings:
                _logger.warning("config.warning", problem=warning)
        for collision in outcome.collisions:  # conflicts between families
            if collision not in self.loaded.collisions:
                _logger.error("config.collision", problem=collision)
        self.loaded, self._refused, self.needs_restart = outcome, (), tuple(later)
        if self.named_configuration is not None:
            self.named_configuration.note_in_force(outcome)
        if "log.level" in at_once:
            log.set_level(outcome.settings.log.level)
        self._journal.record(
            "config.applied", file=outcome.files, changed=at_once, needs_restart=later
        )

    def _refuse(self, err: ConfigError) -> None:
        self._refused = tuple(err.problems)
        self._journal.record(
            "config.refused",
            level="error",
            problems=err.problems,
            in_force="the previous settings",
            remedy=CORRECT_CONFIGURATION,
        )
