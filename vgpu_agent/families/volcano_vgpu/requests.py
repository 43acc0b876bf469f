"""The request of a container in Volcano's words: its limits of memory and compute, read and
checked.

Called by `decisions` to compare a scheduler's decision with what the pod really asks for, and by
`family` and `mig.family` to place a pod without such a decision. volcano-vgpu §8 defines which
containers ask, and which of several amounts counts. What schedulers get wrong there (``3Gi`` turns
negative, a percentage becomes 0) is refused here or in `decisions` instead of passed on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import RequestRefusedError, quoted
from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from vgpu_agent.pods import Pod, PodContainer


class Names(msgspec.Struct, frozen=True):
    """The names of the resources on this node (volcano-vgpu §1.1).

    Attributes:
        number: of the resource by which a container asks for a number of GPUs.
        memory: for units of memory on each of them.
        cores: for percent of each one's compute.
        percentage: for percent of each one's memory.
    """

    number: str = "volcano.sh/vgpu-number"
    memory: str = "volcano.sh/vgpu-memory"
    cores: str = "volcano.sh/vgpu-cores"
    percentage: str = "volcano.sh/vgpu-memory-percentage"

    def asked_by(self, container: PodContainer) -> bool:
        """Tell whether a scheduler sees that the container asks for GPUs: it names their number or
        their memory (volcano-vgpu §8).
        """
        return any(
            name in container.limits or name in container.unreadable_limits
            for name in (self.number, self.memory)
        )

    def asking(self, pod: Pod) -> tuple[PodContainer, ...]:
        """Return the containers that have an entry in a scheduler's annotation
        ``volcano.sh/vgpu-ids-new``, in its order: regular ones that ask.

        The scheduler does not see init containers and sidecars.
        """
        return tuple(
            each
            for each in pod.containers
            if each.kind is ContainerKind.MAIN and self.asked_by(each)
        )


class ContainerRequest(msgspec.Struct, frozen=True):
    """The request of a container on each of its GPUs.

    Attributes:
        memory_units: memory in the node's units (of `volcano_vgpu.offer.Offer.factor` MiB); None
            where a percentage or the whole GPU is asked for.
        memory_percent: 1…100 of a GPU's memory where no number of units counts; 100 when the
            container says nothing.
        cores_percent: of a GPU's compute; 0 where none is asked for.
    """

    memory_units: int | None
    memory_percent: int
    cores_percent: int

    def units_on(self, card_units: int) -> int:
        """Return how many units that is on a GPU that has ``card_units`` in all."""
        return (
            card_units * self.memory_percent // 100
            if self.memory_units is None
            else self.memory_units
        )

    def most_units_on(self, card_units: int) -> int:
        """Return the same, rounded up: some schedulers round a percentage up."""
        return (
            -(-card_units * self.memory_percent // 100)
            if self.memory_units is None
            else self.memory_units
        )

    def text(self, names: Names) -> str:
        """Return the request as text for messages, with the defaults where the pod says nothing."""
        memory = (
            f"{names.memory}: {self.memory_units}"
            if self.memory_units is not None
            else f"{self.memory_percent} % of the memory"
        )
        return f"{memory}, {names.cores}: {self.cores_percent}"


def read_request(pod: Pod, container: PodContainer, names: Names) -> ContainerRequest:
    """Return the request in the container's limits.

    A percentage wins over a number of units; without either, or with 0 units, it is the whole GPU
    (volcano-vgpu §8).

    Raises:
        RequestRefusedError: a limit is no whole number, or out of range; the text names pod,
            container, key and value.
    """

    def limit(name: str, *, most: int, expected: str) -> int:
        """Return the limit, 0 where there is none; ``expected`` is for the error."""
        if name in container.unreadable_limits:
            raise _refused(pod, container, name, container.unreadable_limits[name], expected)
        value = container.limits.get(name, 0)
        if not 0 <= value <= most:
            raise _refused(pod, container, name, str(value), expected)
        return value

    cores = limit(names.cores, most=100, expected="percent of one GPU's compute, 0 to 100")
    memory = limit(
        names.memory,
        most=2**31 - 1,
        expected="a plain number of memory units of this node, such as 3000, without Mi or Gi",
    )
    if names.percentage in container.limits or names.percentage in container.unreadable_limits:
        expected = "percent of one GPU's memory, 1 to 100"
        percent = limit(names.percentage, most=100, expected=expected)
        if percent == 0:
            raise _refused(pod, container, names.percentage, "0", expected)
        return ContainerRequest(None, percent, cores)
    return ContainerRequest(memory or None, 100, cores)


def _refused(
    pod: Pod, container: PodContainer, name: str, value: str, expected: str
) -> RequestRefusedError:
    return RequestRefusedError(
        f"pod {pod.full_name}, container {container.name}: {name} is {quoted(value, 40)}; expected "
        f"{expected}"
    )
