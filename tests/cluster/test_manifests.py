"""The manifests against a real API server: it takes them as they are, and the role grants what stands in it and nothing more."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.agents import GPU, kubelets_view, visible, wait_allocatable
from tests.cluster.rig import Rig, images
from tests.cluster.rig.manifests import pod
from vgpu_agent.sim.build import build
from vgpu_agent.sim.state import SimulatedNode

_PROJECT = Path(__file__).resolve().parents[2]
_MANIFESTS = _PROJECT / "manifests"
_IMAGE = "rig.test/vgpu-agent:1"
_NAMESPACE = "vgpu-agent"


def test_the_api_server_accepts_every_manifest(rig: Rig) -> None:
    """``kubectl apply -k manifests`` with strict validation creates all objects; a second time nothing changes."""
    try:
        created = rig.kubectl("apply", "-k", str(_MANIFESTS), "--validate=strict").splitlines()
        assert {line.split("/")[0].split(".")[0] for line in created} >= {
            "namespace",
            "serviceaccount",
            "clusterrole",
            "configmap",
            "daemonset",
        }
        assert [line for line in created if not line.endswith("created")] == []
        again = rig.kubectl("apply", "-k", str(_MANIFESTS), "--validate=strict").splitlines()
        # kubectl cannot tell the role's empty list of rules from none, and calls it configured each time.
        assert [line for line in again if not line.endswith("unchanged") and "clusterrole." not in line] == []
        daemon_set = json.loads(rig.kubectl("get", "daemonset", "vgpu-agent", "-n", _NAMESPACE, "-o", "json"))
        # A node without the labels of a GPU gets no pod.
        assert daemon_set["status"].get("desiredNumberScheduled", 0) == 0
        may = rig.kubectl("auth", "can-i", "--list", f"--as=system:serviceaccount:{_NAMESPACE}:vgpu-agent", "-n", _NAMESPACE)
        resources = {line.split()[0] for line in may.splitlines()[1:] if line and not line.startswith(("[", " "))}
        assert not resources & {"pods", "nodes", "secrets", "configmaps", "*.*"}
    finally:
        rig.kubectl("delete", "-k", str(_MANIFESTS), "--ignore-not-found", "--wait=true")


@pytest.fixture
def host_folder() -> Iterator[Path]:
    """A folder of the host that pods can mount: simulated GPUs and the library below them, built beforehand."""
    folder = Path(tempfile.mkdtemp(prefix="vgm", dir="/tmp"))
    folder.chmod(0o755)
    SimulatedNode.create(folder / "gpus", model="A100-SXM4-40GB", gpus=2)
    library = build()
    shutil.copytree(library.parent, folder / "cache" / "vgpu-agent" / "sim" / library.parent.name)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _on_simulated_gpus(objects: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The manifests with another image and simulated GPUs; everything that says how the agent may run stays as it is."""
    for each in objects:
        if each["kind"] != "DaemonSet":
            continue
        spec = each["spec"]["template"]["spec"]
        (agent,) = spec["containers"]
        agent.update(image=_IMAGE, imagePullPolicy="Never", command=["/bin/python3", "-m", "vgpu_agent"])
        agent["args"] = [*agent["args"], "--simulate", str(folder / "gpus")]
        agent["env"] = [*agent["env"], {"name": "XDG_CACHE_HOME", "value": str(folder / "cache")}]
        agent["volumeMounts"].append({"name": "simulation", "mountPath": str(folder)})
        spec["volumes"].append({"name": "simulation", "hostPath": {"path": str(folder), "type": "Directory"}})
        each["spec"]["minReadySeconds"] = 0
    return objects


def test_the_daemon_set_serves_pods_with_the_rights_it_asks_for(rig: Rig, host_folder: Path, tmp_path: Path) -> None:
    """Root without a single capability, on a read-only file system: it registers, pods run, and a rolling update loses nobody."""
    images.write_python_image(tmp_path / "agent.tar", _IMAGE, [_PROJECT / "vgpu_agent"])
    rig.import_image(tmp_path / "agent.tar")
    objects = _on_simulated_gpus(list(yaml.safe_load_all(rig.kubectl("kustomize", str(_MANIFESTS)))), host_folder)
    manifest = yaml.safe_dump_all(objects)
    try:
        rig.kubectl("label", "node", rig.node_name(), "nvidia.com/gpu.present=true")
        rig.kubectl("apply", "-f", "-", stdin=manifest)
        rig.kubectl("rollout", "status", "daemonset/vgpu-agent", "-n", _NAMESPACE, "--timeout=60s")
        wait_allocatable(rig, 2)
        rig.create_pod(pod("user", command='echo "NVIDIA_VISIBLE_DEVICES=$NVIDIA_VISIBLE_DEVICES"; sleep 100000', limits={GPU: 1}))
        rig.wait_for_phase("user", "Running")
        assert kubelets_view(rig) == {"user": [visible(rig, "user")]}

        rig.kubectl("rollout", "restart", "daemonset/vgpu-agent", "-n", _NAMESPACE)
        rig.kubectl("rollout", "status", "daemonset/vgpu-agent", "-n", _NAMESPACE, "--timeout=60s")
        wait_allocatable(rig, 2)
        status = rig.kubectl("exec", "-n", _NAMESPACE, "daemonset/vgpu-agent", "--", "/bin/python3", "-m", "vgpu_agent", "status")
        assert "default/user" in status
        assert "SIMULATED" in status
    finally:
        rig.kubectl("label", "node", rig.node_name(), "nvidia.com/gpu.present-")
        rig.kubectl("delete", "-f", "-", "--ignore-not-found", "--wait=true", stdin=manifest)
