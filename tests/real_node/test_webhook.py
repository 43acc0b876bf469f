"""The webhook as a real API server calls it: by the component's objects, with the component's
rights, over TLS with a certificate that it has made.

The process runs on the host, in the rig's network. There is no kube-proxy, so it listens at the
address of the Service itself, at a port of its own: the API server has 443 of all addresses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.real_node.deployment import MANIFESTS, MERGE, PROJECT, kustomized
from tests.real_node.rig import ApiError, Rig, running_rig

NAME = "vgpu-agent-webhook"
NAMESPACE = "vgpu-agent"
PORT = 9443
NUMBER, CORES = "nvidia.com/vgpu-number", "nvidia.com/vgpu-cores"
PODS = "/api/v1/namespaces/default/pods"
CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1"
FORGED = {"nvidia.com/pre-allocated": "main[0_GPU-1_100_1]", "nvidia.com/predicate-node": "n"}
INIT = {"name": "init", "image": "none", "resources": {"limits": {NUMBER: "1"}}}
# Applied by one test only: without a kube-proxy, the API server does not reach the pods.
_LEFT_OUT = ("Deployment", "PodDisruptionBudget")


class Hooked(NamedTuple):
    """A cluster whose API server calls the webhook."""

    rig: Rig
    manifest: str
    process: subprocess.Popen[bytes]
    log: Path
    address: str
    objects: list[dict[str, Any]]

    def create(self, name: str, *, path: str = PODS, **pod: Any) -> Any:
        """Create a pod that asks for one GPU, with more fields of ``spec`` and ``metadata``."""
        limits = pod.pop("limits", {NUMBER: "1"})
        container = {"name": "main", "image": "none", "resources": {"limits": limits}}
        metadata = {"name": name, **pod.pop("metadata", {})}
        spec = {"containers": [container], **pod.pop("spec", {})}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        return self.rig.api.post(path, body)


def _kubeconfig(rig: Rig, folder: Path) -> Path:
    """A kubeconfig with a token of the component's account."""
    account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{NAME}/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = rig.api.post(account, request)["status"]["token"]
    config = yaml.safe_load(rig.layout.kubeconfig().read_text())
    config["users"] = [{"name": NAME, "user": {"token": token}}]
    for context in config["contexts"]:
        context["context"]["user"] = NAME
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def hooked(cluster_available: None) -> Iterator[Hooked]:
    """The component applied, and one replica that the API server trusts."""
    with running_rig() as rig, tempfile.TemporaryDirectory(prefix="vgw", dir="/tmp") as name:
        folder = Path(name)
        every = [
            one
            for one in kustomized(rig, folder, ["webhook"])
            if one["kind"] == "Namespace" or one["metadata"]["name"] == NAME
        ]
        objects = [one for one in every if one["kind"] not in _LEFT_OUT]
        for one in objects:
            for webhook in one.get("webhooks", ()):
                webhook["clientConfig"]["service"]["port"] = PORT
            if one["kind"] == "Service":
                one["spec"]["ports"][0]["port"] = PORT
        manifest = yaml.safe_dump_all(objects)
        rig.kubectl("apply", "--validate=strict", "-f", "-", stdin=manifest)
        service = rig.api.get(f"/api/v1/namespaces/{NAMESPACE}/services/{NAME}")
        address = service["spec"]["clusterIP"]
        subprocess.run(
            rig.in_network("ip", "address", "add", f"{address}/32", "dev", "lo"), check=True
        )
        command = [
            *rig.in_network(sys.executable, "-m", "vgpu_agent", "webhook"),
            f"--certificate-secret={NAME}",
            "--scheduler-name=vgpu-scheduler",
            "--default-device-policy=binpack",
            f"--namespace={NAMESPACE}",
            f"--bind-address={address}",
            f"--server-bind-port={PORT}",
            "--drain-seconds=0",
            f"--kubeconfig={_kubeconfig(rig, folder)}",
        ]
        log = folder / "log"
        with log.open("wb") as file:
            environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
            process = subprocess.Popen(command, stderr=file, env=environment)
        found = Hooked(rig, manifest, process, log, f"{address}:{PORT}", every)
        try:
            rig.wait_for(lambda: _is_called(found), what="a call of the webhook")
            yield found
        finally:
            process.terminate()
            process.wait(timeout=20)
            print(log.read_text())  # noqa: T201 - pytest shows it with a failure


