"""The settings of the family `vgpu-manager`, its flags and its rules (vgpu-manager §1.2, §1.4)."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.settings import settings as settings_of
from tests.settings import switches
from vgpu_agent.config import collisions, options
from vgpu_agent.config.device_answers import Plugin
from vgpu_agent.config.families import OfferedName
from vgpu_agent.config.load import Contents, Loaded, Sources, load_contents
from vgpu_agent.config.settings import Settings
from vgpu_agent.errors import ConfigError
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.vgpu_manager.keys import Keys
from vgpu_agent.families.vgpu_manager.options import VgpuManagerOptions
from vgpu_agent.families.vgpu_manager.settings import (
    SETTINGS,
    Exporter,
    VgpuManager,
    static_mig_strategy,
)

UUID = "GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28"
ON = "version: v1\nfamilies: {nvidia: false, vgpuManager: true}\n"


def load(flags: dict[str, str], text: str = ON, **environment: str) -> Loaded:
    """The settings of a node that offers nothing but this family."""
    return load_contents(Sources(flags, environment, "c.yaml"), Contents(text.encode()))


def options_of(settings: Settings) -> VgpuManagerOptions:
    """The options of the family without a node configuration."""
    vgpu = settings.section(VgpuManager)
    return VgpuManagerOptions.from_settings(settings, vgpu, lists=ListOptions())


def test_the_arguments_of_a_daemon_set_become_options() -> None:
    """All flags of the device plugin that say how GPUs are offered, as its chart writes them."""
    loaded = load(
        {
            "--domain": "example.com",
            "--device-split-count": "20",
            "--device-cores-scaling": "1.5",
            "--device-memory-scaling": "2",
            "--device-memory-factor": "1024",
            "--exclude-devices": f"0-1,3,{UUID}",
            "--feature-gates": "GPUCoreResourcePlugin=true,MemoryPlugin=true,GPUTopology=true,"
            "HonorPreAllocatedDeviceIDs=true,Reschedule=true,SMWatcher=true,"
            "VirtualMemoryTracking=true",
            "--open-kernel-modules": "true",
            "--mig-strategy": "single",
            "--device-list-strategy": "envvar,cdi-cri",
            "--device-plugin-path": "/data/kubelet/device-plugins/",
            "--host-driver-root": "/run/nvidia/driver",
        }
    )
    lists = ListOptions(("envvar", "cdi-cri"))
    vgpu = loaded.settings.section(VgpuManager)
    assert VgpuManagerOptions.from_settings(
        loaded.settings, vgpu, lists=lists
    ) == VgpuManagerOptions(
        keys=Keys("example.com"),
        split=20,
        cores_scaling=1.5,
        memory_scaling=2.0,
        memory_factor=1024,
        excluded_uuids=frozenset({UUID}),
        excluded_indices=frozenset({0, 1, 3}),
        offer_cores=True,
        offer_memory=True,
        topology=True,
        prefer_claimed=True,
        reschedule=True,
        sm_watcher=True,
        tracks_virtual_memory=True,
        mig_strategy="single",
        open_kernel_modules=True,
        lists=lists,
    )
    assert loaded.settings.kubelet.directory == "/data/kubelet"
    assert loaded.settings.gpu.driver_root == "/run/nvidia/driver"
    assert loaded.settings.plugin.device_list_strategy == ("envvar", "cdi-cri")
    assert (loaded.warnings, loaded.collisions) == ((), ())


def test_the_defaults_are_those_of_the_replaced_plugin() -> None:
    """A DaemonSet without arguments offers the same as before."""
    assert options_of(load({}).settings) == VgpuManagerOptions()
    old = load({}, ON + "vgpuManager: {typeMatch: substring}").settings
    assert options_of(old) == VgpuManagerOptions(types_match_substrings=True)


def test_a_flag_that_means_nothing_here_is_accepted_and_named() -> None:
    """vgpu-manager §1.2, §1.4: with the reason, so that nobody relies on it."""
    loaded = load(
        {"--kube-api-qps": "50", "--cgroup-driver": "systemd", "--v": "4", "--logtostderr": "true"},
        CGROUP_DRIVER="systemd",
    )
    assert loaded.warnings == (
        (
            'environment variable CGROUP_DRIVER: "systemd" has no effect here; the agent finds a '
            "container's cgroup by itself, with either driver"
        ),
        '--kube-api-qps: "50" has no effect here; the agent writes what has changed, and only that',
        (
            '--cgroup-driver: "systemd" has no effect here; the agent finds a container\'s cgroup '
            "by itself, with either driver"
        ),
        '--v: "4" has no effect here; set log.level and log.format',
        '--logtostderr: "true" has no effect here; set log.level and log.format',
    )


def test_the_arguments_that_the_chart_writes_are_accepted() -> None:
    """Those of its device plugin with the shipped values: pasted into our DaemonSet, only the log
    level is named.
    """
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    words = [
        "--domain=nvidia.com",
        "--kube-api-qps=20",
        "--kube-api-burst=30",
        "--device-list-strategy=envvar",
        "--device-split-count=10",
        "--device-cores-scaling=1",
        "--device-memory-scaling=1",
        "--device-memory-factor=1",
        "--pprof-bind-port=0",
        "--cgroup-driver=",
        "--feature-gates=VirtualMemoryTracking=true,SharedSMUtilizationWatcher=true",
        "--feature-gates=TopologyAwareGPUAllocation=true,HonorPreAllocatedDeviceIDs=true",
        "--mofed-enabled=false",
        "--gds-enabled=false",
        "--gdrcopy-enabled=false",
        "--open-kernel-modules=false",
        "--mig-strategy=mixed",
        "--cdi-annotation-prefix=cdi.k8s.io/",
        "--host-driver-root=/",
        "--container-driver-root=/driver-root",
        "--node-config-path=/config/nodeConfig.yaml",
        "--v=3",
    ]
    loaded = load(options.given(parser.parse_args(words)), HOST_MANAGER_DIR="/data/vgpu-manager")
    assert loaded.warnings == ('--v: "3" has no effect here; set log.level and log.format',)
    assert loaded.collisions == ()
    assert options_of(loaded.settings) == VgpuManagerOptions(
        topology=True, prefer_claimed=True, sm_watcher=True, tracks_virtual_memory=True
    )
    assert loaded.settings.vgpu_control.host_directory == "/data/vgpu-manager"


def test_the_arguments_of_the_monitor_become_its_exporter() -> None:
    """vgpu-manager §1.4: with TLS, as the chart writes them; Go's times and plain seconds."""
    loaded = load(
        {
            "--server-bind-port": "3456",
            "--enable-rbac": "true",
            "--enable-tls": "true",
            "--tls-key-file": "/certs/tls.key",
            "--tls-cert-file": "/certs/tls.crt",
            "--cert-refresh-interval": "5",
            "--min-scrape-interval": "1",
            "--stuck-grace-period": "30s",
            "--pprof-bind-port": "0",
        }
    )
    assert loaded.settings.section(VgpuManager).exporter == Exporter(
        ":3456", 1.0, True, "/certs/tls.crt", "/certs/tls.key"
    )
    assert loaded.warnings == ()
    for text, seconds in (("1s", 1.0), ("500ms", 0.5), ("1.5m", 90.0), ("0", 0.0)):
        exporter = load({"--min-scrape-interval": text}).settings.section(VgpuManager).exporter
        assert exporter.min_scrape_interval_seconds == seconds


