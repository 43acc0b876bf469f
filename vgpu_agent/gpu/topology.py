"""The distance between GPUs: the PCI level and the number of NVLinks of each pair, direct ones or
through NVSwitches.

Read by `session` once per change of the set of GPUs, because nothing else changes it and it takes a
few calls for each pair. If a GPU is lost while it is read, only its own pairs are left out.
"""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING

from vgpu_agent.errors import NvmlError
from vgpu_agent.model import Link

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vgpu_agent.gpu.nvml import Handle, NvLinks, Nvml
    from vgpu_agent.model import Gpu

Links = dict[tuple[str, str], Link]  # by the UUIDs of the pair


def read_links(nvml: Nvml, cards: Sequence[tuple[Gpu, Handle]]) -> tuple[Links, list[str]]:
    """Return the links of all pairs, in both directions,
    and a sentence for each GPU or pair that could not be read.
    """
    troubles: list[str] = []
    ends: dict[str, NvLinks] = {}  # UUID → what is at the far ends of its links
    addresses = {gpu.uuid: gpu.pci_bus_id for gpu, _ in cards}
    known = frozenset(addresses.values())  # any other end of a link may be a switch
    for gpu, handle in cards:
        try:
            ends[gpu.uuid] = nvml.nvlinks(handle, known)
        except NvmlError as err:
            troubles.append(f"NVLinks of {gpu.uuid}: {err}")
    nvlinks = count_nvlinks(addresses, {uuid: found.peers for uuid, found in ends.items()})
    # GPUs with links to switches are connected through these; the smaller count applies.
    switch_links = {uuid: found.switch_links for uuid, found in ends.items()}
    links: Links = {}
    for (one, one_handle), (other, other_handle) in itertools.combinations(cards, 2):
        try:
            level = nvml.common_ancestor(one_handle, other_handle)
        except NvmlError as err:
            troubles.append(f"PCI distance of {one.uuid} and {other.uuid}: {err}")
            continue
        if level is not None:  # the driver tells how near the two are
            link = Link(
                pci=level,
                nvlinks=nvlinks[frozenset((one.uuid, other.uuid))],
                switch_links=min(switch_links.get(one.uuid, 0), switch_links.get(other.uuid, 0)),
            )
            links[one.uuid, other.uuid] = links[other.uuid, one.uuid] = link
    return links, troubles


def count_nvlinks(
    addresses: Mapping[str, str], peers: Mapping[str, Sequence[str]]
) -> collections.Counter[frozenset[str]]:
    """Count the direct links of each pair of UUIDs.

    Args:
        addresses: PCI address by UUID.
        peers: PCI addresses at the far ends, by UUID. Each link shows at both of its ends; the
            addresses of switches are ignored.
    """
    uuids = {address: uuid for uuid, address in addresses.items()}
    seen: dict[frozenset[str], int] = {}
    for uuid, far_ends in peers.items():
        for far_uuid, count in collections.Counter(
            uuids[end] for end in far_ends if end in uuids
        ).items():
            pair = frozenset((uuid, far_uuid))
            # a GPU that is lost, or whose link is still training, may not list what the other lists
            seen[pair] = max(seen.get(pair, 0), count)
    return collections.Counter(seen)
