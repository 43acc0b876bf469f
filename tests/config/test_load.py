"""The rules of the schema: each input that is refused, with the exact sentence."""

from __future__ import annotations

import pytest

from tests.config.conftest import Problems

VALUES = [
    (
        "log:\n  level: warn",
        'config.yaml:3: log.level: expected debug, info, warning or error, got "warn"',
    ),
    ("log:\n  format: 1", "config.yaml:3: log.format: expected json or console, got 1"),
    ("log: loud", 'config.yaml:2: log: expected a mapping, got "loud"'),
    ("log: [json]", "config.yaml:2: log: expected a mapping, got a list"),
    (
        "listen: 9394",
        "config.yaml:2: listen: expected an address HOST:PORT or :PORT, port 0 to 65535, got 9394",
    ),
    (
        'listen: "9394"',
        (
            "config.yaml:2: listen: expected an address HOST:PORT or :PORT, port 0 to 65535, got "
            '"9394"'
        ),
    ),
    (
        "listen: ':65536'",
        (
            "config.yaml:2: listen: expected an address HOST:PORT or :PORT, port 0 to 65535, got "
            '":65536"'
        ),
    ),
    (
        "listen: '::1:80'",
        (
            "config.yaml:2: listen: expected an address HOST:PORT or :PORT, port 0 to 65535, got "
            '"::1:80"'
        ),
    ),
    (
        "listen: 'a b:80'",
        (
            "config.yaml:2: listen: expected an address HOST:PORT or :PORT, port 0 to 65535, got "
            '"a b:80"'
        ),
    ),
    (
        'listen: ":80\\n"',
        'config.yaml:2: listen: expected text without control characters, got ":80\\n"',
    ),
    (
        "listen:",
        "config.yaml:2: listen: expected an address HOST:PORT or :PORT, port 0 to 65535, got null",
    ),
    (
        "nodeName: Node_1",
        (
            "config.yaml:2: nodeName: expected a Kubernetes node name (lower case letters, digits, "
            "'-' and '.'), got \"Node_1\""
        ),
    ),
    (
        "kubelet:\n  directory: var/lib",
        'config.yaml:3: kubelet.directory: expected an absolute path, got "var/lib"',
    ),
    (
        'kubelet:\n  directory: ""',
        'config.yaml:3: kubelet.directory: expected an absolute path, got ""',
    ),
    (
        "gpu:\n  devRoot: dev",
        'config.yaml:3: gpu.devRoot: expected an absolute path or "", got "dev"',
    ),
    (
        "gpu:\n  failOnInitError: yes",
        'config.yaml:3: gpu.failOnInitError: expected true or false, got "yes"',
    ),
    (
        "gpu:\n  failOnInitError: 1",
        "config.yaml:3: gpu.failOnInitError: expected true or false, got 1",
    ),
    (
        "gpu:\n  usageSeconds: true",
        "config.yaml:3: gpu.usageSeconds: expected a number from 0.01 to 86400, got true",
    ),
    (
        "gpu:\n  usageSeconds: 0",
        "config.yaml:3: gpu.usageSeconds: expected a number from 0.01 to 86400, got 0",
    ),
    (
        "gpu:\n  usageSeconds: -5",
        "config.yaml:3: gpu.usageSeconds: expected a number from 0.01 to 86400, got -5",
    ),
    (
        "gpu:\n  usageSeconds: .nan",
        'config.yaml:3: gpu.usageSeconds: expected a number from 0.01 to 86400, got ".nan"',
    ),
    (
        "gpu:\n  usageSeconds: 1e999",
        "config.yaml:3: gpu.usageSeconds: expected a number from 0.01 to 86400, got Infinity",
    ),
    (
        "gpu:\n  usageSeconds: 5s",
        'config.yaml:3: gpu.usageSeconds: expected a number from 0.01 to 86400, got "5s"',
    ),
    (
        "mps:\n  shmSizeMib: -1",
        "config.yaml:3: mps.shmSizeMib: expected an integer from 0 to 16777216, got -1",
    ),
    (
        "mps:\n  shmSizeMib: 16777217",
        "config.yaml:3: mps.shmSizeMib: expected an integer from 0 to 16777216, got 16777217",
    ),
    (
        "mps:\n  shmSizeMib: 99.5",
        "config.yaml:3: mps.shmSizeMib: expected an integer from 0 to 16777216, got 99.5",
    ),
    (
        "gpu:\n  disableHealthChecks: 31",
        "config.yaml:3: gpu.disableHealthChecks: expected text in quotes, got 31",
    ),
    (
        "gpu:\n  disableHealthChecks: [31]",
        "config.yaml:3: gpu.disableHealthChecks: expected text in quotes, got a list",
    ),
    (
        "gpu:\n  recovery:\n    mode: always",
        'config.yaml:4: gpu.recovery.mode: expected auto or never, got "always"',
    ),
    (
        "mps:\n  shmSizeMib: " + "9" * 90,
        "config.yaml:3: mps.shmSizeMib: expected an integer from 0 to 16777216, got "
        + "9" * 60
        + "…",
    ),
    (
        "plugin:\n  deviceIdStrategy: UUID",
        'config.yaml:3: plugin.deviceIdStrategy: expected uuid or index, got "UUID"',
    ),
]

