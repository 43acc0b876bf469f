"""Rights of the deployed agent's token:
a real API server enforces the roles and the policy of the manifests.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.real_node.deployment import MANIFESTS, MERGE, NAMESPACE, Deployed, deployed_agent
from tests.real_node.rig import Rig
from tests.real_node.rig.api import Api, ApiError
from tests.real_node.rig.manifests import pod
from vgpu_agent.cluster.gpu_status import CONDITION, TAINT

_CONFIG_MAP = "volcano-vgpu-device-config"
_OTHER_NODE = "another-node"

# What the agent may do, all of it: (group/resource, verb). The rest of the API is refused.
_RIGHTS = {
    *(("nodes", verb) for verb in ("get", "list", "watch", "patch")),
    ("nodes/status", "patch"),
    *(("pods", verb) for verb in ("get", "list", "watch", "patch")),
    *(("events", verb) for verb in ("create", "patch")),
}
# What every authenticated user may ask about itself (ClusterRole system:basic-user).
_ANYBODYS = {
    (resource, "create")
    for resource in (
        "authentication.k8s.io/selfsubjectreviews",
        "authorization.k8s.io/selfsubjectaccessreviews",
        "authorization.k8s.io/selfsubjectrulesreviews",
    )
}


@pytest.fixture(scope="module")
def deployed(rig: Rig) -> Iterator[Deployed]:
    """The base and hami-core, applied; gone afterwards with all it left on the node."""
    with deployed_agent(rig) as running:
        yield running


@pytest.fixture
def agent(deployed: Deployed) -> Api:
    """The API server as the pod sees it: asked with a token of its service account that is bound
    to it, as the kubelet's is.
    """
    rig = deployed.rig
    (running,) = [
        each
        for each in rig.pods(namespace=NAMESPACE)
        if "deletionTimestamp" not in each["metadata"]
    ]
    asked = rig.api.as_bearer(_token(rig, bound_to=running))
    refused = f"/api/v1/nodes/{rig.node_name()}?dryRun=All"
    # The API server takes a moment to enforce a new policy; until then this would go through.
    rig.wait_for(
        lambda: _status(asked, "PATCH", refused, {"metadata": {"labels": {"not": "ours"}}}) == 403,
        20,
        what="the policy",
    )
    return asked


def _token(rig: Rig, *, bound_to: dict[str, Any] | None = None) -> str:
    """A token of the agent's service account from the TokenRequest API,
    with which the kubelet fills the pod's own.
    """
    spec: dict[str, Any] = {"audiences": [], "expirationSeconds": 3600}
    if bound_to is not None:
        metadata = bound_to["metadata"]
        spec["boundObjectRef"] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": metadata["name"],
            "uid": metadata["uid"],
        }
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    token: str = rig.api.post(
        f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/vgpu-agent/token", body
    )["status"]["token"]
    return token


def _status(
    api: Api, method: str, path: str, body: dict[str, Any] | None = None, content_type: str = MERGE
) -> int:
    """The HTTP status of a request."""
    try:
        if method == "GET":
            api.text(path)
        elif method == "PATCH":
            api.patch(path, body or {}, content_type=content_type)
        elif method == "DELETE":
            api.delete(path)
        else:
            (api.post if method == "POST" else api.put)(path, body or {})
    except ApiError as err:
        return err.status
    return 200


def _rights(api: Api, namespace: str) -> set[tuple[str, ...]]:
    """All that ``api``'s user may do in a namespace and beside all namespaces: (group/resource,
    verb), and object names behind them.
    """
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    rules = api.post("/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", body)["status"][
        "resourceRules"
    ]
    return {
        (f"{group}/{resource}".removeprefix("/"), verb, *rule.get("resourceNames", ()))
        for rule in rules
        for group, resource, verb in itertools.product(
            rule["apiGroups"], rule["resources"], rule["verbs"]
        )
    }


def test_the_token_may_do_what_is_listed_and_nothing_else(agent: Api) -> None:
    """The API server resolves no further resource, verb or wildcard,
    in namespaces with and without a role for the agent.
    """
    config_map = {("configmaps", verb, _CONFIG_MAP) for verb in ("list", "watch")}
    everywhere: set[tuple[str, ...]] = _RIGHTS | _ANYBODYS
    assert _rights(agent, "default") == everywhere
    assert _rights(agent, NAMESPACE) == everywhere
    assert _rights(agent, "kube-system") == everywhere | config_map


_REFUSED: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/api/v1/nodes", {"metadata": {"name": "made-up"}}),
    ("PUT", "/api/v1/nodes/{node}", {"metadata": {"name": "{node}"}}),
    ("DELETE", "/api/v1/nodes/{node}", None),
    ("PUT", "/api/v1/nodes/{node}/status", {"metadata": {"name": "{node}"}}),
    ("GET", "/api/v1/nodes/{node}/proxy/pods", None),
    ("POST", "/api/v1/namespaces/default/pods", {"metadata": {"name": "made-up"}}),
    ("PUT", "/api/v1/namespaces/default/pods/{pod}", {"metadata": {"name": "{pod}"}}),
    ("DELETE", "/api/v1/namespaces/default/pods/{pod}", None),
    ("DELETE", "/api/v1/namespaces/default/pods", None),
    ("PATCH", "/api/v1/namespaces/default/pods/{pod}/status", {"status": {"phase": "Failed"}}),
    (
        "PATCH",
        "/api/v1/namespaces/default/pods/{pod}/ephemeralcontainers",
        {"spec": {"ephemeralContainers": []}},
    ),
    ("PATCH", "/api/v1/namespaces/default/pods/{pod}/resize", {"spec": {}}),
    (
        "POST",
        "/api/v1/namespaces/default/pods/{pod}/binding",
        {"target": {"kind": "Node", "name": "{node}"}},
    ),
    ("POST", "/api/v1/namespaces/default/pods/{pod}/eviction", {"metadata": {"name": "{pod}"}}),
    ("POST", "/api/v1/namespaces/default/pods/{pod}/exec?command=true", None),
    ("GET", "/api/v1/namespaces/default/pods/{pod}/log", None),
    ("GET", "/api/v1/namespaces/default/events", None),
    ("GET", "/api/v1/namespaces/kube-system/secrets", None),
    ("GET", "/api/v1/namespaces/vgpu-agent/configmaps/vgpu-agent", None),
    ("GET", "/api/v1/namespaces/kube-system/configmaps", None),
    ("GET", "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication", None),
    ("GET", f"/api/v1/namespaces/kube-system/configmaps/{_CONFIG_MAP}", None),
    ("PATCH", f"/api/v1/namespaces/kube-system/configmaps/{_CONFIG_MAP}", {"data": {"a": "b"}}),
    # components/volcano is not in the base
    ("GET", f"/api/v1/namespaces/volcano-system/configmaps/{_CONFIG_MAP}", None),
    (
        "PATCH",
        "/apis/apps/v1/namespaces/vgpu-agent/daemonsets/vgpu-agent",
        {"metadata": {"labels": {"a": "b"}}},
    ),
    (
        "POST",
        "/api/v1/namespaces/vgpu-agent/serviceaccounts/vgpu-agent/token",
        {"spec": {"audiences": []}},
    ),
    ("PATCH", "/apis/rbac.authorization.k8s.io/v1/clusterroles/vgpu-agent", {"rules": []}),
    (
        "DELETE",
        (
            "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/"
            "vgpu-agent-own-node-only"
        ),
        None,
    ),
]


def _filled(value: Any, names: dict[str, str]) -> Any:
    """``{node}`` and ``{pod}`` in the row of a table."""
    if isinstance(value, str):
        return value.replace("{node}", names["node"]).replace("{pod}", names["pod"])
    if isinstance(value, dict):
        return {key: _filled(each, names) for key, each in value.items()}
    return value


def test_requests_beyond_the_rights_are_refused(deployed: Deployed, agent: Api) -> None:
    """Real requests with the pod's token, each answered 403."""
    rig = deployed.rig
    rig.create_pod(pod("own", limits={}))
    rig.wait_for_phase("own", "Running")
    names = {"node": rig.node_name(), "pod": "own"}
    answers = {
        f"{method} {path}": _status(agent, method, _filled(path, names), _filled(body, names))
        for method, path, body in _REFUSED
    }
    assert {row: status for row, status in answers.items() if status != 403} == {}


