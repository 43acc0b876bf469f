"""The GPU-share ledger of the simulated Volcano scheduler:
whole pods on one card by memory, or whole cards by number.

Made again for every round of `scheduler` from the node's capacity and the pods' `gpu-index`. Rules:
volcano-gpushare §2, §3 and §8, golden vectors volcano-gpushare S2, S5, S6 and S7. Where the real
one walks its cards in random order, this one goes by index.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Literal

from vgpu_agent.sim.volcano import annotations as words
from vgpu_agent.sim.volcano.ledger import Placed
from vgpu_agent.sim.volcano.resources import Object, amount, annotations_of, is_terminated, limits

if TYPE_CHECKING:
    from collections.abc import Iterable

MEMORY = "volcano.sh/gpu-memory"
NUMBER = "volcano.sh/gpu-number"
Strategy = Literal["share", "number"]


class GpushareLedger:
    """The cards of one node: index → memory of each pod on it, by the pod's UID,
    in the node's memory units.
    """

    lock_key = words.GPUSHARE_LOCK
    # the form of the vGPU one (real-node §4) around the device's name
    complaint = "GpuShareDeviceSharing error"

    def __init__(self, cards: Iterable[int], card_memory: int, strategy: Strategy) -> None:
        self.holders: dict[int, dict[str, int]] = {index: {} for index in cards}
        self.card_memory = card_memory
        self._strategy: Strategy = strategy

    @classmethod
    def of(
        cls, node: Object, pods: Iterable[Object], *, strategy: Strategy
    ) -> GpushareLedger | None:
        """The ledger of a node with ``pods`` on it;
        None when its capacity lacks one of the two resources, or has no cards.
        """
        capacity = (node.get("status") or {}).get("capacity") or {}
        number = int(amount(capacity.get(NUMBER, 0)))
        if MEMORY not in capacity or number <= 0:
            return None
        unhealthy = words.parse_indices(annotations_of(node).get(words.UNHEALTHY_IDS, ""))
        healthy = [index for index in range(number) if index not in unhealthy]
        ledger = cls(healthy, int(amount(capacity[MEMORY])) // number, strategy)
        for pod in pods:
            if not is_terminated(pod):
                ledger.add(pod)
        return ledger

    def add(self, pod: Object) -> None:
        """Book a bound pod on the cards that its annotation names."""
        if _wanted(pod, MEMORY) or _wanted(pod, NUMBER):
            for index in words.parse_indices(annotations_of(pod).get(words.GPU_INDEX, "")):
                if index in self.holders:
                    self.holders[index][pod["metadata"]["uid"]] = _wanted(pod, MEMORY)

    def copy(self) -> GpushareLedger:
        """A ledger to try something on."""
        return copy.deepcopy(self)

    def concerns(self, pod: Object) -> bool:
        """Tell whether the pod requests a resource of this strategy."""
        return _wanted(pod, MEMORY if self._strategy == "share" else NUMBER) > 0

    @staticmethod
    def needs_lock(pod: Object) -> bool:
        """Tell whether a node lock is taken for the pod, where locks are on: only for memory."""
        return _wanted(pod, MEMORY) > 0

    def place(self, pod: Object, now: float) -> Placed | None:
        """Book a place for the pod and return the values to write (volcano-gpushare S2);
        None when it does not fit.

        Args:
            pod: not bound yet.
            now: unix seconds, for the time stamp in nanoseconds.
        """
        if self._strategy == "share":
            needed = _wanted(pod, MEMORY)
            cards = [
                index
                for index, pods in sorted(self.holders.items())
                if self.card_memory - sum(pods.values()) >= needed
            ][:1]
            fits = bool(cards)
        else:
            needed = _wanted(pod, NUMBER)
            cards = [index for index, pods in sorted(self.holders.items()) if not pods][:needed]
            fits = len(cards) == needed
        if not fits:
            return None
        for index in cards:
            self.holders[index][pod["metadata"]["uid"]] = _wanted(pod, MEMORY)
        written = {
            words.GPU_INDEX: ",".join(str(index) for index in cards),
            words.PREDICATE_TIME: f"{round(now * 1_000_000)}000",
        }
        return Placed(written)


def _wanted(pod: Object, resource: str) -> int:
    """The pod's request: its regular containers together,
    or its largest init container where that is more.
    """

    def of(containers: str) -> list[int]:
        return [
            int(amount(limits(container).get(resource, 0)))
            for container in pod["spec"].get(containers) or ()
        ]

    return max(sum(of("containers")), *of("initContainers"), 0)
