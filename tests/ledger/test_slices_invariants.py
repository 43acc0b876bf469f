"""The ledger while MIG slices come and go under any history, beside a model of kubelet's
bookkeeping and of each pod's silicon.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.families.nvidia.parts import shared_by
from tests.golden import U0, U1, golden_inventory, golden_slices, with_slices
from tests.ledger.book_parts import ILL, Clock, let_pass, replicated
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.families.nvidia.family import NvidiaFamily
from vgpu_agent.families.nvidia.ids import devices_behind
from vgpu_agent.families.nvidia.options import NvidiaOptions
from vgpu_agent.ledger import Ledger
from vgpu_agent.ledger.reconciliation import InterpretedHolding
from vgpu_agent.ledger.turns import round_seconds
from vgpu_agent.model import GrantState, Holding, Inventory, KubeletRecords, Owner, Resource, Share

OTHER = "example.com/part"
LAYOUTS = {
    "none": None,
    "empty": (),
    "small": golden_slices(count=3),
    "large": golden_slices("3g.20gb", 19968, 2, letter="e"),
}
GPU_OF = {U0: U0, U1: U1} | {
    each.uuid: U1 for slices in LAYOUTS.values() if slices for each in slices
}
WAYS = (
    NvidiaOptions(mig_strategy="mixed"),
    shared_by(2, name="nvidia.com/mig-1g.5gb", mig_strategy="mixed"),
    shared_by(2),  # GPUs, and slices not looked at
    NvidiaOptions(),
)


class SlicesAgainstKubelet(RuleBasedStateMachine):
    """The kubelet's own book is a dict from pod to resource and ids;
    GPU 1 is divided and united under it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.ledger = Ledger(clock=self.clock)
        self.pods: dict[int, tuple[str, tuple[str, ...]]] = {}
        self.pod_count = 0
        self.layout = "none"
        self.ill: set[str] = set()
        self.family = NvidiaFamily(WAYS[0])

    @initialize(layout=st.sampled_from(sorted(LAYOUTS)), way=st.sampled_from(WAYS))
    def begin(self, layout: str, way: NvidiaOptions) -> None:
        """A node with one GPU whole, and one that may be divided."""
        self.layout, self.family = layout, NvidiaFamily(way)
        self._look()

    # -- what happens ------------------------------------------------------------------------------

    @rule(data=st.data(), size=st.integers(1, 3), confirmed=st.booleans())
    def admit(self, data: st.DataObject, size: int, *, confirmed: bool) -> None:
        """The kubelet admits a pod onto free healthy ids of any resource;
        sometimes the admission fails after our answer.
        """
        name = data.draw(st.sampled_from(self._names))
        taken = {id_ for resource, ids in self.pods.values() if resource == name for id_ in ids}
        free = [
            entry.id.id
            for entry in self.ledger.listing(name)
            if entry.healthy and entry.id.id not in taken
        ]
        ids = tuple(data.draw(st.permutations(free))[:size])
        if not ids:
            return
        self.ledger.reserve(name, ids, self._shares(name, ids))
        if confirmed:
            self.pod_count += 1
            self.pods[self.pod_count] = name, ids

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def pod_ends(self, data: st.DataObject) -> None:
        """A pod ends, without any report."""
        del self.pods[data.draw(st.sampled_from(sorted(self.pods)))]

    @rule(layout=st.sampled_from(sorted(LAYOUTS)))
    def gpu_is_divided_anew(self, layout: str) -> None:
        """An operator switches MIG mode or the geometry, despite any holders."""
        self.layout = layout
        self._look()

    @rule(way=st.sampled_from(WAYS))
    def settings_change(self, way: NvidiaOptions) -> None:
        """MIG strategy and replicas, under running pods."""
        self.family = NvidiaFamily(way)
        self._look()

    @rule(uuid=st.sampled_from([U0, U1]))
    def health_flips(self, uuid: str) -> None:
        """A GPU falls ill or recovers, and its slices with it."""
        self.ill ^= {uuid}
        self._look()

    @rule(seconds=st.integers(1, 100), complete=st.booleans())
    def verify(self, seconds: int, *, complete: bool) -> None:
        """Time passes, and kubelet's records are read."""
        self.clock.now += seconds
        self._reconcile(complete=complete)

    @rule()
    def verify_until_settled(self) -> None:
        """After the reservations have aged, two complete passes make the book equal
        to kubelet's.
        """
        self.clock.now += 61
        self._reconcile()
        self._reconcile()
        assert self._booked() == self._held()
        assert all(grant.state is GrantState.IDENTIFIED for grant in self.ledger.grants)

    @rule()
    def agent_restarts(self) -> None:
        """A new process knows what kubelet knows, and which slices there were."""
        slices = self.ledger.mig_instances
        self.ledger = Ledger(clock=self.clock)
        self.ledger.mig_instances.update(slices)
        self._look()
        self._reconcile(initial=True)
        assert self._booked() == self._held()

    @rule()
    def all_pods_end(self) -> None:
        """Then every healthy device is there again, for both families,
        once the one that is offered it first has had its moment.
        """
        self.pods = {}
        self.verify_until_settled()
        let_pass(self.ledger, self.clock, round_seconds(2) + 1)
        self._look()
        for name in self._names:
            for entry in self.ledger.listing(name):
                assert entry.healthy == (GPU_OF[entry.id.device] not in self.ill), entry

    # -- what must be so ---------------------------------------------------------------------------

    @invariant()
    def the_book_is_sound(self) -> None:
        """Capacity of each slice, holders, exclusiveness, one family a GPU, one holder an id."""
        assert self.ledger.audit() == []

    @invariant()
    def what_a_live_pod_holds_is_in_the_book_and_in_the_list(self) -> None:
        """Through divisions and restarts; where the resource is still offered
        and the device is gone, Unhealthy.
        """
        booked = {(grant.resource, id_) for grant in self.ledger.grants for id_ in grant.ids}
        assert {(name, id_) for name, ids in self.pods.values() for id_ in ids} <= booked
        for name, ids in self.pods.values():
            listed = (
                {entry.id.id: entry.healthy for entry in self.ledger.listing(name)}
                if name in self._names
                else {}
            )
            for id_ in ids if listed or name in self._names else ():
                assert self._device(id_) in self._there or listed[id_] is False, (
                    f"{id_} vanished from the list of {name}"
                )

    @invariant()
    def nothing_is_offered_that_somebody_reaches_otherwise(self) -> None:
        """A healthy id is of a GPU that no other family has, of a slice whose GPU is not held
        whole, of a GPU no slice of which is held.
        """
        for name in self._names:
            for entry in self.ledger.listing(name):
                if not entry.healthy:
                    continue
                device, gpu = entry.id.device, GPU_OF[entry.id.device]
                for held_by, ids in self.pods.values():
                    for other in map(self._device, ids):
                        if GPU_OF[other] != gpu:
                            continue
                        assert (held_by == OTHER) == (name == OTHER), (
                            f"{name} offers {entry.id.id}, {held_by} has {ids}"
                        )
                        assert name == OTHER or device == other or gpu not in (device, other), (
                            f"{entry.id.id} beside {ids}"
                        )

    # -- how it is done ----------------------------------------------------------------------------

    @property
    def _names(self) -> list[str]:
        return [resource.name for resource in self.ledger.resources]

    @property
    def _inventory(self) -> Inventory:
        slices = LAYOUTS[self.layout]
        whole = golden_inventory(
            **{name: ILL for name, uuid in (("U0", U0), ("U1", U1)) if uuid in self.ill}
        )
        return whole if slices is None else with_slices(whole, U1=slices)

    @property
    def _there(self) -> set[str]:
        return {U0, U1, *(each.uuid for each in LAYOUTS[self.layout] or ())}

    @staticmethod
    def _device(id_: str) -> str:
        return next(iter(devices_behind([id_.removeprefix("v-")])))

    def _look(self) -> None:
        inventory = self._inventory
        parts = Resource(
            OTHER,
            "other",
            tuple(DeviceId(f"v-{entry.id}", entry.device) for entry in replicated(2).ids),
            2,
        )
        self.ledger.observe(inventory)
        self.ledger.offer([*self.family.resources(inventory), parts])

    def _shares(self, name: str, ids: tuple[str, ...]) -> tuple[Share, ...]:
        if name == OTHER:
            return tuple(Share(uuid) for uuid in dict.fromkeys(map(self._device, ids)))
        return self.family.shares(name, ids, self._inventory)

    def _interpret(self, holding: Holding) -> InterpretedHolding:
        return InterpretedHolding(
            "other" if holding.resource == OTHER else "nvidia",
            self._shares(holding.resource, holding.ids),
        )

    def _booked(self) -> set[tuple[str, frozenset[str]]]:
        return {(grant.resource, frozenset(grant.ids)) for grant in self.ledger.grants}

    def _held(self) -> set[tuple[str, frozenset[str]]]:
        return {(name, frozenset(ids)) for name, ids in self.pods.values()}

    def _reconcile(self, *, complete: bool = True, initial: bool = False) -> None:
        holdings = tuple(
            Holding(name, ids, Owner("main", f"uid-{pod}", "default", f"pod-{pod}"))
            for pod, (name, ids) in self.pods.items()
        )
        self.ledger.reconcile(
            KubeletRecords(holdings, complete),
            self._interpret,
            reservation_seconds=60,
            initial=initial,
        )


SlicesAgainstKubelet.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None
)
TestSlicesAgainstKubelet = SlicesAgainstKubelet.TestCase
