"""Hundreds of pods under a kube-scheduler that retries and is behind, with slow and lost answers,
late watches, lists anew, restarts, changes of the lead, cards that fail and Nodes that go. After
each step the claims of all bound pods are added up by nothing that the extender has computed.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Mapping
from typing import Any

import pytest

from tests.families.vgpu_manager.scheduling.nodes import (
    KEYS,
    MEMORY_MIB,
    entry,
    node_texts,
    uuid,
)
from tests.scheduler.strict_server import StrictServer
from tests.scheduler.test_extender import a_pod
from vgpu_agent.cluster import decode
from vgpu_agent.errors import ClusterError
from vgpu_agent.families.vgpu_manager.claims import parse_claims
from vgpu_agent.families.vgpu_manager.scheduling.family import VgpuManagerScheduling
from vgpu_agent.journal import Journal
from vgpu_agent.nodes import Node
from vgpu_agent.placement.nodes.book import Book
from vgpu_agent.scheduler.extender import Extender

NODES, CARDS = 4, 2
LAG_SECONDS = 0.8  # of a watch, less than a new leader waits
SETTLING_SECONDS = 1.0
SHAPES = (
    {"number": "1", "cores": "10", "memory": "1024"},
    {"number": "1", "cores": "60", "memory": "12000"},
    {"number": "2", "cores": "30", "memory": "8000"},
    {"number": "2"},
)


class StormyServer(StrictServer):
    """Answers late, loses answers, refuses now and then, and keeps a history for watches.

    State: the pods, and each change of one: (when it happened, UID, the pod or None).
    """

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.chance = chance
        self.history: list[tuple[float, str, dict[str, Any] | None]] = []

    def note(self, name: str, uid: str) -> None:
        """Record the pod as it is now."""
        found = self.pods.get(f"/api/v1/namespaces/default/pods/{name}")
        now = asyncio.get_running_loop().time()
        self.history.append((now, uid, copy.deepcopy(found)))

    async def _answer(self, verb: str, path: str, body: Mapping[str, Any]) -> bytes:
        chance = self.chance
        await asyncio.sleep(chance.choice((0.001, 0.01, 0.1, 0.5)))
        kind = chance.random()
        if kind < 0.04:
            raise ClusterError(f"{verb}: no answer within 15 s")
        if kind < 0.08:
            raise ClusterError(f"{verb}: 429", status=429)
        answer = await super()._answer(verb, path, body)
        if verb != "GET":
            name = path.removesuffix("/binding").rpartition("/")[2]
            self.note(name, self.pod(name)["metadata"]["uid"])
        await asyncio.sleep(chance.choice((0.001, 0.01, 0.2)))
        if kind < 0.2:
            raise ClusterError(f"{verb}: no answer within 15 s")
        return answer


class Replica:
    """One extender with its own late watch. State: how much of the history it has seen."""

    def __init__(self, server: StormyServer, nodes: Mapping[str, list[dict[str, Any]]]) -> None:
        self.server, self.leads, self.leads_from = server, False, 0.0
        self.extender = Extender(
            book=Book(),
            family=VgpuManagerScheduling(KEYS),
            read_pod=decode.pod,
            api=server,
            journal=Journal(),
            grace_seconds=5.0,
            leads=lambda: self.leads,
        )
        for name, entries in nodes.items():
            self.see_node(name, entries)
        self._known: set[str] = set()
        self.list_anew()

    def see_node(self, name: str, entries: list[dict[str, Any]]) -> None:
        """Let the watch of Nodes show one."""
        self.extender.see_node(
            Node(name, "u", node_texts(entries), {}, "", "", {}, {KEYS.number: "20"}, {}, "1")
        )

    def list_anew(self) -> None:
        """Read all pods as they are now."""
        self._seen = len(self.server.history)
        present = set()
        for pod in list(self.server.pods.values()):
            present.add(pod["metadata"]["uid"])
            self._see(pod)
        for uid in self._known - present:
            self.extender.forget_pod(uid)
        self._known = present

    def follow(self) -> None:
        """Take over what happened until a while ago."""
        until = asyncio.get_running_loop().time() - self.server.chance.uniform(0, LAG_SECONDS)
        history = self.server.history
        while self._seen < len(history) and history[self._seen][0] <= until:
            _, uid, pod = history[self._seen]
            self._seen += 1
            if pod is None:
                self._known.discard(uid)
                self.extender.forget_pod(uid)
            else:
                self._known.add(uid)
                self._see(pod)

    def _see(self, pod: Mapping[str, Any]) -> None:
        self.extender.see_pod(decode.pod(json.dumps(pod).encode()))


class Storm:
    """The cluster, its kube-scheduler and all that happens to it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.server = StormyServer(self.chance)
        self.nodes = {
            f"n{node}": [entry(card, uuid=uuid(node, card)) for card in range(CARDS)]
            for node in range(NODES)
        }
        self.replicas = [Replica(self.server, self.nodes) for _ in range(2)]
        self.replicas[0].leads = True
        self.waiting: list[str] = []
        self.binds: set[asyncio.Task[None]] = set()
        self.bound = self.number = 0

    @property
    def leader(self) -> Replica | None:
        """The one that answers, if any does."""
        now = asyncio.get_running_loop().time()
        return next((each for each in self.replicas if each.leads and each.leads_from <= now), None)

    def create(self) -> None:
        """Create a pod, sometimes under the name of a deleted one."""
        self.number += 1
        name = f"p{self.chance.randrange(60)}"
        if f"/api/v1/namespaces/default/pods/{name}" in self.server.pods:
            return
        pod = a_pod(name, **self.chance.choice(SHAPES))
        pod["metadata"]["uid"] = f"uid-{self.number}"
        self.server.create(pod)
        self.server.note(name, pod["metadata"]["uid"])
        self.waiting.append(name)

    def delete(self) -> None:
        """Delete a pod."""
        if self.server.pods:
            name = self.chance.choice(sorted(self.server.pods)).rpartition("/")[2]
            uid = self.server.pod(name)["metadata"]["uid"]
            self.server.remove(name)
            self.server.note(name, uid)

    def schedule(self) -> None:
        """Do one round of kube-scheduler, which may not know yet that a pod is bound or gone."""
        if not self.waiting or (leader := self.leader) is None:
            return
        name = self.waiting.pop(0)
        stored = self.server.pods.get(f"/api/v1/namespaces/default/pods/{name}")
        if stored is None or (stored["spec"].get("nodeName") and self.chance.random() < 0.4):
            return
        pod = copy.deepcopy(stored)
        pod["spec"].pop("nodeName", None)
        sample = self.chance.sample(sorted(self.nodes), self.chance.randint(1, NODES))
        body = json.dumps({"Pod": pod, "NodeNames": sample}).encode()
        answer = json.loads(leader.extender.filter(body))
        if not answer["NodeNames"]:
            self.waiting.append(name)
        elif self.chance.random() < 0.9:  # otherwise another plugin refuses it
            bind = asyncio.ensure_future(self._bind(leader, pod, answer["NodeNames"][0]))
            self.binds.add(bind)
            bind.add_done_callback(self.binds.discard)

    async def _bind(self, leader: Replica, pod: Mapping[str, Any], node: str) -> None:
        await asyncio.sleep(self.chance.choice((0.0, 0.1, 1.0, 7.0)))
        metadata = pod["metadata"]
        arguments = {
            "PodName": metadata["name"],
            "PodNamespace": "default",
            "PodUID": metadata["uid"],
            "Node": node,
        }
        for _ in range(self.chance.choice((1, 1, 2))):
            if not leader.leads:
                break
            answer = json.loads(await leader.extender.bind(json.dumps(arguments).encode()))
            if not answer["Error"]:
                self.bound += 1
                return
        await asyncio.sleep(self.chance.choice((0.0, 1.0, 2.0)))
        self.waiting.append(metadata["name"])

    async def change_leader(self) -> None:
        """Let the other one lead, after the time for which both wait."""
        before = next(each for each in self.replicas if each.leads)
        after = next(each for each in self.replicas if each is not before)
        before.leads = False
        before.extender.stop_leading()
        # requests of the last one are over before the next one answers
        await asyncio.gather(*self.binds)
        after.leads = True
        after.leads_from = asyncio.get_running_loop().time() + SETTLING_SECONDS

    async def restart(self) -> None:
        """Kill the leader, and start it anew with what the API server has."""
        place = next(place for place, each in enumerate(self.replicas) if each.leads)
        for bind in tuple(self.binds):
            bind.cancel()
        await asyncio.gather(*self.binds, return_exceptions=True)
        self.replicas[place].leads = False
        self.replicas[place] = Replica(self.server, self.nodes)
        self.replicas[place].leads = True
        self.waiting = [
            pod["metadata"]["name"]
            for pod in self.server.pods.values()
            if not pod["spec"].get("nodeName")
        ]

    def change_node(self) -> None:
        """A card fails or recovers, or a Node goes and comes back."""
        name = self.chance.choice(sorted(self.nodes))
        entries = self.nodes[name]
        if self.chance.random() < 0.3:
            for each in self.replicas:
                each.extender.forget_node(name)
        else:
            card = self.chance.randrange(CARDS)
            entries[card] = {**entries[card], "healthy": not entries[card]["healthy"]}
        for each in self.replicas:
            each.see_node(name, entries)

    async def step(self) -> None:
        """Let one thing happen."""
        kind = self.chance.random()
        if kind < 0.35:
            self.create()
        elif kind < 0.45:
            self.delete()
        elif kind < 0.90:
            for _ in range(3):
                self.schedule()
        elif kind < 0.94:
            self.chance.choice(self.replicas).list_anew()
        elif kind < 0.97:
            self.change_node()
        elif kind < 0.985:
            await self.change_leader()
        else:
            await self.restart()
        await asyncio.sleep(self.chance.choice((0.0, 0.01, 0.1, 0.4)))
        for each in self.replicas:
            each.follow()
            each.extender.expire_promises()
            await each.extender.check_unconfirmed_binds()
        self.check()

    def check(self) -> None:
        """Add up the claims of all bound pods, card by card."""
        sums: dict[tuple[str, str], list[int]] = {}
        for pod in self.server.pods.values():
            node = pod["spec"].get("nodeName")
            if not node:
                continue
            (claim,) = parse_claims(pod["metadata"]["annotations"][KEYS.pre_allocated])
            for card in claim.cards:
                assert card.uuid == uuid(int(node[1:]), card.index)
                found = sums.setdefault((node, card.uuid), [0, 0, 0])
                for part, amount in enumerate((1, card.memory_mib, card.cores_percent)):
                    found[part] += amount
        for slots, memory, cores in sums.values():
            assert slots <= 10
            assert memory <= MEMORY_MIB
            assert cores <= 100


@pytest.mark.torture
@pytest.mark.looptime
@pytest.mark.parametrize("seed", range(6))
async def test_no_card_is_given_twice_in_any_storm(seed: int) -> None:
    """And when all is quiet, the book is what the API server has, and nothing is kept for ever."""
    storm = Storm(seed)
    for _ in range(600):
        await storm.step()
    await asyncio.gather(*storm.binds)
    assert storm.bound > 5
    storm.server.chance = random.Random(seed)
    for _ in range(40):  # the grace period, and time for questions about lost binds
        await asyncio.sleep(1.0)
        for each in storm.replicas:
            each.follow()
            each.extender.expire_promises()
            await each.extender.check_unconfirmed_binds()
    for each in storm.replicas:
        each.follow()
        assert each.extender._promises == {}
        fresh = Replica(storm.server, storm.nodes)
        for name in storm.nodes:
            assert each.extender._book.taken(name) == fresh.extender._book.taken(name)
