"""The book against kubelet's records: what they prove, add, correct and end,
and what a gap in them does not.
"""

from __future__ import annotations

import pytest

from tests.golden import U0, U1
from tests.ledger.book_parts import (
    SERVE,
    TRAIN,
    WHOLE,
    Clock,
    book,
    held,
    interpret,
    make,
    reconcile,
    replicated,
)
from tests.ledger.test_claims import VGPU, counted, usable
from vgpu_agent.model import Grant, GrantState, KubeletRecords, Owner


def test_records_from_before_an_allocate_say_nothing_about_it(clock: Clock) -> None:
    """While they were read the old holder ended and kubelet gave its id away:
    the grant is not the old holder's.
    """
    ledger = make(clock, WHOLE)
    reconcile(ledger, held(U0), initial=True)
    newest = ledger.newest
    book(ledger, U0)
    assert (
        ledger.reconcile(
            KubeletRecords((held(U0),)), interpret, reservation_seconds=60, newest=newest
        )
        == []
    )
    assert ledger.grants[0].owner is None
    assert reconcile(ledger, held(U0, owner=SERVE)) == ["ledger.named"]


def test_a_reservation_gets_its_container_from_kubelets_records(clock: Clock) -> None:
    """reserved → proven once checkpoint and pod-resources agree on the container.
    That is no drift.
    """
    ledger = make(clock, WHOLE)
    book(ledger, U0)
    assert reconcile(ledger, held(U0)) == ["ledger.named"]
    (grant,) = ledger.grants
    assert (grant.state, grant.owner) == (GrantState.IDENTIFIED, TRAIN)
    assert reconcile(ledger, held(U0)) == []


def test_one_source_alone_grants_but_does_not_prove(clock: Clock) -> None:
    """With pod-resources silent, the checkpoint names the UID.
    The name comes later and nothing is forgotten in between.
    """
    ledger = make(clock, WHOLE)
    book(ledger, U0)
    reconcile(ledger, held(U0, owner=Owner("main", pod_uid="uid-train")), complete=False)
    assert ledger.grants[0].state is GrantState.GRANTED
    reconcile(ledger, held(U0, owner=Owner("main", namespace="default", pod="train")))
    assert (ledger.grants[0].state, ledger.grants[0].owner) == (GrantState.IDENTIFIED, TRAIN)


def test_at_start_the_ledger_is_rebuilt_from_kubelets_records(clock: Clock) -> None:
    """kubelet V10: what kubelet knows is in the book before anything is registered,
    and is no drift.
    """
    ledger = make(clock, replicated(4))
    corrections = ledger.reconcile(
        KubeletRecords((held(f"{U0}::1"),)), interpret, reservation_seconds=60, initial=True
    )
    assert [(item.event, item.drift) for item in corrections] == [("ledger.adopted", False)]
    assert ledger.grants[0].owner == TRAIN
    assert ledger.free_ids("nvidia.com/gpu") == 7


def test_a_holder_that_the_ledger_did_not_know_is_drift_and_is_corrected(clock: Clock) -> None:
    """The kubelet wins: the book takes over what it says and counts the disagreement."""
    ledger = make(clock, WHOLE)
    ledger.reconcile(KubeletRecords(entries=()), interpret, reservation_seconds=60, initial=True)
    (correction,) = ledger.reconcile(KubeletRecords((held(U0),)), interpret, reservation_seconds=60)
    assert (correction.event, correction.drift) == ("ledger.adopted", True)


