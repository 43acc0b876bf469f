"""The changes to new pods, from the review to the pod that the API server stores
(vgpu-manager §6).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.webhook.reviews import (
    CORES,
    MEMORY,
    NUMBER,
    UID,
    container,
    patched,
    pod,
    response,
    review,
)
from vgpu_agent.families.admission import AdmissionOptions, LargestNode
from vgpu_agent.families.vgpu_manager.admission.family import build
from vgpu_agent.journal import Journal
from vgpu_agent.webhook.new_pod import Pinned
from vgpu_agent.webhook.review import Reviewer

STATE = {
    "nvidia.com/predicate-node": "gpu-node-1",
    "nvidia.com/pre-allocated": "main[0_GPU-1_100_24576]",
    "nvidia.com/real-allocated": "",
    "nvidia.com/predicate-time": "1787331600123456789",
}
STATE_LABELS = {"nvidia.com/assigned-phase": "succeed", "nvidia.com/metrics-node": "gpu-node-1"}
NODE_POLICY, DEVICE_POLICY, TOPOLOGY = (
    f"nvidia.com/{name}"
    for name in ("node-scheduler-policy", "device-scheduler-policy", "device-topology-mode")
)
EVERYTHING = AdmissionOptions(
    scheduler_name="vgpu-scheduler",
    node_policy="binpack",
    device_policy="spread",
    topology_mode="numa",
    runtime_class="nvidia",
)
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def reviewer(options: AdmissionOptions = EVERYTHING, pinned: Pinned = Pinned.AFFINITY) -> Reviewer:
    """The webhook's verbs under these options."""
    return Reviewer(build(options), journal=Journal(), largest_node=LargestNode, pinned=pinned)


def mutated(
    given: Any, options: AdmissionOptions = EVERYTHING, pinned: Pinned = Pinned.AFFINITY
) -> Any:
    """The pod as it is stored."""
    return patched(given, reviewer(options, pinned).mutate(review(given)))


@pytest.mark.parametrize(
    ("limits", "after"),
    [
        ({"cores": "10"}, {CORES: "10", NUMBER: "1"}),
        ({"memory": "1024"}, {MEMORY: "1024", NUMBER: "1"}),
        ({"number": "0", "cores": 10}, {CORES: 10, NUMBER: "1"}),
        ({"number": "1"}, {NUMBER: "1", CORES: "100"}),
        ({"number": 2, "cores": "0", "memory": 0}, {NUMBER: 2, CORES: "100", MEMORY: 0}),
        ({"number": "1", "cores": "30"}, {NUMBER: "1", CORES: "30"}),
        ({"number": "1", "memory": "1k"}, {NUMBER: "1", MEMORY: "1k"}),
        ({"number": "0"}, {NUMBER: "0"}),
        ({"number": "1", "memory": "0.5"}, {NUMBER: "1", MEMORY: "0.5"}),
        ({"number": "many", "cores": "5"}, {NUMBER: "many", CORES: "5"}),
        ({}, {}),
    ],
)
@pytest.mark.parametrize("place", ["containers", "initContainers"])
def test_amounts_that_are_left_open_are_written_out(
    limits: dict[str, Any], after: dict[str, Any], place: str
) -> None:
    """A part of a GPU is of one GPU, and no part is all of its compute (vgpu-manager §6)."""
    given = pod(container("a"), spec={place: [container("b"), container(**limits)]})
    found = mutated(given)["spec"][place]
    assert found[0]["resources"]["limits"] == {}
    assert found[1]["resources"]["limits"] == after


def test_a_request_beside_a_limit_stays_equal_to_it() -> None:
    """The API server copies limits to requests before it asks, and refuses a pod whose two
    amounts of an extended resource differ.
    """
    asking = container(number="0", cores="10")
    asking["resources"]["requests"] = dict(asking["resources"]["limits"])
    (found,) = mutated(pod(asking))["spec"]["containers"]
    assert (
        found["resources"]["limits"]
        == found["resources"]["requests"]
        == {
            NUMBER: "1",
            CORES: "10",
        }
    )


def test_amounts_stay_open_where_the_operator_wants_it() -> None:
    """A plain kube-scheduler knows no vgpu-cores, unless the nodes offer it."""
    given = pod(container(number="1"), container("b", memory="5"))
    options = AdmissionOptions(completes_limits=False)
    assert mutated(given, options) == given