def test_the_reads_that_the_agent_makes_are_allowed(deployed: Deployed, agent: Api) -> None:
    """Own node and own pods by selector; the one ConfigMap by its name,
    whether there is one or not.
    """
    node = deployed.rig.node_name()
    allowed = [
        f"/api/v1/nodes/{node}",
        f"/api/v1/nodes?fieldSelector=metadata.name%3D{node}",
        f"/api/v1/nodes?fieldSelector=metadata.name%3D{node}&watch=1&timeoutSeconds=1",
        f"/api/v1/pods?fieldSelector=spec.nodeName%3D{node}",
        f"/api/v1/pods?fieldSelector=spec.nodeName%3D{node}&watch=1&timeoutSeconds=1",
        f"/api/v1/namespaces/kube-system/configmaps?fieldSelector=metadata.name%3D{_CONFIG_MAP}",
        (
            "/api/v1/namespaces/kube-system/"
            f"configmaps?fieldSelector=metadata.name%3D{_CONFIG_MAP}&watch=1&timeoutSeconds=1"
        ),
    ]
    assert {path: _status(agent, "GET", path) for path in allowed} == dict.fromkeys(allowed, 200)


@pytest.fixture
def another_node(deployed: Deployed) -> Iterator[str]:
    """A second Node without a kubelet, with a pod ``foreign`` bound to it."""
    api = deployed.rig.api
    api.post("/api/v1/nodes", {"metadata": {"name": _OTHER_NODE}})
    try:
        deployed.rig.create_pod(
            pod("foreign", nodeName=_OTHER_NODE, tolerations=[{"operator": "Exists"}])
        )
        yield _OTHER_NODE
    finally:
        api.delete("/api/v1/namespaces/default/pods/foreign", {"gracePeriodSeconds": 0})
        api.delete(f"/api/v1/nodes/{_OTHER_NODE}")