def _is_called(hooked: Hooked) -> bool:
    """Tell whether the API server calls, by a pod that is not stored."""
    assert hooked.process.poll() is None, hooked.log.read_text()
    created = hooked.create("probe", path=f"{PODS}?dryRun=All")
    return bool(created["spec"]["schedulerName"] == "vgpu-scheduler")


def test_a_pod_is_completed_and_brings_no_state(hooked: Hooked) -> None:
    """The API server takes the patch, and copies the limit to the request; vgpu-manager:D16."""
    labels = {"nvidia.com/assigned-phase": "succeed", "app": "x"}
    created = hooked.create("plain", metadata={"annotations": FORGED, "labels": labels})
    assert created["metadata"]["annotations"] == {"nvidia.com/device-scheduler-policy": "binpack"}
    assert created["metadata"]["labels"] == {"app": "x"}
    assert created["spec"]["schedulerName"] == "vgpu-scheduler"
    (container,) = created["spec"]["containers"]
    assert container["resources"] == {
        "limits": {NUMBER: "1", CORES: "100"},
        "requests": {NUMBER: "1", CORES: "100"},
    }


def _reviews(hooked: Hooked) -> int:
    """The number of reviews that the webhook has answered."""
    code = (
        "import ssl, sys, urllib.request as r; c = ssl._create_unverified_context(); "
        "sys.stdout.write(r.urlopen(sys.argv[1], context=c).read().decode())"
    )
    command = hooked.rig.in_network(sys.executable, "-c", code, f"https://{hooked.address}/metrics")
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [line for line in text.splitlines() if line.startswith("vgpu_agent_webhook_reviews")]
    return sum(int(line.split()[-1]) for line in lines)


@pytest.mark.parametrize(
    ("pod", "reviews"),
    [
        ({"limits": {"cpu": "1"}}, 0),
        ({"limits": {}, "metadata": {"labels": {"app": "x"}}}, 0),
        # once the state is off, nothing is left to be checked
        ({"limits": {}, "metadata": {"annotations": FORGED}}, 1),
        ({"limits": {}, "metadata": {"labels": {"nvidia.com/assigned-phase": "x"}}}, 1),
        ({"limits": {CORES: "5"}}, 2),
        ({"limits": {}, "spec": {"initContainers": [INIT]}}, 2),
    ],
)
def test_only_pods_that_concern_it_are_sent(
    hooked: Hooked, pod: dict[str, Any], reviews: int
) -> None:
    """So an outage costs all others nothing."""
    before = _reviews(hooked)
    created = hooked.create("some", path=f"{PODS}?dryRun=All", **pod)
    assert not created["metadata"].get("annotations", {}).keys() & FORGED.keys()
    assert "nvidia.com/assigned-phase" not in created["metadata"].get("labels", {})
    # perhaps once more, where another admission plugin changed the pod in between
    assert (_reviews(hooked) - before >= reviews) if reviews else (_reviews(hooked) == before)


def test_a_number_of_zero_becomes_one_in_both_places(hooked: Hooked) -> None:
    """The API server has copied the zero already, and refuses a request that differs."""
    created = hooked.create("zero", limits={NUMBER: "0", CORES: "10"})
    (container,) = created["spec"]["containers"]
    assert container["resources"]["requests"] == {NUMBER: "1", CORES: "10"}


def test_a_pod_that_can_never_run_is_refused_with_the_sentence(hooked: Hooked) -> None:
    """The user reads the sentence, because kubectl prints the API server's message."""
    with pytest.raises(ApiError) as caught:
        hooked.create("wrong", limits={NUMBER: "1", CORES: "101"})
    assert caught.value.status == 403
    assert str(caught.value).endswith(
        'admission webhook "validate.pods.vgpu-agent.internal" denied the request: pod '
        "default/wrong, container main: nvidia.com/vgpu-cores is '101'; expected percent of each "
        "GPU's compute, 0 to 100"
    )


