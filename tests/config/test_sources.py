"""Four sources: which one wins, and how the origin of a value is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.conftest import Load, Problems
from vgpu_agent.config import schema
from vgpu_agent.config.load import Contents, load
from vgpu_agent.config.options import Option, keys_also_set, options
from vgpu_agent.families.volcano_vgpu.settings import VolcanoVgpu

FILE = "version: v1\nlog:\n  level: warning\n"
VARIABLE = {"VGPU_AGENT_LOG_LEVEL": "error"}
FLAG = {"--log-level": "debug"}


@pytest.mark.parametrize(
    ("text", "environment", "flags", "level", "origin"),
    [
        ("", {}, {}, "info", "default"),
        (FILE, {}, {}, "warning", "config.yaml:3"),
        (FILE, VARIABLE, {}, "error", "environment VGPU_AGENT_LOG_LEVEL"),
        (FILE, VARIABLE, FLAG, "debug", "flag --log-level"),
        (FILE, {}, FLAG, "debug", "flag --log-level"),
        ("", VARIABLE, {}, "error", "environment VGPU_AGENT_LOG_LEVEL"),
        (FILE, {"VGPU_AGENT_LOG_LEVEL": ""}, {}, "warning", "config.yaml:3"),
        (FILE, VARIABLE, {"--log-level": "info"}, "info", "flag --log-level"),
    ],
)
def test_flag_beats_environment_beats_file_beats_default(
    load_text: Load,
    text: str,
    environment: dict[str, str],
    flags: dict[str, str],
    level: str,
    origin: str,
) -> None:
    """An empty variable counts as not set; a flag that repeats the default still wins."""
    loaded = load_text(text, environment=environment, flags=flags)

    assert (loaded.settings.log.level, loaded.origins["log.level"]) == (level, origin)


def test_every_value_has_an_origin(load_text: Load) -> None:
    """The origins are those of the values, list items included, no more and no less."""
    text = (
        "version: v1\nsharing:\n  timeSlicing:\n    resources:\n"
        "      - name: gpu\n        replicas: 4\n"
    )

    loaded = load_text(text)

    assert set(loaded.origins) == {path for path, _ in schema.values(loaded.settings)}
    assert loaded.origins["sharing.timeSlicing.resources[0].name"] == "config.yaml:5"
    assert loaded.origins["sharing.timeSlicing.resources[0].replicas"] == "config.yaml:6"
    assert loaded.origins["sharing.timeSlicing.renameByDefault"] == "default"


# Each of the two needs the other.
PAIR = "version: v1\nvgpuManager: {exporter: {certificateFile: /tls.crt, keyFile: /tls.key}}\n"

TEXTS = {
    "KUBELET_SOCKET": "/k/device-plugins/kubelet.sock",
    "VGPU_AGENT_DEVICE_PLUGIN_PATH": "/k/device-plugins/",
    "vgpuManager.exporter.address": "3456",
    "vgpuManager.exporter.minScrapeIntervalSeconds": "500ms",
    "vgpuManager.exporter.authorised": "true",
    "vgpuManager.domain": "example.com",
    "vgpuManager.deviceSplitCount": "4",
    "vgpuManager.deviceCoresScaling": "1.5",
    "vgpuManager.deviceMemoryScaling": "2",
    "vgpuManager.deviceMemoryFactor": "1024",
    "vgpuManager.excludeDevices": "0-2,4..5,7",
    "vgpuManager.featureGates": "GPUCoreResourcePlugin=true,SMWatcher=1",
    "vgpuManager.openKernelModules": "true",
    "gpu.failOnInitError": "false",
    "gpu.discovery": "tegra",
    "plugin.passDeviceSpecs": "true",
    "plugin.deviceIdStrategy": "index",
    "plugin.sharedDevicesAllocationPolicy": "packed",
    "plugin.deviceListStrategy": "cdi-cri,envvar",
    "plugin.migStrategy": "mixed",
    "plugin.cdiAnnotationPrefix": "example.com/",
    "plugin.gdrcopyEnabled": "true",
    "plugin.gdsEnabled": "true",
    "plugin.mofedEnabled": "true",
    "plugin.imexChannelIds": "0",
    "plugin.imexRequired": "true",
    "cdi.featureFlags": "disable-nvsandboxutils",
    "cdi.disableHooks": "enable-cuda-compat, chmod",
    "namedConfig.label": "example.com/config",
    "namedConfig.default": "a100",
    "namedConfig.fallbackStrategies": "single,empty",
    "iktos.resourceConfig": "gpu:shared:4",
    "aws.vgpus": "4",
    "log.level": "debug",
    "log.format": "console",
    "listen": ":1",
    "debugListen": ":2",
    "nodeName": "node-7",
    "gpu.disableHealthChecks": "48",
    "gpu.enableHealthChecks": "31",
    "volcanoVgpu.configMapNamespace": "volcano",
}


@pytest.mark.parametrize(
    ("option", "variable"), [(option, name) for option in options() for name in option.variables]
)
def test_every_variable_reaches_its_key(load_text: Load, option: Option, variable: str) -> None:
    """The table of options names keys that exist, and each can be given as text."""
    text = TEXTS.get(variable, TEXTS.get(option.path, "/some/where"))

    loaded = load_text(PAIR, environment={variable: text})

    assert loaded.origins[option.path] == f"environment {variable}"
    assert {
        path for path, origin in loaded.origins.items() if origin.startswith("environment")
    } == {option.path, *keys_also_set(option.path)}


def test_the_directory_of_plugin_sockets_says_where_the_kubelets_directory_is(
    load_text: Load, problems_of: Problems
) -> None:
    """vgpu-manager §1.2: with and without the slash of its default."""
    for flag in ("/data/kubelet/device-plugins/", "/data/kubelet/device-plugins"):
        loaded = load_text(flags={"--device-plugin-path": flag})
        assert loaded.settings.kubelet.directory == "/data/kubelet"
    assert problems_of(flags={"--device-plugin-path": "/plugins"}) == [
        (
            "--device-plugin-path: expected the kubelet's directory, followed by /device-plugins, "
            'got "/plugins"'
        )
    ]


def test_the_kubelets_socket_says_where_its_directory_is(
    load_text: Load, problems_of: Problems
) -> None:
    """nvidia §1: the flag names the socket. Our own flag beats it."""
    socket = {"KUBELET_SOCKET": "/data/kubelet/device-plugins/kubelet.sock"}

    assert load_text(environment=socket).settings.kubelet.directory == "/data/kubelet"
    assert (
        load_text(environment={**socket, "VGPU_AGENT_KUBELET_DIR": "/k"}).settings.kubelet.directory
        == "/k"
    )
    assert problems_of(flags={"--kubelet-socket": "/tmp/kubelet.sock"}) == [
        (
            "--kubelet-socket: expected the kubelet's directory, followed by "
            '/device-plugins/kubelet.sock, got "/tmp/kubelet.sock"'
        )
    ]


@pytest.mark.parametrize(
    ("text", "enabled"), [("", (False, True)), ("true", (True, True)), ("false", (False, False))]
)
def test_a_variable_that_two_plugins_know_sets_both(
    load_text: Load, text: str, enabled: tuple[bool, bool]
) -> None:
    """nvidia §1 and volcano-vgpu §5.3: one name, two defaults."""
    settings = load_text(environment={"GDRCOPY_ENABLED": text}).settings

    assert (
        settings.plugin.gdrcopy_enabled,
        settings.section(VolcanoVgpu).gdrcopy_enabled,
    ) == enabled


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("1", True), ("T", True), ("False", False), ("0", False), ("f", False)],
)
def test_a_variable_of_nvidias_plugin_is_read_as_go_reads_it(
    load_text: Load, text: str, value: object
) -> None:
    """nvidia §1: PASS_DEVICE_SPECS comes from manifests that were written for strconv.ParseBool."""
    assert (
        load_text(environment={"PASS_DEVICE_SPECS": text}).settings.plugin.pass_device_specs
        is value
    )


@pytest.mark.parametrize(
    ("sources", "problem"),
    [
        (
            {"flags": {"--log-level": "loud"}},
            '--log-level: expected debug, info, warning or error, got "loud"',
        ),
        (
            {"flags": {"--listen": ""}},
            '--listen: expected an address HOST:PORT or :PORT, port 0 to 65535, got ""',
        ),
        ({"flags": {"--kubelet-dir": ""}}, '--kubelet-dir: expected an absolute path, got ""'),
        (
            {"flags": {"--kubelet-dir": "a\0b"}},
            '--kubelet-dir: expected text without control characters, got "a\\u0000b"',
        ),
        (
            {"environment": {"VGPU_AGENT_LISTEN": "x"}},
            (
                "environment variable VGPU_AGENT_LISTEN: expected an address HOST:PORT or :PORT, "
                'port 0 to 65535, got "x"'
            ),
        ),
        (
            {"environment": {"NODE_NAME": "\udcff"}},
            (
                "environment variable NODE_NAME: expected text without control characters, got "
                '"\\udcff"'
            ),
        ),
        (
            {"environment": {"FAIL_ON_INIT_ERROR": "yes"}},
            'environment variable FAIL_ON_INIT_ERROR: expected true or false, got "yes"',
        ),
        (
            {"flags": {"--listen": ":9395"}},
            (
                "--listen: expected a port other than that of debugListen (127.0.0.1:9395), got "
                '":9395"'
            ),
        ),
    ],
)
def test_a_wrong_flag_or_variable_is_named(
    problems_of: Problems, sources: dict[str, dict[str, str]], problem: str
) -> None:
    """The sentence begins with what the person typed."""
    assert problems_of(**sources) == [problem]


def test_a_mistake_in_the_file_counts_even_where_a_flag_overrides_it(problems_of: Problems) -> None:
    """Otherwise it would break the next start without the flag."""
    assert problems_of("version: v1\nlog: {level: loud}\n", flags=FLAG) == [
        'config.yaml:2: log.level: expected debug, info, warning or error, got "loud"'
    ]


def test_a_relative_path_on_the_command_line_starts_from_here(
    load_text: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any command does this. A path in a file has no "here", so it must be absolute."""
    monkeypatch.chdir(tmp_path)

    loaded = load_text(
        flags={"--kubelet-dir": "kubelet"}, environment={"VGPU_AGENT_KUBECONFIG": "./admin.conf"}
    )

    assert loaded.settings.kubelet.directory == str(tmp_path / "kubelet")
    assert loaded.settings.kubeconfig == str(tmp_path / "admin.conf")