_OURS = {
    "metadata": {
        "annotations": {"volcano.sh/node-vgpu-handshake": "x", "vgpu-agent.internal/note": "y"}
    }
}
_OURS_ON_PODS = {
    "metadata": {
        "annotations": {"volcano.sh/bind-phase": "success", "volcano.sh/gpu-assigned": "true"}
    }
}
_OUR_LABEL = {"metadata": {"labels": {"vgpu-agent.internal/volcano-vgpu-isolation": "none"}}}
_OUR_CAPACITY = {
    "status": {
        "capacity": {"volcano.sh/gpu-number": "2"},
        "allocatable": {"volcano.sh/gpu-number": "2"},
    }
}

# vgpu-manager's keys (vgpu-manager §3, §4): what the agent writes, and what only users, operators
# and schedulers do.
_VGPU_MANAGER_OURS: list[tuple[str, str, tuple[str, ...]]] = [
    ("node", "annotations", ("node-config-info", "node-device-register", "node-device-topology")),
    (
        "node",
        "labels",
        ("node-driver-version", "node-cuda-version", "node-cuda-major", "node-cuda-minor"),
    ),
    (
        "pod",
        "annotations",
        ("pre-allocated", "real-allocated", "predicate-node", "predicate-time"),
    ),
    ("pod", "labels", ("assigned-phase", "metrics-node")),
]
_VGPU_MANAGER_OTHERS: list[tuple[str, str, tuple[str, ...]]] = [
    (
        "node",
        "annotations",
        ("node-gpu-domain", "vgpu-compute-policy", "node-device-heartbeat", "pre-allocated"),
    ),
    ("node", "labels", ("node-device-register", "assigned-phase", "remote-server")),
    (
        "pod",
        "annotations",
        ("vgpu-compute-policy", "include-gpu-uuid", "exclude-gpu-type", "device-topology-mode"),
    ),
    ("pod", "annotations", ("device-scheduler-policy", "stuck-grace-period", "node-config-info")),
    ("pod", "labels", ("pre-allocated", "node-driver-version")),
    ("other node", "annotations", ("node-config-info", "node-device-register")),
    ("other node", "labels", ("node-cuda-major",)),
    ("other node's pod", "annotations", ("pre-allocated", "real-allocated")),
    ("other node's pod", "labels", ("assigned-phase",)),
    ("unscheduled pod", "annotations", ("pre-allocated", "predicate-node")),
    ("unscheduled pod", "labels", ("assigned-phase",)),
]

# Keys by which schedulers judge queues, overcommitment and locks.
_SCHEDULERS = (
    "gpu",
    "hamivgpu",
    "volcano.sh/queue-name",
    "volcano.sh/preemptable",
    "volcano.sh/oversubscription",
)

