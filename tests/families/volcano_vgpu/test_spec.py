"""The files of volcano-vgpu-device-plugin: where they are looked for, by the settings."""

from __future__ import annotations

import pytest

from tests.settings import settings as settings_of
from tests.settings import switches
from vgpu_agent.families.volcano_vgpu.settings import VolcanoVgpu
from vgpu_agent.families.volcano_vgpu.spec import SPEC

CONFIG_MAP, MOUNTED = SPEC.files
ON = switches(volcano_vgpu=True)


@pytest.mark.parametrize(
    ("asked", "namespaces"),
    [
        ("", ("kube-system", "volcano-system")),
        ("volcano", ("volcano", "kube-system", "volcano-system")),
        ("kube-system", ("kube-system", "volcano-system")),
        ("volcano-system", ("volcano-system", "kube-system")),
    ],
)
def test_no_namespace_is_searched_twice(asked: str, namespaces: tuple[str, ...]) -> None:
    """Two watches of one object would be one too many."""
    settings = settings_of(families=ON, volcano_vgpu=VolcanoVgpu(config_map_namespace=asked))
    assert CONFIG_MAP.namespaces(settings) == namespaces
    assert CONFIG_MAP.configured_namespace(settings) == asked


def test_files_of_a_family_that_is_off_are_not_read() -> None:
    """Nothing of theirs would count, and reading a ConfigMap takes rights."""
    assert (CONFIG_MAP.namespaces(settings_of()), MOUNTED.path(settings_of())) == ((), "")


def test_the_config_map_is_not_read_where_the_settings_say_so() -> None:
    """The mounted file is another matter."""
    settings = settings_of(families=ON, volcano_vgpu=VolcanoVgpu(read_config_map=False))
    assert (CONFIG_MAP.namespaces(settings), MOUNTED.path(settings)) == ((), "/config/config.json")


@pytest.mark.parametrize(
    ("text", "sound"),
    [('{"nodeconfig": [{"name": "n1", "devicesplitcount": 3}]}', True), ("{", False)],
)
def test_a_mounted_file_is_judged_by_this_nodes_part(text: str, sound: bool) -> None:
    """A text with an error needs the one before it."""
    assert MOUNTED.is_valid(settings_of(node_name="n1"), text) is sound
