"""The annotations, labels, variables and resources of pods that any family reads or writes.
`cluster` skips all others unread.

A pod may bring 256 KiB of annotations and a megabyte of variables, and a node has some hundred
pods. Each family names its own in its `FamilySpec`.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.pods import GPU_HEALTH_LABEL, MIRROR_POD, STATIC_POD_HASH, PodKeys

if TYPE_CHECKING:
    from vgpu_agent.config.settings import Settings


def pod_keys(settings: Settings | None = None) -> PodKeys:
    """Return the annotations, labels and resource names of pods to be read under ``settings``;
    without, those that the families have by default.
    """
    every = [family.vocabulary(settings) for family in FAMILIES]
    # the most important one of each family, then the second ones, and so on: if a pod has too much
    # text, the last ones are cut
    ranked = itertools.zip_longest(*(family.annotations for family in every))
    return PodKeys(
        annotations=(*OF_KUBERNETES, *dict.fromkeys(key for rank in ranked for key in rank if key)),
        labels=tuple(
            # the label of pods that hold a dead GPU belongs to no family
            dict.fromkeys((*(key for family in every for key in family.labels), GPU_HEALTH_LABEL))
        ),
        resource_prefixes=tuple(prefix for family in every for prefix in family.resource_prefixes),
    )


# By these annotations a static pod is known, and the API server's mirror of it.
OF_KUBERNETES = (MIRROR_POD, STATIC_POD_HASH, "kubernetes.io/config.source")

# The keys as long as no setting renames any.
BY_DEFAULT = pod_keys()
ANNOTATIONS = BY_DEFAULT.annotations

# Variables of no family: CUDA, MPS, NVIDIA's container runtime and the dynamic loader read them.
_OF_THE_DRIVER = (
    (
        r"CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|MPS_(PIPE_DIRECTORY|LOG_DIRECTORY|"
        r"PINNED_DEVICE_MEM_LIMIT|ACTIVE_THREAD_PERCENTAGE))"
    ),
    (
        r"NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES|MIG_CONFIG_DEVICES|MIG_MONITOR_DEVICES|"
        r"IMEX_CHANNELS|DISABLE_REQUIRE)"
    ),
    r"NV_VISIBLE_DEVICES",
    r"LD_(PRELOAD|LIBRARY_PATH)",
)

# The variables of containers that concern GPUs or their limits. Their names are kept.
VARIABLES = re.compile(
    "|".join((*_OF_THE_DRIVER, *(family.variables for family in FAMILIES if family.variables))),
    re.ASCII,
)

# Those of `VARIABLES` whose values are kept as well, because a family reads them; an empty pattern
# for none.
VALUES = re.compile("|".join(family.values for family in FAMILIES if family.values), re.ASCII)
