"""The meaning of an accepted configuration:
defaults, added domains, and valid devices, replicas and addresses.
"""

from __future__ import annotations

import pytest

from tests.config.conftest import Load
from tests.config.test_load import RESOURCES
from tests.settings import settings as settings_of
from vgpu_agent.families.nvidia.settings import Sharing


@pytest.mark.parametrize(
    "text", ["version: v1\n", "version: v1\nlog:\ngpu:\n  recovery:\n", "\ufeffversion: v1\r\n"]
)
def test_a_file_that_says_nothing_means_the_defaults(load_text: Load, text: str) -> None:
    """Sections whose keys are all commented out change nothing."""
    assert load_text(text).settings == settings_of()


@pytest.mark.parametrize(
    ("name", "complete"), [("gpu", "nvidia.com/gpu"), ("nvidia.com/gpu", "nvidia.com/gpu")]
)
def test_a_shared_resource_gets_nvidias_domain_when_it_has_none(
    load_text: Load, name: str, complete: str
) -> None:
    """nvidia §2: ``gpu`` means ``nvidia.com/gpu``."""
    loaded = load_text(f"version: v1\n{RESOURCES}    - {{name: {name}, replicas: 4}}\n")

    assert [
        (resource.name, resource.replicas)
        for resource in loaded.settings.section(Sharing).time_slicing.resources
    ] == [(complete, 4)]


def test_devices_are_all_a_number_or_a_list_of_words(load_text: Load) -> None:
    """nvidia §2: a list may hold indices, slices and UUIDs; 0 without quotes is the index."""
    uuid = "GPU-aaaaaaaa-0000-4000-8000-000000000000"
    given = ["all", "3", f'[0, "1:0", {uuid}]']
    text = "".join(
        f"    - {{name: gpu{number}, replicas: 2, devices: {devices}}}\n"
        for number, devices in enumerate(given)
    )

    resources = (
        load_text(f"version: v1\n{RESOURCES}{text}")
        .settings.section(Sharing)
        .time_slicing.resources
    )

    assert [resource.devices for resource in resources] == ["all", 3, ("0", "1:0", uuid)]


def test_one_replica_is_sharing_too(load_text: Load) -> None:
    """nvidia G16 refuses it; users asked for it (its issues 1548 and 1655),
    so here the least is 1.
    """
    loaded = load_text(f"version: v1\n{RESOURCES}    - {{name: gpu, replicas: 1}}\n")

    assert loaded.settings.section(Sharing).time_slicing.resources[0].replicas == 1


@pytest.mark.parametrize(
    "addresses",
    [
        "listen: ':0'\ndebugListen: ':0'",
        "listen: '10.0.0.1:80'\ndebugListen: '127.0.0.1:80'",
        "listen: '0.0.0.0:80'\ndebugListen: '[::1]:80'",
    ],
)
def test_two_addresses_that_do_not_meet_are_fine(load_text: Load, addresses: str) -> None:
    """Port 0 is a free port each time, and different interfaces have ports of their own."""
    load_text(f"version: v1\n{addresses}\n")
