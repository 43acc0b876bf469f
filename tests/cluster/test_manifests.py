"""The agent as it is deployed: the image that scripts/image builds, the manifests as they are, a real API server that enforces the rights.

The DaemonSet's pod runs on simulated GPUs, and the folders of the backend hami-core lie in a temporary folder instead of in /usr of the
machine that runs the tests; everything that says how the agent may run and what it may do stays as it is in manifests/.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.cluster.agents import GPU, kubelets_view, visible, wait_allocatable
from tests.cluster.rig import Rig, images
from tests.cluster.rig.api import Api, ApiError
from tests.cluster.rig.manifests import pod
from vgpu_agent.sim.build import build
from vgpu_agent.sim.state import SimulatedNode

_PROJECT = Path(__file__).resolve().parents[2]
_MANIFESTS = _PROJECT / "manifests"
_COMPONENTS = sorted(path.name for path in (_MANIFESTS / "components").iterdir())
_NAMESPACE = "vgpu-agent"
_CONFIG_MAP = "volcano-vgpu-device-config"
_OTHER_NODE = "another-node"
_MERGE = "application/merge-patch+json"

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


def test_the_api_server_accepts_every_manifest(rig: Rig) -> None:
    """``kubectl apply -k manifests`` with strict validation creates all objects; a second time nothing changes."""
    try:
        created = rig.kubectl("apply", "-k", str(_MANIFESTS), "--validate=strict").splitlines()
        assert {line.split("/")[0].split(".")[0] for line in created} >= {
            "namespace",
            "serviceaccount",
            "clusterrole",
            "role",
            "configmap",
            "daemonset",
            "validatingadmissionpolicy",
        }
        assert [line for line in created if not line.endswith("created")] == []
        again = rig.kubectl("apply", "-k", str(_MANIFESTS), "--validate=strict").splitlines()
        assert [line for line in again if not line.endswith("unchanged")] == []
        daemon_set = json.loads(rig.kubectl("get", "daemonset", "vgpu-agent", "-n", _NAMESPACE, "-o", "json"))
        # A node without the labels of a GPU gets no pod.
        assert daemon_set["status"].get("desiredNumberScheduled", 0) == 0
    finally:
        rig.kubectl("delete", "-k", str(_MANIFESTS), "--ignore-not-found", "--wait=true")


# ---------------------------------------------------------------- the agent as it is deployed


class Deployed(NamedTuple):
    """A rig on whose node the DaemonSet's pod is Ready, and the folder of the node in which simulated GPUs and hami-core's files lie."""

    rig: Rig
    folder: Path


def _kustomized(rig: Rig, folder: Path, components: list[str]) -> list[dict[str, Any]]:
    """The objects of the base with more ``components``, as a user's own kustomization beside it would have them."""
    relative = os.path.relpath(_MANIFESTS, folder.resolve())
    kustomization = {"resources": [relative], "components": [f"{relative}/components/{name}" for name in components]}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return list(yaml.safe_load_all(rig.kubectl("kustomize", str(folder))))


def _on_simulated_gpus(objects: list[dict[str, Any]], folder: Path) -> None:
    """Simulated GPUs; libvgpu.so out of busybox's image, which has a shell; hami-core's folders inside ``folder``."""
    (daemon_set,) = [each for each in objects if each["kind"] == "DaemonSet"]
    daemon_set["spec"]["minReadySeconds"] = 0
    spec = daemon_set["spec"]["template"]["spec"]
    (agent,) = spec["containers"]
    agent["args"] += ["--simulate", str(folder / "gpus")]
    agent["env"].append({"name": "XDG_CACHE_HOME", "value": str(folder / "cache")})
    agent["volumeMounts"].append({"name": "simulation", "mountPath": str(folder)})
    (library,) = spec["initContainers"]
    library.update(image=images.BUSYBOX, imagePullPolicy="Never", env=[{"name": "LIBRARY", "value": "/bin/busybox"}])
    for volume in spec["volumes"]:
        if volume["name"].startswith("hami-core"):
            volume["hostPath"]["path"] = str(folder / volume["name"])
    spec["volumes"].append({"name": "simulation", "hostPath": {"path": str(folder), "type": "Directory"}})


