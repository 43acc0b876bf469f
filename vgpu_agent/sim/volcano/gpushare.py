"""The GPU-share ledger of the simulated Volcano scheduler. It places a pod on one card by memory,
or on several whole cards by number.

`scheduler` makes a new one in every round (one attempt to place each waiting pod), from the node's
capacity and the annotation `gpu-index` of its pods. Rules: volcano-gpushare §2, §3 and §8, golden
vectors volcano-gpushare S2, S5, S6 and S7. The real scheduler iterates over the cards in random
order, this one in the order of the index.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Literal

from vgpu_agent.sim.volcano.annotations import (
    GPU_INDEX,
    GPUSHARE_LOCK,
    PREDICATE_TIME,
    UNHEALTHY_IDS,
    parse_indices,
)
from vgpu_agent.sim.volcano.ledger import Placed
from vgpu_agent.sim.volcano.resources import Object, amount, annotations_of, is_terminated, limits

if TYPE_CHECKING:
    from collections.abc import Iterable

MEMORY = "volcano.sh/gpu-memory"
NUMBER = "volcano.sh/gpu-number"
Strategy = Literal["share", "number"]  # by memory, or by whole cards


class GpushareLedger:
    """The healthy cards of one node, and the pods on them.

    Attributes:
        holders: index of the card → UID of each pod on it → its memory, in the node's memory units
            (of as many MiB as the device plugin's ``gpu-memory-factor`` says).
        card_memory: the memory of each card, in the same units.
    """

    lock_key = GPUSHARE_LOCK  # the annotation by which the scheduler locks the node
    # Volcano's reason against a node. It has the form of the one for vGPU (real-node §4).
    refusal = "GpuShareDeviceSharing error"

    def __init__(self, cards: Iterable[int], card_memory: int, strategy: Strategy) -> None:
        self.holders: dict[int, dict[str, int]] = {index: {} for index in cards}
        self.card_memory = card_memory
        self._strategy: Strategy = strategy

    @classmethod
    def of(
        cls, node: Object, pods: Iterable[Object], *, strategy: Strategy
    ) -> GpushareLedger | None:
        """Build the ledger of ``node`` with its bound ``pods``.

        Return None if the capacity lacks one of the two resources, or its number of cards is 0.
        """
        capacity = (node.get("status") or {}).get("capacity") or {}
        number = int(amount(capacity.get(NUMBER, 0)))
        if MEMORY not in capacity or number <= 0:
            return None
        unhealthy = parse_indices(annotations_of(node).get(UNHEALTHY_IDS, ""))
        healthy = [index for index in range(number) if index not in unhealthy]
        ledger = cls(healthy, int(amount(capacity[MEMORY])) // number, strategy)
        for pod in pods:
            if not is_terminated(pod):
                ledger.add(pod)
        return ledger

    def add(self, pod: Object) -> None:
        """Book a bound pod on the cards that its annotation names."""
        if _requested(pod, MEMORY) or _requested(pod, NUMBER):
            indices = annotations_of(pod).get(GPU_INDEX, "")
            for index in parse_indices(indices):
                if index in self.holders:
                    self.holders[index][pod["metadata"]["uid"]] = _requested(pod, MEMORY)

    def copy(self) -> GpushareLedger:
        """Return a copy, so that a placement can be tried."""
        return copy.deepcopy(self)

    def has_request(self, pod: Object) -> bool:
        """Tell whether the pod requests the resource of this strategy."""
        return _requested(pod, MEMORY if self._strategy == "share" else NUMBER) > 0

    @staticmethod
    def needs_lock(pod: Object) -> bool:
        """Tell whether binding the pod needs the node lock: only a request of memory does."""
        return _requested(pod, MEMORY) > 0

    def place(self, pod: Object, now: float) -> Placed | None:
        """Book the pod on one or more cards.

        Args:
            pod: the pod, not bound yet.
            now: Unix seconds, for the time stamp in nanoseconds.

        Returns:
            the annotations to write (volcano-gpushare S2), or None if the pod does not fit.
        """
        if self._strategy == "share":
            needed = _requested(pod, MEMORY)
            cards = [
                index
                for index, pods in sorted(self.holders.items())
                if self.card_memory - sum(pods.values()) >= needed
            ][:1]
            fits = bool(cards)
        else:
            needed = _requested(pod, NUMBER)
            cards = [index for index, pods in sorted(self.holders.items()) if not pods][:needed]
            fits = len(cards) == needed
        if not fits:
            return None
        for index in cards:
            self.holders[index][pod["metadata"]["uid"]] = _requested(pod, MEMORY)
        return Placed(
            {
                GPU_INDEX: ",".join(str(index) for index in cards),
                PREDICATE_TIME: f"{round(now * 1_000_000)}000",
            }
        )


def _requested(pod: Object, resource: str) -> int:
    """Return the pod's request: the sum of its regular containers, or its largest init container if
    that is more.
    """

    def amounts(field: str) -> list[int]:
        return [
            int(amount(limits(container).get(resource, 0)))
            for container in pod["spec"].get(field) or ()
        ]

    return max(sum(amounts("containers")), *amounts("initContainers"), 0)
