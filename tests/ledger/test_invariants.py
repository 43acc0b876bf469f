"""The ledger under any history: hypothesis drives it beside an independent model
of kubelet's bookkeeping.
"""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.golden import U0, U1, golden_inventory
from tests.ledger.book_parts import (
    ILL,
    WHOLE,
    Clock,
    interpret,
    replica_shares,
    replicated,
    whole_shares,
)
from vgpu_agent.errors import LedgerError
from vgpu_agent.ledger import Ledger
from vgpu_agent.model import GrantState, Health, Holding, KubeletRecords, Owner

NAMES = ("nvidia.com/gpu", "nvidia.com/gpu.shared")
REPLICAS = 3


class LedgerAgainstKubelet(RuleBasedStateMachine):
    """The kubelet's own book is a dict from pod to resource and ids; the ledger never contradicts
    itself and agrees after verification.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.ledger = Ledger(clock=self.clock, wall_clock=self.clock)
        self.pods: dict[int, tuple[str, tuple[str, ...]]] = {}
        self.name = NAMES[0]
        self.ill: set[str] = set()
        self.cordoned: set[str] = set()
        self.gone: set[str] = set()
        self.shared = True
        self.pod_count = 0

    @initialize(shared=st.booleans())
    def begin(self, *, shared: bool) -> None:
        """A node whose GPUs are shared or whole."""
        self.shared = shared
        self._observe()
        self._offer()

    def _observe(self) -> None:
        health = {
            name: ILL if uuid in self.ill else Health() for name, uuid in (("U0", U0), ("U1", U1))
        }
        whole = golden_inventory(**health)
        self.ledger.observe(
            msgspec.structs.replace(
                whole, gpus=tuple(gpu for gpu in whole.gpus if gpu.uuid not in self.gone)
            )
        )

    def _offer(self) -> None:
        self.ledger.offer(
            [
                msgspec.structs.replace(
                    replicated(REPLICAS) if self.shared else WHOLE, name=self.name
                )
            ]
        )

    def _free(self) -> list[str]:
        """Return the ids from which the kubelet would choose:
        healthy ids of the list that no pod of its own holds.
        """
        taken = self._taken()
        return [
            entry.id.id
            for entry in self.ledger.listing(self.name)
            if entry.healthy and entry.id.id not in taken
        ]

    def _taken(self) -> set[str]:
        """Return the ids that live pods hold of the resource under its name of today."""
        return {id_ for name, ids in self.pods.values() if name == self.name for id_ in ids}

    def _shares(self, ids: tuple[str, ...]) -> tuple[object, ...]:
        return tuple(replica_shares(ids)) if "::" in ids[0] else tuple(whole_shares(ids))

    @rule(size=st.integers(1, 4), confirmed=st.booleans())
    def admit(self, size: int, *, confirmed: bool) -> None:
        """The kubelet admits a pod onto free healthy ids;
        sometimes the admission fails after our answer.
        """
        ids = tuple(self._free()[:size])
        if not ids:
            return
        # shares of either kind
        grant = self.ledger.reserve(self.name, ids, self._shares(ids))  # type: ignore[arg-type]  # ids as the state machine draws them
        # in the order of the first call, when kubelet asks for them once more in another
        assert sorted(grant.ids) == sorted(ids)
        assert self.ledger.reserve(self.name, ids, self._shares(ids)) == grant  # type: ignore[arg-type]  # ids as the state machine draws them
        if confirmed:
            self.pod_count += 1
            self.pods[self.pod_count] = self.name, ids

    @rule(size=st.integers(1, 3), data=st.data())
    def ask_for_anything(self, size: int, data: st.DataObject) -> None:
        """Nonsense from kubelet is refused whole or booked whole."""
        universe = [entry.id for entry in replicated(REPLICAS).ids] + [U0, U1, "GPU-x"]
        ids = tuple(data.draw(st.lists(st.sampled_from(universe), min_size=size, max_size=size)))
        if self._taken() & set(ids):
            return  # kubelet never gives away what a live pod of its own holds
        listing = {entry.id.id: entry.healthy for entry in self.ledger.listing(self.name)}
        before = self.ledger.grants
        try:
            self.ledger.reserve(self.name, ids, self._shares(ids))  # type: ignore[arg-type]  # ids as the state machine draws them
        except LedgerError:
            assert self.ledger.grants == before
        else:
            assert all(listing.get(id_) for id_ in ids), (
                "something was granted on an unhealthy, cordoned or unknown device"
            )

    @rule(data=st.data())
    def pod_ends(self, data: st.DataObject) -> None:
        """A pod ends, without any report."""
        if self.pods:
            del self.pods[data.draw(st.sampled_from(sorted(self.pods)))]

    @rule(uuid=st.sampled_from([U0, U1]))
    def health_flips(self, uuid: str) -> None:
        """A GPU falls ill or recovers."""
        self.ill ^= {uuid}
        self._observe()

    @rule(uuid=st.sampled_from([U0, U1]))
    def card_goes_or_comes(self, uuid: str) -> None:
        """A GPU is unplugged or plugged in."""
        self.gone ^= {uuid}
        self._observe()

    @rule(uuid=st.sampled_from([U0, U1]))
    def cordon_flips(self, uuid: str) -> None:
        """An operator cordons a GPU or takes it back."""
        if uuid in self.cordoned:
            self.ledger.uncordon(uuid)
        else:
            self.ledger.cordon(uuid, "test")
        self.cordoned ^= {uuid}

    @rule()
    def sharing_is_reconfigured(self) -> None:
        """The operator switches between whole and shared GPUs under running pods."""
        self.shared = not self.shared
        self._offer()

    @rule()
    def resource_is_renamed(self) -> None:
        """The operator switches renameByDefault under running pods:
        the same ids under another name.
        """
        self.name = NAMES[self.name == NAMES[0]]
        self._offer()

    @rule(seconds=st.integers(1, 100))
    def time_passes(self, seconds: int) -> None:
        """Reservations age."""
        self.clock.now += seconds

    @rule(complete=st.booleans())
    def verify(self, *, complete: bool) -> None:
        """One pass over kubelet's records."""
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
        """A new process knows what kubelet knows, before it offers anything new."""
        self.ledger = Ledger(clock=self.clock, wall_clock=self.clock)
        self._observe()
        self._offer()
        for uuid in self.cordoned:
            self.ledger.cordon(uuid, "test")
        self._reconcile(initial=True)
        assert self._booked() == self._held()

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
            KubeletRecords(holdings, complete), interpret, reservation_seconds=60, initial=initial
        )

    @invariant()
    def the_book_is_sound(self) -> None:
        """Capacity, cores, holders, exclusiveness, one family a GPU, one holder an id."""
        assert self.ledger.audit() == []

    @invariant()
    def what_a_live_pod_holds_is_in_the_book(self) -> None:
        """An id that kubelet confirmed is held by a grant at every moment, through illness,
        restarts and new settings.
        """
        booked = {(grant.resource, id_) for grant in self.ledger.grants for id_ in grant.ids}
        assert {(name, id_) for name, ids in self.pods.values() for id_ in ids} <= booked


LedgerAgainstKubelet.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
TestLedgerAgainstKubelet = LedgerAgainstKubelet.TestCase
