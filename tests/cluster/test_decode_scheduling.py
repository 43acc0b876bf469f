"""The facts that a scheduler reads from pods and PodDisruptionBudgets."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import quickest_call
from vgpu_agent.cluster import decode
from vgpu_agent.cluster.decode_scheduling import budget, facts, with_facts
from vgpu_agent.cluster.quantities import thousandths
from vgpu_agent.errors import ClusterError
from vgpu_agent.placement.nodes.budgets import Budget, Requirement, Selector
from vgpu_agent.pods import SchedulingFacts, Trait


def _pod(spec: Any = None, status: Any = None, **metadata: Any) -> bytes:
    known = {"name": "train", "namespace": "team", "uid": "u1"}
    return msgspec.json.encode({"metadata": {**known, **metadata}, "spec": spec, "status": status})


def _of(spec: Any = None, status: Any = None, **metadata: Any) -> SchedulingFacts:
    return facts(_pod(spec, status, **metadata))


def test_the_facts_of_a_pod() -> None:
    """Priority and start order victims, labels are those of budgets."""
    assert _of(
        {"priority": 7, "preemptionPolicy": "Never"},
        {"startTime": "1970-01-01T00:01:00Z"},
        labels={"b": "2", "a": "1"},
        deletionTimestamp="2026-01-01T00:00:00Z",
        ownerReferences=[
            {"kind": "Job", "uid": "other"},
            {"kind": "ReplicaSet", "uid": "u9", "controller": True},
        ],
    ) == SchedulingFacts(
        "team",
        "train",
        priority=7,
        may_preempt=False,
        started_at=60.0,
        deleting=True,
        labels=(("a", "1"), ("b", "2")),
        owner="team/u9",
        requests=(("pods", 1000),),
    )
    assert _of() == SchedulingFacts("team", "train", requests=(("pods", 1000),))


@pytest.mark.parametrize(
    ("pod", "gang"),
    [
        ({"labels": {"scheduling.x-k8s.io/pod-group": "g"}}, "team/g"),
        ({"labels": {"pod-group.scheduling.sigs.k8s.io/name": "g"}}, "team/g"),
        ({"annotations": {"scheduling.k8s.io/group-name": "g"}}, "team/g"),
        ({"annotations": {"scheduling.volcano.sh/group-name": "g"}}, "team/g"),
        ({"annotations": {"gang.scheduling.koordinator.sh/name": "g"}}, "team/g"),
        ({"ownerReferences": [{"kind": "PodGroup", "name": "g", "uid": "u"}]}, "team/g"),
        ({"labels": {"scheduling.x-k8s.io/pod-group": ""}}, ""),
        ({}, ""),
    ],
)
def test_the_gang_of_a_pod(pod: dict[str, Any], gang: str) -> None:
    """vgpu-manager §4.5, in its own namespace."""
    assert _of(**pod).gang == gang
    assert _of({"schedulingGroup": {"podGroupName": "native"}}).gang == "team/native"


def test_a_group_is_the_gang_or_what_the_controller_has_made() -> None:
    """vgpu-manager §5.7."""
    owners = [{"kind": "Job", "uid": "u", "controller": True}]
    assert _of(ownerReferences=owners).group == "team/u"
    named = {"scheduling.x-k8s.io/pod-group": "g"}
    assert _of(ownerReferences=owners, labels=named).group == "team/g"


@pytest.mark.parametrize(
    ("pod", "protected"),
    [
        (_of({"priority": 2_000_001_000}), "critical"),
        (_of({"priority": 1_000_000_000}), ""),
        (_of(annotations={"kubernetes.io/config.mirror": "x"}), "static"),
        (
            _of(ownerReferences=[{"kind": "DaemonSet", "uid": "u", "controller": True}]),
            "daemon_set",
        ),
    ],
)
def test_pods_that_are_not_displaced(pod: SchedulingFacts, protected: str) -> None:
    """vgpu-manager §5.9."""
    assert pod.protected == protected


def test_the_amounts_of_a_pod_with_very_many_are_not_read() -> None:
    """A tenant can name tens of thousands, and change the pod again and again."""
    limits = {f"a.b/{number:x}": str(number + 5000) for number in range(28_000)}
    raw = _pod({"containers": [{"name": "main", "resources": {"limits": limits}}]})
    assert facts(raw).requests is None
    assert quickest_call(lambda: facts(raw), within_seconds=0.1) < 0.1


def _asking(**amounts: Any) -> dict[str, Any]:
    return {"resources": {"requests": amounts}}


def test_requests_are_those_that_a_scheduler_counts() -> None:
    """The larger of main containers and any init container, beside the sidecars before it."""
    spec = {
        "initContainers": [
            _asking(cpu="3"),
            {**_asking(cpu="1", memory="1Ki"), "restartPolicy": "Always"},
            _asking(cpu="2500m"),
        ],
        "containers": [
            _asking(cpu="100m", memory="1Ki"),
            {"resources": {"limits": {"cpu": 2, "nvidia.com/vgpu-number": "2"}}},
        ],
        "overhead": {"cpu": "1m"},
    }
    assert _of(spec).requests == (
        ("cpu", 3501),
        ("memory", 2048 * 1000),
        ("nvidia.com/vgpu-number", 2000),
        ("pods", 1000),
    )


@pytest.mark.parametrize(
    "spec",
    [
        {"containers": [_asking(cpu="nonsense")]},
        {"containers": [_asking(cpu="-1")]},
        {"resources": {"requests": {"cpu": "1"}}},
        {"containers": [_asking(**{f"x/{number}": 1 for number in range(100)})]},
    ],
)
def test_requests_that_cannot_be_told_are_unknown(spec: dict[str, Any]) -> None:
    """Such a pod replaces none, and none replaces it."""
    assert _of(spec).requests is None


@pytest.mark.parametrize(
    ("spec", "trait"),
    [
        ({"hostNetwork": True}, Trait.HOST_PORTS),
        ({"containers": [{"ports": [{"containerPort": 1}, {"hostPort": 1}]}]}, Trait.HOST_PORTS),
        (
            {
                "affinity": {
                    "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{}]}
                }
            },
            Trait.ANTI_AFFINITY,
        ),
        ({"topologySpreadConstraints": [{}]}, Trait.SPREAD),
        ({"volumes": [{"name": "v", "persistentVolumeClaim": {}}]}, Trait.VOLUMES),
        ({"volumes": [{"name": "v", "something-new": {}}]}, Trait.VOLUMES),
        ({"resourceClaims": [{"name": "c"}]}, Trait.CLAIMS),
        ({"volumes": [{"name": "v", "emptyDir": {}}]}, None),
        ({"containers": [{"ports": [{"containerPort": 1}]}]}, None),
    ],
)
def test_what_other_filters_look_at(spec: dict[str, Any], trait: Trait | None) -> None:
    """Amounts say nothing about it."""
    assert _of(spec).traits == (frozenset() if trait is None else {trait})


def test_a_budget() -> None:
    """policy/v1."""
    read = budget(
        msgspec.json.encode(
            {
                "metadata": {"name": "b", "namespace": "team"},
                "spec": {
                    "selector": {
                        "matchLabels": {"app": "web"},
                        "matchExpressions": [{"key": "x", "operator": "In", "values": ["1"]}],
                    }
                },
                "status": {"disruptionsAllowed": 2, "disruptedPods": {"p": "2026-01-01T00:00:00Z"}},
            }
        )
    )
    selector = Selector((("app", "web"),), (Requirement("x", "In", frozenset({"1"})),))
    assert read == Budget("team", "b", selector, 2, frozenset({"p"}))
    bare = {"metadata": {"name": "b", "namespace": "team"}}
    assert budget(msgspec.json.encode(bare)) == Budget("team", "b", None, 0)


@pytest.mark.parametrize("raw", [b"", b"{}", b"[" * 100_000, b'{"metadata": {"name": 5}}'])
def test_nonsense_is_one_clear_error(raw: bytes) -> None:
    """It names the kind of object."""
    with pytest.raises(ClusterError, match="a PodDisruptionBudget"):
        budget(raw)


def test_a_pod_without_readable_facts_is_still_there() -> None:
    """It holds its cards."""
    read = with_facts(decode.pod)
    assert read(_pod({"priority": 1})).scheduling == SchedulingFacts(
        "team", "train", priority=1, requests=(("pods", 1000),)
    )
    assert read(_pod({"priority": "high"})) == decode.pod(_pod())
    with pytest.raises(ClusterError):
        read(_pod(uid=""))


@given(st.binary() | st.from_regex(rb'\{"metadata":\{"name":"a".*', fullmatch=True))
def test_no_bytes_break_the_decoders(raw: bytes) -> None:
    """A value or a `ClusterError`."""
    for read in (facts, budget):
        with contextlib.suppress(ClusterError):
            read(raw)


@pytest.mark.parametrize(
    ("text", "number"),
    [("1", 1000), ("1500m", 1500), ("1.5", 1500), ("1u", 1), ("1Ki", 1024000), ("-1", None),
     ("x", None), ("1e999", None)],
)  # fmt: skip
def test_quantities_in_thousandths(text: str, number: int | None) -> None:
    """Rounded up, as kube-scheduler does."""
    assert thousandths(text) == number
