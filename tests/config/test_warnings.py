"""Parts of an accepted configuration without effect, named with their value and the remedy."""

from __future__ import annotations

import pytest

from tests.config.conftest import Load
from vgpu_agent.config.load import Contents, Sources, load_contents


@pytest.mark.parametrize(
    ("text", "warnings"),
    [
        ("31,48", ()),
        (" ALL , xids ", ()),
        (
            "48,sixty",
            (
                (
                    'gpu.disableHealthChecks: "sixty" is ignored; expected XID numbers separated '
                    'by commas, "all" or "xids"'
                ),
            ),
        ),
        (
            "-1",
            (
                (
                    'gpu.disableHealthChecks: "-1" is ignored; expected XID numbers separated by '
                    'commas, "all" or "xids"'
                ),
            ),
        ),
    ],
)
def test_health_checks_that_mean_nothing_are_warned_of(
    load_text: Load, text: str, warnings: tuple[str, ...]
) -> None:
    """nvidia §10.1 ignores junk in silence; ignoring it is right, silence is not."""
    loaded = load_text(f'version: v1\ngpu:\n  disableHealthChecks: "{text}"\n')

    assert loaded.warnings == warnings


VGPU = "version: v1\nfamilies: {nvidia: false, volcanoVgpu: true}\n"
SHARE = "version: v1\nfamilies: {nvidia: false, volcanoGpushare: true}\n"


@pytest.mark.parametrize(
    ("text", "variable", "value", "instead"),
    [
        (VGPU, "HOOK_PATH", "/opt/vgpu", "set hamiCore.hostDirectory to that, and mount the path"),
        (SHARE, "GPU_STRATEGY", "number", "set volcanoGpushare.strategy to that"),
        (SHARE, "GPU_MEMORY_FACTOR", "10", "set volcanoGpushare.gpuMemoryFactor to that"),
    ],
)
def test_a_variable_of_a_replaced_plugin_that_is_ignored_is_named(
    load_text: Load, text: str, variable: str, value: str, instead: str
) -> None:
    """With its value and what to do instead,
    for a DaemonSet that was moved over with its environment.
    """
    (warning,) = load_text(text, environment={variable: value}).warnings
    assert warning.startswith(
        f'environment variable {variable}: "{value}" has no effect here; {instead}'
    )


@pytest.mark.parametrize(
    ("text", "variable", "value"),
    [
        (VGPU, "GDRCOPY_ENABLED", "TRUE"),
        (VGPU + "volcanoVgpu: {gdsEnabled: false}\n", "GDS_ENABLED", "false"),
        (SHARE, "GDS_ENABLED", "false"),
        (VGPU, "NVIDIA_DRIVER_ROOT", "/"),
        (
            VGPU + "gpu: {driverRoot: /run/nvidia/driver}\n",
            "NVIDIA_DEV_ROOT",
            "/run/nvidia/driver/",
        ),
        (VGPU, "HOOK_PATH", "/usr/local/vgpu"),
        (VGPU + "volcanoVgpu: {isolation: none}\n", "HOOK_PATH", "/opt/vgpu"),
        (VGPU, "KUBECONFIG", "/root/.kube/config"),
        (VGPU, "DEVICE_LIST_STRATEGY", "envvar"),
        (VGPU, "MIG_STRATEGY", "none"),
        (VGPU, "IMEX_REQUIRED", "0"),
        (VGPU, "MIG_STRATEGY", ""),
        (VGPU, "GPU_STRATEGY", "number"),
        (SHARE, "GPU_MEMORY_FACTOR", "1"),
    ],
)
def test_a_variable_of_a_replaced_plugin_that_says_what_holds_anyway_is_not_named(
    load_text: Load, text: str, variable: str, value: str
) -> None:
    """The agent does what that plugin would have done, or there is no visible difference.
    KUBECONFIG is in many a shell.
    """
    assert load_text(text, environment={variable: value}).warnings == ()


def test_a_shared_resource_that_no_node_can_have_is_named() -> None:
    """A typing error would share nothing, silently.
    A MIG profile or a renamed resource may be on another node.
    """
    text = """\
version: v1
resources: {gpus: [{pattern: "*A100*", name: nvidia.com/a100}]}
sharing:
  timeSlicing:
    resources:
      - {name: nvidia.com/gpus, replicas: 2}
      - {name: nvidia.com/a100, replicas: 2}
      - {name: nvidia.com/mig-1g.5gb, replicas: 2}
      - {name: nvidia.com/gpu, replicas: 2}
"""
    (warning,) = load_contents(Sources({}, {}, "config.yaml"), Contents(text.encode())).warnings
    assert warning == (
        'sharing.timeSlicing.resources[0].name: "nvidia.com/gpus" is no resource of any node; '
        "expected nvidia.com/gpu, "
        "nvidia.com/mig-<profile>, or a name from resources:"
    )


def test_a_key_of_an_earlier_version_does_not_keep_the_agent_from_starting(load_text: Load) -> None:
    """A node that is upgraded has its configuration from before. What means nothing any more is
    named with the place and the reason.
    """
    loaded = load_text(
        "version: v1\nhamiCore:\n  hostDirectory: /opt/vgpu\n  lockDirectory: /tmp/vgpulock\n"
    )
    (warning,) = loaded.warnings
    assert (
        "config.yaml:4: hamiCore.lockDirectory: is gone: containers share no lock directory"
    ) in warning
    assert loaded.settings.hami_core.host_directory == "/opt/vgpu"


@pytest.mark.parametrize(
    ("flag", "value", "family", "key"),
    [
        ("--vgpu", "4", "aws", "families.aws"),
        ("--resource-config", "gpu:shared:4", "nvidia", "families.nvidia"),
    ],
)
def test_a_flag_of_a_family_that_is_off_is_named(
    load_text: Load, flag: str, value: str, family: str, key: str
) -> None:
    """A DaemonSet that is moved over with its arguments would otherwise offer nothing
    and not say why.
    """
    text = "version: v1\nfamilies: {{nvidia: {0}, aws: {0}}}\n"
    assert load_text(text.format("false"), flags={flag: value}).warnings == (
        f"{flag}: has no effect without the family; set {key}: true",
    )
    assert not [
        warning
        for warning in load_text(text.format("true"), flags={flag: value}).warnings
        if family in warning
    ]


@pytest.mark.parametrize(
    ("exporter", "keys"),
    [
        ("authorised: true", ("authorised",)),
        ("certificateFile: /tls.crt, keyFile: /tls.key", ("certificateFile",)),
        ('address: ":3456", certificateFile: /tls.crt, keyFile: /tls.key, authorised: true', ()),
        ("minScrapeIntervalSeconds: 2", ()),
    ],
)
def test_what_protects_metrics_that_are_not_served_is_named(
    load_text: Load, exporter: str, keys: tuple[str, ...]
) -> None:
    """The operator expects vgpu-manager's metrics there, and nothing listens."""
    text = "version: v1\nfamilies: {nvidia: false, vgpuManager: true}\n"
    loaded = load_text(f"{text}vgpuManager: {{exporter: {{{exporter}}}}}\n")
    assert loaded.warnings == tuple(
        f"vgpuManager.exporter.{key} has no effect without vgpuManager.exporter.address; set that "
        "to :3456, where device-monitor listens"
        for key in keys
    )
    assert load_text(f"version: v1\nvgpuManager: {{exporter: {{{exporter}}}}}\n").warnings == ()
