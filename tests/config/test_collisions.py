"""Families and MPS daemons that take something from each other:
found before the agent runs, with the setting and the remedy.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.config.conftest import Load
from tests.golden import golden_inventory, golden_slices, with_slices
from vgpu_agent.config.families import OfferedName
from vgpu_agent.config.load import Contents, Sources, load_contents
from vgpu_agent.config.problems import Problems
from vgpu_agent.errors import ConfigError
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.nvidia.family import NvidiaFamily
from vgpu_agent.families.nvidia.options import NvidiaOptions
from vgpu_agent.families.nvidia.settings import offered_names

CHOOSE = "choose another name, or turn one of the families off"
COUNTED = "and volcano-gpushare counts GPUs under it in the Node's capacity"
BROKEN = (
    "the family nvidia would offer a GPU that is divided for a Volcano pod as a whole one, on "
    "which work fails"
)
NOTHING = "the family nvidia would offer nothing while the GPUs are divided differently"
MOUNTED = (
    "which aws.mps: supervised mounts into containers, so that they could change the files of "
    "other MPS control daemons"
)
BY_ONE = "can have only one; offer it by one of the two (families, aws.mps, sharing.mps)"
MPS_SHARED = "sharing: {mps: {resources: [{name: gpu, replicas: 4}]}}\n"
RENAMED = "sharing: {timeSlicing: {renameByDefault: true, resources: [{name: gpu, replicas: 4}]}}\n"
VGPU = "families: {volcanoVgpu: true}\n"
FOR_AWS = "families: {aws: true}\n"


def aws(name: str, more: str = "") -> str:
    """Both id families, AWS's resource by that name."""
    return f"{FOR_AWS}{more}aws:\n  resourceName: {name}\n"


def equal(name: str, one: str, other: str) -> str:
    """The sentence about two equal names."""
    loss = f"the kubelet would confuse the two, so {other} offers nothing"
    return f'"{name}" is offered by {one} and by {other}; {loss}; {CHOOSE}'


