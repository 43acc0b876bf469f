"""The late start: bind ids to the container that has them, at the moment when it starts.

The kubelet allocates ids before it names their pod. So the answer to Allocate is only a CDI name
that stands for the ids, and the rest happens when the kubelet announces the start of their
container with PreStartContainer:

1. *Identify* the container by the kubelet's own records (`identification`).
2. *Decide* what it gets: what it once got, or else what its family reads in its pod.
3. *Book* the decision in the ledger, if necessary after ended pods have made room or a GPU was
   divided.
4. *Deliver* it: the files on the host, then the CDI spec under that name. Only then may the
   container start.

The kubelet waits up to 30 s and asks again after a refusal, whose text the user sees in the pod's
status. On nodes whose runtime does not resolve CDI names, Allocate has guessed the pod and answered
for it. There `early` proves in place of step 4 that the answer is right, and no container starts by
a guess.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent import log
from vgpu_agent.allocation import advice
from vgpu_agent.allocation.ambiguities import Ambiguities
from vgpu_agent.allocation.carrier import CDI_KIND, GrantRecord, cdi_name, grant_token
from vgpu_agent.allocation.claims import resources_of_other_families
from vgpu_agent.allocation.division import Division
from vgpu_agent.allocation.early.binding import WrongPodError
from vgpu_agent.allocation.holdings import ended_before, is_outdated
from vgpu_agent.allocation.identification import Identification, NotProvenError
from vgpu_agent.allocation.overcommits import may_overcommit, why_no_overcommit
from vgpu_agent.allocation.questions import question
from vgpu_agent.errors import (
    AgentError,
    CapacityError,
    HostFileError,
    LedgerError,
    MigError,
    OvercommitError,
    RequestRefusedError,
    UnhealthyDeviceError,
)
from vgpu_agent.families.family import Decision
from vgpu_agent.isolation.edits import Edits
from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from vgpu_agent.allocation.claims import Claims
    from vgpu_agent.allocation.context import Context
    from vgpu_agent.allocation.early.binding import EarlyBinding
    from vgpu_agent.allocation.ended_pods import EndedPods
    from vgpu_agent.allocation.identification import Start
    from vgpu_agent.families.family import PodFamily, Question
    from vgpu_agent.isolation.edits import Provision
    from vgpu_agent.model import DeviceRoom, Grant, Resource, Share

_logger = log.get(__name__)

MIG_PREFIX = "MIG-"  # of the UUIDs of MIG instances, by NVML


class LateStart:
    """The binding of ids to containers whose pods decide.

    State: the containers that were decided for and allowed to start (`started`), until their pods
    are gone; and the tokens that Allocate has answered with and no decision was booked for since
    (`_answered_tokens`). A start from an earlier spec changes neither. After a restart both are
    empty, and the ledger alone has the grants. There are also locks, the times of ambiguities,
    filters of repeated messages, and caches.

    Attributes:
        started: (UID, container, resource) → the grant.
    """

    def __init__(
        self, context: Context, *, claims: Claims, ended_pods: EndedPods, early: EarlyBinding
    ) -> None:
        self._context = context
        self._claims = claims
        self._ended_pods = ended_pods
        self._early = early
        self._identification = Identification(context)
        self._division = Division(context)
        # token → its lock, and how many hold it or wait for it
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}
        # the refusals of starts and the failed deliveries that were logged, by token: both are
        # tried again and again, and logged again only when the reason changes
        self._journalled_refusals = log.ChangeFilter()
        self._failed_deliveries = log.ChangeFilter()
        self._answered_tokens: set[str] = set()
        # the last verification was before the first list of pods, and found holders without shares
        self._pods_unread = False
        # number of a grant → its ids, and the token of these
        self._tokens: dict[int, tuple[tuple[str, ...], str]] = {}
        # the ledger's version, and its grants then
        self._by_token: tuple[int, dict[str, Grant]] = -1, {}
        self.started: dict[tuple[str, str, str], Grant] = {}
        self._ambiguities = Ambiguities(context)

    @property
    def ambiguities(self) -> int:
        """The number of starts that were refused because the kubelet's records named several
        holders.
        """
        return self._ambiguities.total

    # -- Allocate ----------------------------------------------------------------------------------

    def allocate(
        self, offered: Resource, ids: Sequence[str], *, by_annotation: bool
    ) -> tuple[Grant, Edits]:
        """Book the ids for a container that is not known yet,
        and return the CDI name that stands for them.

        Args:
            offered: the resource.
            ids: ids of that resource.
            by_annotation: this kubelet has no field for CDI names, so the name travels in an
                annotation.

        Raises:
            LedgerError: the ids cannot be granted.
        """
        grant = self._context.ledger.reserve(offered.name, ids, shares=())
        token = grant_token(offered.name, ids)
        self._answered_tokens.add(token)
        if by_annotation:
            return grant, Edits(
                annotations={f"cdi.k8s.io/vgpu-agent_{token}": f"{CDI_KIND}={token}"}
            )
        return grant, Edits(cdi_names=(cdi_name(token),))

    # -- PreStartContainer -------------------------------------------------------------------------

    async def start(
        self, offered: Resource, ids: Sequence[str], family: PodFamily, *, late: bool
    ) -> None:
        """Let the container that holds ``ids`` start, or raise the reason why it may not.

        Args:
            offered: the resource.
            ids: ids of that resource.
            family: the resource's family.
            late: the node binds late; this counts only where our answer that the kubelet keeps
                cannot be read.

        Raises:
            NotProvenError: the owner of the ids is not certain (yet).
            RequestRefusedError: the pod cannot get what it asks for.
            LedgerError: what it should get cannot be booked now.
            HostFileError: a file could not be put into place.
            MigError: a GPU is not divided as the container needs it.
        """
        token = grant_token(offered.name, ids)
        async with self._one_at_a_time(token):
            began = time.perf_counter()
            start = await self._identify(offered, ids, token, family)
            if isinstance(start, GrantRecord):
                self._start_as_before(offered, ids, start)
                return
            try:
                self._refuse_before_rebuilt()
                is_late = self._is_late(start, late=late)
                # `init_shares`: init containers have shares of their own, so it matters which of
                # several containers with the same ids starts
                if is_late and offered.init_shares:
                    start = await self._identification.with_starting_container(start)
                grant = await (
                    self._bind(start)
                    if is_late
                    else self._early.prove(start, decide=self._decide, book=self._book)
                )
            except (
                RequestRefusedError,
                LedgerError,
                HostFileError,
                MigError,
                NotProvenError,
            ) as err:
                raise self._refused(start, err) from err
            # also of every other container of the pod that the records name for the same ids
            for name in {start.owner.container, *start.id_records.containers.get(start.key[0], ())}:
                self._context.refusals.clear(start.owner.pod_uid, name)
            self._journalled_refusals.forget(token)
            self.started[*start.key, offered.name] = grant  # key: the pod's UID, the container
            self._context.journal.record(
                "start.bound",
                grant=grant.number,
                pod=start.pod.full_name,
                container=start.owner.container,
                resource=offered.name,
                token=token,
                devices=[
                    f"{share.device} {share.memory_mib} MiB {share.cores_percent} %"
                    for share in grant.shares
                ],
                evidence=list(grant.evidence),  # sentences that prove the owner
                # whether the kubelet's records, from which they come, list all pods
                all_pods_listed=start.kubelet_evidence.whole,
                milliseconds=round((time.perf_counter() - began) * 1000, 1),
            )

    @contextlib.asynccontextmanager
    async def _one_at_a_time(self, token: str) -> AsyncIterator[None]:
        """Admit one start at a time for the same ids."""
        lock, users = self._locks.get(token, (asyncio.Lock(), 0))
        self._locks[token] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            _, users = self._locks.pop(token)
            if users > 1:
                self._locks[token] = (lock, users - 1)

    async def _bind(self, start: Start) -> Grant:
        """Decide, book and deliver. If there is no room, release what ended pods have, and try
        again. If a GPU has to be divided, have that done, and decide again.
        """
        tries = 0

        def attempt() -> tuple[Decision, tuple[Provision, Grant] | None]:
            nonlocal tries
            tries += 1
            asked = self._question(start)
            decision = self._decide(start, asked)
            if decision.layouts:  # a GPU has to be divided before there are shares
                return decision, None
            if decision.why_not_named and tries == 1:
                # This is not what the scheduler named, but the holder of that may have ended.
                raise CapacityError(decision.why_not_named)
            # There is no await between decision and booking, so the rooms that the decision is
            # based on are still there.
            provision = start.family.provision(asked, decision.shares)
            return decision, (provision, self._book(start, decision, decision.by, asked.rooms))

        decision, bound = await self._ended_pods.with_room(start, attempt)
        if bound is None:
            # `until`: when the kubelet must have its answer
            await self._division.bring_about(
                decision.layouts, start.family.name, start.pod.full_name, start.until
            )
            decision, bound = await self._ended_pods.with_room(start, attempt)
        if bound is None:
            raise MigError(
                "a GPU was divided for this container, but by now it is divided differently, "
                "perhaps for another one; the kubelet will retry"
            )
        provision, grant = bound
        self._answered_tokens.discard(start.token)
        if decision.why_not_named:
            self._context.journal.record(
                "start.second_best",
                level="warning",
                pod=start.pod.full_name,
                reason=decision.why_not_named,
            )
        await self._context.carrier.deliver(
            self._context.new_record(
                start.token, len(start.ids), start.pod, start.owner, grant, decision.by, provision
            ),
            provision,
        )
        # for the pod's owner, such as that an annotation was not followed
        self._context.notices.add_remarks(start.pod, start.owner.container, decision.remarks)
        return grant

    def _is_late(self, start: Start, *, late: bool) -> bool:
        """Tell whether the answer that the kubelet keeps is our CDI name.

        Node or settings may have changed since it was given, so they only decide where the answer
        cannot be read.
        """
        name, uid, answers = (
            cdi_name(start.token),
            start.owner.pod_uid,
            start.kubelet_evidence.answers,
        )
        stored = [
            answers.get((uid, container, start.offered.name))
            for container in start.id_records.containers.get(uid, ())
        ]
        known = [answer for answer in stored if answer is not None]
        if not known:
            return late and not self._early.has_answered(start.token)
        return all(
            name in answer.cdi_names or name in answer.annotations.values() for answer in known
        )

    # -- 1. identify -------------------------------------------------------------------------------

    async def _identify(
        self, offered: Resource, ids: Sequence[str], token: str, family: PodFamily
    ) -> Start | GrantRecord:
        try:
            found = await self._identification.identify(offered, ids, token, family)
        except NotProvenError as err:
            # Where the records still name several containers after some seconds, it refuses one of
            # their pods for good and advises to delete that one; never a pod in `started`.
            self._ambiguities.refuse(offered.name, token, err, self.started)
            self._journal_refusal("start.not_proven", token, str(err), resource=offered.name)
            raise
        self._ambiguities.note_identified(token, None if isinstance(found, GrantRecord) else found)
        return found

    def _start_as_before(self, offered: Resource, ids: Sequence[str], record: GrantRecord) -> None:
        """Let a container start again from the spec of its earlier start: the watch does not show
        its pod, and the spec has all that is needed.
        """
        evidence = (
            "the kubelet's records name the container that the spec was made for",
            record.decider,
        )
        try:
            grant = self._context.ledger.decide(
                offered.name,
                ids,
                record.shares,
                record.owner,
                evidence=evidence,
                may_overcommit=record.may_overcommit,
            )
        except LedgerError as err:
            raise type(err)(
                f"{record.owner.pod_name}, container {record.owner.container}: {err}"
            ) from err
        self._context.journal.record(
            "start.as_before",
            grant=grant.number,
            pod=record.owner.pod_name,
            container=record.owner.container,
            resource=offered.name,
            token=record.token,
        )

    # -- 2. decide ---------------------------------------------------------------------------------

    def _question(self, start: Start) -> Question:
        self._claims.refresh()  # another pod may have been bound since the last look
        return question(self._context, start.offered, start.pod, start.owner.container, start.ids)

    def _decide(self, start: Start, asked: Question | None = None) -> Decision:
        """Decide what the container gets.

        It keeps what it once got. It does not keep a MIG instance that is gone, on which no process
        can still run, nor, as a main container, the shares in its record when an init container of
        its pod has started since and it has not (`is_outdated`): all containers start anew then.
        """
        held = self._context.ledger.find(start.offered.name, start.ids)
        # `decided_for`: for whom the shares were chosen, by a guess perhaps; `key`: whom the
        # kubelet's records name
        if (
            held
            and held.shares
            and held.decided_for == start.key
            and not self._is_gone(held.shares)
        ):
            # the last sentence of the evidence says who decided
            by = held.evidence[-1] if held.evidence else "decided before"
            # The grant does not say who decided, but only a scheduler's decision may overcommit.
            return Decision(held.shares, by, by_scheduler=held.may_overcommit, kept=True)
        records = self._context.carrier.records
        for record in records:
            same = (
                record.token == start.token
                and (record.owner.pod_uid, record.owner.container) == start.key
            )
            if (
                same
                and record.shares
                and not is_outdated(record, records, start.pod)
                and not self._is_gone(record.shares)
            ):
                return Decision(
                    record.shares, record.decider, by_scheduler=record.may_overcommit, kept=True
                )
        self._refuse_before_pods_are_read()
        self._refuse_two_families(start)
        start.pod.refuse_more_requests()
        decision = start.family.decide(asked or self._question(start))
        return msgspec.structs.replace(decision, by=f"decided by {decision.by}")

    def _is_gone(self, shares: Sequence[Share]) -> bool:
        """Tell whether one of the shares was of a MIG instance that no GPU has any more,
        as after a reboot.
        """
        inventory = self._context.inventory()
        return any(
            share.device.startswith(MIG_PREFIX) and inventory.device(share.device) is None
            for share in shares
        )

    def _refuse_before_rebuilt(self) -> None:
        """Refuse until the kubelet has reported what was held when this process started:
        until then any device may be in use.
        """
        if not self._context.ledger.rebuilt:
            raise NotProvenError(
                "the holders of ids from before the start of this agent are not known yet, and "
                "neither is the free room; the kubelet will retry"
            )

    def _refuse_before_pods_are_read(self) -> None:
        """Refuse between the first list of pods and the next verification of the ledger, if there
        are holders without shares: their annotations alone may say what they hold, and the
        verification reads them. Before that list, starts do not wait.
        """
        if self._pods_unread and self._context.pods.synced.is_set():
            raise NotProvenError(
                "the agent has just learned of pods that run on this node, and looks up their "
                "devices before it grants others; the kubelet will retry"
            )

    def _refuse_two_families(self, start: Start) -> None:
        container = start.pod.container(start.owner.container)
        others = (
            resources_of_other_families(
                container, start.offered.family, self._context.ledger.resources
            )
            if container
            else []
        )
        if others:
            raise RequestRefusedError(
                f"the container asks for {start.offered.name} and for {', '.join(others)}, whose "
                "answers would name different GPUs; ask for one of them"
            )

    # -- 3. book -----------------------------------------------------------------------------------

    def _book(
        self,
        start: Start,
        decision: Decision,
        decider: str,
        rooms: Iterable[DeviceRoom] | None = None,
    ) -> Grant:
        """Book the decision; ``decider`` says in words who has made it, and ``rooms`` are what the
        devices had left just before, where that is known.
        """
        may = may_overcommit(decision, start.pod, self._context.settings)
        try:
            grant = self._context.ledger.decide(
                start.offered.name,
                start.ids,
                decision.shares,
                start.owner,
                evidence=(*start.id_records.evidence, decider),
                # of containers that cannot run when this one starts; they lose their shares
                ended=ended_before(self._context.ledger.grants, start.pod, start.owner),
                may_overcommit=may,
            )
        except (CapacityError, UnhealthyDeviceError) as err:
            if not decision.by_scheduler:
                raise
            # The scheduler counts the pod as placed, so nothing but its end makes it go elsewhere.
            suffix = ""
            if isinstance(err, OvercommitError):
                suffix = f"; {why_no_overcommit(start.pod, self._context.settings)}"
            elif isinstance(err, CapacityError):
                suffix = "; memory is never overcommitted"
            remedies = advice.for_scheduled(
                err,
                self._context.ledger,
                start.offered,
                decision.shares,
                self._context.inventory(),
                self._context.settings,
            )
            raise err.advised(remedies, suffix=suffix) from err
        if may and not decision.kept and (rooms is None or _may_exceed(decision.shares, rooms)):
            self._note_overcommit(start, grant)
        return grant

    def _note_overcommit(self, start: Start, grant: Grant) -> None:
        """Record, for the pod's owner and for the operator,
        that ``grant`` is on a GPU of which too much was granted.
        """
        devices = {share.device for share in grant.shares}
        beyond = [
            each
            for each in self._context.ledger.overcommitted
            if each.resource == grant.resource and each.device in devices
        ]
        if beyond:
            text = self._context.overcommits.add(start.pod, start.owner.container, beyond)
            self._context.journal.record(
                "start.overcommitted",
                level="warning",
                grant=grant.number,
                pod=start.pod.full_name,
                container=start.owner.container,
                resource=grant.resource,
                token=start.token,
                reason=text,
            )

    # -- refusals ----------------------------------------------------------------------------------

    def _refused(self, start: Start, err: AgentError) -> AgentError:
        """Record the refusal of the start. Return the error for the kubelet, whose text also names
        the pod, the container and the remedies.
        """
        if isinstance(err, (CapacityError, UnhealthyDeviceError)) and not err.advice:
            err = err.advised(advice.for_waiting(self._context.settings))
        pod, container = start.pod, start.owner.container
        reason, remedies = (
            (err.text, err.advice) if isinstance(err, LedgerError) else (str(err), "")
        )
        self._context.refusals.refuse(
            pod,
            container,
            start.offered.name,
            reason,
            advice=remedies,
            final=isinstance(err, WrongPodError),  # the kubelet keeps another pod's answer for it
        )
        self._journal_refusal(
            "start.refused",
            start.token,
            reason,
            pod=pod.full_name,
            container=container,
            resource=start.offered.name,
            evidence=list(start.id_records.evidence),
        )
        text = str(err)
        return type(err)(
            text if pod.full_name in text else f"{pod.full_name}, container {container}: {text}"
        )

    def _journal_refusal(self, event: str, token: str, reason: str, **facts: Any) -> None:
        """Journal why a start is refused, once while the reason stays: the kubelet asks again about
        every quarter of a minute.
        """
        if self._journalled_refusals.is_new(token, reason):
            self._context.journal.record(
                event, level="warning", token=token, reason=reason, **facts
            )

    # -- after a start -----------------------------------------------------------------------------

    def after_verification(self) -> None:
        """Forget pods that are gone. The ledger has just been brought in line with the kubelet's
        records. Before the first list of pods, only note whether there are holders without shares.
        """
        ledger, pods = self._context.ledger, self._context.pods
        if not pods.synced.is_set():
            self._pods_unread = any(
                grant.owner is not None and grant.decided_for is None and not grant.shares
                for grant in ledger.grants
            )
            return
        self._pods_unread = False
        uids = {pod.kubelet_uid for pod in pods.pods}
        self.started = {key: grant for key, grant in self.started.items() if key[0] in uids}
        self._ambiguities.keep_only(uids)
        tokens = (
            {grant_token(grant.resource, grant.ids) for grant in ledger.grants}
            if self._journalled_refusals or self._answered_tokens
            else set()
        )
        self._journalled_refusals.keep_only(tokens)
        self._answered_tokens &= tokens

    def deliveries(self) -> list[tuple[GrantRecord, Provision]]:
        """Return what the carrier should hold and does not, as after a reboot of the node, for late
        grants whose pods are known.

        Empty in early mode, where the answers are complete without a spec, and while the mode is
        not known.
        """
        context = self._context
        if context.mode is None or not context.mode.late:
            return []
        families = {family.name: family for family in context.families.pod_families}
        known = {record.token for record in context.carrier.records}
        recorded = {
            (record.owner.pod_uid, record.owner.container, record.resource)
            for record in context.carrier.records
        }
        wanted, failed = [], set()
        for grant in context.ledger.grants:
            family, owner = families.get(grant.family), grant.owner
            # `proven`: the shares were decided for this owner, which the kubelet's records name
            if family is None or owner is None or not grant.proven or not grant.shares:
                continue
            token = grant_token(grant.resource, grant.ids)
            pod = context.pods.get(owner.pod_uid)
            offered = next(
                (offer for offer in context.ledger.resources if offer.name == grant.resource), None
            )
            if token in known or pod is None or offered is None or pod.ended:
                continue
            if token in self._answered_tokens:
                continue  # the kubelet has given the ids to another pod as well (kubelet §7)
            container = pod.container(owner.container)
            if (
                container is not None
                and container.kind is ContainerKind.INIT
                and (pod.kubelet_uid, owner.container, grant.resource) in recorded
            ):
                # These ids belong to a later container, which must not start with the spec of the
                # init container.
                continue
            try:
                provision = family.provision(
                    question(context, offered, pod, owner.container, grant.ids), grant.shares
                )
            except AgentError as err:  # one that cannot be made must not stop the others
                failed.add(token)
                if self._failed_deliveries.is_new(token, str(err)):
                    _logger.warning(
                        "grants.not_restored",
                        pod=pod.full_name,
                        container=owner.container,
                        error=str(err),
                    )
                continue
            # the last sentence of the evidence says who decided
            by = grant.evidence[-1] if grant.evidence else "decided before"
            record = context.new_record(token, len(grant.ids), pod, owner, grant, by, provision)
            wanted.append((record, provision))
        self._failed_deliveries.keep_only(failed)
        return wanted

    def is_current(self, record: GrantRecord) -> bool:
        """Tell whether the ids of ``record`` still belong to the container that it was made for."""
        grant = self._grants_by_token().get(record.token)
        return grant is not None and grant.decided_for == (
            record.owner.pod_uid,
            record.owner.container,
        )

    def foreign_records(self, records: Iterable[GrantRecord]) -> list[GrantRecord]:
        """Return the records whose ids were given to another pod,
        or to one that the kubelet has not named yet.
        """
        grants = self._grants_by_token()
        return [record for record in records if self._is_foreign(record, grants.get(record.token))]

    def _is_foreign(self, record: GrantRecord, grant: Grant | None) -> bool:
        if record.token in self._answered_tokens:
            # The ledger may still have these ids in the larger grant of an earlier init container.
            return True
        if grant is None:
            return False
        holder = (
            grant.owner.pod_uid
            if grant.owner and grant.owner.pod_uid
            else grant.decided_for[0]
            if grant.decided_for
            else ""
        )
        return holder != record.owner.pod_uid

    def _grants_by_token(self) -> dict[str, Grant]:
        version = self._context.ledger.revision.version
        if self._by_token[0] != version:
            families = self._context.families
            # `paused`: families that start no container now, and may have grants
            by_pod = {family.name for family in (*families.pod_families, *families.paused)}
            tokens, grants = {}, {}
            for grant in self._context.ledger.grants:
                if grant.family in by_pod:
                    # A change concerns one grant; the others keep their ids, and with them their
                    # tokens.
                    ids, token = self._tokens.get(grant.number, ((), ""))
                    token = token if ids == grant.ids else grant_token(grant.resource, grant.ids)
                    tokens[grant.number] = grant.ids, token
                    grants[token] = grant
            self._tokens, self._by_token = tokens, (version, grants)
        return self._by_token[1]


def _may_exceed(shares: Sequence[Share], rooms: Iterable[DeviceRoom]) -> bool:
    """Tell whether a device of ``shares`` may have had less compute left than they take,
    or room for fewer holders.
    """
    free, places = (
        {room.device: room for room in rooms},
        collections.Counter(share.device for share in shares),
    )

    def is_enough(share: Share) -> bool:
        room = free.get(share.device)
        return (
            room is not None
            and room.cores_free_percent >= share.cores_percent
            and room.holders_free >= places[share.device]
        )

    return not all(map(is_enough, shares))
