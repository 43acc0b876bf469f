"""Bad input: each rule of validation in docs/contracts,
with the exact sentence and the exit status of the command line.

A row is what an operator may have written: files, variables, words on the command line. The
sentence names the file and line, flag or variable, the key, the value and what to write instead.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from vgpu_agent.cli import main

GPU_TWICE = "sharing:\n  timeSlicing:\n    resources:\n    - {name: gpu, replicas: 2}\n"
MPS = "sharing:\n  mps:\n    resources:\n    - {name: gpu, replicas: 2}\n"
LIST_STRATEGIES = "a list of envvar, volume-mounts, cdi-annotations and cdi-cri"
FEATURES = (
    "a list of enable-explicit-driver-libraries, disable-nvsandboxutils, "
    "enable-coherent-annotations, disable-multiple-csv-devices, "
    "no-additional-gids-for-device-nodes, disable-ipc-discoverer"
)
DOMAIN = "a DNS name in lower case such as nvidia.com"
EXCLUDED = "a list of indices (0), ranges (0-2 or 0..2) and UUIDs (GPU-…)"
NAME = "expected up to 63 lower case letters, digits, '-' and '.' after the slash"
DEVICES = '"all", a number of devices, or a list of indices and UUIDs'
OBJECT = (
    "ConfigMap is an object of Kubernetes; give the text below one key of its data, as a file of "
    "its own"
)
MISSING = "missing; list what is shared, or leave {} out"
EMPTY = "expected at least one resource, got an empty list; leave {} out to share nothing"


@dataclasses.dataclass(frozen=True)
class Row:
    """One input and the lines on stderr that refuse it.

    Attributes:
        rule: where the contracts say so.
        text: a file of NVIDIA's plugin, ``v1.yaml``; "" for none.
        own: our file, ``config.yaml``; "" for none.
        words: the words behind ``vgpu-agent run``.
        environment: more variables.
        status: of the command.
    """

    rule: str
    said: str | tuple[str, ...]
    text: str = ""
    own: str = ""
    words: tuple[str, ...] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    status: int = 2


def flag(rule: str, word: str, said: str) -> Row:
    """A flag."""
    return Row(rule, f"{word.partition('=')[0]}: {said}", words=(word,))


def variable(rule: str, name: str, value: str, said: str) -> Row:
    """An environment variable."""
    return Row(rule, f"environment variable {name}: {said}", environment={name: value})


def shared(
    rule: str, entry: str, said: str, line: int = 4, index: int = 0, block: str = "timeSlicing"
) -> Row:
    """An entry of ``sharing.timeSlicing.resources`` in a file of NVIDIA's plugin."""
    return Row(
        rule,
        f"v1.yaml:{line}: sharing.{block}.resources[{index}]{said}",
        text=f"sharing:\n  {block}:\n    resources:\n    - {entry}\n",
    )