@pytest.fixture(scope="module")
def deployed(rig: Rig) -> Iterator[Deployed]:
    """The base and hami-core, applied; gone afterwards with all it left on the node."""
    # A fixed commit: the image is built anew when what is in it changes, and not for every commit.
    command = [str(_PROJECT / "scripts" / "image"), "--commit", "test"]
    archive = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    rig.import_image(Path(archive))
    folder = Path(tempfile.mkdtemp(prefix="vgm", dir="/tmp"))
    folder.chmod(0o755)
    SimulatedNode.create(folder / "gpus", model="A100-SXM4-40GB", gpus=2)
    library = build()
    shutil.copytree(library.parent, folder / "cache" / "vgpu-agent" / "sim" / library.parent.name)
    objects = _kustomized(rig, folder, ["hami-core", "hami-core-library"])
    _on_simulated_gpus(objects, folder)
    manifest = yaml.safe_dump_all(objects)
    try:
        rig.kubectl("label", "node", rig.node_name(), "nvidia.com/gpu.present=true")
        rig.kubectl("apply", "-f", "-", stdin=manifest)
        _wait_until_rolled_out(rig)
        yield Deployed(rig, folder)
    finally:
        rig.kubectl("label", "node", rig.node_name(), "nvidia.com/gpu.present-")
        rig.kubectl("delete", "-f", "-", "--ignore-not-found", "--wait=true", stdin=manifest)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_rolled_out(rig: Rig) -> None:
    rig.kubectl("rollout", "status", "daemonset/vgpu-agent", "-n", _NAMESPACE, "--timeout=60s")


@pytest.fixture
def agent(deployed: Deployed) -> Api:
    """The API server as the pod sees it: asked with a token of its service account that is bound to it, as the kubelet's is."""
    rig = deployed.rig
    (running,) = [each for each in rig.pods(namespace=_NAMESPACE) if "deletionTimestamp" not in each["metadata"]]
    asked = rig.api.as_bearer(_token(rig, bound_to=running))
    refused = f"/api/v1/nodes/{rig.node_name()}?dryRun=All"
    # The API server takes a moment to enforce a new policy; until then this would go through.
    rig.wait_for(lambda: _status(asked, "PATCH", refused, {"metadata": {"labels": {"not": "ours"}}}) == 403, 20, what="the policy")
    return asked


def _token(rig: Rig, *, bound_to: dict[str, Any] | None = None) -> str:
    """A token of the agent's service account from the TokenRequest API, with which the kubelet fills the pod's own."""
    spec: dict[str, Any] = {"audiences": [], "expirationSeconds": 3600}
    if bound_to is not None:
        metadata = bound_to["metadata"]
        spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    token: str = rig.api.post(f"/api/v1/namespaces/{_NAMESPACE}/serviceaccounts/vgpu-agent/token", body)["status"]["token"]
    return token


def _status(api: Api, method: str, path: str, body: dict[str, Any] | None = None, content_type: str = _MERGE) -> int:
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


def test_the_daemon_set_serves_pods_with_the_rights_it_asks_for(deployed: Deployed) -> None:
    """Root without a single capability, on a read-only file system: it registers, pods run, and a rolling update loses nobody."""
    rig = deployed.rig
    wait_allocatable(rig, 2)
    rig.create_pod(pod("user", command='echo "NVIDIA_VISIBLE_DEVICES=$NVIDIA_VISIBLE_DEVICES"; sleep 100000', limits={GPU: 1}))
    rig.wait_for_phase("user", "Running")
    assert kubelets_view(rig) == {"user": [visible(rig, "user")]}

    rig.kubectl("rollout", "restart", "daemonset/vgpu-agent", "-n", _NAMESPACE)
    _wait_until_rolled_out(rig)
    wait_allocatable(rig, 2)
    # Without a shell: the image has none.
    status = rig.kubectl("exec", "-n", _NAMESPACE, "daemonset/vgpu-agent", "--", "vgpu-agent", "status")
    assert "default/user" in status
    assert "SIMULATED" in status


