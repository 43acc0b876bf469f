"""The node configuration of vgpu-manager (vgpu-manager §1.6)."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.settings import settings as settings_of
from vgpu_agent.config.device_answers import Plugin
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.plugin_files import texts_in_force
from vgpu_agent.families.spec import NodeFacts
from vgpu_agent.families.vgpu_manager.node_config import (
    FILE,
    NodeConfig,
    in_force,
    is_valid,
    read_node_config,
)
from vgpu_agent.families.vgpu_manager.settings import VgpuManager

NODE = "gpu-node-7"
UUID = "GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28"
YAML, JSON = "/config/config.yaml", "/config/config.json"
PATH = {"vgpu_manager": VgpuManager(node_config_file=YAML), "node_name": NODE}


def read(text: str, *, file: str = YAML, node: str = NODE) -> NodeConfig:
    """The meaning of a text for one node."""
    return read_node_config(text, node, file)


def entry(**members: Any) -> str:
    """A file with one entry, for our node."""
    return json.dumps({"version": "v1", "configs": [{"nodeName": NODE, **members}]})


WHOLE = f"""\
version: v1
configs:
- nodeName: other
  deviceSplitCount: 2
- nodeName: gpu-node-[0-9]+
  cgroupDriver:
  deviceListStrategy: [envvar, volume-mounts]
  deviceSplitCount: 20
  deviceMemoryScaling: 2
  deviceMemoryFactor: 1024
  deviceCoresScaling: 1.5
  excludeDevices: [0, "2", 4..5, 7-8, {UUID}]
  gdsEnabled: true
  mofedEnabled: true
  gdrcopyEnabled: true
  migStrategy: none
  openKernelModules: true
  imex:
    channelIDs: [0]
    required: true
- nodeName: .*
  deviceSplitCount: 3
"""


def test_every_key_is_read() -> None:
    """vgpu-manager:D4: ``gdrcopyEnabled`` counts, which the replaced plugin parses and drops."""
    config = read(WHOLE)
    assert (config.problems, config.notes, config.entry) == ((), (), "configs[1]")
    vgpu = config.applied_to(VgpuManager(domain="example.com"))
    assert vgpu == VgpuManager(
        domain="example.com",
        device_split_count=20,
        device_memory_scaling=2.0,
        device_memory_factor=1024,
        device_cores_scaling=1.5,
        exclude_devices=("0", "2", "4..5", "7-8", UUID),
        mig_strategy="none",
        open_kernel_modules=True,
    )
    assert vgpu.excluded.indices == {0, 2, 4, 5, 7, 8}
    assert vgpu.excluded.uuids == {UUID}
    assert config.plugin == {
        "device_list_strategy": ("envvar", "volume-mounts"),
        "gds_enabled": True,
        "mofed_enabled": True,
        "gdrcopy_enabled": True,
        "imex_channel_ids": (0,),
        "imex_required": True,
    }


@pytest.mark.parametrize(
    ("name", "matches"),
    [
        (NODE, True),
        ("gpu-node-\\d+", True),
        ("(cpu|gpu)-node-7", True),
        ("^gpu-node-7$", True),
        (".*", True),
        ("gpu-node", False),
        ("node-7", False),
        ("GPU-NODE-7", False),
        ("(?i)GPU-NODE-7", True),
        ("gpu.node.7", True),
        ("(a+)+$", False),
    ],
)
def test_a_name_is_exact_or_a_whole_regular_expression(name: str, matches: bool) -> None:
    """It is anchored at both ends, or the entry of ``gpu-node-1`` would be that of ``gpu-node-17``,
    too.
    """
    config = read(json.dumps([{"nodeName": name, "deviceSplitCount": 4}]), file=JSON)
    assert config.problems == ()
    assert (config.own == {"device_split_count": 4}) is matches


def test_the_first_entry_that_matches_counts_alone() -> None:
    """The values of a later one are not added to it."""
    text = json.dumps(
        [
            {"nodeName": "gpu-.*", "deviceSplitCount": 4},
            {"nodeName": NODE, "deviceSplitCount": 5, "gdsEnabled": True},
        ]
    )
    assert read(text) == NodeConfig({"device_split_count": 4}, {}, "[0]")


def test_json_may_have_comments() -> None:
    """The sample in the replaced chart has comments. Errors still name the line in the file. Text
    in a string that looks like a comment is kept.
    """
    text = """\
