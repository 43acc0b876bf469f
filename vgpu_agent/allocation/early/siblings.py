"""Choose between the containers that an Allocate may be for (the *candidates*), by the Allocate
calls for other resources.

A container may ask for several resources, and the kubelet calls Allocate for each. A wrong choice
is corrected or refused at PreStartContainer, before the container starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from vgpu_agent.allocation.candidates import Candidate


class Siblings:
    """The Allocate calls for counted resources of the same container, which hint at that container.
    Such resources are only there for schedulers to count: their ids are neither booked nor answered
    (`Decider.NOBODY`).

    The kubelet allocates a container's resources one after the other, in any order. A *decision* is
    the choice of a container for a call whose ids are booked. A call since the last decision
    belongs to the container of that decision, or to the present one: the one to be chosen next.

    State: the calls since the last decision, and the resources that its container still lacked.
    """

    def __init__(self) -> None:
        self._since: list[tuple[str, int]] = []  # the calls: (resource, number of ids)
        self._still_lacking: dict[str, int] = {}  # resource → number of ids

    def note_allocated(self, resource: str, count: int) -> None:
        """Note that the kubelet has allocated ``count`` ids of a counted resource."""
        self._since.append((resource, count))

    def note_decision(self, limits: Mapping[str, int], counted: Collection[str]) -> None:
        """Note the decision for a container with these limits.

        ``counted`` has the names of all counted resources. Calls for those of them that the
        container asks for and that were not allocated yet may follow.
        """
        own = self._of_present_container()
        self._still_lacking = {
            name: limits[name] for name in counted if limits.get(name) and name not in own
        }
        self._since = []

    def fits(self, candidate: Candidate) -> bool:
        """Tell whether the candidate asks for exactly what was allocated to the present
        container.
        """
        return all(
            candidate.container.limits.get(name, 0) == count
            for name, count in self._of_present_container().items()
        )

    def _of_present_container(self) -> dict[str, int]:
        """Return resource → number of ids, for calls that cannot belong to the previous
        container.
        """
        left, own = dict(self._still_lacking), {}
        for name, count in self._since:
            if left.get(name) == count:
                del left[name]
            else:
                own[name] = count
        return own


def likeliest(found: list[Candidate], siblings: Siblings) -> Candidate | None:
    """Return the first candidate that fits the calls, else the first one; None without any.
    ``found`` has the likeliest one first, as far as it is known without these calls.
    """
    return next(
        (candidate for candidate in found if siblings.fits(candidate)), found[0] if found else None
    )
