"""The book under any history of schedulers that overcommit: compute and slots may be exceeded only
where one decided so, and it shows.

Beside the ledger runs a plain list of holders. What is left must follow from that list after every
step, also after a restart.
"""

from __future__ import annotations

import dataclasses

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.golden import U0, U1, golden_inventory
from tests.ledger.book_parts import Clock
from vgpu_agent.device_ids import DeviceId
from vgpu_agent.errors import CapacityError, LedgerError, OvercommitError
from vgpu_agent.ledger import Ledger
from vgpu_agent.ledger.reconciliation import InterpretedHolding
from vgpu_agent.model import Decider, Holding, KubeletRecords, Owner, Resource, Share

NUMBER, SLOTS, MEMORY_MIB = "volcano.sh/vgpu-number", 3, 40960
GPUS = (U0, U1)
RESOURCE = Resource(
    NUMBER,
    "volcano-vgpu",
    tuple(DeviceId(f"{uuid}-{place}", uuid) for uuid in GPUS for place in range(SLOTS)),
    holders_per_device=SLOTS,
    decided_by=Decider.POD,
)


@dataclasses.dataclass(frozen=True)
class _Held:
    ids: tuple[str, ...]
    share: Share
    owner: Owner
    by_scheduler: bool


class SchedulersOvercommit(RuleBasedStateMachine):
    """Pods of schedulers and of the agent's own placement, in any order,
    on two GPUs of three slots each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.held: dict[int, _Held] = {}
        self.count = 0

    @initialize()
    def begin(self) -> None:
        """An agent starts on an empty node."""
        self._new_agent()

    def _new_agent(self) -> None:
        self.ledger = Ledger(clock=self.clock)
        self.ledger.observe(golden_inventory())
        self.ledger.offer([RESOURCE])

    def _sums(self, gpu: str, *, firm: bool = False) -> tuple[int, int, int]:
        """MiB, percent and holders of ``gpu``; with ``firm`` only of those
        that no scheduler decided.
        """
        on = [
            each.share
            for each in self.held.values()
            if each.share.device == gpu and not (firm and each.by_scheduler)
        ]
        return (
            sum(share.memory_mib for share in on),
            sum(share.cores_percent for share in on),
            len(on),
        )

    @rule(
        gpu=st.sampled_from(GPUS),
        mib=st.sampled_from([1024, 10240, 20480]),
        cores=st.sampled_from([0, 30, 60, 100]),
        exclusive=st.booleans(),
        by_scheduler=st.booleans(),
    )
    def start(self, gpu: str, mib: int, cores: int, *, exclusive: bool, by_scheduler: bool) -> None:
        """A container starts, on an id that says nothing about its GPU."""
        taken = {id_ for each in self.held.values() for id_ in each.ids}
        ids = tuple(entry.id for entry in RESOURCE.ids if entry.id not in taken)[:1]
        if not ids:
            return
        self.count += 1
        owner, share = (
            Owner("main", f"uid-{self.count}", "default", f"p{self.count}"),
            Share(gpu, mib, cores, exclusive),
        )
        memory, percent, holders = self._sums(gpu)
        alone = any(each.share.exclusive for each in self.held.values() if each.share.device == gpu)
        too_much = memory + mib > MEMORY_MIB or (holders > 0 and (alone or exclusive))
        beyond = percent + cores > 100 or holders + 1 > SLOTS
        before, refusal = self.ledger.grants, None
        try:
            self.ledger.decide(
                NUMBER, ids, (share,), owner, evidence=("a test",), may_overcommit=by_scheduler
            )
        except LedgerError as err:
            refusal = type(err)
            assert self.ledger.grants == before
        expected = (
            CapacityError if too_much else OvercommitError if beyond and not by_scheduler else None
        )
        assert refusal is expected
        if refusal is None:
            self.held[self.count] = _Held(ids, share, owner, by_scheduler)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def start_again(self, data: st.DataObject) -> None:
        """A container crashes; whatever its neighbours got since, it keeps what it has."""
        each = self.held[data.draw(st.sampled_from(sorted(self.held)))]
        self.ledger.decide(
            NUMBER,
            each.ids,
            (each.share,),
            each.owner,
            evidence=("again",),
            may_overcommit=each.by_scheduler,
        )

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A pod ends."""
        each = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
        grant = self.ledger.find(NUMBER, each.ids)
        assert grant is not None
        self.ledger.release(grant.number)

    @rule()
    def restart(self) -> None:
        """A new agent, which knows what kubelet and the records of the grants say."""
        by_ids = {each.ids: each for each in self.held.values()}
        self._new_agent()

        def interpret(holding: Holding) -> InterpretedHolding:
            each = by_ids[holding.ids]
            key = (each.owner.pod_uid, each.owner.container)
            return InterpretedHolding(
                "volcano-vgpu",
                (each.share,),
                by_pod=True,
                decided_for=key,
                may_overcommit=each.by_scheduler,
            )

        records = KubeletRecords(
            tuple(Holding(NUMBER, each.ids, each.owner) for each in self.held.values())
        )
        self.ledger.reconcile(records, interpret, reservation_seconds=60, initial=True)

    @invariant()
    def the_book_is_sound(self) -> None:
        """Memory, exclusive holders, and what no scheduler decided never exceed a GPU."""
        assert self.ledger.audit() == []
        for gpu in GPUS:
            memory, _, _ = self._sums(gpu)
            _, percent, holders = self._sums(gpu, firm=True)
            assert memory <= MEMORY_MIB
            assert percent <= 100
            assert holders <= SLOTS

    @invariant()
    def what_is_left_is_exact_and_never_negative(self) -> None:
        """The next question finds zero of what is overcommitted,
        and exactly the rest of everything else.
        """
        for room in self.ledger.rooms(NUMBER):
            memory, percent, holders = self._sums(room.device)
            left = (room.memory_free_mib, room.cores_free_percent, room.holders_free)
            assert left == (MEMORY_MIB - memory, max(0, 100 - percent), max(0, SLOTS - holders))

    @invariant()
    def what_is_overcommitted_shows(self) -> None:
        """Exactly the GPUs of which more is given out than they have."""
        sums = {gpu: self._sums(gpu)[1:] for gpu in GPUS}
        beyond = {gpu: each for gpu, each in sums.items() if each[0] > 100 or each[1] > SLOTS}
        assert {
            each.device: (each.cores_percent, each.holders) for each in self.ledger.overcommitted
        } == beyond


SchedulersOvercommit.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None
)
TestSchedulersOvercommit = SchedulersOvercommit.TestCase
