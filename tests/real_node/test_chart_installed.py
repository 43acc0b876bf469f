"""The Helm chart on a real API server, under another name and in another namespace than those of
the manifests: install, test, upgrade and uninstall.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.real_node.agents import GPU, wait_allocatable
from tests.real_node.deployment import MERGE, PROJECT, simulated_node
from tests.real_node.helm import CHART, helm
from tests.real_node.rig import Rig
from tests.real_node.rig.api import ApiError
from tests.real_node.rig.manifests import pod
from vgpu_agent import __version__

RELEASE, NAMESPACE = "gpus", "gpu-system"
NAME = "gpus-vgpu-agent"
_CLUSTER_WIDE = (
    "clusterroles,clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings"
)


class Installed(NamedTuple):
    """A rig on whose node the release's agent is ready, and the post-renderer that puts it onto
    simulated GPUs.
    """

    rig: Rig
    renderer: Path

    def helm(self, command: str, *arguments: str) -> str:
        """Run Helm on the release; returns what it prints."""
        call = self.rig.in_network(
            *(helm(), *command.split(), RELEASE, *arguments, "--namespace", NAMESPACE),
            *("--kubeconfig", str(self.rig.layout.kubeconfig())),
        )
        result = subprocess.run(call, text=True, capture_output=True, check=False)
        assert result.returncode == 0, result.stderr + result.stdout
        return result.stdout

    def apply(self, command: str, *arguments: str) -> None:
        """Install, upgrade or roll back, and wait until the agent is ready. Helm's own --wait ends
        at once where maxUnavailable allows for the only node.
        """
        self.helm(command, *arguments)
        status = ["rollout", "status", f"daemonset/{NAME}", "-n", NAMESPACE, "--timeout=90s"]
        self.rig.kubectl(*status)

    def install(self, command: str, chart: Path, *arguments: str) -> None:
        """Install or upgrade to ``chart``, on simulated GPUs."""
        self.apply(command, str(chart), "--post-renderer", str(self.renderer), *arguments)

    def agent(self) -> str:
        """The uid of the only pod of the agent."""
        (uid,) = [
            each["metadata"]["uid"]
            for each in self.rig.pods(namespace=NAMESPACE)
            if each["metadata"]["labels"]["app.kubernetes.io/name"] == NAME
            and "deletionTimestamp" not in each["metadata"]
        ]
        return str(uid)

    def chart(self) -> str:
        """Name and version of the chart from which the DaemonSet is."""
        path = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/{NAME}"
        return str(self.rig.api.get(path)["metadata"]["labels"]["helm.sh/chart"])

    def wait_for_settings(self) -> None:
        """Have the kubelet bring a changed ConfigMap now, and not with the next round of a minute:
        any change of the pod makes it look.
        """
        for each in self.rig.pods(namespace=NAMESPACE):
            name = each["metadata"]["name"]
            self.rig.kubectl("annotate", "pod", name, "-n", NAMESPACE, "--overwrite", "look=now")
        wait_allocatable(self.rig, 6, timeout=120)

    def replicas(self, number: int) -> list[str]:
        """Arguments that share each GPU between ``number`` containers."""
        sharing = {"timeSlicing": {"resources": [{"name": GPU, "replicas": number}]}}
        values = self.renderer.parent / "values.yaml"
        values.write_text(yaml.safe_dump({"settings": {"version": "v1", "sharing": sharing}}))
        return ["--values", str(values)]


@pytest.fixture(scope="module")
def installed(rig: Rig) -> Iterator[Installed]:
    """The release, and nothing of it afterwards."""
    with simulated_node(rig) as folder:
        renderer = folder / "renderer"
        renderer.write_text(
            f"#!/bin/sh\ncd {PROJECT}\n"
            f"exec {sys.executable} -m tests.real_node.simulated_renderer {folder}\n"
        )
        renderer.chmod(0o755)
        release = Installed(rig, renderer)
        try:
            release.install("install", CHART, "--create-namespace")
            yield release
        finally:
            release.helm("uninstall", "--ignore-not-found", "--wait")
            rig.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=true")


def test_the_notes_say_what_to_do_next(installed: Installed) -> None:
    """The commands in them, under the names of this release."""
    notes = installed.helm("get notes")
    assert f"helm test {RELEASE} -n {NAMESPACE}" in notes
    command = f"kubectl -n {NAMESPACE} exec daemonset/{NAME} -- vgpu-agent status"
    assert command in notes
    waiting = (*command.split()[1:], "--wait", "ready")  # status 0 although a problem remains
    assert "SIMULATED" in installed.rig.kubectl(*waiting)


def test_the_policy_confines_the_account_of_this_release(installed: Installed) -> None:
    """The account has another name and namespace than the kustomization's, and is refused another
    node all the same.
    """
    rig = installed.rig
    (running,) = [
        each
        for each in rig.pods(namespace=NAMESPACE)
        if each["metadata"]["uid"] == installed.agent()
    ]
    reference = {"apiVersion": "v1", "kind": "Pod", "name": running["metadata"]["name"]}
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {
            "audiences": [],
            "boundObjectRef": {**reference, "uid": running["metadata"]["uid"]},
        },
    }
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{NAME}/token"
    agent = rig.api.as_bearer(rig.api.post(path, body)["status"]["token"])
    rig.api.post("/api/v1/nodes", {"metadata": {"name": "another-node"}})
    annotation = {"metadata": {"annotations": {"volcano.sh/node-vgpu-register": "x"}}}
    try:
        agent.patch(f"/api/v1/nodes/{rig.node_name()}?dryRun=All", annotation, content_type=MERGE)
        with pytest.raises(ApiError, match="changes that node") as refused:
            agent.patch("/api/v1/nodes/another-node?dryRun=All", annotation, content_type=MERGE)
    finally:
        rig.api.delete("/api/v1/nodes/another-node")
    assert refused.value.status == 403


def test_an_upgrade_of_settings_replaces_no_pod_and_one_of_the_version_keeps_running_pods(
    installed: Installed, tmp_path: Path
) -> None:
    """The agent follows its file. With another version every label and the template change, and no
    field that is immutable; and so with a rollback.
    """
    rig, before = installed.rig, installed.agent()
    wait_allocatable(rig, 2)
    installed.install("upgrade", CHART, *installed.replicas(3))
    installed.wait_for_settings()
    assert installed.agent() == before

    rig.create_pod(pod("user", limits={GPU: 1}))
    rig.wait_for_phase("user", "Running")
    newer = tmp_path / "chart"
    shutil.copytree(CHART, newer)
    text = (newer / "Chart.yaml").read_text()
    (newer / "Chart.yaml").write_text(text.replace(__version__, "9.9.9"))
    # The image of that version is not there, so the tag stays.
    changed = ["--set", f"image.tag={__version__}", "--set", "podAnnotations.changed=yes"]
    installed.install("upgrade", newer, *installed.replicas(3), *changed)
    assert installed.chart() == "vgpu-agent-9.9.9"
    assert installed.agent() != before
    wait_allocatable(rig, 6)
    where = ("exec", "-n", NAMESPACE, f"daemonset/{NAME}", "--")
    status = rig.kubectl(*where, "vgpu-agent", "status", "--wait", "ready")
    assert "default/user" in status

    installed.apply("rollback")
    assert installed.chart() == f"vgpu-agent-{__version__}"
    wait_allocatable(rig, 6)


def test_a_release_offers_gpus_and_its_test_gets_one(installed: Installed) -> None:
    """`helm test` is the proof that a new user runs. It stands behind the upgrades: until the agent
    knows that its pod has ended, an id that this held would delay new numbers of ids.
    """
    said = installed.helm("test", "--logs", "--timeout", "90s")
    assert "Phase:          Succeeded" in said
    assert "NVIDIA_VISIBLE_DEVICES: GPU-" in said
    (test_pod,) = [
        each
        for each in installed.rig.pods(namespace=NAMESPACE)
        if each["metadata"]["name"] == f"{NAME}-test"
    ]
    assert test_pod["status"]["phase"] == "Succeeded"
    installed.rig.delete_pod(f"{NAME}-test", namespace=NAMESPACE)


def test_an_uninstall_leaves_nothing(installed: Installed) -> None:
    """Nothing of what Helm knows is left. It is the last test of this file, because the release is
    gone afterwards.
    """
    installed.helm("uninstall", "--wait")
    rig = installed.rig
    selector = f"app.kubernetes.io/instance={RELEASE}"
    left = rig.kubectl("get", _CLUSTER_WIDE, "-l", selector, "-o", "name")
    left += rig.kubectl(
        "get", "all,configmaps,roles,rolebindings", "-A", "-l", selector, "-o", "name"
    )
    assert left == ""
