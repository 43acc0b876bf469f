"""Right, fair and prompt? Looks at each container of a mixed day,
and at pods that wait while a GPU is idle.

By containers' answers, what the kubelet's records say and what schedulers wrote; nothing is asked
of the agent. `MixedJudge` is asked by `kubelet_model` at each start, `Waits` by `day` every second
and at each pod's end.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from tests.torture.api_model import LivePod
from tests.torture.judge import Judge
from tests.torture.mixed import bounds
from tests.torture.mixed.plan import BY_POD, CARDS, family_of, gpus_behind
from tests.torture.plan import PlannedContainer
from tests.torture.story import Story
from vgpu_agent.isolation.edits import Edits

_UUIDS = frozenset(card.uuid for card in CARDS)


class MixedJudge:
    """Looks at each start.

    State: which running container has which GPUs through which family.
    """

    def __init__(self, story: Story) -> None:
        self._story = story
        self._by_pod = {
            family: Judge(CARDS, story, early=False, dialect=dialect)
            for family, dialect in BY_POD.items()
        }
        self._running: dict[tuple[str, str], tuple[str, frozenset[str]]] = {}
        self.started: set[str] = set()

    def starts(
        self,
        pod: LivePod,
        container: PlannedContainer,
        edits: Edits,
        ids: tuple[str, ...],
        *,
        unasked: bool,
    ) -> None:
        """A container of any family has been created."""
        family = family_of(pod.plan)
        told = _told(edits)
        if (judge := self._by_pod.get(family)) is not None:
            judge.starts(pod, container, edits, ids, unasked=unasked)
        elif told != gpus_behind(ids) or not told:
            self._accuse(pod, f"its ids are {ids}, it was told of {sorted(told)}", ids)
        strangers = {
            other
            for other, gpus in self._running.values()
            if other != family and not gpus.isdisjoint(told)
        }
        if strangers:
            self._accuse(
                pod,
                f"it shares {sorted(told)} with {', '.join(sorted(strangers))}: two families on a "
                "GPU",
                ids,
            )
        self._running[pod.uid, container.name] = family, told & _UUIDS
        self.started.add(pod.uid)

    def ends(self, pod: LivePod, container: str) -> None:
        """The container runs no more."""
        for judge in self._by_pod.values():
            judge.ends(pod, container)
        self._running.pop((pod.uid, container), None)

    def gpus_of(self, uid: str) -> frozenset[str]:
        """The GPUs that the pod's running containers have."""
        return frozenset(
            uuid for (owner, _), (_, gpus) in self._running.items() if owner == uid for uuid in gpus
        )

    def _accuse(self, pod: LivePod, problem: str, ids: tuple[str, ...]) -> None:
        self._story.accuse(f"{pod.namespace}/{pod.name} ({pod.uid}): {problem}", pod.uid, ids=ids)


