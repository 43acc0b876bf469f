"""The book of this node's pods."""

from __future__ import annotations

import pytest

from vgpu_agent import pods
from vgpu_agent.pods import Pod, PodCache


def pod(name: str, uid: str = "", created_at: float = 0.0) -> Pod:
    """A pod of that name."""
    return Pod(uid or f"uid-{name}", "default", name, created_at=created_at)


def test_pods_are_kept_in_the_order_in_which_they_were_seen_bound() -> None:
    """The first list by creation, later ones as they come. A change keeps its pod's place."""
    book = PodCache()
    book.replace([pod("b", created_at=2), pod("a", created_at=1)])
    book.put(pod("0"))
    book.put(Pod("uid-a", "default", "a", phase="Running", created_at=1))
    assert [each.name for each in book.pods] == ["a", "b", "0"]


def test_readers_are_woken_by_changes_only() -> None:
    """A pod that is written again as it was wakes no reader."""
    book = PodCache()
    book.replace([pod("a")])
    version = book.revision.version
    book.put(pod("a"))
    book.replace([pod("a")])
    book.remove(pod("b"))
    assert book.revision.version == version
    book.remove(pod("a"))
    assert book.revision.version == version + 1
    assert book.synced.is_set()


def test_a_late_word_about_a_predecessor_removes_nobody() -> None:
    """The API server's UID decides, also where a static pod's successor has its hash."""
    mirror = {pods.MIRROR_POD: "x", pods.STATIC_POD_HASH: "hash"}
    book = PodCache()
    book.put(Pod("first", "default", "static", annotations=mirror, reported=True))
    book.put(Pod("second", "default", "static", annotations=mirror, reported=True))
    book.remove(Pod("first", "default", "static", annotations=mirror))
    found = book.get("hash")
    assert found is not None
    assert (found.uid, found.kubelet_uid, found) == (
        "second",
        "hash",
        book.named("default", "static"),
    )


def test_a_name_that_was_used_again_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kubelet may still have the predecessor. Only so many names are kept."""
    book = PodCache()
    book.replace([pod("web", "old")])
    assert book.is_only_one_of_its_name(pod("web", "old"))
    book.replace([pod("web", "new")])
    assert not book.is_only_one_of_its_name(pod("web", "new"))
    monkeypatch.setattr(pods, "_MAX_NAMES", 1)
    book.put(pod("other"))
    assert book.is_only_one_of_its_name(pod("web", "new"))


def test_of_two_pods_of_one_name_the_later_one_is_found_by_it() -> None:
    """Both may be in the book for a moment."""
    book = PodCache()
    book.put(pod("web", "old"))
    book.put(pod("web", "new"))
    found = book.named("default", "web")
    assert found is not None
    assert found.uid == "new"
    assert book.named("default", "none") is None


def test_every_change_is_seen_by_who_has_looked_before() -> None:
    """A pod that comes, one that changes, one that goes, and a whole list."""
    book = PodCache()
    assert not book.pods
    book.put(pod("a"))
    assert [each.name for each in book.pods] == ["a"]
    book.put(Pod("uid-a", "default", "a", phase="Running"))
    assert [each.phase for each in book.pods] == ["Running"]
    book.remove(pod("a"))
    assert not book.pods
    book.replace([pod("b")])
    assert [each.name for each in book.pods] == ["b"]


def test_a_pod_that_was_left_out_is_not_taken_for_one_that_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its share would be given to another pod while it runs."""
    monkeypatch.setattr(pods, "MAX_PODS", 1)
    book = PodCache()
    book.replace(
        [Pod("a", "default", "a", scheduled=True), Pod("b", "default", "b", scheduled=True)]
    )
    (kept,) = book.pods
    beyond = {"a": "b", "b": "a"}[kept.uid]
    assert book.get(beyond) is None
    assert book.was_left_out(beyond)
    book.remove(Pod(beyond, "default", beyond))
    assert not book.was_left_out(beyond)


@pytest.mark.parametrize("reported", [True, False])
def test_a_static_pod_whose_mirror_was_left_out_is_known_by_the_kubelets_uid(
    monkeypatch: pytest.MonkeyPatch, *, reported: bool
) -> None:
    """Grants have that UID. A mirror without a status may be any user's, and keeps no grant."""
    monkeypatch.setattr(pods, "MAX_PODS", 1)
    annotations = {pods.MIRROR_POD: "x", pods.STATIC_POD_HASH: "hash"}
    mirror = Pod("mirror", "default", "static", annotations=annotations, reported=reported)
    book = PodCache()
    book.replace([mirror])
    book.put(Pod("a", "default", "a", scheduled=True))
    assert book.get("hash") is None
    assert book.was_left_out("hash") is reported
    assert not book.was_left_out("")
    book.replace([Pod("a", "default", "a", scheduled=True), mirror])
    assert book.was_left_out("hash") is reported
    book.remove(mirror)
    assert not book.was_left_out("hash")


def test_a_pod_that_is_displaced_in_vain_is_gone_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Readers wait for the revision, and compare what `pods` and `get` say."""
    book = PodCache()
    book.replace([Pod("a", "default", "a", scheduled=False)])
    before = book.revision.version
    monkeypatch.setattr(pods, "MAX_BYTES", 1)
    book.put(Pod("large", "default", "large", scheduled=True))
    assert (book.get("a"), book.pods) == (None, ())
    assert book.revision.version > before


def test_an_ended_pod_is_forgotten_in_time_and_when_it_is_deleted() -> None:
    """It is remembered for its last annotations only."""
    now = 0.0
    book = PodCache(clock=lambda: now)
    ended = [Pod(name, "default", name, scheduled=True) for name in ("a", "b", "c")]
    book.replace(ended)
    for pod in ended:
        book.end(pod)
    book.remove(ended[0])
    assert [pod.name for pod in book.pods] == ["b", "c"]
    now = 601.0
    book.put(Pod("d", "default", "d", scheduled=True))
    assert [pod.name for pod in book.pods] == ["d"]


def test_a_pod_has_ended_when_the_api_server_says_so_and_not_before_it_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Grants are released by it, so an absent pod counts only where it would have been seen."""
    monkeypatch.setattr(pods, "MAX_PODS", 2)
    uids = [f"0e6e9a8c-1111-4222-8333-00000000000{number}" for number in range(5)]
    book = PodCache()
    assert not book.has_ended(uids[0])
    book.replace([pod("a", uids[0]), pod("b", uids[1])])
    assert not book.has_ended(uids[0])
    book.put(pod("left-out", uids[2]))
    assert not book.has_ended(uids[2])
    book.end(pod("a", uids[0]))
    book.remove(pod("b", uids[1]))
    assert [book.has_ended(uid) for uid in (uids[0], uids[1], uids[4])] == [True, True, True]


def test_a_static_pod_has_not_ended_because_its_mirror_is_gone() -> None:
    """The kubelet runs it from a file and makes another mirror. The right to delete pods in its
    namespace is enough to delete one.
    """
    book = PodCache()
    book.replace([])
    assert not book.has_ended("c0ffee00c0ffee00c0ffee00c0ffee00")