SHARING = "sharing:\n  timeSlicing:\n"
RESOURCES = SHARING + "    resources:\n"
TIME_SLICING = [
    (
        "sharing:\n  timeSlicing:",
        (
            "config.yaml:3: sharing.timeSlicing.resources: missing; list what is shared, or leave "
            "timeSlicing out"
        ),
    ),
    (
        SHARING + "    renameByDefault: true",
        (
            "config.yaml:3: sharing.timeSlicing.resources: missing; list what is shared, or leave "
            "timeSlicing out"
        ),
    ),
    (
        SHARING + "    resources: []",
        (
            "config.yaml:4: sharing.timeSlicing.resources: expected at least one resource, got an "
            "empty list; leave timeSlicing out to share nothing"
        ),
    ),
    (
        SHARING + "    resources:",
        "config.yaml:4: sharing.timeSlicing.resources: expected a list, got null",
    ),
    (
        SHARING + "    resources: {name: gpu}",
        "config.yaml:4: sharing.timeSlicing.resources: expected a list, got a mapping",
    ),
    (
        RESOURCES + "    - gpu",
        'config.yaml:5: sharing.timeSlicing.resources[0]: expected name and replicas, got "gpu"',
    ),
    (
        RESOURCES + "    - {name: gpu}",
        (
            "config.yaml:5: sharing.timeSlicing.resources[0].replicas: missing, expected an "
            "integer ≥ 1"
        ),
    ),
    (
        RESOURCES + "    - {replicas: 4}",
        (
            "config.yaml:5: sharing.timeSlicing.resources[0].name: missing, expected a resource "
            "name such as nvidia.com/gpu"
        ),
    ),
    (
        RESOURCES + "    - name: gpu\n      replicas: four",
        (
            "config.yaml:6: sharing.timeSlicing.resources[0].replicas: expected an integer ≥ 1, "
            'got "four"'
        ),
    ),
    (
        RESOURCES + "    - {name: gpu, replicas: 0}",
        "config.yaml:5: sharing.timeSlicing.resources[0].replicas: expected an integer ≥ 1, got 0",
    ),
    (
        RESOURCES + "    - {name: gpu, replicas: 2.5}",
        (
            "config.yaml:5: sharing.timeSlicing.resources[0].replicas: expected an integer ≥ 1, "
            "got 2.5"
        ),
    ),
    (
        RESOURCES + "    - {name: gpu, replicas: true}",
        (
            "config.yaml:5: sharing.timeSlicing.resources[0].replicas: expected an integer ≥ 1, "
            "got true"
        ),
    ),
    (
        RESOURCES + "    - {name: example.com/gpu, replicas: 2}",
        (
            "config.yaml:5: sharing.timeSlicing.resources[0].name: expected a resource whose name "
            "begins with nvidia.com/, "
            'got "example.com/gpu"'
        ),
    ),
    (
        RESOURCES + "    - {name: nvidia.com/-gpu, replicas: 2}",
        (
            "config.yaml:5: sharing.timeSlicing.resources[0].name: "
            "expected up to 63 lower case letters, digits, '-' and '.' after the slash, "
            'got "nvidia.com/-gpu"'
        ),
    ),
    (
        RESOURCES + f"    - {{name: {'g' * 64}, replicas: 2}}",
        (
            "config.yaml:5: sharing.timeSlicing.resources[0].name: "
            "expected up to 63 lower case letters, digits, '-' and '.' after the slash, "
            f'got "nvidia.com/{"g" * 49}…"'
        ),
    ),
    (
        RESOURCES + "    - {name: NVIDIA.com/gpu, replicas: 2}",
        (
            "config.yaml:5: sharing.timeSlicing.resources[0].name: expected a DNS name before the "
            'slash, got "NVIDIA.com/gpu"'
        ),
    ),
    (
        RESOURCES + "    - {name: gpu, replicas: 2}\n    - {name: nvidia.com/gpu, replicas: 3}",
        (
            'config.yaml:6: sharing.timeSlicing.resources[1].name: "nvidia.com/gpu" stands twice, '
            "first on line 5; keep one of them"
        ),
    ),
    (
        RESOURCES + "    - {name: gpu, replicas: 2, size: all}",
        (
            "config.yaml:5: sharing.timeSlicing.resources[0].size: unknown key, expected name, "
            "replicas, rename, devices"
        ),
    ),
    (
        RESOURCES
        + (
            "    - {name: gpu, replicas: 2, devices: [0, '1:0']}\n"
            "    - {name: gpu, replicas: 3, devices: ['1:0']}"
        ),
        (
            'config.yaml:6: sharing.timeSlicing.resources[1].devices: "1:0" is shared twice, first '
            "on line 5; keep it in one of them"
        ),
    ),
    (
        RESOURCES + "    - {name: gpu, replicas: 2, devices: some}",
        (
            'config.yaml:5: sharing.timeSlicing.resources[0].devices: expected "all", a number of '
            'devices, or a list of indices and UUIDs, got "some"'
        ),
    ),
    (
        "plugin: {deviceListStrategy: envvar}",
        (
            "config.yaml:2: plugin.deviceListStrategy: expected a list of envvar, volume-mounts, "
            'cdi-annotations and cdi-cri, got "envvar"'
        ),
    ),
    (
        "plugin: {imexChannelIds: [1]}",
        "config.yaml:2: plugin.imexChannelIds: expected [] or [0], got [1]",
    ),
    (
        RESOURCES.replace("timeSlicing", "mps")
        + "    - {name: gpu, replicas: 2}\nplugin:\n  migStrategy: mixed",
        (
            "config.yaml:7: plugin.migStrategy: MPS cannot share MIG instances; expected none or "
            'single with sharing.mps, got "mixed"'
        ),
    ),
    (
        RESOURCES.replace("timeSlicing", "mps")
        + "    - {name: gpu, replicas: 2}\nmps:\n  root: ''",
        (
            "config.yaml:7: mps.root: sharing.mps needs a directory on the node; expected an "
            'absolute path such as /run/nvidia/mps, got ""'
        ),
    ),
    (
        "resources: {gpus: [{pattern: A100}]}",
        (
            "config.yaml:2: resources.gpus[0].name: missing, expected a resource name such as "
            "nvidia.com/gpu"
        ),
    ),
]

