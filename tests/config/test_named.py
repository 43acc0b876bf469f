"""The choice among named configurations: label, default, fallback strategies (nvidia §13), and the problem reported when none fits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vgpu_agent.config.named import Choice, Shelf, choose, keys_in
from vgpu_agent.errors import ConfigError

LABEL = "nvidia.com/device-plugin.config"
ALL = ("named", "single", "empty")


def shelf(default: str = "", fallbacks: tuple[str, ...] = ALL) -> Shelf:
    """A shelf at the path that NVIDIA's chart uses."""
    return Shelf("/available-configs", LABEL, default, fallbacks)


@pytest.mark.parametrize(
    ("label", "default", "fallbacks", "keys", "key", "reason"),
    [
        ("a", "b", ALL, {"a", "b", "default"}, "a", f"label {LABEL}=a"),
        ("", "b", ALL, {"a", "b", "default"}, "b", "namedConfig.default"),
        ("", "", ALL, {"a", "default"}, "default", "namedConfig.fallbackStrategies: named"),
        ("", "", ALL, {"a"}, "a", "namedConfig.fallbackStrategies: single"),
        ("", "", ("single", "named"), {"default"}, "default", "namedConfig.fallbackStrategies: single"),
        ("", "", ALL, {"a", "b"}, "", "namedConfig.fallbackStrategies: empty"),
        ("", "", ("empty", "named"), {"default"}, "", "namedConfig.fallbackStrategies: empty"),
        ("", "", ALL, set(), "", "namedConfig.fallbackStrategies: empty"),
    ],
)
def test_label_then_default_then_the_fallback_strategies_in_their_order(
    label: str, default: str, fallbacks: tuple[str, ...], keys: set[str], key: str, reason: str
) -> None:
    """The first that fits decides, and says so."""
    assert choose(shelf(default, fallbacks), label, keys) == Choice(key, reason)


def test_a_label_that_names_no_configuration_chooses_nothing_and_says_which_there_are() -> None:
    """NVIDIA's ends with an error. Here what is in force stays, and the sentence names label, value and remedy."""
    choice = choose(shelf("a"), "typo", {"b", "a"})
    assert choice.key == ""
    assert choice.problem == (
        f'label {LABEL} of this node names the configuration "typo", but /available-configs has a, b; '
        "add it to the ConfigMap or correct the label"
    )


def test_a_default_that_does_not_exist_is_no_reason_to_guess() -> None:
    """The fallback strategies are for nodes without a default, not for a wrong one."""
    choice = choose(shelf("typo"), "", {"default"})
    assert choice.problem.startswith('namedConfig.default names the configuration "typo"')


def test_nothing_that_fits_is_a_problem_with_its_remedy() -> None:
    """This happens when the fallback strategy `empty` was taken out on purpose."""
    choice = choose(shelf(fallbacks=("named", "single")), "", {"a", "b"})
    assert "(named, single) fits /available-configs (which has a, b); label the node" in choice.problem


def test_many_configurations_do_not_make_a_long_sentence() -> None:
    """Ten names are enough to see what is meant."""
    choice = choose(shelf(), "typo", {f"config-{number:02}" for number in range(40)})
    assert "config-09 and 30 more;" in choice.problem


def test_keys_are_the_files_of_a_mounted_config_map(tmp_path: Path) -> None:
    """The kubelet mounts links into ``..data``, itself a link. Neither that nor a directory is a key."""
    version = tmp_path / "..2026"
    version.mkdir()
    (version / "a.yaml").write_text("version: v1\n")
    os.symlink("..2026", tmp_path / "..data")
    os.symlink("..data/a.yaml", tmp_path / "a.yaml")
    (tmp_path / "folder").mkdir()
    os.symlink("..data/gone", tmp_path / "gone")
    assert keys_in(str(tmp_path)) == {"a.yaml"}


def test_a_directory_that_is_not_there_is_told_with_its_setting(tmp_path: Path) -> None:
    """The usual reason is a mount that was forgotten."""
    with pytest.raises(ConfigError, match=r"namedConfig\.directory: .*/nowhere cannot be read: No such file"):
        keys_in(str(tmp_path / "nowhere"))