// nodes with a broken card
[
  /* all of them
     in rack 7 */
  {"nodeName": "gpu-node-7", "excludeDevices": "4-7"}, // the last four
\t{"nodeName": "http://x/*", "deviceSplitCount": 0}
]
"""
    config = read(text, file=JSON)
    assert config.problems == (
        f"{JSON}:6: [1].deviceSplitCount: expected an integer from 1 to 65536, got 0",
    )
    assert read(text.replace("0}", "1}"), file=JSON).own == {"exclude_devices": ("4-7",)}


@pytest.mark.parametrize(
    "written",
    [0, "0", "0..2", "0-2", "0,2", "0, 1-2", UUID, [0], ["0"], ["0..2", UUID], [0, "4-7"]],
)
def test_excluded_devices_may_be_one_or_many(written: Any) -> None:
    """vgpu-manager:D1: ``"4-7"`` in the chart's own sample excludes four cards, not none."""
    config = read(entry(excludeDevices=written))
    assert config.problems == ()
    assert 0 in (excluded := config.applied_to(VgpuManager()).excluded).indices or excluded.uuids


def test_a_strategy_may_be_one_word_or_a_list() -> None:
    """Both spellings occur."""
    assert read(entry(deviceListStrategy="envvar")).plugin == {"device_list_strategy": ("envvar",)}
    both = {"device_list_strategy": ("envvar", "cdi-cri")}
    assert read(entry(deviceListStrategy="envvar,cdi-cri")).plugin == both
    assert read(entry(deviceListStrategy=["envvar", "cdi-cri"])).plugin == both


def test_keys_in_other_letters_and_empty_ones_are_as_in_the_replaced_plugin() -> None:
    """Go's decoder does not look at upper and lower case, and null sets nothing."""
    assert read(entry(devicesplitcount=4, gdsEnabled=None)).own == {"device_split_count": 4}


def test_what_has_no_effect_is_named() -> None:
    """With its line, and the rest of the entry counts."""
    config = read(
        f"version: v1\nconfigs:\n- nodeName: {NODE}\n  cgroupDriver: systemd\n"
        "  deviceSplitCuont: 2\n  frobnicate: 7\n  gdsEnabled: true\n"
    )
    assert config.notes == (
        (
            f"{YAML}:5: configs[0].deviceSplitCuont: unknown key, it has no effect; did you mean "
            "deviceSplitCount?"
        ),
        f"{YAML}:6: configs[0].frobnicate: unknown key, it has no effect; remove it",
        (
            f"{YAML}:4: configs[0].cgroupDriver: has no effect; the agent finds a container's "
            "cgroup with either driver; remove the key"
        ),
    )
    assert config.plugin == {"gds_enabled": True}


@pytest.mark.parametrize(
    ("pattern", "meant"), [("gpu-*", "gpu-.*"), ("gpu*", "gpu.*"), ("g*7", "g.*7")]
)
def test_a_pattern_of_shells_is_named_where_it_was_meant_for_this_node(
    pattern: str, meant: str
) -> None:
    """The entry is passed over, and the node offers something else than its operator wrote."""
    config = read_node_config(f"- nodeName: {pattern}\n", "gpu-7", YAML)
    assert config.problems == ()
    assert config.notes == (
        (
            f'{YAML}:1: [0].nodeName: "{pattern}" is a regular expression, and does not match '
            f'gpu-7; write "{meant}" if this entry is for it'
        ),
    )


@pytest.mark.parametrize("pattern", ["gpu-1*", "gpu-8*", "other-*", "gpu-.*x", "[a-z]*", "a*b"])
def test_a_pattern_that_was_not_meant_for_this_node_is_not_named(pattern: str) -> None:
    """Most entries are for other nodes."""
    config = read_node_config(f"- nodeName: '{pattern}'\n", "gpu-7", YAML)
    assert (config.problems, config.notes, config.entry) == ((), (), "")