@dataclasses.dataclass
class Figures:
    """Figures of mixed days.

    Attributes:
        pods: how many came.
        started: how many of them started.
        failed: cause → pods that kubelet refused for good.
        idle: pod → longest seconds that a GPU which could serve it had been idle while it waited,
            where that is too long.
        refused_although_free: pod → seconds that its start was refused although no other family
            held its GPU, where that is too long.
        ends_before_bound: for each bound pod that was refused, the holders of other families that
            ended on its GPU meanwhile.
        ends_before_family: family → the most holders of other families that ended while it waited
            without a placed pod.
        waited_seconds: family → the longest time from a pod's creation to its start.
        handovers: seconds from the end of a GPU's last holder to healthy ids of another family at
            kubelet.
        lists: resource → ListAndWatch messages.
        pod_events: starts and ends of pods.
        stories: of each pod that failed, what happened on the node in the seconds before.
    """

    pods: int = 0
    started: int = 0
    failed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    idle: dict[str, float] = dataclasses.field(default_factory=dict)
    refused_although_free: dict[str, float] = dataclasses.field(default_factory=dict)
    ends_before_bound: list[int] = dataclasses.field(default_factory=list)
    ends_before_family: dict[str, int] = dataclasses.field(default_factory=dict)
    waited_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    handovers: list[float] = dataclasses.field(default_factory=list)
    lists: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    pod_events: int = 0
    stories: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: Figures, day: int) -> None:
        """Another day's figures, with its pods' names made unique."""
        self.pods += other.pods
        self.started += other.started
        self.failed += other.failed
        self.idle |= {f"{day}/{pod}": seconds for pod, seconds in other.idle.items()}
        self.refused_although_free |= {
            f"{day}/{pod}": seconds for pod, seconds in other.refused_although_free.items()
        }
        self.ends_before_bound += other.ends_before_bound
        for family in sorted(other.ends_before_family.keys() | other.waited_seconds.keys()):
            self.ends_before_family[family] = max(
                self.ends_before_family.get(family, 0), other.ends_before_family.get(family, 0)
            )
            self.waited_seconds[family] = max(
                self.waited_seconds.get(family, 0.0), other.waited_seconds.get(family, 0.0)
            )
        self.handovers += other.handovers
        self.lists += other.lists
        self.pod_events += other.pod_events
        self.stories += [f"seed {day}: {story}" for story in other.stories]

    def text(self) -> str:
        """A line for each figure, with the bound it is held to."""
        lists = {
            resource: round(number / max(1, self.pod_events), 2)
            for resource, number in sorted(self.lists.items())
        }
        waited = {family: round(seconds) for family, seconds in self.waited_seconds.items()}
        late = self.refused_although_free.values()
        lines = {
            "pods": f"{self.pods}, started {self.started}",
            "failed of a thousand": (
                f"{self.failed_of_a_thousand:.1f} ({bounds.FAILED_OF_A_THOUSAND:g}) "
                f"{dict(self.failed)}"
            ),
            "waited beside an idle GPU": (
                f"{len(self.idle)} pods, seconds {_spread(self.idle.values())}, at most "
                f"{bounds.IDLE_OF_A_THOUSAND:g} of a thousand pods"
            ),
            "refused although no other family held the GPU": (
                f"{len(late)} pods (0), seconds {_spread(late)}"
            ),
            "ends of others before a bound pod": (
                f"{_spread(self.ends_before_bound)} ({bounds.ENDS_BEFORE_A_BOUND_POD})"
            ),
            "ends of others before a family was placed": f"{self.ends_before_family}",
            "longest wait": f"{waited} s",
            "handovers": f"seconds {_spread(self.handovers)} ({bounds.HANDOVER_P99_SECONDS:g})",
            "lists per pod event": f"{lists} ({bounds.LISTS_OF_A_FAMILY_PER_POD_EVENT:g})",
        }
        return "\n".join(f"{what}: {figure}" for what, figure in lines.items())

    @property
    def failed_of_a_thousand(self) -> float:
        """Failed pods of a thousand that came."""
        return 1000 * sum(self.failed.values()) / max(1, self.pods)

    def violations(self) -> list[str]:
        """The bounds of a node on which nothing fails that do not hold, as sentences.

        Those of a thousand pods are judged once `bounds.PODS_OF_A_RATE` have come.
        """
        idle, late = _some(self.idle), _some(self.refused_although_free)
        rates = (
            (
                self.failed_of_a_thousand,
                bounds.FAILED_OF_A_THOUSAND,
                f"failed of a thousand pods: {dict(self.failed)}",
            ),
            (
                1000 * len(self.idle) / max(1, self.pods),
                bounds.IDLE_OF_A_THOUSAND,
                f"of a thousand pods waited beside an idle GPU: {idle}",
            ),
        )
        checks = (
            *(rates if self.pods >= bounds.PODS_OF_A_RATE else ()),
            (len(self.refused_although_free), 0, f"pods were refused beside a free GPU: {late}"),
            (
                percentile(self.handovers, 0.99),
                bounds.HANDOVER_P99_SECONDS,
                "seconds for the 99th of a hundred handovers",
            ),
        )
        found = [
            f"{value:g}, at most {bound:g}: {what}"
            for value, bound, what in checks
            if value > bound
        ]
        for resource, number in self.lists.items():
            if (
                per_event := number / max(1, self.pod_events)
            ) > bounds.LISTS_OF_A_FAMILY_PER_POD_EVENT:
                found.append(f"{per_event:.1f} lists of {resource} for a pod's start or end")
        return found

    def starvation(self, ends_before_a_family: int = bounds.ENDS_BEFORE_A_FAMILY) -> list[str]:
        """The bounds on waiting, counted in ends of holders, that do not hold."""
        found = []
        if (most := max(self.ends_before_bound, default=0)) > bounds.ENDS_BEFORE_A_BOUND_POD:
            found.append(
                f"{most} holders of other families ended on the GPU of a bound pod, at most "
                f"{bounds.ENDS_BEFORE_A_BOUND_POD}"
            )
        for family, most in self.ends_before_family.items():
            if most > ends_before_a_family:
                found.append(
                    f"{most} holders of other families ended while {family} waited, at most "
                    f"{ends_before_a_family}"
                )
        return found