@pytest.mark.parametrize(
    ("asked", "files", "warns"),
    [
        ("true", {}, True),
        ("1", {}, True),
        ("false", {}, False),
        ("false", {"--tls-cert-file": "/tls.crt", "--tls-key-file": "/tls.key"}, True),
    ],
)
def test_a_monitor_that_was_to_use_tls_and_does_not_is_named(
    asked: str, files: dict[str, str], *, warns: bool
) -> None:
    """And one that was not to: scrapers meet the other of the two."""
    loaded = load({"--enable-tls": asked, "--server-bind-port": "3456", **files})
    said = (
        f'--enable-tls: "{asked}" has no effect here; a certificate is served where one is given, '
        "and plain HTTP where none is (--tls-cert-file, --tls-key-file)"
    )
    assert loaded.warnings == ((said,) if warns else ())


def test_the_gate_of_client_mode_is_named_where_it_is_ruled_out() -> None:
    """By default processes register anyway, and nothing need be said."""
    gate = {"--feature-gates": "ClientMode=true"}
    assert load(gate).warnings == ()
    assert load(gate, f"{ON}vgpuControl: {{processes: host-proc}}\n").warnings == (
        (
            "vgpuManager.featureGates: DevicePluginClientMode has no effect beside "
            "vgpuControl.processes: host-proc; set that to client"
        ),
    )


OWN_FLAGS = [flag for option in SETTINGS.options for flag in option.flags]


@given(
    st.dictionaries(
        st.sampled_from([*OWN_FLAGS, "--device-plugin-path"]),
        st.text(max_size=200) | st.from_regex(r"[A-Z]{1,30}=(true|false|)") | st.just("9" * 5000),
    )
)
def test_no_text_of_a_flag_ends_in_anything_but_its_sentence(flags: dict[str, str]) -> None:
    """Each problem begins with the flag that was typed, and none is long."""
    try:
        load(flags)
    except ConfigError as err:
        for problem in err.problems:
            assert problem.partition(":")[0] in flags
            assert len(problem) < 500


