"""Changes that a running agent follows."""

from __future__ import annotations

import pytest

from tests.config.conftest import Load
from vgpu_agent.config.difference import reloadable_difference

RESOURCES = (
    "version: v1\nsharing:\n  timeSlicing:\n    resources:\n"
    "    - {{name: gpu, replicas: {replicas}}}\n"
)


@pytest.mark.parametrize(
    ("old", "new", "at_once", "at_restart"),
    [
        ("", "", [], []),
        ("", "log: {level: debug, format: console}", ["log.level"], ["log.format"]),
        ("", "listen: ':1'", [], ["listen"]),
        ("", "nvidiaConfigFile: /v1.yaml", ["nvidiaConfigFile"], []),
        (
            "",
            "iktos: {resourceConfig: 'gpu:a:2'}\nresources: {gpus: []}",
            ["iktos.resourceConfig"],
            [],
        ),
        (
            "",
            "plugin: {migStrategy: mixed}\nmps: {root: /mps}",
            ["plugin.migStrategy"],
            ["mps.root"],
        ),
        (
            "",
            "plugin: {passDeviceSpecs: true, deviceIdStrategy: index}",
            ["plugin.passDeviceSpecs", "plugin.deviceIdStrategy"],
            [],
        ),
        (
            "gpu: {disableHealthChecks: '48'}",
            "gpu: {enableHealthChecks: '31'}",
            ["gpu.disableHealthChecks", "gpu.enableHealthChecks"],
            [],
        ),
        (
            "",
            "gpu: {usageSeconds: 1, recovery: {quietSeconds: 1}}",
            ["gpu.recovery.quietSeconds"],
            ["gpu.usageSeconds"],
        ),
        ("", "kubelet: {directory: /k}", [], ["kubelet.directory"]),
    ],
)
def test_a_change_takes_effect_at_once_or_waits_for_a_restart(
    load_text: Load, old: str, new: str, at_once: list[str], at_restart: list[str]
) -> None:
    """Settings for containers' answers and for health are live.
    Those with which a running part was built are not.
    """
    before, after = (
        load_text(f"version: v1\n{old}\n").settings,
        load_text(f"version: v1\n{new}\n").settings,
    )

    assert reloadable_difference(before, after) == (at_once, at_restart)


def test_another_number_of_replicas_is_named_as_one_value(load_text: Load) -> None:
    """The list is as long as before, so the change is inside."""
    before, after = (
        load_text(RESOURCES.format(replicas=2)).settings,
        load_text(RESOURCES.format(replicas=3)).settings,
    )

    assert reloadable_difference(before, after) == (
        ["sharing.timeSlicing.resources[0].replicas"],
        [],
    )


def test_sharing_that_begins_is_named_as_the_list(load_text: Load) -> None:
    """There is no single value to compare with."""
    assert reloadable_difference(
        load_text().settings, load_text(RESOURCES.format(replicas=2)).settings
    ) == (
        ["sharing.timeSlicing.resources"],
        [],
    )
