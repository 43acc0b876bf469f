"""Several families on one node at once, under any history:
each GPU serves one of them at a time, and all get it back.

Hypothesis draws which families are offered and how, and what happens: pods of every sort come and
go, GPUs fall ill and recover, MIG is switched on and off, the agent starts anew. After every step
the containers are asked what they can reach; the answer must not depend on what the ledger
believes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import looptime
import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.allocation.binding_parts import NODE
from tests.allocation.mixed_node import MixedNode
from tests.families.nvidia.parts import shared_by
from vgpu_agent.allocation.context import Families
from vgpu_agent.families.aws.family import AwsFamily, AwsOptions
from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.families.family import IdFamily, PodFamily
from vgpu_agent.families.nvidia.family import NvidiaFamily
from vgpu_agent.families.nvidia.options import NvidiaOptions
from vgpu_agent.families.volcano_gpushare.family import (
    VolcanoGpushareFamily,
    VolcanoGpushareOptions,
)
from vgpu_agent.families.volcano_vgpu.family import VolcanoVgpuFamily, VolcanoVgpuOptions
from vgpu_agent.isolation.backend import NoIsolation
from vgpu_agent.ledger.turns import round_seconds
from vgpu_agent.ledger.withdrawals import WITHDRAWAL_SECONDS
from vgpu_agent.model import Gpu, Health, Inventory, MigInstance

GPUS = tuple(
    f"GPU-{letter * 8}-0000-4000-8000-00000000000{place}" for place, letter in enumerate("abc")
)
DIVIDED = 2  # the GPU whose MIG geometry changes
GEOMETRIES = ((), ("1g.5gb",) * 7, ("3g.20gb", "3g.20gb"), ("3g.20gb", "1g.5gb"))
MEMORY_MIB, UNIT_MIB = 40960, 4096
UNITS, REPLICAS, SPLIT = MEMORY_MIB // UNIT_MIB, 3, 4

GPU, SHARED, VGPU = "nvidia.com/gpu", "nvidia.com/gpu.shared", "k8s.amazonaws.com/vgpu"
SLICES = ("nvidia.com/mig-1g.5gb", "nvidia.com/mig-3g.20gb")
NUMBER, MEMORY, GPUSHARE = (
    "volcano.sh/vgpu-number",
    "volcano.sh/vgpu-memory",
    "volcano.sh/gpu-memory",
)
CARDS = "volcano.sh/gpu-number"
NVIDIA = {
    "whole": NvidiaOptions(mig_strategy="mixed"),
    "replicas": shared_by(REPLICAS, published=SHARED, mig_strategy="mixed"),
    "replicas of slices": shared_by(REPLICAS, name=SLICES[0], mig_strategy="mixed"),
    "MIG unseen": shared_by(REPLICAS, published=SHARED),
}
# Of AWS's family and volcano-vgpu the ids are alike, and of whole GPUs under two names.
BY_IDS: dict[str, Callable[[], IdFamily]] = {"aws": lambda: AwsFamily(AwsOptions(vgpus=SPLIT))}
BY_POD: dict[str, Callable[[], PodFamily]] = {
    "volcano-vgpu": lambda: VolcanoVgpuFamily(
        VolcanoVgpuOptions(split=SPLIT, factor=UNIT_MIB), NoIsolation()
    ),
    "volcano-gpushare": lambda: VolcanoGpushareFamily(
        VolcanoGpushareOptions(factor=UNIT_MIB, lists=ListOptions())
    ),
    "whole cards": lambda: VolcanoGpushareFamily(
        VolcanoGpushareOptions(strategy="number", lists=ListOptions())
    ),
}
MIXES = (
    (),
    ("aws", "volcano-vgpu", "volcano-gpushare"),
    ("aws", "whole cards"),
    ("aws",),
    ("volcano-vgpu",),
    ("volcano-gpushare",),
    ("aws", "volcano-gpushare"),
    ("volcano-vgpu", "volcano-gpushare"),
)


def gpu(place: int, *, ill: bool, profiles: Sequence[str] = (), cut: int = 0) -> Gpu:
    """The GPU at that place, as NVML shows it; each cut gives its slices other UUIDs."""
    health = Health(ok=False, reason="XID 79") if ill else Health()
    slices = tuple(
        MigInstance(
            f"MIG-{cut:08d}-0000-5000-8000-{place:06d}{number:06d}",
            number,
            7 + number,
            0,
            profile,
            4864,
            1,
            1,
            ("/dev/cap",),
        )
        for number, profile in enumerate(profiles)
    )
    whole = Gpu(
        GPUS[place],
        place,
        place,
        "NVIDIA A100-SXM4-40GB",
        MEMORY_MIB,
        f"0000:{place:02x}:00.0",
        0,
        (8, 0),
        health=health,
    )
    return msgspec.structs.replace(whole, mig_enabled=bool(profiles), mig_instances=slices)


class MixedFamilies(RuleBasedStateMachine):
    """A state machine that compares the devices that containers can reach
    with the containers' identity.
    """

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner(loop_factory=looptime.new_event_loop)
        self.ill: set[int] = set()
        self.profiles: tuple[str, ...] = ()
        self.cuts = 0
        self.unseeing = ""  # the resource that offers a GPU in MIG mode as a whole one
        self.of_slices = dict.fromkeys(SLICES, 1)  # places on each slice
        self.limits: dict[str, dict[str, int]] = {}  # of each pod that was admitted
        # of each pod that a scheduler has bound and kubelet has not admitted yet
        self.bound: dict[str, dict[str, int]] = {}
        # the next thing happens while kubelet has ids of which schedulers know no more
        self.rush = False
        self.node: MixedNode

    @initialize(
        seed=st.integers(0, 2**16),
        nvidia=st.sampled_from(sorted(NVIDIA)),
        others=st.sampled_from(MIXES),
    )
    def begin(self, seed: int, nvidia: str, others: tuple[str, ...]) -> None:
        """A node with `nvidia` in one of its ways, and any of the others."""
        self.unseeing = SHARED if nvidia == "MIG unseen" else ""
        self.of_slices[SLICES[0]] = REPLICAS if nvidia == "replicas of slices" else 1
        by_ids = (
            NvidiaFamily(NVIDIA[nvidia]),
            *(BY_IDS[name]() for name in others if name in BY_IDS),
        )
        by_pod = tuple(BY_POD[name]() for name in others if name in BY_POD)
        self.node = MixedNode(Families(by_ids, by_pod), self._inventory(), random.Random(seed))

    # -- what happens ------------------------------------------------------------------------------

    @rule(rush=st.booleans())
    def things_happen_at_once(self, rush: bool) -> None:
        """Let things happen at once, or one after the other."""
        self.rush = rush

    @rule(count=st.integers(1, 3))
    def a_pod_wants_gpus(self, count: int) -> None:
        """By ids that name them, whole or replicas."""
        self._admit(
            {next(name for name in (GPU, SHARED) if name in self.node.kubelet.lists): count}
        )

    @rule(count=st.integers(1, 2), resource=st.sampled_from((*SLICES, VGPU)))
    def a_pod_wants_parts(self, resource: str, count: int) -> None:
        """MIG slices, or AWS's shares."""
        self._admit({resource: count})

    @rule(units=st.integers(1, UNITS), count=st.integers(1, 2))
    def a_pod_wants_vgpus(self, units: int, count: int) -> None:
        """By memory on each of several GPUs."""
        self._admit({NUMBER: count, MEMORY: units})

    @rule(units=st.integers(1, UNITS))
    def a_pod_wants_a_budget(self, units: int) -> None:
        """By memory on one GPU that nothing limits."""
        self._admit({GPUSHARE: units})

    @rule(count=st.integers(1, 2))
    def a_pod_wants_cards(self, count: int) -> None:
        """Whole ones, by Volcano's name."""
        self._admit({CARDS: count})

    @rule(
        units=st.integers(1, UNITS),
        place=st.integers(0, len(GPUS) - 1),
        resource=st.sampled_from((NUMBER, GPUSHARE, CARDS)),
    )
    def a_scheduler_binds_a_pod(self, units: int, place: int, resource: str) -> None:
        """The pod goes to a GPU that its annotations name, whatever holds that GPU.
        Its image is still to be pulled.
        """
        if resource not in self.node.kubelet.lists:
            return
        limits = {
            NUMBER: {NUMBER: 1, MEMORY: units},
            GPUSHARE: {GPUSHARE: units},
            CARDS: {CARDS: 1},
        }[resource]
        text = f"{GPUS[place]},NVIDIA,{units},0:"
        vgpu = {
            "volcano.sh/vgpu-node": NODE,
            "volcano.sh/vgpu-ids-new": text,
            "volcano.sh/devices-to-allocate": text,
        }
        self.bound[
            self.node.bind(
                limits, vgpu if resource == NUMBER else {"volcano.sh/gpu-index": str(place)}
            )
        ] = limits

    @rule(chosen=st.integers(0, 100))
    @precondition(lambda self: self.bound)
    def kubelet_admits_a_bound_pod(self, chosen: int) -> None:
        """In any order, and it starts if it may."""
        name = sorted(self.bound)[chosen % len(self.bound)]
        self._admit(self.bound.pop(name), bound=name)

    @rule(chosen=st.integers(0, 100))
    @precondition(lambda self: self.bound)
    def a_bound_pod_is_deleted(self, chosen: int) -> None:
        """Before kubelet has admitted it."""
        name = sorted(self.bound)[chosen % len(self.bound)]
        del self.bound[name]
        self.node.end_unadmitted(name)

    @rule()
    def holders_end_and_the_oldest_claim_is_served(self) -> None:
        """No pod that was promised a GPU waits for anything but the end of those that have it."""
        for name in [name for name in self.limits if self.node.kubelet.pods[name].runs]:
            del self.limits[name]
            self.node.end(name)
        self.node.verify()
        for claim in self.node.ledger.claims[:1]:
            name, place = claim.pod.partition("/")[2], GPUS.index(claim.gpu)
            if place in self.ill or (place == DIVIDED and self.profiles):
                continue
            if name in self.bound:
                self._admit(self.bound.pop(name), bound=name)
            if name in self.limits and not self.node.kubelet.pods[name].runs:
                assert self._run(self.node.start(name)), (
                    f"{claim} is the oldest, and nobody has its GPU"
                )

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

    @rule(profiles=st.sampled_from(GEOMETRIES))
    def a_gpu_is_divided_anew(self, profiles: tuple[str, ...]) -> None:
        """The GPU may also be made whole. An administrator need not check for users first."""
        self.profiles, self.cuts = profiles, self.cuts + 1
        self._observe()

    @rule()
    def the_agent_starts_anew(self) -> None:
        """Its memory is lost, the containers run on."""
        self.node.start_agent()

    @rule()
    def all_pods_end(self) -> None:
        """Then every healthy GPU is there for every family again, whole."""
        for name in tuple(self.bound):
            self.node.end_unadmitted(name)
        for name in tuple(self.limits):
            self.node.end(name)
        self.limits, self.bound = {}, {}
        self.node.verify()
        self.node.wait(round_seconds(4) + 1)
        assert self.node.ledger.grants == ()
        for resource, listed in self.node.kubelet.lists.items():
            for id_, healthy in listed.items():
                place = self._place(id_)
                divided = place == DIVIDED and bool(self.profiles) and not self._is_slice(id_)
                assert healthy == (
                    place not in self.ill and (not divided or resource == self.unseeing)
                ), f"{resource}: {id_}"

    # -- what must be so ---------------------------------------------------------------------------

    @invariant()
    def the_book_is_sound(self) -> None:
        """The ledger's own invariants."""
        if hasattr(self, "node"):
            assert self.node.ledger.audit() == []

    @invariant()
    def a_gpu_serves_one_family(self) -> None:
        """Containers that reach one GPU are of one family,
        and of that family they have the GPU or its slices.
        """
        for place, names in self._holders().items():
            assert len({_family(self._kind(name)) for name in names}) == 1, (
                f"GPU {place} serves {names}"
            )
            devices = {
                device
                for name in names
                for device in self.node.reaches(name) & self.node.inventory.devices
            }
            sliced = {self._is_slice(device) for device in devices if self._place(device) == place}
            assert len(sliced) == 1, f"GPU {place} was given away whole and in slices, to {names}"

    @invariant()
    def what_others_have_is_not_offered(self) -> None:
        """While a GPU serves one family, every id of the others on it is Unhealthy at kubelet; the
        same for a GPU and its slices.

        Where the pod decides, a moment later: its ids name no GPU, and its start is refused.
        """
        self._a_moment_later()
        holders = self._holders()
        for resource, listed in self.node.kubelet.lists.items() if hasattr(self, "node") else ():
            for id_ in (id_ for id_, healthy in listed.items() if healthy):
                for name in holders.get(self._place(id_), ()):
                    if self.rush and _family(resource) not in ("nvidia", "aws"):
                        continue
                    assert _family(self._kind(name)) == _family(resource), (
                        f"{resource} offers {id_}, whose GPU has {name}"
                    )
                    held = self._is_slice(next(iter(self.node.reaches(name))))
                    assert held == self._is_slice(id_) or _family(resource) != "nvidia", (
                        f"{resource} offers {id_} beside {name}"
                    )

    @invariant()
    def what_is_claimed_is_not_offered_to_others(self) -> None:
        """From bind to start; the oldest claim on a GPU decides,
        for kubelet a moment later than for schedulers.
        """
        self._a_moment_later()
        claims = self.node.ledger.claims if hasattr(self, "node") else ()
        oldest = {GPUS.index(claim.gpu): claim.family for claim in reversed(claims)}
        for resource, listed in self.node.kubelet.lists.items() if oldest and not self.rush else ():
            for id_ in (id_ for id_, healthy in listed.items() if healthy):
                family = oldest.get(self._place(id_), _family(resource))
                assert family == _family(resource), (
                    f"{resource} offers {id_}, whose GPU is kept for {family}"
                )

    @invariant()
    def a_claim_is_of_a_pod_that_does_not_run(self) -> None:
        """A container that has started keeps others away by its shares and needs no claim."""
        claims = self.node.ledger.claims if hasattr(self, "node") else ()
        assert not [
            claim
            for claim in claims
            if (pod := self.node.kubelet.pods.get(claim.pod.partition("/")[2])) and pod.runs
        ]

    @invariant()
    def memory_is_given_once(self) -> None:
        """The memory promised to running containers on one GPU is not more than the GPU has."""
        for device, names in self._reached().items():
            promised = sum(
                self.limits[name].get(MEMORY, self.limits[name].get(GPUSHARE, 0)) for name in names
            )
            assert promised <= UNITS, f"{device}: {promised} of {UNITS} units were given to {names}"

    @invariant()
    def places_are_given_once(self) -> None:
        """No more containers, or ids of containers, on a device than it has places."""
        for device, names in self._reached().items():
            (kind,) = {self._kind(name) for name in names}
            most = {
                GPU: 1,
                SHARED: REPLICAS,
                VGPU: SPLIT,
                NUMBER: SPLIT,
                GPUSHARE: UNITS,
                CARDS: 1,
            }.get(kind, self.of_slices[kind] if kind in SLICES else 0)
            ids = [id_ for name in names for id_ in self.node.kubelet.pods[name].held.get(kind, ())]
            count = (
                sum(device in id_ for id_ in ids)
                if _family(kind) in ("nvidia", "aws")
                else len(names)
            )
            assert count <= most, f"{device} has {count} of {kind}"

    def teardown(self) -> None:
        """The loop ends with the history."""
        self._runner.close()

    # -- how it is done ----------------------------------------------------------------------------

    def _a_moment_later(self) -> None:
        if hasattr(self, "node") and not self.rush:
            self.node.wait(WITHDRAWAL_SECONDS)

    def _admit(self, limits: dict[str, int], *, bound: str = "") -> None:
        if name := self._run(self.node.admit(limits, bound=bound)):
            self.limits[name] = limits
            self._run(self.node.start(name))

    def _reached(self) -> dict[str, list[str]]:
        """Device → pods that reach it."""
        reached: dict[str, list[str]] = {}
        for name in self.limits:
            pod = self.node.kubelet.pods[name]
            devices = self.node.reaches(name) if pod.runs else set()
            assert devices or not pod.runs, f"{name} runs and reaches nothing"
            # a slice that was cut away cannot be used
            for device in devices & self.node.inventory.devices:
                reached.setdefault(device, []).append(name)
        return reached

    def _holders(self) -> dict[int, list[str]]:
        """Place of a GPU → pods that reach it or a slice of it."""
        holders: dict[int, list[str]] = {}
        for device, names in self._reached().items():
            holders.setdefault(self._place(device), []).extend(names)
        return holders

    def _kind(self, name: str) -> str:
        return NUMBER if NUMBER in self.limits[name] else next(iter(self.limits[name]))

    def _place(self, named: str) -> int:
        """Return the place of the GPU behind an id or a device;
        gpushare numbers the cards, all others name them.
        """
        if self._is_slice(named):
            return DIVIDED
        named_places = [place for place, uuid in enumerate(GPUS) if uuid in named]
        return named_places[0] if named_places else int(named.partition("-")[0])

    def _is_slice(self, named: str) -> bool:
        return named.startswith("MIG-")

    def _inventory(self) -> Inventory:
        gpus = (
            gpu(
                place,
                ill=place in self.ill,
                profiles=self.profiles if place == DIVIDED else (),
                cut=self.cuts,
            )
            for place in range(len(GPUS))
        )
        return Inventory(version=1, gpus=tuple(gpus))

    def _observe(self) -> None:
        self.node.inventory = msgspec.structs.replace(
            self._inventory(), version=self.node.inventory.version + 1
        )
        self.node.look()

    def _run(self, awaited: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(awaited)


def _family(resource: str) -> str:
    if resource == VGPU:
        return "aws"
    if resource.startswith("nvidia.com/"):
        return "nvidia"
    return "volcano-gpushare" if resource in (GPUSHARE, CARDS) else "volcano-vgpu"


MixedFamilies.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
TestMixedFamilies = MixedFamilies.TestCase