def test_a_gate_of_another_program_is_named() -> None:
    """And the node starts."""
    loaded = load({"--feature-gates": "SerialBindNode=true,CorePlugin=true"})
    assert loaded.warnings == (
        (
            "vgpuManager.featureGates: SerialBindNode is a gate of the scheduler extender, it has "
            "no effect on a node; leave it out"
        ),
    )
    assert options_of(loaded.settings).offer_cores


def test_a_flag_of_the_family_says_so_while_it_is_off() -> None:
    """The same holds for the other families."""
    assert load({"--device-split-count": "3"}, "version: v1\n").warnings == (
        "--device-split-count: has no effect without the family; set families.vgpuManager: true",
    )


def mig(strategy: Any = "", *, domain: str = "nvidia.com", **others: Any) -> tuple[str, str]:
    """The strategy for existing MIG instances, and the reason why it is not the requested one;
    empty where it is.
    """
    vgpu = VgpuManager(mig_strategy=strategy, domain=domain)
    on = switches(nvidia=others.get("beside") is not None, vgpu_manager=True)
    plugin = Plugin(mig_strategy=others.get("beside") or "none")
    return static_mig_strategy(settings_of(families=on, vgpu_manager=vgpu, plugin=plugin), vgpu)


def test_instances_are_offered_unless_the_family_nvidia_does() -> None:
    """The default of the replaced plugin is mixed; two plugins with one name would confuse the
    kubelet.
    """
    assert mig() == ("mixed", "")
    assert mig(beside="none") == ("none", "")
    assert mig("mixed", beside="none") == ("mixed", "")
    assert mig("single") == ("single", "")


def test_instances_of_one_name_are_left_to_the_family_nvidia() -> None:
    """The same resource with the same ids, whoever offers it: one flag sets both strategies, and
    nobody has to turn anything off.
    """
    assert mig("mixed", beside="mixed") == ("none", "")


@pytest.mark.parametrize(
    ("strategy", "domain", "beside"),
    [
        ("mixed", "example.com", "mixed"),
        ("single", "nvidia.com", "single"),
        ("mixed", "nvidia.com", "single"),
    ],
)
def test_instances_of_two_names_are_refused(strategy: str, domain: str, beside: str) -> None:
    """One instance would be two resources, and given out twice."""
    found, problem = mig(strategy, domain=domain, beside=beside)
    assert found == "none"
    assert problem == (
        f"{strategy}: the family nvidia offers the same instances (plugin.migStrategy); turn one "
        "of the two off"
    )


def names(**vgpu: Any) -> list[str]:
    """The names that the family may have on some node."""
    settings = settings_of(
        families=switches(nvidia=False, vgpu_manager=True), vgpu_manager=VgpuManager(**vgpu)
    )
    return [name.text for name in SETTINGS.names(settings)]


def test_names_are_those_that_can_be_offered() -> None:
    """A name that a gate leaves out is free for others."""
    assert names() == ["nvidia.com/vgpu-number", "nvidia.com/mig-"]
    assert names(domain="example.com", mig_strategy="none") == ["example.com/vgpu-number"]
    assert names(mig_strategy="single") == ["nvidia.com/mig-"]
    gates = ("CorePlugin=true", "MemoryPlugin=true")
    assert names(feature_gates=gates, mig_strategy="none") == [
        "nvidia.com/vgpu-number",
        "nvidia.com/vgpu-cores",
        "nvidia.com/vgpu-memory",
    ]


def test_a_name_that_the_family_nvidia_has_too_is_found() -> None:
    """A resource of NVIDIA's may be renamed to anything in its domain."""
    loaded = load(
        {},
        "version: v1\nfamilies: {vgpuManager: true}\nresources:\n  gpus:\n"
        "  - {pattern: '*', name: nvidia.com/vgpu-number}\n",
    )
    assert loaded.collisions == (
        (
            'c.yaml:2: families.vgpuManager: "nvidia.com/vgpu-number" is offered by nvidia and by '
            "vgpu-manager; the kubelet would confuse the two, so vgpu-manager offers nothing; "
            "choose another name, or turn one of the families off"
        ),
    )


def test_beside_the_family_nvidia_nothing_collides() -> None:
    """The defaults of both."""
    settings = settings_of(families=switches(nvidia=True, vgpu_manager=True))
    assert list(collisions.collisions(settings)) == []
    assert all(isinstance(name, OfferedName) for name in SETTINGS.names(settings))
