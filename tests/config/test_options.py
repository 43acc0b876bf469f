"""The table of flags and variables."""

from __future__ import annotations

import argparse

import pytest

from vgpu_agent.config import foreign_settings, options, schema


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
    """The empty text too; `load` judges the values,
    so that all mistakes are reported in one form.
    """
    arguments = parser.parse_args(
        ["--config", "a.yaml", "--node-name", "n", "--simulate", "", "--log-level=loud"]
    )

    assert options.given(arguments) == {
        "--config": "a.yaml",
        "--node-name": "n",
        "--simulate": "",
        "--log-level": "loud",
    }


def test_every_flag_that_was_promised_is_there(parser: argparse.ArgumentParser) -> None:
    """The command line is an interface. Options in people's manifests must not vanish."""
    flags = {
        text
        for action in parser._actions
        for text in action.option_strings
        if text.startswith("--")
    }

    assert flags == {
        *(
            "--help",
            "--config",
            "--node-name",
            "--kubelet-dir",
            "--listen",
            "--debug-listen",
            "--kubeconfig",
        ),
        *(
            "--driver-root",
            "--proc-root",
            "--simulate",
            "--log-format",
            "--log-level",
        ),
        # nvidia §1
        *(
            "--mig-strategy",
            "--fail-on-init-error",
            "--nvidia-driver-root",
            "--host-driver-root",
            "--dev-root",
            "--nvidia-dev-root",
            "--pass-device-specs",
        ),
        *(
            "--device-list-strategy",
            "--device-id-strategy",
            "--gdrcopy-enabled",
            "--gds-enabled",
            "--mofed-enabled",
        ),
        *(
            "--cdi-annotation-prefix",
            "--nvidia-cdi-hook-path",
            "--nvidia-ctk-path",
            "--driver-root-ctr-path",
            "--container-driver-root",
        ),
        *(
            "--mps-root",
            "--shared-devices-allocation-policy",
            "--device-discovery-strategy",
            "--imex-channel-ids",
            "--imex-required",
        ),
        *("--kubelet-socket", "--config-file", "--cdi-feature-flags", "--cdi-disable-hooks"),
        # vgpu-manager §1.2
        *(
            "--device-plugin-path",
            "--domain",
            "--device-split-count",
            "--device-cores-scaling",
            "--device-memory-scaling",
            "--device-memory-factor",
            "--exclude-devices",
            "--feature-gates",
            "--node-config-path",
            "--open-kernel-modules",
        ),
        # vgpu-manager §1.4
        *(
            "--server-bind-port",
            "--min-scrape-interval",
            "--enable-rbac",
            "--tls-cert-file",
            "--tls-key-file",
        ),
        *foreign_settings.flags(),
        "--resource-config",  # iktos §I.1
        "--vgpu",  # aws §II.1
    }


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["-mig-strategy=mixed", "-vgpu", "4"], {"--mig-strategy": "mixed", "--vgpu": "4"}),
        (
            ["--pass-device-specs", "--gds-enabled=false"],
            {"--pass-device-specs": "true", "--gds-enabled": "false"},
        ),
        (
            ["--nvidia-driver-root=/a", "--container-driver-root", "/b"],
            {"--nvidia-driver-root": "/a", "--container-driver-root": "/b"},
        ),
        (["--driver-root=/a", "-nvidia-driver-root=/b"], {"--nvidia-driver-root": "/b"}),
        (
            ["--device-list-strategy=envvar", "--device-list-strategy=cdi-cri,volume-mounts"],
            {"--device-list-strategy": "envvar,cdi-cri,volume-mounts"},
        ),
        (["--device-discovery-strategy=nvml"], {"--device-discovery-strategy": "nvml"}),
    ],
)
def test_flags_may_be_written_as_for_go(
    parser: argparse.ArgumentParser, words: list[str], flags: dict[str, str]
) -> None:
    """Arguments of a manifest for NVIDIA's plugin need not be rewritten (nvidia §1)."""
    assert options.given(parser.parse_args(words)) == flags


def test_every_flag_has_a_key_and_a_variable_of_its_own() -> None:
    """Nothing can be set in two ways by one name."""
    variables = [variable for option in options.options() for variable in option.variables]
    flags = [flag for option in options.options() for flag in option.flags]
    paths = [
        path
        for option in options.options()
        if option.convert is None
        for path in (option.path, *options.keys_also_set(option.path))
    ]

    assert set(paths) <= set(schema.value_paths())
    assert [name for name in (variables, flags, paths) if len(set(name)) != len(name)] == []


def test_the_help_names_variable_and_default(parser: argparse.ArgumentParser) -> None:
    """Users then need not look them up."""
    text = " ".join(parser.format_help().split())

    assert (
        "--kubelet-dir DIR the kubelet's root directory (VGPU_AGENT_KUBELET_DIR; default "
        "/var/lib/kubelet)"
    ) in text