def test_a_file_of_json_is_named_as_such() -> None:
    """Its author does not know that a reader of YAML reads it."""
    config = read_node_config('[{"nodeName": "a" "gdsEnabled": true}]', NODE, "/c/nodeConfig.json")
    assert config.problems == (
        (
            "/c/nodeConfig.json:1: not JSON: did not find expected ',' or '}', while parsing a "
            "flow mapping"
        ),
    )


MANY = "\n".join(f"- nodeName: n{number}\n  gdsEnabled: 7" for number in range(30))
TABLE = [
    ("", "1: is empty; expected entries with a nodeName"),
    ("{", "2: not YAML: did not find expected node content, while parsing a flow node"),
    ("7", "1: expected a list of entries with a nodeName, got 7"),
    ("configs: 7", "1: configs: expected a list of entries with a nodeName, got 7"),
    (
        "version: v1",
        "1: configs: expected a list of entries with a nodeName, and it is missing",
    ),
    (
        "version: v1\nconfig: []",
        (
            "1: configs: expected a list of entries with a nodeName, and it is missing; is config "
            "meant to be configs?"
        ),
    ),
    (
        "nodename: a\ngdsEnabled: true",
        (
            "1: configs: expected a list of entries with a nodeName, and it is missing; write this "
            "entry as an item of a list"
        ),
    ),
    ("version: v2\nconfigs: []", '1: version: expected v1, got "v2"'),
    (
        "apiVersion: v1\nkind: ConfigMap",
        (
            "2: kind: ConfigMap is an object of Kubernetes; give the text below one key of its "
            "data, as a file of its own"
        ),
    ),
    ("- 7", "1: [0]: expected a mapping with a nodeName, got 7"),
    (
        "- gdsEnabled: true",
        (
            "1: [0].nodeName: expected a node's name or a regular expression for names, and it is "
            "missing"
        ),
    ),
    (
        "- nodeName: 7",
        "1: [0].nodeName: expected a node's name or a regular expression for names, got 7",
    ),
    (
        '- nodeName: ""',
        '1: [0].nodeName: expected a node\'s name or a regular expression for names, got ""',
    ),
    (
        "- nodeName: gpu-(",
        '1: [0].nodeName: "gpu-(" is no regular expression (RE2): "missing ): gpu-("',
    ),
    (
        "- nodeName: '*'",
        (
            '1: [0].nodeName: "*" is no regular expression (RE2): "no argument for repetition '
            'operator: *"; write .* for any characters'
        ),
    ),
    (
        "- nodeName: (?=a)",
        ('1: [0].nodeName: "(?=a)" is no regular expression (RE2): "invalid perl operator: (?="'),
    ),
    (
        "- nodeName: " + "(a|b)" * 300,
        "1: [0].nodeName: has 1500 characters; expected at most 1024",
    ),
    ("- &a {nodeName: a}", "1: [0]: anchor &a is not supported, write the value out"),
    (
        "- nodeName: a\n  gdsEnabled: true\n  gdsEnabled: false",
        "3: [0].gdsEnabled: given twice, first on line 2; keep one of them",
    ),
    (
        "- nodeName: a\n  gdsEnabled: true\n  gdsenabled: false",
        "3: [0].gdsenabled: given twice, first on line 2; keep one of them",
    ),
    ("- nodeName: a\n  gdsEnabled: 1", "2: [0].gdsEnabled: expected true or false, got 1"),
    (
        "- nodeName: a\n  deviceSplitCount: 4.5",
        "2: [0].deviceSplitCount: expected an integer from 1 to 65536, got 4.5",
    ),
    (
        "- nodeName: a\n  deviceSplitCount: {}",
        "2: [0].deviceSplitCount: expected an integer from 1 to 65536, got a mapping",
    ),
    (
        "- nodeName: a\n  deviceMemoryScaling: 1e999",
        "2: [0].deviceMemoryScaling: expected a number from 0.01 to 100, got Infinity",
    ),
    (
        "- nodeName: a\n  deviceCoresScaling: -1",
        "2: [0].deviceCoresScaling: expected a number from 0.01 to 100, got -1",
    ),
    (
        "- nodeName: a\n  deviceMemoryFactor: 0",
        "2: [0].deviceMemoryFactor: expected an integer from 1 to 65536, got 0",
    ),
    (
        "- nodeName: a\n  migStrategy: double",
        '2: [0].migStrategy: expected "", none, single or mixed, got "double"',
    ),
    (
        "- nodeName: a\n  deviceListStrategy: env",
        (
            "2: [0].deviceListStrategy: expected a list of envvar, volume-mounts, cdi-annotations "
            'and cdi-cri, got "env"'
        ),
    ),
    (
        "- nodeName: a\n  excludeDevices: 0--2",
        (
            "2: [0].excludeDevices: expected a list of indices (0), ranges (0-2 or 0..2) and UUIDs "
            '(GPU-…), got "0--2"'
        ),
    ),
    (
        "- nodeName: a\n  excludeDevices: [0, [1]]",
        (
            "2: [0].excludeDevices: expected a list of indices (0), ranges (0-2 or 0..2) and UUIDs "
            "(GPU-…), got a list"
        ),
    ),
    (
        "- nodeName: a\n  excludeDevices: 7..4",
        "2: [0].excludeDevices: 7..4: expected the smaller index first, as in 4-7",
    ),
    ("- nodeName: a\n  imex: 0", "2: [0].imex: expected channelIDs and required, got 0"),
    (
        "- nodeName: a\n  imex:\n    channelIDs: [1]",
        "3: [0].imex.channelIDs: expected [] or [0], got [1]",
    ),
]


