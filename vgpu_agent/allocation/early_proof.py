"""Prove an early answer: the container about to start must have got the right answer in Allocate.

Called by `binder` at each PreStartContainer in early mode. A wrong answer cannot be changed any more, so it is refused for good, unless its
owner has this container's answer and both shares are equal.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NoReturn

from vgpu_agent.allocation.guesses import Evidence, Verdict, leads_into
from vgpu_agent.allocation.overcommits import may_overcommit
from vgpu_agent.allocation.proof import NotProvenError
from vgpu_agent.allocation.questions import question
from vgpu_agent.errors import RequestRefusedError
from vgpu_agent.families.device_lists import VISIBLE_DEVICES
from vgpu_agent.isolation.hami_core import DECISIVE, REGION_VARIABLE
from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from vgpu_agent.allocation.dependencies import Dependencies
    from vgpu_agent.allocation.guesses import Guesses
    from vgpu_agent.allocation.starting import Start
    from vgpu_agent.families.family import Question
    from vgpu_agent.isolation.edits import Provision
    from vgpu_agent.ledger import Ledger
    from vgpu_agent.model import Inventory, Share


class WrongPodError(RequestRefusedError):
    """The answer that kubelet keeps for this container is another pod's; the pod must be created anew."""


class EarlyProof:
    """The judge of early answers, which are in ``guesses``; its own state are two counters for metrics."""

    def __init__(self, *, ledger: Ledger, inventory: Callable[[], Inventory], dependencies: Dependencies, guesses: Guesses) -> None:
        self._ledger = ledger
        self._inventory = inventory
        self._around = dependencies
        self._guesses = guesses
        self.wrong_guesses = 0
        self.exchanges = 0

    def prove(self, start: Start, shares: tuple[Share, ...]) -> tuple[list[Provision], str]:
        """Return what must be on the host for the kept answers, and the container that exchanged its answer with this one, if any.

        Args:
            start: the container, proven.
            shares: what it should have.

        Raises:
            WrongPodError: the answer is another container's.
            RequestRefusedError: its pod sets variables that the answer depends on.
            NotProvenError: that is not certain yet.
            LedgerError: it is an init container, and its pod does not fit now.
        """
        # Without the checkpoint only this container is known to have the ids.
        names = start.found.containers.get(start.owner.pod_uid, (start.owner.container,))
        expected = {name: self._provision(start, name, shares) for name in names}
        if self._around.settings.pod_variables != "allow":
            _refuse_own_variables(start, expected)
        own = {(start.owner.pod_uid, name, start.offered.name) for name in expected}
        answers = {key[1]: answer for key, answer in start.kubelet_evidence.answers.items() if key in own}
        evidence = Evidence(
            key=start.key,
            shares=shares,
            expected=expected,
            answers=answers,
            elsewhere=[answer for key, answer in start.kubelet_evidence.answers.items() if key not in own],
            handed_on=any(each.kind is ContainerKind.INIT and each.limits.get(start.offered.name) for each in start.pod.containers),
        )
        exchanged = ""
        given, provisions = self._guesses.given.get(start.token), list(expected.values())
        match self._guesses.judge(start.token, evidence, self._is_gone):
            case Verdict.LATER:
                raise NotProvenError(
                    f"{start.pod.full_name}, container {start.owner.container}: it is not clear yet whether the answer that kubelet keeps "
                    "for it is its own (binding.mode early); kubelet will ask again"
                )
            case Verdict.WRONG:
                self._refute(start)
            case Verdict.EXCHANGE:
                self.exchanges += 1
                meant_for = self._guesses.exchange(start.token, start.key)
                for grant in self._ledger.grants:
                    if grant.decided_for == start.key and grant.resource == start.offered.name:
                        self._ledger.redirect(grant.number, meant_for)
                exchanged = f"exchanged with {self._called(meant_for[0])}, whose share is equal"
        if given is not None and given.provision.edits in answers.values() and given.provision not in provisions:
            provisions = [given.provision]  # exchanged, now or before: what the answer names is what must be there
        self._make_room_for_init(start, names)
        kept = answers.values()
        return [dataclasses.replace(each, remade=any(leads_into(each.before, answer) for answer in kept)) for each in provisions], exchanged

    def _make_room_for_init(self, start: Start, names: Collection[str]) -> None:
        """Book all that was decided for the pod, before an init container runs on another container's part of it.

        An init container that shares its ids with a later container got its own share in Allocate, and the ledger has the later one's under
        these ids. It takes no more of a card than the pod has of it. So with the whole pod in the ledger nothing of it is given away
        meanwhile.

        Raises:
            NotProvenError: not all of the pod's containers are in the ledger yet.
            LedgerError: the pod does not fit now.
        """
        uid, containers = start.owner.pod_uid, start.pod.containers
        first = next((place for place, each in enumerate(containers) if each.name in names and each.kind is ContainerKind.INIT), None)
        if first is None or len(names) == 1:
            return
        later = [each for each in containers[first + 1 :] if each.name not in names]
        recorded = {record.owner.container for record in self._around.carrier.records if record.owner.pod_uid == uid}
        if any(each.started or each.name in recorded for each in later):
            return  # then this init container has ended
        for each in later:
            if each.kind is not ContainerKind.INIT and each.limits.get(start.offered.name):
                self._book_ahead(start, each.name)

    def _book_ahead(self, start: Start, container: str) -> None:
        key, owner = (start.owner.pod_uid, container), dataclasses.replace(start.owner, container=container)
        grants = [grant for grant in self._ledger.grants if grant.resource == start.offered.name]
        own = [
            grant
            for grant in grants
            if grant.decided_for == key or (grant.decided_for is None and grant.owner and grant.owner.may_be(owner))
        ]
        if not own:
            raise NotProvenError(f"{start.pod.full_name}: the ids of its container {container} are not known yet; kubelet will ask again")
        for grant in own:
            if not grant.shares:
                decision = start.family.decide(self._question(start, container, grant.ids))
                may = may_overcommit(decision, start.pod, self._around.settings)
                self._ledger.fill(grant.number, decision.shares, key, may_overcommit=may)

    def _refute(self, start: Start) -> NoReturn:
        self.wrong_guesses += 1
        self._ledger.decide(start.offered.name, start.ids, (), start.owner, evidence=("refused: answered for another pod",))
        given = self._guesses.refuted(start.token, start.key)
        whose = f"the container {given.decided_for[1]} of {self._called(given.decided_for[0])}" if given else "another container"
        raise WrongPodError(
            f"kubelet's answer for this container was made for {whose}, because Allocate does not say whose it is and this node's "
            "runtime cannot be told later (binding.mode early); delete the pod, so that it is created anew"
        )

    def _provision(self, start: Start, container: str, shares: tuple[Share, ...]) -> Provision:
        """Return the answer that a container with these ids should have got; one before the last decides by itself."""
        asked = self._question(start, container, start.ids)
        own = shares if container == start.owner.container else start.family.decide(asked).shares
        return start.family.provision(asked, own)

    def _is_gone(self, uid: str) -> bool:
        pod = self._around.book.get(uid)
        return self._around.book.synced.is_set() and (pod is None or pod.ended)

    def _question(self, start: Start, container: str, ids: Sequence[str]) -> Question:
        return question(self._ledger, start.offered, start.pod, container, ids, node=self._around.node, inventory=self._inventory())

    def _called(self, uid: str) -> str:
        pod = self._around.book.get(uid)
        return pod.full_name if pod else f"pod {uid}"


def _refuse_own_variables(start: Start, expected: Mapping[str, Provision]) -> None:
    """Refuse a container that overrides its answer: the kubelet puts the pod's own variables after the device plugin's, so they win.

    A container that has run before goes on: an agent that is newer than its pods must not stop them from restarting.
    """
    for name, provision in expected.items():
        container = start.pod.container(name)
        if container is None or container.started:
            continue
        answered = provision.edits.environment.keys()
        decisive = answered & {VISIBLE_DEVICES} | (DECISIVE if REGION_VARIABLE in answered else frozenset())
        if own := sorted(container.environment & decisive):
            raise RequestRefusedError(
                f"the pod sets {', '.join(own)} for container {name} itself, and with early binding its value beats the agent's: the "
                "container could take another GPU or leave its limit; take it out of the pod, bind late (binding.mode), or set "
                "binding.podVariables to allow"
            )
