"""Leader election among several extenders, in virtual time, against Leases in memory."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

from vgpu_agent.errors import ClusterError
from vgpu_agent.journal import Journal
from vgpu_agent.scheduler.leadership import (
    LEASE_SECONDS,
    RENEWED_SECONDS,
    RETRY_SECONDS,
    SETTLING_SECONDS,
    Leadership,
    holder_of,
)

pytestmark = pytest.mark.looptime

PATH = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
LOOK_SECONDS = 0.02
TAKEOVER_SECONDS = 5.0


class Leases:
    """The API server's one Lease. State: its body, None while there is none."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self._version = 0

    def put(self, spec: Any) -> None:
        """Write any ``spec``, as a stranger."""
        self._store({"metadata": {"name": "vgpu-scheduler"}, "spec": spec})

    def get(self) -> bytes:
        """The Lease."""
        if self.lease is None:
            raise ClusterError("404", status=404)
        return json.dumps(self.lease).encode()

    def create(self, body: Mapping[str, Any]) -> None:
        """Create it, unless it is there."""
        if self.lease is not None:
            raise ClusterError("409 AlreadyExists", status=409)
        self._store(copy.deepcopy(dict(body)))

    def patch(self, body: Mapping[str, Any]) -> None:
        """Change it, unless it has changed meanwhile."""
        if self.lease is None:
            raise ClusterError("404", status=404)
        if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ClusterError("409 Conflict", status=409)
        spec = {**(self.lease["spec"] or {}), **body["spec"]}
        spec = {key: value for key, value in spec.items() if value is not None}
        self._store({**self.lease, "spec": spec})

    def _store(self, body: dict[str, Any]) -> None:
        self._version += 1
        body["metadata"]["resourceVersion"] = str(self._version)
        self.lease = body


