"""docs/coming-from-hami.md: its settings exist, and what it says of HAMi's files is what the agent
does with them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from vgpu_agent.config import schema
from vgpu_agent.config.load import Contents, Sources, load_contents
from vgpu_agent.families.volcano_vgpu.files import read_device_config, read_node_config

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "coming-from-hami.md").read_text()
# The entry of HAMi v2.10.0's values.yaml (devicePlugin.nodeConfiguration.config).
_NODE_CONFIG = {
    "name": "a",
    "operatingmode": "hami-core",
    "devicememoryscaling": 1.5,
    "devicesplitcount": 8,
    "preconfigureddevicememory": 0,
    "enablenumatopology": False,
    "migstrategy": "none",
    "filterdevices": {"uuid": ["GPU-x"], "index": []},
    "enablegetpreferredallocation": False,
}


def _section(heading: str) -> str:
    return PAGE.partition(f"# {heading}\n")[2].partition("\n#")[0]


def test_each_setting_of_the_page_exists() -> None:
    """A setting that was renamed would send an admin looking for it."""
    paths = schema.value_paths()
    sections = {path.partition(".")[0] for path in paths if "." in path}
    named, last = set(), ""
    for word in re.findall(r"`([a-zA-Z]*\.[a-zA-Z.]+)(?::[^`]*)?`", PAGE):
        first, _, rest = word.partition(".")
        last = first or last
        if last in sections:
            named.add(f"{last}.{rest}")
    assert {"volcanoVgpu.gpuMemoryFactor", "vgpuManager.excludeDevices"} <= named
    assert {name for name in named if name not in paths} == set()


def test_the_settings_of_the_page_are_a_configuration() -> None:
    """It is what an admin copies first."""
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    text = "version: v1\n" + "".join(f"{line[4:]}\n" for line in block.splitlines())
    loaded = load_contents(Sources({}, {}, "c.yaml"), Contents(text.encode()))
    assert (loaded.warnings, loaded.collisions) == ((), ())
    assert loaded.settings.is_on("volcano-vgpu")
    assert not loaded.settings.is_on("nvidia")


def test_the_keys_of_config_json_count_or_are_named_as_the_page_says() -> None:
    """All keys of HAMi's are on the page, on the right side."""
    found = read_node_config(json.dumps({"nodeconfig": [_NODE_CONFIG]}), "a")
    assert found.values["device_split_count"] == 8
    assert found.values["device_memory_scaling"] == 1.5
    assert found.hidden_uuids == {"GPU-x"}
    unknown = {re.split(r"\.|:", problem)[3] for problem in found.problems}
    counting, _, ignored = _section("config.json").partition("It names")
    assert unknown == {key for key in _NODE_CONFIG if f"`{key}`" in ignored}
    assert _NODE_CONFIG.keys() - unknown == {key for key in _NODE_CONFIG if f"`{key}`" in counting}


def test_device_config_yaml_cannot_be_used() -> None:
    """Its names are refused; its numbers would count."""
    found = read_device_config("nvidia: {resourceCountName: nvidia.com/gpu, deviceSplitCount: 3}")
    assert "begins with volcano.sh/" in " ".join(found.problems)
    assert found.values == {"device_split_count": 3}
