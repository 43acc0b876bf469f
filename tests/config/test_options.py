"""The table of flags and variables."""

from __future__ import annotations

import argparse

import pytest

from vgpu_agent.config import options, schema


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    """A command with all the flags."""
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    return parser


def test_a_flag_that_is_not_given_leaves_no_trace(parser: argparse.ArgumentParser) -> None:
    """Otherwise it would beat the environment and the file with its default."""
    assert options.given(parser.parse_args([])) == {}


def test_a_flag_that_is_given_is_kept_as_text(parser: argparse.ArgumentParser) -> None:
    """The empty text too; `load` judges the values, so that all mistakes are reported in one form."""
    arguments = parser.parse_args(["--config", "a.yaml", "--node-name", "n", "--simulate", "", "--log-level=loud"])

    assert options.given(arguments) == {"--config": "a.yaml", "--node-name": "n", "--simulate": "", "--log-level": "loud"}


def test_every_flag_that_was_promised_is_there(parser: argparse.ArgumentParser) -> None:
    """The command line is an interface; what stands in people's manifests must not vanish."""
    flags = {text for action in parser._actions for text in action.option_strings}

    assert flags == {
        *("-h", "--help", "--config", "--node-name", "--kubelet-dir", "--listen", "--debug-listen", "--kubeconfig"),
        *("--driver-root", "--sysfs-root", "--proc-root", "--simulate", "--log-format", "--log-level"),
    }


def test_every_flag_has_a_key_and_a_variable_of_its_own() -> None:
    """Nothing can be set in two ways by one name."""
    assert {option.path for option in options.OPTIONS} <= set(schema.value_paths())
    assert len({option.variable for option in options.OPTIONS}) == len(options.OPTIONS)
    assert len({option.path for option in options.OPTIONS}) == len(options.OPTIONS)


def test_the_help_names_variable_and_default(parser: argparse.ArgumentParser) -> None:
    """So that nobody has to look them up."""
    text = " ".join(parser.format_help().split())

    assert "--kubelet-dir DIR the kubelet's root directory (VGPU_AGENT_KUBELET_DIR; default /var/lib/kubelet)" in text
