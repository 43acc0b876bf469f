"""The annotations and variables of pods that any family reads or writes; `cluster` keeps these of each pod and skips all others.

A pod may bring 256 KiB of annotations and a megabyte of variables, and a node has some hundred pods. A family that reads another key adds
it here. Names of variables are listed one by one and not by a prefix, because a tenant could invent any number below a prefix.
"""

from __future__ import annotations

import re

from vgpu_agent.families.volcano_gpushare.family import GPU_ASSIGNED, GPU_INDEX, PREDICATE_TIME
from vgpu_agent.families.volcano_vgpu.decisions import IDS, NODE, TO_ALLOCATE
from vgpu_agent.families.volcano_vgpu.family import NO_TYPE, NO_UUID, USE_TYPE, USE_UUID, WANTED_MODE
from vgpu_agent.families.volcano_vgpu.pod_state import PHASE, TIME
from vgpu_agent.pods import MIRROR_POD, STATIC_POD_HASH

# The most important first: where a pod has more text than is kept, the last ones are cut.
ANNOTATIONS = (
    MIRROR_POD,
    STATIC_POD_HASH,
    "kubernetes.io/config.source",
    NODE,
    PHASE,
    TIME,
    GPU_INDEX,
    PREDICATE_TIME,
    GPU_ASSIGNED,
    WANTED_MODE,
    IDS,
    TO_ALLOCATE,
    USE_TYPE,
    NO_TYPE,
    USE_UUID,
    NO_UUID,
    "volcano.sh/bind-time",
)

# What a container may set that touches GPUs or their limits.
VARIABLES = re.compile(
    r"CUDA_(DISABLE_CONTROL|REDIRECT|DEVICE_MEMORY_LIMIT(_\d{1,2})?|DEVICE_SM_LIMIT(_\d{1,2})?|DEVICE_MEMORY_SHARED_CACHE|OVERSUBSCRIBE|TASK_PRIORITY"
    r"|VISIBLE_DEVICES|DEVICE_ORDER|MPS_(PIPE_DIRECTORY|LOG_DIRECTORY|PINNED_DEVICE_MEM_LIMIT|ACTIVE_THREAD_PERCENTAGE))"
    r"|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES|MIG_CONFIG_DEVICES|MIG_MONITOR_DEVICES|IMEX_CHANNELS|DISABLE_REQUIRE)"
    r"|GPU_CORE_UTILIZATION_POLICY|ACTIVE_OOM_KILLER|LIBCUDA_LOG_LEVEL|VGPU_(DEVICE|RESOURCE)|NV_VISIBLE_DEVICES"
    r"|VOLCANO_GPU_(ALLOCATED|MEMORY_TOTAL)|LD_(PRELOAD|LIBRARY_PATH)",
    re.ASCII,
)
