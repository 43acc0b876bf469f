"""Several families on one node at once, under any history: each GPU serves one of them at a time, and all get it back.

Hypothesis draws which families are offered and how, and what happens: pods of every sort come and go, GPUs fall ill and recover, MIG is
switched on and off, the agent starts anew. After every step the containers are asked what they can reach; the answer must not depend on
what the ledger believes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Coroutine
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.allocation.mixed_node import MixedNode
from tests.families.nvidia_parts import shared_by
from vgpu_agent.allocation.node_families import Families
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.nvidia import NvidiaFamily
from vgpu_agent.families.volcano_gpushare import VolcanoGpushareFamily, VolcanoGpushareOptions
from vgpu_agent.families.volcano_vgpu import VolcanoVgpuFamily, VolcanoVgpuOptions
from vgpu_agent.isolation.backend import NoIsolation
from vgpu_agent.model import Gpu, Health, Inventory

GPUS = tuple(f"GPU-{letter * 8}-0000-4000-8000-00000000000{place}" for place, letter in enumerate("abc"))
MEMORY_MIB, UNIT_MIB = 40960, 4096
UNITS, REPLICAS, SPLIT = MEMORY_MIB // UNIT_MIB, 3, 4

GPU, SHARED = "nvidia.com/gpu", "nvidia.com/gpu.shared"
NUMBER, MEMORY, GPUSHARE = "volcano.sh/vgpu-number", "volcano.sh/vgpu-memory", "volcano.sh/gpu-memory"


def gpu(place: int, *, ill: bool) -> Gpu:
    """The GPU at that place, as NVML shows it."""
    health = Health(ok=False, reason="XID 79") if ill else Health()
    return Gpu(GPUS[place], place, place, "NVIDIA A100-SXM4-40GB", MEMORY_MIB, f"0000:{place:02x}:00.0", 0, (8, 0), health=health)


class MixedFamilies(RuleBasedStateMachine):
    """What containers can reach, against who they are."""

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self.ill: set[int] = set()
        self.limits: dict[str, dict[str, int]] = {}  # of each pod that was admitted
        self.node: MixedNode

    @initialize(seed=st.integers(0, 2**16), replicas=st.sampled_from((1, REPLICAS)), vgpu=st.booleans(), gpushare=st.booleans())
    def begin(self, seed: int, replicas: int, *, vgpu: bool, gpushare: bool) -> None:
        """A node with `nvidia`, whole or shared, and any of the others."""
        by_pod: list[VolcanoVgpuFamily | VolcanoGpushareFamily] = []
        if vgpu:
            by_pod.append(VolcanoVgpuFamily(VolcanoVgpuOptions(split=SPLIT, factor=UNIT_MIB), NoIsolation()))
        if gpushare:
            by_pod.append(VolcanoGpushareFamily(VolcanoGpushareOptions(factor=UNIT_MIB, lists=ListOptions())))
        nvidia = NvidiaFamily(shared_by(replicas, published=SHARED if replicas > 1 else GPU))
        self.node = MixedNode(Families((nvidia,), tuple(by_pod)), self._inventory(), random.Random(seed))

    # -- what happens ---------------------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 3))
    def a_pod_wants_gpus(self, count: int) -> None:
        """By ids that name them, whole or replicas."""
        self._admit({self._nvidia: count})

    @rule(units=st.integers(1, UNITS), count=st.integers(1, 2))
    def a_pod_wants_vgpus(self, units: int, count: int) -> None:
        """By memory on each of several GPUs."""
        self._admit({NUMBER: count, MEMORY: units})

    @rule(units=st.integers(1, UNITS))
    def a_pod_wants_a_budget(self, units: int) -> None:
        """By memory on one GPU that nothing limits."""
        self._admit({GPUSHARE: units})

    @rule(chosen=st.integers(0, 100))
    @precondition(lambda self: self.limits)
    def a_pod_ends(self, chosen: int) -> None:
        """One of them; kubelet forgets it, and the agent reads that."""
        name = sorted(self.limits)[chosen % len(self.limits)]
        del self.limits[name]
        self.node.end(name)
        self.node.verify()

    @rule()
    def kubelet_tries_again(self) -> None:
        """Containers that were refused are started again."""
        for name, pod in self.node.kubelet.pods.items():
            if not pod.runs:
                self._run(self.node.start(name))

    @rule(place=st.integers(0, len(GPUS) - 1))
    def a_gpu_changes_its_health(self, place: int) -> None:
        """It falls ill, or recovers."""
        self.ill ^= {place}
        self._observe()

    @rule()
    def the_agent_starts_anew(self) -> None:
        """Its memory is lost, the containers run on."""
        self.node.start_agent()

    @rule()
    def all_pods_end(self) -> None:
        """Then every healthy GPU is there for every family again, whole."""
        for name in tuple(self.limits):
            self.node.end(name)
        self.limits = {}
        self.node.verify()
        assert self.node.ledger.grants == ()
        for resource, listed in self.node.kubelet.lists.items():
            for id_, healthy in listed.items():
                assert healthy == (self._gpu_behind(id_) not in self.ill), f"{resource}: {id_}"

    # -- what must be so ------------------------------------------------------------------------------------------------------------

    @invariant()
    def the_book_is_sound(self) -> None:
        """The ledger's own invariants."""
        if hasattr(self, "node"):
            assert self.node.ledger.audit() == []

    @invariant()
    def a_gpu_serves_one_family(self) -> None:
        """Containers that reach one GPU are of one family, and a whole GPU's holder is alone on it."""
        reached = self._reached()
        for device, names in reached.items():
            kinds = {self._kind(name) for name in names}
            assert len(kinds) == 1, f"{device} serves {kinds}"
            if kinds == {GPU}:
                assert len(names) == 1, f"{device} was given whole to {names}"

    @invariant()
    def what_others_have_is_not_offered(self) -> None:
        """While a GPU serves one family, every id of the others on it is Unhealthy at kubelet."""
        reached = self._reached()
        for resource, listed in self.node.kubelet.lists.items() if hasattr(self, "node") else ():
            for id_, healthy in listed.items():
                kinds = {self._kind(name) for name in reached.get(GPUS[self._gpu_behind(id_)], ())}
                if healthy:
                    assert kinds <= {_kind_of(resource)}, f"{resource} offers {id_}, whose GPU serves {kinds}"

    @invariant()
    def memory_is_given_once(self) -> None:
        """What running containers were promised of one GPU is not more than it has."""
        for device, names in self._reached().items():
            promised = sum(self.limits[name].get(MEMORY, self.limits[name].get(GPUSHARE, 0)) for name in names)
            assert promised <= UNITS, f"{device}: {promised} of {UNITS} units were given to {names}"

    @invariant()
    def replicas_are_given_once(self) -> None:
        """No more containers on a GPU than it has places."""
        for device, names in self._reached().items():
            (kind,) = {self._kind(name) for name in names}
            most = {GPU: 1, SHARED: REPLICAS, NUMBER: SPLIT, GPUSHARE: UNITS}[kind]
            assert len(names) <= most, f"{device} has {len(names)} containers of {kind}"

    def teardown(self) -> None:
        """The loop ends with the history."""
        self._runner.close()

    # -- how it is done -------------------------------------------------------------------------------------------------------------

    @property
    def _nvidia(self) -> str:
        return next(name for name in (GPU, SHARED) if name in self.node.kubelet.lists)

    def _admit(self, limits: dict[str, int]) -> None:
        if name := self._run(self.node.admit(limits)):
            self.limits[name] = limits
            self._run(self.node.start(name))

    def _reached(self) -> dict[str, list[str]]:
        reached: dict[str, list[str]] = {}
        for name in self.limits:
            pod = self.node.kubelet.pods[name]
            devices = self.node.reaches(name) if pod.runs or self._kind(name) in (GPU, SHARED) else set()
            assert devices or not pod.runs, f"{name} runs and reaches nothing"
            for device in devices:
                reached.setdefault(device, []).append(name)
        return reached

    def _kind(self, name: str) -> str:
        return _kind_of(next(iter(self.limits[name])))

    def _gpu_behind(self, id_: str) -> int:
        # gpushare numbers the cards, all others name them.
        named = [place for place, uuid in enumerate(GPUS) if uuid in id_]
        return named[0] if named else int(id_.partition("-")[0])

    def _inventory(self) -> Inventory:
        return Inventory(version=1, gpus=tuple(gpu(place, ill=place in self.ill) for place in range(len(GPUS))))

    def _observe(self) -> None:
        self.node.inventory = dataclasses.replace(self._inventory(), version=self.node.inventory.version + 1)
        self.node.look()

    def _run(self, awaited: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(awaited)


def _kind_of(resource: str) -> str:
    return NUMBER if resource.startswith("volcano.sh/vgpu-") else resource


MixedFamilies.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
TestMixedFamilies = MixedFamilies.TestCase
