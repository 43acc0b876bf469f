"""The choice among named configurations: label, default, fallback strategies (nvidia §13), and the
problem reported when none fits.
"""

from __future__ import annotations

from typing import Literal

import pytest

from vgpu_agent.config.documents import Choice
from vgpu_agent.families.nvidia.named import NamedConfig, choose

LABEL = "nvidia.com/device-plugin.config"
Fallbacks = tuple[Literal["named", "single", "empty"], ...]
ALL: Fallbacks = ("named", "single", "empty")


def named_config(default: str = "", fallbacks: Fallbacks = ALL) -> NamedConfig:
    """The section with the directory that NVIDIA's chart mounts."""
    return NamedConfig("/available-configs", LABEL, default, fallbacks)


@pytest.mark.parametrize(
    ("label", "default", "fallbacks", "keys", "key", "reason"),
    [
        ("a", "b", ALL, {"a", "b", "default"}, "a", f"label {LABEL}=a"),
        ("", "b", ALL, {"a", "b", "default"}, "b", "namedConfig.default"),
        ("", "", ALL, {"a", "default"}, "default", "namedConfig.fallbackStrategies: named"),
        ("", "", ALL, {"a"}, "a", "namedConfig.fallbackStrategies: single"),
        (
            "",
            "",
            ("single", "named"),
            {"default"},
            "default",
            "namedConfig.fallbackStrategies: single",
        ),
        ("", "", ALL, {"a", "b"}, "", "namedConfig.fallbackStrategies: empty"),
        ("", "", ("empty", "named"), {"default"}, "", "namedConfig.fallbackStrategies: empty"),
        ("", "", ALL, set(), "", "namedConfig.fallbackStrategies: empty"),
    ],
)
def test_label_then_default_then_the_fallback_strategies_in_their_order(
    label: str, default: str, fallbacks: Fallbacks, keys: set[str], key: str, reason: str
) -> None:
    """The first that fits decides, and says so."""
    assert choose(named_config(default, fallbacks), label, keys) == Choice(key, reason)


def test_a_label_that_names_no_configuration_chooses_nothing_and_says_which_there_are() -> None:
    """NVIDIA's ends with an error. Here what is in force stays, and the sentence names label,
    value and remedy.
    """
    choice = choose(named_config("a"), "typo", {"b", "a"})
    assert choice.key == ""
    assert choice.problem == (
        f'label {LABEL} of this node names the configuration "typo", but /available-configs has a, '
        "b; "
        "add it to the ConfigMap or correct the label"
    )


def test_a_default_that_does_not_exist_is_no_reason_to_guess() -> None:
    """The fallback strategies are for nodes without a default, not for a wrong one."""
    choice = choose(named_config("typo"), "", {"default"})
    assert choice.problem.startswith('namedConfig.default names the configuration "typo"')


def test_nothing_that_fits_is_a_problem_with_its_remedy() -> None:
    """This happens when the fallback strategy `empty` was taken out on purpose."""
    choice = choose(named_config(fallbacks=("named", "single")), "", {"a", "b"})
    assert (
        "(named, single) fits /available-configs (which has a, b); label the node" in choice.problem
    )


def test_many_configurations_do_not_make_a_long_sentence() -> None:
    """Ten names are enough to see what is meant."""
    choice = choose(named_config(), "typo", {f"config-{number:02}" for number in range(40)})
    assert "config-09 and 30 more;" in choice.problem
