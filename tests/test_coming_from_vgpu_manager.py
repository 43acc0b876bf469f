"""docs/coming-from-vgpu-manager.md: its tables are complete, and what they say is what the agent
does.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from vgpu_agent.config import foreign_settings, options, schema
from vgpu_agent.config.load import Contents, Sources, load_contents
from vgpu_agent.families.vgpu_manager.gates import read_gates
from vgpu_agent.families.vgpu_manager.keys import (
    CUDA_MAJOR_LABEL,
    CUDA_MINOR_LABEL,
    CUDA_VERSION_LABEL,
    DRIVER_VERSION_LABEL,
    Keys,
)
from vgpu_agent.families.vgpu_manager.node_config import _KEYS
from vgpu_agent.families.vgpu_manager.settings import SETTINGS

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = (DOCS / "coming-from-vgpu-manager.md").read_text()
CONTRACT = (DOCS / "contracts" / "vgpu-manager.md").read_text()


def section(heading: str) -> str:
    """The text of one section of the contract."""
    return CONTRACT.partition(f"### {heading} ")[2].partition("\n### ")[0]


def named(text: str) -> set[str]:
    """The flags that a text names."""
    return set(re.findall(r"--[a-z][a-z0-9-]+", text))


def accepted() -> set[str]:
    """The flags that the agent takes, with an effect or without."""
    every = {flag for option in options.options() for flag in option.flags}
    return every | foreign_settings.flags().keys()


def test_each_flag_of_the_device_plugin_is_on_the_page_and_accepted() -> None:
    """vgpu-manager §1.2: what the page leaves out, an admin has to guess."""
    flags = named(section("1.2")) - {"--version"}
    assert len(flags) > 25
    assert flags - accepted() == set()
    assert flags - named(PAGE) == set()


def test_each_flag_that_the_page_names_is_accepted() -> None:
    """Those behind kubectl and helm aside, and those of the scheduler and the webhook, which are
    commands of their own.
    """
    agent = re.sub(r"\n## The (scheduler|webhook)\n.*?(?=\n## )", "", PAGE, flags=re.DOTALL)
    table = "\n".join(line for line in agent.splitlines() if line.startswith("| `--"))
    assert named(table) - accepted() == set()


@pytest.mark.parametrize(
    ("heading", "title", "module"),
    [("1.3", "The scheduler", "scheduler"), ("1.5", "The webhook", "webhook")],
)
def test_each_flag_of_another_program_is_on_the_page_and_accepted(
    heading: str, title: str, module: str
) -> None:
    """vgpu-manager §1.3, §1.5: its arguments can be pasted into the Deployment."""
    contract = section(heading)
    if module == "webhook":
        contract = contract.partition("device-client: ")[0]
    part = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    table = named("\n".join(line for line in part.splitlines() if line.startswith("| `--")))
    parser = argparse.ArgumentParser().add_subparsers()
    importlib.import_module(f"vgpu_agent.cli.{module}").add_parser(parser)
    taken = set(parser.choices[module]._option_string_actions)
    assert len(named(contract)) > 12
    assert named(contract) - table == set()
    assert table - taken == set()


def test_each_gate_is_on_the_page_and_known() -> None:
    """vgpu-manager §1.7, in both spellings."""
    rows = [line for line in section("1.7").splitlines() if line.startswith("| `")]
    gates = {name for row in rows for name in re.findall(r"`([A-Z][A-Za-z]+)`", row.split("|")[1])}
    assert len(gates) == 19
    for gate in gates:
        assert f"`{gate}`" in PAGE, gate
        assert read_gates([f"{gate}=true"]).problems == (), gate


def test_each_key_of_a_node_configuration_is_known() -> None:
    """vgpu-manager §1.6."""
    keys = set(re.findall(r"`([a-z][A-Za-z]+)`", section("1.6"))) - {"version", "configs"}
    assert {key for key in keys if key not in _KEYS} <= {"configs", "version"}
    assert "gdrcopyEnabled" in keys


def test_each_setting_of_the_page_exists() -> None:
    """A setting that was renamed would send an operator looking for it."""
    paths = schema.value_paths()
    sections = {path.partition(".")[0] for path in paths if "." in path}
    words = set(re.findall(r"`([a-z][A-Za-z]*\.[a-z][A-Za-z.]*)(?::[^`]*)?`", PAGE))
    words = {word for word in words if word.partition(".")[0] in sections}
    assert {"vgpuManager.nodeConfigFile", "vgpuControl.hostDirectory"} <= words
    places = {path.rpartition(".")[0] for path in paths} | paths.keys()
    assert words - places == set()


def test_the_settings_of_the_page_are_a_configuration() -> None:
    """It is what an operator copies first."""
    block = PAGE.partition("In `manifests/configmap.yaml`:\n\n```yaml\n")[2].partition("```")[0]
    text = "version: v1\n" + "".join(f"{line[4:]}\n" for line in block.splitlines())
    loaded = load_contents(Sources({}, {}, "c.yaml"), Contents(text.encode()))
    assert loaded.settings.is_on(SETTINGS.name)
    assert (loaded.warnings, loaded.collisions) == ((), ())


def test_the_components_of_the_page_exist_and_none_that_the_family_needs_is_missing() -> None:
    """Without components/vgpu-control there is no library, no cgroups and no host PIDs, and the
    node offers nothing.
    """
    named = set(re.findall(r"`(?:manifests/)?components/([a-z-]+)", PAGE))
    components = {path.name for path in (DOCS.parent / "manifests" / "components").iterdir()}
    assert named - components == set()
    assert named >= {
        "vgpu-control",
        "vgpu-control-library",
        "vgpu-manager-config",
        "reschedule",
        "scrape-reviews",
        "mig-monitor",
        "cdi",
        "own-node-only",
    }


def test_the_library_of_the_page_lies_where_the_component_delivers_it() -> None:
    """And the variables that an admin is asked to set are those of the component."""
    setting = re.search(r"vgpuControl:\n +library: (\S+)", PAGE)
    component = DOCS.parent / "manifests" / "components" / "vgpu-control-library"
    deployed = (component / "daemonset.yaml").read_text()
    assert setting is not None
    assert setting[1] in (component / "kustomization.yaml").read_text()
    for variable in ("LIBRARY", "CLIENT"):
        assert f"`{variable}`" in PAGE
        assert f"- name: {variable}\n" in deployed


def test_the_command_of_the_page_moves_the_policy_to_another_domain(tmp_path: Path) -> None:
    """All keys that the agent writes, while the labels of versions and the counts of other families
    stay allowed.
    """
    command = next(line for line in PAGE.splitlines() if line.startswith("$ sed -i -E '/node-"))
    *words, file = shlex.split(command.removeprefix("$ "))
    copy = tmp_path / "policy.yaml"
    copy.write_text((DOCS.parent / file).read_text())
    subprocess.run([*words, str(copy)], check=True, timeout=60)
    keys, policy = Keys("gpu.example.com"), copy.read_text()
    written = {*keys.state_annotations, *keys.state_labels, keys.node_config, keys.node_register}
    written |= {keys.node_topology, keys.node_heartbeat, keys.cores, keys.memory, keys.mig("")}
    assert {key for key in written if f'"{key}"' not in policy} == set()
    assert {f"nvidia.com/{name}" for name in re.findall(r'"nvidia\.com/([^"]*)"', policy)} == {
        DRIVER_VERSION_LABEL,
        CUDA_VERSION_LABEL,
        CUDA_MAJOR_LABEL,
        CUDA_MINOR_LABEL,
        "nvidia.com/",
    }
    assert '(key.startsWith("gpu.example.com/") || key.startsWith("nvidia.com/") ||' in policy


@pytest.mark.parametrize("value", ["devicePlugin.enabled=false", "devicePlugin.enable`"])
def test_the_values_of_old_and_new_charts_that_end_the_plugin_are_on_the_page(value: str) -> None:
    """Helm takes a value that a chart does not have without a word, and both plugins would run."""
    assert value in PAGE


@pytest.mark.parametrize("label", ["vgpu-manager=device-plugin", "vgpu-manager-enable=enable"])
def test_the_labels_of_old_and_new_charts_are_on_the_page(label: str) -> None:
    """Nodes have one of them, and the agent asks for another."""
    assert label in PAGE
