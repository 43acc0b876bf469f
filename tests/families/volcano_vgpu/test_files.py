"""The configuration files of volcano-vgpu-device-plugin (volcano-vgpu §5)."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu_agent.families.plugin_files import texts_in_force
from vgpu_agent.families.volcano_vgpu.files import (
    Overlay,
    merge_texts,
    read_device_config,
    read_node_config,
)
from vgpu_agent.families.volcano_vgpu.geometries import MigGroup, MigProfile, ModelGeometries
from vgpu_agent.families.volcano_vgpu.settings import VolcanoVgpu

SHIPPED = """\
nvidia:
  resourceCountName: volcano.sh/vgpu-number
  resourceMemoryName: volcano.sh/vgpu-memory
  resourceMemoryPercentageName: volcano.sh/vgpu-memory-percentage
  resourceCoreName: volcano.sh/vgpu-cores
  overwriteEnv: false
  defaultMemory: 0
  defaultCores: 0
  defaultGPUNum: 1
  deviceSplitCount: 10
  deviceMemoryScaling: 1
  deviceCoreScaling: 1
  gpuMemoryFactor: 1
  knownMigGeometries:
  - models: [ "A30" ]
    allowedGeometries:
      - group: group1
        geometries:
        - name: 1g.6gb
          memory: 6144
          count: 4