@pytest.mark.parametrize(("text", "said"), TABLE)
def test_an_error_is_named_by_file_line_key_and_remedy(text: str, said: str) -> None:
    """One sentence, also in the entry of another node: nobody can tell what was meant there, and
    whether the name is right.
    """
    config = read(text)
    assert config == NodeConfig(problems=(f"{YAML}:{said}",))


def test_a_file_of_nothing_but_errors_is_cut_short() -> None:
    """A megabyte of junk must not become a megabyte of log."""
    problems = read(MANY).problems
    assert len(problems) == 21
    assert problems[-1] == f"{YAML}: and 10 more problems"


@pytest.mark.parametrize(
    "text",
    [
        "x" * 2_000_000,
        '"\\' * 500_000,
        "/*" * 500_000,
        "[" * 1_000_000,
        '"' * 999_999,
        '[{"nodeName":"a"},\n' * 50_000,
        "- nodeName: " + "(a*)*" * 200 + "$",
        "- nodeName: (((((a{1,100}){1,100}){1,100}){1,100}){1,100})",
    ],
    ids=["large", "strings", "comments", "deep", "quotes", "many", "regex", "repetitions"],
)
def test_a_hostile_file_takes_bounded_time(text: str) -> None:
    """No input makes the reader slow: parts of it run on the event loop."""
    started = time.process_time()
    for file in (YAML, JSON):
        assert read(text, file=file, node="a" * 253).own == {}
    assert time.process_time() - started < 5


def test_a_file_without_expressions_loads_no_library_for_them() -> None:
    """It would take 10 ms of each start, and 3 MiB."""
    before = sys.modules.pop("re2", None)
    try:
        assert read(entry(deviceSplitCount=9)).own == {"device_split_count": 9}
        assert "re2" not in sys.modules
    finally:
        if before is not None:
            sys.modules["re2"] = before


@given(st.text(max_size=300) | st.from_regex(r"- nodeName: [^\n]*\n  [a-zA-Z]*: [^\n]*"))
def test_no_text_ends_in_an_exception(text: str) -> None:
    """It is a file that anybody may have written."""
    for file in (YAML, JSON):
        config = read_node_config.__wrapped__(text, NODE, file)
        assert all(len(problem) < 600 for problem in config.problems)
        assert not (config.problems and (config.own or config.plugin))