def test_no_pod_brings_its_own_state() -> None:
    """Neither as annotations nor as labels, whether it asks for GPUs or not; what else it has
    stays. vgpu-manager:D16.
    """
    for asking in (container(number="1", cores="5"), container()):
        given = pod(
            asking,
            annotations={**STATE, **STATE_LABELS, "mine": "1"},
            labels={**STATE_LABELS, **STATE, "app": "x"},
        )
        found = mutated(given, AdmissionOptions())
        assert found["metadata"]["annotations"] == {"mine": "1"}
        assert found["metadata"]["labels"] == {"app": "x"}


def test_state_is_that_of_the_domain() -> None:
    """Another domain has other keys."""
    given = pod(container(), annotations={"a.example/pre-allocated": "x", **STATE})
    found = mutated(given, AdmissionOptions(domain="a.example"))
    assert found["metadata"]["annotations"] == STATE


def test_who_opts_out_gets_no_defaults_and_keeps_no_state() -> None:
    """Every tenant can set the label (vgpu-manager §4.1)."""
    label = {"vgpu-manager.io/ignore-webhook": "true"}
    given = pod(container(cores="5"), annotations=STATE, labels={**label, **STATE_LABELS})
    found = mutated(given)
    assert found["spec"] == given["spec"]
    assert found["metadata"]["annotations"] == {}
    assert found["metadata"]["labels"] == label


def test_the_mirror_of_a_static_pod_runs_already() -> None:
    """It must keep its node; the kubelet makes it anew otherwise, for ever."""
    given = pod(
        container(number="1"),
        annotations={"kubernetes.io/config.mirror": "x", **STATE},
        spec={"nodeName": "n1"},
    )
    found = mutated(given)
    assert found["spec"] == given["spec"]
    assert found["metadata"]["annotations"] == {"kubernetes.io/config.mirror": "x"}


@pytest.mark.parametrize("scheduler", [None, "", "default-scheduler"])
def test_a_vgpu_pod_gets_all_defaults(scheduler: str | None) -> None:
    """vgpu-manager §6."""
    spec = {} if scheduler is None else {"schedulerName": scheduler}
    found = mutated(pod(container(number="2", cores="5"), spec=spec))
    assert found["spec"]["schedulerName"] == "vgpu-scheduler"
    assert found["spec"]["runtimeClassName"] == "nvidia"
    assert found["metadata"]["annotations"] == {
        NODE_POLICY: "binpack",
        DEVICE_POLICY: "spread",
        TOPOLOGY: "numa",
    }


def test_what_a_pod_chose_stays() -> None:
    """Also the choice of none."""
    given = pod(
        container(number="2", cores="5"),
        annotations={NODE_POLICY: "none", DEVICE_POLICY: "binpack", TOPOLOGY: "link"},
        spec={"schedulerName": "volcano", "runtimeClassName": "mine"},
    )
    assert mutated(given) == given


def test_a_topology_mode_is_for_several_gpus() -> None:
    """vgpu-manager §6."""
    found = mutated(pod(container(number="1", cores="5"), container("b", number="1", cores="5")))
    assert TOPOLOGY not in found["metadata"]["annotations"]


def test_an_annotation_without_letters_is_none() -> None:
    """Schedulers read a policy of white space as a missing one, so the pod gets the default."""
    found = mutated(pod(container(number="1", cores="5"), annotations={NODE_POLICY: " "}))
    assert found["metadata"]["annotations"][NODE_POLICY] == "binpack"


def test_a_pod_without_vgpus_loses_their_policies_and_nothing_else() -> None:
    """vgpu-manager §6; so a changed default never reaches pods that have no use for it."""
    policies = {NODE_POLICY: "spread", DEVICE_POLICY: "x", TOPOLOGY: "numa"}
    plain = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1", "cpu": "1"}}}
    given = pod(plain, annotations={**policies, "mine": "1"}, spec={"nodeName": "n1"})
    found = mutated(given)
    assert found["metadata"]["annotations"] == {"mine": "1"}
    assert found["spec"] == given["spec"]


def test_a_sidecar_makes_a_pod_ours() -> None:
    """A restartable init container; an ephemeral one asks for nothing."""
    sidecar = {**container(memory="5"), "restartPolicy": "Always"}
    found = mutated(pod(container("a"), spec={"initContainers": [sidecar]}))
    assert found["spec"]["schedulerName"] == "vgpu-scheduler"
    ephemeral = mutated(pod(container("a"), spec={"ephemeralContainers": [container(memory="5")]}))
    assert "schedulerName" not in ephemeral["spec"]
    assert ephemeral["spec"]["ephemeralContainers"][0]["resources"]["limits"] == {MEMORY: "5"}


