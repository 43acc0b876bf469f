"""The demo's story about scheduling: the extender places pods on the cards of a cluster of 50
Nodes, says why one pod has to wait, and is killed meanwhile.

It starts a simulated API server with the Nodes, the real command ``vgpu-agent scheduler``, and a
stand-in for kube-scheduler that calls it. The Nodes have no kubelet and no agent, only the
annotations that agents write, so no container runs. Called by `demo`; everything it starts ends
with it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

from vgpu_agent.errors import AgentError, SimulationError
from vgpu_agent.sim.agent_process import ExtenderProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from vgpu_agent.sim.api.objects import Object, ObjectStore
    from vgpu_agent.sim.cli.narrator import Narrator
    from vgpu_agent.sim.kube_scheduler import KubeScheduler
    from vgpu_agent.sim.vgpu_manager.formats import Claim

_NUMBER, _CORES, _MEMORY = (f"nvidia.com/vgpu-{name}" for name in ("number", "cores", "memory"))
# annotations: of a Node, about its cards and its settings; of a pod, from the scheduler; of a pod,
# from its owner
_REGISTER, _CONFIG = "nvidia.com/node-device-register", "nvidia.com/node-config-info"
_PLANNED, _NODE = "nvidia.com/pre-allocated", "nvidia.com/predicate-node"
_TYPE, _NODE_POLICY = "nvidia.com/include-gpu-type", "nvidia.com/node-scheduler-policy"
_NAMESPACE = "ml"
_CARDS, _SLOTS = 8, 10  # of a Node; of a card
# how many Nodes, their names, and the type and MiB of their cards
_KINDS = (
    (30, "a10", "NVIDIA A10", 24_576),
    (17, "a100", "NVIDIA A100-SXM4-80GB", 81_920),
)
# Nodes that have no agent yet, and one whose annotation is cut off
_NEW, _TORN = ("new-00", "new-01"), "torn-00"
_TRAINING, _INFERENCE = 17, 50  # numbers of pods
_SHOWN = "infer-042"  # the pod whose annotations are shown
# What the pod that has to wait asks for, of A100s, which have 40 % left.
_BIG = {_NUMBER: 4, _CORES: 60, _MEMORY: 20_000}
_SECONDS = 30.0  # the longest wait for what a scene expects


async def play_scheduler(directory: Path, narrator: Narrator) -> None:
    """Play the story; ``directory`` is made for its files.

    Raises:
        AgentError: a check failed; the message holds the extender's last lines.
        TimeoutError: something did not happen in time.
    """
    # aiohttp takes a while to import, and no other command needs it as early.
    from vgpu_agent.sim.api.server import ApiServer  # noqa: PLC0415
    from vgpu_agent.sim.kube_scheduler import KubeScheduler  # noqa: PLC0415

    narrator.scene(
        "Scheduling: which of 400 cards does a pod get? (50 Nodes without agents, a stand-in for "
        "kube-scheduler, and `vgpu-agent scheduler` as its extender)"
    )
    await asyncio.to_thread(directory.mkdir, parents=True)
    async with ApiServer() as server:
        for node in _nodes():
            server.objects.create("nodes", node)
        kubeconfig = await asyncio.to_thread(server.kubeconfig, directory / "kubeconfig")
        extender = ExtenderProcess(directory / "extender.log", kubeconfig=kubeconfig)
        scheduling: asyncio.Future[None] | None = None
        try:
            began = time.monotonic()
            await extender.start()
            await extender.until_ready()
            scheduler = KubeScheduler(server.objects, extender.url)
            scheduling = asyncio.ensure_future(scheduler.run())
            story = _Story(server.objects, scheduler, extender, narrator)
            await story.play(time.monotonic() - began)
        except (AgentError, TimeoutError) as err:
            tail = await asyncio.to_thread(extender.log_tail)
            raise SimulationError(f"{err}\nlast lines of the extender's log:\n{tail}") from err
        finally:
            if scheduling is not None:
                scheduling.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await scheduling
            with contextlib.suppress(AgentError):
                await extender.terminate()


class _Story:
    """The scenes, in a cluster that is already built."""

    def __init__(
        self,
        objects: ObjectStore,
        scheduler: KubeScheduler,
        extender: ExtenderProcess,
        narrator: Narrator,
    ) -> None:
        self._objects, self._scheduler = objects, scheduler
        self._extender, self._narrator = extender, narrator

    async def play(self, started_seconds: float) -> None:
        """Play all scenes in order; the extender was ready ``started_seconds`` after its start.

        Raises:
            AgentError: a check failed.
            TimeoutError: something did not happen in time.
        """
        await self._the_extender_knows_the_cards(started_seconds)
        await self._pods_get_nodes_and_cards()
        await self._a_pod_has_to_wait()
        await self._the_extender_is_killed()

    async def _the_extender_knows_the_cards(self, started_seconds: float) -> None:
        usable = await self._extender.metric('vgpu_scheduler_nodes{state="usable"}')
        of_all = await self._extender.metric("vgpu_scheduler_nodes")
        self._narrator.prove(
            (usable, of_all) == (sum(number for number, *_ in _KINDS), 50),
            f"{started_seconds:.1f} s after its start the extender knows {of_all:.0f} Nodes: "
            f"{usable:.0f} can take pods, two have no agent yet, and one has nonsense in its "
            "annotation",
        )

    async def _pods_get_nodes_and_cards(self) -> None:
        began = time.monotonic()
        for number in range(_TRAINING):
            limits = {_NUMBER: _CARDS, _CORES: 60, _MEMORY: 40_000}
            self._create(f"train-{number:02}", limits, {_TYPE: "A100"})
        for number in range(_INFERENCE):
            limits = {_NUMBER: 1, _CORES: 10 + number % 3 * 10, _MEMORY: 2_000 + number % 4 * 1_000}
            self._create(f"infer-{number:03}", limits, {_TYPE: "A10", _NODE_POLICY: "binpack"})
        await self._until(lambda: not self._waiting(), "all pods to be placed")
        took = time.monotonic() - began
        pods = self._objects.list("pods", _NAMESPACE)
        most = self._most_taken()
        cards = {claim.uuid for pod in pods for claim in _claims(pod)}
        self._narrator.prove(
            len(pods) == _TRAINING + _INFERENCE and max(most.values()) <= 1,
            f"{len(pods)} pods placed in {took:.1f} s, on {len(cards)} cards. Counted again by "
            f"their annotations: no card has more than {most['compute']:.0%} of its compute, "
            f"{most['memory']:.0%} of its memory or {most['slots']:.0%} of its slots taken",
        )
        pod = self._pod(_SHOWN)
        annotations = pod["metadata"]["annotations"]
        self._narrator.say(f"     {_SHOWN} asks for {_asked(pod)}, and is bound to {_node(pod)}:")
        for key in (_NODE, _PLANNED):
            self._narrator.say(f"     {_SHOWN}: {key}: {annotations[key]}")
        (claim,) = _claims(pod)
        self._narrator.prove(
            claim.uuid in self._cards_of(_node(pod)) and annotations[_NODE] == _node(pod),
            f"that is card {claim.index} of {_node(pod)}, of which an agent there would give the "
            f"container {claim.cores} % of compute and {claim.memory} MiB",
        )

    async def _a_pod_has_to_wait(self) -> None:
        self._create("big", _BIG, {_TYPE: "A100"})
        await self._until(lambda: f"{_NAMESPACE}/big" in self._scheduler.refusals, "big to wait")
        (condition,) = self._pod("big")["status"]["conditions"]
        self._narrator.say(
            f"     big asks for {_asked(self._pod('big'))} each, of type A100. PodScheduled is "
            f"{condition['status']}: {condition['message']}"
        )
        self._narrator.say(f"     why, by `vgpu-agent why {_NAMESPACE}/big`:")
        # `missing`: what it lacks; `changes`: of the pod, with which it would fit now
        found = await self._extender.why(f"{_NAMESPACE}/big")
        for sentence in (*found["missing"], *found["changes"]):
            self._narrator.say(f"     * {sentence}")
        reasons = {name: row["code"] for row in found["table"] for name in row["names"]}
        self._narrator.prove(
            sum(row["nodes"] for row in found["table"]) == 50
            and found["fitting_nodes"] == 0
            and reasons["a100-00"] == "InsufficientVGPUCore"
            and (reasons[_TORN], reasons[_NEW[0]]) == ("NodeBadVGPURegister", "NodeNotVGPUEnabled"),
            "the pod waits, and each of the 50 Nodes has a reason",
        )

    async def _the_extender_is_killed(self) -> None:
        await self._extender.kill()
        self._create("late", {_NUMBER: 1, _CORES: 10, _MEMORY: 1_000}, {_TYPE: "A10"})
        ended = self._pod("train-03")
        self._objects.delete("pods", "train-03", _NAMESPACE, grace_seconds=0)
        before = {name: _claims(pod) for name, pod in self._bound()}
        began = time.monotonic()
        await self._extender.start()
        await self._until(lambda: not self._waiting(), "big and late to be placed")
        big = self._pod("big")
        unchanged = all(_claims(pod) == before.get(name) for name, pod in self._bound(before))
        self._narrator.prove(
            _node(big) == _node(ended) and unchanged and max(self._most_taken().values()) <= 1,
            f"meanwhile train-03 ends, and the extender is killed (kill -9). "
            f"{time.monotonic() - began:.1f} s after its new start both waiting pods are placed, "
            f"big on {_node(big)} in the place of train-03, and no card is given twice",
        )

    # -- the cluster -------------------------------------------------------------------------------

    def _create(self, name: str, limits: Mapping[str, int], annotations: Mapping[str, str]) -> None:
        written = {key: str(number) for key, number in limits.items()}
        containers = [{"name": "main", "resources": {"limits": written}}]
        pod = {
            "metadata": {"name": name, "annotations": dict(annotations)},
            "spec": {"schedulerName": "vgpu-scheduler", "containers": containers},
        }
        self._objects.create("pods", pod, _NAMESPACE)

    def _pod(self, name: str) -> Object:
        return self._objects.get("pods", name, _NAMESPACE)

    def _waiting(self) -> Sequence[Object]:
        return [pod for pod in self._objects.list("pods", _NAMESPACE) if not _node(pod)]

    def _bound(self, names: Iterable[str] | None = None) -> Sequence[tuple[str, Object]]:
        """Return the bound pods, or those of them with these names, by name."""
        pods = {pod["metadata"]["name"]: pod for pod in self._objects.list("pods", _NAMESPACE)}
        return [(name, pods[name]) for name in names or pods if _node(pods[name])]

    async def _until(self, condition: Callable[[], object], what: str) -> None:
        try:
            async with asyncio.timeout(_SECONDS):
                async for _ in self._objects.revision.changes():
                    if condition():
                        return
        except TimeoutError:
            raise SimulationError(f"waited {_SECONDS:g} s for {what}") from None

    def _cards_of(self, node: str) -> Mapping[str, Any]:
        """Return the cards of a Node by UUID."""
        annotations = self._objects.get("nodes", node)["metadata"].get("annotations") or {}
        return {card["uuid"]: card for card in json.loads(annotations[_REGISTER])}

    def _most_taken(self) -> Mapping[str, float]:
        """Return the largest part of one card's compute that pods have, and the same of memory and
        of slots; 1 is all.

        Raises:
            SimulationError: a pod has a card that its Node does not have.
        """
        compute, memory, slots = (collections.Counter[str]() for _ in range(3))
        sizes = dict[str, int]()
        for name, pod in self._bound():
            cards = self._cards_of(_node(pod))
            for claim in _claims(pod):
                if claim.uuid not in cards:
                    raise SimulationError(f"{name} has {claim.uuid}, which {_node(pod)} has not")
                sizes[claim.uuid] = cards[claim.uuid]["memory"]
                compute[claim.uuid] += claim.cores
                memory[claim.uuid] += claim.memory
                slots[claim.uuid] += 1
        return {
            "compute": max(compute.values()) / 100,
            "memory": max(taken / sizes[uuid] for uuid, taken in memory.items()),
            "slots": max(slots.values()) / _SLOTS,
        }


def _claims(pod: Object) -> Sequence[Claim]:
    """Return the cards that a pod has by its annotations."""
    # The parser of the stand-ins, and not that of the extender.
    from vgpu_agent.sim.vgpu_manager.formats import read_claims  # noqa: PLC0415

    found = read_claims(pod["metadata"]["annotations"].get(_PLANNED, "")) or {}
    return [claim for claims in found.values() for claim in claims]


def _node(pod: Object) -> str:
    return str(pod["spec"].get("nodeName") or "")


def _asked(pod: Object) -> str:
    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    return f"{limits[_NUMBER]} × {limits[_CORES]} % and {limits[_MEMORY]} MiB"


def _nodes() -> Iterable[Object]:
    """Return all Nodes of the story."""
    place = 0
    for number, name, product, memory_mib in _KINDS:
        for index in range(number):
            place += 1
            yield _described(f"{name}-{index:02}", _register(place, product, memory_mib))
    yield _described(_TORN, '[{"id":0,"uuid":"GPU-')
    for name in _NEW:
        yield {"metadata": {"name": name}, "status": {"allocatable": {"cpu": "64"}}}


def _described(name: str, register: str) -> Object:
    """Return a Node as its agent describes it; ``register`` is the annotation about its cards."""
    config = {"deviceSplit": _SLOTS, "coresScaling": 1, "memoryFactor": 1, "memoryScaling": 1}
    return {
        "metadata": {
            "name": name,
            "annotations": {_REGISTER: register, _CONFIG: json.dumps(config)},
        },
        "status": {"allocatable": {_NUMBER: str(_CARDS * _SLOTS)}},
    }


def _register(place: int, product: str, memory_mib: int) -> str:
    """Return the annotation by which a Node tells its cards (vgpu-manager §13.1); ``place`` is the
    number of the Node, by which the UUIDs of its cards differ from those of other Nodes.
    """
    return json.dumps(
        [
            {
                "id": card,
                "type": product,
                "uuid": f"GPU-00000000-0000-4000-8000-{place:06}{card:06}",
                "core": 100,
                "memory": memory_mib,
                "number": _SLOTS,
                "numa": card * 2 // _CARDS,
                "mig": False,
                "busId": f"0000:{0x10 + card:02x}:00.0",
                "capability": 8.0 if memory_mib > 40_000 else 8.6,
                "healthy": True,
            }
            for card in range(_CARDS)
        ]
    )