def test_the_pod_sees_the_nodes_folders_and_can_write_where_it_must(deployed: Deployed) -> None:
    """Each folder under its own path, the token that the API server gave, and nothing else of the container can be written."""
    probe = (
        "import os, pathlib\n"
        "for path in ('/var/run/cdi', '/var/lib/vgpu-agent', '/usr/local/vgpu', '/tmp/vgpulock', '/var/lib/kubelet/device-plugins', '/etc',"
        " '/var/lib/kubelet/pod-resources', '/config'):\n"
        "    file = pathlib.Path(path, '.probe')\n"
        "    try:\n"
        "        file.write_text('')\n"
        "        file.unlink()\n"
        "        print(path)\n"
        "    except OSError: pass\n"
        "print(len(pathlib.Path('/var/run/secrets/kubernetes.io/serviceaccount/token').read_text()) > 100)\n"
        "print(pathlib.Path('/proc/self/status').read_text().split('CapEff:')[1].split()[0], os.path.exists('/bin/sh'))\n"
    )
    said = deployed.rig.kubectl("exec", "-n", _NAMESPACE, "daemonset/vgpu-agent", "--", "python3", "-c", probe).splitlines()
    written = ["/var/run/cdi", "/var/lib/vgpu-agent", "/usr/local/vgpu", "/tmp/vgpulock", "/var/lib/kubelet/device-plugins"]
    assert said == [*written, "True", "0000000000000000 False"]


def test_the_init_container_delivers_the_library(deployed: Deployed) -> None:
    """Whole and under its name, on the node; nothing half-written stays."""
    incoming = deployed.folder / "hami-core" / "incoming"
    assert [path.name for path in incoming.iterdir()] == ["libvgpu.so"]
    assert (incoming / "libvgpu.so").stat().st_size == Path("/bin/busybox").stat().st_size


# ---------------------------------------------------------------- what its token can do, and what not


def _rights(api: Api, namespace: str) -> set[tuple[str, ...]]:
    """All that ``api``'s user may do in a namespace and beside all namespaces: (group/resource, verb), and object names behind them."""
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": namespace}}
    rules = api.post("/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", body)["status"]["resourceRules"]
    return {
        (f"{group}/{resource}".removeprefix("/"), verb, *rule.get("resourceNames", ()))
        for rule in rules
        for group, resource, verb in itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"])
    }