"""


def _node_config(**entry: Any) -> str:
    return json.dumps({"nodeconfig": [{"name": "node-a", **entry}]})


def test_the_shipped_config_map_is_read_whole() -> None:
    """The file that comes with the replaced plugin has no problem, and its factor of 1 counts."""
    overlay = read_device_config(SHIPPED)
    assert overlay.problems == ()
    assert overlay.applied_to(VolcanoVgpu()) == VolcanoVgpu(gpu_memory_factor=1)
    assert overlay.geometries == (
        ModelGeometries(("A30",), (MigGroup("group1", (MigProfile("1g.6gb", 6144, 4),)),)),
    )


def test_the_shipped_node_config_is_read_whole() -> None:
    """``filterdevices`` may be empty, and what has no effect says nothing as long as it asks
    for nothing.
    """
    overlay = read_node_config(
        _node_config(
            operatingmode="hami-core",
            devicememoryscaling=1.8,
            devicecorescaling=1.0,
            devicesplitcount=4,
            migstrategy="none",
            filterdevices={"uuid": ["GPU-1"], "index": [3]},
        ),
        "node-a",
    )
    assert overlay.problems == ()
    assert overlay.applied_to(VolcanoVgpu()) == VolcanoVgpu(
        device_memory_scaling=1.8, device_split_count=4
    )
    assert overlay.hidden_uuids == {"GPU-1"}
    assert overlay.hidden_indices == {3}


def test_memory_scaling_has_its_effect() -> None:
    """``volcano-vgpu:D8``: what the files promise is what the settings say."""
    overlay = read_device_config("nvidia: {deviceMemoryScaling: 1.8, disableCoreLimit: true}")
    assert overlay.applied_to(VolcanoVgpu()) == VolcanoVgpu(
        device_memory_scaling=1.8, disable_core_limit=True
    )


@pytest.mark.parametrize("key", ["disableCoreLimit", "disablecorelimit"])
@pytest.mark.parametrize(
    ("value", "limit_off"),
    [("true", True), ('"true"', True), ("True", True), ('"false"', False), ('"0"', False)],
)
def test_the_core_limit_is_switched_off_as_the_documentation_has_it(
    key: str, value: str, limit_off: bool
) -> None:
    """The replaced plugin documents the key in lower case and its value as a text; code and
    scheduler know the other form.
    """
    overlay = read_device_config(f"nvidia: {{{key}: {value}}}")
    assert overlay.problems == ()
    assert overlay.values == {"disable_core_limit": limit_off}


@pytest.mark.parametrize(
    "key",
    [
        "overwriteEnv: false",
        "defaultMem: 0",
        "defaultGPUNum: 1",
        "migstrategy: none",
        "defaultCores: null",
    ],
)
def test_a_key_without_effect_that_asks_for_nothing_is_no_problem(key: str) -> None:
    """Shipped files have such keys, and warnings about untouched files on every node would not be
    read.
    """
    assert read_device_config(f"nvidia: {{{key}}}") == Overlay()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("deviceSplitCount", "0", "expected an integer from 1 to 1000, got 0"),
        ("deviceSplitCount", '"10"', 'expected an integer from 1 to 1000, got "10"'),
        ("deviceSplitCount", "true", "expected an integer from 1 to 1000, got true"),
        ("deviceSplitCount", "2.5", "expected an integer from 1 to 1000, got 2.5"),
        ("deviceSplitCount", "9" * 400, "expected an integer from 1 to 1000, got"),
        ("deviceSplitCount", "1e400", "expected an integer from 1 to 1000, got"),
        ("deviceCoreScaling", "0", "expected a number from 0.01 to 100"),
        ("deviceCoreScaling", "1e400", "expected a number from 0.01 to 100"),
        ("gpuMemoryFactor", "-1", "expected an integer from 0 to 65536, got -1"),
        ("disableCoreLimit", "yes", 'expected true or false, got "yes"'),
        ("disableCoreLimit", "2", "expected true or false, got 2"),
        ("disablecorelimit", '"on"', 'expected true or false, got "on"'),
        (
            "resourceCountName",
            "nvidia.com/gpu",
            "expected a resource name that begins with volcano.sh/",
        ),
        (
            "resourceCountName",
            "[a]",
            "expected a resource name that begins with volcano.sh/, got a list",
        ),
        (
            "passDeviceSpecs",
            "true",
            "true has no effect, as in volcano-vgpu-device-plugin; remove the key",
        ),
        ("overwriteEnv", "true", "has no effect"),
        ("defaultMemory", "4096", "4096 has no effect, as in volcano-vgpu-device-plugin"),
        ("defaultMem", "4096", "has no effect"),
        ("defaultGPUNum", "2", "has no effect"),
        ("resourcePriorityName", "volcano.sh/priority", "has no effect"),
        ("migstrategy", "mixed", "has no effect"),
        ("deviceSplitCounts", "3", "unknown key"),
    ],
)
def test_a_wrong_value_costs_that_value_only(key: str, value: str, expected: str) -> None:
    """``volcano-vgpu:D23``: key, value and remedy are named,
    and the rest of the ConfigMap counts.
    """
    overlay = read_device_config(f"nvidia:\n  deviceMemoryScaling: 2\n  {key}: {value}\n")
    (problem,) = overlay.problems
    assert problem.startswith(f"device-config.yaml: nvidia.{key}: ")
    assert expected in problem
    assert overlay.applied_to(VolcanoVgpu()) == VolcanoVgpu(device_memory_scaling=2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "has no key nvidia"),
        ("[]", "has no key nvidia"),
        ("volcano: {}", "has no key nvidia"),
        ("nvidia: 3", "expected a mapping, got 3"),
        ("nvidia: {a: *b}", "alias *b is not supported"),
        ("nvidia: {deviceSplitCount: 3, deviceSplitCount: 4}", "given twice"),
        ("nvidia: [", "not YAML"),
        ("nvidia: \x00", "control character"),
        ("[" * 100, "nested deeper"),
    ],
)
def test_a_config_map_that_cannot_be_read_says_why(text: str, expected: str) -> None:
    """Never an exception; one line says what is wrong."""
    assert any(expected in problem for problem in read_device_config(text).problems)


def test_an_integral_number_may_be_written_as_a_fraction() -> None:
    """``10.0`` containers are ten."""
    assert read_device_config("nvidia: {deviceSplitCount: 10.0}").values == {
        "device_split_count": 10
    }


@pytest.mark.parametrize(
    ("entry", "place", "expected"),
    [
        (
            {"devicesplitcount": "10"},
            ".devicesplitcount",
            'expected an integer from 1 to 1000, got "10"',
        ),
        ({"devicesplitcount": False}, ".devicesplitcount", "got false"),
        ({"devicememoryscaling": [1]}, ".devicememoryscaling", "got a list"),
        ({"filterdevices": ["GPU-1"]}, ".filterdevices", "expected a mapping of uuid and index"),
        ({"filterdevices": {"uuid": "GPU-1"}}, ".filterdevices.uuid", "expected a list"),
        (
            {"filterdevices": {"uuid": [7]}},
            ".filterdevices.uuid[0]",
            "expected the UUID of a GPU, got 7",
        ),
        (
            {"filterdevices": {"index": [-1]}},
            ".filterdevices.index[0]",
            "expected an integer ≥ 0, got -1",
        ),
        ({"filterdevices": {"pci": []}}, ".filterdevices.pci", "unknown key"),
        ({"operatingmode": "MIG"}, ".operatingmode", 'expected hami-core or mig, got "MIG"'),
        ({"operatingmode": ["mig"]}, ".operatingmode", "expected hami-core or mig, got a list"),
        ({"migstrategy": "all"}, ".migstrategy", 'got "all"'),
        ({"devicememoryfactor": 2}, ".devicememoryfactor", "unknown key"),
    ],
)
def test_a_wrong_value_in_the_node_config_costs_that_value_only(
    entry: dict[str, Any], place: str, expected: str
) -> None:
    """``volcano-vgpu:D23``: the replaced plugin ignores the whole file for one wrong type.
    Here the rest counts.
    """
    overlay = read_node_config(_node_config(devicecorescaling=2, **entry), "node-a")
    (problem,) = overlay.problems
    assert problem.startswith(f"config.json: nodeconfig[0]{place}: ")
    assert expected in problem
    assert overlay.applied_to(VolcanoVgpu()) == VolcanoVgpu(device_core_scaling=2)


def test_the_shipped_strategy_asks_for_nothing() -> None:
    """The replaced plugin follows its flag although ``migstrategy: none`` is in the file,
    so a flag goes on to count.
    """
    assert read_node_config(_node_config(migstrategy="none"), "node-a") == Overlay()


def test_the_node_config_chooses_the_mode_and_the_static_strategy() -> None:
    """``operatingmode`` and ``migstrategy`` of the node count.
    The replaced plugin does nothing with the second.
    """
    overlay = read_node_config(_node_config(operatingmode="mig", migstrategy="mixed"), "node-a")
    assert overlay.problems == ()
    assert overlay.applied_to(VolcanoVgpu()) == VolcanoVgpu(
        operating_mode="mig", mig_strategy="mixed"
    )


GEOMETRY = "nvidia:\n  deviceSplitCount: 7\n  knownMigGeometries: {}\n"
SEVEN = "{name: 1g.5gb, memory: 1, count: 7}"
A_GROUP = "{group: g, geometries: [{name: 1g.5gb, memory: 5120, count: 7}]}"


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("7", "", "expected a list of 1 to 256 entries, got 7"),
        ("[x]", "[0]", 'expected a mapping of models, allowedGeometries, got "x"'),
        ("[{models: [A100], allowedGeometry: []}]", "[0].allowedGeometry", "unknown key"),
        (
            f"[{{models: [], allowedGeometries: [{A_GROUP}]}}]",
            "[0].models",
            "expected a list of 1 to 256 entries",
        ),
        (
            f"[{{models: [7], allowedGeometries: [{A_GROUP}]}}]",
            "[0].models[0]",
            "expected a part of the GPU's product name, got 7",
        ),
        (
            f"[{{models: [A], allowedGeometries: [{A_GROUP}, {A_GROUP}]}}]",
            "[0].allowedGeometries",
            '2 groups are called "g"',
        ),
        (
            (
                "[{models: [A], allowedGeometries: [{group: a-b, geometries: [{name: 1g.5gb, "
                "memory: 5120, count: 7}]}]}]"
            ),
            ".group",
            "without '-'",
        ),
        (
            (
                "[{models: [A], allowedGeometries: [{group: g, geometries: [{name: small, memory: "
                "1, count: 1}]}]}]"
            ),
            ".name",
            "a MIG profile",
        ),
        (
            (
                "[{models: [A], allowedGeometries: [{group: g, geometries: [{name: 1g.5gb, memory: "
                "0, count: 1}]}]}]"
            ),
            ".memory",
            "got 0",
        ),
        (
            (
                "[{models: [A], allowedGeometries: [{group: g, geometries: [{name: 1g.5gb, memory: "
                "1, count: 9}]}]}]"
            ),
            ".count",
            "1 to 8, got 9",
        ),
        (
            f"[{{models: [A], allowedGeometries: [{{group: g, geometries: [{SEVEN}, {SEVEN}]}}]}}]",
            ".geometries",
            "at most 8, got 14",
        ),
    ],
)
def test_geometries_that_make_no_sense_are_named_and_none_of_them_counts(
    text: str, place: str, expected: str
) -> None:
    """Positions count through a group, so the earlier geometries stay, whole.
    The other keys count.
    """
    before = read_device_config(
        GEOMETRY.format(f"[{{models: [A100], allowedGeometries: [{A_GROUP}]}}]")
    )
    overlay = read_device_config(GEOMETRY.format(text))
    assert any(f"{place}: " in problem and expected in problem for problem in overlay.problems), (
        overlay.problems
    )
    assert overlay.geometries == ()
    assert overlay.falling_back_to(before).geometries == before.geometries != ()
    assert overlay.applied_to(VolcanoVgpu()).device_split_count == 7


def test_the_last_entry_of_our_name_counts() -> None:
    """Exact names only; what is wrong with another node's entry is not our problem."""
    text = json.dumps(
        {
            "nodeconfig": [
                {"name": "node-a", "devicesplitcount": 2, "devicecorescaling": 3},
                {"name": "NODE-A", "devicesplitcount": 4},
                {"name": "node-a", "devicesplitcount": 5},
                {"name": "node-b", "devicesplitcount": "x"},
            ]
        }
    )
    assert read_node_config(text, "node-a") == Overlay({"device_split_count": 5})