BY_NAME = {"key": "metadata.name", "operator": "In", "values": ["n1"]}
ZONE = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}


@pytest.mark.parametrize(
    ("affinity", "terms"),
    [
        (None, [{"matchFields": [BY_NAME]}]),
        ({}, [{"matchFields": [BY_NAME]}]),
        ({"nodeAffinity": {}}, [{"matchFields": [BY_NAME]}]),
        ({"nodeAffinity": {REQUIRED: None}}, [{"matchFields": [BY_NAME]}]),
        (
            {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [ZONE, {}]}}},
            [{**ZONE, "matchFields": [BY_NAME]}, {}],
        ),
        (
            {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchFields": [BY_NAME]}]}}},
            [{"matchFields": [BY_NAME, BY_NAME]}],
        ),
    ],
)
def test_a_pod_that_names_its_node_goes_there_through_a_scheduler(
    affinity: Any, terms: list[Any]
) -> None:
    """By the Node's name, and not by its label: the two may differ. vgpu-manager:D44."""
    kept: dict[str, Any] = {"podAffinity": {}}
    spec = {"nodeName": "n1"} | ({} if affinity is None else {"affinity": {**affinity, **kept}})
    found = mutated(pod(container(number="1", cores="5"), spec=spec))["spec"]
    assert "nodeName" not in found
    assert found["affinity"]["nodeAffinity"][REQUIRED] == {"nodeSelectorTerms": terms}
    assert affinity is None or found["affinity"]["podAffinity"] == {}


@pytest.mark.parametrize("selector", [None, {"zone": "a"}])
def test_a_pod_goes_to_the_label_where_the_operator_wants_it(selector: Any) -> None:
    """vgpu-manager's webhook selects the Node by this label, and operators may rely on it."""
    spec = {"nodeName": "n1"} | ({} if selector is None else {"nodeSelector": selector})
    found = mutated(pod(container(number="1", cores="5"), spec=spec), pinned=Pinned.HOSTNAME)
    assert "nodeName" not in found["spec"]
    expected = {**(selector or {}), "kubernetes.io/hostname": "n1"}
    assert found["spec"]["nodeSelector"] == expected


def test_a_pod_keeps_its_node_where_the_operator_wants_it() -> None:
    """Our agent places such a pod itself."""
    given = pod(container(number="1", cores="5"), spec={"nodeName": "n1"})
    assert mutated(given, AdmissionOptions(), Pinned.KEEP) == given


@pytest.mark.parametrize(
    "request_", [{"operation": "UPDATE"}, {"operation": "DELETE", "object": None}]
)
def test_later_changes_of_a_pod_are_left_alone(request_: dict[str, Any]) -> None:
    """Schedulers and agents write state then."""
    given = pod(container(cores="500"), annotations=STATE)
    found = reviewer()
    assert response(found.mutate(review(given, **request_))) == {
        "uid": UID,
        "allowed": True,
    }
    assert response(found.validate(review(given, **request_)))["allowed"]


@pytest.mark.parametrize(
    "request_",
    [
        {"subResource": "ephemeralcontainers", "operation": "UPDATE"},
        {"subResource": "binding"},
        {"resource": {"group": "apps", "version": "v1", "resource": "deployments"}},
        {"resource": {"group": "x.example", "version": "v1", "resource": "pods"}},
    ],
)
def test_what_is_no_pod_passes(request_: dict[str, Any]) -> None:
    """A webhook configuration that asks for too much stops nothing."""
    found = reviewer()
    given = review({"spec": {"containers": "none of ours"}}, **request_)
    for answer in (found.mutate(given), found.validate(given)):
        assert response(answer) == {"uid": UID, "allowed": True}


def test_a_pod_without_a_name_and_without_annotations_gets_them() -> None:
    """Controllers create such pods, with ``generateName``."""
    given = pod(container(number="1"), name=None, generateName="train-")
    found = mutated(given)
    assert found["metadata"]["annotations"] == {NODE_POLICY: "binpack", DEVICE_POLICY: "spread"}
    assert found["metadata"]["generateName"] == "train-"


def test_the_second_call_changes_nothing() -> None:
    """The API server calls again when another webhook has changed the pod."""
    given = pod(
        container(number="2"), spec={"nodeName": "n1"}, annotations=STATE, labels=STATE_LABELS
    )
    once = mutated(given)
    assert mutated(once) == once
