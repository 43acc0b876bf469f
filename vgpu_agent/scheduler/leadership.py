"""Leader election among scheduler extenders: the holder of a Lease (coordination.k8s.io/v1) answers
kube-scheduler, the others refuse to place pods.

A leader that cannot renew the Lease stops before another candidate may take it. A follower measures
with its own clock how long the Lease stays unchanged, so the clocks of machines are not compared. A
leader that ends releases the Lease, so that the next one need not wait.

A new leader waits a moment before it answers, so that its watches show all pods that the previous
one has bound.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import ClusterError, shortened

if TYPE_CHECKING:
    from collections.abc import Callable

    from vgpu_agent.cluster.api import Api
    from vgpu_agent.journal import Journal


# The time after which a Lease that is not renewed may be taken, and the time for which a leader
# goes on after its last renewal. With the pause below, another extender answers after 5 s at most.
LEASE_SECONDS, RENEWED_SECONDS = 3.0, 2.0
RETRY_SECONDS = 0.5  # between two attempts to take or renew the Lease
# A watch shows a change within some milliseconds. A new leader must not answer with a watch that is
# behind.
SETTLING_SECONDS = 1.0
_NOT_FOUND, _CONFLICT = 404, 409
_LONGEST_ERROR = 300


class _Spec(msgspec.Struct, rename="camel"):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class _Metadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _Lease(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    spec: _Spec = msgspec.field(default_factory=_Spec)


def holder_of(body: bytes) -> str:
    """Return the holder of a Lease in JSON; empty if it has none.

    Raises:
        ClusterError: it is no Lease.
    """
    return _decoded(body).spec.holder_identity or ""


def _decoded(body: bytes) -> _Lease:
    try:
        return msgspec.json.decode(body, type=_Lease)
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:  # ValueError: no UTF-8
        raise ClusterError(f"no Lease: {shortened(str(err), _LONGEST_ERROR)}") from err


class Leadership:
    """One candidate for a Lease.

    State: from when it answers and until when it leads, and since when the Lease of another
    candidate is unchanged, all in the loop's time.

    Attributes:
        holder: the holder of the Lease when it was last read; empty if there was none.
    """

    def __init__(
        self,
        api: Api,
        *,
        namespace: str,
        name: str,
        identity: str,
        journal: Journal,
        on_change: Callable[[bool], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Build it; `run` makes it a candidate.

        Args:
            api: the API server.
            namespace: of the Lease.
            name: of the Lease.
            identity: of this candidate; unique among the candidates.
            journal: records each change of the leader, and failures.
            on_change: called with True when this candidate begins to lead. Called with False when
                it no longer leads, and once after the start if another one leads.
            clock: unix seconds, for the Lease's fields.
        """
        self._api, self._journal, self._on_change, self._clock = api, journal, on_change, clock
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name, self._namespace, self._identity = name, namespace, identity
        # loop time; it answers only from a moment after it began to lead
        self._leads_until = self._answers_from = float("-inf")
        self._reported: bool | None = None  # what ``on_change`` was last called with
        # resource version of the Lease of another candidate, and since when it is the same
        self._seen, self._unchanged_since = "", 0.0
        self._trouble = ""  # why the last attempt failed; empty if it did not
        self.holder = ""

    @property
    def leads(self) -> bool:
        """Tell whether this candidate may answer now."""
        now = asyncio.get_running_loop().time()
        return self._answers_from <= now < self._leads_until

    async def run(self, beat: Callable[[], None]) -> None:
        """Take the Lease when it is free, and renew it, until cancelled. ``beat`` is called before
        each attempt, as the heartbeat of this loop.
        """
        while True:
            beat()
            try:
                async with asyncio.timeout(RENEWED_SECONDS):
                    await self._step()
                self._trouble = ""
            except (ClusterError, TimeoutError) as err:
                text = shortened(str(err), _LONGEST_ERROR) or "no answer in time"
                # a conflict means that another candidate was faster
                if text != self._trouble and getattr(err, "status", 0) != _CONFLICT:
                    self._journal.record("scheduler.lease_failed", level="warning", error=text)
                self._trouble = text
            self._report()
            await asyncio.sleep(RETRY_SECONDS)

    async def give_back(self) -> None:
        """Release the Lease, if it is held. Failures are only recorded, because the Lease expires
        anyway.
        """
        if asyncio.get_running_loop().time() >= self._leads_until:
            return
        self._leads_until = float("-inf")
        try:
            async with asyncio.timeout(RENEWED_SECONDS):
                lease = await self._read()
                if lease is not None and lease.spec.holder_identity == self._identity:
                    free = _Spec(
                        holder_identity="",
                        lease_duration_seconds=1,
                        acquire_time=None,
                        renew_time=self._time(),
                        lease_transitions=self._transitions(lease),
                    )
                    await self._write(lease, free)
        except (ClusterError, TimeoutError) as err:
            text = shortened(str(err), _LONGEST_ERROR) or "no answer in time"
            self._journal.record("scheduler.lease_kept", error=text)

    async def _step(self) -> None:
        """Read the Lease; create, renew or take it if that is this candidate's to do."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        lease = await self._read()
        if lease is None:
            await self._create()
            self._lead(began)
            return
        self.holder = lease.spec.holder_identity or ""
        if self.holder == self._identity:
            renewed = msgspec.structs.replace(lease.spec, renew_time=self._time())
            await self._write(lease, renewed)
            self._lead(began)
            return
        self._leads_until = float("-inf")
        if lease.metadata.resource_version != self._seen:
            self._seen, self._unchanged_since = lease.metadata.resource_version, began
        seconds = max(lease.spec.lease_duration_seconds or 0, LEASE_SECONDS)
        if self.holder and began - self._unchanged_since < seconds:
            return
        taken = _Spec(
            holder_identity=self._identity,
            lease_duration_seconds=round(LEASE_SECONDS),
            acquire_time=self._time(),
            renew_time=self._time(),
            lease_transitions=self._transitions(lease) + 1,
        )
        await self._write(lease, taken)
        self.holder = self._identity
        self._lead(began)

    def _lead(self, since: float) -> None:
        """Record that the Lease is held from ``since`` on, when the request for it began."""
        if self._leads_until <= since:  # it did not lead
            self._answers_from = asyncio.get_running_loop().time() + SETTLING_SECONDS
        self._leads_until = since + RENEWED_SECONDS

    def _report(self) -> None:
        """Call ``on_change`` if this candidate has begun or ceased to lead."""
        leads = asyncio.get_running_loop().time() < self._leads_until
        if leads == self._reported:
            return
        self._reported = leads
        self._journal.record(
            "scheduler.leads" if leads else "scheduler.follows",
            identity=self._identity,
            holder=self.holder,
        )
        self._on_change(leads)

    # -- requests ----------------------------------------------------------------------------------

    async def _read(self) -> _Lease | None:
        try:
            body = await self._api.get(f"{self._collection}/{self._name}")
        except ClusterError as err:
            if err.status == _NOT_FOUND:
                return None
            raise
        return _decoded(body)

    async def _create(self) -> None:
        now = self._time()
        spec = _Spec(
            holder_identity=self._identity,
            lease_duration_seconds=round(LEASE_SECONDS),
            acquire_time=now,
            renew_time=now,
            lease_transitions=0,
        )
        await self._api.post(
            self._collection,
            {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._name, "namespace": self._namespace},
                "spec": msgspec.to_builtins(spec),
            },
        )
        self.holder = self._identity

    async def _write(self, lease: _Lease, spec: _Spec) -> None:
        """Write a Lease that has not changed meanwhile; the API server answers 409 otherwise."""
        await self._api.patch(
            f"{self._collection}/{self._name}",
            {
                "metadata": {"resourceVersion": lease.metadata.resource_version},
                "spec": msgspec.to_builtins(spec),
            },
        )

    def _time(self) -> str:
        now = dt.datetime.fromtimestamp(self._clock(), dt.UTC)
        return now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    @staticmethod
    def _transitions(lease: _Lease) -> int:
        return lease.spec.lease_transitions or 0