# What is patched with what, and whether the policy lets it through.
_PATCHES: list[tuple[str, str, dict[str, Any], bool]] = [
    ("node", "", _OURS, True),
    ("node", "", {"metadata": {"annotations": {"volcano.sh/node-vgpu-handshake": None}}}, True),
    ("node", "", _OUR_LABEL, True),
    ("node", "/status", _OUR_CAPACITY, True),
    ("node", "", {"metadata": {"annotations": {"example.com/other": "x"}}}, False),
    ("node", "", {"metadata": {"labels": {"nvidia.com/gpu.present": None}}}, False),
    ("node", "", {"metadata": {"labels": {"kubernetes.io/hostname": "x"}}}, False),
    ("node", "", {"metadata": {"finalizers": ["example.com/stay"]}}, False),
    ("node", "", {"spec": {"unschedulable": True}}, False),
    ("node", "", {"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}, False),
    ("node", "/status", {"metadata": {"annotations": {"example.com/other": "x"}}}, False),
    (
        "node",
        "/status",
        {"status": {"addresses": [{"type": "InternalIP", "address": "10.9.9.9"}]}},
        False,
    ),
    (
        "node",
        "",
        {"metadata": {"labels": {"vgpu-agent.internal/volcano-vgpu-isolation": None}}},
        True,
    ),
    ("node", "", {"metadata": {"annotations": {"hamivgpu": None}}}, True),
    # A thief of the token: keys of schedulers that the agent only removes, or never touches; as
    # annotations and as labels.
    *(("node", "", {"metadata": {"labels": {key: "x"}}}, False) for key in _SCHEDULERS),
    *(("node", "", {"metadata": {"annotations": {key: "x"}}}, False) for key in _SCHEDULERS),
    ("node", "", {"metadata": {"labels": {"volcano.sh/node-vgpu-register": "x"}}}, False),
    ("node", "", {"metadata": {"labels": {"vgpu-agent.internal/other": "x"}}}, False),
    (
        "node",
        "",
        {
            "metadata": {
                "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "b"}]
            }
        },
        False,
    ),
    ("node", "/status", {"metadata": {"labels": {"gpu": "x"}}}, False),
    ("node", "/status", {"status": {"capacity": {"nvidia.com/gpu": "64"}}}, False),
    ("node", "/status", {"status": {"allocatable": {"cpu": "1000"}}}, False),
    ("node", "/status", {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}, False),
    ("node", "/status", {"status": {"images": []}}, False),
    (
        "node",
        "/status",
        {"status": {"volumesAttached": [{"name": "a", "devicePath": "/dev/a"}]}},
        False,
    ),
    ("node", "/status", {"status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 1}}}}, False),
    ("other node", "", _OURS, False),
    ("other node", "", _OUR_LABEL, False),
    ("other node", "/status", _OUR_CAPACITY, False),
    ("pod", "", _OURS_ON_PODS, True),
    ("pod", "", {"metadata": {"annotations": {"volcano.sh/bind-phase": None}}}, True),
    ("pod", "", _OURS, False),
    ("pod", "", _OUR_LABEL, False),
    *(
        ("pod", "", {"metadata": {kind: {key: "x"}}}, False)
        for key in _SCHEDULERS
        for kind in ("labels", "annotations")
    ),
    ("pod", "", {"metadata": {"annotations": {"kubernetes.io/config.mirror": "x"}}}, False),
    (
        "pod",
        "",
        {
            "metadata": {
                "annotations": {
                    "kubernetes.io/config.hash": "x",
                    "kubernetes.io/config.source": "file",
                }
            }
        },
        False,
    ),
    (
        "pod",
        "",
        {
            "metadata": {
                "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": "b"}]
            }
        },
        False,
    ),
    ("pod", "", {"spec": {"containers": [{"name": "main", "image": "example.com/other"}]}}, False),
    ("pod", "", {"spec": {"tolerations": [{"operator": "Exists"}]}}, False),
    ("pod", "", {"metadata": {"labels": {"app": "x"}}}, False),
    ("pod", "", {"metadata": {"annotations": {"example.com/other": "x"}}}, False),
    ("pod", "", {"metadata": {"finalizers": ["example.com/stay"]}}, False),
    ("pod", "", {"spec": {"activeDeadlineSeconds": 1}}, False),
    ("other node's pod", "", _OURS_ON_PODS, False),
    ("other node's pod", "", _OUR_LABEL, False),
    ("unscheduled pod", "", _OURS_ON_PODS, False),
    *(
        (what, "", {"metadata": {kind: {f"nvidia.com/{key}": value}}}, allowed)
        for table, allowed in ((_VGPU_MANAGER_OURS, True), (_VGPU_MANAGER_OTHERS, False))
        for what, kind, keys in table
        for key in keys
        for value in ("x", *((None,) if allowed else ()))  # written, and taken back
    ),
    ("node", "", {"metadata": {"labels": {"vgpu-manager": "device-plugin"}}}, False),
    ("pod", "", {"metadata": {"labels": {"vgpu-manager.io/ignore-webhook": "true"}}}, False),
    ("node", "/status", {"status": {"capacity": {"nvidia.com/vgpu-number": "64"}}}, False),
    ("node", "/status", {"status": {"allocatable": {"nvidia.com/vgpu-number": "64"}}}, False),
]


def _paths(rig: Rig, another_node: str) -> dict[str, str]:
    """Both Nodes and three new pods, the agent's own one running."""
    rig.create_pod(pod("own"))
    rig.create_pod(pod("unscheduled", nodeSelector={"no": "where"}))
    rig.wait_for_phase("own", "Running")
    pods = "/api/v1/namespaces/default/pods"
    return {
        "node": f"/api/v1/nodes/{rig.node_name()}",
        "other node": f"/api/v1/nodes/{another_node}",
        "pod": f"{pods}/own",
        "other node's pod": f"{pods}/foreign",
        "unscheduled pod": f"{pods}/unscheduled",
    }


def test_the_policy_confines_each_agent_to_its_own_node_and_its_own_keys(
    deployed: Deployed, agent: Api, another_node: str
) -> None:
    """Allowed where the pod runs, and for its own prefixes; refused for other nodes, their pods,
    specifications and others' keys.
    """
    rig = deployed.rig
    paths = _paths(rig, another_node)
    wrong = []
    for what, subresource, body, allowed in _PATCHES:
        answer = _status(agent, "PATCH", paths[what] + subresource, body)
        # Some changes of a pod are invalid before any policy is asked.
        if answer not in ({200} if allowed else {403, 422}):
            wrong.append((what + subresource, body, answer))
    undo = dict.fromkeys(_OURS["metadata"]["annotations"])
    rig.api.patch(
        paths["node"],
        {
            "metadata": {
                "annotations": undo,
                "labels": {"vgpu-agent.internal/volcano-vgpu-isolation": None},
            }
        },
    )
    capacity = {"volcano.sh/gpu-number": None}
    rig.api.patch(
        f"{paths['node']}/status", {"status": {"capacity": capacity, "allocatable": capacity}}
    )
    assert wrong == []


def _condition(kind: str, status: str = "False", **more: str) -> dict[str, Any]:
    found = {"type": kind, "status": status, "reason": "GpuLost", "message": "a test", **more}
    return {"status": {"conditions": [found]}}


def _tainted(*taints: dict[str, str]) -> dict[str, Any]:
    """The whole list, which no patch can be about a part of."""
    return {"spec": {"taints": list(taints)}}


def _labelled(*names: str, value: str | None = "x") -> dict[str, Any]:
    return {"metadata": {"labels": dict.fromkeys(names, value)}}


# An effect that keeps no pod away.
_OUR_TAINT = {"key": TAINT, "effect": "PreferNoSchedule"}
_THEIR_TAINT = {"key": "example.com/theirs", "effect": "PreferNoSchedule"}
_FOREIGN_TAINT = {"key": "node.kubernetes.io/unschedulable", "effect": "PreferNoSchedule"}
_REMOVED = {"$patch": "delete"}
_POD_LABEL = "vgpu-agent.internal/gpu-health"
_FEATURES = (
    "nvidia.com/gpu.product",
    "nvidia.com/gpu.count",
    "nvidia.com/gpu.compute.major",
    "nvidia.com/mig.strategy",
    "nvidia.com/mig-1g.5gb.count",
    "nvidia.com/mig-1g.10gb.me.slices.ci",
    "nvidia.com/mps.capable",
    "nvidia.com/cuda.driver-version.full",
    "nvidia.com/cuda.runtime.minor",
)
_NOT_FEATURES = (
    "nvidia.com/gpu.present",
    "nvidia.com/gpu.machine",
    "nvidia.com/gpu.deploy.driver",
    "nvidia.com/gpu.count.more",
    "nvidia.com/gfd.timestamp",
    "nvidia.com/mig.config",
    "nvidia.com/mig-1g.5gb.config",
    "nvidia.com/device-plugin.config",
    "example.com/nvidia.com.gpu.count",
)
# As strategic merge patches, one after the other: the section nodeStatus of the settings, and what
# a thief of the token could want beside it.
_HEALTH: list[tuple[str, str, dict[str, Any], bool]] = [
    ("node", "/status", _condition(CONDITION), True),
    ("node", "/status", _condition(CONDITION, "True"), True),
    ("node", "/status", _condition("Ready"), False),
    ("node", "/status", _condition("MemoryPressure", "True"), False),
    ("node", "/status", _condition("GPUHealthyToo"), False),
    ("node", "/status", _condition("MemoryPressure", **_REMOVED), False),
    ("other node", "/status", _condition(CONDITION), False),
    ("node", "/status", _condition(CONDITION, **_REMOVED), True),
    ("node", "", _tainted(_OUR_TAINT, _THEIR_TAINT), True),
    ("node", "", _tainted(_THEIR_TAINT, {**_OUR_TAINT, "value": "other"}), True),
    ("node", "", _tainted(_OUR_TAINT, _THEIR_TAINT, _FOREIGN_TAINT), False),
    ("node", "", _tainted(_OUR_TAINT, {**_THEIR_TAINT, "value": "other"}), False),
    ("node", "", _tainted(_OUR_TAINT), False),
    ("node", "", {"spec": {"taints": None}}, False),
    ("node", "", {"spec": {"unschedulable": True, "taints": [_OUR_TAINT, _THEIR_TAINT]}}, False),
    ("other node", "", _tainted(_OUR_TAINT), False),
    ("node", "", _tainted(_THEIR_TAINT), True),
    *(("node", "", _labelled(name), True) for name in _FEATURES),
    *(("node", "", _labelled(_FEATURES[0], name), False) for name in _NOT_FEATURES),
    ("other node", "", _labelled(_FEATURES[0]), False),
    ("pod", "", _labelled(_FEATURES[0]), False),
    ("node", "", _labelled(*_FEATURES, value=None), True),
    ("pod", "", _labelled(_POD_LABEL, value="lost"), True),
    ("pod", "", _labelled(_POD_LABEL, "app"), False),
    ("pod", "", _labelled(_POD_LABEL, value=None), True),
    ("node", "", _labelled(_POD_LABEL), False),
    ("other node's pod", "", _labelled(_POD_LABEL), False),
    ("unscheduled pod", "", _labelled(_POD_LABEL), False),
]


def test_the_policy_lets_each_agent_report_the_health_of_its_own_node(
    deployed: Deployed, agent: Api, another_node: str
) -> None:
    """docs/node-status.md: its condition, its taint, labels of GPU Feature Discovery and a label of
    pods; none of these for another node, and nothing beside them.
    """
    rig, paths = deployed.rig, _paths(deployed.rig, another_node)
    strategic = "application/strategic-merge-patch+json"
    rig.api.patch(paths["node"], _tainted(_THEIR_TAINT))
    before = rig.api.get(paths["node"])
    wrong = []
    try:
        for what, subresource, body, allowed in _HEALTH:
            answer = _status(agent, "PATCH", paths[what] + subresource, body, strategic)
            if answer != (200 if allowed else 403):
                wrong.append((what + subresource, body, answer))
        after = rig.api.get(paths["node"])
    finally:
        rig.api.patch(paths["node"], _tainted())
    assert wrong == []
    assert after["spec"] == before["spec"]
    assert after["metadata"]["labels"] == before["metadata"]["labels"]
    # The deployed agent may report its own condition at any moment.
    kinds = [
        {each["type"] for each in node["status"]["conditions"]} - {CONDITION}
        for node in (before, after)
    ]
    assert kinds[0] == kinds[1]


# What is written into the status of a Node on which kubelet has written 4 of `_COUNTED`, and
# whether the policy lets it through.
_COUNTED = "volcano.sh/vgpu-number"
_COUNTS: list[tuple[dict[str, Any], bool]] = [
    ({"allocatable": {_COUNTED: "0"}}, True),
    ({"allocatable": {_COUNTED: "3"}}, True),
    ({"allocatable": {_COUNTED: "5"}}, False),
    ({"allocatable": {_COUNTED: None}}, False),
    ({"capacity": {_COUNTED: "3"}, "allocatable": {_COUNTED: "3"}}, False),
    ({"allocatable": {"nvidia.com/never-seen": "1"}}, False),
    ({"allocatable": {"example.com/other": "1"}}, False),
    ({"allocatable": {_COUNTED: "3", "pods": "1"}}, False),
]


def _misjudged(
    deployed: Deployed,
    agent: Api,
    written: dict[str, dict[str, str]],
    bodies: Iterable[tuple[dict[str, Any], bool]],
) -> list[tuple[dict[str, Any], int]]:
    """The patches of the Node's status, and their answers, that were allowed or refused against
    what is said of them, while the status has what the kubelet is to have ``written``.

    A kubelet on which agents of other tests have offered a resource writes its capacity again every
    ten seconds. All is asked once more then.
    """
    rig, status = deployed.rig, f"/api/v1/nodes/{deployed.rig.node_name()}/status"
    gone = {section: dict.fromkeys(counts) for section, counts in written.items()}
    for _ in range(3):
        rig.api.patch(status, {"status": written})
        answers = [
            (body, allowed, _status(agent, "PATCH", f"{status}?dryRun=All", {"status": body}))
            for body, allowed in bodies
        ]
        found = rig.api.get(status)["status"]
        rig.api.patch(status, {"status": gone})
        if all(counts.items() <= found[section].items() for section, counts in written.items()):
            return [
                (body, answer)
                for body, allowed, answer in answers
                if answer != (200 if allowed else 403)
            ]
    raise AssertionError(f"the kubelet wrote three times over {written}: {found}")


def test_the_policy_lets_the_agent_count_what_is_healthy_and_no_more(
    deployed: Deployed, agent: Api
) -> None:
    """Within what kubelet has written as the capacity,
    and only of resources that kubelet has written. Nothing is made up.
    """
    written = {
        "capacity": {_COUNTED: "4", "example.com/other": "4"},
        "allocatable": {_COUNTED: "4"},
    }
    assert _misjudged(deployed, agent, written, _COUNTS) == []


def test_a_token_without_a_node_changes_nothing(deployed: Deployed) -> None:
    """Made with the right to make tokens of this account: without a pod behind it, the policy
    refuses every patch and says why.
    """
    unbound = deployed.rig.api.as_bearer(_token(deployed.rig))
    with pytest.raises(ApiError, match="does not say on which node"):
        unbound.patch(f"/api/v1/nodes/{deployed.rig.node_name()}", _OURS)


def test_a_refusal_by_the_policy_names_the_node_and_the_key(
    deployed: Deployed, agent: Api, another_node: str
) -> None:
    """Readers of the agent's log then know which rule it was."""
    with pytest.raises(
        ApiError, match=f"vgpu-agent on node {deployed.rig.node_name()} changes that node"
    ):
        agent.patch(f"/api/v1/nodes/{another_node}", _OURS)
    with pytest.raises(ApiError, match=r"refused: example\.com/other"):
        agent.patch(
            f"/api/v1/nodes/{deployed.rig.node_name()}",
            {"metadata": {"annotations": {"example.com/other": "x"}}},
        )


def _event(node: str, **changes: Any) -> dict[str, Any]:
    """An event as the agent on ``node`` writes it, about that node."""
    return {
        "metadata": {"generateName": "vgpu-agent."},
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node},
        "reason": "Test",
        "message": "a test",
        "type": "Normal",
        "source": {"component": "vgpu-agent", "host": node},
        "reportingComponent": "vgpu-agent",
        "reportingInstance": node,
        **changes,
    }


def test_events_can_be_written_and_counted(deployed: Deployed, agent: Api) -> None:
    """Create, then patch the count."""
    made = agent.post("/api/v1/namespaces/default/events", _event(deployed.rig.node_name()))
    path = f"/api/v1/namespaces/default/events/{made['metadata']['name']}"
    assert agent.patch(path, {"count": 2})["count"] == 2


def test_a_stolen_token_cannot_forge_or_change_the_events_of_others(
    deployed: Deployed, agent: Api
) -> None:
    """Events are what administrators and their tools act upon: each is signed with its writer's
    node, and others' stay as they are.
    """
    rig, path = deployed.rig, "/api/v1/namespaces/default/events"
    node = rig.node_name()
    forged = [
        _event(node, source={"component": "kubelet", "host": node}),
        _event(node, source={"component": "vgpu-agent", "host": _OTHER_NODE}),
        _event(node, reportingComponent="kubelet"),
        _event(node, involvedObject={"apiVersion": "v1", "kind": "Node", "name": _OTHER_NODE}),
        _event(
            node,
            involvedObject={
                "apiVersion": "v1",
                "kind": "Secret",
                "name": "a",
                "namespace": "default",
            },
        ),
    ]
    # The API server takes a moment to enforce a new policy.
    rig.wait_for(
        lambda: _status(agent, "POST", path, forged[0]) == 403, 20, what="the policy of events"
    )
    assert [_status(agent, "POST", path, event) for event in forged] == [403] * len(forged)
    kubelets = rig.api.post(
        path,
        _event(node, source={"component": "kubelet", "host": node}, reportingComponent="kubelet"),
    )
    theirs = f"{path}/{kubelets['metadata']['name']}"
    signature = {
        "source": {"component": "vgpu-agent", "host": node},
        "reportingComponent": "vgpu-agent",
        "reportingInstance": node,
    }
    assert _status(agent, "PATCH", theirs, {"message": "all is well"}) == 403
    assert _status(agent, "PATCH", theirs, {"message": "all is well", **signature}) == 403


def test_the_eviction_component_grants_evictions_and_nothing_else(
    deployed: Deployed, agent: Api
) -> None:
    """With it, the token can evict a pod. The deletion itself is the API server's."""
    rig = deployed.rig
    rights = (MANIFESTS / "components" / "eviction" / "rbac.yaml").read_text()
    rig.kubectl("apply", "-f", "-", stdin=rights)
    try:
        rig.create_pod(pod("evicted"))
        rig.wait_for_phase("evicted", "Running")
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": "evicted", "namespace": "default"},
        }
        path = "/api/v1/namespaces/default/pods/evicted"
        rig.wait_for(
            lambda: _status(agent, "POST", f"{path}/eviction", eviction) in {200, 404},
            10,
            what="the eviction",
        )
        rig.wait_for(lambda: rig.pod("evicted") is None, 20, what="the end of the evicted pod")
        assert _status(agent, "DELETE", path) == 403
    finally:
        rig.kubectl("delete", "-f", "-", "--wait=true", stdin=rights)


