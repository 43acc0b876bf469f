"""components/scheduler on a real API server: its objects are accepted, kube-scheduler takes its
configuration, both containers get along with the rights of their account, and the second replica
takes over in time.

Two pods are made of the Deployment's template. No node runs them: their containers run here as
processes, with their arguments, variables, host names and the token of their account.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.bench.processors import REFERENCE_SECONDS, seconds_for_additions
from tests.real_node.deployment import NAMESPACE, kustomized
from tests.real_node.rig import Rig
from tests.real_node.scheduler.checker import judge
from tests.real_node.scheduler.objects import add_nodes, create, mixed_pods
from tests.real_node.scheduler.processes import PORT, Bound, Extender, KubeScheduler

pytestmark = pytest.mark.alone

_NAME = "vgpu-scheduler"
_LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{_NAME}"
_POD_PATH = f"/api/v1/namespaces/{NAMESPACE}/pods"
_ROLE = "vgpu-manager.io/scheduler-role"
_REPLICAS = (f"{_NAME}-one", f"{_NAME}-two")
_NODES, _PODS = 20, 60
_TAKEOVER_SECONDS = 5.0
_PATIENCE_SECONDS = 90


class _Deployed:
    """The component's objects in a cluster, and access with the token of its account."""

    def __init__(self, rig: Rig, objects: list[dict[str, Any]], kubeconfig: Path) -> None:
        self.rig, self.kubeconfig = rig, kubeconfig
        named = {(each["kind"], each["metadata"]["name"]): each for each in objects}
        self.configuration = yaml.safe_load(named["ConfigMap", _NAME]["data"]["config.yaml"])
        self._template = named["Deployment", _NAME]["spec"]["template"]
        self.containers = {each["name"]: each for each in self._template["spec"]["containers"]}

    def create(self, pod: str) -> None:
        """Create a pod of the Deployment's template."""
        metadata = {**self._template["metadata"], "name": pod}
        body = {"apiVersion": "v1", "kind": "Pod", **self._template, "metadata": metadata}
        self.rig.api.post(_POD_PATH, body)

    def holder(self) -> str:
        """The name of the pod that holds the Lease; empty for none."""
        lease = self.rig.api.find(_LEASE) or {"spec": {}}
        return str(lease["spec"].get("holderIdentity") or "").partition("_")[0]

    def roles(self) -> dict[str, str]:
        """Pod → the role that its label says."""
        return {
            name: self.rig.api.get(f"{_POD_PATH}/{name}")["metadata"]["labels"].get(_ROLE, "")
            for name in _REPLICAS
        }


class _Scheduler(KubeScheduler):
    """The container kube-scheduler of one pod."""

    def __init__(self, deployed: _Deployed, pod: str, port: int) -> None:
        super().__init__(deployed.rig, port)
        self._deployed, self._pod = deployed, pod

    def configuration(self) -> dict[str, Any]:
        """Return the ConfigMap's configuration with this pod's port. A second pod on this machine
        needs another port.
        """
        found: dict[str, Any] = json.loads(json.dumps(self._deployed.configuration))
        (extender,) = found["extenders"]
        assert f":{PORT}/" in extender["urlPrefix"]
        extender["urlPrefix"] = extender["urlPrefix"].replace(f":{PORT}/", f":{self._port}/")
        found["clientConnection"]["kubeconfig"] = str(self._deployed.kubeconfig)
        return found

    def command(self) -> list[str]:
        """With the pod's host name, by which it is known in the Lease."""
        script = f'hostname {self._pod} && exec "$@"'
        return ["unshare", "--uts", "sh", "-c", script, "sh", *super().command()]


class _Extender(Extender):
    """The container extender of one pod."""

    def __init__(self, deployed: _Deployed, pod: str, port: int) -> None:
        arguments = list(deployed.containers["extender"]["args"])
        probes = arguments.index("--probe-bind-port") + 1
        arguments[probes] = str(int(arguments[probes]) + port - PORT)
        super().__init__(
            deployed.rig,
            *arguments[1:],
            *("--kubeconfig", str(deployed.kubeconfig)),  # the last one counts
            port=port,
            environment={"POD_NAME": pod, "POD_NAMESPACE": NAMESPACE},
        )


