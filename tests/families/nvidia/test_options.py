"""The settings as the `nvidia` family reads them:
NVIDIA's sharing blocks and iktos's text come to one list of entries.
"""

from __future__ import annotations

from typing import Literal

import pytest

from tests.settings import settings as settings_of
from vgpu_agent.device_ids import IdBlock, NumberedIds
from vgpu_agent.errors import OfferError
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.nvidia.ids import IKTOS_SEPARATOR, NVIDIA_SEPARATOR
from vgpu_agent.families.nvidia.options import AUTOMATIC, NvidiaOptions, Pattern, SharedEntry
from vgpu_agent.families.nvidia.settings import (
    Iktos,
    MpsSharing,
    ResourcePattern,
    Resources,
    SharedResource,
    Sharing,
    TimeSlicing,
)
from vgpu_agent.kubelet.codec import check_budget
from vgpu_agent.model import Resource, SharingMode

GPU, MIG = "nvidia.com/gpu", "nvidia.com/mig-1g.5gb"
LISTS = ListOptions(id_strategy="index")


def options_of(**sections: object) -> NvidiaOptions:
    """Return the options that settings with these sections yield."""
    return NvidiaOptions.from_settings(settings_of(**sections), lists=LISTS)


def test_nothing_set_is_whole_gpus() -> None:
    """No MIG, no patterns, no sharing. The list strategies are a parameter."""
    assert options_of().shared == ()
    assert options_of().mig_strategy == "none"
    assert options_of().lists is LISTS


def test_a_number_of_replicas_without_end_is_one_that_can_be_counted() -> None:
    """The resource is withheld with the number that would fit, and nothing else stops."""
    sharing = Sharing(time_slicing=TimeSlicing(resources=(SharedResource(GPU, 5 * 10**18),)))
    (entry,) = options_of(sharing=sharing).shared
    resource = Resource(
        GPU,
        "nvidia",
        NumberedIds(tuple(IdBlock(f"{uuid}::", entry.replicas, uuid) for uuid in ("a", "b"))),
    )
    with pytest.raises(OfferError, match=r"replicas: at most [0-9]+ for each of the 2 devices"):
        check_budget(resource)


def test_time_slicing_comes_as_it_is_written() -> None:
    """nvidia:D15: rename, renameByDefault and devices, entry by entry.
    A rename beats the default.
    """
    resources = (
        SharedResource(GPU, 4),
        SharedResource(MIG, 2, rename="nvidia.com/small", devices=("1:0",)),
    )
    options = options_of(
        sharing=Sharing(
            TimeSlicing(
                rename_by_default=True, fail_requests_greater_than_one=True, resources=resources
            )
        )
    )
    assert options.shared == (
        SharedEntry(GPU, 4, "nvidia.com/gpu.shared"),
        SharedEntry(MIG, 2, "nvidia.com/small", ("1:0",)),
    )
    assert (options.sharing, options.separator) == (SharingMode.TIME_SLICING, NVIDIA_SEPARATOR)
    assert options.fail_requests_greater_than_one


def test_mps_beats_time_slicing() -> None:
    """nvidia:G12: with both, those of MPS count,
    and a request of two is refused unless it says otherwise.
    """
    sharing = Sharing(
        TimeSlicing(resources=(SharedResource(GPU, 2),)),
        MpsSharing(resources=(SharedResource(GPU, 4),)),
    )
    options = options_of(sharing=sharing)
    assert (options.sharing, options.shared) == (SharingMode.MPS, (SharedEntry(GPU, 4, GPU),))
    assert options.fail_requests_greater_than_one
    assert options.mps.single


@pytest.mark.parametrize(("unit", "unit_mib"), [("gib", 1024), ("mib1000", 1000)])
def test_the_words_of_iktos(unit: Literal["gib", "mib1000"], unit_mib: int) -> None:
    """iktos:D8: names get NVIDIA's domain, -1 counts the memory in the unit that is set.
    Nothing of ``sharing`` counts beside it.
    """
    text = "gpu:gpu-mem-gb:-1, mig-1g.5gb:slice:2"
    options = options_of(
        iktos=Iktos(text, unit),
        sharing=Sharing(mps=MpsSharing(resources=(SharedResource(GPU, 4),))),
    )
    assert options.shared == (
        SharedEntry(GPU, AUTOMATIC, "nvidia.com/gpu-mem-gb"),
        SharedEntry(MIG, 2, "nvidia.com/slice"),
    )
    assert (options.separator, options.unit_mib, options.sharing) == (
        IKTOS_SEPARATOR,
        unit_mib,
        SharingMode.TIME_SLICING,
    )
    assert options.automatic == {"nvidia.com/gpu-mem-gb"}
    assert not options.fail_requests_greater_than_one


def test_patterns_come_in_their_order() -> None:
    """The first that matches counts, so the order is the operator's."""
    patterns = (ResourcePattern("*H100*", "nvidia.com/big"), ResourcePattern("*", GPU))
    options = options_of(resources=Resources(gpus=patterns, mig=(ResourcePattern("1g.*", MIG),)))
    assert options.gpu_patterns == (Pattern("*H100*", "nvidia.com/big"), Pattern("*", GPU))
    assert options.mig_patterns == (Pattern("1g.*", MIG),)


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        ("*", "NVIDIA A100-SXM4-40GB", True),
        ("NVIDIA A100*", "NVIDIA A100-SXM4-40GB", True),
        ("A100*", "NVIDIA A100-SXM4-40GB", False),
        ("1g.10gb", "1g.10gb+me", False),
        ("1g.10gb+me", "1g.10gb+me", True),
        ("1g.10gb+*", "1g.10gb+me", True),
        ("1g?10gb", "1g.10gb", False),
        ("[1-7]g.*", "1g.10gb", False),
    ],
)
def test_a_pattern_matches_all_of_a_name(pattern: str, text: str, matches: bool) -> None:
    """nvidia §3: anchored at both ends since v0.20. Only ``*`` is special."""
    assert Pattern(pattern, GPU).matches(text) is matches
