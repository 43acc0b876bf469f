"""Starts on a GPU of which a scheduler has assigned more compute, or more places, than it has.
A place is the room for one container: each GPU takes a limited number of them.

Volcano's scheduler does not count the compute and the place of a second container of a pod on the
same GPU. It does count its memory. For the scheduler such a pod is placed, so the agent would
refuse it forever. `late_start` asks here whether a decision may exceed the device, and records each
start that does. The pod's owner gets a notice (`notices`), and `web` counts the starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_agent.concurrency import Revision

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vgpu_agent.allocation.notices import Notices
    from vgpu_agent.config.binding import Binding
    from vgpu_agent.families.family import Decision
    from vgpu_agent.ledger.accounting import Overcommit
    from vgpu_agent.pods import Pod

PLAIN_SCHEDULER = "default-scheduler"  # Kubernetes' own, which counts quantities and chooses no GPU
OVERCOMMITTED = "VgpuOvercommitted"  # the reason of the event


class Overcommits:
    """The starts since the agent's start that exceeded a device.

    State: their number (`total`), in memory only. `revision` advances with each start.
    """

    def __init__(self, notices: Notices) -> None:
        self.revision = Revision()
        self.total = 0
        self._notices = notices

    def add(self, pod: Pod, container: str, devices: Iterable[Overcommit]) -> str:
        """Record that ``container`` was started on ``devices``; return the text for its owner."""
        what = " and ".join(f"of GPU {each.device} than it has: {each.text}" for each in devices)
        text = (
            f"container {container} was started although its scheduler has given out more {what}. "
            "Memory is not overcommitted. See binding.schedulerOvercommit"
        )
        self._notices.add(pod, container, OVERCOMMITTED, text)
        self.total += 1
        self.revision.publish(self.total)
        return text


def may_overcommit(decision: Decision, pod: Pod, binding: Binding) -> bool:
    """Tell whether ``decision`` may take more compute or more places than a device has.

    A decision that the container has had before may (`Decision.kept`).
    """
    return decision.by_scheduler and (decision.kept or not why_no_overcommit(pod, binding))


def why_no_overcommit(pod: Pod, binding: Binding) -> str:
    """Explain why a decision in the annotations of ``pod`` may not exceed a device;
    empty when it may.

    Every user who may create pods can write such annotations. In a pod of the plain scheduler they
    come from its author only.
    """
    if binding.scheduler_overcommit == "refuse":
        return "binding.schedulerOvercommit is refuse"
    if pod.scheduler in {"", PLAIN_SCHEDULER}:
        return (
            f"the pod's schedulerName is {PLAIN_SCHEDULER}, which decides about no GPU, so its "
            "annotations are not a scheduler's decision"
        )
    return ""