def test_with_simulate_the_roots_lie_in_its_directory(load_text: Load) -> None:
    """Roots that are not set follow the directory of simulated GPUs, and say so."""
    loaded = load_text(flags={"--simulate": "/sim"})

    assert (
        loaded.settings.gpu.driver_root,
        loaded.settings.sysfs_root,
        loaded.settings.gpu.proc_root,
        loaded.settings.mps.root,
        loaded.settings.state_directory,
    ) == (
        "/sim",
        "/sim/sys",
        "/sim/proc",
        "/sim/mps",
        "/sim/agent-state",
    )
    assert [
        path for path, origin in loaded.origins.items() if origin == "derived from simulate"
    ] == [
        "stateDirectory",
        "gpu.driverRoot",
        "gpu.procRoot",
        "mps.root",
    ]


def test_with_simulate_a_root_that_somebody_set_stays(load_text: Load) -> None:
    """This holds even for a root that was set to the default."""
    loaded = load_text(
        "version: v1\nsimulate: /sim\ngpu:\n  driverRoot: /\n",
        environment={"VGPU_AGENT_PROC_ROOT": "/host/proc"},
    )

    assert (
        loaded.settings.gpu.driver_root,
        loaded.settings.sysfs_root,
        loaded.settings.gpu.proc_root,
    ) == (
        "/",
        "/sim/sys",
        "/host/proc",
    )
    assert loaded.origins["gpu.driverRoot"] == "config.yaml:4"