KEYS = [
    ("listn: x", "config.yaml:2: listn: unknown key, did you mean listen?"),
    ("Version: v1", "config.yaml:2: Version: unknown key, did you mean version?"),
    (
        "gpu:\n  driver_root: /x",
        "config.yaml:3: gpu.driver_root: unknown key, did you mean driverRoot?",
    ),
    (
        "gpu:\n  driver-root: /x",
        "config.yaml:3: gpu.driver-root: unknown key, did you mean driverRoot?",
    ),
    (
        "plugin:\n  deviceIDStrategy: uuid",
        "config.yaml:3: plugin.deviceIDStrategy: unknown key, did you mean deviceIdStrategy?",
    ),
    (
        "log:\n  colour: red",
        "config.yaml:3: log.colour: unknown key, expected format, level",
    ),
    (
        "log:\n  1: red",
        "config.yaml:3: log.1: unknown key, expected format, level",
    ),
    (
        'log:\n  "a b": 1',
        'config.yaml:3: log."a b": unknown key, expected format, level',
    ),
    (
        "log:\n  <<: {}",
        "config.yaml:3: log.<<: unknown key, expected format, level",
    ),
    (
        "log:\n  ? " + "format" * 100 + "\n  : 1",
        f'config.yaml:3: log."{"format" * 10}…": unknown key, expected format, level',
    ),
    (
        "sharing:\n  renameByDefault: true",
        (
            "config.yaml:3: sharing.renameByDefault: unknown key, did you mean "
            "sharing.timeSlicing.renameByDefault?"
        ),
    ),
    (
        "recovery:\n  mode: never",
        "config.yaml:2: recovery: unknown key, did you mean gpu.recovery?",
    ),
    (
        "log:\n  level: info\n  level: debug",
        "config.yaml:4: log.level: given twice, first on line 3; keep one of them",
    ),
]

