"""The manifests against a real API server: it takes them as they are, and the role grants what stands in it and nothing more."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cluster.rig import Rig

_MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
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
