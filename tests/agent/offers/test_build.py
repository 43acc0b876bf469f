"""Ways of passing devices to containers:
chosen by settings, discovery and the way grants are bound.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from tests.families.volcano_vgpu.golden import INVENTORY, U1, decided, main, pod, question
from tests.golden import SLICES
from tests.settings import settings as settings_of
from tests.settings import switches
from vgpu_agent.agent.offers.build import Found, _text, build, list_options
from vgpu_agent.cdi.controller import CdiFound
from vgpu_agent.cdi.imex import Channels
from vgpu_agent.config.device_answers import Cdi, Plugin
from vgpu_agent.config.settings import Settings
from vgpu_agent.families.spec import NodeFacts
from vgpu_agent.families.volcano_vgpu.family import VolcanoVgpuFamily
from vgpu_agent.isolation.edits import Edits
from vgpu_agent.model import Share


def _edits(settings: Settings, found: Found) -> Edits:
    """Return the edits with which a container of `volcano-vgpu` gets one card."""
    settings = msgspec.structs.replace(settings, families=switches(nvidia=False, volcano_vgpu=True))
    (family,) = build(settings, found).families.pod_families
    assert isinstance(family, VolcanoVgpuFamily)
    family.resources(INVENTORY)
    about = pod(main(number=1, memory=3000, cores=50), annotations=decided(f"{U1},NVIDIA,3000,50:"))
    return family.provision(question(about), (Share(U1, 3000, 50),)).edits


@pytest.mark.parametrize(
    ("inline", "late", "by_name"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_late_bound_grant_needs_no_nvidia_runtime_where_it_is_inlined(
    *, inline: bool, late: bool, by_name: bool
) -> None:
    """``cdi.inline``: the card is named by CDI alone, and the carrier writes its spec;
    bound early, all is as configured.
    """
    edits = _edits(settings_of(cdi=Cdi(inline=inline)), Found(facts=NodeFacts(late=late)))
    assert edits.cdi_names == (f"k8s.device-plugin.nvidia.com/gpu={U1}",) * by_name
    assert ("NVIDIA_VISIBLE_DEVICES" in edits.environment) is not by_name


def test_the_toolkits_names_are_used_where_it_keeps_the_spec() -> None:
    """``cdi.source: toolkit`` is another vendor, for every family."""
    settings = settings_of(
        cdi=Cdi(source="toolkit"), plugin=Plugin(device_list_strategy=("cdi-cri",))
    )
    assert _edits(settings, Found()).cdi_names == (f"nvidia.com/gpu={U1}",)
    by_index = Plugin(device_list_strategy=("envvar", "cdi-cri"), device_id_strategy="index")
    edits = _edits(msgspec.structs.replace(settings, plugin=by_index), Found())
    assert edits.environment["NVIDIA_VISIBLE_DEVICES"] == "1"
    assert edits.cdi_names == (f"nvidia.com/gpu={U1}",), (
        "nobody tells when the toolkit has counted anew"
    )


def test_what_was_found_on_the_node_is_told() -> None:
    """IMEX channels with the root of their device nodes,
    and those modes by name that have a spec.
    """
    settings = settings_of(
        plugin=Plugin(device_list_strategy=("cdi-cri",), gds_enabled=True, mofed_enabled=True)
    )
    found = Found(cdi=CdiFound(Channels((0,), "/run/nvidia/driver"), ("gds",)))
    options = list_options(settings, found)
    assert (options.imex_channels, options.imex_root) == ((0,), "/run/nvidia/driver")
    assert (options.enabled, options.cdi_modes) == (("gds", "mofed"), ("gds",))
    assert msgspec.structs.replace(options, cdi_modes=()) == list_options(
        settings, msgspec.structs.replace(found, cdi=CdiFound(found.cdi.channels))
    )


@pytest.mark.parametrize(
    "on", [(), ("nvidia",), ("aws", "volcano_vgpu"), ("nvidia", "aws", "volcano_vgpu")]
)
@pytest.mark.parametrize(
    ("resource", "id_", "device"),
    [
        ("nvidia.com/gpu", U1, U1),
        ("k8s.amazonaws.com/vgpu", f"{U1}-3", U1),
        ("volcano.sh/mig-1g.5gb", SLICES[0], SLICES[0]),
    ],
)
def test_what_ids_name_is_read_whichever_families_are_on(
    on: tuple[str, ...], resource: str, id_: str, device: str
) -> None:
    """Pods from before a change of ``families`` still hold what they hold,
    and kubelet's records say it in the words of then.
    """
    on_node = switches(**{"nvidia": False, **dict.fromkeys(on, True)})
    families = build(settings_of(families=on_node), Found()).families
    readers = [
        family for family in (*families.id_families, *families.idle) if family.owns(resource)
    ]
    assert [
        [share.device for share in family.shares(resource, [id_], INVENTORY)] for family in readers
    ] == [[device]]


def test_a_plugins_file_that_is_none_is_named_and_hangs_nothing(tmp_path: Path) -> None:
    """Whoever writes to the folder could put anything under its name: a pipe that nobody fills, a
    device without an end, or a gigabyte.
    """
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    with large.open("wb") as stream:
        stream.truncate(1 << 30)
    assert _text(pipe) == (None, "it is no regular file")
    assert _text(Path("/dev/zero")) == (None, "it is no regular file")
    assert _text(large) == (None, "it is larger than 1048576 bytes")
    assert _text(tmp_path) == (None, "Is a directory")
    assert _text(tmp_path / "none") == (None, "")
    (tmp_path / "file").write_bytes(b"a\xff")
    assert _text(tmp_path / "file") == ("a\ufffd", "")