PAIRS = [
    (
        "listen: ':9395'",
        (
            "config.yaml:2: listen: expected a port other than that of debugListen "
            '(127.0.0.1:9395), got ":9395"'
        ),
    ),
    (
        "debugListen: '[::]:9394'",
        (
            "config.yaml:2: debugListen: expected a port other than that of listen (:9394), got "
            '"[::]:9394"'
        ),
    ),
    (
        "listen: '0.0.0.0:1'\ndebugListen: '127.0.0.1:1'",
        (
            "config.yaml:3: debugListen: expected a port other than that of listen (0.0.0.0:1), "
            'got "127.0.0.1:1"'
        ),
    ),
]


@pytest.mark.parametrize(("text", "problem"), VALUES + TIME_SLICING + KEYS + PAIRS)
def test_a_wrong_file_is_refused_with_line_key_expectation_and_value(
    problems_of: Problems, text: str, problem: str
) -> None:
    """One mistake is one sentence, and it says all that is needed to mend it."""
    assert problems_of(f"version: v1\n{text}\n") == [problem]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("log: {level: info}", "config.yaml:1: version: missing, add the line version: v1"),
        ("version: v2", 'config.yaml:1: version: expected v1, got "v2"'),
        ("version: 1", "config.yaml:1: version: expected v1, got 1"),
        ("version:", "config.yaml:1: version: expected v1, got null"),
        ("- a\n- b", "config.yaml:1: expected keys such as version: v1, got a list"),
        ("hello", 'config.yaml:1: expected keys such as version: v1, got "hello"'),
        ("3", "config.yaml:1: expected keys such as version: v1, got 3"),
        (
            b"version: v1\nnodeName: \xff",
            "config.yaml:2: is not UTF-8 (byte 0xff); save it as UTF-8",
        ),
        (b"\xff\xfev\x00", "config.yaml:1: is not UTF-8 (byte 0xff); save it as UTF-8"),
        (
            b"\x00" * 1000,
            "config.yaml:1: contains the control character U+0000; expected plain text",
        ),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_in_one_line(
    problems_of: Problems, text: str | bytes, problem: str
) -> None:
    """Version, encoding and outermost form are reported before anything else."""
    assert problems_of(text) == [problem]