@pytest.mark.parametrize(
    ("text", "place", "sentence"),
    [
        (aws("nvidia.com/gpu"), "4: aws.resourceName", equal("nvidia.com/gpu", "nvidia", "aws")),
        (
            aws("nvidia.com/gpu.shared", RENAMED),
            "5: aws.resourceName",
            equal("nvidia.com/gpu.shared", "nvidia", "aws"),
        ),
        (
            aws("nvidia.com/small", "resources: {gpus: [{pattern: NVIDIA T4, name: small}]}\n"),
            "5: aws.resourceName",
            equal("nvidia.com/small", "nvidia", "aws"),
        ),
        (
            aws("nvidia.com/mig-1g.5gb", "plugin: {migStrategy: mixed}\n"),
            "5: aws.resourceName",
            equal("nvidia.com/mig-1g.5gb", "nvidia", "aws"),
        ),
        (
            aws("nvidia.com/sharedgpu", "iktos: {resourceConfig: 'gpu:sharedgpu:4'}\n"),
            "5: aws.resourceName",
            equal("nvidia.com/sharedgpu", "nvidia", "aws"),
        ),
        (
            (
                "families: {nvidia: false, aws: true, volcanoVgpu: true}\n"
                "aws:\n  resourceName: volcano.sh/vgpu-cores\n"
            ),
            "4: aws.resourceName",
            equal("volcano.sh/vgpu-cores", "aws", "volcano-vgpu"),
        ),
        (
            (
                "families: {nvidia: false, volcanoVgpu: true}\nvolcanoVgpu:\n"
                "  memoryResource: volcano.sh/vgpu-number\n"
            ),
            "4: volcanoVgpu.memoryResource",
            equal("volcano.sh/vgpu-number", "volcano-vgpu", "volcano-vgpu"),
        ),
        (
            (
                "families: {nvidia: false, volcanoVgpu: true, volcanoGpushare: true}\n"
                "volcanoVgpu:\n  numberResource: volcano.sh/gpu-memory\n"
            ),
            "4: volcanoVgpu.numberResource",
            equal("volcano.sh/gpu-memory", "volcano-vgpu", "volcano-gpushare"),
        ),
        (
            (
                "families: {nvidia: false, volcanoVgpu: true, volcanoGpushare: true}\n"
                "volcanoVgpu:\n  numberResource: volcano.sh/gpu-number\n"
            ),
            "4: volcanoVgpu.numberResource",
            f'"volcano.sh/gpu-number" is offered by volcano-vgpu, {COUNTED}; {CHOOSE}',
        ),
        (
            f"{VGPU}volcanoVgpu:\n  migStrategy: single\n  migResourcePrefix: nvidia.com\n",
            "5: volcanoVgpu.migResourcePrefix",
            equal("nvidia.com/gpu", "nvidia", "volcano-vgpu-mig"),
        ),
        (
            f"{VGPU}plugin: {{migStrategy: mixed}}\nvolcanoVgpu:\n  migStrategy: mixed\n",
            "5: volcanoVgpu.migStrategy",
            (
                "mixed: the family nvidia offers the same instances (plugin.migStrategy); turn one "
                "of the two off"
            ),
        ),
        (
            f"{VGPU}volcanoVgpu:\n  operatingMode: mig\n",
            "4: volcanoVgpu.operatingMode",
            f'mig goes with plugin.migStrategy: mixed, and that is "none"; {BROKEN}',
        ),
        (
            f"{VGPU}volcanoVgpu: {{operatingMode: mig}}\nplugin:\n  migStrategy: none\n",
            "5: plugin.migStrategy",
            f'expected mixed with volcanoVgpu.operatingMode: mig, got "none"; {BROKEN}',
        ),
        (
            f"{VGPU}volcanoVgpu: {{operatingMode: mig}}\nplugin:\n  migStrategy: single\n",
            "5: plugin.migStrategy",
            f'expected mixed with volcanoVgpu.operatingMode: mig, got "single"; {NOTHING}',
        ),
        (
            f"{FOR_AWS}{MPS_SHARED}aws:\n  mps: supervised\n",
            "5: aws.mps",
            (
                "supervised would start MPS control daemons beside those that sharing.mps starts, "
                f"and a GPU {BY_ONE}"
            ),
        ),
        (
            f"{FOR_AWS}{MPS_SHARED}aws:\n  mps: host\n",
            "5: aws.mps",
            (
                "host needs somebody else's MPS control daemons beside those that sharing.mps "
                f"starts, and a GPU {BY_ONE}"
            ),
        ),
        (
            f"{FOR_AWS}aws: {{mps: supervised}}\nmps:\n  root: /tmp/nvidia-mps/ours\n",
            "5: mps.root",
            (
                f'"/tmp/nvidia-mps/ours" lies in /tmp/nvidia-mps, {MOUNTED}; choose another '
                "directory such as /run/nvidia/mps"
            ),
        ),
    ],
)
def test_a_collision_names_the_setting_to_change_what_is_lost_and_the_remedy(
    load_text: Load, text: str, place: str, sentence: str
) -> None:
    """Before, each of them was ok for ``config check``,
    and one of the two resources was missing on the nodes.
    """
    loaded = load_text(f"version: v1\n{text}")
    assert (loaded.collisions, loaded.warnings) == ((f"config.yaml:{place}: {sentence}",), ())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "families: {aws: true, volcanoVgpu: true, volcanoGpushare: true}\n",
        aws("nvidia.com/gpu", RENAMED),
        aws("nvidia.com/gpu", "resources: {gpus: [{pattern: '*', name: a100}]}\n"),
        aws("nvidia.com/gpu", "iktos: {resourceConfig: 'gpu:sharedgpu:4'}\n"),
        aws("nvidia.com/mig-1g.5gb"),
        (
            "families: {nvidia: false, aws: true}\naws: {resourceName: nvidia.com/gpu, mps: "
            "supervised}\n"
        )
        + MPS_SHARED,
        (
            "families: {nvidia: false, volcanoVgpu: true}\nvolcanoVgpu: {migStrategy: mixed, "
            "migResourcePrefix: nvidia.com}\n"
        ),
        f"{VGPU}volcanoVgpu: {{operatingMode: mig}}\nplugin: {{migStrategy: mixed}}\n",
        f"{VGPU}volcanoVgpu: {{memoryPercentageResource: volcano.sh/vgpu-number}}\n",
        f"{FOR_AWS}{MPS_SHARED}aws: {{mps: none}}\n",
        (
            f"{FOR_AWS}{MPS_SHARED}aws: {{mps: supervised}}\n"
            "iktos: {resourceConfig: 'gpu:sharedgpu:4'}\n"
        ),
        "mps: {root: /tmp/nvidia-mps}\n" + MPS_SHARED,
    ],
)
def test_what_goes_together_is_no_collision(load_text: Load, text: str) -> None:
    """Names that nothing is offered by, families that are off,
    sharing that another setting replaces.
    """
    assert load_text(f"version: v1\n{text}").collisions == ()


