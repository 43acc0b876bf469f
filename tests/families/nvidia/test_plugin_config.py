"""A configuration file of NVIDIA's device plugin, read as it is (nvidia §1 and §2)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.settings import settings as settings_of
from vgpu_agent.config import load, options
from vgpu_agent.config.load import Contents, Loaded, Sources
from vgpu_agent.errors import ConfigError
from vgpu_agent.families.nvidia.settings import Resources, Sharing
from vgpu_agent.families.volcano_vgpu.settings import VolcanoVgpu

EVERYTHING = """\
version: v1
flags:
  migStrategy: single
  failOnInitError: false
  mpsRoot: /run/mps
  nvidiaDriverRoot: /run/nvidia/driver
  nvidiaDevRoot: /host
  gdrcopyEnabled: true
  gdsEnabled: true
  mofedEnabled: true
  deviceDiscoveryStrategy: nvml
  plugin:
    passDeviceSpecs: true
    deviceListStrategy: [envvar, cdi-cri]
    deviceIDStrategy: index
    cdiAnnotationPrefix: example.com/
    nvidiaCTKPath: /opt/nvidia-ctk
    containerDriverRoot: /host-driver
    sharedDevicesAllocationPolicy: packed
resources:
  gpus:
  - {pattern: "*", name: nvidia.com/gpu}
  mig: []
sharing:
  timeSlicing:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources:
    - name: gpu
      replicas: 4
imex:
  channelIDs: [0]
  required: true