# Resources of a node as the kubelet has left them, and what the token may do to each.
_LEFT = {
    "nvidia.com/vgpu-number": "20",
    "nvidia.com/vgpu-cores": "0",
    "nvidia.com/vgpu-memory": "0",
    "nvidia.com/mig-1g.5gb": "0",
    "nvidia.com/mig-2g.10gb": "1",
}
_Counts = dict[str, str | None]
_STATUS_PATCHES: list[tuple[_Counts, _Counts, bool]] = [
    # what is set as the capacity, what as allocatable, and whether that is allowed
    ({}, {"nvidia.com/vgpu-number": "10"}, True),
    ({}, {"nvidia.com/vgpu-number": "20"}, True),
    ({}, {"nvidia.com/vgpu-number": "21"}, False),
    ({"nvidia.com/vgpu-number": "21"}, {}, False),
    ({"nvidia.com/vgpu-number": None}, {"nvidia.com/vgpu-number": None}, False),
    ({"nvidia.com/mig-2g.10gb": None}, {"nvidia.com/mig-2g.10gb": None}, False),
    ({"nvidia.com/vgpu-cores": "100"}, {}, False),
    ({"nvidia.com/vgpu-cores": None}, {"nvidia.com/vgpu-cores": None}, True),
    ({"nvidia.com/vgpu-memory": None}, {"nvidia.com/vgpu-memory": None}, True),
    ({"nvidia.com/mig-1g.5gb": None}, {"nvidia.com/mig-1g.5gb": None}, True),
]


def test_the_policy_lets_counts_go_down_and_leftovers_go(deployed: Deployed, agent: Api) -> None:
    """vgpu-manager §2.2: what is no longer offered leaves the Node's status. What the kubelet has
    counted is never more for it, nor taken away.
    """
    written = {"capacity": _LEFT, "allocatable": _LEFT}
    bodies = [
        ({"capacity": capacity, "allocatable": allocatable}, allowed)
        for capacity, allocatable, allowed in _STATUS_PATCHES
    ]
    assert _misjudged(deployed, agent, written, bodies) == []