@pytest.mark.parametrize(
    ("records", "passes"),
    [
        (KubeletRecords(entries=()), 1),
        (KubeletRecords((held(U0),)), 1),
        (KubeletRecords(complete=False, trouble="both are silent"), None),
        (KubeletRecords(), 2),
    ],
    ids=["the checkpoint", "pods are listed", "nobody", "no pods are listed"],
)
def test_the_book_is_rebuilt_once_kubelet_has_told_who_holds_what(
    clock: Clock, records: KubeletRecords, passes: int | None
) -> None:
    """An empty list alone may be that of a kubelet which has just been started.
    What is adopted until then is no drift.
    """
    ledger = make(clock, WHOLE)
    for done in range(1, 4):
        ledger.reconcile(records, interpret, reservation_seconds=60)
        assert ledger.rebuilt is (passes is not None and done >= passes)
        assert ledger.in_doubt is not ledger.rebuilt
    (correction,) = ledger.reconcile(KubeletRecords((held(U1),)), interpret, reservation_seconds=60)
    assert correction.drift is (passes is not None)


def test_another_owner_in_kubelets_records_is_drift_and_is_corrected(clock: Clock) -> None:
    """The same ids with a different pod: the book follows kubelet."""
    ledger = make(clock, WHOLE)
    book(ledger, U0)
    reconcile(ledger, held(U0))
    (correction,) = ledger.reconcile(
        KubeletRecords((held(U0, owner=SERVE),)), interpret, reservation_seconds=60
    )
    assert (correction.event, correction.drift) == ("ledger.renamed", True)
    assert ledger.grants[0].owner == SERVE


def test_other_ids_in_kubelets_records_replace_the_grant(clock: Clock) -> None:
    """A container that holds one id less than booked is corrected to what kubelet says."""
    ledger = make(clock, replicated(4))
    book(ledger, f"{U0}::0", f"{U0}::1")
    assert reconcile(ledger, held(f"{U0}::0")) == ["ledger.adopted"]
    assert {grant.ids for grant in ledger.grants} == {(f"{U0}::0",), (f"{U0}::1",)}


def test_a_pod_that_ended_is_released_after_two_passes(clock: Clock) -> None:
    """One pass without the pod may be kubelet's own gap; the second releases."""
    ledger = make(clock, WHOLE)
    book(ledger, U0)
    reconcile(ledger, held(U0))
    assert reconcile(ledger) == []
    assert reconcile(ledger) == ["ledger.released"]
    assert ledger.grants == ()


def test_a_pod_that_is_back_in_the_second_pass_is_kept(clock: Clock) -> None:
    """Misses count only in a row."""
    ledger = make(clock, WHOLE)
    book(ledger, U0)
    for _ in range(3):
        reconcile(ledger, held(U0))
        assert reconcile(ledger) == []


def test_an_incomplete_picture_never_takes_away(clock: Clock) -> None:
    """pod-resources silent or kubelet just restarted: grants stay, however often."""
    ledger = make(clock, WHOLE)
    book(ledger, U0)
    reconcile(ledger, held(U0))
    for _ in range(3):
        assert reconcile(ledger, complete=False) == []
        assert reconcile(ledger, may_release=False) == []
    assert len(ledger.grants) == 1


def test_a_reservation_that_kubelet_never_confirms_expires(clock: Clock) -> None:
    """An admission that failed after our answer leaves no ghost."""
    ledger = make(clock, WHOLE)
    book(ledger, U0)
    clock.now += 59
    assert reconcile(ledger) == []
    clock.now += 2
    assert reconcile(ledger) == ["ledger.released"]


def test_records_of_other_plugins_are_none_of_our_business(clock: Clock) -> None:
    """A holding of another vendor's resource is neither adopted nor drift."""
    assert reconcile(make(clock, WHOLE), held("card-0", resource="amd.com/gpu")) == []


def of_train(grant: Grant) -> bool:
    """Tell whether it is TRAIN's, which has ended according to the API server."""
    return grant.owner == TRAIN


