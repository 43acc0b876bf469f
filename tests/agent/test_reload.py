"""A changed configuration: in force as a whole, or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from tests.settings import settings as settings_of
from vgpu_agent import log
from vgpu_agent.agent.reload import Reload
from vgpu_agent.config.load import Contents, Loaded, Sources, load_contents
from vgpu_agent.config.settings import Settings
from vgpu_agent.errors import ConfigError
from vgpu_agent.journal import Journal


def loaded(text: str = "") -> Loaded:
    """The settings of a file with this text after its version."""
    return load_contents(Sources({}, {}, "config.yaml"), Contents(b"version: v1\n" + text.encode()))


class Applied:
    """Takes settings, or refuses them."""

    def __init__(self) -> None:
        self.settings: list[Settings] = []
        self.refusal = ""

    async def __call__(self, settings: Settings) -> None:
        """Record the settings, as `composition` applies them."""
        if self.refusal:
            raise ConfigError([self.refusal])
        self.settings.append(settings)


@pytest.fixture
def applied() -> Iterator[Applied]:
    """Collect the settings that are put in force, and restore the log level afterwards."""
    yield Applied()
    log.set_level("debug")


async def test_good_settings_are_applied_and_shown(applied: Applied) -> None:
    """/debug/config shows the new values with their origins."""
    reload = Reload(loaded(), apply=applied, journal=Journal())
    new = loaded("plugin: {passDeviceSpecs: true}\n")
    await reload.take(new)
    assert applied.settings == [new.settings]  # all of it takes effect at once
    assert reload.loaded is new
    assert (reload.problems, reload.needs_restart) == ((), ())


async def test_what_a_new_file_says_without_effect_is_told_once(applied: Applied) -> None:
    """nvidia:D10 holds for a change, too. A reported problem is not reported again."""
    reload = Reload(loaded("nvidiaConfig: {colour: red}\n"), apply=applied, journal=Journal())
    with structlog.testing.capture_logs() as told:
        await reload.take(loaded("nvidiaConfig: {colour: red, migStrategy: mixed}\n"))
    assert [line["problem"] for line in told if line["event"] == "config.warning"] == [
        (
            "config.yaml:2: nvidiaConfig.migStrategy: has no effect here; did you mean "
            "nvidiaConfig.flags.migStrategy?"
        )
    ]


async def test_families_that_collide_are_named_once(applied: Applied) -> None:
    """The rest of a changed file is applied,
    so this sentence alone tells why something is missing.
    """
    both = "families: {aws: true}\naws:\n  resourceName: nvidia.com/gpu\n"
    reload = Reload(loaded(), apply=applied, journal=Journal())
    with structlog.testing.capture_logs() as told:
        await reload.take(loaded(both))
        await reload.take(loaded(f"{both}  vgpus: 4\n"))
    assert [line["problem"] for line in told if line["event"] == "config.collision"] == list(
        loaded(both).collisions
    )
    assert len(applied.settings) == 2


async def test_bad_settings_change_nothing_until_a_good_file_comes(applied: Applied) -> None:
    """The reason stays visible as long as the newest file is not in force."""
    journal = Journal()
    reload = Reload(loaded(), apply=applied, journal=journal)
    await reload.take(ConfigError(["config.yaml:2: listen: …"]))
    assert reload.problems == ("config.yaml:2: listen: …",)
    assert applied.settings == []
    assert journal.entries[-1].event == "config.refused"
    await reload.take(loaded())
    assert not reload.problems


async def test_settings_that_cannot_be_put_in_force_are_refused_whole(applied: Applied) -> None:
    """A list that would not fit: the old settings stay, and are what is shown."""
    first = loaded()
    reload = Reload(first, apply=applied, journal=Journal())
    applied.refusal = "nvidia.com/gpu: replicas: at most 5 would fit"
    await reload.take(loaded("plugin: {passDeviceSpecs: true}\n"))
    assert reload.loaded is first
    assert "at most 5" in reload.problems[0]


async def test_what_needs_a_restart_is_named_until_it_is_taken_back(applied: Applied) -> None:
    """The comparison is with the settings at start, so a second reload does not forget it."""
    reload = Reload(loaded(), apply=applied, journal=Journal())
    await reload.take(loaded("listen: ':1'\n"))
    await reload.take(loaded("listen: ':1'\nplugin: {passDeviceSpecs: true}\n"))
    assert reload.needs_restart == ("listen",)
    await reload.take(loaded())
    assert not reload.needs_restart


async def test_only_what_takes_effect_at_once_is_applied(applied: Applied) -> None:
    """A new pace of readings is named as needing a restart,
    so it must not be half in force before.
    """
    reload = Reload(loaded(), apply=applied, journal=Journal())
    await reload.take(loaded("gpu: {usageSeconds: 1, recovery: {quietSeconds: 7}}\n"))
    (settings,) = applied.settings
    assert settings.gpu.usage_seconds == settings_of().gpu.usage_seconds
    assert settings.gpu.recovery.quiet_seconds == 7
    assert reload.needs_restart == ("gpu.usageSeconds",)


async def test_a_new_log_level_is_in_force_at_once(applied: Applied) -> None:
    """No restart for a closer look."""
    reload = Reload(loaded(), apply=applied, journal=Journal())
    await reload.take(loaded("log: {level: warning}\n"))
    assert log.current_level() == "warning"


async def test_a_reload_of_something_else_leaves_a_level_set_by_hand_alone(
    applied: Applied,
) -> None:
    """``PUT /debug/loglevel`` holds until the file's own level changes."""
    reload = Reload(loaded(), apply=applied, journal=Journal())
    log.set_level("error")
    await reload.take(loaded("plugin: {passDeviceSpecs: true}\n"))
    assert log.current_level() == "error"
