"""The annotations, labels, variables and resources of pods that any family reads or writes.
`cluster` skips all others unread.

A pod may bring 256 KiB of annotations and a megabyte of variables, and a node has some hundred
pods. Each family names its own in its `FamilySpec`.
"""

from __future__ import annotations

import itertools
import re

from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.pods import MIRROR_POD, STATIC_POD_HASH

_IN_TURNS = itertools.zip_longest(*(family.annotations for family in FAMILIES))

# The most important first, of each family in turn: where a pod has more text than is kept, the last
# ones are cut.
ANNOTATIONS = (
    MIRROR_POD,
    STATIC_POD_HASH,
    "kubernetes.io/config.source",
    *dict.fromkeys(key for turn in _IN_TURNS for key in turn if key),
)

LABELS = tuple(dict.fromkeys(key for family in FAMILIES for key in family.labels))

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

# What a container may set that touches GPUs or their limits.
VARIABLES = re.compile(
    "|".join((*_OF_THE_DRIVER, *(family.variables for family in FAMILIES if family.variables))),
    re.ASCII,
)

RESOURCE_PREFIXES = tuple(prefix for family in FAMILIES for prefix in family.resource_prefixes)
"""The beginnings of the names of all families' resources, as they are without renaming."""