def test_a_pod_that_names_its_node_goes_through_a_scheduler(hooked: Hooked) -> None:
    """The API server accepts the affinity, beside one that is there."""
    zone = {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}
    required = {"nodeSelectorTerms": [zone]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    node = hooked.rig.node_name()
    created = hooked.create("pinned", spec={"nodeName": node, "affinity": affinity})
    assert "nodeName" not in created["spec"]
    ((term,),) = created["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ].values()
    by_name = {"key": "metadata.name", "operator": "In", "values": [node]}
    assert term == {**zone, "matchFields": [by_name]}


def test_state_that_comes_later_stays(hooked: Hooked) -> None:
    """Schedulers and agents write it."""
    hooked.create("later")
    patched = hooked.rig.api.patch(
        f"{PODS}/later", {"metadata": {"annotations": FORGED}}, content_type=MERGE
    )
    assert patched["metadata"]["annotations"].items() >= FORGED.items()


def test_a_namespace_can_opt_out_and_a_pod_only_of_defaults(hooked: Hooked) -> None:
    """vgpu-manager §4.1."""
    label = {"vgpu-manager.io/ignore-webhook": "true"}
    created = hooked.create("apart", metadata={"annotations": FORGED, "labels": label})
    assert created["spec"]["schedulerName"] == "default-scheduler"
    assert not created["metadata"].get("annotations")
    namespace = {"metadata": {"name": "apart", "labels": label}}
    hooked.rig.api.post("/api/v1/namespaces", namespace)
    path = "/api/v1/namespaces/apart/pods"
    hooked.rig.wait_for(
        lambda: hooked.rig.api.exists("/api/v1/namespaces/apart/serviceaccounts/default"),
        what="the account of a new namespace",
    )
    created = hooked.create("apart", path=path, metadata={"annotations": FORGED})
    assert created["metadata"]["annotations"] == FORGED


def test_the_bundle_outlives_that_the_component_is_applied_again(hooked: Hooked) -> None:
    """And so does the certificate: the manifests say nothing about either."""
    secret = f"/api/v1/namespaces/{NAMESPACE}/secrets/{NAME}"
    paths = [
        f"{CONFIGURATIONS}/{kind}webhookconfigurations/{NAME}"
        for kind in ("mutating", "validating")
    ]
    before = [hooked.rig.api.get(path) for path in paths]
    data = hooked.rig.api.get(secret)["data"]
    assert set(data) == {"ca.crt", "ca.key", "tls.crt", "tls.key"}
    for one in before:
        (webhook,) = one["webhooks"]
        assert webhook["clientConfig"]["caBundle"] == data["ca.crt"]
    hooked.rig.kubectl("apply", "-f", "-", stdin=hooked.manifest)
    assert [hooked.rig.api.get(path)["webhooks"] for path in paths] == [
        one["webhooks"] for one in before
    ]
    assert hooked.rig.api.get(secret)["data"] == data


def test_the_deployment_becomes_ready(hooked: Hooked) -> None:
    """The pods run as a user without rights on the node, with the certificate that another replica
    has made.
    """
    command = [str(PROJECT / "scripts" / "image"), "--commit", "test"]
    archive = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    hooked.rig.import_image(Path(archive))
    objects = [one for one in hooked.objects if one["kind"] in _LEFT_OUT]
    # A component beside the base is not changed by the base's images.
    (image,) = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())["images"]
    for one in objects:
        for container in one["spec"].get("template", {"spec": {}})["spec"].get("containers", ()):
            container["image"] = f"{image['newName']}:{image['newTag']}"
    manifest = yaml.safe_dump_all(objects)
    hooked.rig.kubectl("apply", "--validate=strict", "-f", "-", stdin=manifest)
    try:
        hooked.rig.kubectl(
            "rollout", "status", f"deployment/{NAME}", "-n", NAMESPACE, "--timeout=90s"
        )
        pods = hooked.rig.pods(namespace=NAMESPACE)
        assert [len(pod["status"]["containerStatuses"]) for pod in pods] == [1, 1]
        assert {pod["status"]["containerStatuses"][0]["restartCount"] for pod in pods} == {0}
    finally:
        hooked.rig.kubectl("delete", "-f", "-", "--wait=true", stdin=manifest)


def test_an_outage_stops_nothing(hooked: Hooked) -> None:
    """The last test of this file, because the webhook is gone afterwards."""
    hooked.process.terminate()
    assert hooked.process.wait(timeout=20) == 0
    created = hooked.create("alone", limits={NUMBER: "1", CORES: "101"})
    assert created["spec"]["schedulerName"] == "default-scheduler"
