"""For runtimes without CDI: which pod is this Allocate likely about?

`allocator` asks in early mode only. The answer must be complete in Allocate, and kubelet does not say whose it is; so the pods are narrowed
down to those whose next container asks for as many ids, and the one that was bound first is taken. It stays a guess until PreStartContainer
has proven it: a wrong one is exchanged or refused there, never started.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from vgpu_agent.allocation.guesses import Guesses
    from vgpu_agent.allocation.surroundings import Surroundings
    from vgpu_agent.pods import Pod, PodContainer


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A container that may be the one."""

    pod: Pod
    container: PodContainer

    @property
    def key(self) -> tuple[str, str]:
        """(kubelet's UID of the pod, container)."""
        return self.pod.kubelet_uid, self.container.name


def candidates(pods: Iterable[Pod], served: Collection[tuple[str, str]], resource: str, count: int, node: str) -> list[Candidate]:
    """The containers that may be asking for ``count`` ids of ``resource`` now, the likeliest first.

    kubelet admits the containers of a pod one after the other, so only the first one that has not been served can be it.
    """
    found = []
    for pod in pods:
        if pod.node != node or pod.ended or pod.deleting or pod.phase != "Pending":
            continue
        waiting = [
            container
            for container in pod.containers
            if container.limits.get(resource, 0) > 0 and not container.started and (pod.kubelet_uid, container.name) not in served
        ]
        if waiting and waiting[0].limits[resource] == count:
            found.append(Candidate(pod, waiting[0]))
    return found


class Siblings:
    """The sizes of the calls for the resources that are only counted, as a second witness.

    kubelet allocates a container's resources one after the other, in any order. What was allocated since the last decision belongs to the
    container that was decided for then, or else to the one that is asked about now.
    """

    def __init__(self) -> None:
        self._since: list[tuple[str, int]] = []
        self._open: dict[str, int] = {}

    def heard(self, resource: str, count: int) -> None:
        """kubelet has allocated ``count`` ids of a counted resource."""
        self._since.append((resource, count))

    def decided(self, limits: Mapping[str, int], counted: Collection[str]) -> None:
        """A container with these limits was decided for; what it still waits for may follow."""
        own = self._own()
        self._open = {name: limits[name] for name in counted if limits.get(name) and name not in own}
        self._since = []

    def fits(self, candidate: Candidate) -> bool:
        """Whether nothing that was heard speaks against this candidate."""
        return all(candidate.container.limits.get(name, 0) == count for name, count in self._own().items())

    def _own(self) -> dict[str, int]:
        """What was heard and cannot belong to the container before."""
        left, own = dict(self._open), {}
        for name, count in self._since:
            if left.get(name) == count:
                del left[name]
            else:
                own[name] = count
        return own


def likeliest(found: list[Candidate], siblings: Siblings) -> Candidate | None:
    """The candidate to decide for; None when there is none."""
    return next((candidate for candidate in found if siblings.fits(candidate)), found[0] if found else None)


async def awaited_candidate(around: Surroundings, guesses: Guesses, siblings: Siblings, resource: str, count: int) -> Candidate | None:
    """The candidate to decide for; one whose pod the watch has not shown yet is waited for, up to ``binding.allocateWaitSeconds``.

    Args:
        around: where pods are known from.
        guesses: whom earlier answers were meant for.
        siblings: the second witness.
        resource: what is allocated.
        count: how many ids.
    """
    book, until = around.book, asyncio.get_running_loop().time() + around.settings.allocate_wait_seconds
    while True:
        version = book.revision.version
        found = candidates(book.pods, guesses.answered, resource, count, around.node)
        left = until - asyncio.get_running_loop().time()
        if found or left <= 0:
            return likeliest(found, siblings)
        try:
            async with asyncio.timeout(left):
                await book.revision.newer_than(version)
        except TimeoutError:
            return None