def crowded(setting: str, family: str, other: str, default: str) -> str:
    """The sentence about a policy that begins many GPUs."""
    price = f"a GPU with one of them is no use to {other}"
    return (
        f"{setting} spreads pods of {family} over all GPUs, and {price}; set {default} to keep "
        f"{family} on few GPUs"
    )


@pytest.mark.parametrize(
    ("text", "warnings"),
    [
        (
            f"{FOR_AWS}plugin: {{sharedDevicesAllocationPolicy: distributed}}\n",
            (
                crowded(
                    "plugin.sharedDevicesAllocationPolicy: distributed", "nvidia", "aws", "auto"
                ),
            ),
        ),
        (
            f"{VGPU}binding: {{policy: spread}}\n",
            (crowded("binding.policy: spread", "volcano-vgpu", "nvidia", "binpack"),),
        ),
        (f"{FOR_AWS}plugin: {{sharedDevicesAllocationPolicy: packed}}\n", ()),
        ("plugin: {sharedDevicesAllocationPolicy: distributed}\n", ()),
        (
            (
                "families: {nvidia: false, aws: true, volcanoGpushare: true}\n"
                "plugin: {sharedDevicesAllocationPolicy: distributed}\n"
            ),
            (),
        ),
        (f"{VGPU}binding: {{policy: binpack}}\n", ()),
        ("families: {nvidia: false, volcanoVgpu: true}\nbinding: {policy: spread}\n", ()),
    ],
)
def test_a_policy_that_costs_other_families_is_warned_of(
    load_text: Load, text: str, warnings: tuple[str, ...]
) -> None:
    """It is the operator's to choose, and counts.
    The caution names its price where it was copied from a node with one family.
    """
    loaded = load_text(f"version: v1\n{text}")
    assert (loaded.warnings, loaded.collisions) == (warnings, ())


@given(
    patterns=st.lists(
        st.tuples(st.sampled_from(("*", "NVIDIA A100*", "T4")), st.sampled_from(("a", "b", "gpu"))),
        max_size=2,
    ),
    slices=st.lists(
        st.tuples(st.sampled_from(("*", "1g.5gb")), st.sampled_from(("c", "gpu"))), max_size=1
    ),
    strategy=st.sampled_from(("none", "single", "mixed")),
    shared=st.dictionaries(
        st.sampled_from(("gpu", "a", "c", "mig-1g.5gb")),
        st.tuples(st.sampled_from(("", "r")), st.booleans()),
        max_size=2,
    ),
    suffix=st.booleans(),
    divided=st.booleans(),
)
def test_every_name_that_nvidia_offers_is_known_beforehand(
    patterns: list[tuple[str, str]],
    slices: list[tuple[str, str]],
    strategy: str,
    shared: dict[str, tuple[str, bool]],
    suffix: bool,
    divided: bool,
) -> None:
    """The rules about names are those of the family itself, whatever is renamed, shared or cut."""
    lines = ["version: v1", f"plugin: {{migStrategy: {strategy}}}"]
    gpus = ", ".join(f"{{pattern: '{pattern}', name: {name}}}" for pattern, name in patterns)
    mig = ", ".join(f"{{pattern: '{pattern}', name: {name}}}" for pattern, name in slices)
    lines.append(f"resources: {{gpus: [{gpus}], mig: [{mig}]}}")
    if shared:
        entries = ", ".join(
            f"{{name: {name}, replicas: 2, rename: '{rename}', devices: "
            f"{'all' if everything else '[0]'}}}"
            for name, (rename, everything) in shared.items()
        )
        lines.append(
            f"sharing: {{timeSlicing: {{renameByDefault: {str(suffix).lower()}, resources: "
            f"[{entries}]}}}}"
        )
    settings = load_contents(
        Sources({}, {}, "c.yaml"), Contents("\n".join(lines).encode())
    ).settings
    inventory = (
        with_slices(golden_inventory(), U0=golden_slices()) if divided else golden_inventory()
    )
    offered = {
        each.name
        for each in NvidiaFamily(
            NvidiaOptions.from_settings(settings, lists=ListOptions())
        ).resources(inventory)
    }
    known = list(offered_names(settings))
    assert [
        name
        for name in offered
        if not any(each.overlaps(OfferedName(name, "aws", "")) for each in known)
    ] == []


def test_problems_can_be_read_without_an_error() -> None:
    """They are the same sentences either way."""
    problems = Problems()
    assert list(problems.sentences) == []
    for number in range(25):
        problems.add("c.yaml:1", "", f"{number}", line=1)
    with pytest.raises(ConfigError) as raised:
        problems.raise_if_any()
    assert raised.value.problems == list(problems.sentences)
    assert problems.sentences[-1] == "and 5 more like these"