"""
SHARED = "sharing:\n  timeSlicing:\n    resources:\n"

UUID = "GPU-aaaaaaaa-0000-4000-8000-000000000000"


def read(
    text: str,
    *,
    own: str = "",
    environment: dict[str, str] | None = None,
    flags: dict[str, str] | None = None,
) -> Loaded:
    """The settings with ``text`` as the file of NVIDIA's plugin, ``own`` as ours,
    beside variables and flags.
    """
    sources = Sources(flags or {}, environment or {}, "config.yaml" if own else None)
    return load.load_contents(
        sources, Contents(own.encode() if own else None, "v1.yaml", text.encode())
    )


def problems(text: str, **more: str) -> list[str]:
    """The sentences with which ``text`` is refused."""
    with pytest.raises(ConfigError) as refused:
        read(text, **more)  # type: ignore[arg-type]  # only ``own`` is given here
    return refused.value.problems


def test_every_key_of_the_schema_becomes_a_setting_with_its_line() -> None:
    """nvidia §2, the whole of it but what belongs to gpu-feature-discovery."""
    loaded = read(EVERYTHING)

    plugin, sharing = loaded.settings.plugin, loaded.settings.section(Sharing).time_slicing
    assert loaded.warnings == ()
    assert (plugin.mig_strategy, plugin.pass_device_specs, plugin.device_list_strategy) == (
        "single",
        True,
        ("envvar", "cdi-cri"),
    )
    assert (plugin.device_id_strategy, plugin.cdi_annotation_prefix) == ("index", "example.com/")
    assert plugin.shared_devices_allocation_policy == "packed"
    assert (plugin.gdrcopy_enabled, plugin.gds_enabled, plugin.mofed_enabled) == (True, True, True)
    assert (plugin.imex_channel_ids, plugin.imex_required) == ((0,), True)
    assert loaded.settings.gpu.discovery == "nvml"
    assert (loaded.settings.gpu.fail_on_init_error, loaded.settings.mps.root) == (False, "/run/mps")
    assert (loaded.settings.gpu.driver_root, loaded.settings.gpu.dev_root) == (
        "/run/nvidia/driver",
        "/host",
    )
    assert (loaded.settings.cdi.hook_path, loaded.settings.cdi.container_driver_root) == (
        "/opt/nvidia-ctk",
        "/host-driver",
    )
    assert [(one.pattern, one.name) for one in loaded.settings.section(Resources).gpus] == [
        ("*", "nvidia.com/gpu")
    ]
    assert (sharing.rename_by_default, sharing.fail_requests_greater_than_one) == (True, True)
    assert [(one.name, one.replicas, one.devices) for one in sharing.resources] == [
        ("nvidia.com/gpu", 4, "all")
    ]
    assert loaded.origins["plugin.migStrategy"] == "v1.yaml:3"
    assert loaded.origins["sharing.timeSlicing.resources[0].replicas"] == "v1.yaml:30"
    assert loaded.origins["plugin.imexRequired"] == "v1.yaml:33"


@pytest.mark.parametrize(
    "text",
    [
        "version: v1\n",
        "version:\n",
        'version: ""\n',
        "{}",
        '{"version": "v1"}',
        "flags:\n  plugin:\nimex:\n",
    ],
)
def test_a_file_that_says_nothing_means_the_defaults(text: str) -> None:
    """nvidia §2: no version is v1; YAML or JSON."""
    assert read(text).settings == settings_of()


@pytest.mark.parametrize(
    ("said", "enabled"),
    [
        ("", (False, True)),
        ("gdsEnabled: false", (False, False)),
        ("gdsEnabled: true", (True, True)),
    ],
)
def test_what_two_families_read_is_set_for_both(said: str, enabled: tuple[bool, bool]) -> None:
    """volcano-vgpu §5.3: that plugin takes the same file, with another default."""
    settings = read(f"flags: {{{said}}}\n").settings

    assert (settings.plugin.gds_enabled, settings.section(VolcanoVgpu).gds_enabled) == enabled


def test_an_empty_file_means_the_defaults_and_says_so() -> None:
    """Upstream reads it so, and a named configuration may be empty on purpose."""
    loaded = read("\n")

    assert (loaded.settings, loaded.warnings) == (
        settings_of(),
        ("v1.yaml:1: is empty, so it changes nothing",),
    )


@pytest.mark.parametrize(
    ("own", "environment", "flags", "strategy", "origin"),
    [
        ("", {}, {}, "single", "v1.yaml:3"),
        ("version: v1\nplugin: {migStrategy: none}\n", {}, {}, "none", "config.yaml:2"),
        (
            "version: v1\nplugin: {migStrategy: none}\n",
            {"MIG_STRATEGY": "mixed"},
            {},
            "mixed",
            "environment MIG_STRATEGY",
        ),
        ("", {"MIG_STRATEGY": "mixed"}, {"--mig-strategy": "none"}, "none", "flag --mig-strategy"),
    ],
)
def test_flag_beats_environment_beats_our_file_beats_theirs(
    own: str, environment: dict[str, str], flags: dict[str, str], strategy: str, origin: str
) -> None:
    """nvidia §1 with our file in its place."""
    loaded = read(EVERYTHING, own=own, environment=environment, flags=flags)

    assert (loaded.settings.plugin.mig_strategy, loaded.origins["plugin.migStrategy"]) == (
        strategy,
        origin,
    )
    assert loaded.settings.plugin.device_id_strategy == "index"


def test_our_list_replaces_theirs() -> None:
    """Nothing of the other list shines through, neither as a value nor as an origin."""
    theirs = (
        SHARED
        + "    - {name: gpu, replicas: 2, rename: small}\n    - {name: mig-1g.5gb, replicas: 3}\n"
    )

    loaded = read(theirs, own="version: v1\n" + SHARED + "    - {name: gpu, replicas: 8}\n")

    assert [
        (one.name, one.replicas, one.rename)
        for one in loaded.settings.section(Sharing).time_slicing.resources
    ] == [("nvidia.com/gpu", 8, "")]
    assert loaded.origins["sharing.timeSlicing.resources[0].rename"] == "default"


def test_our_file_may_add_to_a_list_of_theirs_what_is_beside_it() -> None:
    """Only then ``resources`` may be missing in our file."""
    loaded = read(
        SHARED + "    - {name: gpu, replicas: 2}\n",
        own="version: v1\nsharing: {timeSlicing: {renameByDefault: true}}\n",
    )

    assert loaded.settings.section(Sharing).time_slicing.rename_by_default
    assert loaded.settings.section(Sharing).time_slicing.resources[0].replicas == 2


def test_the_section_of_our_file_is_the_same() -> None:
    """With the lines of our file and the section before each key."""
    text = "version: v1\nnvidiaConfig:\n" + "".join(
        f"  {line}\n" for line in EVERYTHING.splitlines()
    )

    loaded = load.load_contents(Sources({}, {}, "config.yaml"), Contents(text.encode()))

    assert loaded.settings == read(EVERYTHING).settings
    assert loaded.origins["plugin.migStrategy"] == "config.yaml:5"
    with pytest.raises(ConfigError) as refused:
        load.load_contents(Sources({}, {}, "c"), Contents(text.replace("single", "some").encode()))
    assert refused.value.problems == [
        'c:5: nvidiaConfig.flags.migStrategy: expected none, single or mixed, got "some"'
    ]


def test_a_section_and_a_file_at_once_are_refused() -> None:
    """It would be unclear which of them counts."""
    assert problems("version: v1\n", own="version: v1\nnvidiaConfig: {}\n") == [
        (
            "v1.yaml:1: is not read, because config.yaml:2 has a configuration of that plugin as "
            "nvidiaConfig; keep one of them"
        )
    ]


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        (
            (
                "sharing:\n  renameByDefault: true\n  timeSlicing:\n"
                "    resources: [{name: gpu, replicas: 2}]\n"
            ),
            (
                "v1.yaml:2: sharing.renameByDefault: has no effect here; did you mean "
                "sharing.timeSlicing.renameByDefault?"
            ),
        ),
        (
            (
                "sharing:\n  renameByDefault: true\n  mps:\n    resources: [{name: gpu, replicas: "
                "2}]\n"
            ),
            (
                "v1.yaml:2: sharing.renameByDefault: has no effect here; did you mean "
                "sharing.mps.renameByDefault?"
            ),
        ),
        (
            "migStrategy: mixed\n",
            "v1.yaml:1: migStrategy: has no effect here; did you mean flags.migStrategy?",
        ),
        (
            "timeSlicing: {}\n",
            "v1.yaml:1: timeSlicing: has no effect here; did you mean sharing.timeSlicing?",
        ),
        (
            "flags: {deviceListStrategy: envvar}\n",
            (
                "v1.yaml:1: flags.deviceListStrategy: has no effect here; did you mean "
                "flags.plugin.deviceListStrategy?"
            ),
        ),
        (
            "replicas: 4\n",
            (
                "v1.yaml:1: replicas: has no effect here; did you mean "
                "sharing.timeSlicing.resources[].replicas?"
            ),
        ),
        (
            "flags: {migStrategi: mixed}\n",
            (
                "v1.yaml:1: flags.migStrategi: unknown key, it has no effect; did you mean "
                "migStrategy?"
            ),
        ),
        (
            "sharing: {renameByDefualt: true}\n",
            (
                "v1.yaml:1: sharing.renameByDefualt: unknown key, it has no effect; did you mean "
                "sharing.timeSlicing.renameByDefault?"
            ),
        ),
        ("colour: red\n", "v1.yaml:1: colour: unknown key, it has no effect"),
        (
            SHARED + "    - {name: gpu, replicas: 2, count: 3}\n",
            "v1.yaml:4: sharing.timeSlicing.resources[0].count: unknown key, it has no effect",
        ),
        (
            "flags: {gfd: {oneshot: true}}\n",
            (
                "v1.yaml:1: flags.gfd: belongs to gpu-feature-discovery and has no effect here; "
                "keep gpu-feature-discovery running for its labels, or set nodeStatus.featureLabels"
            ),
        ),
        (
            "resources: {gpus: [{pattern: A100*, name: big}]}\n",
            (
                "v1.yaml:1: resources.gpus[0]: NVIDIA's plugin ignores this and the agent "
                "applies it; remove it to keep the resources as they were"
            ),
        ),
        (
            SHARED + "    - {name: gpu, replicas: 2, rename: small}\n",
            (
                "v1.yaml:4: sharing.timeSlicing.resources[0].rename: NVIDIA's plugin ignores "
                "this and the agent applies it; remove it to keep the resources as they were"
            ),
        ),
        (
            SHARED + "    - {name: gpu, replicas: 2, devices: [0]}\n",
            (
                "v1.yaml:4: sharing.timeSlicing.resources[0].devices: NVIDIA's plugin ignores "
                "this and the agent applies it; remove it to keep the resources as they were"
            ),
        ),
        (
            SHARED
            + "    - {name: gpu, replicas: 2}\n  mps: {resources: [{name: gpu, replicas: 3}]}\n",
            (
                "sharing.timeSlicing: has no effect beside sharing.mps, which wins as in NVIDIA's "
                "plugin; leave one of them out"
            ),
        ),
    ],
)
def test_what_has_no_effect_is_named_with_where_it_would_have_one(text: str, warning: str) -> None:
    """nvidia:D10: upstream is silent (its issue 1433: renameByDefault one level too high)."""
    assert read(text).warnings == (warning,)


def test_of_very_many_warnings_the_first_are_shown() -> None:
    """A megabyte of junk does not become a megabyte of log."""
    warnings = read("".join(f"junk{number}: 1\n" for number in range(1000))).warnings

    assert (len(warnings), warnings[-1]) == (21, "v1.yaml:21: and 980 more like these")


@pytest.mark.parametrize("word", ["true", "yes", "On", "Y", "TRUE"])
def test_a_switch_may_be_written_as_go_reads_yaml(word: str) -> None:
    """Upstream's YAML is 1.1, ours is not."""
    assert read(
        f"flags: {{plugin: {{passDeviceSpecs: {word}}}}}\n"
    ).settings.plugin.pass_device_specs