def test_zero_in_the_node_config_means_not_set() -> None:
    """Go cannot tell 0 from nothing, so operators write it for nothing."""
    assert (
        read_node_config(_node_config(devicesplitcount=0, devicecorescaling=0.0), "node-a")
        == Overlay()
    )


def test_an_entry_that_is_none_loses_no_other() -> None:
    """A list item of another kind is named and passed over."""
    overlay = read_node_config(
        '{"nodeconfig": [3, {"devicesplitcount": 1}, {"name": "node-a", "deviceSplitCount": 7}]}',
        "node-a",
    )
    assert overlay.values == {"device_split_count": 7}
    assert [problem.split(":")[1].strip() for problem in overlay.problems] == [
        "nodeconfig[0]",
        "nodeconfig[1]",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        "null",
        "[]",
        "3",
        '{"nodeconfig": {}}',
        "1" * 5000,
        '{"nodeconfig": 3}',
        "\ud800",
    ],
)
def test_a_node_config_that_cannot_be_read_says_so(text: str) -> None:
    """Never an exception; one line says what is wrong."""
    overlay = read_node_config(text, "node-a")
    assert len(overlay.problems) == 1
    assert overlay.values == {}


def test_a_flag_beats_the_config_map_and_the_node_beats_both() -> None:
    """The replaced plugin's order: ConfigMap, then flags that were given, then the node's entry."""
    with_flag = VolcanoVgpu(device_split_count=3, gpu_memory_factor=8)
    config_map = read_device_config("nvidia: {deviceSplitCount: 20, gpuMemoryFactor: 2}")
    node = read_node_config(_node_config(devicesplitcount=5), "node-a")
    layered = config_map.applied_to(with_flag, keep={"gpu_memory_factor"})
    assert layered == VolcanoVgpu(device_split_count=20, gpu_memory_factor=8)
    assert node.applied_to(layered) == VolcanoVgpu(device_split_count=5, gpu_memory_factor=8)


