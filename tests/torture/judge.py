"""Was that the right share? Compares what a container really got with what was meant for it.

From what a container sees and nothing else: its variables, in the words of its family (`dialects`),
and the mount of its own directory, whose name identifies the grant. Asked by `kubelet_model` at
each container start.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from tests.torture.api_model import LivePod
from tests.torture.dialects import VOLCANO, Dialect
from tests.torture.plan import SPLIT, Card, Kind, PlannedContainer, Request
from tests.torture.scheduler_model import Slice
from tests.torture.story import Story
from vgpu_agent.isolation.edits import Edits


@dataclasses.dataclass(frozen=True, slots=True)
class Got:
    """The view of a container: its slices, and the grant (pod's UID,
    container) that its own region names.
    """

    owner: tuple[str, str]
    slices: frozenset[Slice]

    @classmethod
    def read(cls, edits: Edits, order: Sequence[str], dialect: Dialect = VOLCANO) -> Got:
        """Read it as the container's libraries would; ``order`` is that of the PCI bus.

        Raises:
            ValueError: the variables make no sense.
        """
        return cls(dialect.owner(edits), frozenset(dialect.slices(edits, order)))


class Judge:
    """Looks at each start.

    State: the containers on each card, so that an over-booked card is seen even when each single
    start looks right.
    """

    def __init__(
        self, cards: Iterable[Card], story: Story, *, early: bool, dialect: Dialect = VOLCANO
    ) -> None:
        self._units = {card.uuid: card.units for card in cards}
        self._order = list(self._units)
        self._story = story
        self._early = early
        self._dialect = dialect
        self._running: dict[tuple[str, str], Got] = {}
        self._scheduled: set[tuple[str, str]] = set()  # those of them with a scheduler's decision
        self.judged: set[tuple[str, str]] = set()

    def starts(
        self,
        pod: LivePod,
        container: PlannedContainer,
        edits: Edits,
        ids: tuple[str, ...],
        *,
        unasked: bool,
    ) -> None:
        """The container has been created with these edits;
        ``unasked`` when kubelet left PreStartContainer out.
        """
        self.judged.add((pod.uid, container.name))
        try:
            got = Got.read(edits, self._order, self._dialect)
            problem = self._problem(pod, container, got)
        except ValueError as err:
            got, problem = Got(("", ""), frozenset()), str(err)
        self._running[pod.uid, container.name] = dataclasses.replace(
            got, slices=_booked(pod, container, got.slices)
        )
        if pod.slices and (container.name in pod.slices or container.kind is not Kind.SIDECAR):
            self._scheduled.add((pod.uid, container.name))
        problem = problem or self._crowded(got)
        if problem and unasked and self._early:
            # No plugin was asked, so none could refuse: the kubelet's own gap (kubelet §6), which
            # no plugin can close in early mode.
            self._story.tell("wrong, but unasked", pod.uid, container.name, problem)
        elif problem:
            text = f"{pod.namespace}/{pod.name} ({pod.uid}), container {container.name}: {problem}"
            self._story.accuse(text, pod.uid, ids=ids)

    def ends(self, pod: LivePod, container: str) -> None:
        """The container runs no more."""
        self._running.pop((pod.uid, container), None)
        self._scheduled.discard((pod.uid, container))

    def _problem(self, pod: LivePod, container: PlannedContainer, got: Got) -> str:
        uid, name = got.owner if self._dialect.directory else (pod.uid, container.name)
        handed_on = container.kind is Kind.INIT and (self._early or not self._dialect.claims_all)
        if uid != pod.uid or (name != container.name and not handed_on):
            if not (self._early and self._alone_in_directory(got)):
                return f"its grant is that of {uid} {name}"
            self._story.tell("started with an equal share", pod.uid, container.name, uid, name)
        # An init container whose ids go on to a later container gets what that one will have, where
        # it has no claim of its own.
        served = pod.container(name) if uid == pod.uid else container
        if served.name in pod.slices:
            meant = pod.slices[served.name]
            return (
                ""
                if got.slices == frozenset(meant)
                else f"meant was {_text(meant)}, it got {_text(got.slices)}"
            )
        if served.kind is Kind.INIT and pod.slices:
            right = self._of_its_pod(pod, served, got.slices)
        else:
            right = _as_large(
                served.request and self._dialect.effective(served.request), got.slices, self._units
            )
        return (
            ""
            if right
            else (
                f"asked was {served.request} by {served.name} of a pod with {pod.slices}, it got "
                f"{_text(got.slices)}"
            )
        )

    def _alone_in_directory(self, got: Got) -> bool:
        """Tell whether no other running container uses the same directory;
        only then may equal shares be exchanged.
        """
        return all(other.owner != got.owner for other in self._running.values())

    def _of_its_pod(
        self, pod: LivePod, container: PlannedContainer, slices: frozenset[Slice]
    ) -> bool:
        """An init container works on its pod's cards,
        with no more of each than the pod's main containers have together.

        Compute is left out: the variable has one value for all cards, and what was decided may
        differ from card to card.
        """
        request = container.request
        if request is None or len(slices) != request.number:
            return False
        for each in slices:
            decided = [
                part for parts in pod.slices.values() for part in parts if part.uuid == each.uuid
            ]
            units = sum(part.units for part in decided)
            whole = self._units[each.uuid]
            asked = whole if request.memory is None else request.memory
            if not decided or each.units != min(asked, units, whole):
                return False
        return True

    def _crowded(self, got: Got) -> str:
        """Too much memory; or too much compute, or too many holders, of the agent's own placement:
        a scheduler may overcommit those two.
        """
        for card in (each.uuid for each in got.slices):
            held = {
                key: each
                for key, other in self._running.items()
                for each in other.slices
                if each.uuid == card
            }
            placed = [each for key, each in held.items() if key not in self._scheduled]
            units, cores = (
                sum(each.units for each in held.values()),
                sum(each.cores for each in placed),
            )
            if units > self._units[card] or cores > 100 or len(placed) > SPLIT:
                holders = ", ".join(
                    f"{uid} {name}: {each.units}u {each.cores}%"
                    for (uid, name), each in held.items()
                )
                return f"{card} with {self._units[card]} units is now in the hands of {holders}"
        return ""


def _as_large(request: Request | None, slices: frozenset[Slice], units: dict[str, int]) -> bool:
    return (
        request is not None
        and len(slices) == request.number
        and all(each.cores == request.cores for each in slices)
        and all(
            each.units == (units[each.uuid] if request.memory is None else request.memory)
            for each in slices
        )
    )


def _text(slices: Iterable[Slice]) -> str:
    return (
        ", ".join(
            f"{each.uuid} {each.units}u {each.cores}%"
            for each in sorted(slices, key=lambda each: each.uuid)
        )
        or "nothing"
    )


def _booked(
    pod: LivePod, container: PlannedContainer, slices: frozenset[Slice]
) -> frozenset[Slice]:
    """Return what an init container of a scheduled pod takes of each card;
    its variable for compute names the first one only.
    """
    request = container.request
    if container.kind is not Kind.INIT or not pod.slices or request is None:
        return slices
    decided = collections.Counter[str]()
    for part in (part for parts in pod.slices.values() for part in parts):
        decided[part.uuid] += part.cores
    return frozenset(
        dataclasses.replace(each, cores=min(each.cores, request.cores, decided[each.uuid]))
        for each in slices
    )