def test_keys_are_known_in_any_case() -> None:
    """Upstream decodes through JSON in Go, which does not look at the case."""
    assert read("Flags: {MIGSTRATEGY: single}\n").settings.plugin.mig_strategy == "single"
    assert problems("flags: {migStrategy: single, migstrategy: none}\n") == [
        "v1.yaml:1: flags.migstrategy: given twice, first on line 1; keep one of them"
    ]


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ("", True),
        ("failRequestsGreaterThanOne:", True),
        ("failRequestsGreaterThanOne: false", False),
    ],
)
def test_with_mps_more_than_one_replica_is_refused_unless_said_otherwise(
    said: str, refused: bool
) -> None:
    """nvidia §2: a nullable switch. An explicit false is honoured."""
    text = f"sharing:\n  mps:\n    resources: [{{name: gpu, replicas: 2}}]\n    {said}\n"

    assert read(text).settings.section(Sharing).mps.fail_requests_greater_than_one is refused


@pytest.mark.parametrize(
    ("devices", "taken"),
    [
        ("all", "all"),
        ("2", 2),
        ('[0, "1:0"]', ("0", "1:0")),
        (f"[{UUID}, MIG-{UUID}/1/0]", (UUID, f"MIG-{UUID}/1/0")),
    ],
)
def test_devices_are_taken_as_upstream_parses_them(devices: str, taken: object) -> None:
    """nvidia §2; and, other than upstream, they are not dropped."""
    (shared,) = (
        read(f"{SHARED}    - {{name: gpu, replicas: 2, devices: {devices}}}\n")
        .settings.section(Sharing)
        .time_slicing.resources
    )

    assert shared.devices == taken