def test_the_token_may_do_what_is_listed_and_nothing_else(agent: Api) -> None:
    """As the API server resolves its roles, in namespaces with and without one for the agent: no further resource, verb or wildcard."""
    config_map = {("configmaps", verb, _CONFIG_MAP) for verb in ("get", "list", "watch")}
    everywhere: set[tuple[str, ...]] = _RIGHTS | _ANYBODYS
    assert _rights(agent, "default") == everywhere
    assert _rights(agent, _NAMESPACE) == everywhere
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
    ("PATCH", "/api/v1/namespaces/default/pods/{pod}/ephemeralcontainers", {"spec": {"ephemeralContainers": []}}),
    ("PATCH", "/api/v1/namespaces/default/pods/{pod}/resize", {"spec": {}}),
    ("POST", "/api/v1/namespaces/default/pods/{pod}/binding", {"target": {"kind": "Node", "name": "{node}"}}),
    ("POST", "/api/v1/namespaces/default/pods/{pod}/eviction", {"metadata": {"name": "{pod}"}}),
    ("POST", "/api/v1/namespaces/default/pods/{pod}/exec?command=true", None),
    ("GET", "/api/v1/namespaces/default/pods/{pod}/log", None),
    ("GET", "/api/v1/namespaces/default/events", None),
    ("GET", "/api/v1/namespaces/kube-system/secrets", None),
    ("GET", "/api/v1/namespaces/vgpu-agent/configmaps/vgpu-agent", None),
    ("GET", "/api/v1/namespaces/kube-system/configmaps", None),
    ("GET", "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication", None),
    ("PATCH", f"/api/v1/namespaces/kube-system/configmaps/{_CONFIG_MAP}", {"data": {"a": "b"}}),
    ("GET", f"/api/v1/namespaces/volcano-system/configmaps/{_CONFIG_MAP}", None),  # components/volcano is not in the base
    ("PATCH", "/apis/apps/v1/namespaces/vgpu-agent/daemonsets/vgpu-agent", {"metadata": {"labels": {"a": "b"}}}),
    ("POST", "/api/v1/namespaces/vgpu-agent/serviceaccounts/vgpu-agent/token", {"spec": {"audiences": []}}),
    ("PATCH", "/apis/rbac.authorization.k8s.io/v1/clusterroles/vgpu-agent", {"rules": []}),
    (
        "DELETE",
        "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/vgpu-agent-own-node-only",
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
    answers = {f"{method} {path}": _status(agent, method, _filled(path, names), _filled(body, names)) for method, path, body in _REFUSED}
    assert {row: status for row, status in answers.items() if status != 403} == {}


def test_the_reads_that_the_agent_makes_are_allowed(deployed: Deployed, agent: Api) -> None:
    """Own node and own pods by selector; the one ConfigMap by its name, whether there is one or not."""
    node = deployed.rig.node_name()
    allowed = [
        f"/api/v1/nodes/{node}",
        f"/api/v1/nodes?fieldSelector=metadata.name%3D{node}",
        f"/api/v1/nodes?fieldSelector=metadata.name%3D{node}&watch=1&timeoutSeconds=1",
        f"/api/v1/pods?fieldSelector=spec.nodeName%3D{node}",
        f"/api/v1/pods?fieldSelector=spec.nodeName%3D{node}&watch=1&timeoutSeconds=1",
        f"/api/v1/namespaces/kube-system/configmaps?fieldSelector=metadata.name%3D{_CONFIG_MAP}",
        f"/api/v1/namespaces/kube-system/configmaps?fieldSelector=metadata.name%3D{_CONFIG_MAP}&watch=1&timeoutSeconds=1",
    ]
    assert {path: _status(agent, "GET", path) for path in allowed} == dict.fromkeys(allowed, 200)
    assert _status(agent, "GET", f"/api/v1/namespaces/kube-system/configmaps/{_CONFIG_MAP}") in {200, 404}


@pytest.fixture
def another_node(deployed: Deployed) -> Iterator[str]:
    """A second Node without a kubelet, with a pod ``foreign`` bound to it."""
    api = deployed.rig.api
    api.post("/api/v1/nodes", {"metadata": {"name": _OTHER_NODE}})
    try:
        deployed.rig.create_pod(pod("foreign", nodeName=_OTHER_NODE, tolerations=[{"operator": "Exists"}]))
        yield _OTHER_NODE
    finally:
        api.delete("/api/v1/namespaces/default/pods/foreign", {"gracePeriodSeconds": 0})
        api.delete(f"/api/v1/nodes/{_OTHER_NODE}")


_OURS = {"metadata": {"annotations": {"volcano.sh/node-vgpu-handshake": "x", "vgpu-agent.internal/note": "y"}}}
_OUR_LABEL = {"metadata": {"labels": {"vgpu-agent.internal/volcano-vgpu-isolation": "none"}}}
_OUR_CAPACITY = {"status": {"capacity": {"volcano.sh/gpu-number": "2"}, "allocatable": {"volcano.sh/gpu-number": "2"}}}

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
    ("node", "/status", {"status": {"addresses": [{"type": "InternalIP", "address": "10.9.9.9"}]}}, False),
    ("other node", "", _OURS, False),
    ("other node", "", _OUR_LABEL, False),
    ("other node", "/status", _OUR_CAPACITY, False),
    ("pod", "", _OURS, True),
    ("pod", "", _OUR_LABEL, True),
    ("pod", "", {"metadata": {"labels": {"app": "x"}}}, False),
    ("pod", "", {"metadata": {"annotations": {"example.com/other": "x"}}}, False),
    ("pod", "", {"metadata": {"finalizers": ["example.com/stay"]}}, False),
    ("pod", "", {"spec": {"activeDeadlineSeconds": 1}}, False),
    ("other node's pod", "", _OURS, False),
    ("other node's pod", "", _OUR_LABEL, False),
    ("unscheduled pod", "", _OURS, False),
]