class Connection:
    """The way of one candidate to the API server.

    State: what is wrong with it. ``away``: no answer, and nothing is done; ``late_seconds``: each
    write is done that much later, whatever has become of its sender; ``failure``: the answer.
    """

    def __init__(self, leases: Leases, latency: Callable[[], float]) -> None:
        self._leases, self._latency = leases, latency
        self.away = False
        self.late_seconds = 0.0
        self.failure: ClusterError | None = None
        self._late: set[asyncio.Task[None]] = set()

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> bytes:
        """The Lease."""
        assert path == f"{PATH}/vgpu-scheduler"
        await self._travel()
        return self._leases.get()

    async def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Create it."""
        assert path == PATH
        await self._write(self._leases.create, body)
        return b"{}"

    async def patch(
        self, path: str, body: Mapping[str, Any], *, params: Mapping[str, str] | None = None
    ) -> bytes:
        """Change it."""
        assert path == f"{PATH}/vgpu-scheduler"
        await self._write(self._leases.patch, body)
        return b"{}"

    async def delete(self, path: str, *, uid: str) -> bytes:
        """Nobody deletes."""
        raise AssertionError("no candidate deletes the Lease")

    async def _write(
        self, write: Callable[[Mapping[str, Any]], None], body: Mapping[str, Any]
    ) -> None:
        await self._travel()
        if self.late_seconds:
            late = asyncio.ensure_future(self._later(write, body))
            self._late.add(late)
            await asyncio.shield(late)
        else:
            write(body)
            await asyncio.sleep(self._latency())

    async def _later(
        self, write: Callable[[Mapping[str, Any]], None], body: Mapping[str, Any]
    ) -> None:
        await asyncio.sleep(self.late_seconds)
        with contextlib.suppress(ClusterError):  # its sender has gone long ago
            write(body)

    async def _travel(self) -> None:
        await asyncio.sleep(self._latency())
        if self.away:
            await asyncio.sleep(15.0)
            raise ClusterError("no answer within 15 s")
        if self.failure is not None:
            raise self.failure


class Candidate:
    """One extender's part. State: whether it runs, and what it was told about its role."""

    def __init__(
        self,
        name: str,
        leases: Leases,
        *,
        latency: Callable[[], float] = lambda: 0.005,
        clock: Callable[[], float] = lambda: 1787331600.0,
    ) -> None:
        self.api = Connection(leases, latency)
        self.journal = Journal()
        self.roles: list[bool] = []
        self.leadership = Leadership(
            self.api,
            namespace="kube-system",
            name="vgpu-scheduler",
            identity=name,
            journal=self.journal,
            on_change=self.roles.append,
            clock=clock,
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def leads(self) -> bool:
        """Tell whether it may answer; a candidate that has ended never may."""
        return self._task is not None and self.leadership.leads

    def start(self) -> Candidate:
        """Let it run."""
        self._task = asyncio.ensure_future(self.leadership.run(lambda: None))
        return self

    def die(self) -> None:
        """End it without a word."""
        assert self._task is not None
        self._task.cancel()
        self._task = None

    async def end(self) -> None:
        """End it in good order."""
        if self._task is not None:
            self.die()
            await self.leadership.give_back()


@pytest.fixture
def leases() -> Leases:
    """An API server without a Lease."""
    return Leases()


async def watched(*candidates: Candidate, seconds: float) -> AsyncIterator[list[Candidate]]:
    """Yield the leading candidates every `LOOK_SECONDS` for ``seconds``; fail for more than one."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while loop.time() < until:
        leading = [each for each in candidates if each.leads]
        assert len(leading) <= 1
        yield leading
        await asyncio.sleep(LOOK_SECONDS)


async def until_leads(candidate: Candidate, *others: Candidate, seconds: float = 10.0) -> float:
    """Wait until the candidate leads; the seconds that it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async for leading in watched(candidate, *others, seconds=seconds):
        if candidate in leading:
            return loop.time() - began
    raise AssertionError("it does not lead")


async def a_pair(leases: Leases, **more: Any) -> tuple[Candidate, Candidate]:
    """A leader and a follower."""
    one, two = (Candidate(name, leases, **more) for name in ("one", "two"))
    await until_leads(one.start())
    two.start()
    await asyncio.sleep(2 * RETRY_SECONDS)
    return one, two


async def test_the_first_one_leads_and_goes_on(leases: Leases) -> None:
    """The Lease is made by its first holder, and renewed before it runs out."""
    one = Candidate("one", leases).start()
    await until_leads(one, seconds=SETTLING_SECONDS + 0.5)
    async for leading in watched(one, seconds=60):
        assert leading == [one]
    assert holder_of(leases.get()) == "one"
    assert one.roles == [True]
    assert [entry.event for entry in one.journal.entries] == ["scheduler.leads"]


async def test_two_that_start_at_once_get_one_leader(leases: Leases) -> None:
    """The API server lets one of them create the Lease, and the other one follows."""
    one, two = Candidate("one", leases).start(), Candidate("two", leases).start()
    leaders = set()
    async for leading in watched(one, two, seconds=60):
        leaders |= set(leading)
    assert len(leaders) == 1
    assert sorted((one.roles, two.roles)) == [[False], [True]]


@pytest.mark.parametrize("seed", range(10))
async def test_after_a_silent_death_another_one_leads_within_five_seconds(
    leases: Leases, seed: int
) -> None:
    """At any moment of its round, and with requests of different lengths."""
    chance = random.Random(seed)
    one, two = await a_pair(leases, latency=lambda: chance.uniform(0.001, 0.02))
    await asyncio.sleep(chance.uniform(0, 3))
    one.die()
    assert await until_leads(two) <= TAKEOVER_SECONDS
    assert leases.lease is not None
    assert leases.lease["spec"]["leaseTransitions"] == 1


async def test_a_lead_that_is_given_back_is_taken_at_once(leases: Leases) -> None:
    """An update must not stop the cluster's scheduling for the time of a Lease."""
    one, two = await a_pair(leases)
    await one.end()
    assert not one.leads
    assert holder_of(leases.get()) == ""
    assert await until_leads(two) <= RETRY_SECONDS + SETTLING_SECONDS + 0.1


async def test_a_lead_that_another_one_has_is_not_given_back(leases: Leases) -> None:
    """A late farewell must not take it from the next leader."""
    one = Candidate("one", leases).start()
    await until_leads(one)
    leases.put({"holderIdentity": "two"})
    await one.end()
    assert holder_of(leases.get()) == "two"


@pytest.mark.parametrize("trouble", ["away", "failure", "late"])
async def test_a_leader_without_an_api_server_stops_before_another_one_may_start(
    leases: Leases, trouble: str
) -> None:
    """It cannot know whether the Lease is still its own. Two seconds it goes on."""
    one, two = await a_pair(leases)
    began = asyncio.get_running_loop().time()
    if trouble == "away":
        one.api.away = True
    elif trouble == "late":
        one.api.late_seconds = 12.0
    else:
        one.api.failure = ClusterError("500: etcd is away", status=500)
    ended = taken = 0.0
    async for leading in watched(one, two, seconds=40):
        now = asyncio.get_running_loop().time()
        if one not in leading:
            ended = ended or now
        if two in leading:
            taken = taken or now
    assert ended - began <= RENEWED_SECONDS + LOOK_SECONDS
    assert ended < taken
    assert one.roles == [True, False]
    warned = [each for each in one.journal.entries if each.event == "scheduler.lease_failed"]
    assert len({str(each.facts["error"]) for each in warned}) == len(warned)


async def test_an_api_server_that_is_away_for_all_stops_all(leases: Leases) -> None:
    """Nobody binds without it anyway. Afterwards the same one may lead again, and only one."""
    one, two = await a_pair(leases)
    one.api.away = two.api.away = True
    await asyncio.sleep(RENEWED_SECONDS + 0.01)
    async for leading in watched(one, two, seconds=30):
        assert leading == []
    one.api.away = two.api.away = False
    led = [bool(leading) async for leading in watched(one, two, seconds=30)]
    assert sum(led) * LOOK_SECONDS > 20


async def test_one_stuck_request_costs_no_lead(leases: Leases) -> None:
    """Shorter than the time for which a leader goes on."""
    one = Candidate("one", leases).start()
    await until_leads(one)
    one.api.late_seconds = 1.2
    async for leading in watched(one, seconds=RETRY_SECONDS + 0.1):
        assert leading == [one]
    one.api.late_seconds = 0.0
    async for leading in watched(one, seconds=5):
        assert leading == [one]


async def test_giving_back_does_not_wait_for_an_api_server_that_is_away(leases: Leases) -> None:
    """The process ends within the time that the kubelet gives it."""
    one = Candidate("one", leases).start()
    await until_leads(one)
    one.api.away = True
    began = asyncio.get_running_loop().time()
    await one.end()
    assert asyncio.get_running_loop().time() - began <= RENEWED_SECONDS + 0.1
    assert one.journal.entries[-1].event == "scheduler.lease_kept"


async def test_a_leader_in_its_next_life_waits_like_any_other(leases: Leases) -> None:
    """Each life has an identity of its own, so the Lease of the last one is not its own."""
    one = Candidate("pod_1", leases).start()
    await until_leads(one)
    one.die()
    again = Candidate("pod_2", leases).start()
    assert LEASE_SECONDS <= await until_leads(again) <= TAKEOVER_SECONDS


async def test_a_new_leader_waits_for_its_watches(leases: Leases) -> None:
    """All binds of the previous leader must be in its book before it answers."""
    one = Candidate("one", leases).start()
    await until_leads(one)
    await one.end()
    two = Candidate("two", leases).start()
    assert await until_leads(two) >= SETTLING_SECONDS


@pytest.mark.parametrize("skew", [-1e6, 0.0, 1e6, 1e10])
async def test_clocks_of_machines_are_not_compared(leases: Leases, skew: float) -> None:
    """A follower whose clock is wrong takes nothing from a leader that renews, and waits no longer
    for one that does not.
    """
    one = Candidate("one", leases).start()
    two = Candidate("two", leases, clock=lambda: 1787331600.0 + skew).start()
    await until_leads(one, two)
    async for leading in watched(one, two, seconds=20):
        assert leading == [one]
    one.die()
    assert LEASE_SECONDS - RETRY_SECONDS <= await until_leads(two) <= TAKEOVER_SECONDS


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"holderIdentity": None, "leaseDurationSeconds": None, "renewTime": None},
        {"holderIdentity": ""},
        {"holderIdentity": "stranger", "renewTime": "nonsense", "acquireTime": "\u0000"},
        {"holderIdentity": "stranger", "leaseDurationSeconds": -5, "leaseTransitions": None},
        {"holderIdentity": "stranger", "leaseDurationSeconds": 0, "more": {"x": [1]}},
        {"holderIdentity": "stranger", "renewTime": "9999-12-31T23:59:59.999999Z"},
    ],
)
async def test_a_lease_that_nobody_renews_is_taken_whatever_it_says(
    leases: Leases, spec: dict[str, Any]
) -> None:
    """Another program may have left it."""
    leases.put(spec)
    one = Candidate("one", leases).start()
    assert await until_leads(one) <= TAKEOVER_SECONDS