@pytest.mark.parametrize(
    ("own", "environment", "flags", "file"),
    [
        ("version: v1\nnvidiaConfigFile: /a\n", {}, {}, "/a"),
        ("version: v1\nnvidiaConfigFile: /a\n", {"CONFIG_FILE": "/b"}, {}, "/b"),
        (
            "version: v1\nnvidiaConfigFile: /a\n",
            {"CONFIG_FILE": "/b"},
            {"--config-file": "/c"},
            "/c",
        ),
        ("version: v1\nnvidiaConfigFile: /a\n", {"CONFIG_FILE": "/b"}, {"--config-file": ""}, ""),
        (
            "version: v1\nnvidiaConfigFile: /a\nnamedConfig: {directory: /d}\n",
            {"CONFIG_FILE": "/b"},
            {},
            "",
        ),
        ("version: v1\nnvidiaConfigFile: /a\n", {"CONFIG_FILE_SRCDIR": "/d"}, {}, ""),
        (
            "version: v1\nnamedConfig: {directory: /d}\n",
            {},
            {"--config-file": "/d/a100"},
            "/d/a100",
        ),
        ("version: v1\nnvidiaConfigFile: relative\n", {}, {}, ""),
        ("not: [valid", {}, {}, ""),
    ],
)
def test_the_file_is_named_by_flag_variable_or_our_file(
    own: str, environment: dict[str, str], flags: dict[str, str], file: str
) -> None:
    """With named configurations on, the node's label chooses, and only a flag names a file."""
    assert load.nvidia_file(Sources(flags, environment, "config.yaml"), own.encode()) == file


def test_a_file_that_named_configurations_replace_is_warned_of() -> None:
    """NVIDIA's DaemonSet sets CONFIG_FILE to what its config-manager would have written."""
    sources = Sources(
        {}, {"CONFIG_FILE": "/config/config.yaml", "CONFIG_FILE_SRCDIR": "/available-configs"}, None
    )

    assert load.load_contents(sources, Contents()).warnings == (
        (
            "nvidiaConfigFile: /config/config.yaml is not read, a configuration from "
            "namedConfig.directory takes its place"
        ),
    )


def test_a_file_that_is_missing_is_named_with_its_flag(tmp_path: Path) -> None:
    """Upstream ends with an error, too."""
    with pytest.raises(ConfigError) as refused:
        load.load({options.NVIDIA_CONFIG_FLAG: str(tmp_path / "v1.yaml")}, {})

    assert refused.value.problems == [
        (
            f"{tmp_path}/v1.yaml: cannot be read: No such file or directory; give --config-file an "
            "existing, readable file"
        )
    ]


def test_with_simulated_gpus_roots_spelt_out_as_the_default_follow_the_simulation() -> None:
    """Most files of NVIDIA's plugin say nvidiaDriverRoot: / and mean nothing by it."""
    loaded = read("flags: {nvidiaDriverRoot: /, nvidiaDevRoot: /}\n", flags={"--simulate": "/sim"})

    assert (loaded.settings.gpu.driver_root, str(loaded.settings.gpu.device_node_root)) == (
        "/sim",
        "/sim",
    )
    assert (
        read(
            "flags: {nvidiaDriverRoot: /drv}\n", flags={"--simulate": "/sim"}
        ).settings.gpu.driver_root
        == "/drv"
    )
