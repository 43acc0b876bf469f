"""Helm and kustomize on the chart and the manifests, and a form in which both can be compared."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.real_node.rig import build

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
CHART = MANIFESTS / "chart"
KUBE_VERSION = "1.36.3"
_HELMS_LABELS = frozenset(
    {
        "helm.sh/chart",
        "app.kubernetes.io/instance",
        "app.kubernetes.io/version",
        "app.kubernetes.io/managed-by",
    }
)
# Lists that Kubernetes itself merges by a key, so that their order says nothing. Init containers
# run in their order, but none of ours needs another one.
_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
}

Objects = dict[tuple[str, str, str], Any]


class HelmError(Exception):
    """Helm refused; the message is what it printed."""


def helm() -> str:
    """The path of Helm, which conftest.py has had built."""
    return str(build.ensure(build.HELM, lambda _: None) / "helm")


def template(
    *arguments: str,
    name: str = "vgpu-agent",
    namespace: str = "vgpu-agent",
    chart: Path = CHART,
) -> Objects:
    """Render the chart, without its test and without a cluster.

    Raises:
        HelmError: the schema or a template refuses the values.
    """
    command = [helm(), "template", name, str(chart), "--namespace", namespace, "--skip-tests"]
    result = subprocess.run(
        [*command, "--kube-version", KUBE_VERSION, *arguments],
        text=True,
        capture_output=True,
        check=False,
    )
    if result.returncode:
        raise HelmError(result.stderr)
    return by_identity(_documents(result.stdout))


def kustomized(folder: Path) -> Objects:
    """Build a folder with kubectl's kustomize."""
    kubectl = build.ensure(build.KUBERNETES, lambda _: None) / "kubernetes"
    command = [str(kubectl), "kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, check=True, text=True, capture_output=True)
    return by_identity(_documents(done.stdout))


def _documents(text: str) -> Any:
    # The parser in C where there is one: the other takes longer than Helm and kustomize.
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load_all(text, Loader=loader)


def by_identity(documents: Any) -> Objects:
    """Every object by kind, namespace and name; none twice."""
    found: Objects = {}
    for each in documents:
        if each is None:
            continue
        metadata = each["metadata"]
        identity = (each["kind"], metadata.get("namespace", ""), metadata["name"])
        assert identity not in found, identity
        found[identity] = each
    return found


def compared(value: Any, key: str = "") -> Any:
    """An object as it is compared: without what Helm adds for itself, with lists that Kubernetes
    merges by a key as mappings, and with the text of a configuration file read.
    """
    if isinstance(value, dict):
        return {
            name: compared(part, name)
            for name, part in value.items()
            if name not in _HELMS_LABELS and name != "checksum/config"
        }
    if isinstance(value, list):
        if key == "ports":  # of a container, a Service or a NetworkPolicy
            return sorted((compared(each) for each in value), key=str)
        if key in _KEYS:
            named = {each[_KEYS[key]]: compared(each) for each in value}
            assert len(named) == len(value), f"{key} has a name twice"
            return named
        return [compared(each) for each in value]
    return yaml.safe_load(value) if key in {"config.yaml", "policy.json"} else value