def percentile(values: Sequence[float], part: float) -> float:
    """The value below which ``part`` of 1 of the values lie; 0 without values."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else 0.0


def _some(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{pod} for {waited:.0f} s" for pod, waited in list(seconds.items())[:5])


def _spread(values: Iterable[float]) -> str:
    known = list(values)
    if not known:
        return "none"
    return (
        f"{len(known)}: p50 {percentile(known, 0.5):.1f}, p99 {percentile(known, 0.99):.1f}, most "
        f"{max(known):.1f}"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """The node at one moment.

    Attributes:
        holders: GPU → family → whether any pod of it has a share, by kubelet's records and by what
            runs.
        claimed: GPUs that schedulers have named for bound pods that have not ended.
        pending: family → created_at of the pods that no scheduler has placed, the oldest first.
        refused: bound pods whose start is refused.
        sound: nothing of the node has failed for a while.
    """

    holders: Mapping[str, frozenset[str]]
    claimed: frozenset[str]
    pending: Mapping[str, Sequence[tuple[str, float]]]
    refused: Sequence[LivePod]
    sound: bool


class Waits:
    """Pods that wait, and the GPUs for which they wait.

    State: since when each GPU is idle, and what ended while a pod waited.
    """

    def __init__(self) -> None:
        self.figures = Figures()
        self._idle_since: dict[str, float] = {}
        # UID → since when no other family holds the GPU of a refused pod
        self._free_since: dict[str, float] = {}
        self._ends_of_bound: collections.Counter[str] = collections.Counter()  # by UID
        self._ends_of_family: collections.Counter[str] = collections.Counter()
        self._refused: dict[str, LivePod] = {}
        self._pending: Mapping[str, Sequence[tuple[str, float]]] = {}
        # GPU → since when it is free, and the family that had it last
        self._released: dict[str, tuple[float, str]] = {}

    def look(self, seen: Seen, now: float) -> None:
        """Take note of the node at this moment."""
        for uuid in _UUIDS:
            if seen.holders.get(uuid) or uuid in seen.claimed or not seen.sound:
                self._idle_since.pop(uuid, None)
            else:
                self._idle_since.setdefault(uuid, now)
            if seen.holders.get(uuid):
                self._released.pop(uuid, None)
        idle = max((now - since for since in self._idle_since.values()), default=0.0)
        self._pending = seen.pending
        for family, waiting in seen.pending.items():
            if not waiting:
                self._ends_of_family[family] = 0
            for name, created_at in waiting:
                if (seconds := min(idle, now - created_at)) > bounds.IDLE_SECONDS:
                    self.figures.idle[name] = max(seconds, self.figures.idle.get(name, 0.0))
        self._look_at_refused(seen, now)

    def _look_at_refused(self, seen: Seen, now: float) -> None:
        self._refused = {pod.uid: pod for pod in seen.refused}
        for gone in self._free_since.keys() - self._refused.keys():
            del self._free_since[gone]
        for uid, pod in self._refused.items():
            family = family_of(pod.plan)
            if not seen.sound or any(
                seen.holders.get(uuid, frozenset()) - {family} for uuid in named_by_scheduler(pod)
            ):
                self._free_since.pop(uid, None)
                continue
            seconds = now - self._free_since.setdefault(uid, now)
            if seconds > bounds.REFUSED_ALTHOUGH_FREE_SECONDS:
                self.figures.refused_although_free[pod.name] = seconds

    def ended(
        self, pod: LivePod, gpus: frozenset[str], *, last_of: Iterable[str], now: float
    ) -> None:
        """A pod that held a share of ``gpus`` has ended;
        of ``last_of`` among them it was the last holder.
        """
        self.figures.pod_events += 1
        if not gpus:
            return
        family = family_of(pod.plan)
        for other, waiting in self._pending.items():
            if waiting and other != family:
                self._ends_of_family[other] += 1
                self.figures.ends_before_family[other] = max(
                    self._ends_of_family[other], self.figures.ends_before_family.get(other, 0)
                )
        for uid, refused in self._refused.items():
            if family_of(refused.plan) != family and not gpus.isdisjoint(
                named_by_scheduler(refused)
            ):
                self._ends_of_bound[uid] += 1
        for uuid in last_of:
            self._released[uuid] = now, family

    def placed(self, plan_family: str) -> None:
        """A scheduler has placed a pod of the family."""
        self._ends_of_family[plan_family] = 0

    def started(self, pod: LivePod, now: float) -> None:
        """The pod runs."""
        self.figures.started += 1
        self.figures.pod_events += 1
        family = family_of(pod.plan)
        self.figures.waited_seconds[family] = max(
            now - pod.created_at, self.figures.waited_seconds.get(family, 0.0)
        )
        if pod.uid in self._ends_of_bound:
            self.figures.ends_before_bound.append(self._ends_of_bound.pop(pod.uid))

    def given_up(self, pod: LivePod) -> None:
        """The pod has ended without a start."""
        if pod.uid in self._ends_of_bound:
            self.figures.ends_before_bound.append(self._ends_of_bound.pop(pod.uid))

    def listed(self, resource: str, family: str, gpus: frozenset[str], now: float) -> None:
        """The kubelet has a new list of a resource whose ids name GPUs,
        in which those of ``gpus`` are healthy.
        """
        self.figures.lists[resource] += 1
        self.reached(family, gpus, now)

    def reached(self, family: str, gpus: frozenset[str], now: float) -> None:
        """The kubelet may give ``gpus`` to pods of the family."""
        for uuid in [
            uuid for uuid, (_, last) in self._released.items() if uuid in gpus and last != family
        ]:
            self.figures.handovers.append(now - self._released.pop(uuid)[0])


def named_by_scheduler(pod: LivePod) -> frozenset[str]:
    """The GPUs that a scheduler has named for the pod."""
    return frozenset(part.uuid for parts in pod.slices.values() for part in parts)


def _told(edits: Edits) -> frozenset[str]:
    """The GPUs of which a container is told, by UUID or by number."""
    named = edits.environment.get("NVIDIA_VISIBLE_DEVICES", "").split(",")
    return frozenset(
        CARDS[int(name)].uuid if name.isdecimal() and int(name) < len(CARDS) else name
        for name in named
        if name
    )