GOOD = "nvidia: {deviceSplitCount: 20, gpuMemoryFactor: 64, deviceMemoryScaling: 2}"


@pytest.mark.parametrize(
    "text", ["", "nvidia: [", "nvidia: 3", "nvidea: {deviceSplitCount: 2}", "\x00"]
)
def test_a_config_map_that_cannot_be_read_changes_nothing(text: str) -> None:
    """``volcano-vgpu:D23``: a slip of the finger must not give every node another memory unit under
    running pods.
    """
    before, now = read_device_config(GOOD), read_device_config(text)
    assert now.falling_back_to(before).values == before.values
    assert now.falling_back_to(before).problems == now.problems
    assert "its previous content stays in force" in now.problems[-1]
    assert not now.is_valid


def test_a_wrong_value_leaves_what_stood_there_before() -> None:
    """The others count at once, and a key that was taken out is out."""
    now = read_device_config("nvidia: {deviceSplitCount: 30, gpuMemoryFactor: 64MiB}")
    assert now.falling_back_to(read_device_config(GOOD)).values == {
        "device_split_count": 30,
        "gpu_memory_factor": 64,
    }
    assert now.falling_back_to(Overlay()).values == {"device_split_count": 30}
    assert not now.is_valid


def test_wrong_edits_in_a_row_are_remembered_back_to_the_last_right_one() -> None:
    """Each leaves its right part in force. The oldest that count stay few,
    however often the file changes.
    """

    def is_valid(text: str) -> bool:
        return read_device_config(text).is_valid

    texts: tuple[str, ...] = ()
    for text in (
        GOOD,
        *(
            f"nvidia: {{deviceSplitCount: {number}, gpuMemoryFactor: ten}}"
            for number in range(30, 60)
        ),
        "nvidia: 3",
    ):
        texts = texts_in_force(texts, text, is_valid)
        assert texts_in_force(texts, text, is_valid) == texts
    assert (texts[0], texts[-1], len(texts)) == (GOOD, "nvidia: 3", 8)
    overlay = merge_texts(texts, read_device_config)
    assert overlay.values == {"device_split_count": 59, "gpu_memory_factor": 64}
    assert overlay.problems == read_device_config("nvidia: 3").problems
    assert texts_in_force(texts, GOOD, is_valid) == (GOOD,)
    assert texts_in_force(texts, None, is_valid) == ()