@pytest.fixture
def deployed(plane: Rig, tmp_path: Path) -> Iterator[_Deployed]:
    """The component without the agent, applied; gone afterwards."""
    objects = [
        each
        for each in kustomized(plane, tmp_path, ["scheduler"])
        if each["metadata"].get("labels", {}).get("app.kubernetes.io/name") == _NAME
        or each["kind"] == "Namespace"
    ]
    manifest = yaml.safe_dump_all(objects)
    try:
        plane.kubectl("apply", "--validate=strict", "-f", "-", stdin=manifest)
        access = json.loads(plane.layout.kubeconfig().read_text())
        access["users"][0]["user"] = {"token": _token(plane)}
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(json.dumps(access))
        found = _Deployed(plane, objects, kubeconfig)
        for name in _REPLICAS:
            found.create(name)
        yield found
    finally:
        plane.kubectl("delete", "-f", "-", "--ignore-not-found", "--wait=false", stdin=manifest)


def _token(rig: Rig) -> str:
    account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{_NAME}"
    spec = {"audiences": [], "expirationSeconds": 3600}
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    return str(rig.api.post(f"{account}/token", body)["status"]["token"])


@contextlib.contextmanager
def _running(deployed: _Deployed, pod: str, port: int) -> Iterator[tuple[_Extender, _Scheduler]]:
    """The containers of one pod."""
    with _Extender(deployed, pod, port) as extender, _Scheduler(deployed, pod, port) as scheduler:
        yield extender, scheduler


def test_two_replicas_with_the_rights_of_their_account_and_one_takes_over(
    deployed: _Deployed,
) -> None:
    """Pods are placed by the leader. It is killed (kill -9), and the other one goes on within five
    seconds. Nothing is refused for a missing right.
    """
    rig = deployed.rig
    add_nodes(rig, range(_NODES))
    with contextlib.ExitStack() as running, Bound(rig) as bound:
        pairs = {
            name: running.enter_context(_running(deployed, name, PORT + 10 * place))
            for place, name in enumerate(_REPLICAS)
        }
        leader = rig.wait_for(deployed.holder, _PATIENCE_SECONDS, what="a holder of the Lease")
        (other,) = set(_REPLICAS) - {leader}
        first = create(rig, mixed_pods("first", _PODS))
        pairs[leader][1].wait("all pods to be bound", lambda: bound.number(first) == _PODS)
        rig.wait_for(
            lambda: deployed.roles() == {leader: "leader", other: "follower"} or None,
            _PATIENCE_SECONDS,
            what="the labels",
        )
        assert pairs[other][0].metric("vgpu_scheduler_leader") == 0
        second = create(rig, mixed_pods("second", _PODS, 17))
        for program in pairs[leader]:
            program.kill()
        killed = time.monotonic()
        rig.wait_for(
            lambda: deployed.holder() == other or None, _PATIENCE_SECONDS, what="the other one"
        )
        takeover = time.monotonic() - killed
        last = bound.wait(second, timeout=_PATIENCE_SECONDS) - killed
        verdict = judge(rig.api.get("/api/v1/nodes")["items"], rig.pods())
        logs = [
            program.log.read_text(errors="replace") for pair in pairs.values() for program in pair
        ]
    print(f"takeover after {takeover:.1f} s, last pod after {last:.1f} s")  # noqa: T201 - the figure
    assert verdict.problems == []
    assert sorted(verdict.bound) == sorted([*first, *second])
    refused = [line for text in logs for line in text.splitlines() if "forbidden" in line.lower()]
    assert refused == []
    assert takeover <= _TAKEOVER_SECONDS * max(1.0, seconds_for_additions() / REFERENCE_SECONDS)