ROWS = [
    # nvidia §1: what the flags, and the variables of the same meaning, may be.
    flag(
        "nvidia §1", "--device-list-strategy=envvars", f'expected {LIST_STRATEGIES}, got "envvars"'
    ),
    flag("nvidia §1", "--device-list-strategy=", f'expected {LIST_STRATEGIES}, got ""'),
    variable(
        "nvidia §1",
        "DEVICE_LIST_STRATEGY",
        "envvar,cdi",
        f'expected {LIST_STRATEGIES}, got "envvar,cdi"',
    ),
    flag("nvidia §1", "--device-id-strategy=name", 'expected uuid or index, got "name"'),
    variable("nvidia §1", "DEVICE_ID_STRATEGY", "UUID", 'expected uuid or index, got "UUID"'),
    flag(
        "nvidia §1",
        "--shared-devices-allocation-policy=spread",
        'expected auto, distributed or packed, got "spread"',
    ),
    variable(
        "nvidia §1",
        "SHARED_DEVICES_ALLOCATION_POLICY",
        "pack",
        'expected auto, distributed or packed, got "pack"',
    ),
    flag("nvidia §1", "--device-discovery-strategy=wsl", 'expected auto, nvml or tegra, got "wsl"'),
    flag("nvidia §1", "--device-discovery-strategy=", 'expected auto, nvml or tegra, got ""'),
    variable(
        "nvidia §1", "DEVICE_DISCOVERY_STRATEGY", "none", 'expected auto, nvml or tegra, got "none"'
    ),
    flag("nvidia §1", "--mig-strategy=double", 'expected none, single or mixed, got "double"'),
    variable("nvidia §1", "MIG_STRATEGY", "Mixed", 'expected none, single or mixed, got "Mixed"'),
    flag("nvidia §1", "--fail-on-init-error=maybe", 'expected true or false, got "maybe"'),
    flag("nvidia §1", "--pass-device-specs=yes", 'expected true or false, got "yes"'),
    flag("nvidia §1", "--gdrcopy-enabled=2", 'expected true or false, got "2"'),
    flag("nvidia §1", "--gds-enabled=", 'expected true or false, got ""'),
    variable("nvidia §1", "MOFED_ENABLED", "on", 'expected true or false, got "on"'),
    flag("nvidia §1", "--imex-required=x", 'expected true or false, got "x"'),
    flag("nvidia §1", "--imex-channel-ids=1", 'expected [] or [0], got "1"'),
    flag("nvidia §1", "--imex-channel-ids=0,0", 'expected [] or [0], got "0,0"'),
    variable("nvidia §1", "IMEX_CHANNEL_IDS", "zero", 'expected [] or [0], got "zero"'),
    flag("nvidia §1", "--driver-root=", 'expected an absolute path, got ""'),
    flag("nvidia §1", "--nvidia-driver-root=", 'expected an absolute path, got ""'),
    flag("nvidia §1", "--nvidia-ctk-path=", 'expected an absolute path, got ""'),
    flag(
        "nvidia §1",
        "--cdi-annotation-prefix=cdi",
        'expected a DNS name followed by a slash, got "cdi"',
    ),
    flag("nvidia §1", "--cdi-feature-flags=fast", f'expected {FEATURES}, got "fast"'),
    flag(
        "nvidia §1",
        "--cdi-disable-hooks=A B",
        'expected a list of hook names such as enable-cuda-compat, got "A B"',
    ),
    flag(
        "nvidia §1",
        "--kubelet-socket=/tmp/k.sock",
        "expected the kubelet's directory, followed by /device-plugins/kubelet.sock, got "
        '"/tmp/k.sock"',
    ),
    Row(
        "nvidia §1",
        "none.yaml: cannot be read: No such file or directory; give --config-file an existing, "
        "readable file",
        words=("--config-file=none.yaml",),
    ),
    Row(
        "nvidia §1, G13",
        "v1.yaml:6: flags.migStrategy: MPS cannot share MIG instances; expected none or single "
        'with sharing.mps, got "mixed"',
        text=f"{MPS}flags:\n  migStrategy: mixed\n",
    ),
    Row(
        "nvidia §1, G13",
        "environment variable MIG_STRATEGY: MPS cannot share MIG instances; expected none or "
        'single with sharing.mps, got "mixed"',
        text=MPS,
        environment={"MIG_STRATEGY": "mixed"},
    ),
    Row(
        "nvidia §1",
        "v1.yaml:6: flags.mpsRoot: sharing.mps needs a directory on the node; expected an absolute "
        'path such as /run/nvidia/mps, got ""',
        text=f'{MPS}flags:\n  mpsRoot: ""\n',
    ),
    Row(
        "nvidia §1",
        "--mps-root: sharing.mps needs a directory on the node; expected an absolute path such as "
        '/run/nvidia/mps, got ""',
        text=MPS,
        words=("--mps-root=",),
    ),
    # vgpu-manager §1.2 and §1.7: flags, and our keys of the same meaning.
    *(
        flag("vgpu-manager §1.2", f"--domain={name}", f'expected {DOMAIN}, got "{name}"')
        for name in ("Example.com", "a..b", "", "nvidia.com/", "-a")
    ),
    flag(
        "vgpu-manager §1.2",
        "--device-split-count=0",
        'expected an integer from 1 to 65536, got "0"',
    ),
    *(
        flag(
            "vgpu-manager §1.2",
            f"--device-{kind}-scaling={text}",
            f'expected a number from 0.01 to 100, got "{text}"',
        )
        for kind, text in (("cores", "lots"), ("memory", "0"), ("memory", "1e3"), ("cores", "nan"))
    ),
    flag(
        "vgpu-manager §1.2",
        "--device-memory-factor=65537",
        'expected an integer from 1 to 65536, got "65537"',
    ),
    *(
        flag("vgpu-manager §1.2", f"--exclude-devices={text}", f'expected {EXCLUDED}, got "{text}"')
        for text in ("0-2,4...7", "-1", "GPU-1", "all")
    ),
    flag(
        "vgpu-manager §1.2",
        "--exclude-devices=7..4",
        "7..4: expected the smaller index first, as in 4-7",
    ),
    flag(
        "vgpu-manager §1.2",
        "--exclude-devices=MIG-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28",
        "MIG-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28: a single MIG instance cannot be excluded; give "
        "its GPU (GPU-…), which excludes all instances of it, or leave it out",
    ),
    variable(
        "vgpu-manager §1.2",
        "VGPU_AGENT_EXCLUDE_DEVICES",
        "GPU-1",
        f'expected {EXCLUDED}, got "GPU-1"',
    ),
    flag("vgpu-manager §1.2", "--open-kernel-modules=2", 'expected true or false, got "2"'),
    flag(
        "vgpu-manager §1.2",
        "--device-plugin-path=/var/lib/kubelet/plugins",
        "expected the kubelet's directory, followed by /device-plugins, got "
        '"/var/lib/kubelet/plugins"',
    ),
    *(
        flag(
            "vgpu-manager §1.4",
            f"--server-bind-port={text}",
            f'expected a port from 1 to 65535, got "{text}"',
        )
        for text in ("", "0", "65536", ":3456", "http", "9" * 50)
    ),
    *(
        flag(
            "vgpu-manager §1.4",
            f"--min-scrape-interval={text}",
            f'expected a time such as 1s or 500ms, got "{text}"',
        )
        for text in ("", "-1s", "1 s", "fast", "1d")
    ),
    flag(
        "vgpu-manager §1.4",
        "--tls-cert-file=/certs/tls.crt",
        "a certificate and its key are given together, or neither",
    ),
    Row(
        "vgpu-manager §1.4",
        "config.yaml:3: vgpuManager.exporter.address: expected a port other than that of listen "
        '(:9394), got ":9394"',
        own="version: v1\nfamilies: {vgpuManager: true}\n"
        'vgpuManager: {exporter: {address: ":9394"}}\n',
    ),
    Row(
        "vgpu-manager §1.4",
        "config.yaml:3: vgpuManager.exporter.address: expected a port other than that of "
        'debugListen (127.0.0.1:9395), got ":9395"',
        own="version: v1\nfamilies: {vgpuManager: true}\n"
        'vgpuManager: {exporter: {address: ":9395"}}\n',
    ),
    flag(
        "vgpu-manager §1.7",
        "--feature-gates=CorePlugin=true,SMWatch=true",
        'unknown feature gate "SMWatch", did you mean SMWatcher?',
    ),
    flag(
        "vgpu-manager §1.7",
        "--feature-gates=MemoryPlugin=on",
        'MemoryPlugin: expected MemoryPlugin=true or MemoryPlugin=false, got "on"',
    ),
    flag(
        "vgpu-manager §1.7",
        "--feature-gates=Reschedule",
        "Reschedule: expected Reschedule=true or Reschedule=false, got no value",
    ),
    Row(
        "vgpu-manager §1.7",
        "config.yaml:2: vgpuManager.featureGates: expected a list such as "
        '[GPUCoreResourcePlugin=true], got "CorePlugin=true"',
        own="version: v1\nvgpuManager: {featureGates: CorePlugin=true}\n",
    ),
    Row(
        "vgpu-manager §1.7",
        (
            *(
                f'config.yaml:3: vgpuManager.featureGates: unknown feature gate "{written}", did '
                f"you mean {meant}?"
                for written, meant in (("GpuTopologie", "GPUTopology"), ("ClientMod", "ClientMode"))
            ),
        ),
        own="version: v1\nvgpuManager:\n  featureGates: [GpuTopologie=true, ClientMod=false]\n",
    ),
    Row(
        "vgpu-manager §2.3",
        'config.yaml:2: vgpuManager.migStrategy: expected "", none, single or mixed, got "all"',
        own="version: v1\nvgpuManager: {migStrategy: all}\n",
    ),
    # nvidia §2: the file.
    Row("nvidia §2", 'v1.yaml:1: version: expected v1, got "v2"', text="version: v2\n"),
    Row("nvidia §2", "v1.yaml:1: version: expected v1, got 1", text="version: 1\n"),
    Row("nvidia §2", 'v1.yaml:1: expected keys such as version: v1, got "text"', text="text\n"),
    Row(
        "nvidia §2",
        "v1.yaml:2: not YAML: did not find expected node content, while parsing a flow node",
        text="a: [\n",
    ),
    Row(
        "nvidia §2",
        "v1.yaml:2: flags.migStrategy: given twice, first on line 2; keep one of them",
        text="flags:\n  {migStrategy: none, migStrategy: single}\n",
    ),
    Row("nvidia §2", "v1.yaml:1: flags: expected a mapping, got a list", text="flags: []\n"),
    Row(
        "nvidia §2",
        'v1.yaml:1: flags.migStrategy: expected none, single or mixed, got "all"',
        text="flags: {migStrategy: all}\n",
    ),
    Row(
        "nvidia §2",
        "v1.yaml:1: flags.failOnInitError: expected true or false, got 1",
        text="flags: {failOnInitError: 1}\n",
    ),
    Row(
        "nvidia §2",
        'v1.yaml:1: flags.plugin.passDeviceSpecs: expected true or false, got "maybe"',
        text="flags: {plugin: {passDeviceSpecs: maybe}}\n",
    ),
    Row(
        "nvidia §2",
        'v1.yaml:1: flags.nvidiaDriverRoot: expected an absolute path, got "run/nvidia"',
        text="flags: {nvidiaDriverRoot: run/nvidia}\n",
    ),
    Row(
        "nvidia §2",
        'v1.yaml:1: flags.deviceDiscoveryStrategy: expected auto, nvml or tegra, got "wsl"',
        text="flags: {deviceDiscoveryStrategy: wsl}\n",
    ),
    Row(
        "nvidia §2, one string",
        "v1.yaml:1: flags.plugin.deviceListStrategy: expected a list such as [envvar, cdi-cri], "
        'got "envvar,cdi-cri"',
        text='flags: {plugin: {deviceListStrategy: "envvar,cdi-cri"}}\n',
    ),
    Row(
        "nvidia §2",
        f'v1.yaml:1: flags.plugin.deviceListStrategy: expected {LIST_STRATEGIES}, got ["envvar", '
        '"cdi"]',
        text="flags: {plugin: {deviceListStrategy: [envvar, cdi]}}\n",
    ),
    Row(
        "nvidia §2",
        'v1.yaml:1: flags.plugin.deviceIDStrategy: expected uuid or index, got "name"',
        text="flags: {plugin: {deviceIDStrategy: name}}\n",
    ),
    Row(
        "nvidia §2",
        "v1.yaml:1: flags.plugin.sharedDevicesAllocationPolicy: expected auto, distributed or "
        'packed, got "any"',
        text="flags: {plugin: {sharedDevicesAllocationPolicy: any}}\n",
    ),
    Row(
        "nvidia §2, IMEX",
        "v1.yaml:1: imex.channelIDs: expected [] or [0], got [0, 1]",
        text="imex: {channelIDs: [0, 1]}\n",
    ),
    Row(
        "nvidia §2, IMEX",
        'v1.yaml:1: imex.channelIDs: expected [] or [0], got "0"',
        text='imex: {channelIDs: "0"}\n',
    ),
    Row(
        "nvidia §2",
        f"v1.yaml:2: sharing.timeSlicing.resources: {MISSING.format('timeSlicing')}",
        text="sharing:\n  timeSlicing:\n",
    ),
    Row(
        "nvidia §2",
        f"v1.yaml:2: sharing.timeSlicing.resources: {MISSING.format('timeSlicing')}",
        text="sharing:\n  timeSlicing: {renameByDefault: true}\n",
    ),
    Row(
        "nvidia §2",
        f"v1.yaml:2: sharing.mps.resources: {MISSING.format('mps')}",
        text="sharing:\n  mps: {}\n",
    ),
    Row(
        "nvidia §2",
        f"v1.yaml:3: sharing.timeSlicing.resources: {EMPTY.format('timeSlicing')}",
        text="sharing:\n  timeSlicing:\n    resources: []\n",
    ),
    Row(
        "nvidia §2",
        f"v1.yaml:3: sharing.mps.resources: {EMPTY.format('mps')}",
        text="sharing:\n  mps:\n    resources:\n",
    ),
    Row(
        "nvidia §2",
        "v1.yaml:3: sharing.mps.resources: expected a list, got a mapping",
        text="sharing:\n  mps:\n    resources: {name: gpu, replicas: 2}\n",
    ),
    shared("nvidia §2", "gpu", ': expected name and replicas, got "gpu"'),
    shared("nvidia §2", "{name: gpu}", ".replicas: missing, expected an integer ≥ 1"),
    shared(
        "nvidia §2",
        "{replicas: 2}",
        ".name: missing, expected a resource name such as nvidia.com/gpu",
    ),
    shared(
        "nvidia §2",
        '{name: "", replicas: 2}',
        '.name: expected a resource name such as nvidia.com/gpu, got ""',
    ),
    shared("nvidia §2", "{name: gpu, replicas: 0}", ".replicas: expected an integer ≥ 1, got 0"),
    shared(
        "nvidia §2",
        "{name: gpu, replicas: -4}",
        ".replicas: expected an integer ≥ 1, got -4",
        block="mps",
    ),
    shared(
        "nvidia §2", '{name: gpu, replicas: "4"}', '.replicas: expected an integer ≥ 1, got "4"'
    ),
    shared(
        "nvidia §2, name",
        f"{{name: {'a' * 64}, replicas: 2}}",
        f'.name: {NAME}, got "nvidia.com/{"a" * 49}…"',
    ),
    shared("nvidia §2, name", "{name: -gpu, replicas: 2}", f'.name: {NAME}, got "nvidia.com/-gpu"'),
    shared("nvidia §2, name", "{name: GPU, replicas: 2}", f'.name: {NAME}, got "nvidia.com/GPU"'),
    shared("nvidia §2, name", "{name: a..b, replicas: 2}", f'.name: {NAME}, got "nvidia.com/a..b"'),
    shared("nvidia §2, name", "{name: a b, replicas: 2}", f'.name: {NAME}, got "nvidia.com/a b"'),
    shared(
        "nvidia §2, name",
        "{name: amd.com/gpu, replicas: 2}",
        '.name: expected a resource whose name begins with nvidia.com/, got "amd.com/gpu"',
    ),
    shared(
        "nvidia §2, name",
        "{name: gpu, replicas: 2, rename: a_}",
        f'.rename: {NAME}, got "nvidia.com/a_"',
    ),
    *(
        shared(
            "nvidia §2, devices",
            f"{{name: gpu, replicas: 2, devices: {devices}}}",
            f".devices: expected {DEVICES}, got {got}",
        )
        for devices, got in (
            ("some", '"some"'),
            ("0", "0"),
            ("-1", "-1"),
            ("[]", "[]"),
            ("[-1]", "[-1]"),
            ("[0, GPU-1]", '[0, "GPU-1"]'),
            ("[[0]]", "a list"),
            ("{a: b}", "a mapping"),
        )
    ),
    Row(
        "nvidia §2, one GPU in two entries",
        'v1.yaml:5: sharing.timeSlicing.resources[1].name: "nvidia.com/gpu" stands twice, first on '
        "line 4; keep one of them",
        text=GPU_TWICE + "    - {name: nvidia.com/gpu, replicas: 3}\n",
    ),
    Row(
        "nvidia §2, one GPU in two entries",
        'v1.yaml:5: sharing.timeSlicing.resources[1].devices: "1" is shared twice, first on line '
        "4; keep it in one of them",
        text=(
            GPU_TWICE.replace("2}", "2, devices: [0, 1]}")
            + "    - {name: gpu, replicas: 3, devices: [1]}\n"
        ),
    ),
    Row(
        "nvidia §2",
        "v1.yaml:1: resources.gpus[0].name: missing, expected a resource name such as "
        "nvidia.com/gpu",
        text='resources: {gpus: [{pattern: "*"}]}\n',
    ),
    Row(
        "nvidia §2",
        "v1.yaml:1: resources.mig[0].pattern: missing, expected text in quotes",
        text="resources: {mig: [{name: mig-small}]}\n",
    ),
    Row(
        "nvidia §2, several mistakes",
        (
            'v1.yaml:1: flags.migStrategy: expected none, single or mixed, got "x"',
            "v1.yaml:2: imex.required: expected true or false, got 3",
            'config.yaml:2: plugin.deviceIdStrategy: expected uuid or index, got "y"',
            '--device-id-strategy: expected uuid or index, got "z"',
        ),
        text="flags: {migStrategy: x}\nimex: {required: 3}\n",
        own="version: v1\nplugin: {deviceIdStrategy: y}\n",
        words=("--device-id-strategy", "z"),
    ),
    Row(
        "nvidia §2, given as our file",
        "config.yaml:2: flags: unknown key, a configuration of NVIDIA's plugin is given as "
        "--config-file, or goes below nvidiaConfig",
        own="version: v1\nflags: {migStrategy: none}\n",
    ),
    Row(
        "nvidia §13, a whole ConfigMap",
        f"v1.yaml:2: kind: {OBJECT}",
        text="apiVersion: v1\nkind: ConfigMap\ndata: {default: 'version: v1'}\n",
    ),
    Row(
        "nvidia §13, a whole ConfigMap",
        f"config.yaml:2: kind: {OBJECT}",
        own="apiVersion: v1\nkind: ConfigMap\ndata: {a: 'version: v1'}\n",
    ),
    Row(
        "nvidia §2, its text as a block",
        'config.yaml:2: nvidiaConfig: expected keys such as version: v1, got "flags: {}\\n"; '
        "remove the text after nvidiaConfig:",
        own="version: v1\nnvidiaConfig: |\n  flags: {}\n",
    ),
    Row(
        "nvidia §1",
        "/config/config.yaml: cannot be read: No such file or directory; give CONFIG_FILE an "
        "existing, readable file",
        environment={"CONFIG_FILE": "/config/config.yaml"},
    ),
    Row(
        "nvidia §2",
        "/config/config.yaml: cannot be read: No such file or directory; give nvidiaConfigFile an "
        "existing, readable file",
        own="version: v1\nnvidiaConfigFile: /config/config.yaml\n",
    ),
    # iktos §I.2; more of them in test_iktos.py.
    flag(
        "iktos §I.2",
        "--resource-config=gpu;a;4",
        'entry "gpu;a;4": expected <resource>:<new name>:<replicas>, got 1 part',
    ),
    flag(
        "iktos §I.2",
        "--resource-config=gpu:a",
        'entry "gpu:a": expected <resource>:<new name>:<replicas>, got 2 parts',
    ),
    *(
        flag(
            "iktos §I.2, D9",
            f"--resource-config=gpu:a:{count}",
            f'entry "gpu:a:{count}": expected replicas of 1 or more, or -1 for one per unit of '
            f'memory, got "{count}"',
        )
        for count in ("0", "-2", "x", "2147483648")
    ),
    variable(
        "iktos §I.2, D9",
        "NVIDIA_DRIVER_RESOURCE_CONFIG",
        "gpu:MyGPU:4",
        "entry \"gpu:MyGPU:4\": expected up to 63 lower case letters, digits, '-' and '.' as the "
        'new name, got "MyGPU"',
    ),
    variable(
        "iktos §I.2",
        "NVIDIA_DRIVER_RESOURCE_CONFIG",
        "nvidia.com/gpu:a:4",
        'entry "nvidia.com/gpu:a:4": expected gpu or mig-<profile> as the resource, got '
        '"nvidia.com/gpu"',
    ),
    variable(
        "iktos §I.2",
        "NVIDIA_DRIVER_RESOURCE_CONFIG",
        "gpu:a:4,gpu:b:2",
        'entries "gpu:a:4" and "gpu:b:2": both divide nvidia.com/gpu; keep one of them',
    ),
    Row(
        "iktos §I.2",
        'config.yaml:2: iktos.resourceConfig: entry "gpu": expected <resource>:<new '
        "name>:<replicas>, got 1 part",
        own="version: v1\niktos: {resourceConfig: gpu}\n",
    ),
    # aws §II.1
    *(
        flag("aws §II.1, W3", f"--vgpu={count}", f'expected an integer from 1 to 48, got "{count}"')
        for count in ("49", "0", "-1", "ten", "")
    ),
    Row("aws §II.1", '--vgpu: expected an integer from 1 to 48, got "64"', words=("-vgpu", "64")),
    Row(
        "aws §II.1",
        "config.yaml:2: aws.vgpus: expected an integer from 1 to 48, got 49",
        own="version: v1\naws: {vgpus: 49}\n",
    ),
]


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    """``run`` takes SIGTERM before it reads anything."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.rule}: {row.said}"[:120])
def test_bad_input_ends_the_command_with_its_sentence(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The labels nvidia:G13, iktos:D9 and aws:W3 among them.
    Nothing is started, and nothing goes to stdout.
    """
    monkeypatch.chdir(tmp_path)
    for name, value in {**row.environment, "NODE_NAME": "node"}.items():
        monkeypatch.setenv(name, value)
    words = list(row.words)
    for option, file, text in (
        ("--config", "config.yaml", row.own),
        ("--config-file", "v1.yaml", row.text),
    ):
        if text:
            Path(file).write_text(text)
            words += [option, file]

    # a line for people; tests/cli/test_main.py has the form in JSON
    status = main.main(["run", "--log-format", "console", *words])

    said = (row.said,) if isinstance(row.said, str) else row.said
    assert capsys.readouterr() == ("", "".join(f"{line}\n" for line in said))
    assert status == row.status
