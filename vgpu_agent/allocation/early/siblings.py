"""Decide between the candidates for an Allocate by the sizes of the calls around it.

A wrong guess is exchanged or refused at PreStartContainer, never started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from vgpu_agent.allocation.candidates import Candidate


class Siblings:
    """The sizes of the calls for the resources that are only counted, as further evidence.

    The kubelet allocates a container's resources one after the other, in any order. What was
    allocated since the last decision belongs to the container that was decided for then, or else to
    the present one.
    """

    def __init__(self) -> None:
        self._since: list[tuple[str, int]] = []
        self._open: dict[str, int] = {}

    def allocated(self, resource: str, count: int) -> None:
        """Note that the kubelet has allocated ``count`` ids of a counted resource."""
        self._since.append((resource, count))

    def decided(self, limits: Mapping[str, int], counted: Collection[str]) -> None:
        """A container with these limits was decided for; what it still waits for may follow."""
        own = self._own()
        self._open = {
            name: limits[name] for name in counted if limits.get(name) and name not in own
        }
        self._since = []

    def fits(self, candidate: Candidate) -> bool:
        """Tell whether no received Allocate speaks against this candidate."""
        return all(
            candidate.container.limits.get(name, 0) == count for name, count in self._own().items()
        )

    def _own(self) -> dict[str, int]:
        """Return the received amounts that cannot belong to the container before."""
        left, own = dict(self._open), {}
        for name, count in self._since:
            if left.get(name) == count:
                del left[name]
            else:
                own[name] = count
        return own


def likeliest(found: list[Candidate], siblings: Siblings) -> Candidate | None:
    """The candidate to decide for; None when there is none."""
    return next(
        (candidate for candidate in found if siblings.fits(candidate)), found[0] if found else None
    )
