"""The start of a container whose pod decides what it gets: prove the pod, decide, book, put in force, and only then say yes.

`allocator` calls it for every PreStartContainer of such a resource. In late mode this is where the decision is made; in early mode the
answer was given in Allocate, and this is where a wrong guess is exchanged or refused. kubelet waits up to 30 s and asks again after a
refusal, whose text the user sees in the pod's status.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, NoReturn, Protocol

from vgpu_agent.allocation.carrier import GrantRecord, grant_token
from vgpu_agent.allocation.guesses import Evidence, Guesses, Verdict
from vgpu_agent.allocation.proof import NotProvenError, claim, holder
from vgpu_agent.errors import CapacityError, CarrierError, ClusterError, LedgerError, RequestRefusedError
from vgpu_agent.families.family import Question
from vgpu_agent.pods import ContainerKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from vgpu_agent.allocation.carrier import Carrier
    from vgpu_agent.allocation.proof import Claim, Testimony
    from vgpu_agent.allocation.refusals import Refusals
    from vgpu_agent.config.binding import Binding
    from vgpu_agent.families.family import PodFamily
    from vgpu_agent.isolation.edits import Edits, Provision
    from vgpu_agent.journal import Journal
    from vgpu_agent.ledger import Ledger
    from vgpu_agent.model import Grant, Inventory, Owner, Resource, Share
    from vgpu_agent.pods import Pod, PodBook

_REREAD_SECONDS = 0.05  # kubelet writes its records before it calls us; once in a while a reader is quicker than the disk


class WrongPodError(RequestRefusedError):
    """The answer that kubelet keeps for this container is another pod's; the pod must be created anew."""


class Witness(Protocol):
    """Reads kubelet's records; `agent.witness` is it."""

    async def __call__(self) -> Testimony:
        """What they say, read after this call began."""
        ...


