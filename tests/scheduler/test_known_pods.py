"""Facts about pods beside the cards that they hold."""

from __future__ import annotations

import msgspec

from vgpu_agent.pods import Pod, SchedulingFacts
from vgpu_agent.scheduler.known_pods import KnownPods


def a_pod(
    name: str, node: str = "", *, gang: str = "", owner: str = "", phase: str = "Running"
) -> Pod:
    """A pod of a group."""
    facts = SchedulingFacts("team", name, gang=gang, owner=owner)
    return Pod(f"uid-{name}", "team", name, node, phase, scheduling=facts)


def test_peers_are_pods_of_the_gang_or_else_of_the_controller() -> None:
    """vgpu-manager §5.7."""
    known = KnownPods()
    for pod in (
        a_pod("a", gang="team/g", owner="team/job"),
        a_pod("b", "n0", gang="team/g", owner="team/other"),
        a_pod("c", "n0", owner="team/job"),
    ):
        known.see(pod)
    assert known.peers("uid-a", "team/g") == ["uid-b"]
    assert known.peers("uid-x", "team/job") == ["uid-c"]
    assert known.peers("uid-x", "") == []


def test_pods_that_are_gone_are_forgotten() -> None:
    """Also those that leave their group, or have ended."""
    known = KnownPods()
    known.see(a_pod("a", "n0", gang="team/g"))
    known.see(a_pod("a", "n0", gang="team/h"))
    assert (known.peers("", "team/g"), known.peers("", "team/h")) == ([], ["uid-a"])
    known.see(a_pod("a", "n0", gang="team/h", phase="Succeeded"))
    known.see(a_pod("b", "n0", gang="team/h"))
    known.forget("uid-b")
    known.forget("uid-b")
    assert (known._pods, known._groups) == ({}, {})


def test_unbound_pods_without_a_group_are_not_kept() -> None:
    """Nothing is asked about them."""
    known = KnownPods()
    known.see(a_pod("a"))
    known.see(Pod("uid-b", "team", "b", "n0"))
    assert known._pods == {}


def test_labels_are_kept_of_bound_pods_only() -> None:
    """They matter to the budgets of pods that may be displaced. Thousands of waiting pods may have
    64 KiB of them each.
    """
    known, labels = KnownPods(), (("app", "train"),)
    for node in ("", "n0"):
        pod = a_pod("a", node, gang="team/g")
        facts = SchedulingFacts("team", "a", gang="team/g", labels=labels)
        known.see(msgspec.structs.replace(pod, scheduling=facts))
        found = known.get("uid-a")
        assert found is not None
        assert found.facts.labels == (labels if node else ())