@pytest.mark.parametrize(
    "body",
    [
        None,
        5,
        "x",
        {"holderIdentity": 7},
        {"holderIdentity": "one", "leaseDurationSeconds": "long"},
        {"holderIdentity": "one", "leaseTransitions": 1.5},
    ],
)
async def test_what_is_no_lease_lets_nobody_lead(leases: Leases, body: Any) -> None:
    """No exception ends the loop; mended, the Lease is taken."""
    leases.put(body)
    one = Candidate("one", leases).start()
    async for leading in watched(one, seconds=20):
        assert leading == []
    assert one.roles == [False]
    assert [each.event for each in one.journal.entries].count("scheduler.lease_failed") == 1
    leases.put({})
    await until_leads(one)


async def test_a_lease_of_a_longer_time_is_respected(leases: Leases) -> None:
    """Its holder may renew it less often."""
    leases.put({"holderIdentity": "stranger", "leaseDurationSeconds": 15})
    one = Candidate("one", leases).start()
    assert 15 <= await until_leads(one, seconds=30) <= 15 + 2


async def test_a_deleted_lease_is_made_anew_and_one_leads(leases: Leases) -> None:
    """An administrator may delete it at any time."""
    one, two = await a_pair(leases)
    for _ in range(5):
        leases.lease = None
        async for _ in watched(one, two, seconds=7):
            pass
    assert one.leads or two.leads