def test_a_right_file_owes_nothing_to_the_one_before() -> None:
    """Unknown keys and those without effect spoil nothing that counts."""
    now = read_device_config("nvidia: {deviceSplitCount: 30, unknown: 1, defaultMemory: 7}")
    assert now.falling_back_to(read_device_config(GOOD)) == now
    assert now.is_valid


@pytest.mark.parametrize(
    ("filtered", "hidden"),
    [
        ({"uuid": ["GPU-2"]}, {"GPU-2"}),
        ({"uuid": ["GPU-2", 7]}, {"GPU-1", "GPU-2"}),
        ("GPU-2", {"GPU-1"}),
        ({}, set()),
    ],
)
def test_a_gpu_that_was_hidden_does_not_come_back_by_mistake(
    filtered: Any, hidden: set[str]
) -> None:
    """It may be kept for another purpose. Mistakes in ``filterdevices`` add
    to what was hidden before.
    """
    before = read_node_config(_node_config(filterdevices={"uuid": ["GPU-1"]}), "node-a")
    assert (
        read_node_config(_node_config(filterdevices=filtered), "node-a")
        .falling_back_to(before)
        .hidden_uuids
        == hidden
    )


def test_a_megabyte_of_junk_becomes_a_few_lines() -> None:
    """The log is not the place to copy a ConfigMap to."""
    overlay = read_device_config(
        "nvidia:\n" + "".join(f"  key{number}: {'x' * 50}\n" for number in range(2000))
    )
    assert len(overlay.problems) == 21
    assert overlay.problems[-1] == "device-config.yaml: and 1980 more problems"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4)
    ),
    max_leaves=12,
)
NODE_KEYS = st.sampled_from(
    [
        "name",
        "devicesplitcount",
        "devicecorescaling",
        "devicememoryscaling",
        "filterdevices",
        "operatingmode",
        "x",
    ]
)
DEVICE_KEYS = st.sampled_from(
    [
        "deviceSplitCount",
        "gpuMemoryFactor",
        "deviceCoreScaling",
        "resourceCountName",
        "knownMigGeometries",
        "x",
    ]
)


@given(entry=st.dictionaries(NODE_KEYS, JSON))
def test_any_node_entry_leads_to_settings_that_hold(entry: dict[str, Any]) -> None:
    """The schema accepts the result of any JSON in the entry."""
    overlay = read_node_config(
        json.dumps({"nodeconfig": [entry, {**entry, "name": "node-a"}]}), "node-a"
    )
    settings = overlay.applied_to(VolcanoVgpu())
    assert msgspec.convert(msgspec.to_builtins(settings), VolcanoVgpu) == settings


@given(members=st.dictionaries(DEVICE_KEYS, JSON))
def test_any_device_config_leads_to_settings_that_hold(members: dict[str, Any]) -> None:
    """The same for the ConfigMap; JSON is YAML."""
    settings = read_device_config(json.dumps({"nvidia": members})).applied_to(VolcanoVgpu())
    assert msgspec.convert(msgspec.to_builtins(settings), VolcanoVgpu) == settings


@given(
    text=st.text(max_size=200) | st.text(alphabet='nvidia:{}[]",&*!-# \n0123456789', max_size=200)
)
def test_any_text_is_read_without_an_exception(text: str) -> None:
    """An editor of a ConfigMap cannot stop the agent."""
    assert isinstance(read_device_config(text), Overlay)
    assert isinstance(read_node_config(text, "node-a"), Overlay)