def test_the_policy_confines_each_agent_to_its_own_node_and_its_own_keys(deployed: Deployed, agent: Api, another_node: str) -> None:
    """Allowed where the pod runs, and for its own prefixes; refused for other nodes, their pods, specifications and others' keys."""
    rig = deployed.rig
    rig.create_pod(pod("own"))
    rig.create_pod(pod("unscheduled", nodeSelector={"no": "where"}))
    rig.wait_for_phase("own", "Running")
    pods = "/api/v1/namespaces/default/pods"
    paths = {
        "node": f"/api/v1/nodes/{rig.node_name()}",
        "other node": f"/api/v1/nodes/{another_node}",
        "pod": f"{pods}/own",
        "other node's pod": f"{pods}/foreign",
        "unscheduled pod": f"{pods}/unscheduled",
    }
    wrong = []
    for what, subresource, body, allowed in _PATCHES:
        answer = _status(agent, "PATCH", paths[what] + subresource, body)
        if answer != (200 if allowed else 403):
            wrong.append((what + subresource, body, answer))
    undo = dict.fromkeys(_OURS["metadata"]["annotations"])
    rig.api.patch(paths["node"], {"metadata": {"annotations": undo, "labels": {"vgpu-agent.internal/volcano-vgpu-isolation": None}}})
    capacity = {"volcano.sh/gpu-number": None}
    rig.api.patch(f"{paths['node']}/status", {"status": {"capacity": capacity, "allocatable": capacity}})
    assert wrong == []


def test_a_token_without_a_node_changes_nothing(deployed: Deployed) -> None:
    """Made by somebody who may make tokens of this account: without a pod behind it, the policy refuses every patch and says why."""
    unbound = deployed.rig.api.as_bearer(_token(deployed.rig))
    with pytest.raises(ApiError, match="does not say on which node"):
        unbound.patch(f"/api/v1/nodes/{deployed.rig.node_name()}", _OURS)


def test_a_refusal_by_the_policy_names_the_node_and_the_key(deployed: Deployed, agent: Api, another_node: str) -> None:
    """So that whoever reads the agent's log knows which rule it was."""
    with pytest.raises(ApiError, match=f"vgpu-agent on node {deployed.rig.node_name()} changes that node"):
        agent.patch(f"/api/v1/nodes/{another_node}", _OURS)
    with pytest.raises(ApiError, match=r"such as example\.com/other"):
        agent.patch(f"/api/v1/nodes/{deployed.rig.node_name()}", {"metadata": {"annotations": {"example.com/other": "x"}}})


def test_events_can_be_written_and_counted(deployed: Deployed, agent: Api) -> None:
    """Create, then patch the count."""
    involved = {"apiVersion": "v1", "kind": "Node", "name": deployed.rig.node_name()}
    event = {
        "metadata": {"generateName": "vgpu-agent."},
        "involvedObject": involved,
        "reason": "Test",
        "message": "a test",
        "type": "Normal",
    }
    made = agent.post("/api/v1/namespaces/default/events", event)
    path = f"/api/v1/namespaces/default/events/{made['metadata']['name']}"
    assert agent.patch(path, {"count": 2})["count"] == 2


