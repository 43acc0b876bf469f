"""Read the demand of a pod from its limits and annotations (vgpu-manager §4.1, §5.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.errors import RequestRefusedError
from vgpu_agent.families.scheduling import DEFAULTS, Incomplete
from vgpu_agent.families.vgpu_manager.requests import (
    asks,
    listed_texts,
    misspelt_word,
    policy_word,
    read_request,
)
from vgpu_agent.placement.nodes.demand import (
    PHYSICAL,
    VIRTUAL,
    ContainerDemand,
    Demand,
    PodDemand,
)
from vgpu_agent.placement.topology import LINK, LINK_STRICT, MODES, POLICIES

if TYPE_CHECKING:
    from vgpu_agent.families.scheduling import SchedulingOptions
    from vgpu_agent.families.vgpu_manager.keys import Keys
    from vgpu_agent.families.vgpu_manager.requests import Request
    from vgpu_agent.pods import Pod, PodContainer

_MAX_ENTRIES = 64  # of a list in an annotation; each is compared with each card of each Node
# Containers that ask for cards, init containers too. Cards are searched for each, on each Node.
_MAX_CONTAINERS = 16


def read_demand(pod: Pod, keys: Keys, options: SchedulingOptions = DEFAULTS) -> PodDemand | None:
    """Return the demand of a pod, None if none of its containers asks for cards.

    Unknown values of policies count as ``none`` (vgpu-manager §4.1).

    Raises:
        RequestRefusedError: no Node can ever serve it: a limit is no whole number or is out of
            range, an annotation is too long, too many containers ask for cards, or the operator has
            forbidden such a request. The text names pod, container, key and value.
    """
    pod.refuse_more_requests()
    asking = [container for container in pod.containers if asks(container, keys)]
    if not asking:
        return None
    if len(asking) > _MAX_CONTAINERS:
        raise RequestRefusedError(
            f"pod {pod.full_name}: {len(asking)} of its containers ask for {keys.number}; expected "
            f"at most {_MAX_CONTAINERS}"
        )
    # `Pod.containers` has them in the order of the claims: init containers and sidecars first.
    containers = tuple(
        # A limit counts memory in units of as many MiB as the Node's factor says. The Node is not
        # known yet, so with a factor of 1 the amounts stay units.
        _container_demand(
            pod, container, read_request(pod, container, keys, factor=1), keys, options
        )
        for container in asking
    )

    def entries(key: str) -> tuple[str, ...]:
        found = set(listed_texts(pod, key))
        if len(found) > _MAX_ENTRIES:
            raise RequestRefusedError(
                f"pod {pod.full_name}: annotation {key} has {len(found)} entries; expected at most "
                f"{_MAX_ENTRIES}"
            )
        return tuple(sorted(found))

    mode = policy_word(pod, keys.topology_mode, MODES)
    memory = pod.annotations.get(keys.memory_policy, "").strip().lower()
    demand = Demand(
        containers,
        node_policy=policy_word(pod, keys.node_policy, POLICIES),
        device_policy=policy_word(pod, keys.device_policy, POLICIES),
        topology_mode=mode,
        # `VIRTUAL`: only Nodes that offer more memory than their cards have; `PHYSICAL`: all others
        memory_policy=(
            VIRTUAL if memory.startswith("virt") else PHYSICAL if memory.startswith("phy") else ""
        ),
        include_types=entries(keys.include_type),
        exclude_types=entries(keys.exclude_type),
        include_uuids=entries(keys.include_uuid),
        exclude_uuids=entries(keys.exclude_uuid),
        types_match_substrings=options.types_match_substrings,
        # the pod is to be near its peers: only in the modes that ask for cards joined by links
        aligned=(
            mode in {LINK, LINK_STRICT}
            and pod.annotations.get(keys.cross_pod, "").strip().lower() == "true"
        ),
    )
    return PodDemand(demand, tuple(container.name for container in asking))


def misspelt(pod: Pod, keys: Keys) -> tuple[str, ...]:
    """Return a sentence for each policy of a pod that counts as ``none`` for its unknown word."""
    rules = (
        (keys.node_policy, POLICIES),
        (keys.device_policy, POLICIES),
        (keys.topology_mode, MODES),
    )
    return tuple(text for key, known in rules if (text := misspelt_word(pod, key, known)))


def _container_demand(
    pod: Pod, container: PodContainer, request: Request, keys: Keys, options: SchedulingOptions
) -> ContainerDemand:
    """Return the demand of a container. An incomplete request, with compute and without memory or
    the other way round, is treated as the operator says (``options``): it is refused; or it gets
    the same part of the card's memory as of its compute; or, as by the replaced extender, what is
    missing is not limited.
    """
    # None for memory means all of a card's
    cores, memory = request.cores_percent, request.memory_mib
    incomplete = (
        (options.cores_only, keys.cores, keys.memory)
        if memory is None and container.limits.get(keys.cores, 0)
        else (options.memory_only, keys.memory, keys.cores)
        if not cores
        else None
    )
    memory_percent = 100
    if incomplete is not None:
        rule, there, missing = incomplete
        if rule is Incomplete.REFUSED:
            raise RequestRefusedError(
                f"pod {pod.full_name}, container {container.name}: it asks for {there}, and not "
                f"for {missing}; this cluster wants both, so add {missing}"
            )
        if rule is Incomplete.PROPORTIONAL and memory is None:
            memory_percent = cores
    return ContainerDemand(
        container.kind,
        card_count=request.number,
        cores_percent=cores,
        memory_units=memory,
        memory_percent=memory_percent,
    )
