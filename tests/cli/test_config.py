"""``vgpu-agent config``: what it prints, and where."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vgpu_agent.cli import config, main
from vgpu_agent.config.example import example
from vgpu_agent.errors import CheckFailedError, ConfigError

Command = Callable[..., int]


@pytest.fixture
def command() -> Command:
    """Runs ``vgpu-agent config …`` as the command line would."""
    parser = argparse.ArgumentParser(prog="vgpu-agent")
    config.add_parser(parser.add_subparsers())

    def run(*words: str) -> int:
        arguments = parser.parse_args(["config", *words])
        status: int = arguments.run(arguments)
        return status

    return run


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VGPU_AGENT_CONFIG", raising=False)
    monkeypatch.delenv("NODE_NAME", raising=False)
    Path("config.yaml").write_text("version: v1\nlog:\n  level: debug\n")
    Path("wrong.yaml").write_text("version: v1\nlog:\n  level: loud\n")


def test_check_says_that_a_file_is_ok(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit status 0."""
    assert command("check", "config.yaml") == 0
    assert capsys.readouterr() == ("config.yaml: ok\n", "")


def test_check_takes_the_file_as_a_flag_too(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """``run`` takes this flag, so a command can be checked by exchanging one word."""
    assert command("check", "--config", "config.yaml", "--log-format", "console") == 0
    assert capsys.readouterr().out == "config.yaml: ok\n"


def test_check_without_a_file_checks_flags_and_environment(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says that no file was looked at."""
    assert command("check") == 0
    assert capsys.readouterr().out == "defaults, environment and flags (no file): ok\n"


def test_check_names_the_file_of_nvidias_plugin(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was looked at, too."""
    Path("v1.yaml").write_text("version: v1\n")

    assert command("check", "config.yaml", "--config-file", "v1.yaml") == 0
    assert capsys.readouterr().out == "config.yaml and v1.yaml: ok\n"


@pytest.fixture
def node_config(tmp_path: Path) -> str:
    """A node configuration of vgpu-manager, and a configuration with the family."""
    Path("config.yaml").write_text("version: v1\nfamilies: {nvidia: false, vgpuManager: true}\n")
    (tmp_path / "nodeConfig.yaml").write_text(
        "version: v1\nconfigs:\n- nodeName: gpu-.\n  deviceSplitCount: 4\n  splitCount: 5\n"
    )
    return str(tmp_path / "nodeConfig.yaml")


@pytest.mark.parametrize(
    ("node", "meaning"),
    [
        ("gpu-1", "configs[0] counts for node gpu-1"),
        ("cpu-1", "no entry is for node cpu-1, so flags and settings count"),
    ],
)
def test_check_says_what_a_node_configuration_means_for_a_node(
    command: Command,
    capsys: pytest.CaptureFixture[str],
    node_config: str,
    node: str,
    meaning: str,
) -> None:
    """It is a file for all nodes, and a slip in it is found before any of them has it."""
    flags = ("--node-name", node, "--node-config-path", node_config)
    assert command("check", "config.yaml", *flags) == 0
    written = capsys.readouterr()
    assert written.out == f"config.yaml: ok\n{node_config}: ok, {meaning}\n"
    assert written.err.startswith(f"warning: {node_config}:5: configs[0].splitCount: unknown key")


def test_check_names_the_errors_of_a_node_configuration(command: Command, node_config: str) -> None:
    """With exit status 2, as for the agent's own file; the agent would go on without it."""
    Path(node_config).write_text("version: v1\nconfigs:\n- nodeName: a\n  deviceSplitCount: 0\n")
    with pytest.raises(ConfigError) as raised:
        command("check", "config.yaml", "--node-config-path", node_config)
    assert raised.value.problems == [
        f"{node_config}:4: configs[0].deviceSplitCount: expected an integer from 1 to 65536, got 0"
    ]


def test_check_says_that_a_named_file_was_not_there(
    command: Command, capsys: pytest.CaptureFixture[str], node_config: str
) -> None:
    """It is mounted on the nodes; "ok" alone would look like a verdict on it."""
    assert command("check", "config.yaml", "--node-config-path", f"{node_config}.gone") == 0
    assert capsys.readouterr() == (
        "config.yaml: ok\n",
        f"warning: {node_config}.gone: is not here, so it was not checked\n",
    )


def test_check_asks_for_no_file_that_only_a_default_names(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """volcanoVgpu.nodeConfigFile has one, and most clusters have no such file."""
    Path("config.yaml").write_text("version: v1\nfamilies: {nvidia: false, volcanoVgpu: true}\n")
    assert command("check", "config.yaml") == 0
    assert capsys.readouterr() == ("config.yaml: ok\n", "")


def test_check_judges_the_node_configuration_of_volcano_vgpu(
    command: Command, tmp_path: Path
) -> None:
    """Every file of a replaced plugin that a path names."""
    file = tmp_path / "config.json"
    file.write_text('{"nodeconfig": [{"name": "gpu-1", "devicesplitcount": "x"}]}')
    Path("config.yaml").write_text(
        "version: v1\nnodeName: gpu-1\nfamilies: {nvidia: false, volcanoVgpu: true}\n"
        f"volcanoVgpu: {{nodeConfigFile: {file}}}\n"
    )
    with pytest.raises(ConfigError, match="devicesplitcount"):
        command("check", "config.yaml")


def test_check_refuses_two_different_files(command: Command) -> None:
    """It could only check one of them."""
    with pytest.raises(
        ConfigError, match=r"two files given, config\.yaml and --config wrong\.yaml; name one"
    ):
        command("check", "config.yaml", "--config", "wrong.yaml")


def test_check_refuses_families_that_take_something_from_each_other(command: Command) -> None:
    """An agent would start with them and withhold a resource,
    which an operator learns on the nodes only.
    """
    Path("both.yaml").write_text(
        "version: v1\nfamilies:\n  aws: true\naws:\n  resourceName: nvidia.com/gpu\n"
    )
    with pytest.raises(ConfigError) as refused:
        command("check", "both.yaml")
    (sentence,) = refused.value.problems
    assert sentence.startswith(
        'both.yaml:5: aws.resourceName: "nvidia.com/gpu" is offered by nvidia and by aws; '
    )
    assert command("show", "both.yaml") == 0


@pytest.mark.parametrize("words", [["check", "wrong.yaml"], ["show", "--config", "wrong.yaml"]])
def test_a_wrong_file_is_left_to_the_command_line(command: Command, words: list[str]) -> None:
    """It prints the sentences and exits with 2, as for every command."""
    with pytest.raises(ConfigError) as refused:
        command(*words)

    assert refused.value.problems == [
        'wrong.yaml:3: log.level: expected debug, info, warning or error, got "loud"'
    ]


def test_show_lists_each_value_and_where_it_came_from(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One aligned line a value."""
    monkeypatch.setenv("NODE_NAME", "gpu-7")

    assert command("show", "--config", "config.yaml", "--simulate", "/sim") == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=2) for line in lines if "default" not in line] == [
        ["nodeName", "gpu-7", "environment NODE_NAME"],
        ["simulate", "/sim", "flag --simulate"],
        ["stateDirectory", "/sim/agent-state", "derived from simulate"],
        ["log.level", "debug", "config.yaml:3"],
        ["gpu.driverRoot", "/sim", "derived from simulate"],
        ["gpu.procRoot", "/sim/proc", "derived from simulate"],
        ["mps.root", "/sim/mps", "derived from simulate"],
    ]
    assert len({line.rindex("default") for line in lines if line.endswith("default")}) == 1


def test_show_takes_the_file_as_a_word_too(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """``check`` does so too, and users should not have to remember which of the two does."""
    assert command("show", "config.yaml") == 0
    assert "config.yaml:3" in capsys.readouterr().out


def test_show_as_json_is_for_programs(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """Values keep their types."""
    assert command("show", "--json", "--config", "config.yaml") == 0

    shown = json.loads(capsys.readouterr().out)
    assert shown["log.level"] == {"value": "debug", "origin": "config.yaml:3"}
    assert shown["gpu.usageSeconds"] == {"value": 5.0, "origin": "default"}
    assert shown["sharing.timeSlicing.resources"] == {"value": [], "origin": "default"}


def test_warnings_go_to_stderr(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They disturb no program that reads the answer."""
    monkeypatch.setenv("VGPU_AGENT_LISTN", ":1")

    assert command("show", "--json") == 0

    written = capsys.readouterr()
    assert written.err == (
        "warning: environment variable VGPU_AGENT_LISTN: unknown and ignored, did you mean "
        "VGPU_AGENT_LISTEN?\n"
    )
    assert json.loads(written.out)


def test_the_example_is_a_file_that_checks_as_ok(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed example can be saved and used."""
    assert command("example") == 0

    text = capsys.readouterr().out
    assert text == example()
    Path("example.yaml").write_text(text)
    assert command("check", "example.yaml") == 0


def test_convert_prints_a_configuration_of_nvidias_plugin_as_one_of_ours(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed configuration can be checked and used at once."""
    Path("v1.yaml").write_text("flags: {migStrategy: mixed}\n")

    assert command("convert", "v1.yaml") == 0
    printed = capsys.readouterr().out
    assert printed.endswith("version: v1\nplugin:\n  migStrategy: mixed\n")
    Path("ours.yaml").write_text(printed)
    assert command("check", "ours.yaml") == 0


def test_convert_reads_standard_input(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a ConfigMap that kubectl prints."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"flags: {migStrategy: some}\n")))

    with pytest.raises(ConfigError) as refused:
        command("convert", "-")
    assert refused.value.problems == [
        'standard input:1: flags.migStrategy: expected none, single or mixed, got "some"'
    ]


MANIFEST = """\
apiVersion: v1
kind: ConfigMap
metadata:
  name: vgpu-agent
data:
  config.yaml: |
    version: v1
    log:
      level: debug
"""


def test_check_takes_the_config_map_as_it_is(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each key of its data is a file to the agent; nobody has to cut it out."""
    shipped = Path(__file__).parents[2] / "manifests" / "configmap.yaml"
    assert command("check", str(shipped)) == 0
    assert capsys.readouterr().out == f"{shipped} data.config.yaml: ok\n"

    nvidias = "  a10: |\n    version: v1\n    flags: {migStrategy: none}\n"
    Path("map.yaml").write_text(MANIFEST + nvidias)
    assert command("check", "map.yaml") == 0
    assert capsys.readouterr().out == (
        "map.yaml data.config.yaml: ok\n"
        "map.yaml data.a10: ok, a configuration of NVIDIA's device plugin\n"
    )


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        (
            MANIFEST.replace("debug", "loud"),
            (
                "map.yaml data.config.yaml:3: log.level: expected debug, info, warning or error, "
                'got "loud"'
            ),
        ),
        (
            MANIFEST.replace("config.yaml: |", "config.yaml:"),
            (
                "map.yaml:6: data.config.yaml: expected a text; write | after the key and indent "
                "the text below it"
            ),
        ),
        (
            MANIFEST.partition("\ndata:")[0],
            (
                "map.yaml:1: data: the ConfigMap has no text; expected one below a key such as "
                "config.yaml"
            ),
        ),
    ],
)
def test_check_names_the_problems_in_a_config_map(manifest: str, problem: str) -> None:
    """With the key, and the line within its text; exit status 1."""
    Path("map.yaml").write_text(manifest)
    process = subprocess.run(
        [sys.executable, "-m", "vgpu_agent", "config", "check", "map.yaml"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (process.returncode, process.stderr) == (1, f"{problem}\n")


VALUES = """\
config:
  map:
    default: |-
      version: v1
      sharing:
        timeSlicing:
          resources:
          - name: nvidia.com/gpu
            replicas: 4
  default: default
migStrategy: none
gfd: {enabled: true}
podLabels: {}
"""


def test_check_explains_values_of_nvidias_chart(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is told with its meaning here, and its configurations in the agent's words, all YAML."""
    Path("values.yaml").write_text(VALUES)
    assert command("check", "values.yaml") == 3
    explained, _, converted = capsys.readouterr().out.partition("---\n")
    assert explained.splitlines() == [
        "# values.yaml: values of the Helm chart of NVIDIA's device plugin, not a configuration",
        "# config: see the configurations below, and components/nvidia-config for several of them",
        '# migStrategy ("none"): plugin.migStrategy',
        (
            "# gfd: keep GPU Feature Discovery and Node Feature Discovery; the agent does not "
            "replace them"
        ),
        "# podLabels: not known; look for it in docs/configuration.md",
        "# config.default: namedConfig.default",
    ]
    Path("converted.yaml").write_text(converted)
    assert command("check", "converted.yaml") == 0
    assert "replicas: 4" in converted


def test_check_names_the_problems_of_a_configuration_in_values(command: Command) -> None:
    """With its name in config.map."""
    Path("values.yaml").write_text(VALUES.replace("replicas: 4", "replicas: four"))
    with pytest.raises(CheckFailedError) as refused:
        command("check", "values.yaml")
    (sentence,) = refused.value.problems
    assert sentence.startswith("values.yaml config.map.default:6: sharing.timeSlicing.resources[0]")


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("config.yaml",), 0),
        (("wrong.yaml",), 1),
        (("missing.yaml",), 2),
        (("config.yaml", "--config", "wrong.yaml"), 2),
        (("--no-such-flag",), 2),
    ],
)
def test_the_exit_status_of_check_tells_a_wrong_file_from_a_wrong_call(
    words: tuple[str, ...], status: int
) -> None:
    """A script that checks a file must not take its own slip for the file's."""
    try:
        found = main.main(["config", "check", *words])
    except SystemExit as left:
        found = int(str(left.code))
    assert found == status