async def test_a_role_is_told_once(leases: Leases) -> None:
    """Also that of a follower at its start: its pod may have the label of an earlier life."""
    one, two = await a_pair(leases)
    await asyncio.sleep(10)
    await one.end()
    await until_leads(two)
    assert one.roles == [True]
    assert two.roles == [False, True]


async def disturb(chance: random.Random, one: Candidate, leases: Leases) -> bool:
    """Let something happen to a candidate; tell whether it has ended."""
    match chance.randrange(6):
        case 0:
            one.api.away = True
        case 1:
            one.api.late_seconds = chance.uniform(0.1, 20)
        case 2:
            one.api.failure = ClusterError("503", status=503)
        case 3:
            one.die()
            return True
        case 4:
            await one.end()
            return True
        case _:
            leases.lease = None if chance.random() < 0.2 else leases.lease
    return False


def mend(one: Candidate) -> None:
    """Give a candidate its connection back."""
    one.api.away, one.api.late_seconds, one.api.failure = False, 0.0, None


@pytest.mark.parametrize("seed", range(6))
async def test_troubles_of_all_kinds_never_make_two_leaders(leases: Leases, seed: int) -> None:
    """Connections break, requests are late, candidates die and come back, for minutes; in quiet
    times somebody leads.
    """
    chance = random.Random(seed)

    def latency() -> float:
        return chance.choice((0.002, 0.01, 0.05, 0.3))

    candidates = [Candidate(f"c{each}", leases, latency=latency).start() for each in range(3)]
    for number in range(60):
        at = chance.randrange(3)
        if await disturb(chance, candidates[at], leases):
            candidates[at] = Candidate(f"n{number}", leases, latency=latency).start()
        async for _ in watched(*candidates, seconds=chance.uniform(0.5, 8)):
            pass
        if chance.random() < 0.5:
            mend(candidates[at])
    for one in candidates:
        mend(one)
    looks = [len(leading) async for leading in watched(*candidates, seconds=60)]
    assert sum(looks) > len(looks) / 2
