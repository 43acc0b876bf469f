"""The manifests and the chart as they are on a real API server, on a node without the labels of a
GPU: what is accepted, and that Helm takes over what kustomize has installed.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.manifests.test_old_schedulers import OLD as OLD_SCHEDULERS
from tests.real_node.deployment import MANIFESTS, NAMESPACE, kustomized, room_for_components
from tests.real_node.helm import CHART, KUBE_VERSION, helm
from tests.real_node.rig import Rig
from vgpu_agent import __version__

_COMPONENTS = sorted(path.name for path in (MANIFESTS / "components").iterdir())
_RELEASE = ["vgpu-agent", "--namespace", NAMESPACE]


class Applied(NamedTuple):
    """A rig with the base, and what kubectl said about each object."""

    rig: Rig
    created: list[str]

    def helm(self, command: str, *arguments: str) -> None:
        """Run Helm on the cluster."""
        kubeconfig = ["--kubeconfig", str(self.rig.layout.kubeconfig())]
        call = self.rig.in_network(helm(), *command.split(), *_RELEASE, *arguments, *kubeconfig)
        subprocess.run(call, check=True, capture_output=True)


@pytest.fixture(scope="module")
def applied(rig: Rig) -> Iterator[Applied]:
    """``kubectl apply -k manifests``, and nothing of it afterwards."""
    try:
        said = rig.kubectl("apply", "-k", str(MANIFESTS), "--validate=strict")
        yield Applied(rig, said.splitlines())
    finally:
        rig.kubectl("delete", "-k", str(MANIFESTS), "--ignore-not-found", "--wait=true")


def test_the_api_server_accepts_every_manifest(applied: Applied) -> None:
    """With strict validation all objects are created. A second time nothing changes."""
    assert {line.split("/")[0].split(".")[0] for line in applied.created} >= {
        "namespace",
        "serviceaccount",
        "clusterrole",
        "role",
        "configmap",
        "daemonset",
        "validatingadmissionpolicy",
    }
    assert [line for line in applied.created if not line.endswith("created")] == []
    rig = applied.rig
    again = rig.kubectl("apply", "-k", str(MANIFESTS), "--validate=strict").splitlines()
    assert [line for line in again if not line.endswith("unchanged")] == []
    daemon_set = json.loads(
        rig.kubectl("get", "daemonset", "vgpu-agent", "-n", NAMESPACE, "-o", "json")
    )
    # A node without the labels of a GPU gets no pod.
    assert daemon_set["status"].get("desiredNumberScheduled", 0) == 0


def _all_of_kustomize(rig: Rig, folder: Path) -> str:
    # own-node-only is in the base already, and the same object twice is an error. Those for old
    # schedulers exclude each other, and this API server has no policy/v1beta1.
    left_out = {"own-node-only", *OLD_SCHEDULERS}
    objects = kustomized(rig, folder, [name for name in _COMPONENTS if name not in left_out])
    found = {
        (each["kind"], each["metadata"]["name"], each["metadata"].get("namespace", ""))
        for each in objects
    }
    assert found >= {
        ("ClusterRole", "vgpu-agent-eviction", ""),
        ("Role", "vgpu-agent", "volcano-system"),
        ("Role", "vgpu-agent", "kube-system"),
        ("ValidatingAdmissionPolicy", "vgpu-agent-own-node-only", ""),
    }
    return yaml.safe_dump_all(objects)


def _all_of_the_chart(folder: Path) -> str:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    every = {
        "components": dict.fromkeys(values["components"], True),
        "images": {name: {"repository": "registry.example/x"} for name in values["images"]},
    }
    (folder / "every.yaml").write_text(yaml.safe_dump(every))
    command = [helm(), "template", "every", str(CHART), "--namespace", NAMESPACE]
    return subprocess.run(
        [*command, "--kube-version", KUBE_VERSION, "--values", str(folder / "every.yaml")],
        check=True,
        text=True,
        capture_output=True,
    ).stdout


def test_every_component_is_accepted_from_kustomize_and_from_the_chart(
    applied: Applied, tmp_path: Path
) -> None:
    """All of them at once, on top of the base, checked strictly by the API server, which knows
    every field; and what they add is what they say.
    """
    manifests = [_all_of_kustomize(applied.rig, tmp_path), _all_of_the_chart(tmp_path)]
    strictly = ["apply", "-f", "-", "--dry-run=server", "--validate=strict"]
    with room_for_components(applied.rig):
        for manifest in manifests:
            applied.rig.kubectl(*strictly, stdin=manifest)


def test_helm_takes_over_what_kustomize_has_installed(applied: Applied) -> None:
    """With the same names and selectors, by the commands of docs/operations.md; no field is
    immutable between both.
    """
    rig = applied.rig
    built = rig.kubectl("kustomize", str(MANIFESTS))
    marks = ["meta.helm.sh/release-name=vgpu-agent", f"meta.helm.sh/release-namespace={NAMESPACE}"]
    rig.kubectl("annotate", "-f", "-", "--overwrite", *marks, stdin=built)
    mark = "app.kubernetes.io/managed-by=Helm"
    rig.kubectl("label", "-f", "-", "--overwrite", mark, stdin=built)
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/vgpu-agent"
    before = rig.api.get(path)["metadata"]["uid"]
    try:
        applied.helm("upgrade --install", str(CHART))
        after = rig.api.get(path)["metadata"]
        assert after["uid"] == before
        assert after["labels"]["helm.sh/chart"] == f"vgpu-agent-{__version__}"
    finally:
        applied.helm("uninstall", "--ignore-not-found")