def test_a_pod_that_has_ended_by_the_api_servers_word_leaves_with_the_first_reading_without_it(
    clock: Clock,
) -> None:
    """Two independent sources agree; kubelet's records alone need two readings, and the API
    server's word alone takes nothing.
    """
    ledger = make(clock, replicated(2))
    records = KubeletRecords((held(f"{U0}::0"), held(f"{U1}::0", owner=SERVE)))
    ledger.reconcile(records, interpret, reservation_seconds=60, initial=True)
    assert ledger.reconcile(records, interpret, reservation_seconds=60, has_ended=of_train) == []
    nothing = KubeletRecords()
    (released,) = ledger.reconcile(
        nothing, interpret, reservation_seconds=60, has_ended=of_train, ended_only=True
    )
    assert (released.event, released.reason, released.grant.owner) == (
        "ledger.released",
        "the pod has ended",
        TRAIN,
    )
    assert [grant.owner for grant in ledger.grants] == [SERVE]


@pytest.mark.parametrize("without", ["complete records", "the right to release"])
def test_an_ended_pod_stays_while_kubelets_records_prove_nothing(
    clock: Clock, without: str
) -> None:
    """Without pod-resources no pod is known to be gone,
    nor while the kubelet finds its pods again after a restart.
    """
    ledger = make(clock, WHOLE)
    reconcile(ledger, held(U0), initial=True)
    records = KubeletRecords(complete=without != "complete records")
    may_release = without != "the right to release"
    assert (
        ledger.reconcile(
            records, interpret, reservation_seconds=60, may_release=may_release, has_ended=of_train
        )
        == []
    )
    assert len(ledger.grants) == 1


def test_a_look_for_ended_pods_is_no_pass_for_the_others(clock: Clock) -> None:
    """Such looks come in quick succession, and would meet the same gap
    in kubelet's records twice.
    """
    ledger = make(clock, WHOLE)
    reconcile(ledger, held(U0), initial=True)
    for _ in range(3):
        assert (
            ledger.reconcile(KubeletRecords(), interpret, reservation_seconds=60, ended_only=True)
            == []
        )
    assert not ledger.in_doubt
    assert reconcile(ledger) == []
    assert reconcile(ledger) == ["ledger.released"]


NOTHING_READ = KubeletRecords(complete=False, trouble="neither source can be read")


def test_several_families_are_offered_nothing_while_no_record_has_been_read(clock: Clock) -> None:
    """A GPU that pods of one family hold would be given to another."""
    ledger = make(clock, WHOLE, counted(VGPU))
    version = ledger.revision.version
    ledger.reconcile(NOTHING_READ, interpret, reservation_seconds=60, initial=True)
    assert (usable(ledger, VGPU), usable(ledger, WHOLE.name)) == (set(), set())
    assert {held.reason.partition(" since")[0] for held in ledger.held_back(VGPU)} == {
        "neither of the kubelet's records could be read"
    }
    assert ledger.revision.version > version, "streams send the new lists"
    version = ledger.revision.version
    ledger.reconcile(KubeletRecords((held(U0),)), interpret, reservation_seconds=60)
    assert (usable(ledger, VGPU), usable(ledger, WHOLE.name)) == ({U1}, {U0, U1})
    assert ledger.revision.version > version


def test_a_single_family_is_offered_everything_while_no_record_has_been_read(clock: Clock) -> None:
    """The kubelet itself gives no id twice, and a node without GPUs helps nobody."""
    ledger = make(clock, WHOLE)
    ledger.reconcile(NOTHING_READ, interpret, reservation_seconds=60, initial=True)
    assert usable(ledger, WHOLE.name) == {U0, U1}


def test_records_that_can_no_longer_be_read_take_nothing_away(clock: Clock) -> None:
    """The ledger keeps what it knew."""
    ledger = make(clock, WHOLE, counted(VGPU))
    ledger.reconcile(KubeletRecords(entries=()), interpret, reservation_seconds=60, initial=True)
    ledger.reconcile(NOTHING_READ, interpret, reservation_seconds=60)
    assert (usable(ledger, VGPU), usable(ledger, WHOLE.name)) == ({U0, U1}, {U0, U1})
