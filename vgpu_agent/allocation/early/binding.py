"""Answer in Allocate by a guess, and prove at PreStartContainer that the answer is right.

The kubelet does not name the pod in Allocate, so the answer is made for the likeliest container
(`candidates`). At PreStartContainer the kubelet's records name the container. A wrong answer cannot
be changed any more, so the start is refused permanently, with one exception: two containers with
equal shares may have each other's answers (`answers`).
"""

from __future__ import annotations

import asyncio
import collections
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import msgspec

from vgpu_agent.allocation.candidates import candidates
from vgpu_agent.allocation.carrier import grant_token
from vgpu_agent.allocation.early.answers import Answers, Given, StartFacts, Verdict, leads_into
from vgpu_agent.allocation.early.siblings import Siblings, likeliest
from vgpu_agent.allocation.identification import NotProvenError
from vgpu_agent.allocation.overcommits import may_overcommit
from vgpu_agent.allocation.questions import question
from vgpu_agent.errors import (
    AgentError,
    CapacityError,
    LedgerError,
    RequestRefusedError,
    UnhealthyDeviceError,
    shortened_ids,
)
from vgpu_agent.families.device_lists import VISIBLE_DEVICES
from vgpu_agent.isolation.edits import Edits, Provision
from vgpu_agent.isolation.registry import decisive_variables
from vgpu_agent.model import Decider
from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from vgpu_agent.allocation.candidates import Candidate
    from vgpu_agent.allocation.claims import Claims
    from vgpu_agent.allocation.context import Context
    from vgpu_agent.allocation.ended_pods import EndedPods
    from vgpu_agent.allocation.identification import Start
    from vgpu_agent.families.family import Decision, PodFamily, Question
    from vgpu_agent.model import Grant, KubeletRecords, Resource, Share
    from vgpu_agent.pods import Pod

# How long Allocate waits for a pod that the watch has not shown yet; the kubelet admits nothing
# else meanwhile.
ALLOCATE_WAIT_SECONDS = 0.8
# The answer without a GPU. Without any answer, many runtimes would follow the image's own
# NVIDIA_VISIBLE_DEVICES, and images for GPUs ask for all GPUs.
_NOTHING = Edits({"NVIDIA_VISIBLE_DEVICES": "void"})


class WrongPodError(RequestRefusedError):
    """The answer that the kubelet keeps for this container is another pod's;
    the pod must be recreated.
    """


class _Guess(NamedTuple):
    """The container to decide for, and its pod; ``alone`` when no other container fits."""

    candidate: Candidate
    alone: bool