def facts(*texts: str, **found: Any) -> NodeFacts:
    """The file was read so often, with these texts."""
    held: tuple[str, ...] = ()
    settings = settings_of(**PATH)
    for text in texts:
        held = texts_in_force(held, text, lambda each: is_valid(settings, each))
    return NodeFacts(texts={FILE: held}, **found)


GOOD, BAD = entry(deviceSplitCount=4), entry(deviceSplitCount=0)


def test_a_file_with_an_error_changes_nothing() -> None:
    """While pods run, half of an edit must not offer a GPU that was taken away. However many wrong
    edits there are, the last sound text stays in force.
    """
    config = in_force(settings_of(**PATH), facts(GOOD, BAD, "{", BAD))
    assert config.own == {"device_split_count": 4}
    assert config.problems == (
        f"{YAML}:1: configs[0].deviceSplitCount: expected an integer from 1 to 65536, got 0",
        f"{YAML}: until that is corrected, its previous content stays in force",
    )
    assert in_force(settings_of(**PATH), facts(GOOD, BAD, GOOD)).problems == ()


def test_a_file_that_was_wrong_from_the_start_leaves_the_settings_in_force() -> None:
    """And says so."""
    config = in_force(settings_of(**PATH), facts(BAD))
    assert config.own == {}
    assert config.problems[-1] == f"{YAML}: until that is corrected, flags and settings count"


def test_a_file_that_is_not_there_is_named() -> None:
    """The operator has asked for it."""
    assert in_force(settings_of(**PATH), facts()).problems == (
        (
            f"{YAML}: does not exist, so flags and settings count; mount it, or correct "
            "vgpuManager.nodeConfigFile"
        ),
    )
    assert in_force(settings_of(), facts()) == NodeConfig()


def test_a_file_that_cannot_be_read_keeps_its_effect() -> None:
    """And is named with the reason."""
    config = in_force(settings_of(**PATH), facts(GOOD, unreadable={FILE: "Permission denied"}))
    assert config.own == {"device_split_count": 4}
    assert config.problems[0] == f"{YAML}: cannot be read: Permission denied; make it readable"


LISTS = ListOptions(strategies=("envvar",), imex_channels=(0,), cdi_modes=("gds",))


def test_the_way_of_devices_is_the_nodes_own() -> None:
    """Strategies, further devices and channels of the entry beat those of the agent."""
    plugin = Plugin(gds_enabled=True, imex_channel_ids=(0,))
    config = read(
        entry(
            deviceListStrategy="volume-mounts",
            gdsEnabled=False,
            gdrcopyEnabled=True,
            imex={"channelIDs": []},
        )
    )
    assert config.lists(LISTS, plugin) == msgspec.structs.replace(
        LISTS, strategies=("volume-mounts",), enabled=("gdrcopy",), imex_channels=()
    )
    assert config.ruled_out(plugin) == ()
    assert read(entry()).lists(LISTS, plugin) == msgspec.structs.replace(LISTS, enabled=("gds",))


def test_what_needs_the_whole_agent_is_named() -> None:
    """CDI specs are made, and channels are looked for, as the agent's own settings say."""
    config = read(entry(deviceListStrategy="cdi-cri", imex={"channelIDs": [0], "required": True}))
    assert config.lists(LISTS, Plugin()).strategies == ("envvar",)
    assert config.ruled_out(Plugin()) == (
        (
            "configs[0].deviceListStrategy: the CDI specs of a node are made as "
            "plugin.deviceListStrategy says; set that to a cdi strategy, too"
        ),
        (
            "configs[0].imex.channelIDs: the channels of a node are looked for as "
            "plugin.imexChannelIds says; set that, too"
        ),
        (
            "configs[0].imex.required: the channels of a node are looked for as "
            "plugin.imexRequired says; set that, too"
        ),
    )
    both = Plugin(device_list_strategy=("envvar", "cdi-annotations"))
    assert read(entry(deviceListStrategy="cdi-cri")).lists(LISTS, both).strategies == ("cdi-cri",)
