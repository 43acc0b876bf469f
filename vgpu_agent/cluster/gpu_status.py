"""The desired state of our Node as far as it follows from the health of the GPUs: the condition
``GPUHealthy``, and the taint of a node that has no usable GPU.

The condition has the form of node-problem-detector's, so whatever acts on those can act on it. It
is written when status, reason or message change, and never only to be refreshed: every node of a
large cluster would cost a write every few minutes.

The taint has a key of the agent's own, so one that stands there is always the agent's.

`node_publisher` compares the result with the Node and writes the difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.cluster.dead_gpus import separate_devices
from vgpu_agent.nodes import DesiredNode
from vgpu_agent.status import NvmlState

if TYPE_CHECKING:
    from vgpu_agent.cluster.dead_gpus import GpuFacts
    from vgpu_agent.config.node_status import NodeStatus
    from vgpu_agent.model import Inventory
    from vgpu_agent.nodes import Node

CONDITION = "GPUHealthy"
TAINT = "vgpu-agent.internal/no-usable-gpu"
# How long no GPU must have been usable. While a driver is reloaded, its GPUs are away for less.
# With the effect NoExecute, the taint ends every pod of the node.
TAINT_AFTER_SECONDS = 60.0
_HEALTHY, _LOST, _UNHEALTHY = "AllGpusHealthy", "GpuLost", "GpuUnhealthy"
_NOT_ANSWERING, _HUNG, _MISSING, _NO_GPU = (
    "GpuNotAnswering",
    "DriverHung",
    "DriverMissing",
    "NoGpu",
)
# These tell a condition of this agent from one of the same type by other software.
_REASONS = frozenset({_HEALTHY, _LOST, _UNHEALTHY, _NOT_ANSWERING, _HUNG, _MISSING, _NO_GPU})
# The most devices in a message. Kubernetes allows 32 KiB, people read a line.
_NAMED = 4


class Outage:
    """The time for which no GPU has been usable.

    State: since when, by a clock that nobody sets: a step of the wall clock, as at the boot of a
    node, must not end all of its pods.
    """

    def __init__(self) -> None:
        # the last change of a GPU's health, by the wall clock, and the loop's time when it was seen
        self._since: tuple[float, float] | None = None

    def seconds(self, inventory: Inventory, now: float) -> float | None:
        """Return the seconds for which no GPU has been usable; None if one is, or none is known:
        after a restart the driver does not list lost GPUs, and on a node without GPUs it never did.

        ``now`` is the event loop's time. Call it soon after each change of the inventory.
        """
        if not inventory.gpus or is_usable(inventory):
            self._since = None
            return None
        changed = max(gpu.health.since for gpu in inventory.gpus)
        if self._since is None or self._since[0] != changed:
            self._since = changed, now
        return now - self._since[1]


def is_usable(inventory: Inventory) -> bool:
    """Tell whether a GPU can be used."""
    return any(gpu.present and gpu.health.ok for gpu in inventory.gpus)


def desired_node(
    facts: GpuFacts, settings: NodeStatus, node: Node, outage_seconds: float | None
) -> DesiredNode:
    """Return the desired state of our Node.

    Args:
        facts: the GPUs and the state of the driver.
        settings: what is written.
        node: the Node as the watch shows it.
        outage_seconds: how long no GPU has been usable (`Outage.seconds`).
    """
    desired_state = cleanup(node)
    if settings.condition:
        desired_state = desired_state.joined(DesiredNode(conditions={CONDITION: condition(facts)}))
    if settings.taint != "none":  # otherwise the effect of the taint
        taints = _taints(facts.inventory.value, settings.taint, outage_seconds)
        desired_state = msgspec.structs.replace(desired_state, taints=taints)
    return desired_state


def cleanup(node: Node) -> DesiredNode:
    """Return the desired state of a Node that is to have nothing from here. A condition of the same
    type that other software has written stays.
    """
    _, reason, _ = node.conditions.get(CONDITION, ("", "", ""))
    # None: the condition or the taint must not be there
    return DesiredNode(
        conditions={CONDITION: None} if reason in _REASONS else {},
        taints={TAINT: None} if TAINT in node.taints else {},
    )


def _taints(
    inventory: Inventory, effect: str, outage_seconds: float | None
) -> dict[str, str | None]:
    """Return the taint with its effect, or with None, which removes it, as soon as a GPU is usable;
    an empty mapping leaves the Node as it is: the GPUs have been unusable for a moment only, or
    none is known.
    """
    if is_usable(inventory):
        return {TAINT: None}
    if outage_seconds is None or outage_seconds < TAINT_AFTER_SECONDS:
        return {}
    return {TAINT: effect}


def condition(facts: GpuFacts) -> tuple[str, str, str]:
    """Return status, reason and message of the condition.

    The status is Unknown while the driver does not say how the GPUs are, and False as soon as one
    of them is known to be lost or unhealthy.
    """
    inventory, driver = facts.inventory.value, facts.driver()
    # GPUs, and MIG instances of GPUs that are not dead as a whole
    dead = separate_devices(inventory)
    if dead:
        named = "; ".join(f"{device.name}: {device.why}" for device in dead[:_NAMED])
        more = f"; and {len(dead) - _NAMED} more" if len(dead) > _NAMED else ""
        reason = _LOST if any(device.lost for device in dead) else _UNHEALTHY
        return "False", reason, f"{named}{more}"
    if driver.state is NvmlState.HUNG:
        return "Unknown", _HUNG, f"the NVIDIA driver does not return from {driver.call}"
    if inventory.failures:  # of the GPUs that are there, and could not be read
        return "False", _NOT_ANSWERING, "; ".join(inventory.failures[:_NAMED])
    if inventory.gpus:
        number = len(inventory.gpus)
        return "True", _HEALTHY, f"{number} GPU{'s' if number > 1 else ''} can be used"
    if driver.state in {NvmlState.MISSING, NvmlState.STARTING}:
        return "Unknown", _MISSING, driver.last_error or "the NVIDIA driver has not been read yet"
    return "Unknown", _NO_GPU, "the NVIDIA driver lists no GPU on this node"
