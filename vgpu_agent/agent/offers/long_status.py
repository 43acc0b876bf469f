"""Pods that can hold so many ids that their status becomes too large to be written.

From 1.36 on the kubelet writes each device id that a container holds into the pod's status (feature ResourceHealthStatus, on by default),
and etcd takes requests of 1.5 MiB. With memory counted in small units that is soon reached, under any device plugin: such a pod runs and
never shows Ready, and one that may not start cannot even be deleted, because the kubelet cannot write that it has ended. Seen on a
kubelet 1.36.3: 22,000 ids of 53 bytes are written, 23,028 are not. Called by `families`, which warns beforehand.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from vgpu_agent.device_ids import NumberedIds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vgpu_agent.model import Resource

_SINCE = (1, 36)
_VERSION = re.compile(r"v?(\d{1,6})\.(\d{1,6})")
# The part of etcd's 1.5 MiB that the rest of a pod leaves to ids, and what each takes besides itself: lengths, tags and the word "Healthy".
_ROOM_BYTES = 1_400_000
_BESIDES_BYTES = 13


def cautions(resources: Iterable[Resource], kubelet_version: str) -> Iterator[str]:
    """A sentence for each resource of which a single GPU has more ids than a pod's status can hold.

    Args:
        resources: those that are offered.
        kubelet_version: ``status.nodeInfo.kubeletVersion``; an unknown one is taken for an old one.
    """
    found = _VERSION.match(kubelet_version)
    if found is None or (int(found[1]), int(found[2])) < _SINCE:
        return
    for resource in resources:
        if not isinstance(resource.ids, NumberedIds) or not resource.ids.blocks:
            continue
        block = max(resource.ids.blocks, key=lambda block: block.count)
        fits = _ROOM_BYTES // (len(block.prefix) + len(str(block.count)) + _BESIDES_BYTES)
        if block.count > fits:
            yield (
                f"{resource.name}: a GPU has {block.count} ids, and a pod that asks for more than about {fits} never shows Ready and is "
                f"hard to delete: this kubelet ({kubelet_version}) writes each id into the pod's status, which then is too large for the "
                f"API server. Make the unit at least {math.ceil(block.count / fits)} times as coarse ({resource.unit}), and divide what "
                "pods ask for by as much"
            )