class EarlyBinding:
    """The answers of early mode, and their proof.

    State: the answers of this process, and the container for which each was made. After a restart
    the containers are derived from the kubelet's records, and the answers are not needed.

    Attributes:
        wrong_guesses: the number of starts that were refused for good because the answer was
            another container's.
        exchanges: how often two containers have kept each other's answers.
    """

    def __init__(self, context: Context, *, claims: Claims, ended_pods: EndedPods) -> None:
        self._context = context
        self._ledger = context.ledger
        self._claims = claims
        self._ended_pods = ended_pods
        # the calls of Allocate for other resources of the same container
        self._siblings = Siblings()
        self._answers = Answers()
        self.wrong_guesses = 0
        self.exchanges = 0

    # -- Allocate ----------------------------------------------------------------------------------

    def note_counted_ids(self, resource: str, count: int) -> None:
        """Note that the kubelet has allocated ``count`` ids of a resource that exists only for
        schedulers to count. This hints at the container of the next call.
        """
        self._siblings.note_allocated(resource, count)

    async def allocate(
        self, offered: Resource, ids: Sequence[str], family: PodFamily
    ) -> tuple[Grant, Edits]:
        """Book the ids for the likeliest container, and return its complete answer. Wait up to
        ``ALLOCATE_WAIT_SECONDS`` for a pod that the watch has not shown yet.

        Raises:
            RequestRefusedError: no pod fits, or the only one that does cannot get what it asks for.
            LedgerError: the ids cannot be granted.
        """
        guess = await self._guess(offered, ids, family)
        if guess is None:
            # The words before the colon are those that users of the replaced plugin know
            # (volcano-vgpu G11).
            raise RequestRefusedError(
                f"cannot get valid pod: no pending pod on node {self._context.node} has a "
                f"container that waits for {len(ids)} of {offered.name}; see /debug/pods"
            )
        # `candidate.key`: the UID of the pod, and the name of the container
        candidate, token = guess.candidate, grant_token(offered.name, ids)
        decision = self._decide_for(offered, candidate, ids, family)
        if isinstance(decision, AgentError):
            if guess.alone:
                raise decision
            # Another pod may be meant, and an error would fail it for good. At the start the pod is
            # known, and the kubelet asks again.
            self._context.journal.record(
                "allocate.unanswered",
                level="warning",
                resource=offered.name,
                ids=shortened_ids(ids),
                reason=str(decision),
            )
            grant, given = (
                self._ledger.reserve(offered.name, ids, shares=(), decided_for=candidate.key),
                Given(decided_for=candidate.key, shares=(), provision=Provision(_NOTHING)),
            )
        else:
            try:
                may = may_overcommit(decision, candidate.pod, self._context.settings)
                grant = self._ledger.reserve(
                    offered.name,
                    ids,
                    decision.shares,
                    decided_for=candidate.key,
                    may_overcommit=may,
                )
            except (CapacityError, UnhealthyDeviceError):
                # A refusal here would be final; at the start it is not, and by then a pod that is
                # ending may have made room. So only the ids are booked now.
                grant = self._ledger.reserve(
                    offered.name, ids, shares=(), decided_for=candidate.key
                )
            asked = self._question(offered, candidate.pod, candidate.container.name, ids)
            provision = family.provision(asked, decision.shares)
            given = Given(
                decided_for=candidate.key,
                shares=decision.shares,
                provision=provision,
                remarks=decision.remarks,
            )
        # `NOBODY`: resources that exist only for schedulers to count
        counted = [
            offer.name for offer in self._ledger.resources if offer.decided_by is Decider.NOBODY
        ]
        self._siblings.note_decision(candidate.container.limits, counted)
        self._answers.note_answer(token, given)
        return grant, given.provision.edits

    async def _guess(
        self, offered: Resource, ids: Sequence[str], family: PodFamily
    ) -> _Guess | None:
        """Return the candidate to decide for; wait up to ``ALLOCATE_WAIT_SECONDS`` for a pod
        that the watch has not shown yet.

        The kubelet may have rejected a pod and gone on to the next one; the status follows within
        that time. The status is waited for where the likeliest pod would be refused, and where no
        scheduler has placed that pod while others fit as well.
        """
        pods, now = self._context.pods, asyncio.get_running_loop().time
        until = now() + ALLOCATE_WAIT_SECONDS
        # resource → how many ids there are; a pod that asks for more is never admitted
        existing = {offer.name: len(offer.ids) for offer in self._ledger.resources}
        while True:
            version = pods.revision.version
            found = candidates(
                pods.pods,
                self._answers.answered,
                offered.name,
                count=len(ids),
                node=self._context.node,
                id_counts=existing,
                # the last pod that got ids from the kubelet, in the order of binds
                admitted_up_to=self._answers.admitted_up_to,
            )
            likely, left = likeliest(found, self._siblings), until - now()
            if likely is not None:
                alone = len(found) == 1
                refused = isinstance(self._decide_for(offered, likely, ids, family), AgentError)
                if left <= 0 or not (refused or (not alone and not likely.pod.scheduled)):
                    return _Guess(likely, alone)
            elif left <= 0:
                return None
            try:
                async with asyncio.timeout(max(left, 0)):
                    await pods.revision.newer_than(version)
            except TimeoutError:
                if likely is None:
                    return None

    def _decide_for(
        self, offered: Resource, candidate: Candidate, ids: Sequence[str], family: PodFamily
    ) -> Decision | AgentError:
        """Return the decision for a candidate, or the error that prevents one."""
        pod = candidate.pod
        try:
            pod.refuse_more_requests()
            decision = family.decide(self._question(offered, pod, candidate.container.name, ids))
            exceeding = self._device_exceeding_later_containers(
                offered, candidate, decision, family
            )
        except (RequestRefusedError, LedgerError) as err:
            return type(err)(f"pod {pod.full_name}, container {candidate.container.name}: {err}")
        if decision.layouts:
            return RequestRefusedError(
                f"pod {pod.full_name}: a GPU has to be divided for it, which needs binding.mode "
                "late"
            )
        if decision.by_agent and candidate.container.kind is ContainerKind.INIT:
            # This container and the one after it would each get a share of its own for the same
            # ids, and only one of the two can be booked.
            return RequestRefusedError(
                f"pod {pod.full_name}: an init container that asks for {offered.name} needs a "
                "scheduler that decides for the pod, or binding.mode late"
            )
        if exceeding:
            return RequestRefusedError(
                f"pod {pod.full_name}: init container {candidate.container.name} has more of GPU "
                f"{exceeding} than its pod's sidecars and main containers together, and hands its "
                "ids on to them, which needs binding.mode late"
            )
        return decision

    def _device_exceeding_later_containers(
        self, offered: Resource, candidate: Candidate, decision: Decision, family: PodFamily
    ) -> str:
        """Return a device of which an init container with shares of its own gets more than the
        pod's lasting containers (sidecars and main ones) have together, where one of these may have
        its ids; empty if there is none.

        While the init container runs, the ledger has the shares of the later containers under these
        ids (`_book_pod_before_init`).
        """
        pod, container, name = candidate.pod, candidate.container, offered.name
        lasting = [
            each
            for each in pod.containers
            if each.kind is not ContainerKind.INIT and each.limits.get(name, 0) > 0
        ]
        count = container.limits[name]
        if (
            not offered.init_shares
            or container.kind is not ContainerKind.INIT
            # only a container with as many ids can have exactly the same ones
            or all(each.limits[name] != count for each in lasting)
        ):
            return ""
        memory, cores = collections.Counter[str](), collections.Counter[str]()
        for each in lasting:
            # the ids are not known, and a decision depends on their number only
            ids = ("",) * min(each.limits[name], len(offered.ids))
            asked = self._question(offered, pod, each.name, ids)
            for share in family.decide(asked).shares:
                memory[share.device] += share.memory_mib
                cores[share.device] += share.cores_percent
        return next(
            (
                share.device
                for share in decision.shares
                if share.memory_mib > memory[share.device]
                or share.cores_percent > cores[share.device]
            ),
            "",
        )

    # -- PreStartContainer -------------------------------------------------------------------------

    def has_answered(self, token: str) -> bool:
        """Tell whether this process has answered for the ids of ``token``."""
        return token in self._answers.given

    async def prove(
        self,
        start: Start,
        decide: Callable[[Start], Decision],
        book: Callable[[Start, Decision, str], Grant],
    ) -> Grant:
        """Let a container start with the answer it has, if that is the right one.

        Args:
            start: the container, as the kubelet's records name it without doubt.
            decide: makes the decision for the container.
            book: books the decision; the last argument names the decider.

        Raises:
            WrongPodError: the answer is another container's.
            RequestRefusedError: its pod sets variables that the answer depends on, or cannot get
                what it asks for.
            NotProvenError: the kubelet's records are not complete yet.
            LedgerError: the decision cannot be booked now.
            HostFileError: a file could not be put in place.
        """
        self._answers.note_admission(start.pod)

        def attempt() -> tuple[Decision, list[Provision], str]:
            decision = decide(start)
            if decision.layouts:
                raise RequestRefusedError(
                    "a GPU would have to be divided for the container, which needs binding.mode "
                    "late"
                )
            return decision, *self._prove(start, decision.shares)

        # `with_room` tries again once ended pods have made room
        decision, provisions, exchanged = await self._ended_pods.with_room(start, attempt)
        decider = decision.by  # in words
        # The answer that the kubelet keeps is proven for these shares, so only their booking is
        # tried again.
        grant = await self._ended_pods.with_room(
            start,
            lambda: book(start, decision, f"{decider}; {exchanged}" if exchanged else decider),
        )
        for provision in provisions:
            record = self._context.new_record(
                start.token, len(start.ids), start.pod, start.owner, grant, decider, provision
            )
            await self._context.carrier.write_host_files(record, provision)
        remarks = decision.remarks or self._answers.take_remarks(start.token, start.key)
        self._context.notices.add_remarks(start.pod, start.owner.container, remarks)
        return grant

    def _prove(self, start: Start, shares: tuple[Share, ...]) -> tuple[list[Provision], str]:
        """Return the provisions (edits, and what must be on the host) of the answers that the
        kubelet keeps, and a text about the container that has exchanged its answer with this one,
        if any.
        """
        # This container and those before it with the same ids. Without the checkpoint only this one
        # is known to have them.
        names = start.id_records.containers.get(start.owner.pod_uid, (start.owner.container,))
        expected = {name: self._provision(start, name, shares) for name in names}
        if self._context.settings.pod_variables != "allow":
            _refuse_own_variables(start, expected)
        # the keys of the answers that the kubelet keeps: UID of the pod, container, resource
        own = {(start.owner.pod_uid, name, start.offered.name) for name in expected}
        answers = {
            key[1]: answer for key, answer in start.kubelet_evidence.answers.items() if key in own
        }
        facts = StartFacts(
            key=start.key,
            shares=shares,
            expected=expected,
            answers=answers,
            # an answer that another container has as well counts as wrong
            elsewhere=[
                answer for key, answer in start.kubelet_evidence.answers.items() if key not in own
            ],
            # if so, and while `answers` is empty, it is not known which container starts, so the
            # verdict has to wait
            has_init_requests=any(
                each.kind is ContainerKind.INIT and each.limits.get(start.offered.name)
                for each in start.pod.containers
            ),
        )
        exchanged = ""
        given, provisions = self._answers.given.get(start.token), list(expected.values())
        match self._answers.judge(start.token, facts, self._is_gone):
            case Verdict.LATER:
                raise NotProvenError(
                    f"{start.pod.full_name}, container {start.owner.container}: it is not known "
                    "yet whether the answer that the kubelet keeps was made for it (binding.mode "
                    "early); the kubelet will retry"
                )
            case Verdict.WRONG:
                self._refuse_wrong_answer(start)
            case Verdict.EXCHANGE:
                self.exchanges += 1
                meant_for = self._answers.exchange(start.token, start.key)
                for grant in self._ledger.grants:
                    if grant.decided_for == start.key and grant.resource == start.offered.name:
                        # the shares of that grant are the other container's from now on
                        self._ledger.redirect(grant.number, meant_for)
                exchanged = f"exchanged with {self._pod_text(meant_for[0])}, whose share is equal"
        if (
            given is not None
            and given.provision.edits in answers.values()
            and given.provision not in provisions
        ):
            # exchanged, now or before: the files that the kept answer names must be there
            provisions = [given.provision]
        self._book_pod_before_init(start, names)
        # An answer of an earlier version of the agent mounts `earlier_directory`. Then that
        # directory is made anew as well.
        kept = answers.values()
        return [
            msgspec.structs.replace(
                each,
                replaces_earlier=any(leads_into(each.earlier_directory, answer) for answer in kept),
            )
            for each in provisions
        ], exchanged

    def _book_pod_before_init(self, start: Start, names: Collection[str]) -> None:
        """Book the shares of all later containers before an init container starts that has the same
        ids as one of them.

        The init container's own share is not in the ledger: under the ids that it has in common
        with a later container, the ledger has the share of that one. But it uses no more of a card
        than the whole pod has. So once the whole pod is booked, no other pod gets what it uses.
        ``names`` are the containers with the ids of the start.

        Raises:
            NotProvenError: not all of the pod's containers are in the ledger yet.
            LedgerError: the pod does not fit now.
        """
        uid, containers = start.owner.pod_uid, start.pod.containers
        first = next(
            (
                place
                for place, each in enumerate(containers)
                if each.name in names and each.kind is ContainerKind.INIT
            ),
            None,
        )
        if first is None or len(names) == 1:
            return
        later = [each for each in containers[first + 1 :] if each.name not in names]
        recorded = {
            record.owner.container
            for record in self._context.carrier.records
            if record.owner.pod_uid == uid
        }
        if any(each.started or each.name in recorded for each in later):
            return  # then this init container has ended
        for each in later:
            if each.kind is not ContainerKind.INIT and each.limits.get(start.offered.name):
                self._book_ahead(start, each.name)

    def _book_ahead(self, start: Start, container: str) -> None:
        """Book the shares of a later container of the pod, whose ids are booked already."""
        key, owner = (
            (start.owner.pod_uid, container),
            msgspec.structs.replace(start.owner, container=container),
        )
        grants = [grant for grant in self._ledger.grants if grant.resource == start.offered.name]
        own = [
            grant
            for grant in grants
            if grant.decided_for == key
            or (grant.decided_for is None and grant.owner and grant.owner.may_be(owner))
        ]
        if not own:
            raise NotProvenError(
                f"{start.pod.full_name}: the ids of its container {container} are not known yet; "
                "the kubelet will retry"
            )
        for grant in own:
            if not grant.shares:
                decision = start.family.decide(
                    self._question(start.offered, start.pod, container, grant.ids)
                )
                may = may_overcommit(decision, start.pod, self._context.settings)
                self._ledger.fill(
                    grant.number, decision.shares, decided_for=key, may_overcommit=may
                )

    def _refuse_wrong_answer(self, start: Start) -> NoReturn:
        """Refuse the start for good, because the answer is another container's."""
        self.wrong_guesses += 1
        # the ids stay with the container, without shares
        self._ledger.decide(
            start.offered.name,
            start.ids,
            shares=(),
            owner=start.owner,
            evidence=("refused: answered for another pod",),
        )
        given = self._answers.note_wrong_answer(start.token, start.key)
        whose = (
            f"the container {given.decided_for[1]} of {self._pod_text(given.decided_for[0])}"
            if given
            else "another container"
        )
        raise WrongPodError(
            f"the kubelet's answer for this container was made for {whose}, because Allocate "
            "does not name the pod and that answer cannot be changed later (binding.mode early); "
            "delete the pod, so that a new one is created"
        )

    def _provision(self, start: Start, container: str, shares: tuple[Share, ...]) -> Provision:
        """Return the right answer for a container with these ids and shares."""
        asked = self._question(start.offered, start.pod, container, start.ids)
        own = shares if container == start.owner.container else start.family.decide(asked).shares
        return start.family.provision(asked, own)

    def _is_gone(self, uid: str) -> bool:
        pod = self._context.pods.get(uid)
        return self._context.pods.synced.is_set() and (pod is None or pod.ended)

    def _question(
        self, offered: Resource, pod: Pod, container: str, ids: Sequence[str]
    ) -> Question:
        self._claims.refresh()  # another pod may have been bound since the last look
        return question(self._context, offered, pod, container, ids)

    def _pod_text(self, uid: str) -> str:
        pod = self._context.pods.get(uid)
        return pod.full_name if pod else f"pod {uid}"

    # -- after a start -----------------------------------------------------------------------------

    def after_verification(self, records: KubeletRecords) -> None:
        """Follow the kubelet's records, with which the ledger has just been brought in line;
        forget pods that are gone.
        """
        holders = (
            (holding.owner.pod_uid, holding.owner.container)
            for holding in records.holdings
            if holding.owner.pod_uid
        )
        # the holders have their answers; a container that Allocate guessed wrongly has none yet
        self._answers.learn(holders, self._ledger.grants)
        if self._context.pods.synced.is_set():
            # `kubelet_uid`: as in the kubelet's records; a static pod's mirror has another UID
            self._answers.keep_only({pod.kubelet_uid for pod in self._context.pods.pods})
            if self._answers.given:
                self._answers.keep_tokens(
                    {grant_token(grant.resource, grant.ids) for grant in self._ledger.grants}
                )


def _refuse_own_variables(start: Start, expected: Mapping[str, Provision]) -> None:
    """Refuse a container that overrides its answer: the kubelet puts the pod's own variables after
    the device plugin's, so they win.

    A container that has run before may start again: an upgrade of the agent must not stop running
    pods from restarting.
    """
    for name, provision in expected.items():
        container = start.pod.container(name)
        if container is None or container.started:
            continue
        answered = provision.edits.environment.keys()
        decisive = answered & {VISIBLE_DEVICES} | decisive_variables(answered)
        if own := sorted(container.environment & decisive):
            raise RequestRefusedError(
                f"the pod sets {', '.join(own)} for container {name} itself, and with early "
                "binding its value overrides the agent's: the container could use another GPU or "
                "escape its limit; remove it from the pod, bind late (binding.mode), or set "
                "binding.podVariables to allow"
            )