def test_all_mistakes_are_reported_together_in_the_order_of_the_file(problems_of: Problems) -> None:
    """A person mends everything at once, not one roll-out after the other;
    flags and variables come after the file.
    """
    text = """\
version: v1
log:
  level: loud
sharing:
  timeSlicing:

    renameByDefualt: true
    resources:
      - name: nvidia.com/gpu
        # one for each of us

        replicas: four
      - name: gpu
        replicas: 2
        replicas: 3
gpu:
  recovery: {quietSeconds: 0}
"""

    assert problems_of(
        text, flags={"--listen": "x"}, environment={"PASS_DEVICE_SPECS": "maybe"}
    ) == [
        'config.yaml:3: log.level: expected debug, info, warning or error, got "loud"',
        (
            "config.yaml:7: sharing.timeSlicing.renameByDefualt: unknown key, did you mean "
            "renameByDefault?"
        ),
        (
            "config.yaml:12: sharing.timeSlicing.resources[0].replicas: expected an integer ≥ 1, "
            'got "four"'
        ),
        (
            'config.yaml:13: sharing.timeSlicing.resources[1].name: "nvidia.com/gpu" stands twice, '
            "first on line 9; keep one of them"
        ),
        (
            "config.yaml:15: sharing.timeSlicing.resources[1].replicas: given twice, first on line "
            "14; keep one of them"
        ),
        "config.yaml:17: gpu.recovery.quietSeconds: expected a number from 0.01 to 86400, got 0",
        'environment variable PASS_DEVICE_SPECS: expected true or false, got "maybe"',
        '--listen: expected an address HOST:PORT or :PORT, port 0 to 65535, got "x"',
    ]


def test_of_very_many_mistakes_the_first_are_shown_and_the_others_counted(
    problems_of: Problems,
) -> None:
    """A megabyte of junk does not become a megabyte of log."""
    problems = problems_of(
        "version: v1\n" + "".join(f"junk{number}: 1\n" for number in range(1000))
    )

    assert len(problems) == 21
    assert problems[0].startswith("config.yaml:2: junk0: unknown key, expected version, nodeName")
    assert problems[-1] == "and 980 more like these"


def test_a_value_that_was_refused_is_not_blamed_for_a_pair_as_well(problems_of: Problems) -> None:
    """Without debugListen it is unknown whether both addresses are one."""
    assert problems_of("version: v1\nlisten: :9395\ndebugListen: here\n") == [
        (
            "config.yaml:3: debugListen: expected an address HOST:PORT or :PORT, port 0 to 65535, "
            'got "here"'
        )
    ]


def test_a_section_that_was_refused_is_not_blamed_for_a_pair_as_well(problems_of: Problems) -> None:
    """The content of a section that is no mapping is unknown."""
    assert problems_of(
        "version: v1\n"
        "nvidiaConfig: {version: v1, flags: {migStrategy: mixed}}\n"
        "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}\n"
        "plugin: [1]\n"
    ) == ["config.yaml:4: plugin: expected a mapping, got a list"]


@pytest.mark.parametrize("text", [b"", b"\n# nothing yet\n", b"---\n"])
def test_an_empty_file_is_refused(problems_of: Problems, text: bytes) -> None:
    """A write that was cut short must not switch sharing off under running pods."""
    assert problems_of(text) == [
        "config.yaml:1: version: missing, the file is empty; add the line version: v1"
    ]


@pytest.mark.parametrize("name", ["Volcano", "a.b", "-a", "a/b", "a" * 64])
def test_the_namespace_of_the_config_map_must_be_one(problems_of: Problems, name: str) -> None:
    """It becomes part of a path that is asked of the API server."""
    (problem,) = problems_of(environment={"DEVICE_CONFIG_NAMESPACE": name})
    assert (
        "environment variable DEVICE_CONFIG_NAMESPACE: expected the name of a namespace" in problem
    )