def test_every_component_builds_and_is_accepted(deployed: Deployed, tmp_path: Path) -> None:
    """All of them at once, on top of the base, checked by the API server; and what they add is what they say."""
    rig = deployed.rig
    # own-node-only is in the base already, and the same object twice is an error.
    objects = _kustomized(rig, tmp_path, [name for name in _COMPONENTS if name != "own-node-only"])
    rig.api.post("/api/v1/namespaces", {"metadata": {"name": "volcano-system"}})
    try:
        rig.kubectl("apply", "-f", "-", "--dry-run=server", "--validate=strict", stdin=yaml.safe_dump_all(objects))
    finally:
        rig.api.delete("/api/v1/namespaces/volcano-system")
    found = {(each["kind"], each["metadata"]["name"], each["metadata"].get("namespace", "")) for each in objects}
    assert found >= {
        ("ClusterRole", "vgpu-agent-eviction", ""),
        ("Role", "vgpu-agent", "volcano-system"),
        ("Role", "vgpu-agent", "kube-system"),
        ("ValidatingAdmissionPolicy", "vgpu-agent-own-node-only", ""),
    }


def test_the_eviction_component_grants_evictions_and_nothing_else(deployed: Deployed, agent: Api) -> None:
    """With it, the token can evict a pod; the deletion itself is the API server's."""
    rig = deployed.rig
    rights = (_MANIFESTS / "components" / "eviction" / "rbac.yaml").read_text()
    rig.kubectl("apply", "-f", "-", stdin=rights)
    try:
        rig.create_pod(pod("evicted"))
        rig.wait_for_phase("evicted", "Running")
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "evicted", "namespace": "default"}}
        path = "/api/v1/namespaces/default/pods/evicted"
        rig.wait_for(lambda: _status(agent, "POST", f"{path}/eviction", eviction) in {200, 404}, 10, what="the eviction")
        rig.wait_for(lambda: rig.pod("evicted") is None, 20, what="the end of the evicted pod")
        assert _status(agent, "DELETE", path) == 403
    finally:
        rig.kubectl("delete", "-f", "-", "--wait=true", stdin=rights)


_SHARING = """\
version: v1
families: {nvidia: false, volcanoVgpu: true}
volcanoVgpu: {isolation: none}
cluster: {withdrawAtStop: true}
"""
_OF_THE_AGENT = ("volcano.sh/", "vgpu-agent.internal/")


def _left_on_the_node(rig: Rig) -> dict[str, str]:
    metadata = rig.api.get(f"/api/v1/nodes/{rig.node_name()}")["metadata"]
    keys = {**metadata.get("annotations", {}), **metadata["labels"]}
    return {key: value for key, value in keys.items() if key.startswith(_OF_THE_AGENT)}


def test_a_removal_leaves_nothing_on_the_node_but_the_farewell(deployed: Deployed) -> None:
    """docs/operations.md, Remove: with the rights it has until its end, the agent takes its annotations and labels off.

    The last test of this file, because the agent is gone afterwards.
    """
    rig = deployed.rig
    path = f"/api/v1/namespaces/{_NAMESPACE}/configmaps/vgpu-agent"
    rig.api.patch(path, {"data": {"config.yaml": _SHARING}}, content_type=_MERGE)
    rig.kubectl("rollout", "restart", "daemonset/vgpu-agent", "-n", _NAMESPACE)
    _wait_until_rolled_out(rig)
    assert {"vgpu-agent.internal/volcano-vgpu-isolation", "volcano.sh/node-vgpu-register"} < _left_on_the_node(rig).keys()

    rig.kubectl("delete", "daemonset", "vgpu-agent", "-n", _NAMESPACE, "--cascade=foreground")
    rig.wait_for(lambda: not rig.pods(namespace=_NAMESPACE), 40, what="the agent's end")
    ((key, value),) = _left_on_the_node(rig).items()
    assert key == "volcano.sh/node-vgpu-handshake"
    assert value.startswith("Deleted_")