class Fetch(Protocol):
    """Asks the API server for one pod; `cluster` is it."""

    async def __call__(self, namespace: str, name: str) -> Pod | None:
        """The pod that has this name now; None when there is none.

        Raises:
            ClusterError: no answer.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Surroundings:
    """What binding needs besides the ledger; `agent` wires it, tests fill it with what they like."""

    node: str
    book: PodBook
    witness: Witness
    fetch: Fetch
    carrier: Carrier
    refusals: Refusals
    settings: Binding


@dataclasses.dataclass(frozen=True, slots=True)
class _Start:
    """One container about to start, proven."""

    offered: Resource
    ids: tuple[str, ...]
    token: str
    family: PodFamily
    pod: Pod
    owner: Owner
    found: Claim
    testimony: Testimony

    @property
    def key(self) -> tuple[str, str]:
        return self.owner.pod_uid, self.owner.container


class Binder:
    """Binds ids to containers.

    State: which containers were put in force (`served`) until their pods are gone, and in early mode what was answered (`guesses`); a
    restart derives both anew from kubelet's checkpoint and from the ledger.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        inventory: Callable[[], Inventory],
        journal: Journal,
        surroundings: Surroundings,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._ledger = ledger
        self._inventory = inventory
        self._journal = journal
        self._around = surroundings
        self._clock = clock
        self._turns: dict[str, asyncio.Lock] = {}
        self.guesses = Guesses()
        self.served: dict[tuple[str, str], Grant] = {}
        self.ambiguities = 0
        self.wrong_guesses = 0
        self.exchanges = 0

    async def start(self, offered: Resource, ids: Sequence[str], family: PodFamily, *, late: bool) -> None:
        """Let the container that holds ``ids`` start, or say why not.

        Raises:
            NotProvenError: whose ids these are is not certain (yet).
            RequestRefusedError: the pod cannot get what it asks for.
            LedgerError: what it should get cannot be booked now.
            CarrierError: a file could not be put into place.
        """
        token = grant_token(offered.name, ids)
        turn = self._turns.setdefault(token, asyncio.Lock())
        async with turn:
            began = time.perf_counter()
            try:
                pod, owner, found, testimony = await self._identify(offered.name, ids)
            except NotProvenError as err:
                self.ambiguities += err.ambiguous
                self._journal.record("start.not_proven", level="warning", resource=offered.name, token=token, reason=str(err))
                raise
            start = _Start(offered, tuple(ids), token, family, pod, owner, found, testimony)
            try:
                grant = await (self._bind_late(start) if late else self._prove_early(start))
            except (RequestRefusedError, LedgerError, CarrierError) as err:
                self._refuse(start, err)
                text = str(err)
                raise type(err)(text if pod.full_name in text else f"{pod.full_name}, container {owner.container}: {text}") from err
            self._around.refusals.clear(owner.pod_uid, owner.container)
            self.served[start.key] = grant
            self._journal.record(
                "start.bound",
                grant=grant.number,
                pod=pod.full_name,
                container=owner.container,
                resource=offered.name,
                token=token,
                devices=[f"{share.device} {share.memory_mib} MiB {share.cores_percent} %" for share in grant.shares],
                evidence=list(grant.evidence),
                milliseconds=round((time.perf_counter() - began) * 1000, 1),
            )

    def forget_absent(self) -> None:
        """Drop what is remembered about pods that are gone, once the watch has told of them all."""
        if not self._around.book.synced.is_set():
            return
        uids = {pod.kubelet_uid for pod in self._around.book.pods}
        self.served = {key: grant for key, grant in self.served.items() if key[0] in uids}
        self.guesses.keep_only(uids)
        self.guesses.keep_tokens({grant_token(grant.resource, grant.ids) for grant in self._ledger.grants} if self.guesses.given else ())
        self._turns = {token: turn for token, turn in self._turns.items() if turn.locked()}

    def deliveries(self, families: Mapping[str, PodFamily]) -> list[tuple[GrantRecord, Provision]]:
        """What the carrier should hold for late grants whose pods are known, and does not: the node was rebooted."""
        known = {record.token for record in self._around.carrier.records}
        wanted = []
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
            provision = family.provision(asked, grant.shares)
            by = grant.evidence[-1] if grant.evidence else "decided before"
            record = GrantRecord(
                token, grant.family, grant.resource, len(grant.ids), owner, grant.shares, by, self._clock(), provision.collected
            )
            wanted.append((record, provision))
        return wanted

    # -- who ------------------------------------------------------------------------------------------------------------------------

    async def _identify(self, resource: str, ids: Sequence[str]) -> tuple[Pod, Owner, Claim, Testimony]:
        loop, book = asyncio.get_running_loop(), self._around.book
        until = loop.time() + self._around.settings.pod_wait_seconds
        fetched: Pod | None = None
        while True:
            version = book.revision.version
            testimony = await self._around.witness()
            try:
                found = claim(resource, ids, testimony)
            except NotProvenError as err:
                if err.ambiguous or loop.time() + _REREAD_SECONDS >= until:
                    raise
                await asyncio.sleep(_REREAD_SECONDS)
                continue
            if named := holder(found, book, fetched):
                return *named, found, testimony
            if fetched is not None:
                raise NotProvenError(f"pod {fetched.full_name} is not the one that kubelet starts; kubelet will ask again")
            if not await _newer(book, version, until - loop.time()):
                fetched = await self._ask_for(found)

    async def _ask_for(self, found: Claim) -> Pod:
        """The pod from the API server itself, because our watch does not know it."""
        seconds, book = self._around.settings.pod_wait_seconds, self._around.book
        known = next((pod for uid in found.uids if (pod := book.get(uid))), None)
        name = found.named or ((known.namespace, known.name) if known else None)
        missing = f"pod {'/'.join(name)}" if name else f"the pod with UID {' or '.join(found.uids)}"
        if name is None:
            raise NotProvenError(f"{missing} did not appear in the watch within {seconds:g} s; kubelet will ask again")
        try:
            pod = await self._around.fetch(*name)
        except ClusterError as err:
            raise NotProvenError(f"{missing} did not appear in the watch within {seconds:g} s, and {err}; kubelet will ask again") from err
        if pod is None or pod.node != self._around.node:
            where = f"is bound to {pod.node or 'no node'}" if pod else "does not exist any more"
            raise NotProvenError(f"{missing} {where}; kubelet will notice")
        return pod

    # -- what -----------------------------------------------------------------------------------------------------------------------

    async def _bind_late(self, start: _Start) -> Grant:
        shares, by = self._decide(start)
        grant = self._book(start, shares, by)
        provision = start.family.provision(self._question(start), shares)
        await self._around.carrier.deliver(self._record(start, grant, by, provision), provision)
        return grant

    async def _prove_early(self, start: _Start) -> Grant:
        shares, by = self._decide(start)
        expected = {name: self._provision(start, name, shares) for name in start.found.containers.get(start.owner.pod_uid, ())}
        own = {(start.owner.pod_uid, name, start.offered.name) for name in expected}
        answers = {name: answer for (_, name, _), answer in self._stored(start, own)}
        evidence = Evidence(
            key=start.key,
            shares=shares,
            expected=expected,
            answers=answers,
            elsewhere=[answer for key, answer in start.testimony.answers.items() if key not in own],
            handed_on=any(each.kind is ContainerKind.INIT and each.limits.get(start.offered.name) for each in start.pod.containers),
        )
        given, provisions = self.guesses.given.get(start.token), list(expected.values())
        match self.guesses.judge(start.token, evidence, self._is_gone):
            case Verdict.LATER:
                raise NotProvenError(
                    f"{start.pod.full_name}, container {start.owner.container}: it is not clear yet whether the answer that kubelet keeps "
                    "for it is its own (binding.mode early); kubelet will ask again"
                )
            case Verdict.WRONG:
                self._refute(start)
            case Verdict.EXCHANGE:
                self.exchanges += 1
                meant_for = self.guesses.exchange(start.token, start.key)
                for grant in self._ledger.grants:
                    if grant.decided_for == start.key and grant.resource == start.offered.name:
                        self._ledger.redirect(grant.number, meant_for)
                by = f"{by}; exchanged with {self._called(meant_for[0])}, whose share is equal"
        if given is not None and given.provision.edits in answers.values() and given.provision not in provisions:
            provisions = [given.provision]  # exchanged, now or before: what the answer names is what must be there
        grant = self._book(start, shares, by)
        for provision in provisions:
            await self._around.carrier.prepare(self._record(start, grant, by, provision), provision)
        return grant

    def _refute(self, start: _Start) -> NoReturn:
        self.wrong_guesses += 1
        self._ledger.decide(start.offered.name, start.ids, (), start.owner, evidence=("refused: answered for another pod",))
        given = self.guesses.refuted(start.token, start.key)
        whose = f"the container {given.decided_for[1]} of {self._called(given.decided_for[0])}" if given else "another container"
        raise WrongPodError(
            f"kubelet's answer for this container was made for {whose}, because Allocate does not say whose it is and this node's "
            "runtime cannot be told later (binding.mode early); delete the pod, so that it is created anew"
        )

    def _provision(self, start: _Start, container: str, shares: tuple[Share, ...]) -> Provision:
        """What a container with these ids should have been told; one before the last decides by itself."""
        asked = question(self._ledger, start.offered, start.pod, container, start.ids, node=self._around.node, inventory=self._inventory())
        own = shares if container == start.owner.container else start.family.decide(asked).shares
        return start.family.provision(asked, own)

    def _stored(self, start: _Start, own: Collection[tuple[str, str, str]]) -> list[tuple[tuple[str, str, str], Edits]]:
        return [(key, answer) for key, answer in start.testimony.answers.items() if key in own]

    def _is_gone(self, uid: str) -> bool:
        pod = self._around.book.get(uid)
        return self._around.book.synced.is_set() and (pod is None or pod.ended)

    def _decide(self, start: _Start) -> tuple[tuple[Share, ...], str]:
        """What the container gets; what it once got, it keeps."""
        held = self._ledger.find(start.offered.name, start.ids)
        if held and held.shares and held.decided_for == start.key:
            return held.shares, held.evidence[-1] if held.evidence else "decided before"
        for record in self._around.carrier.records:
            same = record.token == start.token and (record.owner.pod_uid, record.owner.container) == start.key
            if same and record.shares:
                return record.shares, record.by
        decision = start.family.decide(self._question(start))
        return decision.shares, f"decided by {decision.by}"

    def _book(self, start: _Start, shares: tuple[Share, ...], by: str) -> Grant:
        evidence = (*start.found.evidence, by)
        try:
            return self._ledger.decide(start.offered.name, start.ids, shares, start.owner, evidence=evidence)
        except CapacityError:
            # Ended pods leave the book when kubelet's records have been read twice; here is one that needs their place now.
            if not self._release_ended(start.testimony):
                raise
            return self._ledger.decide(start.offered.name, start.ids, shares, start.owner, evidence=evidence)

    def _release_ended(self, testimony: Testimony) -> bool:
        """Release grants of pods that kubelet does not list and the API server has ended or deleted; whether there were any."""
        if testimony.pod_resources is None or not self._around.book.synced.is_set():
            return False
        live = {(entry.owner.namespace, entry.owner.pod) for entry in testimony.pod_resources}
        released = False
        for grant in self._ledger.grants:
            owner = grant.owner
            if owner is None or not owner.pod_uid or (owner.namespace, owner.pod) in live:
                continue
            pod = self._around.book.get(owner.pod_uid)
            if pod is None or pod.ended:
                self._ledger.release(grant.number)
                self._journal.record("ledger.released", grant=grant.number, pod=owner.pod_name, reason="the pod has ended")
                released = True
        return released

    def _question(self, start: _Start) -> Question:
        return question(
            self._ledger, start.offered, start.pod, start.owner.container, start.ids, node=self._around.node, inventory=self._inventory()
        )

    def _record(self, start: _Start, grant: Grant, by: str, provision: Provision) -> GrantRecord:
        return GrantRecord(
            token=start.token,
            family=start.family.name,
            resource=start.offered.name,
            ids=len(start.ids),
            owner=start.owner,
            shares=grant.shares,
            by=by,
            decided_at=self._clock(),
            collected=provision.collected,
        )

    def _called(self, uid: str) -> str:
        pod = self._around.book.get(uid)
        return pod.full_name if pod else f"pod {uid}"

    def _refuse(self, start: _Start, err: Exception) -> None:
        final = isinstance(err, WrongPodError)
        self._around.refusals.refuse(start.pod, start.owner.container, start.offered.name, str(err), final=final)
        self._journal.record(
            "start.refused",
            level="warning",
            pod=start.pod.full_name,
            container=start.owner.container,
            resource=start.offered.name,
            token=start.token,
            evidence=list(start.found.evidence),
            reason=str(err),
        )


def question(
    ledger: Ledger, offered: Resource, pod: Pod, container: str, ids: Sequence[str], *, node: str, inventory: Inventory
) -> Question:
    """What to ask a family about one container; what it or its ids hold now is not counted against it."""
    uid, wanted = pod.kubelet_uid, set(ids)
    mine = [grant for grant in ledger.grants if grant.resource == offered.name]
    besides = [grant.number for grant in mine if grant.decided_for == (uid, container) or not wanted.isdisjoint(grant.ids)]
    siblings = {
        grant.decided_for[1]: grant.shares
        for grant in mine
        if grant.decided_for and grant.decided_for[0] == uid and grant.decided_for[1] != container and grant.shares
    }
    rooms = ledger.rooms(offered.name, besides=besides)
    return Question(offered, pod, container, tuple(ids), node, inventory, rooms, siblings)


async def _newer(book: PodBook, version: int, seconds: float) -> bool:
    """Wait for a change of the book; False when there is none in time."""
    if seconds <= 0:
        return False
    try:
        async with asyncio.timeout(seconds):
            await book.revision.newer_than(version)
    except TimeoutError:
        return False
    return True