def test_an_empty_simulate_flag_switches_the_simulation_of_the_file_off(load_text: Load) -> None:
    """No silent simulation: what is switched off leaves nothing behind."""
    loaded = load_text("version: v1\nsimulate: /sim\n", flags={"--simulate": ""})

    assert (loaded.settings.simulate, loaded.settings.gpu.driver_root) == ("", "/")


@pytest.mark.parametrize(
    ("name", "warnings"),
    [
        (
            "VGPU_AGENT_LISTN",
            (
                (
                    "environment variable VGPU_AGENT_LISTN: unknown and ignored, did you mean "
                    "VGPU_AGENT_LISTEN?"
                ),
            ),
        ),
        ("VGPU_AGENT_COLOUR", ("environment variable VGPU_AGENT_COLOUR: unknown and ignored",)),
        ("VGPU_AGENT_SERVICE_HOST", ()),
        ("VGPU_AGENT_SERVICE_PORT_METRICS", ()),
        ("VGPU_AGENT_PORT", ()),
        ("VGPU_AGENT_PORT_9394_TCP_ADDR", ()),
        ("VGPU_AGENT_METRICS_SERVICE_HOST", ()),
        ("VGPU_AGENT_SIM_STATE", ()),
        ("VGPU_AGENT_CONFIG", ()),
        ("PATH", ()),
    ],
)
def test_a_variable_that_looks_like_ours_is_warned_of(
    load_text: Load, name: str, warnings: tuple[str, ...]
) -> None:
    """It stops nothing. Kubernetes writes such variables for a Service of our name,
    so they are no mistake.
    """
    assert load_text(environment={name: "x"}).warnings == warnings


def test_what_is_kept_of_the_environment_is_ours(tmp_path: Path) -> None:
    """Other variables may hold secrets, and the configuration is shown under ``/debug/config``."""
    loaded = load({}, {"TOKEN": "secret", "NODE_NAME": "a"})

    assert loaded.sources.environment == {"NODE_NAME": "a"}


@pytest.mark.parametrize("flags", [{"--config": "flag.yaml"}, {}])
def test_the_file_is_named_by_flag_or_variable(
    flags: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag wins here, too, and origins show the name as the person wrote it."""
    monkeypatch.chdir(tmp_path)
    Path("flag.yaml").write_text("version: v1\nnodeName: by-flag\n")
    Path("variable.yaml").write_text("version: v1\nnodeName: by-variable\n")
    expected = flags.get("--config", "variable.yaml")

    loaded = load(flags, {"VGPU_AGENT_CONFIG": "variable.yaml"})

    assert loaded.settings.node_name == f"by-{expected.removesuffix('.yaml')}"
    assert loaded.origins["nodeName"] == f"{expected}:2"


def test_without_a_file_the_defaults_are_in_force() -> None:
    """Nothing needs to be configured."""
    loaded = load({}, {"VGPU_AGENT_CONFIG": ""})

    assert (loaded.sources.file, loaded.contents, set(loaded.origins.values())) == (
        None,
        Contents(),
        {"default"},
    )
