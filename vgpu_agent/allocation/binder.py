"""Start a container whose pod decides what it gets: prove the pod, decide, book, put in force, and only then agree.

`allocator` calls it for every PreStartContainer of such a resource. In late mode this is where the decision is made; in early mode the
answer was given in Allocate, and this is where a wrong guess is exchanged or refused. kubelet waits up to 30 s and asks again after a
refusal, whose text the user sees in the pod's status.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

from vgpu_agent import log
from vgpu_agent.allocation import advice
from vgpu_agent.allocation.carrier import GrantRecord, cdi_name, grant_token
from vgpu_agent.allocation.claims import other_families
from vgpu_agent.allocation.division import Division
from vgpu_agent.allocation.early_proof import EarlyProof, WrongPodError
from vgpu_agent.allocation.ended_pods import EndedPods
from vgpu_agent.allocation.guesses import Guesses
from vgpu_agent.allocation.holdings import ended_before, is_outdated
from vgpu_agent.allocation.identification import Identification
from vgpu_agent.allocation.overcommits import may_overcommit, why_not
from vgpu_agent.allocation.proof import NotProvenError
from vgpu_agent.allocation.questions import question
from vgpu_agent.allocation.starting import Start
from vgpu_agent.errors import (
    AgentError,
    CapacityError,
    CarrierError,
    LedgerError,
    MigError,
    OvercommitError,
    RequestRefusedError,
    UnhealthyDeviceError,
)
from vgpu_agent.families.family import Decision

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

    from vgpu_agent.allocation.claims import Claims
    from vgpu_agent.allocation.dependencies import Dependencies
    from vgpu_agent.families.family import PodFamily, Question
    from vgpu_agent.isolation.edits import Provision
    from vgpu_agent.journal import Journal
    from vgpu_agent.ledger import Ledger
    from vgpu_agent.model import DeviceRoom, Grant, Inventory, Resource, Share


_logger = log.get(__name__)

MIG_PREFIX = "MIG-"  # of the UUIDs of MIG instances, by NVML


@dataclasses.dataclass(frozen=True, slots=True)
class _Bound:
    """The decided and booked grant of a container, to be put into place."""

    decision: Decision
    provision: Provision
    grant: Grant


class Binder:
    """The binding of ids to containers.

    State: the containers put in force (`served`) until their pods are gone, and in early mode the answers (`guesses`). A restart derives
    both anew from the kubelet's checkpoint and from the ledger.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        inventory: Callable[[], Inventory],
        journal: Journal,
        dependencies: Dependencies,
        claims: Claims,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._ledger = ledger
        self._claims = claims
        self._inventory = inventory
        self._journal = journal
        self._around = dependencies
        self._identification = Identification(dependencies)
        self._division = Division(ledger=ledger, inventory=inventory, journal=journal, divider=dependencies.divider)
        self._ended = EndedPods(ledger=ledger, journal=journal, dependencies=dependencies)
        self._clock = clock
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}  # token → its lock, and how many hold it or wait for it
        self._changes = log.ChangeFilter()  # by token, of starts that are refused again and again
        self._unmade: dict[str, str] = {}  # token → why its delivery could not be made the last time
        self.guesses = Guesses()
        self.early = EarlyProof(ledger=ledger, inventory=inventory, dependencies=dependencies, guesses=self.guesses)
        self.handed_out: set[str] = set()  # names that Allocate has given since they were last put in force
        self.served: dict[tuple[str, str, str], Grant] = {}  # by UID, container and resource
        self.ambiguities = 0
        self.pods_unread = False  # true until the pods of all holders in kubelet's records are known

    async def start(self, offered: Resource, ids: Sequence[str], family: PodFamily, *, late: bool) -> None:
        """Let the container that holds ``ids`` start, or raise why not.

        Raises:
            NotProvenError: the owner of the ids is not certain (yet).
            RequestRefusedError: the pod cannot get what it asks for.
            LedgerError: what it should get cannot be booked now.
            CarrierError: a file could not be put into place.
            MigError: a GPU is not divided as the container needs it.
        """
        token = grant_token(offered.name, ids)
        async with self._turn(token):
            began, until = time.perf_counter(), asyncio.get_running_loop().time() + self._around.settings.start_seconds
            try:
                who = await self._identification.identify(offered.name, ids, token)
            except NotProvenError as err:
                self.ambiguities += err.ambiguous
                for suspect, container in err.suspects:
                    self._around.refusals.refuse(suspect, container, offered.name, str(err))
                self._tell("start.not_proven", token, str(err), resource=offered.name)
                raise
            if isinstance(who, GrantRecord):
                try:
                    self._start_as_before(offered, ids, who)
                except LedgerError as err:
                    raise type(err)(f"{who.owner.pod_name}, container {who.owner.container}: {err}") from err
                return
            pod, owner = who.pod, who.owner
            start = Start(offered, tuple(ids), token, family, pod, owner, who.found, who.kubelet_evidence, until)
            try:
                self._refuse_before_rebuilt()
                grant = await (self._bind_late(start) if self._is_late(start, late=late) else self._prove_early(start))
            except (RequestRefusedError, LedgerError, CarrierError, MigError, NotProvenError) as err:
                advised = self._advised(err)
                self._refuse(start, advised)
                text = str(advised)
                raise type(err)(text if pod.full_name in text else f"{pod.full_name}, container {owner.container}: {text}") from err
            self._around.refusals.clear(owner.pod_uid, owner.container)
            self._changes.over(token)
            self.served[*start.key, offered.name] = grant
            self._journal.record(
                "start.bound",
                grant=grant.number,
                pod=pod.full_name,
                container=owner.container,
                resource=offered.name,
                token=token,
                devices=[f"{share.device} {share.memory_mib} MiB {share.cores_percent} %" for share in grant.shares],
                evidence=list(grant.evidence),
                all_pods_listed=who.kubelet_evidence.whole,
                milliseconds=round((time.perf_counter() - began) * 1000, 1),
            )

    @contextlib.asynccontextmanager
    async def _turn(self, token: str) -> AsyncIterator[None]:
        """Admit one start at a time for the same ids."""
        lock, users = self._turns.get(token, (asyncio.Lock(), 0))
        self._turns[token] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            _, users = self._turns.pop(token)
            if users > 1:
                self._turns[token] = (lock, users - 1)

    def forget_absent(self) -> None:
        """Drop what is remembered about pods that are gone, once the watch has reported them all."""
        if not self._around.book.synced.is_set():
            return
        uids = {pod.kubelet_uid for pod in self._around.book.pods}
        self.served = {key: grant for key, grant in self.served.items() if key[0] in uids}
        self.guesses.keep_only(uids)
        tokens = (
            {grant_token(grant.resource, grant.ids) for grant in self._ledger.grants}
            if self.guesses.given or self._changes or self.handed_out
            else set()
        )
        self.guesses.keep_tokens(tokens)
        self._changes.keep_only(tokens)
        self.handed_out &= tokens

    def deliveries(self, families: Mapping[str, PodFamily]) -> list[tuple[GrantRecord, Provision]]:
        """Return what the carrier should hold for late grants whose pods are known, and does not: the node was rebooted."""
        known = {record.token for record in self._around.carrier.records}
        wanted, unmade = [], {}
        for grant in self._ledger.grants:
            family, owner = families.get(grant.family), grant.owner
            if family is None or owner is None or not grant.proven or not grant.shares:
                continue
            token = grant_token(grant.resource, grant.ids)
            pod = self._around.book.get(owner.pod_uid)
            offered = next((offer for offer in self._ledger.resources if offer.name == grant.resource), None)
            if token in known or pod is None or offered is None or pod.ended:
                continue
            asked = question(self._ledger, offered, pod, owner.container, grant.ids, node=self._around.node, inventory=self._inventory())
            try:
                provision = family.provision(asked, grant.shares)
            except AgentError as err:  # one that cannot be made must not stop the others
                unmade[token] = str(err)
                if self._unmade.get(token) != unmade[token]:  # it is tried again and again
                    _logger.warning("grants.not_restored", pod=pod.full_name, container=owner.container, error=unmade[token])
                continue
            by = grant.evidence[-1] if grant.evidence else "decided before"
            record = GrantRecord(
                token,
                grant.family,
                grant.resource,
                len(grant.ids),
                owner,
                grant.shares,
                by,
                self._stamp(),
                provision.collected,
                grant.may_overcommit,
            )
            wanted.append((record, provision))
        self._unmade = unmade
        return wanted

    def _start_as_before(self, offered: Resource, ids: Sequence[str], record: GrantRecord) -> None:
        """Let a container start again from the spec that is there; its pod cannot be asked about, and need not be."""
        evidence = ("kubelet's records name the container that the spec was made for", record.by)
        grant = self._ledger.decide(offered.name, ids, record.shares, record.owner, evidence=evidence, may_overcommit=record.may_overcommit)
        self._journal.record(
            "start.as_before",
            grant=grant.number,
            pod=record.owner.pod_name,
            container=record.owner.container,
            resource=offered.name,
            token=record.token,
        )

    # -- what -----------------------------------------------------------------------------------------------------------------------

    def _is_late(self, start: Start, *, late: bool) -> bool:
        """Tell whether the answer that the kubelet keeps is our CDI name.

        Node or settings may have changed since it was given, so they only decide where the answer cannot be read.
        """
        name, key = cdi_name(start.token), start.owner.pod_uid
        stored = [
            start.kubelet_evidence.answers.get((key, container, start.offered.name)) for container in start.found.containers.get(key, ())
        ]
        answers = [answer for answer in stored if answer is not None]
        if not answers:
            return late and start.token not in self.guesses.given
        return all(name in answer.cdi_names or name in answer.annotations.values() for answer in answers)

    async def _bind_late(self, start: Start) -> Grant:
        bound = await self._settle(start)
        self.handed_out.discard(start.token)
        if bound.decision.second_best:
            self._journal.record("start.second_best", level="warning", pod=start.pod.full_name, reason=bound.decision.second_best)
        await self._around.carrier.deliver(self._record(start, bound.grant, bound.decision.by, bound.provision), bound.provision)
        return bound.grant

    async def _settle(self, start: Start) -> _Bound:
        """Decide what the container gets in the end, after ended pods made room and GPUs were divided, where it takes that."""
        tries = 0

        def attempt() -> _Bound | Decision:
            nonlocal tries
            tries += 1
            asked = self._question(start)
            decision = self._decide(start, asked)
            if decision.layouts:
                return decision
            if decision.second_best and tries == 1:
                raise CapacityError(decision.second_best)  # the holder of what the scheduler named may have ended
            # From here to the booking nothing is waited for, so what was free for the decision still is.
            provision = start.family.provision(asked, decision.shares)
            return _Bound(decision, provision, self._book(start, decision, decision.by, asked.rooms))

        settled = await self._ended.with_room(start, attempt)
        if isinstance(settled, Decision):
            await self._division.bring_about(settled.layouts, start.family.name, start.pod.full_name, start.until)
            settled = await self._ended.with_room(start, attempt)
        if isinstance(settled, Decision):
            raise MigError("a GPU was divided for the container, and then otherwise for another; kubelet will ask again")
        return settled

    async def _prove_early(self, start: Start) -> Grant:
        self.guesses.admitted(start.pod)

        def prove() -> tuple[Decision, list[Provision], str]:
            decision = self._decide(start, self._question(start))
            if decision.layouts:
                raise RequestRefusedError("a GPU would have to be divided for the container, which takes binding.mode late")
            return decision, *self.early.prove(start, decision.shares)

        decision, provisions, exchanged = await self._ended.with_room(start, prove)
        by = decision.by
        # The answer that kubelet keeps is proven for these shares, so only their booking is tried again.
        grant = await self._ended.with_room(start, lambda: self._book(start, decision, f"{by}; {exchanged}" if exchanged else by))
        for provision in provisions:
            await self._around.carrier.prepare(self._record(start, grant, by, provision), provision)
        return grant

    def _decide(self, start: Start, asked: Question) -> Decision:
        """Decide what the container gets.

        It keeps what it once got, unless that was a MIG instance that is gone: no process runs on those.
        """
        held = self._ledger.find(start.offered.name, start.ids)
        if held and held.shares and held.decided_for == start.key and not self._is_gone(held.shares):
            by = held.evidence[-1] if held.evidence else "decided before"
            return Decision(held.shares, by, by_scheduler=held.may_overcommit, kept=True)
        records = self._around.carrier.records
        for record in records:
            same = record.token == start.token and (record.owner.pod_uid, record.owner.container) == start.key
            if same and record.shares and not is_outdated(record, records, start.pod) and not self._is_gone(record.shares):
                return Decision(record.shares, record.by, by_scheduler=record.may_overcommit, kept=True)
        self._refuse_before_pods_are_read()
        self._refuse_two_families(start)
        decision = start.family.decide(asked)
        return dataclasses.replace(decision, by=f"decided by {decision.by}")

    def _is_gone(self, shares: Sequence[Share]) -> bool:
        """Tell whether one of the shares was of a MIG instance that no GPU has any more, as after a reboot."""
        inventory = self._inventory()
        return any(share.device.startswith(MIG_PREFIX) and inventory.device(share.device) is None for share in shares)

    def _refuse_before_rebuilt(self) -> None:
        """Refuse until the kubelet has reported what was held when this process started: until then it may be anywhere."""
        if not self._ledger.rebuilt:
            raise NotProvenError(
                "kubelet has not told yet who held what when this agent was started, so nobody knows what is free; kubelet will ask again"
            )

    def _refuse_before_pods_are_read(self) -> None:
        """Refuse while pods are unread: their annotations alone may say what they hold. The next reading covers them."""
        if self.pods_unread and self._around.book.synced.is_set():  # until then no pod can be read, and no start waits for that
            raise NotProvenError(
                "pods that run on this node have only just become known, and what they hold is looked up before anything is given away; "
                "kubelet will ask again"
            )

    def _refuse_two_families(self, start: Start) -> None:
        container = start.pod.container(start.owner.container)
        others = other_families(container, start.offered.family, self._ledger.resources) if container else []
        if others:
            raise RequestRefusedError(
                f"the container asks for {start.offered.name} and for {', '.join(others)}, which would tell it of different GPUs; "
                "ask for one of them"
            )

    def _book(self, start: Start, decision: Decision, by: str, rooms: Iterable[DeviceRoom] | None = None) -> Grant:
        """Book the decision; ``rooms`` are what the devices had left just before, where that is known."""
        may = may_overcommit(decision, start.pod, self._around.settings)
        try:
            grant = self._ledger.decide(
                start.offered.name,
                start.ids,
                decision.shares,
                start.owner,
                evidence=(*start.found.evidence, by),
                ended=ended_before(self._ledger.grants, start.pod, start.owner),
                may_overcommit=may,
            )
        except (CapacityError, UnhealthyDeviceError) as err:
            if not decision.by_scheduler:
                raise
            # The scheduler counts the pod as placed, so nothing but its end makes it go elsewhere.
            more = ""
            if isinstance(err, OvercommitError):
                more = f"; {why_not(start.pod, self._around.settings)}"
            elif isinstance(err, CapacityError):
                more = "; memory is never overcommitted"
            remedies = advice.for_scheduled(err, self._ledger, start.offered, decision.shares, self._inventory(), self._around.settings)
            raise err.advised(remedies, more=more) from err
        if may and not decision.kept and (rooms is None or _may_exceed(decision.shares, rooms)):
            self._note_overcommit(start, grant)
        return grant

    def _note_overcommit(self, start: Start, grant: Grant) -> None:
        """Record, for the pod's owner and for the operator, that ``grant`` is on a GPU of which too much was given out."""
        devices = {share.device for share in grant.shares}
        beyond = [each for each in self._ledger.overcommitted if each.resource == grant.resource and each.device in devices]
        if beyond:
            text = self._around.overcommits.add(start.pod, start.owner.container, beyond)
            self._journal.record(
                "start.overcommitted",
                level="warning",
                grant=grant.number,
                pod=start.pod.full_name,
                container=start.owner.container,
                resource=grant.resource,
                token=start.token,
                reason=text,
            )

    def _question(self, start: Start) -> Question:
        self._claims.refresh()  # another pod may have been bound since the last look
        return question(
            self._ledger, start.offered, start.pod, start.owner.container, start.ids, node=self._around.node, inventory=self._inventory()
        )

    def _record(self, start: Start, grant: Grant, by: str, provision: Provision) -> GrantRecord:
        return GrantRecord(
            token=start.token,
            family=start.family.name,
            resource=start.offered.name,
            ids=len(start.ids),
            owner=start.owner,
            shares=grant.shares,
            by=by,
            decided_at=self._stamp(),
            collected=provision.collected,
            may_overcommit=grant.may_overcommit,
        )

    def _stamp(self) -> float:
        """Return the time in unix seconds, always after the stamp of every record: their order shows which containers of a pod have ended.

        The records outlive reboots, so only the wall clock serves, and it may be set back.
        """
        latest = max((record.decided_at for record in self._around.carrier.records), default=0.0)
        return max(self._clock(), math.nextafter(latest, math.inf))

    def _advised(self, err: AgentError) -> AgentError:
        """Return the refusal with its remedies, also where the agent itself has looked for room."""
        if isinstance(err, (CapacityError, UnhealthyDeviceError)) and not err.advice:
            return err.advised(advice.waiting(self._around.settings))
        return err

    def _refuse(self, start: Start, err: AgentError) -> None:
        reason, remedies = (err.text, err.advice) if isinstance(err, LedgerError) else (str(err), "")
        self._around.refusals.refuse(
            start.pod, start.owner.container, start.offered.name, reason, advice=remedies, final=isinstance(err, WrongPodError)
        )
        self._tell(
            "start.refused",
            start.token,
            reason,
            pod=start.pod.full_name,
            container=start.owner.container,
            resource=start.offered.name,
            evidence=list(start.found.evidence),
        )

    def _tell(self, event: str, token: str, reason: str, **facts: Any) -> None:
        """Journal why a start is refused; kubelet asks again every quarter of a minute, and once is enough while the reason stays."""
        if self._changes.is_new(token, reason):
            self._journal.record(event, level="warning", token=token, reason=reason, **facts)


def _may_exceed(shares: Sequence[Share], rooms: Iterable[DeviceRoom]) -> bool:
    """Tell whether a device of ``shares`` may have had less compute or fewer places left than they take."""
    free, places = {room.device: room for room in rooms}, collections.Counter(share.device for share in shares)

    def is_enough(share: Share) -> bool:
        room = free.get(share.device)
        return room is not None and room.cores_free_percent >= share.cores_percent and room.holders_free >= places[share.device]

    return not all(map(is_enough, shares))
